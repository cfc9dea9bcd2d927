"""What the threads of one SSD tier share: the brain under one lock, the files, the counts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvmesh.tiers.calls import ChangeNotifier, DemotionSink
from kvmesh.tiers.ssd.brain import Brain, Drop, RecordPlace
from kvmesh.tiers.ssd.disk import MEDIUM
from kvmesh.tiers.ssd.files import BucketFiles
from kvmesh.tiers.ssd.sketch import FrequencySketch

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SsdCounts:
    """Counts since the start, of operations, except `*_bytes` and where a comment says blocks or buckets."""

    hits: int = 0
    misses: int = 0  # not here
    stored: int = 0
    present: int = 0  # puts of what was here already
    not_admitted: int = 0  # too seldom used, see `admit_uses`
    busy: int = 0  # the queue was full
    expired: int = 0  # the deadline was over before the I/O began
    no_room: int = 0  # puts that found no space, or met the rest after a failure
    full: int = 0  # writes and new buckets that a full disk refused
    failed: int = 0  # puts and gets that an I/O error ended
    corrupt: int = 0  # blocks whose bytes were not those put; never given out
    io_errors: int = 0
    retired: int = 0  # buckets given up after an I/O error
    lost: int = 0  # blocks in them
    removed: int = 0  # keys
    written_bytes: int = 0  # records and footers
    read_bytes: int = 0  # payloads, for gets and re-insertion

    def add(self, name: str, n: int = 1) -> None:
        """Adds to the count of this name."""
        setattr(self, name, getattr(self, name) + n)


@dataclass(slots=True, eq=False)
class GetOp:
    """A get that has not begun. `future` is resolved when nothing touches `into` any more."""

    key: bytes
    into: memoryview
    deadline_ns: int | None
    future: Future[bool]


@dataclass(slots=True, eq=False)
class PutOp:
    """A put that has not begun; `ticket` is the brain's."""

    key: bytes
    data: memoryview
    ticket: int
    deadline_ns: int | None
    future: Future[bool]


@dataclass(slots=True, eq=False)
class RemoveOp:
    """Keys that are already removed from the index, to be written down. `future` is None when the tier itself
    wants it."""

    keys: Sequence[bytes]
    future: Future[bool] | None = None


@dataclass(slots=True, eq=False)
class FlushOp:
    """Asks that everything before it be written and room be made; with `sync` it must survive a power loss."""

    sync: bool
    future: Future[bool]


@dataclass(slots=True, eq=False)
class SsdCore:
    """What the tier's threads share. `lock` is held around the brain and the counts, never around I/O: for
    microseconds, or about half a microsecond a record where a bucket is closed or dropped."""

    brain: Brain
    sketch: FrequencySketch
    clock: Callable[[], int]  # monotonic ns
    on_changes: Callable[[], None] | None
    counts: SsdCounts = field(default_factory=SsdCounts)
    lock: threading.Lock = field(default_factory=threading.Lock)
    below: DemotionSink | None = None  # takes what is evicted and worth it
    teller: ChangeNotifier = field(init=False)
    files: BucketFiles = field(init=False)
    bury: Callable[[RemoveOp], None] = field(init=False)  # to the writer

    def __post_init__(self) -> None:
        self.teller = ChangeNotifier(self.lock, self.on_changes)

    def tell(self) -> None:
        """Reports that the keys have changed, once until they are taken. The caller must not hold the lock."""
        self.teller.tell(lambda: self.brain.changed)

    def gone(self, number: int) -> None:
        """Notes that the space of a dropped bucket is free."""
        with self.lock:
            self.brain.gone(number)

    def drop(self, step: Drop) -> None:
        """Deletes the file of a bucket that the brain has dropped."""
        self.files.drop(step.bucket)
        self.tell()

    def lose(self, number: int, error: OSError) -> None:
        """Retires a bucket after an I/O error: its blocks are misses from now on. Keys that its records list as removed
        from older buckets are written again."""
        with self.lock:
            self.counts.io_errors += 1
            before = len(self.brain)
            known = self.brain.knows(number) and error.errno in MEDIUM
            removed = self.brain.removed_in(number)
            step = self.brain.discard(number) if known else None
            self.counts.retired += known
            self.counts.lost += before - len(self.brain)
        if step is not None:
            log.warning("bucket %d retired: %s", number, error)
            if removed:
                self.bury(RemoveOp(removed))
            self.drop(step)

    def corrupt(self, key: bytes, place: RecordPlace) -> None:
        """Removes a block whose bytes are not those put, so that it is not found here, nor after a restart."""
        with self.lock:
            self.counts.corrupt += 1
            here = self.brain.is_at(key, place)
            if here:
                self.brain.remove((key,))
        if here:
            log.warning("block %s in bucket %d is damaged", key.hex(), place.bucket)
            self.bury(RemoveOp((key,)))
            self.tell()
