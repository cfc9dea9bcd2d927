"""Every formula of the cost says of columns what it says of each of their values, to the last bit."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.services.conductor import score
from kvmesh.services.conductor.costs.fit import Coefficients

SIZES = st.one_of(st.just(0.0), st.floats(1e-9, 1e12))
WHOLE = {"max_tokens": st.integers(0, 100)}
POSITIVE = ("bytes_per_s", "rows", "limit")  # what is divided by
FORMULAS = sorted(
    name for name, made in vars(score).items() if isinstance(made, FunctionType) and made.__module__ == score.__name__
)


def formula(name: str) -> Any:
    return getattr(score, name)


def as_tuple(found: Any) -> tuple[Any, ...]:
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("name", [name for name in FORMULAS if name != "fitted_s"])
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_columns_are_their_values(name: str, data: st.DataObject) -> None:
    rows, made = 5, formula(name)
    columns, given_one = {}, {}
    for argument in inspect.signature(made).parameters:
        if argument in WHOLE:
            given_one[argument] = data.draw(WHOLE[argument])
        elif argument == "share":
            given_one[argument] = data.draw(st.floats(0.01, 0.99))
        else:
            some = st.floats(1e-3, 1e9) if argument in POSITIVE else SIZES
            columns[argument] = np.array(data.draw(st.lists(some, min_size=rows, max_size=rows)))
    many = as_tuple(made(**columns, **given_one))
    for row in range(rows):
        one = as_tuple(made(**{argument: float(column[row]) for argument, column in columns.items()}, **given_one))
        assert [float(np.broadcast_to(column, rows)[row]) for column in many] == list(map(float, one)), name


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(*[SIZES] * 8), min_size=1, max_size=6), st.booleans())
def test_a_fitted_model_too(some: list[tuple[float, ...]], bends: bool) -> None:
    some = [one if bends else (*one[:3], 0.0, *one[4:]) for one in some]
    a, b, c, d, knee, x1, x2, n = np.array(some).T
    many = score.fitted_s(Coefficients(a, b, c, d if bends else 0.0, knee), x1, x2, n)  # type: ignore[arg-type]
    assert many.tolist() == [Coefficients(*one[:5]).at(*one[5:]) for one in some]
