"""Large copies by several threads.

One core moves a part of what a machine's memory can: two thirds of it on a desktop, a tenth on a server. So a large
copy is cut into pieces, which its owner's thread takes, and so do the helpers. Nobody waits for the others at the end:
whoever moves the last byte calls `done`, while the rest are at the pieces of the next copy.

    owner ── start(job) ──▶ jobs ◀── helpers        job.work() moves one piece; the last one calls done
      └───── job.work() ─────┘
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvmesh.transfer.memory import copy_runs, merged

log = logging.getLogger(__name__)

LARGE_BYTES = 2 << 20  # below, waking a helper (50 µs in a VM) is not worth its share
PIECE_BYTES = 1 << 20

Piece = tuple[Sequence[int], Sequence[int], Sequence[int]]  # targets, sources, lengths


def by_cores() -> int:
    """Returns how many threads copy, the owner's included; other work needs these cores, too."""
    cores = len(os.sched_getaffinity(0))
    return min(cores, 2) if cores < 8 else 1 + min(3, cores // 4)


def cut(targets: Sequence[int], sources: Sequence[int], lengths: Sequence[int], piece_bytes: int) -> list[Piece]:
    """Cuts runs, in order, into pieces of `piece_bytes` each except the last. Equal short runs stay whole."""
    targets, sources, lengths = merged(targets, sources, lengths)
    count, first = len(lengths), lengths[0]
    if first <= piece_bytes // 4 and lengths.count(first) == count:
        step = piece_bytes // first
        return [(targets[i : i + step], sources[i : i + step], lengths[i : i + step]) for i in range(0, count, step)]
    pieces: list[tuple[list[int], list[int], list[int]]] = []
    room = 0
    for target, source, length in zip(targets, sources, lengths, strict=True):
        while length > 0:
            if room == 0:
                pieces.append(([], [], []))
                room = piece_bytes
            take = min(length, room)
            piece = pieces[-1]
            piece[0].append(target)
            piece[1].append(source)
            piece[2].append(take)
            target, source, length, room = target + take, source + take, length - take, room - take
    return list(pieces)


class CopyJob:
    """One copy. `done(error)` is called once, with no lock held, by the thread that moved the last piece, when no
    thread touches the memory any more; `error` is None when every byte was copied."""

    def __init__(
        self,
        targets: Sequence[int],
        sources: Sequence[int],
        lengths: Sequence[int],
        done: Callable[[BaseException | None], None],
    ) -> None:
        self.pieces = deque(cut(targets, sources, lengths, PIECE_BYTES))
        self._undone = len(self.pieces)
        self._error: BaseException | None = None
        self._done = done
        self._lock = threading.Lock()

    def work(self) -> bool:
        """Copies one piece; returns False when none is left."""
        try:
            piece = self.pieces.popleft()
        except IndexError:
            return False
        try:
            copy_runs(*piece)
        except Exception as err:
            self._error = err
        with self._lock:
            self._undone -= 1
            last = self._undone == 0
        if last:
            self._done(self._error)
        return True


class Copiers:
    """`threads` - 1 helper threads, started with the first job. The transport owns them."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._changed = threading.Condition()
        self._jobs: deque[CopyJob] = deque()
        self._helpers: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def wants(self, nbytes: int) -> bool:
        return self.threads > 1 and nbytes >= LARGE_BYTES

    def start(self, job: CopyJob) -> None:
        """Offers a job to the helpers. Its owner must call `work` until no piece is left, because helpers may
        be busy."""
        with self._changed:
            if self._closed:
                return
            self._ready()
            if self._helpers:  # nobody else would take it off the list
                self._jobs.append(job)
            if self._idle:
                self._changed.notify(self.threads - 1)

    def close(self, timeout_s: float) -> None:
        """Ends the helpers after the piece that each is copying; owners finish their copies themselves."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()
        for thread in self._helpers:
            thread.join(timeout_s)

    def _ready(self) -> None:
        while len(self._helpers) < self.threads - 1:
            thread = threading.Thread(target=self._help, name="kvmesh-shm-copy", daemon=True)
            try:
                thread.start()
            except RuntimeError as err:  # no more threads: the owners do it all
                log.warning("shm: no helper for copies: %s", err)
                return
            self._helpers.append(thread)

    def _help(self) -> None:
        while (job := self._next()) is not None:
            try:
                while job.work():
                    pass
            except Exception:
                log.exception("the end of a copy raised")
            with self._changed:
                if self._jobs and self._jobs[0] is job:
                    self._jobs.popleft()
            del job  # it keeps memory mapped

    def _next(self) -> CopyJob | None:
        with self._changed:
            while not self._jobs and not self._closed:
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            return None if self._closed else self._jobs[0]
