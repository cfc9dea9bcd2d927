"""SegmentAllocator against a list of units, and what it costs."""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvmesh.kvcache.segment_allocator import SegmentAllocator
from kvmesh.kvcache.size_classes import PAGE, size_class
from tests.support.tracing import lines


class Units(RuleBasedStateMachine):
    """The model: who has each unit, looked through from the front for every question."""

    make: type[SegmentAllocator] = SegmentAllocator

    @initialize(total=st.integers(0, 40))
    def begin(self, total: int) -> None:
        self.made = self.make(total)
        self.owner: list[int] = [0] * total
        self.runs: dict[int, int] = {}

    def starts(self, n: int) -> list[int]:
        return [i for i in range(len(self.owner) - n + 1) if not any(self.owner[i : i + n])]

    def own(self, first: int, n: int) -> None:
        self.owner[first : first + n] = [1] * n
        self.runs[first] = n

    @rule(n=st.integers(1, 20), align=st.sampled_from([1, 1, 2, 4, 8]))
    def allocate(self, n: int, align: int) -> None:
        first = self.made.allocate(n, align)
        starts = self.starts(n)
        if first is None:
            assert not starts or (align > 1 and not self.starts(n + align - 1)), "there was room"
            return
        assert first in starts and first % align == 0
        assert align > 1 or first == starts[0], "not the lowest"
        self.own(first, n)

    @rule(first=st.integers(-2, 42), n=st.integers(0, 12))
    def take(self, first: int, n: int) -> None:
        if n > 0 and first in self.starts(n):
            self.made.take(first, n)
            self.own(first, n)
        else:
            with pytest.raises(ValueError, match=f"units {first}"):
                self.made.take(first, n)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        first = data.draw(st.sampled_from(sorted(self.runs)))
        n = self.runs.pop(first)
        assert self.made.release(first) == n
        self.owner[first : first + n] = [0] * n

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), n=st.integers(0, 4))
    def divide(self, data: st.DataObject, n: int) -> None:
        first = data.draw(st.sampled_from(sorted(self.runs)))
        length = self.runs[first]
        if n < 1 or length % n:
            with pytest.raises(ValueError, match=f"unit {first}"):
                self.made.divide(first, n)
        else:
            self.made.divide(first, n)
            self.runs |= dict.fromkeys(range(first, first + length, n), n)

    @rule(first=st.integers(0, 41))
    def release_what_is_no_run(self, first: int) -> None:
        if first not in self.runs:
            with pytest.raises(ValueError, match=f"unit {first}"):
                self.made.release(first)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "made"):
            return
        self.made.check_integrity()
        free = self.owner.count(0)
        largest = next((n for n in range(len(self.owner), 0, -1) if self.starts(n)), 0)
        assert (self.made.total, self.made.free, self.made.largest) == (len(self.owner), free, largest)
        assert self.made.fragmentation == (1 - largest / free if free else 0)


TestUnits = Units.TestCase
TestUnits.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class Shortsighted(SegmentAllocator):
    """Looks at the first part alone."""

    def _run_at(self, first: int) -> int:
        return min(super()._run_at(first), 2)


class OneSided(SegmentAllocator):
    """Runs across the middle of a part are not seen."""

    def _join(self, node: int, half: int) -> None:
        super()._join(node, half)
        self._best[node] = max(self._best[2 * node], self._best[2 * node + 1], self._left[node], self._right[node])


@pytest.mark.parametrize("broken", [Shortsighted, OneSided])
def test_the_model_notices(broken: type[SegmentAllocator]) -> None:
    class Broken(Units):
        make = broken

    found = settings(
        max_examples=200, stateful_step_count=30, deadline=None, derandomize=True, database=None,
        phases=[Phase.generate], report_multiple_bugs=False,
    )  # fmt: skip
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        run_state_machine_as_test(Broken, settings=found)


@pytest.mark.parametrize(("n", "align"), [(0, 1), (-1, 1), (1, 0), (1, 3), (1, -4)])
def test_misuse_is_refused(n: int, align: int) -> None:
    with pytest.raises(ValueError, match=f"n={n}, align={align}"):
        SegmentAllocator(8).allocate(n, align)


def test_the_cost_does_not_grow_with_the_segment() -> None:
    def cost(total: int) -> float:
        made, rng = SegmentAllocator(total), random.Random(3)
        runs = [first for _ in range(total // 8) if (first := made.allocate(rng.randint(1, 8))) is not None]
        mixed = rng.sample(runs, 100)

        def work() -> None:
            for first in mixed:
                made.release(first)
            for _ in range(100):
                made.allocate(rng.randint(1, 8), 4)

        return lines(work)

    small, large = cost(1 << 10), cost(1 << 17)
    assert large < small * 17 / 10 * 1.5, f"{small} lines at 2^10 units, {large} at 2^17"


@given(nbytes=st.integers(1, 1 << 40))
def test_a_class_holds_its_blocks_and_wastes_little(nbytes: int) -> None:
    extent = size_class(nbytes)
    assert extent % PAGE == 0 and size_class(extent) == extent, "a class is of its own class"
    pages = -(-nbytes // PAGE)
    assert nbytes <= extent and extent - pages * PAGE <= extent / 5
    assert size_class(nbytes + 1) >= extent


def test_four_classes_a_doubling() -> None:
    classes = sorted({size_class(n * PAGE) // PAGE for n in range(1, 129)})
    assert classes == [*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128]
    with pytest.raises(ValueError, match="nbytes=0"):
        size_class(0)
