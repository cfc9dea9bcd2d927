"""From windows of measured CPU time to CPU per request, block, token and heartbeat: non-negative least squares. Pure.

CPU = a * requests + b * blocks + c * tokens + d * heartbeats + ... of each service in each window; what one of them
costs is solved for each repeat apart, so that the spread of the repeats tells how far a figure is to be trusted.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

TINY_S = 0.02  # of CPU time in a window: below it an error counts as absolute
_STEPS = 10  # per unknown: more than the active set ever takes


@dataclass(frozen=True, slots=True)
class Window:
    """What happened in some seconds. `counts`: events, seconds among them; `cpu_s`: CPU seconds by service."""

    group: str
    repeat: int
    counts: Mapping[str, float]
    cpu_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds of one event: the median of all repeats, and the least and the most of them."""

    median: float
    least: float
    most: float

    @property
    def spread(self) -> float:
        """(most - least) / median; 0 where the median is."""
        return (self.most - self.least) / self.median if self.median else 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """Costs of one service by event. `error`: the median over all windows of |told - measured| / measured."""

    costs: Mapping[str, Cost]
    error: float

    def __getitem__(self, event: str) -> float:
        """CPU seconds of one event; 0 for what this service has no part in."""
        cost = self.costs.get(event)
        return cost.median if cost else 0.0


def fit(windows: Sequence[Window], service: str, events: Sequence[str]) -> Fit:
    """ValueError: no window of `service`, or an event that occurs in none of a repeat's windows."""
    repeats = sorted({window.repeat for window in windows})
    if not repeats:
        raise ValueError(f"no window tells of {service!r}")
    found = [_solved([w for w in windows if w.repeat == repeat], service, events) for repeat in repeats]
    costs = {
        event: Cost(statistics.median(one), min(one), max(one))
        for event, one in zip(events, zip(*found, strict=True), strict=True)
    }
    return Fit(costs, _error(windows, service, costs))


def _solved(windows: Sequence[Window], service: str, events: Sequence[str]) -> list[float]:
    for event in events:
        if not any(window.counts.get(event) for window in windows):
            raise ValueError(f"{service}: no window has any {event!r}")
    table = np.array([[window.counts.get(event, 0.0) for event in events] for window in windows])
    measured = np.array([window.cpu_s[service] for window in windows])
    # Noise grows with what is measured (caches, a neighbour's work): errors are weighed relative to it.
    weights = 1.0 / np.maximum(measured, TINY_S)
    return [float(value) for value in nonnegative(table * weights[:, None], measured * weights)]


def _error(windows: Sequence[Window], service: str, costs: Mapping[str, Cost]) -> float:
    off = []
    for window in windows:
        told = sum(cost.median * window.counts.get(event, 0.0) for event, cost in costs.items())
        off.append(abs(told - window.cpu_s[service]) / max(window.cpu_s[service], TINY_S))
    return statistics.median(off)


def nonnegative(table: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The x >= 0 that minimizes |table @ x - values| (Lawson and Hanson's active set).

    Every column has something in it. The result meets the optimality conditions within rounding."""
    scale = np.linalg.norm(table, axis=0)
    unit = table / scale
    columns = unit.shape[1]
    free = np.zeros(columns, dtype=bool)
    x = np.zeros(columns)
    tolerance = 1e-10 * max(1.0, float(np.abs(unit.T @ values).max(initial=0.0)))
    for _ in range(_STEPS * columns):
        slope = unit.T @ (values - unit @ x)
        slope[free] = -np.inf
        if free.all() or slope.max() <= tolerance:
            break
        free[int(slope.argmax())] = True
        x = _feasible(unit, values, x, free)
    return np.asarray(x / scale)


def _feasible(unit: np.ndarray, values: np.ndarray, x: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Least squares over `free`; what would turn negative leaves it, on the way there."""
    while True:
        wanted = np.zeros_like(x)
        wanted[free] = np.linalg.lstsq(unit[:, free], values, rcond=None)[0]
        bad = free & (wanted <= 0)
        if not bad.any():
            return wanted
        gap = x[bad] - wanted[bad]
        steps = np.divide(x[bad], gap, out=np.zeros_like(gap), where=gap > 0)
        x = x + min(1.0, float(steps.min())) * (wanted - x)
        free &= ~(bad & (x <= 1e-14))
        x[~free] = 0.0
