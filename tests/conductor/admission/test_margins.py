"""How far predictions are to be trusted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import Overloaded
from kvmesh.services.conductor.admission.margins import ENOUGH, KEPT, MOST, Margin
from kvmesh.services.conductor.domain import Outcome, RequestOutcome
from kvmesh.services.conductor.settings import AdmissionSettings
from tests.support.conductor.brain import Brain

RATIOS = st.lists(st.floats(0.01, 100.0), min_size=ENOUGH, max_size=2 * KEPT)


def taught(ratios: list[float], confidence: float = 0.9, predicted_s: float = 1.0) -> Margin:
    margin = Margin(confidence)
    for ratio in ratios:
        margin.add(predicted_s, ratio * predicted_s)
    return margin


def test_right_predictions_are_taken_at_their_word() -> None:
    assert taught([1.0] * KEPT).factor == 1.0
    assert taught([0.3] * KEPT).factor == 1.0  # what is early lets nobody else in


def test_a_bias_is_taken_out() -> None:
    assert taught([2.0] * KEPT).factor == 2.0


def test_a_spread_is_paid_for_while_it_is_worth_it() -> None:
    """Nine in ten within 1.2 and one at 7: room for the last one would cost far more than it brings."""
    rng = random.Random(1)
    ratios = [1 + 0.2 * n / 57 for n in range(58)] + [7.0] * 6
    rng.shuffle(ratios)
    assert 1.15 < taught(ratios).factor <= 1.2


def test_it_is_the_best_of_all_factors() -> None:
    """Against trying each."""
    rng = random.Random(2)
    for _ in range(50):
        ratios = [rng.lognormvariate(0.2, 0.6) for _ in range(KEPT)]
        found = taught(ratios, confidence=1.0).factor
        left = lambda m: sum(r <= m for r in ratios) / m  # noqa: E731, B023
        assert left(found) >= max(left(m) for m in (1.0, *(r for r in ratios if 1 <= r <= MOST))) - 1e-9


def test_the_larger_ones_count_more() -> None:
    """A moment's delay of short ones is no reason to keep long ones out."""
    margin = Margin(0.9)
    for n in range(KEPT):
        margin.add(*((0.01, 0.04) if n % 2 else (1.0, 1.03)))
    assert margin.factor == pytest.approx(1.03)


def test_without_confidence_nothing_is_learnt() -> None:
    assert taught([5.0] * KEPT, confidence=0.0).factor == 1.0


@settings(max_examples=100, deadline=None)
@given(RATIOS, st.floats(0.001, 100.0))
def test_who_is_alone_is_judged_by_the_prediction_itself(ratios: list[float], seconds: float) -> None:
    margin = taught(ratios)
    assert 1.0 <= margin.factor <= MOST
    assert margin.of(seconds, 0.0) == seconds
    assert seconds <= margin.of(seconds, 0.5) <= margin.of(seconds, 1.0) == margin.of(seconds, 9.0)


# ── in the brain ──────────────────────────────────────────────────────────────────────────────────


def late(confidence: float, *, queued: bool) -> Brain:
    """Prompts have taken three times as long as was foretold, whether others were before them (`queued`) or not."""
    brain = Brain(admission=AdmissionSettings(confidence=confidence), slo_ttft_s=30.0)
    brain.pair()
    for n in range(2 * ENOUGH):
        names = [f"{n}-first", f"{n}-second"] if queued else [f"{n}-only"]
        ends = []
        for name in names:
            placed = brain.placed(4000, request_id=name)
            ends.append(RequestOutcome(name, 0, Outcome.DONE, 16, 3 * placed.ttft_s, placed.tbt_s, placed.tbt_s, 1.0))
        brain.now += 5
        brain.beat("p0", finished_request_ids=tuple(names))
        brain.beat("d0", outcomes=tuple(ends), finished_request_ids=tuple(names))
    return brain


def test_who_would_wait_is_refused_as_late_as_others_were() -> None:
    brain = late(0.9, queued=True)
    slo_s = 5 * brain.placed(4000).ttft_s
    brain.refused(Overloaded, 4000, ttft_slo_s=slo_s)  # twice as much is predicted, six times expected
    careless = late(0.0, queued=True)
    careless.placed(4000)
    careless.placed(4000, ttft_slo_s=slo_s)


def test_who_would_wait_for_nobody_is_taken_however_late_others_were() -> None:
    brain = late(0.9, queued=True)
    brain.placed(4000, ttft_slo_s=1.01 * brain.placed(4000, request_id="x").ttft_s, request_id="x")


def test_those_who_were_alone_teach_nothing_of_queues() -> None:
    brain = late(0.9, queued=False)
    brain.placed(4000, ttft_slo_s=5 * brain.placed(4000).ttft_s)


def test_a_flood_is_told_to_come_back_one_after_the_other() -> None:
    """Refused at one moment, while requests are taken now and then: no two get one turn."""
    brain = late(0.9, queued=True)
    slo_s = 1.5 * brain.placed(4000, request_id="x").ttft_s
    waits = []
    for n in range(40):
        brain.now += 0.02
        brain.beat("p0", finished_request_ids=(f"t{n - 1}", "x"))
        brain.placed(4000, request_id=f"t{n}")
        waits = [brain.refused(Overloaded, 4000, ttft_slo_s=slo_s).error.retry_after_ms for _ in range(5)]
    assert waits == sorted(set(waits))
    assert waits[-1] > waits[0] + 4 * 15
