"""Large copies by several threads.

One core moves a part of what a machine's memory can: a quarter of it on a desktop, a tenth on a server. So a large copy
is cut into pieces; the thread that has it takes pieces, and so do the helpers. `copy` returns after the last byte,
whoever moved it, so that for fences and superseding only the caller counts.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence

from kvmesh.transfer.memory import copy_runs, merged

LARGE_BYTES = 4 << 20  # below, waking a helper (50 µs in a VM) is not worth its share
PIECE_BYTES = 2 << 20


def by_cores() -> int:
    """Threads for a copy, the caller's among them: others have work on these cores, too."""
    return 1 + min(3, len(os.sched_getaffinity(0)) // 4)


class _Job:
    def __init__(self, targets: Sequence[int], sources: Sequence[int], lengths: Sequence[int]) -> None:
        self.pieces: deque[tuple[list[int], list[int], list[int]]] = deque()
        self.undone = 0
        room = 0
        for target, source, length in zip(targets, sources, lengths, strict=True):
            while length > 0:
                if room == 0:
                    self.pieces.append(([], [], []))
                    room = PIECE_BYTES
                take = min(length, room)
                piece = self.pieces[-1]
                piece[0].append(target)
                piece[1].append(source)
                piece[2].append(take)
                target, source, length, room = target + take, source + take, length - take, room - take
        self.undone = len(self.pieces)


class Copiers:
    """`threads` - 1 helpers, started with the first large copy. Owned by the transport."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._helpers: list[threading.Thread] = []
        self._closed = False

    def wants(self, nbytes: int) -> bool:
        return self.threads > 1 and nbytes >= LARGE_BYTES

    def copy(self, targets: Sequence[int], sources: Sequence[int], lengths: Sequence[int]) -> None:
        """As `memory.copy_runs`. Returns when every byte is there."""
        job = _Job(*merged(targets, sources, lengths))
        with self._changed:
            if not self._closed:
                self._jobs.append(job)
                self._start()
                self._changed.notify(self.threads - 1)
        while self._work(job):
            pass
        with self._changed:
            if job in self._jobs:
                self._jobs.remove(job)
            while job.undone:
                self._changed.wait()

    def close(self, timeout_s: float) -> None:
        """Helpers end after the piece in their hands; copies under way are finished by their callers."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._helpers:
            thread.join(timeout_s)

    def _start(self) -> None:
        while len(self._helpers) < self.threads - 1:
            thread = threading.Thread(target=self._help, name="kvmesh-shm-copy", daemon=True)
            self._helpers.append(thread)
            thread.start()

    def _help(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                job = self._jobs[0]
                if not job.pieces:
                    self._jobs.popleft()
                    continue
            self._work(job)

    def _work(self, job: _Job) -> bool:
        """Moves one piece; false when there is none left to take."""
        try:
            piece = job.pieces.popleft()
        except IndexError:
            return False
        copy_runs(*piece)
        with self._changed:
            job.undone -= 1
            if job.undone == 0:
                self._changed.notify_all()
        return True
