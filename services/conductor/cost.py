"""What work will cost: prefill, decode step and pull times fitted online, bandwidth averaged.

A fitted model is `t = a + b·x1 + c·x2` with a, b, c >= 0. Samples sit in a bounded window; the fit minimises the
relative error, with Huber weights so that an outlier pulls no harder than a bounded error. A prior gives the shape
until there are samples, and stays in as faint pseudo-samples so that a window of equal sizes still extrapolates.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from kvmesh.kvcache.tiers import Tier

WINDOW = 256
ENOUGH_SAMPLES = 8
REFIT_EVERY = 8
# A busy instance brings hundreds of samples a second and a fit costs a millisecond: once a second is often enough,
# and half a window of new samples never waits.
REFIT_INTERVAL_S = 1.0
# How strongly one pseudo-sample of the prior counts beside one real sample.
PRIOR_WEIGHT = 0.02
HUBER = 1.5
ROUNDS = 6
MIN_RELATIVE_SPREAD = 0.02
# What a node says of a lower tier counts for less and less while it says nothing new: nobody may have used it since.
TIER_HALF_LIFE_S = 30.0
SEEN_SHARE = 0.3  # of a new observation in what is expected of a tier
MAX_SEEN = 1e4  # times as slow, or as fast, as the prior
# Confidence in an old fit halves in this time while nothing new is measured (see `admission_s`).
HALF_LIFE_S = 30.0

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Coefficients:
    """Seconds, seconds per x1, seconds per x2; all >= 0."""

    a: float
    b: float
    c: float

    def at(self, x1: float, x2: float) -> float:
        """Predicted seconds."""
        return self.a + self.b * x1 + self.c * x2

    def scaled(self, factor: float) -> Coefficients:
        """The same shape, `factor` times as slow."""
        return Coefficients(self.a * factor, self.b * factor, self.c * factor)


class FittedModel:
    """One `t = a + b·x1 + c·x2`, learnt from `add`."""

    def __init__(self, prior: Coefficients, anchors: tuple[tuple[float, float], ...]) -> None:
        """`anchors`: the points (x1, x2) at which the prior speaks."""
        self.prior = prior
        self.coefficients = prior
        self._anchors = anchors
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)
        self._unfitted = 0
        self._newest: float | None = None
        self._fitted_at = 0.0

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, x1: float, x2: float, seconds: float, now: float) -> None:
        """Learn one measurement; nonsense (not positive, not finite) is ignored."""
        if not (0 < seconds < 1e6 and 0 <= x1 < 1e12 and 0 <= x2 < 1e18):
            return
        self._samples.append((x1, x2, seconds))
        self._newest = now
        self._unfitted += 1
        if len(self._samples) < ENOUGH_SAMPLES:
            self.coefficients = self.prior.scaled(self._ratio())
        elif len(self._samples) == ENOUGH_SAMPLES or self._stale(now):
            self._fitted_at = now
            self.coefficients = _fit(self._samples, self.prior.scaled(self._ratio()), self._anchors)
            self._unfitted = 0

    def _stale(self, now: float) -> bool:
        if self._unfitted >= WINDOW // 2:
            return True
        return self._unfitted >= REFIT_EVERY and now - self._fitted_at >= REFIT_INTERVAL_S

    def predict(self, x1: float, x2: float) -> float:
        """Seconds, the best estimate: for ranking and for queues."""
        return self.coefficients.at(x1, x2)

    def admission_s(self, x1: float, x2: float, now: float) -> float:
        """Seconds, for refusing work. A refusal brings no measurement, so a wrong slow fit would refuse for ever:
        few samples never speak worse than the prior, and an old fit fades towards it."""
        fitted = self.coefficients.at(x1, x2)
        floor = min(fitted, self.prior.at(x1, x2))
        if len(self._samples) < ENOUGH_SAMPLES or self._newest is None:
            return floor
        return float(max(floor, fitted * 0.5 ** (max(0.0, now - self._newest) / HALF_LIFE_S)))

    def _ratio(self) -> float:
        """How many times as slow as the prior this instance is: the median over the samples."""
        ratios = [t / max(self.prior.at(x1, x2), 1e-9) for x1, x2, t in self._samples]
        return float(np.median(ratios))


def _fit(
    samples: deque[tuple[float, float, float]], prior: Coefficients, anchors: tuple[tuple[float, float], ...]
) -> Coefficients:
    measured = np.array(samples, dtype=np.float64)
    pseudo = np.array([(x1, x2, prior.at(x1, x2)) for x1, x2 in anchors], dtype=np.float64)
    rows = np.concatenate([measured, pseudo])
    times = rows[:, 2]
    features = np.column_stack([np.ones(len(rows)), rows[:, 0], rows[:, 1]])
    scale = np.maximum(np.abs(features).max(axis=0), 1e-12)
    features /= scale
    faint = np.ones(len(rows))
    faint[len(measured) :] = PRIOR_WEIGHT
    weights = faint / times**2
    solution = np.zeros(3)
    for _ in range(ROUNDS):
        solution = _non_negative(features, times, weights)
        predicted = np.maximum(features @ solution, 1e-9)
        # Relative to what is predicted, not to what was measured: a wrong sample must not choose its own weight.
        error = np.abs(times - predicted) / predicted
        spread = max(1.4826 * float(np.median(error[: len(measured)])), MIN_RELATIVE_SPREAD)
        bounded = np.minimum(1.0, HUBER * spread / np.maximum(error, 1e-12))
        # Beyond four times the bound the pull falls further: one frozen step must not tilt a window of equal sizes.
        bounded = np.where(error > 4 * HUBER * spread, bounded**3, bounded)
        weights = faint * bounded / predicted**2
    a, b, c = (float(v) for v in solution / scale)
    return Coefficients(a, b, c)


def _non_negative(features: _Array, times: _Array, weights: _Array) -> _Array:
    """Weighted least squares with non-negative coefficients: the best over all supports, exact for three columns."""
    weighted = features * weights[:, None]
    gram = weighted.T @ features
    moment = weighted.T @ times
    best, best_gain = np.zeros(3), 0.0
    for size in (3, 2, 1):
        for support in combinations(range(3), size):
            index = np.array(support)
            part = gram[np.ix_(index, index)]
            try:
                found = np.linalg.solve(part + np.eye(size) * 1e-12 * np.trace(part), moment[index])
            except np.linalg.LinAlgError:
                continue
            if (found < 0).any():
                continue
            gain = float(found @ moment[index])
            if gain > best_gain:
                best, best_gain = np.zeros(3), gain
                best[index] = found
        if size == 3 and best_gain > 0:
            break
    return best


# ── the models ────────────────────────────────────────────────────────────────────────────────────


def _prefill_features(computed: float, cached: float) -> tuple[float, float]:
    # Attention of `computed` tokens after `cached`: sum of (cached + i) = computed·(computed + 2·cached) / 2.
    return computed, computed * (computed + 2 * cached) / 2


PREFILL_PRIOR = Coefficients(a=0.010, b=50e-6, c=2.5e-9)
DECODE_PRIOR = Coefficients(a=0.010, b=100e-6, c=0.2e-6)
PULL_PRIOR = Coefficients(a=0.010, b=2e-9, c=0.005)
# Until the first byte, and for each byte. What is thought slow is never tried: a good device of its kind.
TIER_PRIORS = {
    Tier.SSD: Coefficients(a=0.0002, b=0.5e-9, c=0.0),
    Tier.OBJECT: Coefficients(a=0.030, b=5e-9, c=0.0),
}
_PREFILL_ANCHORS = tuple(_prefill_features(n, m) for n, m in ((1, 0), (256, 0), (2048, 0), (8192, 0), (512, 8192)))
_PULL_ANCHORS = ((float(1 << 16), 0.0), (float(1 << 24), 0.0), (float(1 << 30), 0.0), (float(1 << 24), 4.0))
_DECODE_ANCHORS = ((1.0, 64.0), (8.0, 4096.0), (64.0, 65536.0), (8.0, 131072.0))


class PrefillModel:
    """Time to prefill `computed` tokens behind `cached` ones."""

    def __init__(self, prior: Coefficients = PREFILL_PRIOR) -> None:
        self.fit = FittedModel(prior, _PREFILL_ANCHORS)

    def add(self, computed: int, cached: int, seconds: float, now: float) -> None:
        """Learn one prefill."""
        if computed > 0:
            self.fit.add(*_prefill_features(computed, cached), seconds, now)

    def predict(self, computed: int, cached: int) -> float:
        """Seconds."""
        return self.fit.predict(*_prefill_features(computed, cached))

    def admission_s(self, computed: int, cached: int, now: float) -> float:
        """Seconds, for refusing work (see `FittedModel.admission_s`)."""
        return self.fit.admission_s(*_prefill_features(computed, cached), now)


class DecodeModel:
    """Time of one decode step: the TBT of everything in its batch."""

    def __init__(self, prior: Coefficients = DECODE_PRIOR) -> None:
        self.fit = FittedModel(prior, _DECODE_ANCHORS)

    def add(self, batch: int, context_tokens: int, seconds: float, now: float) -> None:
        """Learn one step."""
        if batch > 0:
            self.fit.add(batch, context_tokens, seconds, now)

    def predict(self, batch: int, context_tokens: float) -> float:
        """Seconds."""
        return self.fit.predict(batch, context_tokens)

    def admission_s(self, batch: int, context_tokens: float, now: float) -> float:
        """Seconds, for refusing work."""
        return self.fit.admission_s(batch, context_tokens, now)


class DecayedRatio:
    """`sum(amount) / sum(seconds)` with older samples fading: an average rate weighted by size."""

    def __init__(self, amount: float, seconds: float, keep: float) -> None:
        """Starts at amount / seconds, worth as much as one sample of that size; `keep` in (0, 1) per sample."""
        self._amount, self._seconds, self._keep = amount, seconds, keep

    def add(self, amount: float, seconds: float) -> None:
        """One measurement; one that took no time is ignored."""
        if amount >= 0 and seconds > 0:
            self._amount = self._amount * self._keep + amount
            self._seconds = self._seconds * self._keep + seconds

    @property
    def rate(self) -> float:
        """Amount per second."""
        return self._amount / self._seconds


class TransferModel:
    """Bytes per second from one prefill instance to decode, and what of a transfer prefill does not hide."""

    def __init__(self, bytes_per_s: float = 1e9) -> None:
        first = 1 << 20
        self._bandwidth = DecayedRatio(first, first / bytes_per_s, keep=0.9)

    def add(self, nbytes: int, seconds: float) -> None:
        """Learn one handoff."""
        if nbytes > 0:
            self._bandwidth.add(nbytes, seconds)

    @property
    def bytes_per_s(self) -> float:
        """Average over the last handoffs, weighted by their size."""
        return self._bandwidth.rate

    def tail_s(self, nbytes: int, prefill_s: float, hidden_share: float = 15 / 16) -> float:
        """Seconds between the end of prefill and the last byte. Layers travel while later ones are computed, all
        but the last of them: at least the share that cannot hide remains."""
        whole = nbytes / self.bytes_per_s
        return max(whole - prefill_s, whole * (1 - hidden_share))


class PullModel:
    """Time to fetch blocks from other nodes: an overhead, bytes (those ahead of ours at the holders too), and
    something for each further holder."""

    def __init__(self, prior: Coefficients = PULL_PRIOR) -> None:
        self.fit = FittedModel(prior, _PULL_ANCHORS)

    def add(self, nbytes: float, holders: int, seconds: float, now: float) -> None:
        """Learn one pull."""
        if nbytes > 0:
            self.fit.add(nbytes, max(0, holders - 1), seconds, now)

    def assume(self, bytes_per_s: float) -> None:
        """Until pulls are measured: as fast as KV was seen to go to decode, if that is faster than the prior. A push
        waits for the layers it sends, so its rate is only a floor; and a pull that is thought slow is never tried."""
        self.fit.prior = Coefficients(PULL_PRIOR.a, min(PULL_PRIOR.b, 1 / bytes_per_s), PULL_PRIOR.c)
        if not len(self.fit):
            self.fit.coefficients = self.fit.prior

    def seconds(self, nbytes: float, holders: int, now: float) -> float:
        """Who expects a pull to be slow does not pull and learns nothing: so this is the figure that fades (see
        `FittedModel.admission_s`)."""
        return self.fit.admission_s(nbytes, max(0, holders - 1), now)


class TierModel:
    """Time to read blocks out of one lower tier of one node: by what that node says of its last reads or, when it says
    nothing, by what reading from it was seen to take."""

    def __init__(self, tier: Tier) -> None:
        self._prior = TIER_PRIORS[tier]
        self._told: Coefficients | None = None
        self._seen = 0.0  # times as slow as the prior; 0: never seen
        self._known: Coefficients | None = None
        self._known_at = 0.0

    def hear(self, read_s: float, bytes_per_s: float, now: float) -> None:
        """Its own word: seconds until the first byte, and the rate from then on; without a rate nothing is measured."""
        if read_s < 0 or bytes_per_s <= 0:
            return
        told = Coefficients(read_s, 1 / bytes_per_s, 0.0)
        if told != self._told:
            self._told = self._known = told
            self._known_at = now

    def saw(self, nbytes: float, seconds: float, now: float) -> None:
        """Somebody waited so long for `nbytes` out of it. Its own word counts for more."""
        if self._told is None:
            ratio = min(MAX_SEEN, max(1 / MAX_SEEN, seconds / self._prior.at(nbytes, 0)))
            self._seen = ratio if not self._seen else self._seen + SEEN_SHARE * (ratio - self._seen)
            self._known, self._known_at = self._prior.scaled(self._seen), now

    def seconds(self, nbytes: float, now: float) -> float:
        """For `nbytes` in one go. Slow figures fade towards the prior while nothing new is known: see
        `FittedModel.admission_s`."""
        floor = self._prior.at(nbytes, 0)
        if self._known is None:
            return floor
        known = self._known.at(nbytes, 0)
        faded = known * 0.5 ** (max(0.0, now - self._known_at) / TIER_HALF_LIFE_S)
        return float(max(min(known, floor), faded))
