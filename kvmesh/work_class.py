"""Work classes: sizes that count as equal where short requests go first, because predictions do not tell a prompt from
one a tenth longer.

A queue ordered by size orders classes half an octave wide, and goes by arrival within a class. Without classes, each of
several similar prompts would be passed by the next one that is a little shorter: no request would know its turn, and
one that was promised its first token in time would be late.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_HALF = math.sqrt(0.5)


def work_class(size: float) -> float:
    """Returns the greatest half power of two (2^(n/2)) that is at most `size`; 0 for 0, and infinity for infinity."""
    if not math.isfinite(size):
        return size
    mantissa, exponent = math.frexp(size)
    return math.ldexp(0.5 if mantissa < _HALF else _HALF, exponent) if mantissa else 0.0


def work_classes(sizes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns `work_class` of each element."""
    mantissas, exponents = np.frexp(sizes)
    classes = np.ldexp(np.where(mantissas < _HALF, 0.5, _HALF) * (mantissas > 0), exponents)
    return np.where(np.isfinite(sizes), classes, sizes)
