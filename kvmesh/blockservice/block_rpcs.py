"""NodeStore over gRPC: which blocks are here, what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from kvmesh.blockservice import puts
from kvmesh.blockservice.partitions import Partitions, size_of, unused
from kvmesh.blockservice.removal_applier import SLICE
from kvmesh.blockservice.rpc_checks import (
    MAX_KEYS,
    MAX_PREFIX,
    MS,
    ServedNode,
    keys_in,
    layout_in,
    order_in,
    patience_s,
    within,
)
from kvmesh.clock import lease_clock_ns
from kvmesh.errors import InvalidRequest, UnknownInstance
from kvmesh.kvcache.tiers import Tier
from kvmesh.rpc.pb import blocks_pb2 as pb

LIST_KEYS = MAX_KEYS
MAX_U32 = (1 << 32) - 1
TURN = 2048  # keys looked at in one turn of the loop
PINNED, LEASED = 1, 2  # why a removal spared a block
STAGE_S = 1.0  # that a hard pin may wait for blocks to come from below DRAM


class BlockRpcs:
    """Part of NodeStoreServicer."""

    _node: ServedNode
    _lease_clock_ns: Callable[[], int] = staticmethod(lease_clock_ns)

    async def Exists(self, request: pb.ExistsRequest, context: Any) -> pb.ExistsResponse:  # noqa: N802
        """Raises InvalidRequest."""
        node = self._node
        keys = keys_in(request.keys)
        layout = layout_in(request.layout, any_=True)
        layouts: dict[str, int] = {}
        answer = pb.ExistsResponse()
        tiers, pinned = bytearray(), bytearray()
        family = node.partitions.family(layout)
        for at, key in enumerate(keys):
            if at % TURN == TURN - 1:
                await asyncio.sleep(0)
                family = node.partitions.family(layout)
            found = next((found for found in family if found.store.holds(key)), None)
            below = node.below(layout, key) if found is None else (Tier.DRAM, found.shown_layout, size_of(found, key))
            tiers.append(0 if below is None else below[0])
            answer.nbytes.append(0 if below is None else below[2])
            answer.layout.append(0 if below is None else layouts.setdefault(below[1], len(layouts)))
            if request.want_pinned:
                pinned.append(found is not None and found.store.pinned_hard([key])[0])
        answer.tiers, answer.pinned = bytes(tiers), bytes(pinned)
        answer.layouts.extend(layouts)
        return answer

    async def Touch(self, request: pb.TouchBlocksRequest, context: Any) -> pb.TouchBlocksResponse:  # noqa: N802
        """Once for each read; the first is the most recent. Those that are not here are passed over. Raises
        InvalidRequest, UnknownInstance (another life)."""
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
        """Raises InvalidRequest, StaleTerm; Unavailable: a lower tier could not write it down, ask again."""
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
        """Of each key: PINNED or LEASED, when such are to stay, else 0."""
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
        """Blocks in DRAM; for a hard pin those below it are brought there first. Raises InvalidRequest, StaleTerm,
        Overloaded (too much would be pinned hard: none of these is then, but perhaps those of another size)."""
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
        for partition in node.partitions.family(layout):
            mine = [at for at, key in enumerate(keys) if partition.store.holds(key)]
            if mine:
                some = [keys[at] for at in mine]
                pinned = puts.pin(node.partitions, partition, some, kind, ttl_ns, self._lease_clock_ns())
                for at, yes in zip(mine, pinned, strict=True):
                    done[at] |= yes
        node.leases_changed()
        return pb.PinBlocksResponse(done=bytes(done))

    async def ListBlocks(  # noqa: N802
        self, request: pb.ListBlocksRequest, context: Any
    ) -> AsyncIterator[pb.ListBlocksResponse]:
        """All keys of all tiers as they are now, in messages of at most LIST_KEYS."""
        for tier, keys, seq in self._node.listed():
            for start in range(0, len(keys) or 1, LIST_KEYS):
                packed = b"".join(keys[start : start + LIST_KEYS])
                yield pb.ListBlocksResponse(keys=packed, seq=seq, tier=tier.value)  # type: ignore[arg-type]

    async def GetStore(self, request: pb.GetNodeStoreRequest, context: Any) -> pb.GetNodeStoreResponse:  # noqa: N802
        """Counts of now and since the start."""
        return self._node.counters

    async def Doors(self, request: pb.DoorsRequest, context: Any) -> pb.DoorsResponse:  # noqa: N802
        """Shorter ways to this life, as many as there are."""
        return self._node.doors.told()


def pin_in(field: str, kind: int, ttl_field: str, ttl_ms: int) -> tuple[int, int]:
    """(PinKind, ns). InvalidRequest."""
    if kind not in pb.PinKind.values():
        raise InvalidRequest.of(field, kind, "no such kind of pin")
    if kind == pb.PIN_KIND_SOFT:
        within(ttl_field, ttl_ms, 1, MAX_U32)
    return kind, ttl_ms * MS


def counted(partitions: Partitions) -> pb.GetNodeStoreResponse:
    """What can be read off the stores themselves."""
    answer = pb.GetNodeStoreResponse(capacity_bytes=partitions.capacity_bytes, fragmentation=partitions.fragmentation)
    pools = answer.pools
    for partition in partitions.all():
        stats = partition.store.stats
        answer.block_hits += stats.hits
        answer.block_misses += stats.misses
        answer.evicted += stats.evicted
        answer.leases_given += stats.leases_given
        answer.leased_blocks += stats.leased_blocks
        answer.soft_pinned += stats.soft_pinned
        answer.hard_pinned += stats.hard_pinned
        pools.extents_total += partition.store.total
        pools.extents_free += unused(partition) + stats.idle
        pools.store_blocks += stats.sealed
        pools.store_writing += stats.writing
        pools.store_leases += stats.leases
    return answer
