"""The holder's side serves NodeStore over gRPC. Every input is checked before anything is changed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from kvmesh.blockservice import puts
from kvmesh.blockservice.copies import CopyRequest
from kvmesh.blockservice.lease_spans import Ranges
from kvmesh.blockservice.leasing import Leased, LeasedObjects
from kvmesh.blockservice.object_family import family_of
from kvmesh.blockservice.partitions import Partition, Partitions, size_of, unused
from kvmesh.blockservice.peers import SERVICE, this_machine
from kvmesh.blockservice.puts import PutJob
from kvmesh.blockservice.removal_applier import SLICE
from kvmesh.blockservice.rpc_checks import (
    MAX_KEYS,
    MAX_PREFIX,
    MAX_TEXT,
    MAX_U63,
    MS,
    ServedNode,
    as_many,
    keys_in,
    layout_in,
    lease_ms_in,
    masks_in,
    order_in,
    patience_s,
    ranges_in,
    takes_more,
    within,
)
from kvmesh.blockservice.shard_wire import to_wire
from kvmesh.clock import lease_clock_ns
from kvmesh.errors import InvalidRequest, KvmeshError, Overloaded, UnknownInstance
from kvmesh.kvcache.tiers import Tier
from kvmesh.rpc import status
from kvmesh.rpc.authorisation import grpc_caller
from kvmesh.rpc.fastpath.server import FastContext, FastServer
from kvmesh.rpc.fastpath.tickets import CallerTickets
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import blocks_pb2_grpc as pb_grpc
from kvmesh.telemetry import names, spans
from kvmesh.telemetry.served import call_path, called_ns, served
from kvmesh.transfer import TrafficClass

MAX_LEASES = 16_384
MAX_RELEASED = 1024  # leases in one call, beside the first
STAGE_S = 1.0  # how long a lease or a hard pin may wait for blocks to come from below DRAM
SUM_S = 10.0
LIST_KEYS = MAX_KEYS
MAX_U32 = (1 << 32) - 1
TURN = 2048  # keys looked at in one turn of the loop
PINNED, LEASED = 1, 2  # why a removal spared a block
MAX_PULLS = 16  # pulls that others ordered, at once
MAX_PUTS = 64
MAX_TIMEOUT_MS = 60_000
MAX_DESCRIPTOR = 1 << 20
T = TypeVar("T")


class NodeStoreServicer(pb_grpc.NodeStoreServicer):
    """Serves the calls of one node. Errors are named ones; a refused call has changed nothing."""

    _lease_clock_ns: Callable[[], int] = staticmethod(lease_clock_ns)
    _clock_ns: Callable[[], int] = time.monotonic_ns
    _pulls = 0
    _puts = 0

    def __init__(self, node: ServedNode) -> None:
        self._node = node

    # ── leases to readers ───────────────────────────────────────────────────────────────────────────

    async def Lease(self, request: pb.LeaseRequest, context: Any) -> pb.LeaseResponse:  # noqa: N802
        """Leases blocks to a reader. Raises InvalidRequest, UnknownInstance (another incarnation of the holder),
        Overloaded, and Unavailable when checksums are not ready in time."""
        if not request.traceparent or not spans.is_kept(request.traceparent):
            return await self._lease(request, context)
        start_ns = called_ns(context)
        try:
            answer = await self._lease(request, context)
        except KvmeshError as error:
            self._node.lease_spans.failed(request, start_ns, str(error))
            raise
        self._node.lease_spans.given(request, answer, start_ns, self._ranges(request, answer), call_path(context))
        return answer

    async def _lease(self, request: pb.LeaseRequest, context: Any) -> pb.LeaseResponse:
        node = self._node
        keys = keys_in(request.keys)
        lease_ms = lease_ms_in(request.lease_ms, node.max_lease_ms)
        if request.holder_incarnation != node.ref.incarnation:
            raise UnknownInstance(
                f"holder_incarnation={request.holder_incarnation}: this is another life of {node.ref.instance_id}",
                field="holder_incarnation",
            )
        if request.groups:
            return await self._lease_objects(request, keys, lease_ms, patience_s(context, STAGE_S))
        if node.partitions.groups_of(request.layout):
            return pb.LeaseResponse(held=bytes(len(keys)))  # who does not name groups cannot know what a block is
        # A key names a block's content, however the block is cut into shards, so the layout asked for does not matter.
        tiers = await node.stage(keys, "" if request.any_cut else request.layout, patience_s(context, STAGE_S))
        cut = _cut_of(node.partitions, keys) if request.any_cut else None
        layout = cut.layout if cut is not None else request.layout
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

    def _ranges(self, request: pb.LeaseRequest, answer: pb.LeaseResponse) -> Ranges:
        """Returns what the answer leases, as ranges of each rank's segment."""
        partitions = self._node.partitions
        groups = {g: partitions.get(place.layout) for g, place in partitions.groups_of(request.layout).items()}
        found: Ranges = []
        for rank in answer.ranks:
            offsets, sizes = list(rank.offset), list(answer.nbytes)
            for group in rank.groups:
                partition = groups[group.group]
                offsets += group.offset
                sizes += [partition.shard_bytes if partition is not None else 0] * len(group.offset)
            found.append((tuple(offsets), tuple(sizes)))
        return found

    async def _lease_objects(
        self, request: pb.LeaseRequest, keys: Sequence[bytes], lease_ms: int, wait_s: float
    ) -> pb.LeaseResponse:
        """Leases objects of cache groups, in whatever cut this node has them. Raises as `Lease`."""
        node = self._node
        masks = masks_in(request.groups, keys)
        places = node.partitions.groups_of(request.layout)
        tiers = await node.stage_objects(keys, masks, places, wait_s)
        if node.leasing.open >= MAX_LEASES:
            raise Overloaded(f"{MAX_LEASES} leases are open here", retry_after_ms=lease_ms)
        found = {g: node.partitions.get(place.layout) for g, place in places.items()}
        parts = {g: partition for g, partition in found.items() if partition is not None}
        lease = node.leasing.lease_objects(parts, keys, masks, lease_ms * MS, self._lease_clock_ns())
        held = lease.masks(len(keys))
        answer = pb.LeaseResponse(held=bytes(map(bool, held)), held_groups=held)
        if not lease.lease_id:
            return answer
        node.leases_changed()
        names.NODE_LEASES_GIVEN.inc()
        answer.lease_id, answer.lease_ms = lease.lease_id, lease_ms
        answer.tiers = bytes(
            max((tiers.get(g, {}).get(key, Tier.DRAM) for g in lease.extents if mask >> g & 1), default=0)
            for key, mask in zip(keys, held, strict=True)
        )
        answer.removed_seq = node.removals.reached  # no turn of the loop since the lease
        for rank, (name, descriptor) in enumerate(node.segments):
            answer.ranks.add(
                rank=rank,
                segment=name,
                segment_descriptor=descriptor if request.want_descriptors else b"",
                groups=[
                    pb.LeasedGroup(
                        group=group,
                        offset=[parts[group].offset(rank, extent) for extent in extents.values()],
                        layout=to_wire(parts[group].shards[rank : rank + 1])[0],
                    )
                    for group, extents in lease.extents.items()
                    if extents
                ],
            )
        if request.want_checksums:
            await self._sum_objects(answer, lease, parts)
        return answer

    async def _sum_objects(self, answer: pb.LeaseResponse, lease: LeasedObjects, parts: dict[int, Partition]) -> None:
        """Adds the checksums of the leased objects, as `_sum` does."""
        told = [(rank.rank, group) for rank in answer.ranks for group in rank.groups]
        pieces = [(rank, [(offset, parts[group.group].shard_bytes) for offset in group.offset]) for rank, group in told]
        for (_, group), sums in zip(told, await self._summed(lease.lease_id, answer.lease_ms, pieces), strict=True):
            group.checksum.extend(sums)

    async def _sum(
        self, answer: pb.LeaseResponse, lease: Leased, places: Sequence[tuple[Partition, int]], sizes: Sequence[int]
    ) -> None:
        """Adds the checksums of the leased blocks."""
        pieces = [(rank.rank, list(zip(rank.offset, sizes, strict=True))) for rank in answer.ranks]
        sums = await self._summed(lease.lease_id, answer.lease_ms, pieces)
        for rank, found in zip(answer.ranks, sums, strict=True):
            rank.checksum.extend(found)

    async def _summed(
        self, lease_id: int, lease_ms: int, pieces: Sequence[tuple[int, list[tuple[int, int]]]]
    ) -> list[Sequence[int]]:
        """Returns the checksums of all pieces, (rank, (offset, bytes) there). The ranks read under this lease, which
        nobody else renews yet."""
        node = self._node
        try:
            sums = await asyncio.gather(*(node.sums.sums(rank, some, SUM_S) for rank, some in pieces))
            # The lease is counted anew, as the reader counts it from an answer that took as long as the checksums.
            if node.leasing.renew(lease_id, lease_ms * MS, self._lease_clock_ns()) is None:
                raise Overloaded("the lease ran out before its checksums were there", retry_after_ms=100)
        except KvmeshError:
            node.leasing.release(lease_id)
            node.leases_changed()
            raise
        return list(sums)

    async def RenewLease(self, request: pb.RenewBlocksRequest, context: Any) -> pb.RenewBlocksResponse:  # noqa: N802
        """Renews a lease. Raises InvalidRequest, or UnknownInstance when the lease is over."""
        node = self._node
        lease_ms = lease_ms_in(request.lease_ms, node.max_lease_ms)
        now = self._lease_clock_ns()
        until_ns = node.leasing.renew(request.lease_id, lease_ms * MS, now)
        if until_ns is None:
            raise UnknownInstance(f"lease_id={request.lease_id}: that lease is over", field="lease_id")
        node.leases_changed()
        granted_ms = (until_ns - now) // MS
        node.lease_spans.renewed(request.lease_id, granted_ms)
        return pb.RenewBlocksResponse(lease_ms=granted_ms)

    async def ReleaseLease(self, request: pb.ReleaseBlocksRequest, context: Any) -> pb.ReleaseBlocksResponse:  # noqa: N802
        """Ends leases, and says of each whether it was open until now; it also succeeds for one that is over. Raises
        InvalidRequest when there are too many in one call."""
        if len(request.also) > MAX_RELEASED:
            raise InvalidRequest(f"also: {len(request.also)} leases, at most {MAX_RELEASED} in one call", field="also")
        released = [self._node.leasing.release(lease_id) for lease_id in (request.lease_id, *request.also)]
        for lease_id, held in zip((request.lease_id, *request.also), released, strict=True):
            self._node.lease_spans.released(lease_id, held=held)
        if any(released):
            self._node.leases_changed()
        return pb.ReleaseBlocksResponse(held=bytes(released))

    # ── which blocks are here, removals, pins ───────────────────────────────────────────────────────

    async def Exists(self, request: pb.ExistsRequest, context: Any) -> pb.ExistsResponse:  # noqa: N802
        """Says of each block in which tier it is, its size and layout; of one that has several cache groups, which of
        its objects are in that tier, and their bytes together. Raises InvalidRequest."""
        node = self._node
        keys = keys_in(request.keys)
        layout = layout_in(request.layout, any_=True)
        layouts: dict[str, int] = {}
        answer = pb.ExistsResponse()
        tiers, pinned, groups = bytearray(), bytearray(), bytearray()
        grouped = False
        family = node.partitions.family(layout)
        for at, key in enumerate(keys):
            if at % TURN == TURN - 1:
                await asyncio.sleep(0)
                family = node.partitions.family(layout)
            found = next((found for found in family if found.store.holds(key)), None)
            mask, nbytes = 0, 0
            if found is None:
                below = node.below(layout, key)
                grouped = grouped or (below is not None and family_of(below[1]) is not None)
                mask = below[3] if below is not None else 0
            else:
                mask, nbytes = _held(family, found, key)
                below = (Tier.DRAM, found.shown_layout, nbytes, mask)
                grouped = grouped or bool(found.family)
            tiers.append(0 if below is None else below[0])
            groups.append(mask)
            answer.nbytes.append(0 if below is None else below[2])
            answer.layout.append(0 if below is None else layouts.setdefault(below[1], len(layouts)))
            if request.want_pinned:
                pinned.append(found is not None and any(p.store.pinned_hard([key])[0] for p in _kin(family, found)))
        answer.tiers, answer.pinned = bytes(tiers), bytes(pinned)
        answer.groups = bytes(groups) if grouped else b""
        answer.layouts.extend(layouts)
        return answer

    async def Touch(self, request: pb.TouchBlocksRequest, context: Any) -> pb.TouchBlocksResponse:  # noqa: N802
        """Notes reads of blocks, the most recent first; a key may come several times. Blocks that are not here are
        passed over. Raises InvalidRequest, or UnknownInstance (another incarnation)."""
        keys = keys_in(request.keys, once=False)
        layout = layout_in(request.layout, any_=True)
        own = self._node.ref
        if request.holder_incarnation != own.incarnation:
            why = f"this is another life of {own.instance_id}"
            raise UnknownInstance(f"holder_incarnation={request.holder_incarnation}: {why}", field="holder_incarnation")
        for start in reversed(range(0, len(keys), TURN)):
            for partition in self._node.partitions.family(layout):
                partition.store.read(keys[start : start + TURN])
            self._node.used(layout, keys[start : start + TURN])
            if start:
                await asyncio.sleep(0)
        return pb.TouchBlocksResponse()

    async def Remove(self, request: pb.RemoveBlocksRequest, context: Any) -> pb.RemoveBlocksResponse:  # noqa: N802
        """Removes blocks. Raises InvalidRequest, StaleTerm, or Unavailable when a lower tier could not write the
        removal: it is to be repeated then."""
        for field in ("spare_pinned", "spare_leased"):
            if getattr(request, field) and not request.keys:
                raise InvalidRequest(f"{field}: only with keys", field=field)
        if bool(request.keys) == bool(request.prefix):
            raise InvalidRequest("keys: either these or a prefix is to be named", field="keys")
        keys = keys_in(request.keys) if request.keys else []
        if len(request.prefix) > MAX_PREFIX:
            raise InvalidRequest(f"prefix: {len(request.prefix)} bytes, not 1..{MAX_PREFIX}", field="prefix")
        order_in(self._node, request.term, request.seq)
        if not (request.spare_pinned or request.spare_leased):
            removed = await self._node.removals.remove(keys, request.prefix, request.seq)
            return pb.RemoveBlocksResponse(removed=removed)
        removed, spared = 0, bytearray()
        for start in range(0, len(keys), SLICE):
            await asyncio.sleep(0)
            some = keys[start : start + SLICE]
            stay = self._sparing(some, request.spare_pinned, request.spare_leased)
            spared += stay
            last = start + SLICE >= len(keys)
            # From this look to the removal nothing else runs: no pin or lease comes in between.
            rest = [key for key, stays in zip(some, stay, strict=True) if not stays]
            removed += await self._node.removals.remove(rest, seq=request.seq if last else 0)
        return pb.RemoveBlocksResponse(removed=removed, spared=bytes(spared))

    def _sparing(self, keys: list[bytes], pinned: bool, leased: bool) -> bytearray:
        """Returns, for each key, PINNED or LEASED where it is to stay for that reason, else 0."""
        stay = bytearray(len(keys))
        for partition in self._node.partitions.all():
            held = partition.store.leased(keys) if leased else [False] * len(keys)
            hard = partition.store.pinned_hard(keys) if pinned else [False] * len(keys)
            for at, (under_lease, under_pin) in enumerate(zip(held, hard, strict=True)):
                if under_pin:
                    stay[at] = PINNED
                elif under_lease and not stay[at]:
                    stay[at] = LEASED
        return stay

    async def Pin(self, request: pb.PinBlocksRequest, context: Any) -> pb.PinBlocksResponse:  # noqa: N802
        """Pins blocks in DRAM; for a hard pin those in lower tiers are brought there first. Raises InvalidRequest,
        StaleTerm, or Overloaded when too much would be pinned hard: then none of these blocks is, except perhaps those
        of another size."""
        node = self._node
        keys = keys_in(request.keys)
        layout = layout_in(request.layout, any_=True)
        kind, ttl_ns = pin_in("kind", request.kind, "ttl_ms", request.ttl_ms)
        if kind == pb.PIN_KIND_UNSPECIFIED:
            raise InvalidRequest.of("kind", kind, "must be none, soft or hard")
        order_in(node, request.term)
        if kind == pb.PIN_KIND_HARD:
            await node.stage(keys, layout, patience_s(context, STAGE_S))
        done = bytearray(len(keys))
        wanted: list[tuple[Partition, list[int]]] = []
        for partition in node.partitions.family(layout):
            told = family_of(partition.family) if kind != pb.PIN_KIND_NONE else None
            # Of a chain only what a hit at its end needs is worth being kept.
            asked = range(len(keys)) if told is None else told.needed(partition.group, len(keys))
            mine = [at for at in asked if partition.store.holds(keys[at])]
            if mine:
                wanted.append((partition, mine))
        if kind == pb.PIN_KIND_HARD:
            groups = [(partition, [keys[at] for at in mine]) for partition, mine in wanted if partition.family]
            puts.check_pins(node.partitions, groups)
        for partition, mine in wanted:
            some = [keys[at] for at in mine]
            pinned = puts.pin(node.partitions, partition, some, kind, ttl_ns, self._lease_clock_ns())
            for at, yes in zip(mine, pinned, strict=True):
                done[at] |= yes
        node.leases_changed()
        return pb.PinBlocksResponse(done=bytes(done))

    async def ListBlocks(  # noqa: N802
        self, request: pb.ListBlocksRequest, context: Any
    ) -> AsyncIterator[pb.ListBlocksResponse]:
        """Yields all keys of all tiers as they are now, in messages of at most LIST_KEYS."""
        for tier, keys, seq, groups in self._node.listed():
            for start in range(0, len(keys) or 1, LIST_KEYS):
                some = slice(start, start + LIST_KEYS)
                yield pb.ListBlocksResponse(
                    keys=b"".join(keys[some]),
                    seq=seq,
                    tier=tier.value,  # type: ignore[arg-type]
                    groups=groups[some],
                )

    async def GetStore(self, request: pb.GetNodeStoreRequest, context: Any) -> pb.GetNodeStoreResponse:  # noqa: N802
        """Returns counts of now and since the start."""
        return self._node.counters

    async def Doors(self, request: pb.DoorsRequest, context: Any) -> pb.DoorsResponse:  # noqa: N802
        """Returns the fast paths to this incarnation."""
        return self._node.fast_paths.describe(context)

    # ── blocks that come here; what was begun goes on, and counts, even when its caller is gone ──────

    async def Pull(self, request: pb.PullBlocksRequest, context: Any) -> pb.PullBlocksResponse:  # noqa: N802
        """Pulls blocks from other nodes. Blocks that could not be had are simply not held afterwards. Raises
        InvalidRequest, Overloaded or StaleTerm."""
        node = self._node
        keys = keys_in(request.keys)
        layout = layout_in(request.layout, any_=True)
        within("timeout_ms", request.timeout_ms, 1, MAX_TIMEOUT_MS)
        ranges = ranges_in(request.holders, len(keys), node.ref.instance_id)
        order_in(node, request.term)
        takes_more(node)
        if self._pulls >= MAX_PULLS:
            raise Overloaded(f"{MAX_PULLS} pulls are running here", retry_after_ms=100)
        klass = TrafficClass.BACKGROUND if request.background else TrafficClass.PREFETCH
        if request.pins and layout:
            raise InvalidRequest.of("layout", layout, "must be empty with pins")
        masks = masks_in(request.groups, keys) if request.groups else b""
        wish = CopyRequest(
            tuple(keys), tuple(ranges), layout, request.shard_bytes, request.timeout_ms, klass, request.pins, masks
        )
        self._pulls += 1
        copied = await _outliving(node.copies.pull(wish), self._pull_ended)
        return pb.PullBlocksResponse(held=copied.held, held_groups=copied.groups)

    def _pull_ended(self) -> None:
        self._pulls -= 1

    @served(names.SPAN_PUT, lambda request: len(request.nbytes))
    async def Put(self, request: pb.PutBlocksRequest, context: Any) -> pb.PutBlocksResponse:  # noqa: N802
        """Reads blocks from the caller's memory and seals them. Raises InvalidRequest, UnknownInstance (the segment's
        descriptor is needed) or Overloaded."""
        now = self._clock_ns()
        job = self._put_in(request, now)
        takes_more(self._node)
        if self._puts >= MAX_PUTS:
            raise Overloaded(f"{MAX_PUTS} puts are running here", retry_after_ms=50)
        self._puts += 1
        held, why_not = await _outliving(self._node.puts.put(job), self._put_ended)
        answer = pb.PutBlocksResponse(held=held)
        if why_not is not None:
            answer.why_not = why_not.message
            answer.reason.CopyFrom(status.to_detail(why_not))
        return answer

    def _put_ended(self) -> None:
        self._puts -= 1
        self._node.leases_changed()  # soft pins have ends, which the timer must know even when the caller is gone

    def _put_in(self, request: pb.PutBlocksRequest, now: int) -> PutJob:
        keys = keys_in(request.keys)
        layout = layout_in(request.layout)
        if not 0 < len(request.segment) <= MAX_TEXT:
            raise InvalidRequest.of("segment", request.segment, f"must have 1..{MAX_TEXT} characters")
        if len(request.segment_descriptor) > MAX_DESCRIPTOR:
            size = len(request.segment_descriptor)
            raise InvalidRequest.of("segment_descriptor", size, f"must have at most {MAX_DESCRIPTOR} bytes")
        as_many("offset", request.offset, keys)
        as_many("nbytes", request.nbytes, keys)
        if request.checksum:
            as_many("checksum", request.checksum, keys)
        capacity = self._node.partitions.capacity_bytes
        for offset, nbytes in zip(request.offset, request.nbytes, strict=True):
            within("nbytes", nbytes, 1, capacity)
            within("offset", offset, 0, MAX_U63 - capacity)
        within("ticket_offset", request.ticket_offset, 0, MAX_U63)
        within("read_within_ms", request.read_within_ms, 1, MAX_TIMEOUT_MS)
        kind, pin_ns = pin_in("pin", request.pin, "pin_ttl_ms", request.pin_ttl_ms)
        return PutJob(
            keys=tuple(keys),
            layout=layout,
            segment=request.segment,
            descriptor=request.segment_descriptor,
            offsets=tuple(request.offset),
            sizes=tuple(request.nbytes),
            deadline_ns=now + request.read_within_ms * MS,
            pin=kind,
            pin_ns=pin_ns,
            checksums=tuple(request.checksum),
            ticket=request.ticket,
            ticket_offset=request.ticket_offset,
            removed_seq=request.removed_seq,
            removed_ns=self._lease_clock_ns() - request.removed_ago_ms * MS,
        )


def pin_in(field: str, kind: int, ttl_field: str, ttl_ms: int) -> tuple[int, int]:
    """Returns PinKind and duration in ns. Raises InvalidRequest."""
    if kind not in pb.PinKind.values():
        raise InvalidRequest.of(field, kind, "no such kind of pin")
    if kind == pb.PIN_KIND_SOFT:
        within(ttl_field, ttl_ms, 1, MAX_U32)
    return kind, ttl_ms * MS


def counted(partitions: Partitions) -> pb.GetNodeStoreResponse:
    """Returns the counts that the stores themselves have."""
    answer = pb.GetNodeStoreResponse(capacity_bytes=partitions.capacity_bytes, fragmentation=partitions.fragmentation)
    pools = answer.pools
    for partition in partitions.all():
        stats = partition.store.stats
        free = unused(partition) + stats.idle
        answer.block_hits += stats.hits
        answer.block_misses += stats.misses
        answer.evicted += stats.evicted
        answer.leases_given += stats.leases_given
        answer.leased_blocks += stats.leased_blocks
        answer.soft_pinned += stats.soft_pinned
        answer.hard_pinned += stats.hard_pinned
        pools.extents_total += partition.store.total
        pools.extents_free += free
        pools.store_blocks += stats.sealed if not partition.group else 0  # of a model of several groups: the anchors
        pools.store_writing += stats.writing
        pools.store_leases += stats.leases
        if partition.family:
            group = next((one for one in pools.groups if one.group == partition.group), None) or pools.groups.add()
            group.group = partition.group
            group.extents_total += partition.store.total
            group.extents_free += free
    return answer


def _cut_of(partitions: Partitions, keys: Sequence[bytes]) -> Partition | None:
    """Returns the partition of blocks whose cut is known that holds the most of these; None where there is none."""
    cuts = [own for own in partitions.all() if own.shards and not own.family]
    if len(cuts) < 2:
        return cuts[0] if cuts else None
    return max(cuts, key=lambda own: sum(map(own.store.holds, keys)))


def _kin(family: Sequence[Partition], found: Partition) -> list[Partition]:
    """Returns the partitions that keep the same blocks as `found`: itself, or all groups of its model."""
    return [one for one in family if one is found or (found.family and one.family == found.family)]


def _held(family: Sequence[Partition], found: Partition, key: bytes) -> tuple[int, int]:
    """Returns which objects of a block are in DRAM, and their bytes in one rank; a whole block is one object."""
    mask = nbytes = 0
    for partition in _kin(family, found):
        if partition.store.holds(key):
            mask |= 1 << partition.group
            nbytes += size_of(partition, key)
    return mask, nbytes


async def _outliving(work: Coroutine[Any, Any, T], ended: Callable[[], None]) -> T:
    """Returns the result of `work`, which goes on when its caller is cancelled. `ended` is called when it is over."""
    task = asyncio.ensure_future(work)

    def done(task: asyncio.Future[T]) -> None:
        ended()
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the caller gets it, if there still is one

    task.add_done_callback(done)
    return await asyncio.shield(task)


# ── its fast paths ──────────────────────────────────────────────────────────────────────────────────

log = logging.getLogger(__name__)


class FastPathServers:
    """Serves the fast paths to one incarnation. None is open before `open`; `close` it before what the servicer uses
    ends."""

    def __init__(self, servicer: NodeStoreServicer, life: int) -> None:
        self._server = FastServer(SERVICE, servicer, life)
        self.index_path = ""  # of the socket that hands over the index of what is sealed here
        machine, network = this_machine()
        self._told = pb.DoorsResponse(incarnation=life, machine=machine, network=network)

    async def open(self, host: str, port: int) -> None:
        """Listens at `port` (see `FastServer.open_tcp`) and at a Unix socket. Raises ConfigError when door_port is in
        use."""
        self._told.calls_port = await self._server.open_tcp(host, port)
        try:
            self._told.calls_path = await self._server.listen_unix()
        except OSError as error:
            log.warning("no door over a Unix socket: %s", error)

    @property
    def tickets(self) -> CallerTickets | None:
        """The tickets that connections must come with; None where nobody needs one."""
        return self._server.tickets

    def describe(self, context: Any) -> pb.DoorsResponse:
        """Returns what the caller of a gRPC call is told of the fast paths, with a ticket of its own where one is
        needed."""
        self._told.index_path = self.index_path
        if self.tickets is None or isinstance(context, FastContext):  # a ticket gives none: certificates do
            return self._told
        told = pb.DoorsResponse()
        told.CopyFrom(self._told)
        told.ticket = self.tickets.issue(grpc_caller(context).identities or frozenset())
        return told

    async def close(self) -> None:
        """Closes the fast paths, within a bounded time; it may be called more than once."""
        self._told.calls_path, self._told.calls_port = "", 0
        await self._server.close()
