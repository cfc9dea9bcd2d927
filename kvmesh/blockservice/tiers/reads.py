"""Reads from a node's tiers below DRAM, also from one that does not answer.

A rank answers soon after a read's deadline. If it does not, its disk hangs: the read ends without it, the tier is
passed over until a probe is answered, and memory that the tier may still write to is given to nobody until then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.blockservice.partitions import Partition
from kvmesh.blockservice.tiers.level import TierLevel
from kvmesh.blockservice.tiers.parts import TierPart
from kvmesh.blockservice.tiers.ranks import TierRanks, everywhere
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.ranks import protocol as m
from kvmesh.telemetry import names

log = logging.getLogger(__name__)

NS = 1_000_000_000
GRACE_S = 5.0  # what had begun by a read's deadline may take so long after it
PROBE_S = 1.0  # between two probes

Spawn = Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]


@dataclass(frozen=True)
class Read:
    """The result of a read: `arrived` maps position to bytes, `cause` says why not all arrived. `hung` means that the
    tier may still write to the memory asked for: the caller must not read into it again, and nobody else gets it until
    the tier lets go."""

    arrived: dict[int, int] = field(default_factory=dict)
    cause: str = ""
    hung: bool = False


class TierReads:
    """Carries out the reads of one node. `on_back` is called when a tier answers again."""

    def __init__(self, ranks: TierRanks, spawn: Spawn, on_back: Callable[[TierLevel], None]) -> None:
        self._ranks = ranks
        self._spawn = spawn
        self._on_back = on_back

    async def read(
        self,
        level: TierLevel,
        part: TierPart,
        partition: Partition,
        keys: Sequence[bytes],
        extents: Sequence[int],
        deadline_ns: int,
    ) -> Read:
        """Reads blocks into extents that the caller has begun. Nothing new is begun after `deadline_ns`."""
        packed = b"".join(keys)

        def get(rank: int, ticket: int) -> m.ToRank:
            offsets = tuple(partition.offset(rank, extent) for extent in extents)
            return m.TierGet(ticket, part.tier, part.number, packed, offsets, partition.shard_bytes, deadline_ns)

        start = time.monotonic_ns()
        partition.store.share(extents)  # the tier's own reference: it may keep them longer than the caller
        asked = self._ranks.ask(get)
        try:
            await asyncio.wait({asked}, timeout=max(deadline_ns - start, 0) / NS + GRACE_S)
        finally:
            if asked.done():
                partition.store.release(extents)
            else:
                self._spawn(_give_back(asked, partition.store, extents), "wait for a disk that hangs")
        if not asked.done():
            waited = (time.monotonic_ns() - start) / NS
            self.fail(level, f"a read of {len(keys)} blocks has not ended in {waited:.1f} s")
            self._count(level, 0, len(keys))
            return Read(cause=level.health.failing, hung=True)
        answers = asked.result()
        arrived = everywhere(answers)
        self._count(level, len(arrived), len(keys))
        said = [answer for answer in answers if answer is not None]
        if arrived and len(arrived) == len(keys):
            took = max(answer.end_ns - answer.start_ns for answer in said)
            part.reads.add(sum(sum(answer.sizes) for answer in said), took)
            names.NODE_TIER_READ_SECONDS.labels(tier=level.label).observe(took / NS)
        partly = "" if len(arrived) == len(keys) else f"{level.label} had {len(arrived)} of them"
        return Read(arrived, self._ranks.lost or partly)

    def fail(self, level: TierLevel, why: str) -> None:
        """Passes a tier over that does not answer, logs that once, and probes it until it answers."""
        if level.health.failing or self._ranks.lost:
            return
        level.health.failing = why
        log.warning("%s: %s; it is passed over until it answers", level.settings.said, why)
        self._spawn(self._probe(level), "probe a tier")

    async def _probe(self, level: TierLevel) -> None:
        """Probes with one read at a time, until one succeeds."""
        start = time.monotonic()
        while not self._ranks.lost:
            await asyncio.sleep(PROBE_S)
            if not await self._answers(level):
                continue
            level.health.failing = ""
            log.warning("%s: answers again, after %.0f s", level.settings.said, time.monotonic() - start)
            self._on_back(level)
            return

    async def _answers(self, level: TierLevel) -> bool:
        """Whether every rank reads one block of the tier; a tier without a block answers."""
        found = ((part, key) for part in level.parts.values() if (key := part.contents.any_key()) is not None)
        part, key = next(found, (None, b""))
        if part is None:
            return True
        number = part.number
        answers = await self._ranks.ask(lambda _, ticket: m.TierProbe(ticket, level.tier, number, key))
        return 0 in everywhere(answers)

    def _count(self, level: TierLevel, arrived: int, wanted: int) -> None:
        names.NODE_TIER_READ.labels(tier=level.label, outcome="hit").inc(arrived)
        names.NODE_TIER_READ.labels(tier=level.label, outcome="miss").inc(wanted - arrived)


async def _give_back(asked: asyncio.Future[list[m.TierDone | None]], store: NodeStore, extents: Sequence[int]) -> None:
    try:
        await asyncio.wait({asked})
    finally:
        store.release(extents)
