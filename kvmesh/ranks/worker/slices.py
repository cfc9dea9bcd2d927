"""Blocks are copied between device pages and the host segment slice by slice, in the gaps between two steps.

A prompt's KV is gigabytes: copied at once, it would keep every running row waiting. `Seals` are not urgent, as the
front holds pages and extents until SealCopied; `Moves` are what somebody waits for. No step may touch what either of
them copies, but for one promise: a PrefillStep finds all that was to be loaded before it (`Moves.loaded`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvmesh.errors import InternalError
from kvmesh.kvcache.cache_groups import GroupPages
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker.device import CopiesDone, CopyPieces, DeviceMemory


class Pairs(NamedTuple):
    """Names blocks of one cache group to copy: page `pages[i]` and extent `extents[i]` are of position `positions[i]`
    of the order."""

    group: int
    pages: Sequence[int]
    extents: Sequence[int]
    positions: Sequence[int]


def pairs_of(
    pages: Sequence[int],
    extents: Sequence[int],
    groups: Sequence[GroupPages],
    group_extents: Sequence[GroupPages],
) -> list[Pairs]:
    """Returns what an order names. Of a model that is kept by cache groups positions are `first + i`, and blocks that
    lack a page or an extent are left out. Raises InternalError where pages and extents are not of the same blocks."""
    if not groups and not group_extents:
        return [Pairs(0, pages, extents, range(len(pages)))]
    found = []
    for own, other in itertools.zip_longest(groups, group_extents):
        if own is None or other is None or own.group != other.group or len(own.ids) != len(other.ids):
            raise InternalError(f"pages {own} are copied to or from extents {other}")
        both = [
            (page, extent, position)
            for position, (page, extent) in enumerate(zip(own.ids, other.ids, strict=True), own.first)
            if page >= 0 and extent >= 0
        ]
        if both:
            found.append(Pairs(own.group, *zip(*both, strict=True)))
    return found


NOTHING = (Pairs(0, (), (), ()),)


@dataclass(slots=True, eq=False)
class _Job:
    """Describes one order to copy blocks. `answer` is called once, when all blocks are copied, with the group and the
    position of those that are not finite."""

    waiting: deque[Pairs]
    into_pages: bool
    check: bool
    answer: Callable[[CopiesDone, list[tuple[int, int]]], None]
    begun: int = 0  # blocks of the first of `waiting` whose copy has begun
    under_way: int = 0  # copies under way
    start_ns: int = 0
    bad: list[tuple[int, int]] = field(default_factory=list)


class Slices:
    """Queues jobs in the order in which they came; `slice_bytes` of them are copied in one gap. Where copies run beside
    the steps, the next slice is begun once fewer than `depth` copies are under way."""

    def __init__(self, memory: DeviceMemory, slice_bytes: int, depth: int) -> None:
        self._memory = memory
        self._bytes = slice_bytes
        self._depth = depth
        self._waiting: deque[_Job] = deque()
        self._under_way = 0

    @property
    def ready(self) -> bool:
        """Whether `advance` would begin something."""
        return bool(self._waiting) and self._under_way < self._depth

    def advance(self) -> None:
        """Begins the next slice, of as many jobs as it has room for, and of one block at least."""
        left, first = self._bytes if self.ready else 0, True
        while self._waiting and left > 0:
            job = self._waiting[0]
            taken = self._begin(job, left, first)
            if taken is None:
                break
            left, first = left - taken, first and not taken
            if not job.waiting:
                self._waiting.popleft()

    def _begin(self, job: _Job, room: int, first: bool) -> int | None:
        """Begins the copy of a job's next blocks, all of one group, and returns their bytes; None if `room` has none
        for one block, unless it is the `first`."""
        pairs = job.waiting[0]
        size = self._memory.groups[pairs.group].layout.shard_bytes
        count = max(room // size, int(first))
        if not count and pairs.pages:
            return None
        begin, end = job.begun, min(job.begun + count, len(pairs.pages))
        job.begun = end
        if end == len(pairs.pages):
            job.waiting.popleft()
            job.begun = 0
        job.under_way += 1
        self._under_way += 1
        done = partial(self._copied, job, pairs, begin)
        self._memory.copy(
            self._pieces(pairs, begin, end, job.into_pages), done, into_pages=job.into_pages, check=job.check
        )
        return (end - begin) * size

    def _pieces(self, pairs: Pairs, first: int, end: int, into_pages: bool) -> CopyPieces:
        """Returns these blocks, one a piece."""
        group, source, target = pairs.group, self._memory.page_blocks, self._memory.extent_blocks
        begins, ends, size = pairs.pages[first:end], pairs.extents[first:end], source.groups[group].layout.shard_bytes
        if into_pages:
            source, target, begins, ends = target, source, ends, begins
        a, b, both = source.starts[group], target.starts[group], zip(begins, ends, strict=True)
        runs = [(a + begin * size, b + end * size, size) for begin, end in both]
        return CopyPieces(source.data, target.data, runs, group)

    def _copied(self, job: _Job, pairs: Pairs, first: int, done: CopiesDone) -> None:
        self._under_way -= 1
        job.under_way -= 1
        job.start_ns = job.start_ns or done.start_ns
        job.bad.extend((pairs.group, pairs.positions[first + at]) for at in done.bad)
        if not job.waiting and not job.under_way:
            job.answer(CopiesDone(job.start_ns, done.end_ns), job.bad)


class Seals(Slices):
    """Copies full blocks from `memory`'s pages to its extents."""

    def __init__(self, memory: DeviceMemory, send: Callable[[m.ToFront], None]) -> None:
        super().__init__(memory, memory.seal_bytes, depth=1)
        self._send = send

    def add(self, spec: m.SealCopy) -> None:
        """Takes an order, which SealCopied answers."""
        pairs = pairs_of(spec.pages, spec.extents, spec.groups, spec.group_extents)
        self._waiting.append(_Job(deque(pairs or NOTHING), False, True, partial(self._done, spec)))

    def _done(self, spec: m.SealCopy, done: CopiesDone, bad: list[tuple[int, int]]) -> None:
        if spec.groups:
            self._send(m.SealCopied(spec.ticket, done.start_ns, done.end_ns, bad_groups=tuple(bad)))
        else:
            self._send(m.SealCopied(spec.ticket, done.start_ns, done.end_ns, tuple(at for _, at in bad)))


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
        pairs = pairs_of(spec.pages, spec.extents, spec.groups, spec.group_extents)
        self._waiting.append(_Job(deque(pairs or NOTHING), not isinstance(spec, m.CopyOut), False, answer))

    def loaded(self, loads: int) -> bool:
        """Whether the first `loads` loads are done."""
        return min(self._open, default=loads + 1) > loads

    def _done(
        self, spec: m.CopyIn | m.CopyOut | m.LoadCopy, number: int, done: CopiesDone, _: list[tuple[int, int]]
    ) -> None:
        if isinstance(spec, m.LoadCopy):
            self._open.remove(number)
            self._send(m.LoadCopied(spec.ticket, done.start_ns, done.end_ns))
        else:
            self._send(m.Copied(spec.handle, isinstance(spec, m.CopyIn), done.start_ns, done.end_ns))
