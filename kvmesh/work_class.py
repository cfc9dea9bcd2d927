"""Sizes that are alike where the short go first: predictions do not tell a prompt from one a tenth longer.

A line that goes by size orders classes, half an octave wide, and within a class by arrival. Else of prompts that come
together and are nearly alike each would be passed by the next that is a little shorter, none would know when its turn
is, and whoever was promised its first token in time would be late."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_HALF = math.sqrt(0.5)


def work_class(size: float) -> float:
    """The greatest half power of two (2^(n/2)) that is not above `size`; 0 of 0, and inf of inf."""
    if not math.isfinite(size):
        return size
    mantissa, exponent = math.frexp(size)
    return math.ldexp(0.5 if mantissa < _HALF else _HALF, exponent) if mantissa else 0.0


def work_classes(sizes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The same of many."""
    mantissas, exponents = np.frexp(sizes)
    classes = np.ldexp(np.where(mantissas < _HALF, 0.5, _HALF) * (mantissas > 0), exponents)
    return np.where(np.isfinite(sizes), classes, sizes)
