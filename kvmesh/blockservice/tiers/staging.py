"""Blocks below DRAM that others want to lease are read into extents first, within a budget.

Past the budget a block is simply not held, and its reader computes it or asks another node.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any

from kvmesh.blockservice.partitions import Partition, Partitions
from kvmesh.blockservice.tiers.parts import TierPart
from kvmesh.blockservice.tiers.reads import Read
from kvmesh.errors import InvalidRequest, Overloaded
from kvmesh.kvcache.size_classes import size_class
from kvmesh.kvcache.tiers import Tier
from kvmesh.telemetry import names

log = logging.getLogger(__name__)

NS = 1_000_000_000

ReadFrom = Callable[[TierPart, Partition, Sequence[bytes], Sequence[int], int], Awaitable[Read]]
Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


class Staging:
    """Stages the blocks of one node. `percent` of its memory may be written to for others at once; `read`, `follow` and
    `spawn` are those of `Tiering`."""

    def __init__(
        self, partitions: Partitions, percent: int, read: ReadFrom, follow: Callable[[Partition], None], spawn: Spawn
    ) -> None:
        self._partitions = partitions
        self._percent = percent
        self._read = read
        self._follow = follow
        self._spawn = spawn
        self._staged_bytes = 0

    async def stage(
        self, parts: Sequence[TierPart], layout: str, keys: Sequence[bytes], timeout_s: float
    ) -> dict[bytes, Tier]:
        """Brings blocks that only `parts` have (the fastest tier first) into DRAM for a reader's lease, as far as
        budget and time go. Returns, for each key that is in DRAM now, where it was found. `layout` "" means any. What
        one tier fails to give, the next one is asked for. A caller that is cancelled while waiting stops nothing."""
        held = dict.fromkeys(self._in_dram(layout, keys), Tier.DRAM)
        found: dict[bytes, Tier] = {}  # where each was last asked for
        asked: set[tuple[int, bytes]] = set()
        refused: set[bytes] = set()  # keys over the budget
        deadline_ns = time.monotonic_ns() + int(timeout_s * NS)
        while (left_s := (deadline_ns - time.monotonic_ns()) / NS) > 0 or not asked:
            waits: set[asyncio.Task[None]] = set()
            taken = held.keys() | refused
            for at, part in enumerate(parts):
                below = [key for key in keys if key not in taken and key in part.contents and (at, key) not in asked]
                taken.update(below)
                asked.update((at, key) for key in below)
                waits.update(self._from(part, below, deadline_ns))
                found.update(dict.fromkeys(below, part.tier))
                refused.update(key for key in below if key not in part.staging)
            if not waits:
                break
            await asyncio.wait(waits, timeout=max(left_s, 0))
            held = {key: found.get(key, Tier.DRAM) for key in self._in_dram(layout, keys)} | held
        return held

    def _from(self, part: TierPart, keys: list[bytes], deadline_ns: int) -> set[asyncio.Task[None]]:
        """Returns the reads of these keys out of one tier, also those under way."""
        waits = {part.staging[key] for key in keys if key in part.staging}
        for partition, begun in self._begun(part, [key for key in keys if key not in part.staging]):
            task = self._spawn(self._stage(part, partition, begun, deadline_ns), "stage")
            part.staging.update(dict.fromkeys((key for key, _ in begun), task))
            waits.add(task)
        return waits

    def _in_dram(self, layout: str, keys: Sequence[bytes]) -> list[bytes]:
        stores = [partition.store for partition in self._partitions.family(layout)]
        return [key for key in keys if any(store.holds(key) for store in stores)]

    def _begun(self, part: TierPart, keys: list[bytes]) -> Iterator[tuple[Partition, list[tuple[bytes, int]]]]:
        """Yields which of these blocks are to be read now, and into which extents. Nothing is evicted for the
        others."""
        by_size: dict[int, list[bytes]] = {}
        for key in keys:
            size = part.shard_bytes or part.contents.sizes.get(key, 0)
            if size:  # unknown if the block was dropped just now
                by_size.setdefault(part.shard_bytes or size_class(size), []).append(key)
        for size, some in by_size.items():
            wanted = self._affordable(some, size)
            if not wanted:
                continue
            try:
                partition = self._partitions.room(part.layout, size, len(wanted))
            except (InvalidRequest, Overloaded) as error:
                log.info("staging: %s", error)
                continue
            self._follow(partition)
            extents = partition.begin(wanted)
            begun = [(key, extent) for key, extent in zip(wanted, extents, strict=True) if extent is not None]
            self._staged_bytes += len(begun) * partition.shard_bytes
            if begun:
                yield partition, begun

    def _affordable(self, keys: list[bytes], size: int) -> list[bytes]:
        """Returns the keys that the budget has room for, from the first on: a chain's head is of use without its
        tail."""
        budget = self._partitions.capacity_bytes * self._percent // 100 - self._staged_bytes
        wanted = keys[: max(budget // size, 0 if self._staged_bytes else 1)]
        if len(wanted) < len(keys):
            names.NODE_TIER_REFUSED.inc(len(keys) - len(wanted))
        return wanted

    async def _stage(
        self, part: TierPart, partition: Partition, begun: list[tuple[bytes, int]], deadline_ns: int
    ) -> None:
        keys, extents = [key for key, _ in begun], [extent for _, extent in begun]
        arrived: dict[int, int] = {}
        try:
            arrived = (await self._read(part, partition, keys, extents, deadline_ns)).arrived
        finally:
            self._staged_bytes -= len(begun) * partition.shard_bytes
            for at in reversed(range(len(keys))):  # the head of a chain is sealed last, to be evicted last
                del part.staging[keys[at]]
                if at in arrived:
                    partition.seal(keys[at], arrived[at])
                else:
                    partition.abandon(keys[at])
            self._partitions.settle()
