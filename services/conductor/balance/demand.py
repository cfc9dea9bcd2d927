"""What each model's requests ask of prefill and of decode, in instances: 1 = one of them wholly busy, at its SLO. Pure.

    prefill   tokens asked for a second, refused ones too, times the seconds that a placed token was predicted to take
              (hits and all), plus what is queued, spread over the TTFT SLO: so soon it has to be worked off
    decode    requests whose prompt is computed and whose answer is not over, times asked / placed (who was refused
              would be among them), over how many one instance carries at the TBT SLO, or has room for

The batch lane takes what is idle and asks for nothing: its share of the answers counts not. What other conductors place
shows in queues and rows alone. Everything is smoothed by one half-life.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.conductor.domain import Lane, Role, Schedule
from services.conductor.fleet.instance import Instance
from services.conductor.placing.placement import Choice
from services.conductor.settings import Settings

MIXED = 0.8  # what a coupled instance brings of one that does only one thing: each waits for the other's steps
MAX_UNPLACED = 8.0  # asked / placed: clients come again, so it says ever less
MAX_MODELS = 64
MAX_ROWS = 4096  # of one instance, where it names no limit


class Fading:
    """A sum of which half is forgotten in every half-life."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._sum = 0.0
        self._at = 0.0

    def add(self, amount: float, now: float) -> None:
        """It happened now."""
        self._sum, self._at = self.at(now) + amount, now

    def at(self, now: float) -> float:
        """What is left of it."""
        return self._sum * math.pow(0.5, max(0.0, now - self._at) / self._half_life_s)


@dataclass(frozen=True, slots=True)
class Counts:
    """Instances of one model by role; fractions are those in mind."""

    prefills: float
    decodes: float
    boths: float = 0.0

    def moved(self, was: Role, becomes: Role) -> Counts:
        """One of them in another role."""
        change = {was: -1, becomes: 1}
        return Counts(
            self.prefills + change.get(Role.PREFILL, 0),
            self.decodes + change.get(Role.DECODE, 0),
            self.boths + change.get(Role.BOTH, 0),
        )

    @property
    def serves(self) -> bool:
        """Whether requests can be answered."""
        return self.boths >= 1 or (self.prefills >= 1 and self.decodes >= 1)


@dataclass(frozen=True, slots=True)
class Demand:
    """In instances, see above."""

    prefill: float = 0.0
    decode: float = 0.0

    def loads(self, pools: Counts) -> tuple[float, float]:
        """Of both pools; 1: wholly busy. Coupled instances help where they make the two most alike."""
        flexible, whole = MIXED * pools.boths, self.prefill + self.decode
        to_prefill = 0.0
        if flexible and whole:
            even = (self.prefill * (pools.decodes + flexible) - self.decode * pools.prefills) / whole
            to_prefill = min(flexible, max(0.0, even))
        to_decode = flexible - to_prefill
        if whole and not pools.serves:  # whichever pool is missing, everything waits for it
            return (math.inf if not pools.prefills else 0.0, math.inf if not pools.decodes else 0.0)
        return _over(self.prefill, pools.prefills + to_prefill), _over(self.decode, pools.decodes + to_decode)

    def load(self, pools: Counts) -> float:
        """Of the busier pool."""
        return max(self.loads(pools))


def _over(demand: float, capacity: float) -> float:
    return demand / capacity if capacity > 0 else math.inf if demand > 0 else 0.0


def counts_of(instances: Sequence[Instance]) -> Counts:
    """By role."""
    roles = [i.role for i in instances]
    return Counts(roles.count(Role.PREFILL), roles.count(Role.DECODE), roles.count(Role.BOTH))


def by_model(instances: Sequence[Instance]) -> dict[str, list[Instance]]:
    """In the order in which they come."""
    found: dict[str, list[Instance]] = {}
    for instance in instances:
        found.setdefault(instance.model.name, []).append(instance)
    return found


@dataclass
class _Asked:
    """Of one model."""

    half_life_s: float
    since: float
    tokens: Fading = field(init=False)
    requests: Fading = field(init=False)
    placed: Fading = field(init=False)
    batch: Fading = field(init=False)  # of its lane, placed
    placed_tokens: Fading = field(init=False)
    placed_s: Fading = field(init=False)
    backlog_s: float = 0.0
    rows: float = 0.0
    looked_at: float | None = None

    def __post_init__(self) -> None:
        self.tokens, self.requests, self.placed, self.batch, self.placed_tokens, self.placed_s = (
            Fading(self.half_life_s) for _ in range(6)
        )

    def per_s(self, summed: Fading, now: float) -> float:
        """The rate behind a sum that has grown since `since`."""
        grown = 1 - 0.5 ** ((now - self.since) / self.half_life_s)
        return summed.at(now) * math.log(2) / self.half_life_s / grown if grown > 0 else 0.0


class Demands:
    """Of all models: at most MAX_MODELS, of which those nobody serves are forgotten."""

    def __init__(self, settings: Settings) -> None:
        self._half_life_s = settings.balance.window_s
        self._slos = {name: (ttft_s, tbt_s) for name, ttft_s, tbt_s in settings.admission.by_model}
        self._slo = settings.slo_ttft_s, settings.slo_tbt_s
        self._asked: dict[str, _Asked] = {}

    def asked(self, request: Schedule, now: float) -> None:
        """Somebody wants it; further attempts at it count no more. Its model is served here."""
        if _uncounted(request) or (request.model not in self._asked and len(self._asked) >= MAX_MODELS):
            return
        asked = self._asked.setdefault(request.model, _Asked(self._half_life_s, now))
        asked.tokens.add(request.prompt_tokens, now)
        asked.requests.add(1, now)

    def placed(self, request: Schedule, choice: Choice, now: float) -> None:
        """It got a place."""
        asked = self._asked.get(request.model)
        if asked is not None and request.lane is Lane.BATCH:
            asked.batch.add(1, now)
        elif asked is not None and not _uncounted(request):
            asked.placed.add(1, now)
            asked.placed_tokens.add(request.prompt_tokens, now)
            asked.placed_s.add(choice.prefill.prefill_s / choice.prefill.instance.queue.speedup, now)

    def look(self, models: dict[str, list[Instance]], now: float) -> dict[str, tuple[Demand, float]]:
        """What instances show now is taken in. By model: its demand, and for how many seconds it has been watched."""
        for gone in [name for name in self._asked if name not in models]:
            del self._asked[gone]
        return {
            name: (self._look(name, asked, models[name], now), now - asked.since) for name, asked in self._asked.items()
        }

    def _look(self, name: str, asked: _Asked, instances: Sequence[Instance], now: float) -> Demand:
        ttft_slo_s, tbt_slo_s = self._slos.get(name, self._slo)
        passed = 1.0 if asked.looked_at is None else 1 - 0.5 ** ((now - asked.looked_at) / self._half_life_s)
        asked.looked_at = now
        backlog_s = sum(i.queue.wait_s(now) for i in instances)
        asked.backlog_s += passed * (backlog_s - asked.backlog_s)
        placed, placed_tokens, batch = asked.placed.at(now), asked.placed_tokens.at(now), asked.batch.at(now)
        counted = placed / (placed + batch) if placed + batch > 0 else 1.0
        asked.rows += passed * (_rows(instances) * counted - asked.rows)
        token_s = asked.placed_s.at(now) / placed_tokens if placed_tokens > 0 else instances[0].seconds_per_token()
        unplaced = min(MAX_UNPLACED, max(1.0, asked.requests.at(now) / placed)) if placed > 0 else 1.0
        carried = [_carried(i, tbt_slo_s) for i in instances if i.role.decodes] or [1.0]
        return Demand(
            asked.per_s(asked.tokens, now) * token_s + asked.backlog_s / ttft_slo_s,
            asked.rows * unplaced * len(carried) / sum(carried),
        )


def _uncounted(request: Schedule) -> bool:
    return request.attempt > 0 or request.lane is Lane.BATCH


def _rows(instances: Sequence[Instance]) -> int:
    """Requests whose prompts are computed and whose answers are not over: decode also counts those it waits for."""
    running = sum(i.load.running_requests for i in instances)
    present = sum(i.batch.requests for i in instances)
    computing = sum(max(len(i.queue.works), i.load.queued_requests) for i in instances)
    return max(running, present - computing)


def _carried(instance: Instance, tbt_slo_s: float) -> float:
    """How many rows of the present length it answers within the SLO at once; at least 1."""
    load = instance.load
    context = load.context_tokens / load.running_requests if load.running_requests else instance.model.block_tokens
    room = instance.capacity_blocks / max(1.0, context / instance.model.block_tokens + 0.5)
    low, high = 1, max(1, min(instance.max_running or MAX_ROWS, int(room)))
    while low < high:
        middle = (low + high + 1) // 2
        if instance.decode.predict(middle, middle * context) <= tbt_slo_s:
            low = middle
        else:
            high = middle - 1
    return float(low)
