"""Least squares for times that cannot be negative, on which every cost model is built. Pure.

    t = a·n + b·x1 + c·x2 + d·max(0, x1 - knee)        a, b, c, d >= 0

`n` is how often the constant was paid: 1, except for work that took several steps. Without a knee d is 0. With one the
time is continuous and bends upwards at the knee: a floor that is always paid, then a slope. The fit minimises the
relative error, with Huber weights so that an outlier has a bounded influence. A prior gives the shape until there are
samples, and stays as pseudo-samples of little weight, so that a window of equal sizes still extrapolates.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvmesh.errors import ConfigError
from kvmesh.services.conductor import score

WINDOW = 256
ENOUGH_SAMPLES = 8
REFIT_EVERY = 8
# A busy instance brings hundreds of samples a second and a fit costs a millisecond: once a second is often enough, and
# a fit around which samples fall on both sides is left alone for longer. Half a window of others never waits.
REFIT_INTERVAL_S = 1.0
GOOD_INTERVAL_S = 30.0
LEAN_WEIGHT = 0.05  # of a new sample in the side that samples fall on, from -1 (faster) to 1 (slower)
MAX_LEAN = 0.5
LEAN_FROM = 0.01  # a relative error up to this is on no side
# How strongly one pseudo-sample of the prior counts beside one real sample.
PRIOR_WEIGHT = 0.02
HUBER = 1.5
ROUNDS = 6
SETTLED = 1e-3  # a round that moves no prediction by more is the last one
MIN_RELATIVE_SPREAD = 0.02
# A bend must pay: this much less error, and samples enough on both sides of it.
KNEE_GAIN = 0.1
KNEE_SIDE = 12
MAX_KNEES = 8
KNEE_EVERY = 8  # fits: to look for it costs as much as several
# Confidence in an old fit halves in this time while nothing new is measured (see `FittedModel.admission_s`).
HALF_LIFE_S = 30.0

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds; seconds per x1; seconds per x2; seconds per x1 beyond `knee`. None is negative."""

    a: float
    b: float
    c: float
    d: float = 0.0
    knee: float = 0.0

    def at(self, x1: float, x2: float, n: float = 1.0) -> float:
        """Returns the predicted seconds."""
        seconds: float = score.fitted_s(self, x1, x2, n)
        return seconds

    def scaled(self, factor: float) -> Coefficients:
        """Returns the coefficients of work that is `factor` times as slow."""
        return Coefficients(self.a * factor, self.b * factor, self.c * factor, self.d * factor, self.knee)

    def to_json(self) -> dict[str, float]:
        """Returns five numbers by name."""
        return asdict(self)

    @classmethod
    def of_json(cls, told: Mapping[str, object], where: str) -> Coefficients:
        """Reads what `to_json` returned; `d` and `knee` may be missing. Raises ConfigError, which names `where`, field
        and value."""
        names = [one.name for one in fields(cls)]
        if not isinstance(told, Mapping):
            raise ConfigError(f"{where}={told!r}: must be an object with {', '.join(names)}", field=where)
        if strange := sorted(set(told) - set(names)):
            raise ConfigError(f"{where}.{strange[0]}: no such coefficient", field=f"{where}.{strange[0]}")
        found = {}
        for name in names:
            value = told.get(name, 0.0 if name in ("d", "knee") else None)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                text = f"{where}.{name}={value!r}: must be a number, at least 0"
                raise ConfigError(text, field=f"{where}.{name}")
            found[name] = float(value)
        return cls(**found)


class Sample(NamedTuple):
    """One measurement."""

    x1: float
    x2: float
    seconds: float
    n: float = 1.0

    @property
    def sound(self) -> bool:
        """Whether all values are finite, of a possible size, and the time is positive."""
        sizes = 0 <= self.x1 < 1e12 and 0 <= self.x2 < 1e18 and 0 < self.n < 1e9
        return 0 < self.seconds < 1e6 and sizes


Anchors = tuple[tuple[float, float], ...]


class FittedCosts(Protocol):
    """What is known of work with two sizes."""

    @property
    def coefficients(self) -> Coefficients:
        """The present coefficients."""

    @property
    def prior(self) -> Coefficients:
        """The coefficients from before any measurement."""

    @property
    def fading_from(self) -> float:
        """The time since which nothing new was measured; -infinity when too little is known to be slower than the
        prior."""


class Estimate:
    """The predictions that follow from fitted costs, and how far they are trusted where work is refused by them."""

    def predict(self: FittedCosts, x1: float, x2: float, n: float = 1.0) -> float:
        """Returns the best estimate in seconds, for ranking and queues."""
        return self.coefficients.at(x1, x2, n)

    def admission_s(self: FittedCosts, x1: float, x2: float, now: float, n: float = 1.0) -> float:
        """Returns seconds for refusing work. A refusal brings no measurement, so a fit that is wrongly slow would
        refuse for ever; so a fit of few samples is never slower than the prior, and an old fit fades towards it."""
        return _both(self, x1, x2, now, n)[1]

    def both(self: FittedCosts, x1: float, x2: float, now: float, n: float = 1.0) -> tuple[float, float]:
        """Returns `predict` and `admission_s`."""
        return _both(self, x1, x2, now, n)


def _both(known: FittedCosts, x1: float, x2: float, now: float, n: float) -> tuple[float, float]:
    fitted, before = score.fitted_s(known.coefficients, x1, x2, n), score.fitted_s(known.prior, x1, x2, n)
    if fitted <= before:  # nothing to fade
        return fitted, fitted
    return fitted, float(score.faded_s(fitted, before, 0.5 ** (max(0.0, now - known.fading_from) / HALF_LIFE_S)))


class FittedModel(Estimate):
    """One model, which learns from `add`."""

    def __init__(self, prior: Coefficients, anchors: Anchors, *, bends: bool = False) -> None:
        """`anchors` are the points (x1, x2) at which the prior counts as samples. `bends` makes the fit look for a
        knee."""
        self.prior = prior
        self.coefficients = prior
        self._anchors, self._bends = anchors, bends
        self._samples = _Window()
        self._lean = 0.0
        self._unfitted = self._fitted_with = self._fits = 0
        self._newest: float | None = None
        self._fitted_at = 0.0

    def __len__(self) -> int:
        return len(self._samples)

    def take(self, coefficients: Coefficients) -> None:
        """Makes these coefficients, from a file or from peers, the prior."""
        self.prior = coefficients
        if not self._samples:
            self.coefficients = coefficients

    def add(self, x1: float, x2: float, seconds: float, now: float, n: float = 1.0) -> None:
        """Learns one measurement; values that are not positive and finite are ignored."""
        sample = Sample(x1, x2, seconds, n)
        if not sample.sound:
            return
        self._lean += LEAN_WEIGHT * (_side(seconds, self.coefficients.at(x1, x2, n)) - self._lean)
        self._samples.append(sample)
        self._newest = now
        self._unfitted += 1
        if len(self._samples) < ENOUGH_SAMPLES:
            self.coefficients = self.prior.scaled(_ratio(self._samples.table, self.prior))
        elif len(self._samples) == ENOUGH_SAMPLES or self._stale(now):
            self._fitted_at, self._fitted_with, self._unfitted = now, len(self._samples), 0
            known = self._fits >= KNEE_EVERY and self._fits % KNEE_EVERY > 0
            knee = None if self._bends and not known else self.coefficients.knee
            self.coefficients = _fit(self._samples.table, self.prior, self._anchors, knee)
            self._fits += 1

    def _stale(self, now: float) -> bool:
        leans = abs(self._lean) > MAX_LEAN
        much = WINDOW // 2 if leans else self._fitted_with if self._fitted_with < WINDOW else math.inf
        if self._unfitted >= much:
            return True
        interval_s = REFIT_INTERVAL_S if leans or self._fitted_with < WINDOW else GOOD_INTERVAL_S
        return self._unfitted >= REFIT_EVERY and now - self._fitted_at >= interval_s

    @property
    def fading_from(self) -> float:
        """The time since which nothing new was measured; -infinity while there are too few samples to be slower than
        the prior."""
        return -math.inf if len(self._samples) < ENOUGH_SAMPLES or self._newest is None else self._newest


def fit(samples: Iterable[Sample], prior: Coefficients, anchors: Anchors, *, bends: bool = False) -> Coefficients:
    """Returns the best coefficients for all `samples` at once, such as the file of a measured mesh holds. Too few
    samples only scale the prior; none returns it."""
    sound = [(s.n, s.x1, s.x2, s.seconds) for s in samples if s.sound]
    if not sound:
        return prior
    table = np.array(sound, dtype=np.float64)
    if len(sound) < ENOUGH_SAMPLES:
        return prior.scaled(_ratio(table, prior))
    return _fit(table, prior, anchors, None if bends else 0.0)


def _side(seconds: float, expected: float) -> float:
    error = seconds - expected
    return 0.0 if abs(error) <= LEAN_FROM * expected else math.copysign(1.0, error)


class _Window:
    """The last WINDOW samples, in one piece of memory."""

    def __init__(self) -> None:
        self._numbers = array("d")  # (n, x1, x2, seconds) of each, and of some older ones before them

    def __len__(self) -> int:
        return min(len(self._numbers) // 4, WINDOW)

    def append(self, sample: Sample) -> None:
        """Adds a sample; the oldest is forgotten."""
        self._numbers.extend((sample.n, sample.x1, sample.x2, sample.seconds))
        if len(self._numbers) >= 4 * 4 * WINDOW:
            del self._numbers[: -4 * WINDOW]

    @property
    def table(self) -> _Array:
        """Returns a copy with a row (n, x1, x2, seconds) for each sample, the oldest first."""
        return np.array(self._numbers[-4 * WINDOW :]).reshape(-1, 4)


def _ratio(table: _Array, prior: Coefficients) -> float:
    """Returns how many times as slow as the prior the samples are: the median."""
    n, x1, x2, seconds = table.T
    expected = prior.a * n + prior.b * x1 + prior.c * x2
    if prior.d:
        expected += prior.d * np.maximum(0.0, x1 - prior.knee)
    return _median(seconds / np.maximum(expected, 1e-9))


def _median(values: _Array) -> float:
    """Returns the median without numpy's overhead for some hundred values. There must be at least one."""
    ordered, half = np.sort(values), len(values) // 2
    return float(ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2)


class _Rows(NamedTuple):
    """The samples, then the prior's pseudo-samples."""

    x: _Array  # n, x1, x2
    times: _Array
    faint: _Array  # weight of each row by what it is
    measured: int


def _fit(table: _Array, prior: Coefficients, anchors: Anchors, knee: float | None) -> Coefficients:
    """Fits the coefficients. `table` has a row (n, x1, x2, seconds) for each sample. `knee` is where the knee is known
    to be, 0 for nowhere, None when it is to be found."""
    scaled = prior.scaled(_ratio(table, prior))
    rows = np.concatenate([table, [(1.0, *at, scaled.at(*at)) for at in anchors]])
    faint = np.ones(len(rows))
    faint[len(table) :] = PRIOR_WEIGHT
    data = _Rows(rows[:, :3], rows[:, 3], faint, len(table))
    if not knee:
        solution, weights = _robust(data.x, data)
        knee = _knee(data, solution, weights) if knee is None else 0.0
    if not knee:
        a, b, c = (float(v) for v in solution)
        return Coefficients(a, b, c)
    a, b, c, d = (float(v) for v in _robust(_bent(data, knee), data)[0])
    return Coefficients(a, b, c, d, knee if d else 0.0)


def _bent(data: _Rows, knee: float) -> _Array:
    return np.column_stack([data.x, np.maximum(0.0, data.x[:, 1] - knee)])


def _knee(data: _Rows, straight: _Array, weights: _Array) -> float:
    """Returns where the time bends, among the sizes seen: first a few of them are tried, then those around the best; 0
    where a straight line fits as well."""
    seen = np.sort(data.x[: data.measured, 1])
    sizes = np.unique(seen)
    below, above = seen.searchsorted(sizes), len(seen) - seen.searchsorted(sizes, "right")
    inner = sizes[np.minimum(below, above) >= KNEE_SIDE].tolist()
    least = (1 - KNEE_GAIN) * _loss(data.x @ straight, data.times, weights)
    best, stride = -1, max(1, len(inner) // MAX_KNEES)
    picked = range(0, len(inner), stride)
    while picked:
        for at in picked:
            features = _bent(data, inner[at])
            loss = _loss(features @ _solve(*_scaled(features), data.times, weights), data.times, weights)
            if loss < least:
                best, least = at, loss
        if stride == 1 or best < 0:
            break
        low, high = max(0, best - stride), min(len(inner), best + stride)
        stride = max(1, (high - low) // MAX_KNEES)
        picked = range(low, high, stride)
    return inner[best] if best >= 0 else 0.0


def _loss(predicted: _Array, times: _Array, weights: _Array) -> float:
    return float((weights * (predicted - times) ** 2).sum())


def _robust(features: _Array, data: _Rows) -> tuple[_Array, _Array]:
    """Returns the solution, and the weights that bound its outliers."""
    times, faint = data.times, data.faint
    weights, last = faint / times**2, times
    solution, scaled = np.zeros(features.shape[1]), _scaled(features)
    for _ in range(ROUNDS):
        solution = _solve(*scaled, times, weights)
        predicted = np.maximum(features @ solution, 1e-9)
        # Relative to what is predicted, not to what was measured: a wrong sample must not choose its own weight.
        error = np.abs(times - predicted) / predicted
        spread = max(1.4826 * _median(error[: data.measured]), MIN_RELATIVE_SPREAD)
        bounded = np.minimum(1.0, HUBER * spread / np.maximum(error, 1e-12))
        # Beyond four times the bound the pull falls further: one frozen step must not tilt a window of equal sizes.
        far = error > 4 * HUBER * spread
        if np.logical_or.reduce(far):
            bounded[far] **= 3
        weights = faint * bounded / predicted**2
        if np.maximum.reduce(np.abs(predicted - last)) <= SETTLED * np.minimum.reduce(predicted):
            break
        last = predicted
    return solution, weights


def _scaled(features: _Array) -> tuple[_Array, _Array]:
    """Returns the columns scaled to about one size, and the divisors."""
    scale: _Array = np.maximum(np.abs(features).max(axis=0), 1e-12)
    return features / scale, scale


# By columns: their supports, of each number of columns as arrays of indices; and what makes a matrix regular.
_SUPPORTS = {n: {k: [np.array(s) for s in combinations(range(n), k)] for k in range(1, n + 1)} for n in (3, 4)}
_RIDGES = {n: np.eye(n) * 1e-12 for n in (1, 2, 3, 4)}


def _solve(scaled: _Array, scale: _Array, times: _Array, weights: _Array) -> _Array:
    """Solves weighted least squares with non-negative coefficients: the best over all supports, which is exact for a
    few columns."""
    weighted = scaled * weights[:, None]
    gram, moment = weighted.T @ scaled, weighted.T @ times
    columns = len(scale)
    best, best_gain = np.zeros(columns), 0.0
    for size in range(columns, 0, -1):
        for index in _SUPPORTS[columns][size]:
            part, right = (gram, moment) if size == columns else (gram[index[:, None], index], moment[index])
            try:
                found = np.linalg.solve(part + _RIDGES[size] * part.trace(), right)
            except np.linalg.LinAlgError:
                continue
            if np.minimum.reduce(found) < 0:
                continue
            gain = float(found @ right)
            if gain > best_gain:
                best, best_gain = np.zeros(columns), gain
                best[index] = found
        if size == columns and best_gain > 0:
            break
    unscaled: _Array = best / scale
    return unscaled
