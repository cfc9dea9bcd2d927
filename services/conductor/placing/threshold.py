"""The balancing threshold of Algorithm 1: how many times as long as the local prefix the best one must be before
fetching is weighed; and how much dearer fetching is than the fitted pull model knows. Pure.

Fixed, both are what the settings say (and 1). Adaptive, they follow what pulls took and saved:

    congestion   measured over predicted pull time, at least 1. The fitted model follows a lasting change of bandwidth
                 by itself, over hundreds of pulls; this follows within seconds. It multiplies the predicted pull time,
                 so that `Fetch.CHEAPER` turns to computing in time.
    burden       what pulls took over what computing the same would have taken. Above RAISE_AT the threshold goes up a
                 step, from MAX_THRESHOLD, or where it is HOPELESS, to NEVER. Below LOWER_AT it goes down a step, below
                 where it began only while queues are uneven: fetching lets requests leave the holders of hot prefixes.

All of a pull counts, not only what a request stood waiting for it. KV that is computed goes to decode over the same
wires: where a block takes longer to fetch than to compute, wires are what is short, and a pull that hides behind its
own queue holds up the pushes of others, whose pages stay taken. No single request's TTFT shows that, so it is not in
what `Fetch.CHEAPER` compares. And a threshold, as printed, never stops who has nothing of a prefix (anything is more
than any multiple of nothing): hence NEVER.

Who fetches nothing learns nothing of pulls, so then fetching is tried again, step by step, IDLE_S after the last
change; after each trial that fails twice as long, MAX_IDLE_S at most. Pushes cross the same NICs and tell for free
whether a trial is worth it: while more than SLOW_SHARE of them are slower than computing there is one in MAX_IDLE_S
only, and once fewer than FAST_SHARE are, all goes back at once to where it began.

Hysteresis: between the two limits nothing changes, but for that return at most one change is made in DWELL_S, and what
was seen before a change counts no more after it. The paper tunes the threshold by hand (FAST'25, section 5.2); adapting
it is ours. What it brings, and where it brings nothing: docs/reports/threshold.md.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvmesh.services.conductor.domain import PrefillSample
from kvmesh.services.conductor.placing.placement import PlacementChoice
from kvmesh.services.conductor.score import HIDDEN_SHARE
from kvmesh.services.conductor.settings import Settings, ThresholdMode

MAX_THRESHOLD, MAX_CONGESTION = 8.0, 8.0
NEVER = math.inf  # the step after MAX_THRESHOLD: even who has nothing fetches nothing
STEP = 1.5  # of the threshold, up or down
RAISE_AT, LOWER_AT = 0.9, 0.6  # burden
HOPELESS = 2.0  # likewise: NEVER at once
BAND = 1.25  # the measured congestion differs by that much from what is assumed: else it is let be
MAX_TURN = 2.0  # of the congestion at once
UNEVEN = 0.5  # (longest queue - mean) / mean
FLOOR_S = 0.1  # of the mean queue: unevenness of next to nothing is none
SLOW_SHARE, FAST_SHARE = 0.5, 0.25  # of pushes, slow ones: above it the wires are, below it no more
DWELL_S, IDLE_S = 5.0, 30.0
FORGET_S, FORGET_PUSHES_S = 20.0, 10.0  # these are many
MAX_IDLE_S = 240.0  # between two trials of fetching when each has failed
MIN_PULLS, MIN_PUSHES = 4.0, 5.0  # measured ones, before anything is concluded
MAX_AWAITED = 8192


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A placement as it was predicted, in seconds."""

    pull_s: float  # without the congestion factor
    saved_s: float  # of computing, by fetching
    tokens: int  # that are fetched
    pushed_s: float  # that computing what is sent to decode would take


class Evidence:
    """Sums, in seconds, of what pulls took and saved lately; they fade with FORGET_S."""

    def __init__(self, now: float) -> None:
        self.clear(now)

    def clear(self, now: float) -> None:
        """Forgets everything."""
        self.pulls = self.predicted_s = self.measured_s = self.took_s = self.saved_s = 0.0
        self._at = now

    def fade(self, now: float) -> None:
        """Lets the sums fade up to `now`."""
        keep = math.exp(-max(0.0, now - self._at) / FORGET_S)
        self._at = now
        self.pulls *= keep
        self.predicted_s *= keep
        self.measured_s *= keep
        self.took_s *= keep
        self.saved_s *= keep

    def add(self, awaited: _Awaited, sample: PrefillSample, now: float) -> None:
        """Adds one pull that has ended. If it brought nothing, only its time counts."""
        self.fade(now)
        self.pulls += 1
        if sample.pulled_tokens:
            self.predicted_s += awaited.pull_s
            self.measured_s += sample.pull_s
        self.took_s += sample.pull_s
        self.saved_s += awaited.saved_s * min(1.0, sample.pulled_tokens / awaited.tokens)

    @property
    def congestion(self) -> float:
        """Measured over predicted pull time; 1 where nothing was predicted."""
        return self.measured_s / self.predicted_s if self.predicted_s > 0 else 1.0

    @property
    def burden(self) -> float:
        """What pulls took over what computing the same tokens would have taken."""
        if self.saved_s > 0:
            return self.took_s / self.saved_s
        return math.inf if self.took_s > 0 else 0.0


class PushRecord:
    """How many of the recent pushes to decode were slow: longer on the network than computing the same takes, and not
    hidden behind their own computing. It fades with FORGET_PUSHES_S. A push that took long tells of the past, so it
    counts for less; otherwise delayed pushes would count for long after the network is fast again."""

    def __init__(self, now: float) -> None:
        self._count = self._all = self._slow = 0.0
        self._at = now

    def fade(self, now: float) -> None:
        """Lets the record fade up to `now`."""
        keep = math.exp(-max(0.0, now - self._at) / FORGET_PUSHES_S)
        self._at = now
        self._count *= keep
        self._all *= keep
        self._slow *= keep

    def add(self, awaited: _Awaited, sample: PrefillSample, now: float) -> None:
        """Adds one push that has ended."""
        self.fade(now)
        weight = 1 / (1 + sample.transfer_s)
        self._count += 1
        self._all += weight
        hidden = sample.transfer_s * HIDDEN_SHARE <= sample.duration_s
        if not hidden and sample.transfer_s > RAISE_AT * awaited.pushed_s:
            self._slow += weight

    @property
    def slow_share(self) -> float | None:
        """The share of slow pushes, or None when there are too few pushes."""
        return self._slow / self._all if self._count >= MIN_PUSHES else None


class Threshold:
    """The balancing threshold: fixed, or following what pulls cost and save."""

    def __init__(self, settings: Settings, now: float = 0.0) -> None:
        self.adapts = settings.threshold_mode is ThresholdMode.ADAPTIVE
        self._base = self._value = settings.balancing_threshold
        self.bounds = min(1.0, self._base), max(MAX_THRESHOLD, self._base)
        self.congestion = 1.0  # how many times as long pulls take as the fitted model says
        self.changes = 0
        self._changed_at = now
        self._uneven = 0.0
        self._idle_s = IDLE_S
        self._tries = False  # fetching is tried again
        self._slow = False  # the wires, by what pushes take
        self._evidence = Evidence(now)
        self._pushes = PushRecord(now)
        self._awaited: OrderedDict[str, _Awaited] = OrderedDict()

    def value(self, now: float) -> float:
        """Returns the present threshold."""
        return self._value

    def placed(self, request_id: str, choice: PlacementChoice) -> None:
        """Notes a placement whose pull or push will be compared with its prediction."""
        p = choice.prefill
        self._awaited.pop(request_id, None)
        model, prefill = p.instance.model, p.instance.prefill
        tokens, pushed = p.pulled_blocks * model.block_tokens, p.pushed_tokens
        if tokens and model.cost.groups:  # a few objects may make a long prefix usable
            tokens = p.cached_tokens - min(p.cached_tokens, p.local_blocks * model.block_tokens)
        if not self.adapts or not (tokens or pushed):
            return
        cached, prompt = p.cached_tokens, p.computed_tokens + p.cached_tokens
        saved_s = prefill.predict(prompt - cached + tokens, cached - tokens) - prefill.predict(prompt - cached, cached)
        pushed_s = prefill.predict(pushed, prompt - pushed)
        self._awaited[request_id] = _Awaited(p.pull_s / self.congestion, max(0.0, saved_s), tokens, pushed_s)
        if len(self._awaited) > MAX_AWAITED:
            self._awaited.popitem(last=False)

    def sampled(self, sample: PrefillSample, now: float) -> None:
        """Notes how a prefill went."""
        awaited = self._awaited.pop(sample.request_id, None)
        if awaited is None:
            return
        if sample.transfer_bytes:
            self._pushes.add(awaited, sample, now)
        if awaited.tokens:
            self._evidence.add(awaited, sample, now)
            self._adapt(now)

    def tick(self, queues_s: Iterable[float], now: float) -> None:
        """Adapts the threshold if it is time. `queues_s` are the queues, in seconds, of all instances that compute
        prompts and may get work."""
        waits = list(queues_s)
        mean = sum(waits) / len(waits) if waits else 0.0
        self._uneven = (max(waits, default=0.0) - mean) / max(mean, FLOOR_S)
        if not self.adapts:
            return
        self._evidence.fade(now)
        self._pushes.fade(now)
        if self._wires_are_back() and self._evidence.pulls < MIN_PULLS:
            self._idle_s = IDLE_S
            self._change(min(self._value, self._base), 1.0, now)
        else:
            self._adapt(now)

    def _adapt(self, now: float) -> None:
        """Changes the threshold by at most one step, once in DWELL_S."""
        if now - self._changed_at < DWELL_S:
            return
        seen = self._evidence
        if seen.pulls >= MIN_PULLS:
            self._judge_trial(seen.burden)
            wanted = self._threshold_by(seen.burden), self._congestion_by(seen.congestion)
        elif now - self._changed_at >= (MAX_IDLE_S if self._slow else self._idle_s):
            wanted = self._homewards()
            self._tries = True
        else:
            return
        self._change(*wanted, now)

    def _change(self, value: float, congestion: float, now: float) -> None:
        if (value, congestion) != (self._value, self.congestion):
            self._value, self.congestion = value, congestion
            self._changed_at = now
            self.changes += 1
            self._evidence.clear(now)

    def _wires_are_back(self) -> bool:
        """Says whether pushes, which were slow, are fast again."""
        share = self._pushes.slow_share
        if share is None:
            return False
        was_slow = self._slow
        self._slow = share > (FAST_SHARE if was_slow else SLOW_SHARE)
        return was_slow and not self._slow

    def _judge_trial(self, burden: float) -> None:
        """Doubles the pause before the next trial of fetching if this trial failed."""
        if burden <= RAISE_AT:
            self._idle_s = IDLE_S
        elif self._tries:
            self._idle_s = min(MAX_IDLE_S, 2 * self._idle_s)
        self._tries = False

    def _threshold_by(self, burden: float) -> float:
        """Returns the next threshold, a step up or down, NEVER where fetching is hopeless. It goes below its first
        value only while queues are uneven."""
        low, high = self.bounds
        value = self._value
        if burden > RAISE_AT:
            return NEVER if burden > HOPELESS or value >= high else min(high, max(1.0, value) * STEP)
        if burden < LOWER_AT:
            down = min(value / STEP, high)
            return max(low if self._uneven > UNEVEN else min(value, self._base), down)
        return value

    def _congestion_by(self, measured: float) -> float:
        now = self.congestion
        wanted = min(MAX_CONGESTION, max(1.0, measured))
        if now / BAND <= wanted <= now * BAND and not (wanted == 1.0 and now < BAND):
            return now
        return max(now / MAX_TURN, min(now * MAX_TURN, wanted))

    def _homewards(self) -> tuple[float, float]:
        """Returns threshold and congestion one step nearer to their first values. Nobody pulls, perhaps because of what
        is assumed, so it must be tried again."""
        value, base = self._value, self._base
        value = max(base, min(value / STEP, self.bounds[1])) if value > base else min(base, value * STEP)
        return value, max(1.0, self.congestion / MAX_TURN)
