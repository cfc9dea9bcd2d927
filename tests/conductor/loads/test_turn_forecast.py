"""Which work an instance computes now: what has begun is not overtaken; reports correct it; asking changes nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvmesh.services.conductor.loads.queues import PrefillQueue, PrefillWork
from kvmesh.services.conductor.loads.shortest_first import ahead

WEIGHT = 16.0


def work(name: str, seconds: float, at: float = 0.0, *, chunks: int = 1) -> PrefillWork:
    return PrefillWork(name, round(seconds * 1e4), seconds, (), at, 1e9, chunks=chunks)


def queue(*works: PrefillWork) -> PrefillQueue:
    made = PrefillQueue(0.0)
    made.size_weight = WEIGHT
    for one in works:
        made.add(one)
    return made


def begun(there: PrefillQueue, now: float) -> tuple[str, float]:
    turn, left_s = there.begun(now)
    return turn.request_id if turn is not None else "", pytest.approx(left_s)


def test_the_first_one_begins_and_the_shortest_of_those_that_wait_is_next() -> None:
    there = queue(work("long", 4.0), work("middle", 2.0))
    assert begun(there, 1.0) == ("long", 3.0)
    there.add(work("short", 0.5, 1.0))
    assert ahead(there, 1.0, 0, 0.25).wait_s == pytest.approx(3.0), "a shorter one still waits for what has begun"
    assert ahead(there, 1.0, 0, 1.0).wait_s == pytest.approx(3.5)
    assert begun(there, 4.25) == ("short", 0.25)
    assert begun(there, 5.0) == ("middle", 1.5)
    assert begun(there, 6.5) == ("", 0.0)


def test_short_ones_pass_a_long_one_between_its_chunks() -> None:
    there = queue(work("long", 8.0, chunks=4))
    there.add(work("short", 0.5, 1.0))
    assert ahead(there, 1.0, 0, 0.25).wait_s == pytest.approx(1.0)
    assert begun(there, 2.25) == ("short", 0.25)
    assert begun(there, 3.5) == ("long", 1.0)
    assert ahead(there, 3.5, 0, 100.0).wait_s == pytest.approx(5.0)


def test_an_idle_instance_begins_what_comes_when_it_comes() -> None:
    there = queue(work("a", 1.0))
    there.add(work("b", 1.0, 5.0))
    assert begun(there, 5.25) == ("b", 0.75)


def test_who_is_late_has_still_a_part_of_its_step_before_it() -> None:
    there = queue(work("a", 1.0), work("b", 2.0))
    assert begun(there, 2.0) == ("b", 1.0)
    there.report(25_000, 1e-4, 2.0)  # nothing was finished
    assert begun(there, 2.0) == ("a", 0.5)
    assert begun(there, 2.75) == ("b", 1.75)


def test_what_a_report_calls_finished_makes_room_at_once() -> None:
    there = queue(work("a", 3.0), work("b", 2.0))
    there.finish("a", 1.0, done=True)
    there.report(20_000, 1e-4, 1.0)
    assert begun(there, 1.5) == ("b", 1.5)
    there.withdraw("b", 1.5)
    assert begun(there, 1.5) == ("", 0.0)


def test_another_attempt_of_a_request_begins_anew() -> None:
    there = queue(work("long", 8.0, chunks=4))
    assert begun(there, 5.0) == ("long", 1.0)
    there.add(work("other", 0.5, 5.0))
    there.add(work("long", 8.0, 5.0, chunks=4))
    assert begun(there, 5.25) == ("other", 0.25)
    assert begun(there, 13.0) == ("long", 0.5), "all four chunks are computed again"


move = st.tuples(
    st.sampled_from(["add", "finish", "withdraw", "report"]),
    st.integers(0, 5),
    st.floats(0.01, 4.0),
    st.integers(1, 3),
    st.floats(0, 1.5),
)


@given(st.lists(move, max_size=40), st.integers(0, 1 << 40))
@example(  # another attempt comes when the first one's step is over, and nobody asked since
    [
        ("add", 0, 1.0, 1, 0.0),
        ("add", 1, 2.0, 1, 0.0),
        ("report", 0, 1.0, 1, 0.0),
        ("finish", 2, 1.0, 1, 1.0),
        ("add", 0, 1.0, 1, 1.0),
    ],
    0b10000,
)
def test_asking_changes_nothing_and_nobody_waits_longer_than_for_all(
    moves: list[tuple[str, int, float, int, float]], asked: int
) -> None:
    """A decision log is replayed by whoever asks less or more often."""
    quiet, noisy, now = queue(), queue(), 0.0
    for n, (what, name, seconds, chunks, pause) in enumerate(moves):
        if asked >> n & 1:
            noisy.begun(now + pause / 2)
        now += pause
        for there in (quiet, noisy):
            match what:
                case "add":
                    there.add(work(str(name), seconds, now, chunks=chunks))
                case "finish":
                    there.finish(str(name), now, done=True)
                case "withdraw":
                    there.withdraw(str(name), now)
                case "report":
                    there.report(sum(one.computed_tokens for one in there.works.values()), 1e-4, now)
        for size_s in (0.001, 1.0, math.inf):
            found = ahead(noisy, now, 0, size_s)
            assert 0 <= found.wait_s <= noisy.wait_s(now) + 1e-9
            assert found.wait_s + found.behind_s == pytest.approx(noisy.wait_s(now))
    assert quiet.begun(now)[0] is quiet.works.get(getattr(noisy.begun(now)[0], "request_id", ""))
    assert quiet.begun(now)[1] == pytest.approx(noisy.begun(now)[1])
