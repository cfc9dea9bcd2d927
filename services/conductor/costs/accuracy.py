"""How good predictions were: each is compared with what happened, before the models learn from it. Pure.

A group is a set of instances that share models and load: those of one model that do one half of the work, and
separately its coupled ones. For each kind and group the last WINDOW predictions of the last AGE_S seconds count,
because older ones say nothing about a machine that is slow now. Errors are relative to the prediction: an error of 1
means that it took twice as long as predicted.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvmesh.quantiles import quantile
from kvmesh.services.conductor.domain import Role

WINDOW = 1024
AGE_S = 600.0
ENOUGH = 8  # measurements, before `Calibration` says anything by them
MAX_GROUPS = 64  # the group that was measured least recently is forgotten first
LEAST = 1e-9  # nothing is predicted to take less
CALIBRATED = 32
REFIT = 4  # measurements, of a full window, between two fits of it
ADDED_SHARES = (0.0, 0.25, 0.5, 1.0, 2.0)  # of the median prediction: what `added_s` is chosen among
MOST_OFF = 16.0  # times: what was further off counts as that
SHOWN_S = 10.0  # a summary to which nothing was added is this old at most


class PredictionKind(Enum):
    """The kinds of predictions."""

    PREFILL = "prefill"  # a prompt, from its first step to the end of its last one
    DECODE_STEP = "decode_step"
    PULL = "pull"  # blocks from other nodes' memory
    TRANSFER = "transfer"  # KV from prefill to decode, first byte to last
    TIER_LOAD = "tier_load"  # blocks out of a lower tier
    TTFT = "ttft"  # of placements, seen from decode
    TBT = "tbt"
    OUTPUT_TOKENS = "output_tokens"


@dataclass(frozen=True)
class PredictionError:
    """How far predictions of one kind were off."""

    what: PredictionKind
    samples: int
    bias: float  # median of (measured - predicted) / predicted
    p50: float  # of |measured - predicted| / predicted
    p90: float
    p99: float
    group: str = ""  # "": all of them
    low: float = 1.0  # measured / predicted: one in ten is below this
    high: float = 1.0  # and one in ten above this


class Spread(NamedTuple):
    """Has quantiles of measured / (predicted + `added_s`): one in ten was below `low`, half were below `middle`, one in
    ten was above `high`."""

    low: float
    middle: float
    high: float
    samples: int  # that it goes by
    added_s: float = 0.0

    def of(self, predicted_s: float) -> tuple[float, float, float]:
        """Returns the seconds that a prediction of that many stands for: low, middle and high."""
        base_s = predicted_s + self.added_s
        return base_s * self.low, base_s * self.middle, base_s * self.high


AS_PREDICTED = Spread(1.0, 1.0, 1.0, 0)


def group_of(model: str, role: Role) -> str:
    """Returns the group of an instance that serves `model` in this role."""
    return f"{model} coupled" if role is Role.BOTH else model


class Accuracy:
    """The prediction errors that one conductor has seen since its start."""

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._groups: OrderedDict[str, dict[PredictionKind, _Errors]] = OrderedDict()

    def add(self, what: PredictionKind, group: str, predicted: float, measured: float, now: float) -> None:
        """Adds one prediction with its measurement; nothing is learnt where either is missing."""
        if not (LEAST <= predicted < math.inf and 0 < measured < math.inf):
            return
        kinds = self._groups.get(group)
        if kinds is None:
            kinds = self._groups[group] = {}
        self._groups.move_to_end(group)
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)
        errors = kinds.get(what)
        if errors is None:
            errors = kinds[what] = _Errors(self._window)
        errors.add((measured - predicted) / predicted, now)

    def errors(self, now: float) -> Sequence[PredictionError]:
        """Returns the errors of all kinds measured in the last AGE_S seconds, over all groups."""
        found = []
        for what in PredictionKind:
            some = [kinds[what].since(now - AGE_S) for kinds in self._groups.values() if what in kinds]
            told = _summary(what, "", np.concatenate(some)) if some else None
            if told is not None:
                found.append(told)
        return found

    def group_errors(self, now: float) -> Sequence[PredictionError]:
        """Returns the errors by group, in the order of their names, and kind."""
        found = []
        for group in sorted(self._groups):
            for what in PredictionKind:
                errors = self._groups[group].get(what)
                told = errors.summary(what, group, now) if errors is not None else None
                if told is not None:
                    found.append(told)
        return found


class Calibration:
    """How far times differ from their predictions for reasons that no model knows: other work on the same cores,
    messages between processes, pauses. A part of that is the same for short and long ones and is added to the
    prediction, the rest is a factor. It is kept by kind, group and the number of requests under way (by octaves), from
    the last CALIBRATED measurements. It depends on the calls of `add` alone, so a decision log reproduces it."""

    def __init__(self) -> None:
        self._windows: OrderedDict[tuple[PredictionKind, str], dict[int, _Window]] = OrderedDict()

    def add(self, what: PredictionKind, group: str, crowd: int, predicted: float, measured: float) -> None:
        """Adds one measurement. `crowd` is the number of requests that were under way when it was predicted."""
        if not (LEAST <= predicted < math.inf and 0 < measured < math.inf):
            return
        key = (what, group)
        octaves = self._windows.setdefault(key, {})
        self._windows.move_to_end(key)
        if len(self._windows) > MAX_GROUPS * len(PredictionKind):
            self._windows.popitem(last=False)
        octaves.setdefault(crowd.bit_length(), _Window()).add(predicted, measured)

    def spread(self, what: PredictionKind, group: str, crowd: int) -> Spread:
        """Returns the recent spread with about so many requests, or with the nearest number that has ENOUGH
        measurements; AS_PREDICTED if none has."""
        octaves = self._windows.get((what, group), {})
        octave = crowd.bit_length()
        found = octaves.get(octave)
        if found is None or found.spread is None:
            known = [one for one, window in octaves.items() if window.spread is not None]
            if not known:
                return AS_PREDICTED
            found = octaves[min(known, key=lambda one: abs(one - octave))]
        assert found.spread is not None
        return found.spread


class _Window:
    """Keeps the last predictions of one kind, group and octave beside what was measured."""

    __slots__ = ("_count", "_pairs", "spread")

    def __init__(self) -> None:
        self._pairs: deque[tuple[float, float]] = deque(maxlen=CALIBRATED)
        self._count = 0
        self.spread: Spread | None = None  # None: of less than ENOUGH

    def add(self, predicted: float, measured: float) -> None:
        self._pairs.append((predicted, min(MOST_OFF * predicted, max(predicted / MOST_OFF, measured))))
        self._count += 1
        if ENOUGH <= self._count <= CALIBRATED or (self._count > CALIBRATED and not self._count % REFIT):
            self.spread = self._fit()

    def _fit(self) -> Spread:
        """Returns the spread whose added time leaves the least mean |log(ratio / median ratio)|."""
        middle_s = statistics.median(predicted for predicted, _ in self._pairs)
        best, least = AS_PREDICTED, math.inf
        for share in ADDED_SHARES:
            added_s = share * middle_s
            ratios = sorted(measured / (predicted + added_s) for predicted, measured in self._pairs)
            low, middle, high = (quantile(ratios, part) for part in (0.1, 0.5, 0.9))
            off = sum(abs(math.log(ratio / middle)) for ratio in ratios)
            if off < least - LEAST:
                best, least = Spread(low, middle, high, len(ratios), added_s), off
        return best


class _Errors:
    """The last errors of one kind in one group, and when each was seen."""

    __slots__ = ("_told", "_told_at", "times", "values")

    def __init__(self, window: int) -> None:
        self.values: deque[float] = deque(maxlen=window)
        self.times: deque[float] = deque(maxlen=window)
        self._told: PredictionError | None = None
        self._told_at = -math.inf

    def add(self, error: float, now: float) -> None:
        self.values.append(error)
        self.times.append(now)
        while self.times[0] < now - AGE_S:
            self.values.popleft()
            self.times.popleft()
        self._told_at = -math.inf

    def summary(self, what: PredictionKind, group: str, now: float) -> PredictionError | None:
        """Returns the summary, or None when nothing was measured lately."""
        if now - self._told_at >= SHOWN_S:
            self._told_at = now
            self._told = _summary(what, group, self.since(now - AGE_S))
        return self._told

    def since(self, at: float) -> npt.NDArray[np.float64]:
        """Returns the errors seen at that time or later."""
        return np.fromiter(self.values, float)[bisect_left(self.times, at) :]


def _summary(what: PredictionKind, group: str, errors: npt.NDArray[np.float64]) -> PredictionError | None:
    if not len(errors):
        return None
    ordered, sizes = np.sort(errors).tolist(), np.sort(np.abs(errors)).tolist()
    low, bias, high = (quantile(ordered, share) for share in (0.1, 0.5, 0.9))
    p50, p90, p99 = (quantile(sizes, share) for share in (0.5, 0.9, 0.99))
    return PredictionError(what, len(ordered), bias, p50, p90, p99, group, 1 + low, 1 + high)
