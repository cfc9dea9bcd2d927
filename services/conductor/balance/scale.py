"""How many instances each pool wants, for an autoscaler outside. Pure.

A pool wants demand / target instances. That number stands until it is plainly wrong: more are wanted when the load
with it passes HIGH (or ABOVE times the target), fewer when with one less it has been BELOW the target for CALM windows
on end. So noise around any level changes nothing, and nothing is taken back before a while of calm. Coupled instances
carry their share of both demands (demand.py) and are a pool of their own here. Where roles are switched, add the
changes of all pools up.

Where a model may scale to zero (`zero_after_s`), none is wanted once nobody has wanted it for so long (uses.py), and
whatever was wanted before, one at least, as soon as somebody does: also of a model that has no instance, whose gateways
hold requests. Of a model that was never served here the roles of its instances are not known: one of each is wanted,
and each pool that the mesh has takes its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvmesh.services.conductor.balance.demand import Demand
from kvmesh.services.conductor.balance.tally import MIXED, Tally, TallyCounts
from kvmesh.services.conductor.balance.uses import ModelUse, ModelUses
from kvmesh.services.conductor.domain import Role
from kvmesh.services.conductor.settings import BalanceSettings

HIGH = 0.9  # at most, and ABOVE the target
ABOVE, BELOW = 1.2, 0.9
CALM = 6.0
MAX_WANTED = 4096
HELD_S = 5.0  # gateways tell each second what they hold
LATELY_S = 60.0  # a model without instances is wanted for so long after its last use, where it does not scale to zero


@dataclass(frozen=True, slots=True)
class Hint:
    """The wish of one pool; see `ScaleHint` in conductor.proto."""

    model: str
    role: Role
    instances: int
    change: int
    load: float
    reason: str


@dataclass(slots=True)
class _Pool:
    wanted: int
    calm_since: float | None = None


class Scale:
    """Computes scale hints; what was wanted before is kept, so that noise changes nothing."""

    def __init__(self, settings: BalanceSettings) -> None:
        self._target = settings.target_load
        self._high = min(HIGH, ABOVE * settings.target_load)
        self._calm_s = CALM * settings.window_s
        self._window_s = settings.window_s
        self._zero_after_s = settings.zero_after_s
        self._pools: dict[tuple[str, Role], _Pool] = {}
        self._roles: dict[str, tuple[Role, ...]] = {}  # of the pools that a model has, or had
        self.hints: tuple[Hint, ...] = ()

    def look(
        self,
        tallies: Mapping[str, Tally],
        demands: Mapping[str, tuple[Demand, float]],
        uses: ModelUses,
        now: float,
    ) -> None:
        """Updates `hints`."""
        absent = {model: use for model, use in uses.absent.items() if model not in tallies}
        self._pools = {key: pool for key, pool in self._pools.items() if key[0] in tallies or key[0] in absent}
        self._roles = {model: roles for model, roles in self._roles.items() if model in tallies or model in absent}
        hints = list[Hint]()
        for name, tally in tallies.items():
            found = self._model(name, tally, *demands.get(name, (Demand(), 0.0)), now)
            self._roles[name] = tuple(hint.role for hint in found)
            use = uses.of(name)
            if self._zero_after_s and use is not None and use.idle_s(now) >= self._zero_after_s:
                found = [self._no_more(hint, use, now) for hint in found]
            hints += found
        for name, use in absent.items():
            hints += self._absent(name, use, now)
        self.hints = tuple(hints)

    def _no_more(self, hint: Hint, use: ModelUse, now: float) -> Hint:
        self._pools.pop((hint.model, hint.role), None)
        why = f"nobody has wanted it for {use.idle_s(now):.0f} s; scale_to_zero_after_s={self._zero_after_s:g}"
        return replace(hint, change=-hint.instances, reason=why)

    def _absent(self, name: str, use: ModelUse, now: float) -> list[Hint]:
        """Returns what is wanted of a model of which no instance may get work."""
        roles, idle_s = self._roles.get(name, ()), use.idle_s(now)
        if idle_s >= (self._zero_after_s or LATELY_S):
            why = f"no instance is there, and nobody has wanted one for {idle_s:.0f} s"
            for role in roles:
                self._pools.pop((name, role), None)
            return [Hint(name, role, 0, 0, 0.0, why) for role in roles] if self._zero_after_s else []
        if not roles and now - use.since < self._window_s:
            return []  # this conductor may have started just now, and its instances may be about to register
        if now - use.held_at <= HELD_S:
            why = f"no instance is there, and a gateway holds requests for one ({use.held})"
        else:
            why = f"no instance is there, and one was wanted {idle_s:.0f} s ago"
        hints = []
        for role in roles or (Role.PREFILL, Role.DECODE, Role.BOTH):
            pool = self._pools.get((name, role))
            hints.append(Hint(name, role, 0, pool.wanted if pool is not None else 1, math.inf, why))
        return hints

    def _model(self, name: str, tally: Tally, demand: Demand, watched_s: float, now: float) -> list[Hint]:
        hints = []
        for role, places, share, load in _shares(demand, tally.counts):
            # An autoscaler starts and stops whole instances, with all their places.
            there, carried = round(places / tally.places(role)), share / tally.places(role)
            if watched_s < self._window_s:
                # Of none nothing could ever be watched.
                hints.append(Hint(name, role, there, 0 if there else 1, load, "not watched for long enough"))
                continue
            wanted = self._wanted((name, role), there, carried, now)
            hints.append(Hint(name, role, there, wanted - there, load, self._why(carried, wanted, there)))
        return hints

    def _why(self, demand: float, wanted: int, there: int) -> str:
        enough = self._enough(demand)
        work = f"work for {demand:.2f} instances"
        if wanted < enough:
            load = f"{wanted} carry it at a load of {demand / wanted:.2f}"
            return f"{work}; {load}, more are wanted above {self._high:.2f}"
        wants = f"{work}; at a load of {self._target:.2f} that wants {enough}"
        if wanted == enough:
            return wants
        until = f"until so little has lasted for {self._calm_s:.0f} s"
        return f"{wants}; {wanted} stay {until}" if wanted == there else f"{wants}; {wanted} were, and are {until}"

    def _enough(self, demand: float) -> int:
        """Returns how many instances carry the demand at the target load."""
        return min(MAX_WANTED, max(1, math.ceil(demand / self._target)))

    def _wanted(self, key: tuple[str, Role], there: int, demand: float, now: float) -> int:
        pool = self._pools.setdefault(key, _Pool(max(1, there)))
        if there < pool.wanted and demand <= BELOW * self._target * there:
            pool.wanted = max(1, there)  # some have gone, and are not missed
        enough = self._enough(demand)
        if demand > self._high * pool.wanted:
            pool.wanted, pool.calm_since = max(enough, pool.wanted), None
        elif enough < pool.wanted and demand <= BELOW * self._target * (pool.wanted - 1):
            pool.calm_since = now if pool.calm_since is None else pool.calm_since
            if now - pool.calm_since >= self._calm_s:
                pool.wanted, pool.calm_since = enough, None
        else:
            pool.calm_since = None
        return pool.wanted


def _shares(demand: Demand, pools: TallyCounts) -> list[tuple[Role, int, float, float]]:
    """Returns, for each pool that exists or must exist, its role, its instances, its demand in instances, and
    its load."""
    to_prefill, to_decode = demand.loads(pools)
    if not pools.boths:
        return [
            (Role.PREFILL, int(pools.prefills), demand.prefill, to_prefill),
            (Role.DECODE, int(pools.decodes), demand.decode, to_decode),
        ]
    prefill, decode = to_prefill * pools.prefills, to_decode * pools.decodes
    coupled = max(0.0, demand.prefill + demand.decode - prefill - decode) / MIXED
    found = [(Role.BOTH, int(pools.boths), coupled, max(to_prefill, to_decode))]
    if pools.prefills:
        found.append((Role.PREFILL, int(pools.prefills), prefill, to_prefill))
    if pools.decodes:
        found.append((Role.DECODE, int(pools.decodes), decode, to_decode))
    return found
