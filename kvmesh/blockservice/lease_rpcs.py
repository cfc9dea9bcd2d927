"""NodeStore over gRPC: leases to readers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from kvmesh.blockservice.leasing import Leased
from kvmesh.blockservice.partitions import Partition, size_of
from kvmesh.blockservice.rpc_checks import MS, ServedNode, keys_in, lease_ms_in, patience_s
from kvmesh.blockservice.shard_wire import to_wire
from kvmesh.clock import lease_clock_ns
from kvmesh.errors import InvalidRequest, KvmeshError, Overloaded, UnknownInstance
from kvmesh.kvcache.tiers import Tier
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.telemetry import names

MAX_LEASES = 16_384
MAX_RELEASED = 1024  # beside the first of a call
STAGE_S = 1.0  # that a lease may wait for blocks to come from below DRAM
SUM_S = 10.0


class LeaseRpcs:
    """Part of NodeStoreServicer."""

    _node: ServedNode
    _lease_clock_ns: Callable[[], int] = staticmethod(lease_clock_ns)

    async def Lease(self, request: pb.LeaseRequest, context: Any) -> pb.LeaseResponse:  # noqa: N802
        """Raises InvalidRequest, UnknownInstance (another life of the holder), Overloaded; Unavailable: no checksums in
        time."""
        node = self._node
        keys = keys_in(request.keys)
        lease_ms = lease_ms_in(request.lease_ms, node.max_lease_ms)
        if request.holder_incarnation != node.ref.incarnation:
            raise UnknownInstance(
                f"holder_incarnation={request.holder_incarnation}: this is another life of {node.ref.instance_id}",
                field="holder_incarnation",
            )
        # Keys say which blocks: whoever knows one of them means ours, however it is cut.
        cut = next((own for own in node.partitions.all() if own.shards), None) if request.any_cut else None
        layout = cut.layout if cut is not None else request.layout
        tiers = await node.stage(keys, layout, patience_s(context, STAGE_S))
        if node.leasing.open >= MAX_LEASES:
            raise Overloaded(f"{MAX_LEASES} leases are open here", retry_after_ms=lease_ms)
        lease = node.leasing.lease(layout, keys, lease_ms * MS, self._lease_clock_ns())
        if not lease.lease_id:
            return pb.LeaseResponse(held=bytes(len(keys)))
        node.leases_changed()
        names.NODE_LEASES_GIVEN.inc()
        places = [place for place in lease.places if place is not None]
        held = [key for key, place in zip(keys, lease.places, strict=True) if place is not None]
        sizes = [size_of(partition, key) for (partition, _), key in zip(places, held, strict=True)]
        answer = pb.LeaseResponse(
            lease_id=lease.lease_id,
            lease_ms=lease_ms,
            held=bytes(place is not None for place in lease.places),
            tiers=bytes(
                tiers.get(key, Tier.DRAM) if place else 0 for key, place in zip(keys, lease.places, strict=True)
            ),
            nbytes=sizes,
            removed_seq=node.removals.reached,  # no turn of the loop since the lease
        )
        for rank, (name, descriptor) in enumerate(node.segments):
            answer.ranks.add(
                rank=rank,
                segment=name,
                segment_descriptor=descriptor if request.want_descriptors else b"",
                offset=[partition.offset(rank, extent) for partition, extent in places],
            )
        if cut is not None:
            for answered, shard in zip(answer.ranks, to_wire(cut.shards), strict=True):
                answered.layout.CopyFrom(shard)
        if request.want_checksums:
            await self._sum(answer, lease, places, sizes)
        return answer

    async def _sum(
        self, answer: pb.LeaseResponse, lease: Leased, places: Sequence[tuple[Partition, int]], sizes: Sequence[int]
    ) -> None:
        """What the ranks read is under this lease: it is kept alive by nobody else yet."""
        node = self._node
        try:
            spans = [list(zip(rank.offset, sizes, strict=True)) for rank in answer.ranks]
            sums = await asyncio.gather(
                *(node.sums.sums(rank, spans[rank], SUM_S) for rank in range(len(answer.ranks)))
            )
            # Counted anew: the reader's time begins with an answer that took as long as this.
            if node.leasing.renew(lease.lease_id, answer.lease_ms * MS, self._lease_clock_ns()) is None:
                raise Overloaded("the lease ran out before its checksums were there", retry_after_ms=100)
        except KvmeshError:
            node.leasing.release(lease.lease_id)
            node.leases_changed()
            raise
        for rank, found in zip(answer.ranks, sums, strict=True):
            rank.checksum.extend(found)

    async def RenewLease(self, request: pb.RenewBlocksRequest, context: Any) -> pb.RenewBlocksResponse:  # noqa: N802
        """Raises InvalidRequest, UnknownInstance (that lease is over)."""
        node = self._node
        lease_ms = lease_ms_in(request.lease_ms, node.max_lease_ms)
        now = self._lease_clock_ns()
        until_ns = node.leasing.renew(request.lease_id, lease_ms * MS, now)
        if until_ns is None:
            raise UnknownInstance(f"lease_id={request.lease_id}: that lease is over", field="lease_id")
        node.leases_changed()
        return pb.RenewBlocksResponse(lease_ms=(until_ns - now) // MS)

    async def ReleaseLease(self, request: pb.ReleaseBlocksRequest, context: Any) -> pb.ReleaseBlocksResponse:  # noqa: N802
        """Says of each whether it was open until now; also right for one that is over. Raises InvalidRequest: too many
        in one call."""
        if len(request.also) > MAX_RELEASED:
            raise InvalidRequest(f"also: {len(request.also)} leases, at most {MAX_RELEASED} in one call", field="also")
        released = [self._node.leasing.release(lease_id) for lease_id in (request.lease_id, *request.also)]
        if any(released):
            self._node.leases_changed()
        return pb.ReleaseBlocksResponse(held=bytes(released))
