"""Threads that read: neighbours in one call, straight into the caller's memory, every block verified."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

from kvmesh.tiers.calls import expired, resolve
from kvmesh.tiers.ssd.brain import RecordPlace
from kvmesh.tiers.ssd.core import GetOp, SsdCore
from kvmesh.tiers.ssd.disk import Scratch, read_vector
from kvmesh.tiers.ssd.files import BucketFiles
from kvmesh.tiers.ssd.format import PAGE, checksum, record_bytes

log = logging.getLogger(__name__)

RUN_BYTES, RUN_BLOCKS = 8 << 20, 256  # of one call; three pieces a block stay below IOV_MAX
TRIES = 3  # a block moves at most once an eviction; the file may go between look-up and open


def runs(found: Sequence[tuple[GetOp, RecordPlace]]) -> list[list[tuple[GetOp, RecordPlace]]]:
    """Groups blocks that lie back to back into runs, each for one read, in order of place."""
    ordered = sorted(found, key=lambda one: (one[1].bucket, one[1].offset))
    parted: list[list[tuple[GetOp, RecordPlace]]] = []
    end, size = (0, 0), 0
    for get, place in ordered:
        size += place.length
        if (place.bucket, place.offset) != end or size > RUN_BYTES or len(parted[-1]) == RUN_BLOCKS:
            parted.append([])
            size = place.length
        parted[-1].append((get, place))
        end = (place.bucket, place.offset + record_bytes(place.length))
    return parted


def read_run(files: BucketFiles, places: Sequence[RecordPlace], into: Sequence[memoryview], scratch: Scratch) -> None:
    """Reads the payloads of adjacent records. Raises OSError (FileNotFoundError when their bucket was dropped)."""
    file = files.acquire(places[0].bucket)
    try:
        reading = read_vector(into, scratch, direct=file.direct)
        file.read(reading.pieces, places[0].offset + PAGE)
    finally:
        files.release(file)
    reading.finish()


class Readers:
    """A pool of reading threads and its bounded queue. `stop` ends it: waiting gets are answered with False, running
    ones end first."""

    def __init__(self, core: SsdCore, threads: int, max_ops: int, max_bytes: int) -> None:
        self._core = core
        self._max_ops, self._max_bytes = max_ops, max_bytes
        self._ops = self._bytes = 0  # waiting
        self._queue: deque[list[GetOp]] = deque()
        self._cond = threading.Condition()
        self._stopping = False
        self._threads = [threading.Thread(target=self._run, name=f"ssd-read-{n}", daemon=True) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """The number of gets whose I/O has not begun."""
        return self._ops

    def submit(self, gets: list[GetOp]) -> bool:
        """Queues one job of gets. Returns False when the queue is full or stopped."""
        size = sum(len(get.into) for get in gets)
        with self._cond:
            over = self._ops + len(gets) > self._max_ops or self._bytes + size > self._max_bytes
            if self._stopping or (over and self._ops):
                return False
            self._ops += len(gets)
            self._bytes += size
            self._queue.append(gets)
            self._cond.notify()
        return True

    def stop(self) -> None:
        """Begins no more I/O."""
        with self._cond:
            self._stopping = True
            left = [get for gets in self._queue for get in gets]
            self._queue.clear()
            self._ops = self._bytes = 0
            self._cond.notify_all()
        for get in left:
            resolve(get.future, False)

    def join(self, timeout_s: float) -> bool:
        """Waits for all threads, at most `timeout_s` each; returns whether they have ended."""
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        scratch = Scratch()
        while True:
            with self._cond:
                while not self._queue and not self._stopping:
                    self._cond.wait()
                if not self._queue:
                    return
                gets = self._queue.popleft()
                self._ops -= len(gets)
                self._bytes -= sum(len(get.into) for get in gets)
            try:
                self._work(gets, scratch)
            except Exception:
                log.exception("a read failed")
                for get in gets:
                    resolve(get.future, False)

    def _work(self, gets: list[GetOp], scratch: Scratch) -> None:
        gets = self._begun(gets)
        for _ in range(TRIES):
            gets = self._serve(gets, scratch) if gets else []
        self._answer(gets, "misses")

    def _begun(self, gets: list[GetOp]) -> list[GetOp]:
        """Returns the gets that their owners still want."""
        now = self._core.clock()
        gets = [get for get in gets if get.future.set_running_or_notify_cancel()]
        self._answer([get for get in gets if expired(get.deadline_ns, now)], "expired")
        return [get for get in gets if not expired(get.deadline_ns, now)]

    def _serve(self, gets: list[GetOp], scratch: Scratch) -> list[GetOp]:
        """Reads the blocks; returns the gets whose bucket was dropped before it was opened, which must be looked up
        again."""
        brain = self._core.brain
        with self._core.lock:
            found = [(get, place) for get in gets if (place := brain.lookup(get.key)) is not None]
            fits = [(get, place) for get, place in found if place.length == len(get.into)]
        here = {get for get, _ in fits}
        self._answer([get for get in gets if get not in here], "misses")
        again: list[GetOp] = []
        for run in runs(fits):
            again += self._read(run, scratch)
        return again

    def _read(self, run: list[tuple[GetOp, RecordPlace]], scratch: Scratch) -> list[GetOp]:
        core, gets, places = self._core, [get for get, _ in run], [place for _, place in run]
        try:
            read_run(core.files, places, [get.into for get in gets], scratch)
        except OSError as error:
            with core.lock:
                dropped = isinstance(error, FileNotFoundError) and not core.brain.knows(places[0].bucket)
            if dropped:
                return gets
            core.lose(places[0].bucket, error)
            self._answer(gets, "failed")
            return []
        right = [checksum(get.into) == place.checksum for get, place in run]
        with core.lock:
            core.counts.read_bytes += sum(place.length for place in places)
            for get, good in zip(gets, right, strict=True):
                if good:
                    core.brain.hit(get.key)
        self._answer([get for get, good in zip(gets, right, strict=True) if good], "hits", True)
        for (get, place), good in zip(run, right, strict=True):
            if not good:
                core.corrupt(get.key, place)
                resolve(get.future, False)
        return []

    def _answer(self, gets: Sequence[GetOp], count: str, value: bool = False) -> None:
        if gets:
            with self._core.lock:
                self._core.counts.add(count, len(gets))
            for get in gets:
                resolve(get.future, value)
