"""This module does all I/O around the tiers below DRAM of one node, at its front. The ranks own folders and bytes
(`tier_worker`).

    seal ─▶ WriteBehind ─▶ TierPut (extents borrowed meanwhile) ─▶ TierChanged ─▶ announced, `replicated`
                                └─ the first tier's own eviction ─▶ TierMoving ─▶ the next tier (rank to rank)
    own pulls ─▶ read ─▶ TierGet into the job's extents
    others' leases ─▶ stage ─▶ begin, TierGet, seal ─▶ leased like any other block

Everything runs on one event loop. Decisions are in `brain.py`. Extents that a rank was told of go back only when it has
answered, or is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from prometheus_client import Gauge

from kvmesh.blockservice.partitions import Partition, Partitions, unused
from kvmesh.blockservice.peer_segments import SegmentRank
from kvmesh.blockservice.removals import Watch
from kvmesh.blockservice.tiers.config import make_ssd_folder
from kvmesh.blockservice.tiers.level import TierLevel
from kvmesh.blockservice.tiers.parts import (
    FollowedPartition,
    OwnTier,
    TierPart,
    TierSettings,
    home,
    layouts_found,
    usage_of,
)
from kvmesh.blockservice.tiers.ranks import TierRanks, everywhere
from kvmesh.blockservice.tiers.reads import Read, TierReads
from kvmesh.blockservice.tiers.removals import TierRemovals
from kvmesh.blockservice.tiers.staging import Staging
from kvmesh.errors import ConfigError
from kvmesh.kvcache.keys import split
from kvmesh.kvcache.tiers import Tier
from kvmesh.ranks import protocol as m
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import store_pb2 as pb_store
from kvmesh.telemetry import names
from kvmesh.tiers.ssd.disk import medium_failed

log = logging.getLogger(__name__)

NS = 1_000_000_000
OPEN_S = 120.0
WRITES = 2  # write operations of one part at once: one is written while the next is made
WRITE_S = 60.0  # a tier whose write has not ended by then is passed over
FRESH_S = 1.0  # how long a block that was read from a tier is left to whoever it was read for
CLOSE_S = 2.0


class Tiering:
    """One node's tiers below DRAM, the fastest first; they are in use from `open` on. What DRAM evicts goes to the
    first tier; what that evicts, to the second. `follow` is to be called for every partition that is made later."""

    def __init__(
        self,
        settings: TierSettings,
        ref: Callable[[], pb_common.InstanceRef],
        ranks: Sequence[SegmentRank],
        partitions: Partitions,
    ) -> None:
        self._settings = settings
        self._ref = ref
        self._ranks = TierRanks(ranks)
        self._partitions = partitions
        self.levels = [TierLevel(each, self._ranks) for each in settings.chain]
        self._followed: dict[str, FollowedPartition] = {}  # by layout of the partition
        self._reads = TierReads(self._ranks, self._spawn, lambda _: self._wake_all())
        self._staging = Staging(partitions, settings.staging_percent, self._read, self.follow, self._spawn)
        self._removals = TierRemovals(self._ranks, self.levels)
        self._tasks: set[asyncio.Task[None]] = set()
        for partition in partitions.all():
            self._add(*home(partition))
            self.follow(partition)

    # ── life ─────────────────────────────────────────────────────────────────────────────────────

    async def open(self) -> None:
        """Recovers what the tiers hold. A tier whose disk is full, read-only or broken is left out. Raises ConfigError
        naming ssd_path or object_url when a tier cannot be used as it is configured."""
        if self._settings.layouts:
            try:
                if not self._settings.url:
                    await asyncio.to_thread(make_ssd_folder, str(self._settings.path))
                for layout, shard_bytes in await asyncio.to_thread(layouts_found, self._settings):
                    self._add(layout, shard_bytes)
            except ConfigError as error:
                if not medium_failed(error):
                    raise
                self.levels[0].leave_out(error.message)
            except OSError as error:
                if not medium_failed(error):
                    raise self.levels[0].refused(str(error)) from error
                self.levels[0].leave_out(str(error))
        layouts = list(self.levels[0].parts)
        for layout in layouts:
            self._open(layout)
        waited = [(level, level.parts[layout]) for level in self.levels for layout in layouts]
        if waited:
            await asyncio.wait([part.opened for _, part in waited], timeout=OPEN_S)
        for level, part in waited:
            if not part.ready and not part.missing:
                raise level.refused(part.why_not)

    @property
    def missing(self) -> bool:
        """Whether some tier is left out: what is removed in this life is not removed there."""
        return any(level.missing for level in self.levels)

    def _add(self, layout: str, shard_bytes: int) -> None:
        number = len(self.levels[0].parts)
        for level in self.levels:
            level.add(number, layout, shard_bytes)

    def _open(self, layout: str) -> None:
        for level in reversed(self.levels):  # a tier opens after the one that takes what it evicts
            level.open(level.parts[layout])

    def remember(self, removed: Watch) -> None:
        """Gives the watch of what is removed at this node. It is called once, before anything is removed, where a tier
        may hold blocks of layouts that it opens later, as an object store does."""
        self._removals.unseen = removed

    def follow(self, partition: Partition) -> None:
        """Writes what is sealed in this partition to the tier from now on. It is cheap, and may be called again for the
        same one."""
        if partition.store.on_added is not None:
            return
        layout, shard_bytes = home(partition)
        if layout not in self.levels[0].parts:
            if len(self.levels[0].parts) >= max(self._settings.layouts, 1):
                return  # the tier keeps as many layouts as it may; GetStore reports that
            self._add(layout, shard_bytes)
            self._open(layout)
        parts = [level.parts[layout] for level in self.levels]
        followed = self._followed[partition.layout] = FollowedPartition(
            partition, parts, self._settings.offload_percent
        )

        def added(key: bytes) -> None:
            if key in followed:
                followed.promotion.sealed(key, time.monotonic_ns())
            elif self._settings.layouts:  # at a pool node no request tells which blocks it uses
                followed.part.note([key])
            if key not in followed.part.contents:
                followed.behind.added()
                self._wake(followed)

        partition.store.on_added = added

    def ranks_lost(self, cause: str) -> None:
        """Ends all operations because the ranks are gone, and nobody can read what the tiers hold."""
        self._ranks.lose(cause)
        for level in self.levels:
            level.lost(cause)

    async def close(self) -> None:
        """Ends what is under way, within a bounded time; what a rank keeps for too long ends as if the rank were
        gone."""
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
        """Takes a message of a rank; returns whether it was for a tier."""
        match message:
            case m.TierDone():
                self._ranks.said(rank, message)
            case m.TierChanged(tier):
                self._changed(self._level(tier).numbered(message.part), rank, message)
            case m.TierStats(tier) | m.TierMoving(tier):
                self._level(tier).take_message(rank, message)
            case m.TierOpened(tier, number, why_not, medium):
                part = self._level(tier).numbered(number)
                part.unopened.discard(rank)
                if medium:
                    part.missing = True
                    self._level(tier).leave_out(why_not)
                if why_not or not part.unopened:
                    self._all_opened(part, why_not)
            case _:
                return False
        return True

    def _all_opened(self, part: TierPart, why_not: str) -> None:
        removed = [] if why_not or part.opened.done() else self._removals.lingering(part)
        if removed:
            self._spawn(self._purge(part, removed), "remove what was removed before")
        elif not part.opened.done():
            if why_not:
                part.contents.clear()
            else:
                self._level(part.tier).source.parts.append(part.contents)
            part.opened.set_result(why_not)
            self._wake_all()

    async def _purge(self, part: TierPart, removed: list[bytes]) -> None:
        self._all_opened(part, await self._removals.purge(part, removed))

    def _level(self, tier: int) -> TierLevel:
        return next(level for level in self.levels if level.tier == tier)

    def _changed(self, part: TierPart, rank: int, message: m.TierChanged) -> None:
        if self._ranks.lost:
            return
        changes = part.contents.changed(rank, split(message.sealed), split(message.removed), message.sizes)
        others = [level.parts[part.layout].contents for level in self.levels if level.tier != part.tier]
        gone = [key for key in changes.removed if not any(key in other for other in others)]
        for partition in self._partitions.family(part.layout):
            partition.store.replicated(gone, False)
            partition.store.replicated(changes.sealed)

    # ── writes ───────────────────────────────────────────────────────────────────────────────────

    def _wake(self, followed: FollowedPartition) -> None:
        if not followed.woken:
            followed.woken = True
            asyncio.get_running_loop().call_soon(self._pump, followed)

    def _wake_all(self) -> None:
        for followed in self._followed.values():
            self._wake(followed)

    def _pump(self, followed: FollowedPartition) -> None:
        followed.woken = False
        part, partition = followed.part, followed.partition
        while part.ready and followed.writes < WRITES and not self._ranks.lost and self._keeps(partition):
            keys = followed.behind.next(partition.store, part.contents, part.writing, followed.wanted, followed.takes)
            if not keys:
                return
            followed.writes += 1
            part.writing.update(dict.fromkeys(keys))
            self._spawn(self._write(followed, keys), "write behind")

    def _keeps(self, partition: Partition) -> bool:
        """Whether the partition is still there: a pool node gives up partitions that hold nothing."""
        return self._partitions.get(partition.layout) is partition

    async def _write(self, followed: FollowedPartition, wanted: list[bytes]) -> None:
        part, partition, store = followed.part, followed.partition, followed.partition.store
        # The ranks are told of a removal from now on after this write, and so remove what it has written.
        keys = [key for key in wanted if store.holds(key)]
        extents = store.borrow(keys)
        sizes = tuple(size or partition.shard_bytes for size in store.sizes(keys))
        packed, uses = b"".join(keys), bytes(part.sketch.estimate(key) for key in keys)

        def put(rank: int, ticket: int) -> m.ToRank:
            offsets = tuple(partition.offset(rank, extent) for extent in extents)
            return m.TierPut(ticket, part.tier, part.number, packed, offsets, sizes, uses)

        try:
            stored = everywhere(await self._written(keys, put)) if keys else {}
        finally:
            store.release(extents)
            followed.writes -= 1
            for key in wanted:
                del part.writing[key]
            followed.progress.set()
            followed.progress = asyncio.Event()
        # Borrowing them made them look used. Unless somebody really used them meanwhile, they are to be evicted first.
        store.evict_first([keys[at] for at in sorted(stored) if part.sketch.estimate(keys[at]) <= uses[at]])
        followed.behind.refused(key for at, key in enumerate(keys) if at not in stored)
        names.NODE_TIER_WRITTEN.labels(tier=part.tier.name.lower()).inc(len(stored))
        self._partitions.settle()
        self._wake(followed)

    async def _written(self, keys: Sequence[bytes], put: Callable[[int, int], m.ToRank]) -> list[m.TierDone | None]:
        asked = self._ranks.ask(put)
        done, _ = await asyncio.wait({asked}, timeout=WRITE_S)
        if not done:
            self._reads.fail(self.levels[0], f"a write of {len(keys)} blocks has not ended in {WRITE_S:g} s")
        return await asked  # the tier may use the memory until then

    def takes(self, layout: str, nbytes: int) -> bool:
        """Whether a block of `nbytes` bytes can ever be written below DRAM: a put of larger ones has no reason to wait
        for that. True for a layout that is not here yet."""
        part = self.levels[0].parts.get(layout)
        return part is None or nbytes <= part.largest

    async def room(self, partition: Partition, blocks: int, wait_s: float) -> None:
        """Waits until `blocks` more blocks would evict none that the tier is still to take, at most `wait_s`."""
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
        self, partition: Partition, keys: Sequence[bytes], extents: Sequence[int], deadline_ns: int, tier: Tier
    ) -> Read:
        """Reads blocks of one tier into extents that the caller has begun. Nothing new is begun after `deadline_ns`."""
        layout = home(partition)[0]
        part = next((part for level in self.levels if level.tier is tier for part in level.ready(layout)), None)
        if part is None:
            return Read(cause=f"no {tier.name.lower()} tier is in use here")
        return await self._read(part, partition, keys, extents, deadline_ns)

    async def _read(
        self, part: TierPart, partition: Partition, keys: Sequence[bytes], extents: Sequence[int], deadline_ns: int
    ) -> Read:
        return await self._reads.read(self._level(part.tier), part, partition, keys, extents, deadline_ns)

    def below(self, layout: str, key: bytes) -> tuple[Tier, str, int, int] | None:
        """Returns tier, layout, bytes of a shard and mask of cache groups of a block, in the fastest tier that has it;
        None if none has. `layout` "" means any."""
        for part in self._ready(layout):
            if key in part.contents and (kept := part.kept) is not None:
                text = kept.family.text
                kin = [one for one in self._ready(text) if one.tier is part.tier and key in one.contents]
                mask = sum(1 << group for group in {one.contents.group or 0 for one in kin})
                return part.tier, text, sum(one.shard_bytes for one in kin), mask
            if key in part.contents:
                return part.tier, part.layout, part.shard_bytes or part.contents.sizes.get(key, 0), 1
        return None

    async def stage(self, layout: str, keys: Sequence[bytes], timeout_s: float) -> dict[bytes, Tier]:
        """See `Staging.stage`."""
        self.used(layout, keys)
        return await self._staging.stage(self._ready(layout), layout, keys, timeout_s)

    def used(self, layout: str, keys: Sequence[bytes]) -> None:
        """Notes that somebody uses these blocks, wherever they lie: what is used often deserves its place. `layout` ""
        means any."""
        for part in self.levels[0].named(layout):
            part.note(keys)

    def _ready(self, layout: str) -> list[TierPart]:
        return [part for level in self.levels for part in level.ready(layout)]

    # ── removal ──────────────────────────────────────────────────────────────────────────────────

    async def forget(self, keys: Sequence[bytes]) -> set[bytes]:
        """Removes blocks from all tiers, also for after a restart; returns those that were there. Raises Unavailable
        when that could not be written: it is to be repeated then. The caller has removed them from DRAM before."""
        return await self._removals.forget(keys)

    # ── what is told of it ───────────────────────────────────────────────────────────────────────

    def lower(self, layout: str) -> OwnTier | None:
        """Returns the tiers as the brain of the instance that keeps this layout, or objects of this family, asks
        them."""
        if not layout or not self.levels[0].named(layout):
            return None
        return OwnTier(lambda: self._ready(layout), self._ref, lambda keys: self.used(layout, list(keys)))

    def keys(self) -> list[bytes]:
        """Returns the keys of all blocks in all tiers. Its cost is O(blocks)."""
        return list(dict.fromkeys(key for level in self.levels for key in level.source.keys()))  # noqa: SIM118

    def named(self) -> list[bytes]:
        """Returns the keys of blocks that any rank has in any tier, or that move there, some twice. It copies
        tables."""
        return [key for level in self.levels for key in level.source.named()]

    def tidy(self) -> None:
        """Decides which blocks that were read from tiers stay in DRAM, and tells ranks what was used. It is called
        regularly."""
        before = time.monotonic_ns() - int(FRESH_S * NS)
        for layout, followed in list(self._followed.items()):
            part, store = followed.part, followed.partition.store
            if not self._keeps(followed.partition):
                del self._followed[layout]
                continue
            if followed.behind.hurry():
                self._wake(followed)
            if followed.promotion.waiting:
                part.promoted += followed.promotion.settle(store, followed, before)
        for part in self.levels[0].parts.values():
            if part.ready and (used := part.take_used()) is not None:
                for rank in range(len(self._ranks)):
                    self._ranks.send(rank, m.TierUsed(part.tier, part.number, *used))

    @property
    def gauges(self) -> dict[Gauge, float]:
        """The gauges of all tiers."""
        return {gauge: value for level in self.levels for gauge, value in level.gauges.items()}

    @property
    def usages(self) -> list[pb_store.TierUsage]:
        """What each tier holds and how long a read takes, for master and conductor."""
        return [usage_of(level.counters) for level in self.levels]

    @property
    def counters(self) -> list[pb.TierCounters]:
        """Each tier's counters, for GetStore."""
        told = [level.counters for level in self.levels]
        strangers = len({home(partition)[0] for partition in self._partitions.all()} - self.levels[0].parts.keys())
        for each in told:
            if strangers:
                each.why_not = (
                    f"{strangers} layouts more than ssd_layouts={self._settings.layouts} are kept in DRAM alone"
                )
            each.why_not = self._ranks.lost or each.why_not
        return told


def _would_lose(followed: FollowedPartition, blocks: int) -> bool:
    """Whether `blocks` more blocks would evict one that no tier has, and the first could take; or find no room because
    a tier is reading others just now, which can go afterwards."""
    needed = blocks - unused(followed.partition)
    going = followed.partition.store.coldest(needed)
    if len(going) < needed and followed.writes:
        return True
    return any(key not in followed and followed.takes(key) for key in going)
