"""Runs of slabs and who has them: what a pool node's partitions grow by and take from one another.

    region:  │ slab │ slab │ ...            runs of slabs go to partitions (`SegmentAllocator`)
    run:     │ extent │ extent │ ... │rest│ of one partition

Where no slab is free, the runs that were used longest ago go, whoever has them, with the idle blocks in them; where a
run must be longer than the coldest one, its colder neighbours go with it. Runs in which a block is leased, held,
written or pinned hard stay; softly pinned ones go when nothing else can.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.blockservice.partitions import Partition
from kvmesh.kvcache.leases import Lease
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.segment_allocator import SegmentAllocator

MAX_SLABS = 2048
SLAB_BYTES = 1 << 20  # the usual one ...
FEW_SLABS = 64  # ... where there are so many
MIN_SLAB_BYTES = 256 << 10
PAGE = 4096
CANDIDATES = 32  # cold runs that may go, looked at for one move
PASSED_OVER = 256  # ... and others that stood before them
NEVER = 1 << 62
WASTE = 8  # at most an eighth of a run should be no extent's ...
LONGEST = 8  # ... if a run at most so many times as long as it must be can have that


class SlabStore(NodeStore):
    """A node store that tells which extents are used. `used`: of those just sealed, leased or read."""

    def __init__(self, used: Callable[[Sequence[int]], None], **settings: Any) -> None:
        super().__init__(0, **settings)
        self._used = used

    def lease(self, keys: Sequence[bytes], duration_ns: int, now: int) -> Lease:
        lease = super().lease(keys, duration_ns, now)
        self._used([extent for extent in lease.extents if extent is not None])
        return lease

    def read(self, keys: Iterable[bytes]) -> None:
        found = [key for key in keys if key in self._sealed]
        super().read(found)
        self._used([self._sealed[key] for key in reversed(found)])

    def _add(self, key: bytes, extent: int, length: int, nbytes: int | None) -> None:
        self._used((extent,))
        super()._add(key, extent, length, nbytes)

    def _add_all(self, blocks: Mapping[bytes, int], lengths: Sequence[int]) -> None:
        self._used(list(blocks.values()))
        super()._add_all(blocks, lengths)


@dataclass(eq=False, slots=True)
class SlabRun:
    """Slabs [first, first + slabs) of the region: extents [start, start + extents) of a partition."""

    owner: SlabPartition
    first: int
    slabs: int
    start: int
    extents: int
    used: int = 0  # when: a count of uses

    @property
    def numbers(self) -> range:
        return range(self.start, self.start + self.extents)


@dataclass(eq=False)
class SlabPartition(Partition):
    """A pool's: its runs in the order of their extents' numbers."""

    runs: list[SlabRun] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # segment offset of each run
    # Numbers of runs that were taken away, by their length: for the next run of that length.
    holes: dict[int, list[int]] = field(default_factory=dict)

    def run_of(self, extent: int) -> SlabRun:
        return self.runs[bisect_right(self.starts, extent) - 1]

    def offset(self, rank: int, extent: int) -> int:
        assert rank == 0, "a pool node has one rank"
        at = bisect_right(self.starts, extent) - 1
        return self.places[at] + (extent - self.starts[at]) * self.shard_bytes


class Slabs:
    """A region of `nbytes` from segment offset `base` on. O(log slabs) a run taken or given back, O(1) a use; a move
    looks at a bounded number of runs."""

    def __init__(self, base: int, nbytes: int) -> None:
        usual = min(nbytes // FEW_SLABS, SLAB_BYTES)
        self.slab_bytes = max(max(nbytes // MAX_SLABS, usual) // PAGE * PAGE, min(MIN_SLAB_BYTES, nbytes))
        self._base = base
        self._free = SegmentAllocator(nbytes // self.slab_bytes)
        self._owners: list[SlabRun | None] = [None] * self._free.total
        self._coldest: OrderedDict[SlabRun, None] = OrderedDict()
        self._uses = 0

    @property
    def capacity_bytes(self) -> int:
        """Of all slabs."""
        return self._free.total * self.slab_bytes

    @property
    def free_bytes(self) -> int:
        """Of slabs that are no partition's."""
        return self._free.free * self.slab_bytes

    @property
    def fragmentation(self) -> float:
        """See SegmentAllocator."""
        return self._free.fragmentation

    def used(self, owner: SlabPartition, extents: Sequence[int]) -> None:
        """These were used now."""
        for extent in extents:
            run = owner.run_of(extent)
            self._uses += 1
            run.used = self._uses
            self._coldest.move_to_end(run)

    def evict_first(self, owner: SlabPartition, extents: Iterable[int]) -> None:
        """Runs around these that hold nothing but blocks with copies elsewhere go before all others."""
        for run in reversed(list(dict.fromkeys(map(owner.run_of, extents)))):
            if owner.store.have_copies(run.numbers):
                self._coldest.move_to_end(run, last=False)

    def grow(self, owner: SlabPartition, blocks: int) -> bool:
        """One more run out of free slabs, or several that lie side by side, no more than so many blocks need; False:
        there is none that is long enough."""
        for slabs in self._lengths(owner.shard_bytes):
            extents = slabs * self.slab_bytes // owner.shard_bytes
            runs = min(-(-blocks // extents), self._free.largest // slabs)
            if runs < 1:
                continue
            first = self._free.allocate(runs * slabs)
            assert first is not None, "the longest run is there"
            self._free.divide(first, slabs)
            for at in range(first, first + runs * slabs, slabs):
                self._give(owner, at, slabs)
            return True
        return False

    def claim(self, owner: SlabPartition, first: int, slabs: int) -> SlabRun:
        """These very slabs as one more run. ValueError: not all of them are free."""
        self._free.take(first, slabs)
        return self._give(owner, first, slabs)

    def hold_free(self) -> Callable[[], None]:
        """Nobody gets a slab that is free now, until what is returned is called."""
        held = []
        while self._free.largest:
            first = self._free.allocate(self._free.largest)
            assert first is not None, "the longest run is there"
            held.append(first)

        def let_go() -> None:
            for first in held:
                self._free.release(first)

        return let_go

    def move(self, owner: SlabPartition, must: bool) -> bool:
        """One more run out of what others use least: in any case (`must`), or only when that is colder than all of the
        owner's own. False: nothing may go."""
        slabs = self._lengths(owner.shard_bytes)[-1]
        for spared in (False, True) if must else (False,):
            for run in self._cold(spared):
                if run.owner is owner:
                    if must:
                        continue
                    return False
                found = self._window(run, slabs, owner, spared)
                if found is not None:
                    first, runs = found
                    for gone in runs:
                        self._withdraw(gone, spared)
                    self._free.take(first, slabs)
                    self._give(owner, first, slabs)
                    return True
        return False

    def drop(self) -> bool:
        """The run that was used longest ago goes, with its blocks; False: none may go that no pin spares."""
        for run in self._cold(spared=False):
            self._withdraw(run, spared=False)
            return True
        return False

    def _cold(self, spared: bool) -> Iterator[SlabRun]:
        """Runs that may go, the coldest first. Those before them that may not (pinned, mostly) go to the warm end: else
        as many as are looked at would hide all that is idle behind them."""
        found = 0
        for run in list(itertools.islice(self._coldest, CANDIDATES + PASSED_OVER)):
            if run.owner.store.withdrawable(run.numbers, spared=spared):
                yield run
                found += 1
                if found == CANDIDATES:
                    return
            else:
                self._coldest.move_to_end(run)

    def give_back(self, owner: SlabPartition) -> None:
        """All runs of a partition that is no more."""
        for run in owner.runs:
            self._release(run)

    # ── inner ────────────────────────────────────────────────────────────────────────────────────

    def _lengths(self, shard_bytes: int) -> list[int]:
        """Slabs of a run of such extents: a length that wastes little, and the least that holds one."""
        least = -(-shard_bytes // self.slab_bytes)
        best = least
        for slabs in range(least, LONGEST * least + 1):
            waste = slabs * self.slab_bytes % shard_bytes / (slabs * self.slab_bytes)
            if waste <= 1 / WASTE:
                best = slabs
                break
        return [best, least] if best > least else [least]

    def _window(self, run: SlabRun, slabs: int, owner: SlabPartition, spared: bool) -> tuple[int, list[SlabRun]] | None:
        """So many slabs in a row that are free, or of runs that may go, around this one: (the first slab, the runs)."""
        if not run.owner.store.withdrawable(run.numbers, spared=spared):
            return None
        low, high, runs = run.first, run.first + run.slabs, [run]
        while high - low < slabs:
            sides = [(self._coldness(low - 1, owner, spared), -1), (self._coldness(high, owner, spared), 1)]
            (coldness, side) = min(sides)
            if coldness == NEVER:
                return None
            at = low - 1 if side < 0 else high
            beside = self._owners[at]
            if beside is not None:
                runs.append(beside)
            low = min(low, at if beside is None else beside.first)
            high = max(high, at + 1 if beside is None else beside.first + beside.slabs)
        return low, runs

    def _coldness(self, slab: int, owner: SlabPartition, spared: bool) -> int:
        """Of a slab beside a window: 0 a free one, NEVER one that cannot go."""
        if not 0 <= slab < len(self._owners):
            return NEVER
        run = self._owners[slab]
        if run is None:
            return 0
        if run.owner is owner or not run.owner.store.withdrawable(run.numbers, spared=spared):
            return NEVER
        return run.used

    def _give(self, owner: SlabPartition, first: int, slabs: int) -> SlabRun:
        extents = slabs * self.slab_bytes // owner.shard_bytes
        holes = owner.holes.get(extents)
        if holes:
            start = holes.pop()
            owner.store.restore(range(start, start + extents))
        else:
            start = owner.store.grow(extents)
        run = SlabRun(owner, first, slabs, start, extents)
        at = bisect_right(owner.starts, start)
        owner.runs.insert(at, run)
        owner.starts.insert(at, start)
        owner.places.insert(at, self._base + first * self.slab_bytes)
        self._owners[first : first + slabs] = [run] * slabs
        self._uses += 1
        run.used = self._uses
        self._coldest[run] = None
        return run

    def _withdraw(self, run: SlabRun, spared: bool) -> None:
        owner = run.owner
        gone = owner.store.withdraw(run.numbers, spared=spared)
        assert gone, "it was withdrawable"
        at = owner.starts.index(run.start)
        del owner.runs[at], owner.starts[at], owner.places[at]
        owner.holes.setdefault(run.extents, []).append(run.start)
        self._release(run)

    def _release(self, run: SlabRun) -> None:
        self._free.release(run.first)
        self._owners[run.first : run.first + run.slabs] = [None] * run.slabs
        del self._coldest[run]
