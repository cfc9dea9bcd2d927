"""All I/O around the tiers below DRAM of one node: front's side. The ranks own folders and bytes (`tier_worker`).

    seal ─▶ WriteBehind ─▶ TierPut (extents borrowed meanwhile) ─▶ TierChanged ─▶ announced, `replicated`
    own pulls ─▶ read ─▶ TierGet into the job's extents
    others' leases ─▶ stage ─▶ begin, TierGet, seal ─▶ leased like any other block

Everything runs on one event loop. What is decided is in `tier_brain`. Extents that a rank was told of go back only when
it has answered, or is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvmesh.kvcache.keys import split
from kvmesh.kvcache.tiers import Tier
from kvmesh.node import messages as m
from kvmesh.node.partitions import Partition, Partitions, unused
from kvmesh.node.removals import Watch
from kvmesh.node.segments import Rank
from kvmesh.node.staging import Staging
from kvmesh.node.tier_brain import TierSource
from kvmesh.node.tier_parts import (
    Followed,
    OwnTier,
    Part,
    TierSettings,
    counters_of,
    home,
    layouts_found,
    make_part,
    opening,
    usage_of,
)
from kvmesh.node.tier_ranks import TierRanks, everywhere
from kvmesh.node.tier_removals import TierRemovals
from kvmesh.rpc.errors import ConfigError
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import store_pb2 as pb_store
from kvmesh.telemetry import names

log = logging.getLogger(__name__)

NS = 1_000_000_000
OPEN_S = 120.0
WRITES = 2  # operations of one part at once: one is written while the next is made
FRESH_S = 1.0  # so long a block that was read from below is left to whoever it was read for
CLOSE_S = 2.0


class Tiering:
    """One node's SSD, or its place in an object store: in use from `open` on. `follow`: said of every partition that
    comes up later."""

    def __init__(
        self,
        settings: TierSettings,
        ref: Callable[[], pb_common.InstanceRef],
        ranks: Sequence[Rank],
        partitions: Partitions,
    ) -> None:
        self.tier = settings.tier
        self.source = TierSource()
        self._settings = settings
        self._ref = ref
        self._ranks = TierRanks(ranks)
        self._partitions = partitions
        self._parts: dict[str, Part] = {}
        self._followed: dict[str, Followed] = {}  # by layout of the partition
        self._staging = Staging(partitions, settings.staging_percent, self.read, self.follow, self._spawn)
        self._removals = TierRemovals(self._ranks, self._parts, settings.said)
        self._tasks: set[asyncio.Task[None]] = set()
        for partition in partitions.all():
            self._add(*home(partition))
            self.follow(partition)

    # ── life ─────────────────────────────────────────────────────────────────────────────────────

    async def open(self) -> None:
        """Recover what the disk holds. ConfigError names ssd_path: a folder cannot be used."""
        if self._settings.layouts:
            try:
                for layout, shard_bytes in await asyncio.to_thread(layouts_found, self._settings):
                    self._add(layout, shard_bytes)
            except OSError as error:
                raise self._refused(str(error)) from error
        parts = list(self._parts.values())
        for part in parts:
            self._open(part)
        if parts:
            await asyncio.wait([part.opened for part in parts], timeout=OPEN_S)
        for part in parts:
            if not part.ready:
                raise self._refused(part.why_not)

    def _refused(self, why: str) -> ConfigError:
        field = "object_url" if self._settings.url else "ssd_path"
        return ConfigError(f"{self._settings.said}: {why}", field=field)

    def _add(self, layout: str, shard_bytes: int) -> Part:
        part = make_part(len(self._parts), layout, shard_bytes, len(self._ranks), self.tier)
        self._parts[layout] = part
        return part

    def _open(self, part: Part) -> None:
        for rank in range(len(self._ranks)):
            self._ranks.send(rank, opening(self._settings, part, rank, len(self._ranks)))

    def remember(self, removed: Watch) -> None:
        """What is removed at this node, from now on: said once, before anything is. To be said where the tier may hold
        blocks of layouts that it opens later, as an object store does."""
        self._removals.unseen = removed

    def follow(self, partition: Partition) -> None:
        """From now on what is sealed there is written to the tier. Cheap; again and again for the same one is right."""
        if partition.store.on_added is not None:
            return
        layout, shard_bytes = home(partition)
        part = self._parts.get(layout)
        if part is None:
            if len(self._parts) >= max(self._settings.layouts, 1):
                return  # the tier is for others; GetStore says so
            part = self._add(layout, shard_bytes)
            self._open(part)
        followed = self._followed[partition.layout] = Followed(partition, part, self._settings.offload_percent)

        def added(key: bytes) -> None:
            if key in followed.part.contents:
                followed.promotion.sealed(key, time.monotonic_ns())
            else:
                followed.behind.added()
                self._wake(followed)

        partition.store.on_added = added

    def _part_of(self, partition: Partition) -> Part | None:
        part = self._parts.get(home(partition)[0])
        return part if part is not None and part.ready else None

    def ranks_lost(self, cause: str) -> None:
        """Nothing will be answered any more, and nobody can read what lies there."""
        self._ranks.lose(cause)
        for part in self._parts.values():
            part.contents.clear()
            if not part.opened.done():
                part.opened.set_result(cause)

    async def close(self) -> None:
        """End what is under way; what a rank keeps for too long ends as if it were gone. Bounded."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=CLOSE_S)
        self.ranks_lost("the node is closing")
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=CLOSE_S)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s failed", task.get_name(), exc_info=task.exception())

    # ── ranks ────────────────────────────────────────────────────────────────────────────────────

    def rank_said(self, rank: int, message: m.ToFront) -> bool:
        """Whether it was for a tier."""
        match message:
            case m.TierDone():
                self._ranks.said(rank, message)
            case m.TierChanged(_, number):
                self._changed(self._numbered(number), rank, message)
            case m.TierStats(_, number):
                self._numbered(number).stats[rank] = message
            case m.TierOpened(_, number, why_not):
                part = self._numbered(number)
                part.unopened.discard(rank)
                if why_not or not part.unopened:
                    self._all_opened(part, why_not)
            case _:
                return False
        return True

    def _all_opened(self, part: Part, why_not: str) -> None:
        removed = [] if why_not or part.opened.done() else self._removals.lingering(part)
        if removed:
            self._spawn(self._purge(part, removed), "remove what was removed before")
        elif not part.opened.done():
            if why_not:
                part.contents.clear()
            else:
                self.source.parts.append(part.contents)
            part.opened.set_result(why_not)
            for followed in self._followed.values():
                self._wake(followed)

    async def _purge(self, part: Part, removed: list[bytes]) -> None:
        self._all_opened(part, await self._removals.purge(part, removed))

    def _numbered(self, number: int) -> Part:
        return next(part for part in self._parts.values() if part.number == number)

    def _changed(self, part: Part, rank: int, message: m.TierChanged) -> None:
        if self._ranks.lost:
            return
        changes = part.contents.changed(rank, split(message.sealed), split(message.removed), message.sizes)
        for partition in self._partitions.family(part.layout):
            partition.store.replicated(changes.removed, False)
            partition.store.replicated(changes.sealed)

    # ── writes ───────────────────────────────────────────────────────────────────────────────────

    def _wake(self, followed: Followed) -> None:
        if not followed.woken:
            followed.woken = True
            asyncio.get_running_loop().call_soon(self._pump, followed)

    def _pump(self, followed: Followed) -> None:
        followed.woken = False
        part, partition = followed.part, followed.partition
        while part.ready and followed.writes < WRITES and not self._ranks.lost and self._keeps(partition):
            keys = followed.behind.next(partition.store, part.contents, part.writing, followed.wanted)
            if not keys:
                return
            followed.writes += 1
            part.writing.update(dict.fromkeys(keys))
            self._spawn(self._write(followed, keys), "write behind")

    def _keeps(self, partition: Partition) -> bool:
        """Whether it is there still: a pool node gives up those that hold nothing."""
        return self._partitions.get(partition.layout) is partition

    async def _write(self, followed: Followed, wanted: list[bytes]) -> None:
        part, partition, store = followed.part, followed.partition, followed.partition.store
        # What is removed from now on, the ranks hear of after this.
        keys = [key for key in wanted if store.holds(key)]
        extents = store.borrow(keys)
        sizes = tuple(size or partition.shard_bytes for size in store.sizes(keys))
        packed, uses = b"".join(keys), [part.sketch.estimate(key) for key in keys]

        def put(rank: int, ticket: int) -> m.ToRank:
            offsets = tuple(partition.offset(rank, extent) for extent in extents)
            return m.TierPut(ticket, part.tier, part.number, packed, offsets, sizes)

        try:
            stored = everywhere(await self._ranks.ask(put)) if keys else {}
        finally:
            store.release(extents)
            followed.writes -= 1
            for key in wanted:
                del part.writing[key]
            followed.progress.set()
            followed.progress = asyncio.Event()
        # To be written was no use of them: unless somebody used them meanwhile, they are the first to go again.
        store.cool([keys[at] for at in sorted(stored) if part.sketch.estimate(keys[at]) <= uses[at]])
        followed.behind.refused(key for at, key in enumerate(keys) if at not in stored)
        names.NODE_TIER_WRITTEN.labels(tier=part.tier.name.lower()).inc(len(stored))
        self._partitions.settle()
        self._wake(followed)

    async def room(self, partition: Partition, blocks: int, wait_s: float) -> None:
        """Wait until so many more blocks would evict none that the tier is still to take, at most `wait_s`."""
        self.follow(partition)
        followed = self._followed.get(partition.layout)
        if followed is None or not followed.part.ready:
            return
        deadline = time.monotonic() + wait_s
        followed.wanted += blocks
        try:
            while (left_s := deadline - time.monotonic()) > 0 and _would_lose(followed, blocks):
                self._wake(followed)
                try:
                    await asyncio.wait_for(followed.progress.wait(), left_s)
                except TimeoutError:
                    return
        finally:
            followed.wanted -= blocks

    # ── reads ────────────────────────────────────────────────────────────────────────────────────

    async def read(
        self, partition: Partition, keys: Sequence[bytes], extents: Sequence[int], deadline_ns: int
    ) -> tuple[dict[int, int], str]:
        """Blocks into extents that the caller has begun: (position → bytes of what arrived, why not all). The extents
        are the tier's until this returns: let nobody cancel it. Nothing new is begun after `deadline_ns`."""
        part = self._part_of(partition)
        if part is None:
            return {}, f"no {self.tier.name.lower()} tier is in use here"
        packed = b"".join(keys)

        def get(rank: int, ticket: int) -> m.ToRank:
            offsets = tuple(partition.offset(rank, extent) for extent in extents)
            return m.TierGet(ticket, part.tier, part.number, packed, offsets, partition.shard_bytes, deadline_ns)

        answers = await self._ranks.ask(get)
        arrived = everywhere(answers)
        label = part.tier.name.lower()
        names.NODE_TIER_READ.labels(tier=label, outcome="hit").inc(len(arrived))
        names.NODE_TIER_READ.labels(tier=label, outcome="miss").inc(len(keys) - len(arrived))
        said = [answer for answer in answers if answer is not None]
        if arrived and len(arrived) == len(keys):
            took = max(answer.end_ns - answer.start_ns for answer in said)
            part.reads.add(sum(sum(answer.sizes) for answer in said), took)
            names.NODE_TIER_READ_SECONDS.labels(tier=label).observe(took / NS)
        return arrived, self._ranks.lost or ("" if len(arrived) == len(keys) else f"{label} had {len(arrived)} of them")

    def below(self, layout: str, key: bytes) -> tuple[Tier, str, int] | None:
        """(tier, layout, bytes of a shard) of a block that lies there; `layout` "": of any. None: it does not."""
        for name, part in self._parts.items():
            if layout in ("", name) and part.ready and key in part.contents:
                return part.tier, name, part.shard_bytes or part.contents.sizes.get(key, 0)
        return None

    async def stage(self, layout: str, keys: Sequence[bytes], timeout_s: float) -> dict[bytes, Tier]:
        """See `Staging.stage`."""
        parts = [part for name, part in self._parts.items() if layout in ("", name) and part.ready]
        return await self._staging.stage(parts, layout, keys, timeout_s)

    # ── removal ──────────────────────────────────────────────────────────────────────────────────

    async def forget(self, keys: Sequence[bytes]) -> set[bytes]:
        """None is found in the tier from now on, nor after a restart; returns those that were. Unavailable: that could
        not be written; say it again. The caller has removed them from DRAM before."""
        return await self._removals.forget(keys)

    # ── what is told of it ───────────────────────────────────────────────────────────────────────

    def lower(self, layout: str) -> OwnTier | None:
        """For the brain of the instance that keeps this layout."""
        part = self._parts.get(layout)
        return OwnTier(part, self._ref) if part is not None else None

    def tidy(self) -> None:
        """Now and then: what becomes of blocks that were read from below."""
        before = time.monotonic_ns() - int(FRESH_S * NS)
        for layout, followed in list(self._followed.items()):
            part, store = followed.part, followed.partition.store
            if not self._keeps(followed.partition):
                del self._followed[layout]
                continue
            if followed.behind.hurry():
                self._wake(followed)
            if followed.promotion.waiting:
                part.promoted += followed.promotion.settle(store, part.contents, before)
        label = self.tier.name.lower()
        names.NODE_TIER_BLOCKS.labels(tier=label).set(sum(len(part.contents) for part in self._parts.values()))
        names.NODE_TIER_USED.labels(tier=label).set(self.counters.used_bytes)

    @property
    def usage(self) -> pb_store.TierUsage:
        """For master and conductor: what it holds, and what a read takes."""
        return usage_of(self.counters)

    @property
    def counters(self) -> pb.TierCounters:
        """For GetStore."""
        told = counters_of(self.tier, self._settings, list(self._parts.values()))
        strangers = len({home(partition)[0] for partition in self._partitions.all()} - self._parts.keys())
        if strangers:
            told.why_not = f"{strangers} layouts more than ssd_layouts={self._settings.layouts} are kept in DRAM alone"
        told.why_not = self._ranks.lost or told.why_not
        return told


def _would_lose(followed: Followed, blocks: int) -> bool:
    """Whether so many more blocks would evict one that the tier lacks."""
    going = followed.partition.store.coldest(blocks - unused(followed.partition))
    return any(key not in followed.part.contents for key in going)
