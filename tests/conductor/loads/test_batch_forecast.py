"""Who is there when: the forecast of a batch, against counting one by one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.services.conductor.loads.batch_forecast import BatchAt, BatchForecast, DecodeWork

NOW = 100.0


def work(name: str, joins: float, leaves: float, tokens: int = 10, **more: object) -> DecodeWork:
    return DecodeWork(name, tokens, 1, NOW, 1e9, NOW + joins, NOW + leaves, **more)  # type: ignore[arg-type]


def forecast(
    stays: BatchForecast, present: BatchAt, running: int, at: float, until: float, usual: float = math.inf
) -> BatchAt:
    return stays.forecast(NOW, NOW + at, NOW + until, present, running, usual)


def test_who_has_left_is_not_there_and_who_comes_later_is_not_yet() -> None:
    stays = BatchForecast()
    stays.add(work("runs", -1, 5, 100))
    stays.add(work("leaves", -1, 2, 10))
    stays.add(work("comes", 4, 9, 1))
    present = BatchAt(3, 111)
    assert forecast(stays, present, 2, 1, 1) == BatchAt(2, 110)
    assert forecast(stays, present, 2, 3, 3) == BatchAt(1, 100)
    assert forecast(stays, present, 2, 4, 4) == BatchAt(2, 101)
    assert forecast(stays, present, 2, 6, 6) == BatchAt(1, 1)
    assert forecast(stays, present, 2, 3, 8) == BatchAt(2, 101)  # the most from then on


def test_what_the_instance_says_of_now_counts_for_more_than_predictions() -> None:
    stays = BatchForecast()
    stays.add(work("early", 5, 9))
    assert forecast(stays, BatchAt(1, 10), 1, 1, 1) == BatchAt(1, 10)  # it runs already
    assert forecast(stays, BatchAt(1, 10), 0, 1, 1) == BatchAt(0, 0)  # it is on its way


def test_the_overdue_and_the_unknown_leave_at_the_usual_rate() -> None:
    stays = BatchForecast()
    stays.add(work("overdue", -9, -1))
    present = BatchAt(2, 20)  # and one that nobody placed here
    assert forecast(stays, present, 2, 10, 10) == BatchAt(2, 20)  # nobody was ever seen to leave
    left = forecast(stays, present, 2, 10, 10, usual=10)
    assert left.requests == pytest.approx(2 / math.e)
    assert left.context_tokens == pytest.approx(20 / math.e)


def test_the_batch_lane_has_no_slo_and_is_counted_apart() -> None:
    stays = BatchForecast()
    assert stays.tightest_slo_s == math.inf
    stays.add(work("batch", -1, 5, 7, tbt_slo_s=0.001, yields=True))
    stays.add(work("strict", -1, 5, tbt_slo_s=0.1))
    stays.add(work("lax", -1, 5, tbt_slo_s=0.5))
    assert stays.tightest_slo_s == 0.1
    assert stays.yielding(NOW, NOW + 1) == BatchAt(1, 7)
    assert stays.yielding(NOW, NOW + 6) == BatchAt(0, 0)
    stays.drop(work("strict", -1, 5, tbt_slo_s=0.1))
    assert stays.tightest_slo_s == 0.5


times = st.integers(-20, 60).map(float)
works = st.lists(st.tuples(times, st.integers(0, 60), st.integers(1, 1000), st.booleans()), max_size=12)


@settings(max_examples=200, deadline=None)
@given(works, st.integers(0, 40), st.integers(0, 40))
def test_the_forecast_is_what_counting_gives(
    given_works: list[tuple[float, int, int, bool]], lead: int, span: int
) -> None:
    """Where the instance says exactly what was predicted, and nobody is overdue."""
    stays, kept = BatchForecast(), []
    for index, (joins, stay, tokens, drops) in enumerate(given_works):
        one = work(str(index), joins, max(joins + stay, 0.5), tokens)
        stays.add(one)
        if drops:
            stays.drop(one)
        else:
            kept.append(one)
    at, until = NOW + lead, NOW + lead + span
    running = [w for w in kept if w.joins_at <= NOW]
    present = BatchAt(len(kept), sum(w.prompt_tokens for w in kept))
    moments = {at} | {w.joins_at for w in kept if at < w.joins_at <= until}
    there = [[w for w in kept if w.joins_at <= m < w.leaves_at] for m in moments]
    found = forecast(stays, present, len(running), lead, lead + span)
    assert found.requests == pytest.approx(max(len(ws) for ws in there))
    assert found.context_tokens == pytest.approx(max(sum(w.prompt_tokens for w in ws) for ws in there))
    for one in kept:
        stays.drop(one)
    assert len(stays) == 0
    assert forecast(stays, BatchAt(0, 0), 0, lead, lead + span) == BatchAt(0, 0)
