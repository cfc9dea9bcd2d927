"""Predictions beside what happened."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.conductor.costs.accuracy import WINDOW, Accuracy, PredictionError, What


def of(accuracy: Accuracy, what: What) -> PredictionError:
    (found,) = [error for error in accuracy.errors() if error.what is what]
    return found


def test_bias_and_percentiles_are_relative_to_the_prediction() -> None:
    accuracy = Accuracy()
    for percent in range(-50, 51):  # as often faster as slower
        accuracy.add(What.TTFT, 2.0, 2.0 * (1 + percent / 100))
    told = of(accuracy, What.TTFT)
    assert (told.samples, told.bias) == (101, pytest.approx(0.0, abs=1e-9))
    assert (told.p50, told.p90, told.p99) == (pytest.approx(0.25), pytest.approx(0.45), pytest.approx(0.5))


def test_a_constant_bias_shows() -> None:
    accuracy = Accuracy()
    for _ in range(10):
        accuracy.add(What.PULL, 0.1, 0.13)
    told = of(accuracy, What.PULL)
    assert (told.bias, told.p50, told.p99) == (pytest.approx(0.3), pytest.approx(0.3), pytest.approx(0.3))


def test_only_the_last_ones_count() -> None:
    accuracy = Accuracy()
    for seconds in [9.0] * WINDOW + [1.0] * WINDOW:
        accuracy.add(What.PREFILL, 1.0, seconds)
    assert of(accuracy, What.PREFILL) == PredictionError(What.PREFILL, WINDOW, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("predicted", "measured"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, math.inf)]
)
def test_where_one_of_the_two_is_missing_nothing_is_learnt(predicted: float, measured: float) -> None:
    accuracy = Accuracy()
    accuracy.add(What.TBT, predicted, measured)
    assert accuracy.errors() == []


@given(st.lists(st.tuples(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6)), min_size=1, max_size=80))
def test_percentiles_are_ordered_and_bound_the_bias(pairs: list[tuple[float, float]]) -> None:
    accuracy = Accuracy()
    for predicted, measured in pairs:
        accuracy.add(What.TTFT, predicted, measured)
    told = of(accuracy, What.TTFT)
    assert 0 <= told.p50 <= told.p90 <= told.p99
    assert -1 <= told.bias <= told.p99 + 1e-9


def test_a_summary_is_cheap_enough_for_every_tick() -> None:
    accuracy, rng = Accuracy(), random.Random(1)
    for what in What:
        for _ in range(2 * WINDOW):
            accuracy.add(what, 1.0, rng.random())
    assert len(accuracy.errors()) == len(What)
