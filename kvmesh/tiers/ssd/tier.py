"""The SSD tier of one node's store: blocks by key in bucket files, from and into memory that the caller gives.

    tier = SsdTier(SsdConfig(path=..., capacity_bytes=..., identity=...))      # blocking: recovers what is there
    tier.report, tier.keys()                                                   # what a restart has found: announce it
    stored = await asyncio.wrap_future(tier.put(key, extent))
    if await asyncio.wrap_future(tier.get_into(key, extent)): ...              # verified bytes, or False
    tier.take_changes()                                                        # keys new and gone since: announce it
    tier.close()

Every future resolves to True or False, never to an exception: the tier is a cache, and a False get is a miss (`stats`
counts why). While its future is open the tier uses the caller's memory; once it is resolved, or was cancelled
successfully, it does not. A deadline is looked at when I/O would begin, not after: what runs is waited for. asyncio's
wrap_future forgets that: whoever is cancelled while waiting must not free the extent before the inner future is done.
After a False get the memory holds anything. Threads: see `readers`, `writer`; futures are resolved in them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from kvmesh.errors import ConfigError, Unavailable
from kvmesh.kvcache.store_stats import Changes
from kvmesh.tiers.calls import Buffer, DemotionSink, checked_key, follow, payload, resolve, right_length, target
from kvmesh.tiers.ssd.brain import Brain, Drop
from kvmesh.tiers.ssd.config import SsdConfig
from kvmesh.tiers.ssd.core import FlushOp, GetOp, PutOp, RemoveOp, SsdCore, SsdCounts
from kvmesh.tiers.ssd.disk import Disk, why_not_direct
from kvmesh.tiers.ssd.files import BucketFiles
from kvmesh.tiers.ssd.folder import Purge, TierFolder
from kvmesh.tiers.ssd.readers import Readers
from kvmesh.tiers.ssd.recovery import Recovery, RecoveryReport
from kvmesh.tiers.ssd.sketch import FrequencySketch
from kvmesh.tiers.ssd.writer import LogWriter

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SsdStats:
    """Present values; `counts` has those since the start."""

    blocks: int
    live_bytes: int  # payloads of these blocks
    used_bytes: int  # of all files
    capacity_bytes: int
    buckets: int
    open_files: int
    waiting_gets: int
    waiting_puts: int
    resting: bool  # puts are refused for seconds, after space or disk have failed
    why_not_direct: str  # "": O_DIRECT is used
    evicted: int  # blocks
    reinserted: int  # blocks
    counts: SsdCounts


class SsdTier:
    """The SSD tier of one node's store; it is thread-safe. Raises ConfigError as `SsdConfig` and `TierFolder` do,
    OSError when the folder cannot be read. `on_changes()` is called on a thread of the tier when `take_changes` has
    something to return, once until that is called. `below` is offered what is evicted and was used `demote_uses` times
    besides having been put."""

    def __init__(
        self,
        config: SsdConfig,
        *,
        on_changes: Callable[[], None] | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        disk: Disk | None = None,
        below: DemotionSink | None = None,
    ) -> None:
        self.config = config
        disk = disk or Disk()
        self._folder = TierFolder(config.path, config.identity, config.on_mismatch)
        try:
            self.why_not_direct = _direct(config, disk)
            sketch, least = FrequencySketch(config.sketch_keys), config.demote_uses
            worth = (lambda key: not least or sketch.estimate(key) > least) if below is not None else None
            self._core = core = SsdCore(Brain(config.limits, worth), sketch, clock, on_changes, below=below)
            core.files = BucketFiles(
                self._folder, disk, core.gone, direct=not self.why_not_direct, max_open=config.max_open_files
            )
            try:
                self.report, damaged = self._recover()
            except BaseException:
                core.files.close()
                raise
        except BaseException:
            self._folder.close()
            raise
        self._max_length = config.limits.max_length
        self._writing: dict[bytes, Future[bool]] = {}
        self._closed = False
        self._readers = Readers(core, config.threads, config.queue_ops, config.queue_bytes)
        self._writer = LogWriter(core, config.queue_ops, config.queue_bytes)
        if damaged:
            core.bury(RemoveOp(damaged))
        self.purge = Purge(self._folder, config.purge_bytes_s) if config.on_mismatch == "other_weights" else None

    def __enter__(self) -> SsdTier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── blocks ───────────────────────────────────────────────────────────────────────────────────────

    def put(self, key: bytes, data: Buffer, *, deadline_ns: int | None = None) -> Future[bool]:
        """Stores a block. The result is True when it can be read and survives the death of this process; also when it
        was here before, because a block's bytes follow from its key. It is False when the block is not admitted, the
        queue is full, there is no room, I/O failed, the deadline has passed, the block was removed meanwhile, or the
        tier is closed. Raises InvalidRequest for a malformed key or length."""
        return self.put_many([(key, data)], deadline_ns=deadline_ns)[0]

    def put_many(self, blocks: Sequence[tuple[bytes, Buffer]], *, deadline_ns: int | None = None) -> list[Future[bool]]:
        """Stores blocks as `put` does; returns as many futures, in order. Put a chain in its order: adjacent blocks are
        read fastest by `get_many_into`."""
        checked = [(checked_key(key), payload("data", data, self._max_length)) for key, data in blocks]
        futures: list[Future[bool]] = []
        puts: list[PutOp] = []
        with self._core.lock:
            for key, view in checked:
                future: Future[bool] = Future()
                futures.append(future)
                ticket = self._claim(key, future)
                if ticket is not None:
                    puts.append(PutOp(key, view, ticket, deadline_ns, future))
        taken = self._writer.submit(puts)
        for put in puts[taken:]:
            self._writer.refuse(put, "busy")
        return futures

    def get_into(self, key: bytes, into: memoryview, *, deadline_ns: int | None = None) -> Future[bool]:
        """Reads a block into memory of exactly its length. The result is True when `into` holds the bytes that were
        put, verified now. Raises InvalidRequest for a malformed key, read-only memory, or a length other than the
        block's (see `length`)."""
        return self.get_many_into([(key, into)], deadline_ns=deadline_ns)[0]

    def get_many_into(
        self, blocks: Sequence[tuple[bytes, memoryview]], *, deadline_ns: int | None = None
    ) -> list[Future[bool]]:
        """Reads blocks as `get_into` does; returns as many futures, in order. Adjacent blocks are read in one call."""
        checked = [(checked_key(key), target(into, self._max_length)) for key, into in blocks]
        gets: list[GetOp] = []
        misses: list[Future[bool]] = []
        futures: list[Future[bool]] = []
        with self._core.lock:
            places = [self._core.brain.lookup(key) for key, _ in checked]
            for (_, view), place in zip(checked, places, strict=True):
                right_length(view, None if place is None else place.length)
            for (key, view), place in zip(checked, places, strict=True):
                self._core.sketch.add(key)
                future: Future[bool] = Future()
                futures.append(future)
                if place is None:
                    misses.append(future)
                else:
                    gets.append(GetOp(key, view, deadline_ns, future))
            self._core.counts.misses += len(misses)
        for future in misses:
            future.set_result(False)
        self._submit(gets)
        return futures

    def contains(self, key: bytes) -> bool:
        """Says whether the block can be found; its bytes are verified when they are read."""
        return key in self._core.brain

    def length(self, key: bytes) -> int | None:
        """Returns the block's bytes, or None when it is not here."""
        with self._core.lock:
            place = self._core.brain.lookup(key)
        return None if place is None else place.length

    def keys(self) -> list[bytes]:
        """Returns the keys of all blocks. O(blocks)."""
        with self._core.lock:
            return self._core.brain.keys()

    def remove(self, keys: Iterable[bytes]) -> Future[bool]:
        """Removes blocks, so that none is found from now on; reads that have begun end. The result is True when they
        stay removed after a restart or power loss; False when that could not be written and must be repeated."""
        checked = [checked_key(key) for key in keys]
        future: Future[bool] = Future()
        future.set_running_or_notify_cancel()
        if not checked:
            future.set_result(True)
            return future
        with self._core.lock:
            self._core.brain.remove(checked)
            self._core.counts.removed += len(checked)
            # With the lock: the record must stand behind what is removed, and before what is put from now on.
            self._writer.enqueue(RemoveOp(checked, future))
        self._core.tell()
        return future

    def take_changes(self) -> Changes:
        """Returns how `keys` differs from what it was at the last call; at the first call, from none."""
        with self._core.lock:
            self._core.teller.taken()
            return self._core.brain.take_changes()

    # ── advice: how often keys were used lately ──────────────────────────────────────────────────────

    def note(self, keys: Iterable[bytes]) -> None:
        """Notes that blocks were used elsewhere (from DRAM). Gets from this tier are noted automatically."""
        with self._core.lock:
            for key in keys:
                self._core.sketch.add(key)

    def used(self, key: bytes, uses: int) -> None:
        """Notes that the block was used `uses` times elsewhere, which counts for admission."""
        with self._core.lock:
            self._core.sketch.at_least(key, uses)

    def uses(self, key: bytes) -> int:
        """Returns about how often the block was used lately, 0..15."""
        with self._core.lock:
            return self._core.sketch.estimate(key)

    def promote(self, key: bytes, victim: bytes) -> bool:
        """Says whether a block read from here deserves `victim`'s place in DRAM beyond this read."""
        with self._core.lock:
            return self._core.sketch.prefers(key, victim)

    # ── life ─────────────────────────────────────────────────────────────────────────────────────────

    def flush(self, *, sync: bool = False) -> Future[bool]:
        """The result is True when everything put or removed before is written and room is made; with `sync` it also
        survives a power loss."""
        future: Future[bool] = Future()
        future.set_running_or_notify_cancel()
        self._writer.enqueue(FlushOp(sync, future))
        return future

    def stats(self) -> SsdStats:
        """Returns the tier's statistics. O(buckets)."""
        core = self._core
        with core.lock:
            return SsdStats(
                blocks=len(core.brain),
                live_bytes=core.brain.live_bytes,
                used_bytes=core.brain.used_bytes,
                capacity_bytes=self.config.capacity_bytes,
                buckets=core.brain.buckets,
                open_files=core.files.open_files,
                waiting_gets=self._readers.waiting,
                waiting_puts=self._writer.waiting,
                resting=self._writer.resting,
                why_not_direct=self.why_not_direct,
                evicted=core.brain.evicted,
                reinserted=core.brain.reinserted,
                counts=replace(core.counts),
            )

    def close(self, timeout_s: float = 30.0) -> None:
        """Answers waiting operations with False, ends running ones, closes the open bucket and all threads and
        descriptors, and unlocks the folder. It may be repeated. Raises Unavailable when a thread hangs in the disk; the
        folder then stays locked."""
        if self._closed:
            return
        self._readers.stop()
        self._writer.stop()
        if not (self._readers.join(timeout_s) and self._writer.join(timeout_s)):
            raise Unavailable(f"{self.config.path}: the disk has not answered for {timeout_s:g} s")
        self._closed = True
        if self.purge is not None:
            self.purge.close()
        self._core.files.close()
        self._folder.close()

    def check_integrity(self) -> None:
        """Raises AssertionError unless the index, buckets and accounts agree. O(blocks)."""
        with self._core.lock:
            self._core.brain.check_integrity()

    # ── inner ────────────────────────────────────────────────────────────────────────────────────────

    def _recover(self) -> tuple[RecoveryReport, list[bytes]]:
        """Returns the report of the recovery, and the keys of blocks found damaged, which the next start must
        not find."""
        brain, files = self._core.brain, self._core.files
        recovery = Recovery(self._folder, files, brain, self.config.verify)
        report = recovery.run()
        while brain.used_bytes > self.config.capacity_bytes and (step := brain.force()) is not None:
            if isinstance(step, Drop):  # it was made smaller; nothing is demoted before there is a writer
                files.drop(step.bucket)
        report.blocks = len(brain)
        if report.blocks or report.unusable:
            log.info("%s: %s", self.config.path, report)
        return report, recovery.bad

    def _claim(self, key: bytes, future: Future[bool]) -> int | None:
        """Returns the brain's ticket, or None when the future is, or will be, resolved in another way. The caller holds
        the lock."""
        core = self._core
        core.sketch.add(key)
        if key in core.brain:
            core.counts.present += 1
            future.set_result(True)
            return None
        uses = self.config.admit_uses
        refused = "no_room" if self._writer.resting else ""
        if not refused and uses and core.sketch.estimate(key) < uses:
            refused = "not_admitted"
        if refused:
            core.counts.add(refused)
            future.set_result(False)
            return None
        ticket = core.brain.claim(key)
        if ticket is None:
            first = self._writing.get(key)
            if first is None:  # it was cancelled, and still lies in the queue
                core.counts.busy += 1
                future.set_result(False)
            else:
                core.counts.present += 1
                follow(first, future)
            return None
        self._writing[key] = future
        future.add_done_callback(lambda done: self._written(key, done))
        return ticket

    def _written(self, key: bytes, done: Future[bool]) -> None:
        with self._core.lock:
            if self._writing.get(key) is done:
                del self._writing[key]

    def _submit(self, gets: list[GetOp]) -> None:
        """Queues at most one job for each thread: adjacent blocks stay together, and no thread stays idle beside one
        big job."""
        if not gets:
            return
        each = -(-len(gets) // self.config.threads)
        for first in range(0, len(gets), each):
            part = gets[first : first + each]
            if not self._readers.submit(part):
                with self._core.lock:
                    self._core.counts.busy += len(part)
                for get in part:
                    resolve(get.future, False)


def _direct(config: SsdConfig, disk: Disk) -> str:
    """Returns why O_DIRECT is not used, or "" when it is. Raises ConfigError when it was demanded."""
    if config.direct == "off":
        return "direct=off"
    why = why_not_direct(disk, config.path)
    if why and config.direct == "on":
        raise ConfigError(f"direct='on': {why}", field="direct")
    if why:
        log.warning("%s; reads and writes go through the page cache", why)
    return why
