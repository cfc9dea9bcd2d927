"""Deadlines against a dict that is searched for every question."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.kvcache.leases import Deadlines

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.sampled_from("abc"), st.integers(0, 9)),
        st.tuples(st.just("drop"), st.sampled_from("abc"), st.just(0)),
        st.tuples(st.just("due"), st.integers(0, 9), st.sampled_from([1, 2, None])),
    ),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=400, deadline=None)
def test_ends_come_in_their_order(steps: list[tuple[str, str | int, int | None]]) -> None:
    real: Deadlines[str] = Deadlines()
    ends: dict[str, tuple[int, int]] = {}
    serial = 0
    for what, first, second in steps:
        if what == "extend":
            assert isinstance(first, str) and second is not None
            if first not in ends:
                serial += 1
                ends[first] = (second, serial)
            ends[first] = (max(second, ends[first][0]), ends[first][1])
            assert real.extend(first, second) == ends[first][0]
        elif what == "drop":
            assert isinstance(first, str)
            assert real.drop(first) == (ends.pop(first, None) is not None)
        else:
            assert isinstance(first, int)
            over = sorted((end, key) for key, end in ends.items() if end[0] <= first)[:second]
            assert real.due(first, second) == [key for _, key in over]
            for _, key in over:
                del ends[key]
            # Only now: to look at `next` clears what lies on top.
            assert real.next == min((end for end, _ in ends.values()), default=None)
        real.check_integrity()
        assert len(real) == len(ends)
        assert [real.get(key) for key in "abc"] == [ends.get(key, (None,))[0] for key in "abc"]


def test_dropped_ends_leave_no_heap_behind() -> None:
    real: Deadlines[int] = Deadlines()
    for key in range(10_000):
        real.extend(key, 10**9 + key)
        assert real.drop(key)
    assert len(real._heap) < 200
