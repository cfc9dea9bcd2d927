"""What each model's requests ask of prefill and of decode, in instances: 1 = one of them wholly busy, at its SLO. Pure.

    prefill   tokens asked for a second, refused ones too (but not what no instance could do, however many there were:
              see admission/impossible.py), times the seconds that a placed token was predicted to take
              (hits and all), plus what is queued, spread over the TTFT SLO: so soon it has to be worked off
    decode    requests whose prompt is computed and whose answer is not over, times asked / placed (who was refused
              would be among them), over how many one instance carries at the TBT SLO, or has room for

The batch lane takes what is idle and asks for nothing: its share of the answers counts not. What other conductors place
shows in queues and rows, and in the prompts that instances have computed for them; whom they refuse shows nowhere.
Everything is smoothed by one half-life.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvmesh.services.conductor.balance.tally import MIXED, Tally, TallyCounts
from kvmesh.services.conductor.domain import Lane, Schedule
from kvmesh.services.conductor.loads.decayed_sum import DecayedSum
from kvmesh.services.conductor.placing.placement import PlacementChoice
from kvmesh.services.conductor.settings import Settings

MAX_UNPLACED = 8.0  # asked / placed: clients come again, so it says ever less
MAX_MODELS = 64


@dataclass(frozen=True, slots=True)
class Demand:
    """The demand of one model in instances, as the module's docstring defines it."""

    prefill: float = 0.0
    decode: float = 0.0

    def loads(self, pools: TallyCounts) -> tuple[float, float]:
        """Returns the loads of both pools; 1 means wholly busy. Coupled instances are counted where they make the two
        most alike."""
        flexible, whole = MIXED * pools.boths, self.prefill + self.decode
        to_prefill = 0.0
        if flexible and whole:
            even = (self.prefill * (pools.decodes + flexible) - self.decode * pools.prefills) / whole
            to_prefill = min(flexible, max(0.0, even))
        to_decode = flexible - to_prefill
        if whole and not pools.serves:  # whichever pool is missing, everything waits for it
            return (math.inf if not pools.prefills else 0.0, math.inf if not pools.decodes else 0.0)
        return _over(self.prefill, pools.prefills + to_prefill), _over(self.decode, pools.decodes + to_decode)

    def load(self, pools: TallyCounts) -> float:
        """Returns the load of the busier pool."""
        return max(self.loads(pools))


def _over(demand: float, capacity: float) -> float:
    return demand / capacity if capacity > 0 else math.inf if demand > 0 else 0.0


@dataclass
class _Asked:
    """What requests for one model ask for."""

    half_life_s: float
    since: float
    tokens: DecayedSum = field(init=False)
    requests: DecayedSum = field(init=False)
    placed: DecayedSum = field(init=False)
    batch: DecayedSum = field(init=False)  # of its lane, placed
    placed_tokens: DecayedSum = field(init=False)
    placed_s: DecayedSum = field(init=False)
    elsewhere_s: DecayedSum = field(init=False)  # seconds of prompts that other conductors placed
    backlog_s: float = 0.0
    rows: float = 0.0
    looked_at: float | None = None

    def __post_init__(self) -> None:
        self.tokens, self.requests, self.placed, self.batch, self.placed_tokens, self.placed_s = (
            DecayedSum(self.half_life_s) for _ in range(6)
        )
        self.elsewhere_s = DecayedSum(self.half_life_s)

    def per_s(self, summed: DecayedSum, now: float) -> float:
        """Returns the rate, per second, behind a sum that has grown since `since`."""
        grown = 1 - 0.5 ** ((now - self.since) / self.half_life_s)
        return summed.at(now) * math.log(2) / self.half_life_s / grown if grown > 0 else 0.0


class Demands:
    """The demands of all models, at most MAX_MODELS; those that nobody serves any more are forgotten."""

    def __init__(self, settings: Settings) -> None:
        self._half_life_s = settings.balance.window_s
        self._slos = {name: (ttft_s, tbt_s) for name, ttft_s, tbt_s in settings.admission.by_model}
        self._slo = settings.slo_ttft_s, settings.slo_tbt_s
        self._asked: dict[str, _Asked] = {}

    def asked(self, request: Schedule, now: float) -> None:
        """Notes a request that could be served, for a model that is served here; further attempts are not counted
        again."""
        if _uncounted(request) or (asked := self._of(request.model, now)) is None:
            return
        asked.tokens.add(request.prompt_tokens, now)
        asked.requests.add(1, now)

    def _of(self, model: str, now: float) -> _Asked | None:
        """Returns the model's record, or None when there are too many."""
        asked = self._asked.get(model)
        if asked is None and len(self._asked) < MAX_MODELS:
            asked = self._asked[model] = _Asked(self._half_life_s, now)
        return asked

    def computed_elsewhere(self, model: str, seconds: float, now: float) -> None:
        """Notes that an instance has computed a prompt, worth so many seconds, that another conductor placed."""
        if (asked := self._of(model, now)) is not None:
            asked.elsewhere_s.add(seconds, now)

    def placed(self, request: Schedule, choice: PlacementChoice, now: float) -> None:
        """Notes a placement."""
        asked = self._asked.get(request.model)
        if asked is not None and request.lane is Lane.BATCH:
            asked.batch.add(1, now)
        elif asked is not None and not _uncounted(request):
            asked.placed.add(1, now)
            asked.placed_tokens.add(request.prompt_tokens, now)
            asked.placed_s.add(choice.prefill.prefill_s / choice.prefill.instance.queue.speedup, now)

    def tally(self, model: str) -> Tally:
        """Returns an empty tally of that model's instances, to be filled for `look`."""
        return Tally(self._slos.get(model, self._slo)[1])

    def look(self, tallies: Mapping[str, Tally], now: float) -> dict[str, tuple[Demand, float]]:
        """Takes in what instances show now. Returns, by model, its demand and for how many seconds it has been
        observed."""
        for gone in [name for name in self._asked if name not in tallies]:
            del self._asked[gone]
        return {
            name: (self._look(name, asked, tallies[name], now), now - asked.since)
            for name, asked in self._asked.items()
        }

    def _look(self, name: str, asked: _Asked, tally: Tally, now: float) -> Demand:
        ttft_slo_s = self._slos.get(name, self._slo)[0]
        passed = 1.0 if asked.looked_at is None else 1 - 0.5 ** ((now - asked.looked_at) / self._half_life_s)
        asked.looked_at = now
        asked.backlog_s += passed * (tally.backlog_s - asked.backlog_s)
        placed, placed_tokens, batch = asked.placed.at(now), asked.placed_tokens.at(now), asked.batch.at(now)
        counted = placed / (placed + batch) if placed + batch > 0 else 1.0
        asked.rows += passed * (tally.rows * counted - asked.rows)
        assert tally.first is not None, "a model without instances has no tally"
        token_s = asked.placed_s.at(now) / placed_tokens if placed_tokens > 0 else tally.first.seconds_per_token()
        unplaced = min(MAX_UNPLACED, max(1.0, asked.requests.at(now) / placed)) if placed > 0 else 1.0
        return Demand(
            asked.per_s(asked.tokens, now) * token_s
            + asked.per_s(asked.elsewhere_s, now)
            + asked.backlog_s / ttft_slo_s,
            asked.rows * unplaced * max(1, tally.decoding) / (tally.carried or 1.0),
        )


def _uncounted(request: Schedule) -> bool:
    return request.attempt > 0 or request.lane is Lane.BATCH
