"""Blocks are copied between device pages and the host segment slice by slice, in the gaps between two steps.

A prompt's KV is gigabytes: copied at once, it would keep every running row waiting. `Seals` are not urgent, as the
front holds pages and extents until SealCopied; `Moves` are what somebody waits for. No step may touch what either of
them copies, but for one promise: a PrefillStep finds all that was to be loaded before it (`Moves.loaded`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker.device import CopiesDone, CopyPieces, DeviceMemory, byte_view


@dataclass(slots=True, eq=False)
class _Job:
    """Describes one order to copy blocks. `answer` is called once, when all blocks are copied."""

    pages: tuple[int, ...]
    extents: tuple[int, ...]
    into_pages: bool
    check: bool
    answer: Callable[[CopiesDone], None]
    begun: int = 0  # blocks whose copy has begun
    under_way: int = 0  # copies under way
    start_ns: int = 0
    bad: list[int] = field(default_factory=list)

    def pieces(self, memory: DeviceMemory, first: int, end: int) -> CopyPieces:
        """Returns these blocks, one a piece."""
        source, target = byte_view(memory.pages), byte_view(memory.extents)
        begins, ends, size = self.pages[first:end], self.extents[first:end], memory.layout.shard_bytes
        if self.into_pages:
            source, target, begins, ends = target, source, ends, begins
        both = zip(begins, ends, strict=True)
        return CopyPieces(source, target, [(begin * size, end * size, size) for begin, end in both])


class Slices:
    """Queues jobs in the order in which they came; `slice_bytes` of them are copied in one gap. Where copies run beside
    the steps, the next slice is begun once fewer than `depth` copies are under way."""

    def __init__(self, memory: DeviceMemory, slice_bytes: int, depth: int) -> None:
        self._memory = memory
        self._blocks = max(1, slice_bytes // memory.layout.shard_bytes)
        self._depth = depth
        self._waiting: deque[_Job] = deque()
        self._under_way = 0

    @property
    def ready(self) -> bool:
        """Whether `advance` would begin something."""
        return bool(self._waiting) and self._under_way < self._depth

    def advance(self) -> None:
        """Begins the next slice, of as many jobs as it has room for."""
        left = self._blocks if self.ready else 0
        while self._waiting and left > 0:
            job = self._waiting[0]
            first, end = job.begun, min(job.begun + left, len(job.pages))
            left -= end - first
            job.begun = end
            if end == len(job.pages):
                self._waiting.popleft()
            job.under_way += 1
            self._under_way += 1
            done = partial(self._copied, job, first)
            pieces = job.pieces(self._memory, first, end)
            self._memory.copy(pieces, done, into_pages=job.into_pages, check=job.check)

    def _copied(self, job: _Job, first: int, done: CopiesDone) -> None:
        self._under_way -= 1
        job.under_way -= 1
        job.start_ns = job.start_ns or done.start_ns
        job.bad.extend(first + at for at in done.bad)
        if job.begun == len(job.pages) and not job.under_way:
            job.answer(CopiesDone(job.start_ns, done.end_ns, tuple(job.bad)))


class Seals(Slices):
    """Copies full blocks from `memory`'s pages to its extents."""

    def __init__(self, memory: DeviceMemory, send: Callable[[m.ToFront], None]) -> None:
        super().__init__(memory, memory.seal_bytes, depth=1)
        self._send = send

    def add(self, spec: m.SealCopy) -> None:
        """Takes an order, which SealCopied answers."""
        self._waiting.append(_Job(spec.pages, spec.extents, False, True, partial(self._done, spec)))

    def _done(self, spec: m.SealCopy, done: CopiesDone) -> None:
        self._send(m.SealCopied(spec.ticket, *done))


class Moves(Slices):
    """Copies what requests wait for: prefixes into pages, and rows that are swapped out and in again."""

    def __init__(self, memory: DeviceMemory, send: Callable[[m.ToFront], None]) -> None:
        super().__init__(memory, memory.move_bytes, depth=2)  # with two a device is never without a copy
        self._send = send
        self.loads = 0  # how many loads were ever asked for
        self._open: set[int] = set()  # the numbers of loads that are not done

    def add(self, spec: m.CopyIn | m.CopyOut | m.LoadCopy) -> None:
        """Takes an order, which Copied or LoadCopied answers."""
        if isinstance(spec, m.LoadCopy):
            self.loads += 1
            self._open.add(self.loads)
        answer = partial(self._done, spec, self.loads)
        self._waiting.append(_Job(spec.pages, spec.extents, not isinstance(spec, m.CopyOut), False, answer))

    def loaded(self, loads: int) -> bool:
        """Whether the first `loads` loads are done."""
        return min(self._open, default=loads + 1) > loads

    def _done(self, spec: m.CopyIn | m.CopyOut | m.LoadCopy, number: int, done: CopiesDone) -> None:
        if isinstance(spec, m.LoadCopy):
            self._open.remove(number)
            self._send(m.LoadCopied(spec.ticket, done.start_ns, done.end_ns))
        else:
            self._send(m.Copied(spec.handle, isinstance(spec, m.CopyIn), done.start_ns, done.end_ns))
