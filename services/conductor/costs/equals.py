"""One cost model for equal instances, and how far each of them departs from it (partial pooling). Pure.

Instances that serve one model with one KV layout are taken to be equal until they show otherwise. What any of them
measures is learnt by one shared model, so a newcomer, a restarted and an idle instance are believed to be what the
others show now. Relative to the shared model there are two numbers, each the logarithm of a time over its prediction:

    level       of all of them: the median of what instances have shown lately. It follows within a few samples what the
                fit, which looks at a long window, follows slowly: all have become slower, or faster.
    departure   of one of them: what its own recent samples show beyond the level, shrunk towards 0 by how few and how
                old they are. It is *exactly* 0 until it is larger than noise explains, so that equal instances have
                equal predictions and what decides between them is load.

A sample is what one heartbeat tells of one kind of work: all its seconds over all that was predicted for them, so that
rare long stalls count for what they cost. The most extreme of a few is left out: one of them moves nothing, two that
agree do. When the newest agree with each other and not with those before, those before are forgotten (a change, not an
outlier); slower and faster alike.

An instance that is thought slow gets little work and shows little. So its departure fades while nothing new is
measured, after some seconds it is tried again, and one sample decides: as before, or as good as its equals.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvmesh.services.conductor.costs.fit import ENOUGH_SAMPLES, Coefficients, Estimate, FittedModel, Sample

KEPT = 16  # samples of one instance
MERGED = 16  # measurements in one of them at most
HALF_LIFE_S = 5.0  # of a sample beside newer ones
MOST = math.log(1e4)  # beyond it a sample counts as that slow, or as that fast
PRIOR_SAMPLES = 0.5  # so many shrink a departure to half
# A departure begins beyond DEPART and CERTAIN standard errors of what noise makes of so few samples, and ends within
# RETURN: so it does not flicker.
DEPART, RETURN = math.log(1.35), math.log(1.15)
CERTAIN = 3.5
# Nor does it begin within twice the model's usual error: instances that share cores, or have just been idle, differ by
# as much. What is slower than MOST_APART departs in any case.
ERRORS, MOST_APART = 2.0, math.log(2.2)
FIRST_NOISE, LEAST_NOISE, MOST_NOISE = 0.2, 0.02, 1.0  # standard deviation of logarithms of samples of one instance
DEVIATION = 1.25  # of a normal distribution: its standard deviation over its mean absolute one
NOISE_SHARE = 0.05  # of a new sample in what is known of noise and errors
TRUSTED_S, FADES_S = 3.5, 2.5  # an instance's own samples are believed for so long, then half as much each FADES_S
ENOUGH = 4  # samples of an instance, that tell of the level
FRESH_S = 20.0  # who has shown nothing for so long says nothing of the level
LEVEL_FROM, LEVEL_STEP = math.log(1.1), math.log(1.03)  # what is less, and smaller moves, are left to the fit
FEW, LEVEL_EVERY_S = 16, 0.25  # of more instances the level is looked at only so often


class _Sample(NamedTuple):
    """What one heartbeat reported: sums over so many measurements."""

    at: float
    measured: int
    n: float
    x1: float
    x2: float
    seconds: float

    def ratio(self, by: Coefficients) -> float:
        """Returns the logarithm of the measured time over what `by` predicts; the knee is applied to the mean size."""
        predicted_s = self.measured * by.at(self.x1 / self.measured, self.x2 / self.measured, self.n / self.measured)
        return min(MOST, max(-MOST, math.log(self.seconds / max(1e-9, predicted_s))))


class Equals:
    """The instances that share one model of one kind of work."""

    def __init__(self, fitted: Callable[[], Coefficients]) -> None:
        """`fitted` returns the shared model's present coefficients."""
        self._told = fitted
        self.fitted = fitted()  # what logarithms are relative to
        self.level = 0.0
        self.noise = FIRST_NOISE
        self.error = FIRST_NOISE  # mean size of the logarithm of a sample over what was predicted for it
        self.present = self.fitted  # what an equal instance takes now
        self._members: dict[Departure, None] = {}
        self._departed: dict[Departure, None] = {}
        self._looked_at = -math.inf
        self._changed: dict[str, None] = {}  # instances whose predictions are others now

    def join(self, name: str) -> Departure:
        """Adds an instance, which is taken to be as the others are now."""
        member = Departure(self, name)
        self._members[member] = None
        return member

    def leave(self, member: Departure) -> None:
        """Removes an instance that is gone."""
        self._members.pop(member, None)
        self._departed.pop(member, None)

    def changed(self) -> Sequence[str]:
        """Returns the names of instances whose predictions have changed since the last call."""
        names, self._changed = list(self._changed), {}
        return names

    def fade(self, now: float) -> None:
        """Lets departures fade of which nothing new is known."""
        for member in list(self._departed):
            member.judge(now)

    def refresh(self, now: float) -> None:
        """Updates the level after the shared model or some samples have changed."""
        fitted, old = self._told(), self.fitted
        refitted = fitted is not old and fitted != old
        if not refitted and len(self._members) > FEW and now - self._looked_at < LEVEL_EVERY_S:
            return
        self._looked_at = now
        self.fitted = fitted
        if refitted:
            for member in self._members:
                member.rebase(old, fitted)
        level = self._level(now)
        if refitted or abs(level - self.level) >= LEVEL_STEP:
            self.level = level
            self.present = fitted.scaled(math.exp(level)) if level else fitted
            for member in self._members:
                member.follow()

    def tell(self, member: Departure) -> None:
        """Notes that an instance's prediction has changed."""
        self._changed[member.name] = None
        if member.departed:
            self._departed[member] = None
        else:
            self._departed.pop(member, None)

    def learn(self, deviation: float, error: float) -> None:
        """Learns how far a sample was from its instance's mean, and from its prediction; both are logarithms."""
        self.noise += NOISE_SHARE * (min(MOST_NOISE, DEVIATION * abs(deviation)) - self.noise)
        self.error += NOISE_SHARE * (min(1.0, abs(error)) - self.error)

    @property
    def apart(self) -> float:
        """The difference of logarithms below which two instances count as alike."""
        return max(DEPART, min(MOST_APART, ERRORS * self.error))

    def _level(self, now: float) -> float:
        """Returns the median of what instances have shown lately. If the two in the middle differ by more than noise it
        is the faster one, which shows what instances of this kind can do."""
        fresh = [m for m in self._members if m.count > 1 and now - m.newest <= FRESH_S]
        if not fresh:
            return self.level
        most = max(m.count for m in fresh)  # two samples that agree may be chance: others know better, if there are any
        means = sorted(m.mean for m in fresh if m.count >= min(ENOUGH, most))
        low, high = means[(len(means) - 1) // 2], means[len(means) // 2]
        middle = (low + high) / 2 if high - low <= self.apart else low
        return middle if abs(middle) >= LEVEL_FROM else 0.0


class Departure:
    """One instance's departure from its equals."""

    def __init__(self, equals: Equals, name: str) -> None:
        self.name = name
        self.mean = 0.0  # of its samples' logarithms, relative to the fit
        self.newest = -math.inf
        self.departed = False
        self.factor = 1.0  # times as slow as its equals
        self._equals = equals
        self._samples: deque[_Sample] = deque(maxlen=KEPT)
        self.coefficients = equals.present

    @property
    def count(self) -> int:
        """The number of samples kept."""
        return len(self._samples)

    def normal_s(self, seconds: float) -> float:
        """Returns what an equal instance would have taken for what took this one so many seconds."""
        return seconds / self.factor

    def add(self, n: float, x1: float, x2: float, seconds: float, now: float) -> None:
        """Adds one measurement. Those of one moment are merged into one sample, up to MERGED."""
        last = self._samples[-1] if self._samples else None
        if last is not None and last.at == now and last.measured < MERGED:
            sums = last.measured + 1, last.n + n, last.x1 + x1, last.x2 + x2, last.seconds + seconds
            self._samples[-1] = _Sample(now, *sums)
        else:
            if last is not None:  # nothing more comes to that one: what it says of noise is known
                ratio = last.ratio(self._equals.fitted)
                self._equals.learn(ratio - self.mean, ratio - self._equals.level - math.log(self.factor))
            self._samples.append(_Sample(now, 1, n, x1, x2, seconds))
        self.newest = now
        self.judge(now)

    def rebase(self, old: Coefficients, new: Coefficients) -> None:
        """Adjusts the mean after the shared model was fitted again; the samples are recomputed with the next one."""
        if self._samples:
            self.mean += self._samples[-1].ratio(new) - self._samples[-1].ratio(old)

    def follow(self) -> None:
        """Updates the coefficients after the shared ones have changed."""
        present = self._equals.present
        self.coefficients = present.scaled(self.factor) if self.departed else present
        self._equals.tell(self)

    def judge(self, now: float) -> None:
        """Computes the departure anew."""
        equals, samples = self._equals, self._samples
        ratios = self._after_change([s.ratio(equals.fitted) for s in samples])
        weights = [0.5 ** ((self.newest - s.at) / HALF_LIFE_S) for s in samples]
        if len(ratios) > 1:
            weights[_oddest(ratios, equals.level)] = 0.0
        total = sum(weights)
        if total:
            self.mean = sum(w * r for w, r in zip(weights, ratios, strict=True)) / total
        certain = total if len(ratios) > 1 or self.departed else 0.0
        silent_s = now - self.newest
        trust = 1.0 if silent_s <= TRUSTED_S else 0.5 ** ((silent_s - TRUSTED_S) / FADES_S)
        shown = trust * (self.mean - equals.level) * certain**2 / (certain**2 + PRIOR_SAMPLES**2)
        if self.departed:
            departed = abs(shown) >= RETURN
        else:
            error = CERTAIN * max(LEAST_NOISE, equals.noise) / math.sqrt(max(1.0, certain))
            departed = abs(shown) > max(equals.apart, error)
        factor = math.exp(shown) if departed else 1.0
        if factor != self.factor:
            self.departed, self.factor = departed, factor
            self.follow()

    def _after_change(self, ratios: list[float]) -> list[float]:
        """Returns the ratios of the samples that still count, and drops those from before a change. If the instance was
        silent for long and was thought slow or fast, its newest sample decides, provided that it is as good as its
        equals. Otherwise only the newest ones count when even the least extreme of them is far from those before, on
        the same side."""
        equals, samples = self._equals, self._samples
        if len(ratios) < 2:
            return ratios
        if self.departed and samples[-1].at - samples[-2].at > TRUSTED_S:
            if abs(ratios[-1] - equals.level) >= equals.apart:
                return ratios
            self.departed = False
            return self._keep(ratios, 1)
        if min(abs(ratios[-1] - self.mean), abs(ratios[-2] - self.mean)) < DEPART / 2:
            return ratios
        noise = CERTAIN * max(LEAST_NOISE, equals.noise)
        for newest in range(2, len(ratios) - 1):
            before = ratios[:-newest]
            if len(before) > 2:
                before.pop(_oddest(before, equals.level))
            mean, far = sum(before) / len(before), noise * math.sqrt(1 / newest + 1 / len(before))
            away = [ratio - mean for ratio in ratios[-newest:]]
            if min(away) > max(equals.apart, far) or max(away) < -max(equals.apart, far):
                return self._keep(ratios, newest)
        return ratios

    def _keep(self, ratios: list[float], newest: int) -> list[float]:
        while len(self._samples) > newest:
            self._samples.popleft()
        return ratios[-newest:]


class OwnFit(Estimate):
    """What one instance is expected to take: what its equals take, times its departure."""

    def __init__(self, shared: FittedModel, equals: Equals, name: str) -> None:
        self._shared, self._equals = shared, equals
        self.departure = equals.join(name)

    def __len__(self) -> int:
        return len(self._shared)

    @property
    def coefficients(self) -> Coefficients:
        """The present coefficients."""
        return self.departure.coefficients

    @property
    def prior(self) -> Coefficients:
        """The coefficients from before any measurement."""
        return self._shared.prior

    @property
    def fading_from(self) -> float:
        """Implements `FittedCosts`. What equals have reported, perhaps only one of them, refuses none of this
        instance's work."""
        known = self.departure.count > 1 and len(self._shared) >= ENOUGH_SAMPLES
        return self.departure.newest if known else -math.inf

    def take(self, coefficients: Coefficients) -> None:
        """Sets the prior of all equal instances."""
        self._shared.take(coefficients)

    def add(self, x1: float, x2: float, seconds: float, now: float, n: float = 1.0) -> None:
        """Learns one measurement, for this instance and its equals; values that are not positive and finite are
        ignored."""
        if not Sample(x1, x2, seconds, n).sound:
            return
        self.departure.add(n, x1, x2, seconds, now)
        self._shared.add(x1, x2, self.departure.normal_s(seconds), now, n)
        self._equals.refresh(now)


def _oddest(ratios: Sequence[float], level: float) -> int:
    """Returns the index of the ratio that is farthest from the median; of two, from the level."""
    middle = sorted(ratios)[len(ratios) // 2] if len(ratios) > 2 else level
    return max(range(len(ratios)), key=lambda at: abs(ratios[at] - middle))
