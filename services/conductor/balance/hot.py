"""Copies of hot prefixes, ordered before their holders congest. Pure.

Algorithm 1 copies what it fetches, so a hot prefix spreads by itself once its holders are so busy that fetching pays.
Orders come earlier, off anybody's path. Let a prefix be used `rate` times a second, and a use take `use_s` of prefill
with it, `whole_s` without. It is hot when it saves a share WORTH of an instance: rate · (whole_s - use_s). It then
wants

    max(2, rate · use_s / TARGET)   prefill instances that hold it: two, so that one may leave; as many as its uses fill
    one more                        while its holders' queues are longer than others' by half of what fetching takes

Copies of what cools are nobody's business: they are evicted like everything else. An order copies at most what the
limits leave room for, from the beginning of the chain; the rest follows. A target that fails rests, longer each time.

A look takes several ticks: the instances are met some at a time (`FleetSurvey`), then the prefixes are looked at, each
one with what is held and under way by then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from kvmesh.kvcache.keys import Keys
from kvmesh.kvcache.tiers import Tier, split_name
from kvmesh.services.conductor.balance.heat import Hot, PrefixHeat
from kvmesh.services.conductor.domain import Life, Member, OrderEnded, Ref, Replicate
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.fleet.walk import Pace
from kvmesh.services.conductor.prefixes.index import Index, PrefixPlace, PrefixSurvey, bits
from kvmesh.services.conductor.settings import BalanceSettings

WORTH = 0.05  # instance-seconds a second
TARGET = 0.7
LEAST_RATE = 0.05  # uses a second
MOST_HOT = 16
MAX_LISTED = 64  # holders, or targets, that are looked at one by one
KEYS = Pace(40_000, 800)  # of prefixes that are looked at: one long one in a tick of 20 ms
STORE_SHARE = 4  # a prefix takes at most one part in so many of the target's store
DEADLINE_S = 20.0  # an order that is not answered by then has failed
SETTLE_S = 3.0  # within which what was copied is announced
REST_S, MAX_REST_S = 2.0, 120.0


@dataclass(frozen=True)
class ReplicationContext:
    """What orders are based on. `passed_s` is the time since the last tick, `everybody` returns all instances, `may`
    says whether one of them is still there and may get work, `leaving` are those being drained, `member` returns the
    member of that name."""

    now: float
    passed_s: float
    everybody: Callable[[], Sequence[Instance]]
    may: Callable[[Instance], bool]
    leaving: Sequence[Instance]
    index: Index
    member: Callable[[str], Member | None]


@dataclass(frozen=True, slots=True)
class _Flight:
    order: Replicate
    brings: frozenset[bytes]  # what the target has of the chain then
    nbytes: int
    until: float
    done: bool = False


@dataclass(slots=True)
class _Rest:
    failures: int
    until: float


@dataclass(slots=True)
class FleetSurvey:
    """The instances as one round has visited them, `add` by `add`."""

    by_slot: dict[int, Instance] = field(default_factory=dict)  # prefill instances, by their slot in the block map
    mask: int = 0  # of these slots
    known: dict[Life, Instance] = field(default_factory=dict)
    _ranked: dict[str, list[tuple[float, int, Life, Instance]]] = field(default_factory=dict)  # by model
    _sorted: bool = False

    def add(self, instance: Instance, index: Index, now: float) -> None:
        """Adds an instance that may get work, as it is now."""
        life, queue = instance.ref.life, instance.queue
        self.known[life] = instance
        if not instance.role.prefills:
            return
        ranked = self._ranked.setdefault(instance.model.name, [])
        ranked.append((queue.wait_s(now), len(queue.works), life, instance))
        if sealed := index.place_of(life).sealed:
            self.by_slot[sealed.bit_length() - 1] = instance
            self.mask |= sealed

    def idlest(self, model: str) -> Sequence[tuple[float, int, Life, Instance]]:
        """Returns the model's prefill instances, those with the shortest queue first."""
        if not self._sorted:
            for ranked in self._ranked.values():
                ranked.sort(key=lambda one: one[:3])
            self._sorted = True
        return self._ranked.get(model, ())


class Replication:
    """Orders copies of hot prefixes and handles their outcomes. `number` returns a new number for each order."""

    def __init__(self, settings: BalanceSettings, number: Callable[[], int]) -> None:
        self._settings = settings
        self._number = number
        self._flights: dict[int, _Flight] = {}
        self._rests: dict[Life, _Rest] = {}
        self._field = FleetSurvey()
        self._left: deque[Hot] = deque()
        self._spent = 0  # of this tick's `KEYS`

    def stop(self) -> None:
        """Forgets all orders, because this conductor does not lead any more."""
        self._flights.clear()
        self._left.clear()

    @property
    def under_way(self) -> bool:
        """Whether some prefixes are still to be looked at."""
        return bool(self._left)

    def ended(self, event: OrderEnded, now: float) -> bool:
        """Notes the end of an order; returns False when it was no copy."""
        flight = self._flights.pop(event.number, None)
        if flight is None:
            return False
        life = flight.order.target.life
        if event.error or event.held < len(flight.order.keys):
            self._failed(life, now)
        else:
            self._rests.pop(life, None)
            self._flights[event.number] = _Flight(flight.order, flight.brings, 0, now + SETTLE_S, done=True)
        return True

    def begin(self, heat: PrefixHeat, field: FleetSurvey, now: float) -> None:
        """Starts to look at hot prefixes, with the instances visited. If some are left from the last time, these are
        looked at instead."""
        self._expire(now)
        self._field = field
        if not self._left:
            self._spent = len(heat)
            self._left.extend(heat.hottest(now, most=MOST_HOT, least_rate=LEAST_RATE))

    def look(self, moment: ReplicationContext) -> list[Replicate]:
        """Returns orders for the next prefixes."""
        orders: list[Replicate] = []
        most, keys, self._spent = KEYS.count(moment.passed_s), self._spent, 0
        leaving = {i.ref.life: i for i in moment.leaving}
        while self._left and keys < most:
            hot = self._left.popleft()
            keys += hot.blocks
            orders += self._orders(hot, leaving, moment)
        return orders

    def _expire(self, now: float) -> None:
        for number, flight in list(self._flights.items()):
            if flight.until <= now:
                del self._flights[number]
                if not flight.done:
                    self._failed(flight.order.target.life, now)
        for life, rest in list(self._rests.items()):
            if rest.until + MAX_REST_S <= now:
                del self._rests[life]

    def _failed(self, life: Life, now: float) -> None:
        rest = self._rests.setdefault(life, _Rest(0, now))
        rest.until = now + min(MAX_REST_S, REST_S * 2.0**rest.failures)
        rest.failures = min(rest.failures + 1, 10)

    def _orders(self, hot: Hot, leaving: Mapping[Life, Instance], moment: ReplicationContext) -> Iterable[Replicate]:
        keys, field = hot.keys, self._field
        model = next((one[3].model for one in field.idlest(hot.model)), None)
        survey = moment.index.survey(keys, model.cost if model is not None else None)
        whole, coming = survey.everywhere(len(keys))
        slots = bits(whole & field.mask)
        holders = [field.by_slot[slot] for slot in slots[:MAX_LISTED]]
        bound = {f.order.target.life for f in self._flights.values() if keys[-1] in f.brings}
        held = {i.ref.life for i in holders}
        bound -= held
        others = (one for one in field.idlest(hot.model) if one[2] not in held and one[2] not in bound)
        first = next(others, None)
        have = len(slots) + len(bound) + coming.bit_count()
        want, why = _wanted(hot, holders, first[3] if first is not None else None, moment)
        if want <= have or first is None:
            return
        source = _source(survey, field.known, leaving, moment)
        if source is None:
            return
        for target, depth in self._targets(hot, survey, chain([first], others), source, moment)[: want - have]:
            order = self._order(
                keys, survey, source, target, depth, f"{why}; {have} have it, {want} wanted", moment.now
            )
            if order is not None:
                yield order

    def _targets(
        self,
        hot: Hot,
        survey: PrefixSurvey,
        others: Iterable[tuple[float, int, Life, Instance]],
        source: _Source,
        moment: ReplicationContext,
    ) -> list[tuple[Instance, int]]:
        """Returns which of the others (the idlest first) could take a copy, the best first, and how many leading blocks
        each has. Copies that were begun are finished first; then the idlest instance takes one."""
        busy = {f.order.target.life for f in self._flights.values()}
        resting = {life for life, rest in self._rests.items() if rest.until > moment.now}
        needed = STORE_SHARE * hot.blocks
        fit = (
            (life, i)
            for _, _, life, i in others
            if i.load.store_capacity >= needed
            and life not in busy
            and life not in resting
            and source.identity in (None, i.model.kv_identity)
            and moment.may(i)
        )
        listed = [
            (i, survey.depth(PrefixPlace(moment.index.place_of(life).sealed))) for life, i in islice(fit, MAX_LISTED)
        ]
        found = [one for one in listed if one[1] < source.depth]
        return sorted(found, key=lambda one: (-one[1], one[0].node_id == source.node_id))

    def _order(
        self,
        keys: Keys,
        survey: PrefixSurvey,
        source: _Source,
        target: Instance,
        depth: int,
        why: str,
        now: float,
    ) -> Replicate | None:
        """Returns an order within the limits, or None when they leave no room."""
        under_way = [f for f in self._flights.values() if not f.done]
        if len(under_way) >= self._settings.copy_orders:
            return None
        cost = target.model.cost
        end = cost.longest(depth, source.depth, self._settings.copy_bytes - sum(f.nbytes for f in under_way))
        end = survey.usable(source.place, end)
        if end <= depth:
            return None
        groups = survey.there(source.place, depth, cost.masks(depth, end))  # what a hit at its end needs
        some = tuple(key for at, key in enumerate(keys[depth:end]) if not groups or groups[at])
        order = Replicate(some, source.ref, target.ref, why, self._number(), bytes(mask for mask in groups if mask))
        nbytes = cost.prefix(depth, end)
        self._flights[order.number] = _Flight(order, frozenset(keys[:end]), nbytes, now + DEADLINE_S)
        return order


def _wanted(
    hot: Hot, holders: Sequence[Instance], idlest: Instance | None, moment: ReplicationContext
) -> tuple[int, str]:
    """Returns how many prefill instances should hold the prefix (see the module's docstring), and why. `idlest` is the
    idlest of the others."""
    about = holders[0] if holders else idlest
    if about is None:
        return 0, ""
    cached = hot.blocks * about.model.block_tokens
    prompt = max(cached + 1, int(hot.prompt_tokens))
    use_s = about.prefill.predict(prompt - cached, cached)
    saved = hot.rate * (about.prefill.predict(prompt, 0) - use_s)
    why = f"{cached:,} tokens used {hot.rate:.2f} times a second, which saves {saved:.2f} of an instance"
    if saved < WORTH:
        return 0, why
    want = max(2, math.ceil(hot.rate * use_s / TARGET))
    if holders and idlest is not None:
        fetch_s = idlest.pull.seconds(about.model.cost.prefix(0, hot.blocks), 1, moment.now)
        longer_s = min(i.queue.wait_s(moment.now) for i in holders) - idlest.queue.wait_s(moment.now)
        if longer_s > fetch_s / 2:
            want = max(want, len(holders) + 1)
            why += f", its holders' queues are longer by {longer_s * 1000:.0f} ms"
    return want, why


@dataclass(frozen=True, slots=True)
class _Source:
    ref: Ref
    node_id: str
    place: PrefixPlace
    depth: int  # leading blocks that it has in memory
    identity: tuple[object, ...] | None  # of its KV; None: it is no instance that is known here


def _source(
    survey: PrefixSurvey, known: Mapping[Life, Instance], leaving: Mapping[Life, Instance], moment: ReplicationContext
) -> _Source | None:
    """Returns which store in memory holds the most of the chain: preferably one that is leaving, then the one with the
    least to do."""
    best: tuple[tuple[int, bool, float, str], _Source] | None = None
    for slot in bits(survey.runs[0].sealed)[:MAX_LISTED] if survey.runs else ():
        store_id, tier = split_name(moment.index.truth.store_of(slot))
        member = moment.member(store_id)
        if tier is not Tier.DRAM or member is None:
            continue
        life = member.ref.life
        place = PrefixPlace(moment.index.place_of(life).sealed & (1 << slot))
        depth = survey.depth(place)
        instance = known.get(life) or leaving.get(life)
        wait_s = instance.queue.wait_s(moment.now) if instance is not None else 0.0
        worth = (-depth, life not in leaving, wait_s, store_id)
        if depth and (best is None or worth < best[0]):
            identity = instance.model.kv_identity if instance is not None else None
            best = worth, _Source(member.ref, member.node_id, place, depth, identity)
    return best[1] if best is not None else None
