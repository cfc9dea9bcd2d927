"""Tiers below DRAM at a rank move its blocks between the host region and SSD or object store.

Nothing here blocks the rank's main thread: folders are opened (recovered) in threads of their own, and a tier has its
own threads for I/O, which also send the answers. Memory named by a TierPut or TierGet is the tier's until every inner
future of the operation is done; only then TierDone is sent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvmesh import extras
from kvmesh.errors import ConfigError, InvalidRequest, KvmeshError, Unavailable
from kvmesh.kvcache.keys import split
from kvmesh.kvcache.store_stats import Changes
from kvmesh.kvcache.tiers import Tier
from kvmesh.ranks import protocol as m
from kvmesh.ranks.tier_sizes import ssd_config
from kvmesh.tiers.calls import DemotionSink
from kvmesh.tiers.ssd import SsdStats, SsdTier
from kvmesh.tiers.ssd.disk import medium_failed
from kvmesh.tiers.ssd.folder import FolderInUse
from kvmesh.transfer import Region

if TYPE_CHECKING:
    from kvmesh.tiers.object_store import Demotion, ObjectTier

log = logging.getLogger("kvmesh.rank")

CHANGES = 8192  # keys in one message: some milliseconds of the front's loop
IN_USE_S = 10.0  # a killed process keeps its lock until the kernel has taken it apart
AGAIN_S = 0.05
CLOSE_S = 10.0

Send = Callable[[m.ToFront], None]


class TierWorker:
    """Runs all tiers of one rank, that of the SSD in `ssd_path`. `handle`, `report` and `close` run on the main
    thread."""

    def __init__(self, region: Region, send: Send, ssd_path: str) -> None:
        self._region = region
        self._ssd_path = Path(ssd_path)
        self._send = send
        self._parts: dict[tuple[int, int], _Part] = {}
        self._closing = threading.Event()

    def handle(self, message: m.ToRank) -> bool:
        """Takes a message; returns, at once, whether it was for a tier."""
        match message:
            case m.TierOpen():
                if message.tier == Tier.SSD:
                    message = msgspec.structs.replace(message, path=str(self._ssd_path / message.path))
                below = self._parts[message.below, message.part] if message.below else None
                part = self._parts[message.tier, message.part] = _Part(message, self._send, self._closing, below)
                part.start()
            case m.TierPut():
                self._put(self._parts.get((message.tier, message.part)), message)
            case m.TierGet():
                self._get(self._parts.get((message.tier, message.part)), message)
            case m.TierProbe(ticket, tier, part_id, key):
                self._probe(self._parts.get((tier, part_id)), ticket, key)
            case m.TierUsed(tier, part_id, keys, uses):
                told = self._parts.get((tier, part_id))
                _used(told.tier if told is not None else None, split(keys), uses)
            case m.TierRemove(ticket, tier, part_id, keys):
                self._remove(self._parts.get((tier, part_id)), ticket, split(keys))
            case _:
                return False
        return True

    def report(self) -> None:
        """Sends TierStats for each part that is in use. Its cost is O(buckets)."""
        for part in self._parts.values():
            if part.tier is not None:
                self._send(part.stats(part.tier))

    def close(self) -> None:
        """Ends every thread, and leaves every folder whole. It must be called before the region is freed."""
        self._closing.set()
        for part in self._parts.values():
            part.close()
        self._parts.clear()

    # ── operations ───────────────────────────────────────────────────────────────────────────────

    def _memory(self, offset: int, nbytes: int) -> memoryview:
        """Returns the memory at an offset of the segment. Raises InvalidRequest when it is not in the host region."""
        region = self._region
        at = offset - region.base_offset
        if region.memory is None or nbytes < 1 or not 0 <= at <= region.length - nbytes:
            raise InvalidRequest.of("offsets", offset, f"{nbytes} bytes there are not in the host region")
        return region.memory[at : at + nbytes]

    def _put(self, part: _Part | None, put: m.TierPut) -> None:
        keys, sizes = split(put.keys), put.sizes
        done = _Operation(put.ticket, sizes, self._send)
        tier = part.tier if part is not None else None
        if part is None or tier is None:
            done.end()
            return
        try:
            most = tier.config.limits.max_length if isinstance(tier, SsdTier) else part.room
            fits = [at for at, size in enumerate(sizes) if size <= most]
            futures = tier.put_many([(keys[at], self._memory(put.offsets[at], sizes[at])) for at in fits])
        except (InvalidRequest, IndexError) as error:
            log.error("put: %s", error)
            done.end()
            return
        _used(tier, keys, put.uses)
        done.wait(futures, fits, part.tell)  # TierChanged comes before TierDone

    def _get(self, part: _Part | None, get: m.TierGet) -> None:
        keys = split(get.keys)
        tier = part.tier if part is not None else None
        lengths = [tier.length(key) or 0 for key in keys] if tier is not None else [0] * len(keys)
        done = _Operation(get.ticket, lengths, self._send)
        if tier is None:
            done.end()
            return
        try:
            here = [at for at, length in enumerate(lengths) if 0 < length <= get.room]
            views = [self._memory(get.offsets[at], lengths[at]) for at in here]
            blocks = [(keys[at], view) for at, view in zip(here, views, strict=True)]
            futures = tier.get_many_into(blocks, deadline_ns=get.deadline_ns)
        except (InvalidRequest, IndexError) as error:  # also if a block was put again meanwhile, with another length
            log.error("get: %s", error)
            done.end()
            return
        done.wait(futures, here)

    def _probe(self, part: _Part | None, ticket: int, key: bytes) -> None:
        tier = part.tier if part is not None else None
        length = (tier.length(key) or 0) if tier is not None else 0
        done = _Operation(ticket, [length], self._send)
        if tier is None or not length:
            done.end()
            return
        done.wait([tier.get_into(key, memoryview(bytearray(length)))], [0])

    def _remove(self, part: _Part | None, ticket: int, keys: list[bytes]) -> None:
        done = _Operation(ticket, [0] * len(keys), self._send)
        tier = part.tier if part is not None else None
        if part is not None and part.demotion is not None:
            part.demotion.remove(keys)  # the tier above was told before
            if tier is None:  # the front looks through what the part holds when it is open
                done.end(range(len(keys)))
                return
        if part is None or tier is None:
            done.end()
            return
        there = keys
        if not isinstance(tier, SsdTier):
            there = [key for key in keys if tier.may_hold(key)]
            if not there:
                done.end(range(len(keys)))
                return

        def removed(future: Future[bool]) -> None:
            part.tell()  # before the answer: an earlier put must not be reported after it
            done.end(range(len(keys)) if future.result() else ())

        tier.remove(there).add_done_callback(removed)


def _used(tier: SsdTier | ObjectTier | None, keys: Sequence[bytes], uses: bytes) -> None:
    if isinstance(tier, SsdTier):
        for key, count in zip(keys, uses, strict=False):
            tier.used(key, count)


class _Operation:
    """Sends TierDone once, when every future of the operation is done."""

    def __init__(self, ticket: int, sizes: Sequence[int], send: Send) -> None:
        self._ticket = ticket
        self._sizes = sizes
        self._send = send
        self._start_ns = time.monotonic_ns()
        self._lock = threading.Lock()
        self._left = 0
        self._done: list[int] = []
        self._before: Callable[[], None] | None = None

    def wait(
        self, futures: Sequence[Future[bool]], positions: Sequence[int], before: Callable[[], None] | None = None
    ) -> None:
        self._left = len(futures)
        self._before = before
        if not futures:
            self.end()
        for at, future in zip(positions, futures, strict=True):
            future.add_done_callback(partial(self._one, at))

    def _one(self, at: int, future: Future[bool]) -> None:
        with self._lock:
            self._left -= 1
            if not future.cancelled() and future.result():
                self._done.append(at)
            last = not self._left
        if last:
            if self._before is not None:
                self._before()
            self.end(sorted(self._done))

    def end(self, done: Sequence[int] = ()) -> None:
        sizes = tuple(self._sizes[at] for at in done)
        self._send(m.TierDone(self._ticket, tuple(done), sizes, self._start_ns, time.monotonic_ns()))


class _Part:
    """Is one part of a tier. `tier` is None until it is recovered, and again from `close` on."""

    def __init__(self, opening: m.TierOpen, send: Send, closing: threading.Event, below: _Part | None) -> None:
        self.tier: SsdTier | ObjectTier | None = None
        self.room = opening.room
        self.demotion: Demotion | None = None  # moves blocks of the tier above into this part
        self._sink: DemotionSink | None = below.sink() if below is not None else None
        self._opening = opening
        self._send = send
        self._closing = closing
        self._telling = threading.Lock()  # held from taking changes until they are sent: they keep their order
        self._thread = threading.Thread(target=self._open, name="open tier", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def sink(self) -> DemotionSink | None:
        """Returns what takes the blocks that the tier above evicts; None if the library for that is missing, which
        `start` reports."""
        try:
            from kvmesh.tiers.object_store import Demotion, ObjectTier
        except ImportError:
            return None

        def tier() -> ObjectTier | None:
            return self.tier if isinstance(self.tier, ObjectTier) else None

        self.demotion = Demotion(tier, self._moving)
        return self.demotion

    def _moving(self, key: bytes, over: bool) -> None:
        if over:
            self.tell()  # TierChanged, if the block has arrived, comes before the end of its move
        self._send(m.TierMoving(self._opening.tier, self._opening.part, key, over))

    def tell(self) -> None:
        """Sends what has changed. It may be called in any thread."""
        with self._telling:
            if self.tier is not None:
                self._say(self.tier, self.tier.take_changes())

    def _say(self, tier: SsdTier | ObjectTier, changes: Changes) -> None:
        o = self._opening
        for at in range(0, len(changes.removed), CHANGES):
            self._send(m.TierChanged(o.tier, o.part, b"", b"".join(changes.removed[at : at + CHANGES])))
        for at in range(0, len(changes.sealed), CHANGES):
            keys = changes.sealed[at : at + CHANGES]
            sizes = tuple(tier.length(key) or 0 for key in keys) if o.mixed else ()
            self._send(m.TierChanged(o.tier, o.part, b"".join(keys), b"", sizes))

    def _open(self) -> None:
        o = self._opening
        try:
            tier = self._objects() if o.tier == Tier.OBJECT else self._recover()
        except (KvmeshError, OSError) as error:
            log.error("tier at %s: %s", o.path, error)
            self._send(m.TierOpened(o.tier, o.part, str(error), medium_failed(error)))
            return
        except Exception as error:
            log.exception("tier at %s", o.path)
            self._send(m.TierOpened(o.tier, o.part, f"{type(error).__name__}: {error}"))
            return
        self.tier = tier
        self.tell()
        self._send(m.TierOpened(o.tier, o.part))  # last, after all TierChanged

    def _recover(self) -> SsdTier:
        """Opens an SSD tier. Raises ConfigError or OSError."""
        if not Path(self._opening.path).is_absolute():
            raise ConfigError("ssd_path='': this rank was told of no folder", field="ssd_path")
        config = ssd_config(self._opening)
        until = time.monotonic() + IN_USE_S
        while True:
            try:
                return SsdTier(config, on_changes=self.tell, below=self._sink)
            except FolderInUse:
                if time.monotonic() > until or self._closing.wait(AGAIN_S):
                    raise

    def _objects(self) -> ObjectTier:
        """Opens an object store. Raises ConfigError or Unavailable."""
        try:
            from kvmesh.tiers.object_store import ObjectConfig, ObjectTier
        except ImportError as error:
            raise ConfigError(f"object_url: {error}: {extras.install('object')}", field="object_url") from None
        o = self._opening
        return ObjectTier(ObjectConfig(url=o.path, identity=o.identity), on_changes=self.tell)

    def stats(self, tier: SsdTier | ObjectTier) -> m.TierStats:
        o, s = self._opening, tier.stats()
        if not isinstance(s, SsdStats):
            c, why = s.counts, "the object store has failed: left alone for now" if s.resting else ""
            traffic = (s.live_bytes, s.blocks, c.hits, c.misses, c.written_bytes, c.read_bytes)
            d = self.demotion
            moved = (d.demoted, d.dropped) if d is not None else (0, 0)
            return m.TierStats(o.tier, o.part, 0, *traffic, 0, c.io_errors, c.corrupt, 0, why, *moved)
        return m.TierStats(
            o.tier,
            o.part,
            s.capacity_bytes,
            s.used_bytes,
            s.blocks,
            s.counts.hits,
            s.counts.misses,
            s.counts.written_bytes,
            s.counts.read_bytes,
            s.evicted,
            s.counts.io_errors,
            s.counts.corrupt,
            s.counts.full,
            "space or disk have failed: puts are refused for now" if s.resting else s.why_not_direct,
        )

    def close(self) -> None:
        self._thread.join(CLOSE_S)
        with self._telling:
            tier, self.tier = self.tier, None
        if tier is not None:
            try:
                tier.close(CLOSE_S)
            except Unavailable as error:
                log.error("%s", error)
