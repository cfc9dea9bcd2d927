"""READs over shm: the reader copies from its own read-only map of the peer's memory.

A short one is copied by the caller's thread, the others by a thread of the path, or by a caller that has nothing to do
but wait for them; large ones are jobs, of which helpers take pieces too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from kvmesh.transfer.memory import Mapping, copy_runs
from kvmesh.transfer.transports.base import Frame
from kvmesh.transfer.transports.shm.copy import CopyJob

if TYPE_CHECKING:
    from kvmesh.transfer.transports.shm.transport import ShmTransport

log = logging.getLogger(__name__)

OWN_READ_BYTES = 1 << 20  # takes the caller hardly longer than waking another thread


class ShmReader:
    """Copies the READs of one path; it is thread-safe. A frame is done as soon as its bytes are there."""

    def __init__(self, transport: ShmTransport, peer: str) -> None:
        self._transport = transport
        self._peer = peer
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Frame, Mapping, int]] = deque()
        self._jobs: deque[CopyJob] = deque()  # of which pieces may be left to take
        self._busy = False  # somebody reads: the thread, or a caller that waits
        self._closed = False
        self._thread: threading.Thread | None = None
        self._here = threading.local()

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def read_here(self, frame: Frame, mapping: Mapping, base: int) -> bool:
        """Copies in the caller's thread. Returns False inside another such copy: frames that are posted from its end go
        to the reading thread."""
        if getattr(self._here, "inside", False):
            return False
        self._here.inside = True
        try:
            self._fetch(frame, mapping, base)
        finally:
            self._here.inside = False
        return True

    def put(self, frame: Frame, mapping: Mapping, base: int) -> None:
        """Queues a frame to be copied. `mapping` begins at the peer's offset `base`."""
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kvmesh-shm-read", daemon=True)
                self._transport.spawn(thread)  # OSError when there can be no more threads: it is nowhere then
                self._thread = thread
            self._waiting.append((frame, mapping, base))
            if not self._busy:
                self._changed.notify()

    def assist(self, frame: Frame, seconds: float) -> None:
        """Copies in the caller's thread, which waits for this frame. It returns when there is nothing to take, the
        frame is done, or after `seconds`."""
        until = time.monotonic() + seconds
        with self._changed:
            if self._busy or not (self._waiting or self._jobs) or getattr(self._here, "inside", False):
                return
            self._busy = self._here.inside = True
        try:
            while not frame.answered and time.monotonic() < until and self._step():
                pass
        finally:
            self._here.inside = False
            self._rest()

    def recall(self, frame: Frame) -> bool:
        """Takes a frame back; returns True if its copy has not begun, and never will."""
        with self._changed:
            for entry in self._waiting:
                if entry[0] is frame:
                    self._waiting.remove(entry)
                    return True
        return False

    def take_back(self) -> list[Frame]:
        """Takes back and returns all frames whose copy has not begun."""
        with self._changed:
            frames = [entry[0] for entry in self._waiting]
            self._waiting.clear()
        return frames

    def close(self) -> None:
        """Lets the reading thread end when nothing waits any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        self._here.inside = True
        while True:
            with self._changed:
                while self._busy or not (self._jobs or self._waiting or self._closed):
                    self._changed.wait()
                if not (self._jobs or self._waiting):
                    return
                self._busy = True
            try:
                while self._step():
                    pass
            finally:
                self._rest()

    def _rest(self) -> None:
        with self._changed:
            self._busy = False
            if self._jobs or self._waiting or self._closed:
                self._changed.notify_all()

    def _step(self) -> bool:
        """Does one piece of work, and begins the next frame before the helpers run out of pieces of this one. Returns
        False when there is nothing to do. Only the thread that set `_busy` calls it."""
        copiers, jobs = self._transport.copiers, self._jobs
        if not jobs or (len(jobs) == 1 and len(jobs[0].pieces) < copiers.threads):
            with self._changed:
                entry = self._waiting.popleft() if self._waiting else None
            if entry is not None:
                self._begin(*entry)
                return True
        if not jobs:
            return False
        if not jobs[0].work():
            jobs.popleft()
        return True

    def _begin(self, frame: Frame, mapping: Mapping, base: int) -> None:
        copiers = self._transport.copiers
        if copiers.wants(frame.nbytes):
            job = CopyJob(*_runs(frame, mapping, base), partial(self._fetched, frame, mapping))
            self._jobs.append(job)
            copiers.start(job)
        else:
            self._fetch(frame, mapping, base)

    def _fetch(self, frame: Frame, mapping: Mapping, base: int) -> None:
        copy_runs(*_runs(frame, mapping, base))
        frame.done()

    def _fetched(self, frame: Frame, mapping: Mapping, error: BaseException | None) -> None:
        """Ends a job, on any thread; `mapping` is held until then."""
        if error is None:
            frame.done()
        else:
            log.error("shm read from %s failed", self._peer, exc_info=error)
            frame.lost(str(error), settled=True)


def _runs(frame: Frame, mapping: Mapping, base: int) -> tuple[list[int], list[int], list[int]]:
    shift = mapping.address - base
    parts = frame.parts
    return [p[1] for p in parts], [p[2] + shift for p in parts], [p[3] for p in parts]
