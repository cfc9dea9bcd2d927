"""Predictions beside what happened."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.services.conductor.balance.gauges import error_shares
from kvmesh.services.conductor.costs.accuracy import (
    AGE_S,
    AS_PREDICTED,
    CALIBRATED,
    ENOUGH,
    MAX_GROUPS,
    MOST_OFF,
    WINDOW,
    Accuracy,
    Calibration,
    PredictionError,
    PredictionKind,
    group_of,
)
from kvmesh.services.conductor.domain import Role
from kvmesh.telemetry import names
from kvmesh.telemetry.present_series import PresentSeries

NOW = 1000.0


def of(accuracy: Accuracy, what: PredictionKind, now: float = NOW, group: str = "m") -> PredictionError:
    (found,) = [error for error in accuracy.group_errors(now) if (error.what, error.group) == (what, group)]
    return found


def test_bias_and_percentiles_are_relative_to_the_prediction() -> None:
    accuracy = Accuracy()
    for percent in range(-50, 51):  # as often faster as slower
        accuracy.add(PredictionKind.TTFT, "m", 2.0, 2.0 * (1 + percent / 100), NOW)
    told = of(accuracy, PredictionKind.TTFT)
    assert (told.samples, told.bias) == (101, pytest.approx(0.0, abs=1e-9))
    assert (told.p50, told.p90, told.p99) == (pytest.approx(0.25), pytest.approx(0.45), pytest.approx(0.5))
    assert (told.low, told.high) == (pytest.approx(0.6), pytest.approx(1.4))


def test_a_constant_bias_shows() -> None:
    accuracy = Accuracy()
    for _ in range(10):
        accuracy.add(PredictionKind.PULL, "m", 0.1, 0.13, NOW)
    told = of(accuracy, PredictionKind.PULL)
    assert (told.bias, told.p50, told.p99) == (pytest.approx(0.3), pytest.approx(0.3), pytest.approx(0.3))
    assert (told.low, told.high) == (pytest.approx(1.3), pytest.approx(1.3))


def test_only_the_last_ones_count() -> None:
    accuracy = Accuracy()
    for seconds in [9.0] * WINDOW + [1.0] * WINDOW:
        accuracy.add(PredictionKind.PREFILL, "m", 1.0, seconds, NOW)
    assert of(accuracy, PredictionKind.PREFILL) == PredictionError(
        PredictionKind.PREFILL, WINDOW, 0.0, 0.0, 0.0, 0.0, "m"
    )


def test_what_is_old_counts_no_more_whether_or_not_something_comes_after_it() -> None:
    accuracy = Accuracy()
    for _ in range(20):
        accuracy.add(PredictionKind.TBT, "m", 1.0, 3.0, NOW)
    assert of(accuracy, PredictionKind.TBT, NOW + AGE_S - 1).samples == 20
    assert accuracy.errors(NOW + AGE_S + 20) == accuracy.group_errors(NOW + AGE_S + 20) == []
    for _ in range(ENOUGH):
        accuracy.add(PredictionKind.TBT, "m", 1.0, 1.0, NOW + AGE_S + 1)
    assert of(accuracy, PredictionKind.TBT, NOW + AGE_S + 1) == PredictionError(
        PredictionKind.TBT, ENOUGH, 0.0, 0.0, 0.0, 0.0, "m"
    )


def test_groups_are_apart_and_the_one_unheard_for_longest_goes_first() -> None:
    assert group_of("m", Role.PREFILL) == group_of("m", Role.DECODE) == "m"
    assert group_of("m", Role.BOTH) == "m coupled"
    accuracy = Accuracy()
    for n in range(MAX_GROUPS):
        accuracy.add(PredictionKind.TTFT, f"g{n}", 1.0, 1.0 + n, NOW)
    accuracy.add(PredictionKind.TTFT, "g0", 1.0, 1.0, NOW)
    accuracy.add(PredictionKind.TTFT, "new", 1.0, 2.0, NOW)
    groups = [error.group for error in accuracy.group_errors(NOW)]
    assert len(groups) == MAX_GROUPS and groups == sorted(groups)
    assert "g0" in groups and "new" in groups and "g1" not in groups
    assert of(accuracy, PredictionKind.TTFT, group="g5").bias == pytest.approx(5.0)


def test_over_all_groups_together_every_measurement_counts_once() -> None:
    accuracy = Accuracy()
    for group, ratios in (("m", (1.0, 1.1, 1.2)), ("m coupled", (2.0,)), ("other", (1.3,))):
        for ratio in ratios:
            accuracy.add(PredictionKind.TTFT, group, 1.0, ratio, NOW)
    accuracy.add(PredictionKind.TBT, "other", 1.0, 1.0, NOW)
    ttft, tbt = accuracy.errors(NOW)
    assert (ttft.what, ttft.group, ttft.samples, tbt.what) == (PredictionKind.TTFT, "", 5, PredictionKind.TBT)
    assert (ttft.bias, ttft.p50) == (pytest.approx(0.2), pytest.approx(0.2))


@pytest.mark.parametrize(
    ("predicted", "measured"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, math.inf)]
)
def test_where_one_of_the_two_is_missing_nothing_is_learnt(predicted: float, measured: float) -> None:
    accuracy = Accuracy()
    accuracy.add(PredictionKind.TBT, "m", predicted, measured, NOW)
    assert accuracy.errors(NOW) == []


def test_calibration_is_by_octaves_of_requests_and_the_nearest_that_is_known_counts() -> None:
    known = Calibration()
    for n in range(ENOUGH):
        assert known.spread(PredictionKind.TTFT, "m", 1) == AS_PREDICTED, f"{n} are too few"
        known.add(PredictionKind.TTFT, "m", 1, 1.0, 1.5)
        known.add(PredictionKind.TTFT, "m", 40, 1.0, 1e9)
        known.add(PredictionKind.TTFT, "m", 1, 1.0, math.inf)
        known.add(PredictionKind.TTFT, "m", 1, 0.0, 1.0)
    crowds = (0, 1, 2, 3, 4, 16, 32, 63, 10**9)
    assert [known.spread(PredictionKind.TTFT, "m", crowd).middle for crowd in crowds] == [1.5] * 5 + [MOST_OFF] * 4
    assert known.spread(PredictionKind.TBT, "m", 1) == known.spread(PredictionKind.TTFT, "other", 1) == AS_PREDICTED


def test_calibration_forgets_what_was_long_ago_and_whom_nobody_asks_for() -> None:
    known = Calibration()
    for ratio in [9.0] * CALIBRATED + [2.0] * CALIBRATED:
        known.add(PredictionKind.TBT, "m", 3, 1.0, ratio)
    assert known.spread(PredictionKind.TBT, "m", 3) == (2.0, 2.0, 2.0, CALIBRATED, 0.0)
    for n in range(MAX_GROUPS * len(PredictionKind)):
        known.add(PredictionKind.TBT, f"g{n}", 3, 1.0, 2.0)
    assert known.spread(PredictionKind.TBT, "m", 3) == AS_PREDICTED


def test_what_is_the_same_for_short_and_long_ones_is_added_and_no_factor() -> None:
    known, rng = Calibration(), random.Random(1)
    for _ in range(CALIBRATED):
        predicted = rng.uniform(0.02, 0.2)
        known.add(PredictionKind.TTFT, "m", 2, predicted, 1.1 * (predicted + 0.06))
    found = known.spread(PredictionKind.TTFT, "m", 2)
    for predicted in (0.02, 0.1, 0.2):
        low, middle, high = found.of(predicted)
        assert low <= middle <= high
        assert middle == pytest.approx(1.1 * (predicted + 0.06), rel=0.15)
    for _ in range(CALIBRATED):
        predicted = rng.uniform(0.02, 0.2)
        known.add(PredictionKind.TTFT, "m", 2, predicted, 1.7 * predicted)
    found = known.spread(PredictionKind.TTFT, "m", 2)
    assert (found.added_s, found.middle) == (0.0, pytest.approx(1.7))


@given(st.lists(st.floats(1 / MOST_OFF, MOST_OFF), min_size=ENOUGH, max_size=CALIBRATED))
def test_a_spread_is_of_what_was_measured(ratios: list[float]) -> None:
    known = Calibration()
    for ratio in ratios:
        known.add(PredictionKind.TTFT, "m", 2, 2.0, 2.0 * ratio)
    found = known.spread(PredictionKind.TTFT, "m", 2)
    assert found[:3] == pytest.approx(np.quantile(ratios, (0.1, 0.5, 0.9)).tolist())
    assert found.samples == len(ratios)


@given(st.lists(st.tuples(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6)), min_size=1, max_size=80))
def test_percentiles_are_ordered_and_bound_the_bias(pairs: list[tuple[float, float]]) -> None:
    accuracy = Accuracy()
    for predicted, measured in pairs:
        accuracy.add(PredictionKind.TTFT, "m", predicted, measured, NOW)
    told = of(accuracy, PredictionKind.TTFT)
    assert 0 <= told.p50 <= told.p90 <= told.p99
    assert -1 <= told.bias <= told.p99 + 1e-9
    assert 0 <= told.low <= 1 + told.bias <= told.high


def test_a_summary_is_cheap_enough_for_every_tick() -> None:
    accuracy, rng = Accuracy(), random.Random(1)
    for what in PredictionKind:
        for _ in range(2 * WINDOW):
            accuracy.add(what, "m", 1.0, rng.random(), NOW)
    assert len(accuracy.errors(NOW)) == len(accuracy.group_errors(NOW)) == len(PredictionKind)


def shown() -> dict[tuple[str, str, str], float]:
    return {
        (s.labels["group"], s.labels["what"], s.labels["quantile"]): s.value
        for s in names.CONDUCTOR_PREDICTION_ERROR.collect()[0].samples
        if s.labels["group"].startswith("shown")
    }


def test_the_metric_tells_every_group_while_something_is_measured_there() -> None:
    gauges, accuracy = PresentSeries(names.CONDUCTOR_PREDICTION_ERROR), Accuracy()
    for measured, group in ((1.5, "shown"), (4.0, "shown coupled")):
        accuracy.add(PredictionKind.TTFT, group, 1.0, measured, NOW)
    gauges.show(error_shares(accuracy.group_errors(NOW)))
    assert shown()["shown", "ttft", "p50"] == 0.5 and shown()["shown coupled", "ttft", "bias"] == 3.0
    accuracy.add(PredictionKind.TTFT, "shown", 1.0, 1.0, NOW + AGE_S + 1)
    gauges.show(error_shares(accuracy.group_errors(NOW + AGE_S + 20)))
    assert {group for group, _, _ in shown()} == {"shown"}
    gauges.show({})
    assert shown() == {}
