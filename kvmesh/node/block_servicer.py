"""The holder's side: NodeStore over gRPC. Every input is checked before anything is touched."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol

from kvmesh.kvcache.keys import KEY_BYTES, split
from kvmesh.kvcache.sources import PullRange
from kvmesh.kvcache.tiers import Tier
from kvmesh.node.partitions import Partition, Partitions, unused
from kvmesh.rpc.errors import InvalidRequest, Overloaded, UnknownInstance
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import blocks_pb2_grpc as pb_grpc
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.telemetry import names

SERVICE = "kvmesh.v1.NodeStore"
MAX_KEYS = 65_536
MAX_LEASES = 16_384
MAX_PULLS = 16  # at others' wish, at once
MAX_HOLDERS = 64
MAX_LAYOUT = 1024
MAX_TIMEOUT_MS = 60_000
MS = 1_000_000
STAGE_S = 2.0  # what a slow disk has not brought by then is not held


class Node(Protocol):
    """What the servicer needs of `Blocks`."""

    partitions: Partitions
    max_lease_ms: int

    @property
    def ref(self) -> pb_common.InstanceRef: ...

    @property
    def segments(self) -> Sequence[tuple[str, bytes]]:
        """(name, descriptor) of each rank."""

    def leases_changed(self) -> None: ...

    async def stage(self, keys: Sequence[bytes], layout: str, timeout_s: float) -> dict[bytes, Tier]:
        """Make leasable what lies below DRAM; in which tier each block was found."""

    def pull_for(
        self, keys: Sequence[bytes], ranges: Sequence[PullRange], layout: str, shard_bytes: int, timeout_ms: int
    ) -> Awaitable[Partition]: ...

    @property
    def counters(self) -> pb.GetNodeStoreResponse: ...

    @property
    def announced_seq(self) -> int: ...


class NodeStoreServicer(pb_grpc.NodeStoreServicer):
    """One node's. Errors are named ones; a refused call has changed nothing."""

    def __init__(self, node: Node, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._node = node
        self._clock_ns = clock_ns
        self._pulls = 0

    async def Lease(self, request: pb.LeaseRequest, context: Any) -> pb.LeaseResponse:  # noqa: N802
        """Raises InvalidRequest, UnknownInstance (another life of the holder), Overloaded."""
        node = self._node
        keys = _keys(request.keys)
        lease_ms = _lease_ms(request.lease_ms, node.max_lease_ms)
        if request.holder_incarnation != node.ref.incarnation:
            raise UnknownInstance(
                f"holder_incarnation={request.holder_incarnation}: this is another life of {node.ref.instance_id}",
                field="holder_incarnation",
            )
        tiers = await node.stage(keys, request.layout, STAGE_S)
        partition = node.partitions.get(request.layout)
        if partition is None:
            return pb.LeaseResponse(held=bytes(len(keys)))
        if _leases(node) >= MAX_LEASES:
            raise Overloaded(f"{MAX_LEASES} leases are open here", retry_after_ms=lease_ms)
        lease = partition.store.lease(keys, lease_ms * MS, self._clock_ns())
        if not lease.lease_id:
            return pb.LeaseResponse(held=bytes(len(keys)))
        node.leases_changed()
        names.NODE_LEASES_GIVEN.inc()
        extents = [extent for extent in lease.extents if extent is not None]
        ranks = [
            pb.LeasedRank(
                rank=rank,
                segment=name,
                segment_descriptor=descriptor if request.want_descriptors else b"",
                offset=[partition.offset(rank, extent) for extent in extents],
            )
            for rank, (name, descriptor) in enumerate(node.segments)
        ]
        held = bytes(extent is not None for extent in lease.extents)
        served = bytes(tiers.get(key, Tier.DRAM) if here else 0 for key, here in zip(keys, held, strict=True))
        return pb.LeaseResponse(lease_id=lease.lease_id, lease_ms=lease_ms, held=held, ranks=ranks, tiers=served)

    async def RenewLease(self, request: pb.RenewBlocksRequest, context: Any) -> pb.RenewBlocksResponse:  # noqa: N802
        """Raises InvalidRequest, UnknownInstance (that lease is over)."""
        node = self._node
        lease_ms = _lease_ms(request.lease_ms, node.max_lease_ms)
        now = self._clock_ns()
        for partition in node.partitions.all():
            until_ns = partition.store.renew(request.lease_id, lease_ms * MS, now)
            if until_ns is not None:
                node.leases_changed()
                return pb.RenewBlocksResponse(lease_ms=(until_ns - now) // MS)
        raise UnknownInstance(f"lease_id={request.lease_id}: that lease is over", field="lease_id")

    async def ReleaseLease(self, request: pb.ReleaseBlocksRequest, context: Any) -> pb.ReleaseBlocksResponse:  # noqa: N802
        """Also right for one that is over."""
        for partition in self._node.partitions.all():
            if partition.store.unlease(request.lease_id):
                self._node.leases_changed()
                break
        return pb.ReleaseBlocksResponse()

    async def Pull(self, request: pb.PullBlocksRequest, context: Any) -> pb.PullBlocksResponse:  # noqa: N802
        """Raises InvalidRequest, Overloaded. Blocks that could not be had are simply not held afterwards."""
        node = self._node
        keys = _keys(request.keys)
        layout = _layout(request.layout)
        if not 0 < request.timeout_ms <= MAX_TIMEOUT_MS:
            raise InvalidRequest.of("timeout_ms", request.timeout_ms, f"must be in 1..{MAX_TIMEOUT_MS}")
        ranges = _ranges(request.holders, len(keys), node.ref.instance_id)
        if self._pulls >= MAX_PULLS:
            raise Overloaded(f"{MAX_PULLS} pulls are running here", retry_after_ms=100)
        self._pulls += 1
        pull = asyncio.ensure_future(node.pull_for(keys, ranges, layout, request.shard_bytes, request.timeout_ms))
        pull.add_done_callback(self._pull_ended)
        partition = await asyncio.shield(pull)  # it goes on, and counts, though its caller has hung up
        return pb.PullBlocksResponse(held=bytes(partition.store.holds(key) for key in keys))

    def _pull_ended(self, pull: asyncio.Future[Partition]) -> None:
        self._pulls -= 1
        if not pull.cancelled():
            pull.exception()  # heard by the caller, if there still is one

    async def ListBlocks(  # noqa: N802
        self, request: pb.ListBlocksRequest, context: Any
    ) -> AsyncIterator[pb.ListBlocksResponse]:
        """All keys as they are now, in messages of at most MAX_KEYS."""
        keys, seq = self._node.partitions.source.keys(), self._node.announced_seq
        for start in range(0, len(keys) or 1, MAX_KEYS):
            yield pb.ListBlocksResponse(keys=b"".join(keys[start : start + MAX_KEYS]), seq=seq)

    async def GetStore(self, request: pb.GetNodeStoreRequest, context: Any) -> pb.GetNodeStoreResponse:  # noqa: N802
        """Counts of now and since the start."""
        return self._node.counters


def counted(partitions: Partitions) -> pb.GetNodeStoreResponse:
    """What can be read off the stores themselves."""
    answer = pb.GetNodeStoreResponse(capacity_bytes=partitions.capacity_bytes)
    pools = answer.pools
    for partition in partitions.all():
        stats = partition.store.stats
        answer.block_hits += stats.hits
        answer.block_misses += stats.misses
        answer.evicted += stats.evicted
        answer.leases_given += stats.leases_given
        answer.leased_blocks += stats.leased_blocks
        pools.extents_total += partition.store.total
        pools.extents_free += unused(partition) + stats.idle
        pools.store_blocks += stats.sealed
        pools.store_writing += stats.writing
        pools.store_leases += stats.leases
    return answer


def _leases(node: Node) -> int:
    return sum(partition.store.stats.leases for partition in node.partitions.all())


def _keys(packed: bytes) -> list[bytes]:
    if not packed or len(packed) % KEY_BYTES:
        raise InvalidRequest(f"keys: {len(packed)} bytes, not one or more times {KEY_BYTES}", field="keys")
    if len(packed) > MAX_KEYS * KEY_BYTES:
        raise InvalidRequest(f"keys: {len(packed) // KEY_BYTES} keys, at most {MAX_KEYS} in one call", field="keys")
    keys = split(packed)
    if len(set(keys)) != len(keys):
        raise InvalidRequest("keys: one of them stands there twice", field="keys")
    return keys


def _lease_ms(asked: int, most: int) -> int:
    if not asked:
        raise InvalidRequest.of("lease_ms", asked, "must be at least 1")
    return min(asked, most)


def _layout(layout: str) -> str:
    if not layout or len(layout) > MAX_LAYOUT:
        raise InvalidRequest.of("layout", layout, f"must have 1..{MAX_LAYOUT} characters")
    return layout


def _ranges(holders: Sequence[pb_common.InstanceRef], keys: int, own: str) -> list[PullRange]:
    if not 0 < len(holders) <= MAX_HOLDERS:
        raise InvalidRequest(f"holders: {len(holders)} of them, not 1..{MAX_HOLDERS}", field="holders")
    for holder in holders:
        if not holder.instance_id or not _dialable(holder.address):
            raise InvalidRequest.of("holders.address", holder.address, "must be host:port of a named instance")
    return [PullRange(h.instance_id, h.address, h.incarnation, 0, keys) for h in holders if h.instance_id != own]


def _dialable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and len(address) < 300 and port.isascii() and port.isdigit() and 0 < int(port) < 65536
