"""Where all of a host's figures should be at once: how measurements answer to them, as a plane.

The figures of `HostModel` are moved a little up or down, all at once, in runs of a two-level design (Plackett and
Burman's twelve for up to eleven figures, and their mirror images, so that what is even in a figure cancels out of its
slope). Each is one simulation with a seed of its own. Least squares give a plane through the logs of what they gave;
what lies off it is the noise of a single run. A live run is a single run, too, and has about that noise: so each
measurement counts by it, and a 99th percentile, which two requests decide, hardly pulls. The point whose plane
comes closest is where the figures go, at most `FAR` steps away.

Pure, and the same each time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvmesh.sim.host import HostModel, scattered

# By what a figure is moved, in its own unit: a share of it, at least so much.
STEP = 0.15
LEAST_STEPS = {
    "prefill_alone": 0.01,
    "decode_alone": 0.01,
    "door_s": 1e-3,
    "rest_s": 1e-3,
    "between_s": 3e-4,
    "turn_s": 3e-4,
    "handoff_s": 1.5e-3,
}
POWER_STEP = 0.15  # of residuals: they are taken to the power 1 ± this
SCATTERS = ("prefill_residuals", "decode_residuals")
FIGURES = (*LEAST_STEPS, *SCATTERS)
FAR = 2.0  # steps, of one figure in one pass
LOOSE = 1.0  # steps that a figure may be off without a measurement that asks for it: the spread of a prior. Slopes are
# noisy, too: least squares alone would follow what they only seem to be.
LEAST_NOISE = 0.02  # of a measurement, relative

_ROW = (1, 1, -1, 1, 1, 1, -1, -1, -1, 1, -1)  # shifted round, and a row of -1: each two columns are orthogonal

Array = npt.NDArray[np.float64]
Measure = Callable[[HostModel, int], Mapping[str, float]]  # a host, the number of the run → what it gave, above 0


def design() -> Array:
    """A run in each row, a figure in each column: -1 or 1."""
    half = np.array([[_ROW[(at - shift) % len(_ROW)] for at in range(len(_ROW))] for shift in range(len(_ROW))])
    half = np.vstack([half, -np.ones(len(_ROW), dtype=int)])[:, : len(FIGURES)]
    return np.vstack([half, -half]).astype(float)


RUNS = len(design())


def moved(host: HostModel, steps: Array) -> HostModel:
    """The figures so many steps further on; none below 0."""
    told: dict[str, float | tuple[float, ...]] = {}
    for name, by in zip(FIGURES, steps, strict=True):
        value = getattr(host, name)
        if name in SCATTERS:
            told[name] = scattered(value, max(0.0, float(1 + POWER_STEP * by)))
        else:
            least = LEAST_STEPS[name] if name.endswith("_alone") else 0.0
            told[name] = float(max(least, value + _step(name, value) * by))
    return replace(host, **told)  # type: ignore[arg-type]


def better(host: HostModel, wanted: Mapping[str, float], measure: Measure) -> HostModel:
    """One pass from `host` on, of `RUNS` runs. `wanted`: what was measured live; what is 0 there tells nothing."""
    names = [name for name, value in wanted.items() if value > 0]
    tried = [moved(host, by) for by in design()]
    seen = [measure(one, at) for at, one in enumerate(tried)]
    logs = np.log([[max(1e-9, one[name]) for name in names] for one in seen])
    steps = np.array([_between(host, one, by) for one, by in zip(tried, design(), strict=True)])
    plane = np.column_stack([np.ones(len(steps)), steps])
    found, *_ = np.linalg.lstsq(plane, logs, rcond=None)
    spare = len(steps) - plane.shape[1]
    noise = np.maximum(LEAST_NOISE, np.sqrt(((logs - plane @ found) ** 2).sum(axis=0) / spare))
    missing = (np.log([wanted[name] for name in names]) - found[0]) / noise
    slopes = (found[1:] / noise).T
    return moved(host, _within(slopes, missing))


def _between(host: HostModel, other: HostModel, asked: Array) -> Array:
    """Steps from one to the other, which was to be so many away: a figure that was to go below 0 went less far."""
    found = asked.copy()
    for at, name in enumerate(LEAST_STEPS):
        value = getattr(host, name)
        found[at] = (getattr(other, name) - value) / _step(name, value)
    return found


def _step(name: str, value: float) -> float:
    return max(STEP * value, LEAST_STEPS[name])


def _within(slopes: Array, missing: Array) -> Array:
    """Least squares of slopes · steps = missing, each step drawn to 0 by `LOOSE`, none beyond `FAR`: one that would be
    stays there, and the others are solved again."""
    count = slopes.shape[1]
    steps, free = np.zeros(count), np.ones(count, dtype=bool)
    for _ in range(count):
        left = missing - slopes[:, ~free] @ steps[~free]
        a = slopes[:, free]
        steps[free] = np.linalg.solve(a.T @ a + np.eye(a.shape[1]) / LOOSE**2, a.T @ left)
        beyond = free & (np.abs(steps) > FAR)
        if not beyond.any():
            break
        steps[beyond] = np.clip(steps[beyond], -FAR, FAR)
        free &= ~beyond
    return steps
