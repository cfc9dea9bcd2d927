"""Summaries: what counts as kept, quantiles within their error, memory that does not grow."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.services.conductor.domain import Lane
from kvmesh.sim.report.records import DONE, FAILED, REFUSED, MeshSample, PoolSample, Record
from kvmesh.sim.report.sketch import POINTS, BinnedSums, Sketch
from kvmesh.sim.report.summary import Summary
from tests.support.sim.records import done


def test_goodput_needs_both_and_counts_everybody() -> None:
    summary = Summary(ttft_slo_s=1.0, tbt_slos_s=(0.1, 0.2))
    summary.add(done(0, ttft_s=0.9, tbt_s=0.05))
    summary.add(done(1, ttft_s=0.9, tbt_s=0.15))
    summary.add(done(2, ttft_s=1.1, tbt_s=0.05))
    summary.add(done(3, ttft_s=0.5, tbt_s=math.nan))  # one token
    summary.add(Record(4, "r4", 4.0, 10, 1, outcome=REFUSED, reason="ttft"))
    assert summary.goodput == {0.1: 2 / 5, 0.2: 3 / 5}
    told = summary.to_json()
    assert (told["outcomes"], told["refused"]) == ({DONE: 4, REFUSED: 1}, {"ttft": 1})
    assert [one["share"] for one in told["goodput"]] == [0.4, 0.6]


def test_own_slos_win_over_the_runs() -> None:
    summary = Summary(ttft_slo_s=1.0, tbt_slos_s=(0.1,))
    summary.add(done(0, ttft_s=5.0, tbt_s=0.5, ttft_slo_s=6.0, tbt_slo_s=0.6))
    summary.add(done(1, ttft_s=0.9, tbt_s=0.05, ttft_slo_s=0.5))
    assert (summary.kept_own, summary.kept) == (1, [1])


def test_rates_are_of_arrivals_and_the_duration_ends_with_the_last_token() -> None:
    summary = Summary()
    for index in range(5):
        summary.add(done(index, at_s=10.0 + index, e2e_s=100.0))
    assert (summary.requests_per_s, summary.duration_s) == (1.0, 104.0)


def test_the_hit_rate_weighs_by_tokens_and_leaves_out_who_was_not_served() -> None:
    summary = Summary()
    summary.add(done(0, input_tokens=100, cached_tokens=100))
    summary.add(done(1, input_tokens=900, cached_tokens=0))
    summary.add(Record(2, "r2", 0.0, 10**6, 1, outcome=FAILED, reason="lost"))
    assert summary.hit_rate == 0.1
    assert summary.to_json()["failed"] == {"lost": 1}


def test_lanes_are_told_apart_and_json_knows_no_nan() -> None:
    summary = Summary()
    summary.add(done(0, lane=Lane.BATCH, ttft_s=3.0))
    summary.add(Record(1, "r1", 0.0, 10, 1, outcome=REFUSED))
    told = json.loads(json.dumps(summary.to_json(), allow_nan=False))
    assert told["lanes"]["batch"]["ttft_s"]["mean"] == 3.0
    assert told["lanes"]["interactive"]["outcomes"] == {REFUSED: 1}
    assert told["refused"] == {"unnamed": 1}
    json.dumps(Summary().to_json(), allow_nan=False)  # of nothing


def test_the_error_of_predictions_is_relative_to_what_came() -> None:
    summary = Summary()
    summary.add(done(0, ttft_s=2.0, predicted_ttft_s=3.0))
    summary.add(done(1, ttft_s=2.0, predicted_ttft_s=1.9))
    assert summary.mean("ttft_error") == pytest.approx((0.5 + 0.05) / 2)


def test_a_course_never_has_more_points_and_loses_nothing() -> None:
    course = BinnedSums()
    for second in range(10 * POINTS):
        course.add(float(second), {"arrived": 1.0})
    rows = list(course.rows())
    assert POINTS / 2 <= len(rows) <= POINTS
    assert sum(sums["arrived"] for _, sums in rows) == 10 * POINTS
    course.add(1e9, {"arrived": 1.0})
    assert len(list(course.rows())) <= POINTS


def test_a_course_tells_of_times_when_nothing_came() -> None:
    summary = Summary()
    for at_s in (0.0, 0.5, 4.0):
        summary.add(done(0, at_s=at_s))
    course = summary.to_json()["course"]
    assert course["at_s"] == [0, 1, 2, 3, 4]
    assert course["arrived_per_s"] == [2, 0, 0, 0, 1]
    assert course["hit_rate"][1] is None


def test_pools_are_means_of_their_samples() -> None:
    summary = Summary()
    for at_s, queued in ((0.1, 2), (0.2, 4)):
        summary.sample(MeshSample(at_s, {"prefill": PoolSample(instances=8, queued=queued)}, wire_bytes=queued))
    told = summary.to_json()
    assert told["pools"]["prefill"]["queued"] == [3.0]
    assert told["wire_bytes"] == 4


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1e-5, 1e6), min_size=1, max_size=300), st.floats(0, 1))
def test_quantiles_are_within_one_percent_of_their_rank(values: list[float], share: float) -> None:
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    exact = sorted(values)[math.floor(share * (len(values) - 1))]
    assert sketch.quantile(share) == pytest.approx(exact, rel=0.01)
    assert (sketch.low, sketch.high, sketch.count) == (min(values), max(values), len(values))


def test_a_sketch_stays_small_and_passes_over_what_is_none() -> None:
    sketch = Sketch()
    for step in range(200_000):
        sketch.add(1e-4 * 1.0001**step)
    for none in (math.nan, math.inf, -1.0):
        sketch.add(none)
    assert sketch.count == 200_000
    assert len(sketch._buckets) < 2_100
    assert math.isnan(Sketch().mean) and math.isnan(Sketch().quantile(0.5))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=400))
def test_a_cdf_rises_to_one(values: list[float]) -> None:
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    points = sketch.cdf(50)
    assert points == sorted(points) and len(points) <= 52
    assert points[-1] == (max(values), 1.0)
