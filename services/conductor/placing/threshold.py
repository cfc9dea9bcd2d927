"""The balancing threshold of Algorithm 1: how many times as long as the local prefix the best one must be before
fetching is weighed; and how much dearer fetching is than the fitted pull model knows. Pure.

Fixed, both are what the settings say (and 1). Adaptive, they follow what pulls cost and save:

    congestion   measured over predicted pull time, at least 1. The fitted model follows a lasting change of bandwidth
                 by itself; this follows a burst (wires filled by handoffs, or by what other conductors place) within
                 seconds. It multiplies the predicted pull time, so that `Fetch.CHEAPER` turns to computing in time.
    burden       of what pulls saved in computing, the share that requests stood waiting for them (what hides behind
                 the queue does not show). Above RAISE_AT the threshold goes up a step: where little is saved, nothing
                 is fetched any more. Below LOWER_AT it goes down a step, but only while queues are uneven: fetching
                 lets requests leave the crowded holders of hot prefixes (more replicas, even load).

The paper tunes the threshold by hand (FAST'25, section 5.2); adapting it is ours. Hysteresis: between the two limits
nothing changes, at most one change is made in DWELL_S, what was seen before a change counts no more after it, and
without any pulls both go back step by step to where they began.

What we expect of it: with `Fetch.CHEAPER`, which decides by predicted TTFT, the threshold only prunes, so the gain is
in the congestion factor, and only where pulls come in bursts (2x and 3x of a trace, or wires below the knee); with
steady load and idle wires nothing, as there the fitted model is right. With `Fetch.ALWAYS` (Algorithm 1 as printed) the
threshold itself should matter: it is all that keeps short fetches away.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from services.conductor.domain import PrefillSample
from services.conductor.placing.placement import Choice
from services.conductor.settings import Settings, ThresholdMode

MAX_THRESHOLD, MAX_CONGESTION = 8.0, 8.0
STEP = 1.5  # of the threshold, up or down
RAISE_AT, LOWER_AT = 0.9, 0.5  # burden
BAND = 1.25  # the measured congestion differs by that much from what is assumed: else it is let be
MAX_TURN = 2.0  # of the congestion at once
UNEVEN = 0.5  # (longest queue - mean) / mean
FLOOR_S = 0.1  # of the mean queue: unevenness of next to nothing is none
DWELL_S, FORGET_S, IDLE_S = 5.0, 10.0, 30.0
MIN_PULLS = 5.0  # measured ones, before anything is concluded
MAX_AWAITED = 8192


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A placement that fetches, as it was predicted: seconds."""

    pull_s: float  # without the congestion factor
    slack_s: float  # from when the pull begins until the queue before it is gone
    saved_s: float  # of computing
    tokens: int


class Evidence:
    """What pulls took and saved lately: sums that fade with FORGET_S. Seconds."""

    def __init__(self, now: float) -> None:
        self.clear(now)

    def clear(self, now: float) -> None:
        """Nothing is known."""
        self.pulls = self.predicted_s = self.measured_s = self.shown_s = self.saved_s = 0.0
        self._at = now

    def fade(self, now: float) -> None:
        """Time passes."""
        keep = math.exp(-max(0.0, now - self._at) / FORGET_S)
        self._at = now
        self.pulls *= keep
        self.predicted_s *= keep
        self.measured_s *= keep
        self.shown_s *= keep
        self.saved_s *= keep

    def add(self, awaited: _Awaited, sample: PrefillSample, now: float) -> None:
        """One pull has ended. Of one that brought nothing only the waiting counts."""
        self.fade(now)
        self.pulls += 1
        if sample.pulled_tokens:
            self.predicted_s += awaited.pull_s
            self.measured_s += sample.pull_s
        self.shown_s += max(0.0, sample.pull_s - awaited.slack_s)
        self.saved_s += awaited.saved_s * min(1.0, sample.pulled_tokens / awaited.tokens)

    @property
    def congestion(self) -> float:
        """Measured over predicted; 1 where nothing was predicted."""
        return self.measured_s / self.predicted_s if self.predicted_s > 0 else 1.0

    @property
    def burden(self) -> float:
        """The share of what was saved that was waited for."""
        if self.saved_s > 0:
            return self.shown_s / self.saved_s
        return math.inf if self.shown_s > 0 else 0.0


class Threshold:
    """Fixed, or following what pulls cost and save."""

    def __init__(self, settings: Settings, now: float = 0.0) -> None:
        self.adapts = settings.threshold_mode is ThresholdMode.ADAPTIVE
        self._base = self._value = settings.balancing_threshold
        self.bounds = min(1.0, self._base), max(MAX_THRESHOLD, self._base)
        self.congestion = 1.0  # how many times as long pulls take as the fitted model says
        self.changes = 0
        self._changed_at = now
        self._uneven = 0.0
        self._evidence = Evidence(now)
        self._awaited: OrderedDict[str, _Awaited] = OrderedDict()

    def value(self, now: float) -> float:
        """As it is now."""
        return self._value

    def placed(self, request_id: str, choice: Choice, pull_after_s: float, now: float) -> None:
        """A request went there; `pull_after_s`: from now until its pull begins."""
        p = choice.prefill
        self._awaited.pop(request_id, None)
        tokens = p.pulled_blocks * p.instance.model.block_tokens
        if not self.adapts or not tokens:
            return
        computed_s = p.instance.prefill.predict(p.computed_tokens + tokens, p.cached_tokens - tokens)
        saved_s = max(0.0, computed_s - p.instance.prefill.predict(p.computed_tokens, p.cached_tokens))
        slack_s = p.queue_s - pull_after_s
        self._awaited[request_id] = _Awaited(p.pull_s / self.congestion, slack_s, saved_s, tokens)
        if len(self._awaited) > MAX_AWAITED:
            self._awaited.popitem(last=False)

    def sampled(self, sample: PrefillSample, now: float) -> None:
        """How a prefill went."""
        awaited = self._awaited.pop(sample.request_id, None)
        if awaited is not None:
            self._evidence.add(awaited, sample, now)
            self._adapt(now)

    def tick(self, queues_s: Iterable[float], now: float) -> None:
        """Time passes. `queues_s`: of every instance that computes prompts and may get work."""
        waits = list(queues_s)
        mean = sum(waits) / len(waits) if waits else 0.0
        self._uneven = (max(waits, default=0.0) - mean) / max(mean, FLOOR_S)
        if self.adapts:
            self._evidence.fade(now)
            self._adapt(now)

    def _adapt(self, now: float) -> None:
        """One step at most, once in DWELL_S."""
        if now - self._changed_at < DWELL_S:
            return
        seen = self._evidence
        if seen.pulls >= MIN_PULLS:
            wanted = self._threshold_by(seen.burden), self._congestion_by(seen.congestion)
        elif now - self._changed_at >= IDLE_S:
            wanted = self._homewards()
        else:
            return
        if wanted != (self._value, self.congestion):
            self._value, self.congestion = wanted
            self._changed_at = now
            self.changes += 1
            seen.clear(now)

    def _threshold_by(self, burden: float) -> float:
        low, high = self.bounds
        if burden > RAISE_AT:
            return min(high, max(1.0, self._value) * STEP)  # below 1 is as good as 1
        if burden < LOWER_AT and self._uneven > UNEVEN:
            return max(low, self._value / STEP)
        return self._value

    def _congestion_by(self, measured: float) -> float:
        now = self.congestion
        wanted = min(MAX_CONGESTION, max(1.0, measured))
        if now / BAND <= wanted <= now * BAND and not (wanted == 1.0 and now < BAND):
            return now
        return max(now / MAX_TURN, min(now * MAX_TURN, wanted))

    def _homewards(self) -> tuple[float, float]:
        """Nobody pulls, perhaps because of what is assumed: try again, step by step."""
        value, base = self._value, self._base
        value = max(base, value / STEP) if value > base else min(base, value * STEP)
        return value, max(1.0, self.congestion / MAX_TURN)
