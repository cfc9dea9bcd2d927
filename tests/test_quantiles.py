"""The quantile that every report means: linear between the two nearest ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.quantiles import quantile


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_a_quantile_lies_between_and_grows(values: list[float], share: float) -> None:
    values.sort()
    found = quantile(values, share)
    assert values[0] <= found <= values[-1] + 1e-9
    assert found <= quantile(values, min(1.0, share + 0.1)) + 1e-6


@pytest.mark.parametrize(("share", "value"), [(0, 1), (0.5, 2.5), (1, 4), (0.9, 3.7)])
def test_quantiles_by_hand(share: float, value: float) -> None:
    assert quantile([1, 2, 3, 4], share) == pytest.approx(value)


def test_one_value_is_every_quantile() -> None:
    assert quantile([7.0], 0.0) == quantile([7.0], 0.99) == quantile([7.0], 1.0) == 7.0
