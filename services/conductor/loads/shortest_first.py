"""Queues that go by size (services/prefill/planner.py): what a request waits for there, and what it makes others wait.
Pure.

Who goes before whom is told by rank = placed + priority x PRIORITY_STEP_S + class x weight, smaller first; the class
is `work_class` of the predicted time of computing what is not cached, the weight the instance's own. So of an
instance's backlog

    ahead   is what ranks before the request: it waits for that
    behind  is what ranks after it: that waits for the request

and the cost of placing it there is, besides what it is in any queue (placement.py),

    TTFT + others x prefill x (how many are behind) + later x (seconds that are behind)

The second term is what all who are there lose by it: placing each arrival where the sum of all waiting grows least is
the greedy rule of Anand, Garg and Kumar (SODA 2012) for machines that serve the shortest first. The third one is ours:
what is behind now is before others when its weight has worn off, and shorter ones come after this one, too.

While it waits, shorter ones come and go before it. With rho(s), the share of an instance that requests of lesser
classes than s take, waiting for `ahead` takes ahead / (1 - rho(s)) (Schrage and Miller 1966, shortest remaining time
first), but no more than rho(s) x weight x s longer: who comes later than that does not pass it. Without this, admission
takes long requests that will miss their SLO, as by then others have passed them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kvmesh.services.conductor.loads.queues import PRIORITY_STEP_S, PrefillQueue
from kvmesh.services.conductor.settings import SizeSettings
from kvmesh.work_class import work_class

FADE_S = 30.0  # of the rate at which work comes
SMALLEST_S, BUCKETS, OF_AN_OCTAVE = 2.0**-12, 40, 2
MARKS = 8
LASTS = 8  # of a queue, whose ranks are told one by one
NOTED = MARKS + LASTS + 1
ROUNDING = 1e-9  # of what numpy reckons otherwise than math

_Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class QueuePosition:
    """Of the work at one instance, for one request; seconds."""

    wait_s: float  # until it begins, if nobody else came
    yielding_s: float  # of that, work for which nobody is refused
    behind_s: float
    behind: int  # requests


def ahead(queue: PrefillQueue, now: float, priority: int, size_s: float) -> QueuePosition:
    """Returns the position of a request in the queue of an instance that goes by size. Work that other conductors
    placed is taken to be before it, and what has begun is not overtaken."""
    wait_s = queue.wait_s(now)
    if wait_s <= 0:
        return QueuePosition(0.0, 0.0, 0.0, 0)
    begun, left_s = queue.begun(now)
    rank = now + priority * PRIORITY_STEP_S + work_class(size_s) * queue.size_weight
    behind, behind_s, yielding_s, weight = 0, 0.0, 0.0, queue.size_weight
    for work in queue.works.values():
        if work.placed_at + work.priority * PRIORITY_STEP_S + work.class_s * weight > rank:  # PrefillQueue.rank
            if work is not begun:
                behind += 1
                behind_s += work.seconds
            else:
                behind_s += work.seconds * (1 - 1 / work.chunks)  # the chunks after this one
                yielding_s += work.seconds / work.chunks if work.yields else 0.0
        elif work.yields:
            yielding_s += work.seconds
    behind_s = min(max(0.0, wait_s - left_s), behind_s / queue.speedup)
    return QueuePosition(wait_s - behind_s, min(wait_s - behind_s, yielding_s / queue.speedup), behind_s, behind)


def marks(queue: PrefillQueue) -> tuple[float, tuple[float, ...]]:
    """Seconds of all that was placed there, and NOTED numbers, so that bounds.py knows many queues without looking into
    them. MARKS ranks: who ranks no less than the n-th of them has no more than 1 - n / MARKS of those seconds behind
    it. The LASTS greatest ranks (-inf: there are fewer). The speed at which it goes."""
    speedup = queue.speedup
    found = sorted((queue.rank(work), work.seconds / speedup) for work in queue.works.values())
    whole_s = sum(seconds for _, seconds in found)
    ranks: list[float] = []
    sum_s = 0.0
    for rank, seconds in found:
        sum_s += seconds
        while len(ranks) < MARKS and sum_s * MARKS >= (len(ranks) + 1) * whole_s:
            ranks.append(rank)
    last = found[-1][0] if found else math.inf  # sums in floating point may fall short of the whole
    ranks += [last] * (MARKS - len(ranks))
    lasts = [rank for rank, _ in found[-LASTS:]]
    lasts += [-math.inf] * (LASTS - len(lasts))
    return whole_s, (*ranks, *lasts, speedup)


class WorkRates:
    """How much work of which sizes comes, in one model's requests; seconds of work in a second. A burst after silence
    counts as what it is over FADE_S: it may be over."""

    def __init__(self, now: float) -> None:
        self._sums = [0.0] * BUCKETS
        self._as_of = now

    def placed(self, size_s: float, now: float) -> None:
        """A request."""
        self._fade(now)
        self._sums[_bucket(size_s)] += size_s

    def _fade(self, now: float) -> None:
        if now > self._as_of:
            keep = math.exp((self._as_of - now) / FADE_S)
            self._sums = [one * keep for one in self._sums]
            self._as_of = now

    def rates(self, now: float) -> list[float]:
        """By bucket, which is a class: of requests of lesser classes, and of half of its own: where one lies near the
        border of two, as many will be taken for the lesser one."""
        self._fade(now)
        before = accumulate(self._sums, initial=0.0)
        return [(shorter + own / 2) / FADE_S for shorter, own in zip(before, self._sums, strict=False)]

    def rate(self, size_s: float, now: float) -> float:
        """Of requests that may pass one of that size: see `rates`."""
        return self.rates(now)[_bucket(size_s)]

    def least_rates(self, sizes_s: _Floats, now: float) -> _Floats:
        """Never more than `rate` tells of these."""
        self._fade(now)
        sums = np.array(self._sums)
        middles = np.cumsum(sums) - sums / 2
        octaves = np.log2(np.maximum(SMALLEST_S, sizes_s * (1 - ROUNDING)) / SMALLEST_S)
        at = np.minimum(BUCKETS - 1, (octaves * OF_AN_OCTAVE * (1 - ROUNDING)).astype(np.int64))
        least: _Floats = middles[at] * ((1 - ROUNDING) / FADE_S)
        return least

    def whole(self, now: float) -> float:
        """Of all."""
        self._fade(now)
        return sum(self._sums) / FADE_S


def _bucket(size_s: float) -> int:
    """Sizes that differ by less than a part of an octave are alike."""
    octaves = math.log2(max(SMALLEST_S, size_s) / SMALLEST_S)
    return min(BUCKETS - 1, int(octaves * OF_AN_OCTAVE))


def _nones(sizes_s: _Floats) -> _Floats:
    return np.zeros_like(sizes_s)


@dataclass(frozen=True, slots=True)
class OvertakingTerms:
    """Terms of one decision about queues by size. `rate`: see `WorkRates.rate`, of one instance."""

    settings: SizeSettings
    rate: Callable[[float], float]
    least_rates: Callable[[_Floats], _Floats] = _nones  # never more than `rate`, of many sizes
    by_tenant: bool = False  # nobody is refused for work of others that its tenant's turn lets it pass

    def least_wait_s(self, ahead_s: _Floats, sizes_s: _Floats, weights: _Floats, speedups: _Floats) -> _Floats:
        """Never more than `wait_s`, of many instances whose `ahead_s` and sizes are no more than these."""
        if self.settings.overtaking <= 0 or not (ahead_s > 0).any():
            return ahead_s
        busy = self.least_rates(sizes_s) / speedups
        most_s = busy * weights * sizes_s
        idle = np.maximum(1 - busy, ROUNDING)
        passing_s = np.where(busy < 1, np.minimum(most_s, ahead_s * busy / idle), most_s)
        waits: _Floats = ahead_s + self.settings.overtaking * (1 - ROUNDING) * passing_s * (ahead_s > 0)
        return waits

    def wait_s(self, ahead_s: float, size_s: float, queue: PrefillQueue) -> float:
        """Until it begins, with those who come and pass it meanwhile."""
        if not self.settings.overtaking or ahead_s <= 0:
            return ahead_s
        busy = self.rate(size_s) / queue.speedup
        most_s = busy * queue.size_weight * size_s
        passing_s = min(most_s, ahead_s * busy / (1 - busy)) if busy < 1 else most_s
        return ahead_s + self.settings.overtaking * passing_s

    def others_s(self, found: QueuePosition, size_s: float) -> float:
        """What it costs others."""
        return self.settings.others * size_s * found.behind + self.settings.later * found.behind_s


def _none(size_s: float) -> float:
    return 0.0


ALONE = OvertakingTerms(SizeSettings(), _none, _nones)  # nobody comes


class ShortestFirst:
    """What comes, by model name."""

    def __init__(self, settings: SizeSettings) -> None:
        self._settings = settings
        self._sizes: dict[str, WorkRates] = {}

    def placed(self, model: str, size_s: float, now: float) -> None:
        """A request went to an instance whose queue goes by size."""
        self._sizes.setdefault(model, WorkRates(now)).placed(size_s, now)

    def of(self, model: str, instances: int, others: Callable[[], float], now: float) -> OvertakingTerms:
        """For a request placed now at one of so many `instances`. `others`: seconds of work a second that other
        conductors place there; of the same sizes, it is assumed."""
        sizes = self._sizes.get(model)
        if sizes is None:
            return OvertakingTerms(self._settings, _none, _nones)

        found: list[tuple[float, list[float]]] = []  # once of a decision

        def known() -> tuple[float, list[float]]:
            if not found:
                own = sizes.whole(now)
                share = (1 + others() / own) / max(1, instances) if own > 0 else 0.0
                found.append((share, sizes.rates(now)))
            return found[0]

        def rate(size_s: float) -> float:
            share, rates = known()
            return share * rates[_bucket(size_s)]

        def least_rates(sizes_s: _Floats) -> _Floats:
            return known()[0] * sizes.least_rates(sizes_s, now)

        return OvertakingTerms(self._settings, rate, least_rates)
