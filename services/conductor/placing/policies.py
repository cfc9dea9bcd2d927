"""Who gets a request: the mesh's own way (serving_modes.py) or one of the plain policies it is compared with. Pure.

All of them choose among the same instances, those that may get the request, and leave out those to avoid. A plain
policy names the instance that computes the prompt and, unless that one keeps the request (ROLE_BOTH), the one that
decodes; what is then predicted for these two is what the mesh's own way would predict, and by that the request is
refused where it would be. Each instance uses the prefix that it has itself: nothing is fetched from others.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from services.conductor.domain import Fetch, Role, Schedule
from services.conductor.fleet.instance import Instance
from services.conductor.placing import decodes as decoding
from services.conductor.placing import placement, serving_modes, single_instance, ties
from services.conductor.placing.consistent_hash import Rings
from services.conductor.placing.placement import PlacementChoice
from services.conductor.placing.scoring_context import ScoringContext
from services.conductor.placing.serving_modes import Option, ServingMode, WeighedModes
from services.conductor.prefixes.fetch_plan import FetchPlanner
from services.conductor.prefixes.index import PrefixPlace
from services.conductor.settings import Policy

MAX_TURNS = 65_536  # instances whose last turn is remembered


@dataclass(frozen=True, slots=True)
class Pool:
    """Half of the mesh as a plain policy sees it. `load`: predicted, in seconds; `crowd`: requests that are there."""

    name: str
    load: Callable[[Instance], float]
    crowd: Callable[[Instance], int]


class PlacementPolicy(Protocol):
    """How a plain policy takes one of a pool's instances; there is at least one."""

    def pick(self, request: Schedule, among: Sequence[Instance], pool: Pool, rng: random.Random) -> Instance:
        """The one that gets the request."""


class Random:
    """Any of them."""

    def pick(self, request: Schedule, among: Sequence[Instance], pool: Pool, rng: random.Random) -> Instance:
        """See `PlacementPolicy`."""
        return rng.choice(among)


class RoundRobin:
    """The one whose last turn is longest ago; one that is new had none."""

    def __init__(self) -> None:
        self._turn = 0
        self._turns: dict[str, OrderedDict[str, int]] = {}

    def pick(self, request: Schedule, among: Sequence[Instance], pool: Pool, rng: random.Random) -> Instance:
        """See `PlacementPolicy`."""
        turns = self._turns.setdefault(pool.name, OrderedDict())
        chosen = min(among, key=lambda i: turns.get(i.ref.instance_id, 0))
        self._turn += 1
        turns[chosen.ref.instance_id] = self._turn
        turns.move_to_end(chosen.ref.instance_id)
        if len(turns) > MAX_TURNS:
            turns.popitem(last=False)
        return chosen


class LeastLoaded:
    """The least predicted load; of those that are as good the least crowd, then chance."""

    def pick(self, request: Schedule, among: Sequence[Instance], pool: Pool, rng: random.Random) -> Instance:
        """See `PlacementPolicy`."""
        return ties.pick(among, pool.load, pool.crowd, rng)


class PowerOfTwo:
    """The better of two that are drawn (Mitzenmacher 2001)."""

    def pick(self, request: Schedule, among: Sequence[Instance], pool: Pool, rng: random.Random) -> Instance:
        """See `PlacementPolicy`."""
        return ties.pick(rng.sample(among, min(2, len(among))), pool.load, pool.crowd, rng)


class SessionHash:
    """The same one for a session, as long as it has not more than its share of all requests; see consistent_hash.py.
    Where nobody tells a session: for a first prompt block."""

    def __init__(self) -> None:
        self._rings = Rings()

    def pick(self, request: Schedule, among: Sequence[Instance], pool: Pool, rng: random.Random) -> Instance:
        """See `PlacementPolicy`."""
        key = request.session.encode() or (request.keys[0] if request.keys else request.request_id.encode())
        inorder = sorted(among, key=lambda i: i.ref.instance_id)
        names = tuple(i.ref.instance_id for i in inorder)
        return inorder[self._rings.pick(key, names, [pool.crowd(i) for i in inorder])]


PLAIN: Mapping[Policy, Callable[[], PlacementPolicy]] = {
    Policy.RANDOM: Random,
    Policy.ROUND_ROBIN: RoundRobin,
    Policy.LEAST_LOADED: LeastLoaded,
    Policy.POWER_OF_TWO: PowerOfTwo,
    Policy.SESSION_HASH: SessionHash,
}


class Chooser:
    """By one policy; some remember whose turn it is."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._plain = None if policy.weighs else PLAIN[policy]()

    def choose(
        self,
        request: Schedule,
        prefills: Sequence[Instance],
        decodes: Sequence[Instance],
        places: Mapping[str, PrefixPlace],
        planner: FetchPlanner,
        scoring: ScoringContext,
    ) -> WeighedModes:
        """See `serving_modes.choose`."""
        if self.policy is Policy.KVCACHE:
            return serving_modes.choose(request, prefills, decodes, places, planner, scoring)
        scoring = replace(scoring, fetch=Fetch.NEVER)
        if self._plain is None:
            return serving_modes.choose(request, prefills, decodes, places, planner, scoring)
        home = self._plain.pick(
            request, _homes(request, prefills, decodes, places, planner), _prefill_pool(scoring), scoring.rng
        )
        others = [i for i in decodes if i is not home]
        if home in decodes and (home.role is Role.BOTH or not others):
            return _alone(request, home, places[home.ref.instance_id], planner, scoring)
        others = [i for i in others if i.ref.instance_id not in request.avoid] or others
        decode = self._plain.pick(request, others, _decode_pool(request, places, planner, scoring), scoring.rng)
        return _pair(request, home, decode, places, planner, scoring)


def _homes(
    request: Schedule,
    prefills: Sequence[Instance],
    decodes: Sequence[Instance],
    places: Mapping[str, PrefixPlace],
    planner: FetchPlanner,
) -> list[Instance]:
    """Who could compute the prompt: for somebody else's batch, or for its own if it does both. Where there is nobody,
    decode instances whose `alone_tokens` cover what this prompt lacks."""
    both = {id(d) for d in decodes if d.role is Role.BOTH}
    homes = [p for p in prefills if id(p) in both or any(d is not p for d in decodes)]
    if not homes:
        homes = [
            d
            for d in decodes
            if d.alone_tokens and not single_instance.too_much(request, d, places[d.ref.instance_id], planner.survey)
        ]
    return [i for i in homes if i.ref.instance_id not in request.avoid] or homes


def _prefill_pool(scoring: ScoringContext) -> Pool:
    return Pool("prefill", lambda i: i.queue.wait_s(scoring.now), lambda i: len(i.queue.works))


def _decode_pool(
    request: Schedule, places: Mapping[str, PrefixPlace], planner: FetchPlanner, scoring: ScoringContext
) -> Pool:
    def tbt_s(i: Instance) -> float:
        found = decoding.choice(request, i, places[i.ref.instance_id], planner.survey, scoring.now)
        return found.tbt_s + found.landing_wait_s + found.slot_wait_s

    return Pool("decode", tbt_s, lambda i: i.batch.requests)


def _alone(
    request: Schedule, instance: Instance, place: PrefixPlace, planner: FetchPlanner, scoring: ScoringContext
) -> WeighedModes:
    found = single_instance.weigh(request, instance, place, planner, scoring)
    kind = ServingMode.COUPLED if instance.role is Role.BOTH else ServingMode.DECODE
    cost_s = serving_modes.cost_s(found.choice, request.max_tokens)
    option = Option(kind, instance, instance, found.choice, found.refused, cost_s=cost_s)
    return WeighedModes(found.refused or found.choice, (option,), None)


def _pair(
    request: Schedule,
    prefill: Instance,
    decode: Instance,
    places: Mapping[str, PrefixPlace],
    planner: FetchPlanner,
    scoring: ScoringContext,
) -> WeighedModes:
    found = placement.choose(request, [prefill], [decode], places, planner, scoring)
    if isinstance(found.answer, PlacementChoice):
        cost_s = serving_modes.cost_s(found.answer, request.max_tokens)
        option = Option(ServingMode.PAIR, prefill, decode, found.answer, cost_s=cost_s)
    else:
        option = Option(ServingMode.PAIR, prefill, decode, refused=found.answer)
    return WeighedModes(found.answer, (option,), found)
