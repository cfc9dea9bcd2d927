"""Quantiles and courses over time of streams that nobody keeps: memory does not grow with what is added."""

from __future__ import annotations

import math
from collections.abc import Iterator

ERROR = 0.005  # of a quantile, relative
POINTS = 600  # of a course, at most


class Sketch:
    """A histogram with logarithmic buckets (as DDSketch, Masson et al. 2019): every quantile is within `error` of a
    value of its rank, relative. Count, sum, least and greatest are exact. Values under `least` count as 0."""

    __slots__ = ("_buckets", "_growth", "_least", "_log", "_zeros", "count", "high", "low", "total")

    def __init__(self, error: float = ERROR, least: float = 1e-6) -> None:
        self._growth = (1 + error) / (1 - error)
        self._log = math.log(self._growth)
        self._least = least
        self._buckets: dict[int, int] = {}
        self._zeros = 0
        self.count = 0
        self.total = 0.0
        self.low = math.inf
        self.high = -math.inf

    def add(self, value: float) -> None:
        """`value` >= 0; one that is not finite, or negative, is passed over: it stands for "none"."""
        if not 0 <= value < math.inf:
            return
        self.count += 1
        self.total += value
        self.low = min(self.low, value)
        self.high = max(self.high, value)
        if value < self._least:
            self._zeros += 1
        else:
            at = math.ceil(math.log(value) / self._log)
            self._buckets[at] = self._buckets.get(at, 0) + 1

    @property
    def mean(self) -> float:
        """nan of none."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, share: float) -> float:
        """The value of rank share x (count - 1), rounded down; `share` in 0..1; nan of none."""
        if not self.count:
            return math.nan
        rank = math.floor(share * (self.count - 1))
        if rank >= self.count - 1:
            return self.high
        for value, below in self._steps():
            if below > rank:
                return min(max(value, self.low), self.high)
        return self.high

    def _steps(self) -> Iterator[tuple[float, int]]:
        """(value, how many are at most as great), rising."""
        below = self._zeros
        if below:
            yield 0.0, below
        middle = 2 / (1 + self._growth)
        for at in sorted(self._buckets):
            below += self._buckets[at]
            yield middle * self._growth**at, below

    def cdf(self, points: int = 200) -> list[tuple[float, float]]:
        """(value, share of all that is at most as great), rising, at most about `points` of them, the last one
        (greatest, 1)."""
        found: list[tuple[float, float]] = []
        told = 0.0
        for value, below in self._steps():
            share = below / self.count
            if not found or share - told >= 1 / points:
                found.append((min(max(value, self.low), self.high), share))
                told = share
        if found:
            found[-1 if found[-1][1] == 1 else len(found) :] = [(self.high, 1.0)]
        return found

    def to_json(self) -> dict[str, float | int | None]:
        """Plain figures; None where there are none."""
        told = {"mean": self.mean, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
        told.update({name: self.quantile(share) for name, share in told.items() if name != "mean"})
        told["max"] = self.high
        return {"count": self.count, **{name: tidy(value) for name, value in told.items()}}


class BinnedSums:
    """Sums of named figures over equal stretches of time, which double in length whenever more than POINTS are
    needed: so many points at most, whatever time passes. Times may come in any order, from 0 on."""

    __slots__ = ("_bins", "_points", "width_s")

    def __init__(self, width_s: float = 1.0, points: int = POINTS) -> None:
        self.width_s = width_s
        self._points = points
        self._bins: dict[int, dict[str, float]] = {}

    def add(self, at_s: float, figures: dict[str, float]) -> None:
        """Each figure is added to its sum; `mean` divides by whichever figure counts."""
        if not 0 <= at_s < math.inf:
            return
        place = int(at_s / self.width_s)
        while place >= self._points:
            self._widen()
            place = int(at_s / self.width_s)
        _into(self._bins.setdefault(place, {}), figures)

    def _widen(self) -> None:
        self.width_s *= 2
        old, self._bins = self._bins, {}
        for place, figures in old.items():
            _into(self._bins.setdefault(place // 2, {}), figures)

    def rows(self) -> Iterator[tuple[float, dict[str, float]]]:
        """(start of the stretch in seconds, sums), from the first stretch that something fell into to the last; empty
        sums where nothing did."""
        if self._bins:
            for place in range(min(self._bins), max(self._bins) + 1):
                yield place * self.width_s, self._bins.get(place, {})


def _into(sums: dict[str, float], figures: dict[str, float]) -> None:
    for name, value in figures.items():
        sums[name] = sums.get(name, 0.0) + value


def tidy(value: float) -> float | None:
    """Six significant digits, so that files stay small; None for what is not finite (JSON knows no nan)."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
