"""Predicts how long a decode step takes, from this instance's own steps. Pure.

    t = a + b·rows + c·tokens of context        a, b, c >= 0

The fit minimises the relative error over the last steps, with Huber's loss, which bounds the weight of a step that is
far off. A slope that the steps do not show, because they were all alike, is 0: nobody is refused for what was never
measured.
"""

from __future__ import annotations

from collections import deque
from itertools import combinations

import numpy as np
import numpy.typing as npt

WINDOW = 256
ENOUGH = 16  # steps, before which nothing is predicted
REFIT_EVERY = 32  # steps; a fit costs half a millisecond, and is made only when somebody asks
RIDGE = 1e-3  # weight of "the slope is 0" against one step: far below that of steps of two sizes
ROUNDS = 4
HUBER = 1.5

_Floats = npt.NDArray[np.float64]


class StepTimes:
    """Keeps the last steps of one instance, without those that computed prompts beside their rows."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, int, int]] = deque(maxlen=WINDOW)  # (rows, tokens of context, ns)
        self._new = 0  # since the last fit
        self._fit: tuple[float, float, float] | None = None

    def add(self, rows: int, context_tokens: int, took_ns: int) -> None:
        """Records one step. It is called for every step, so it does no more than append."""
        if took_ns > 0:
            self._steps.append((rows, context_tokens, took_ns))
            self._new += 1

    def predict_ns(self, rows: int, context_tokens: int) -> float:
        """Predicts the duration of a step of `rows` rows in ns; 0 while fewer than ENOUGH steps are known."""
        if len(self._steps) < ENOUGH:
            return 0.0
        if self._fit is None or self._new >= REFIT_EVERY:
            self._fit, self._new = _fitted(np.array(self._steps, dtype=np.float64)), 0
        a, b, c = self._fit
        return a + b * rows + c * context_tokens


def _fitted(steps: _Floats) -> tuple[float, float, float]:
    """Returns a, b and c. Of the four subsets of the two slopes, each of which may be fitted alone, it takes the one
    with the least error whose coefficients are all non-negative."""
    sizes, took = steps[:, :2], steps[:, 2]
    means = np.maximum(sizes.mean(axis=0), 1.0)
    columns = np.column_stack((np.ones(len(steps)), sizes / means))
    found, least = np.array((float(np.median(took)), 0.0, 0.0)), np.inf
    for slopes in (s for n in range(3) for s in combinations((1, 2), n)):
        used = [0, *slopes]
        coefficients, error = _least_squares(columns[:, used], took)
        if (coefficients >= 0).all() and error < least:
            least, found = error, np.zeros(3)
            found[used] = coefficients
    return float(found[0]), float(found[1] / means[0]), float(found[2] / means[1])


def _least_squares(columns: _Floats, took: _Floats) -> tuple[_Floats, float]:
    """Returns the coefficients of an iteratively reweighted fit of `took`, and the error that they leave."""
    penalty = np.sqrt(RIDGE) * np.eye(columns.shape[1])[1:]
    weights, found = np.ones(len(took)), np.zeros(columns.shape[1])
    for _ in range(ROUNDS):
        rows = np.vstack((columns * (weights / took)[:, None], penalty / took.mean()))
        found = np.linalg.lstsq(rows, np.concatenate((weights, np.zeros(len(penalty)))), rcond=None)[0]
        off = np.abs(columns @ found / took - 1.0)
        bound = HUBER * max(float(np.median(off)), 1e-3)
        weights = np.sqrt(np.minimum(1.0, bound / np.maximum(off, 1e-12)))
    huber = np.where(off <= bound, off * off, bound * (2 * off - bound))
    return found, float(huber.sum() + RIDGE * (found[1:] ** 2).sum() / took.mean() ** 2)
