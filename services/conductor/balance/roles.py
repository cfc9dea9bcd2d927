"""Which instance takes which role, so that neither pool is at its limit while the other is idle. Pure.

The load of a model is that of its busier pool (demand.py). A move of one instance changes it by a rule without noise.
An order is given when all of this holds:

- The load is above HIGH, and some number of moves would lower it by the share GAIN (large pools move one by one).
- This move lowers it, and what is gained in one dwell is worth more than draining the instance.
- No instance of the model is switching. The model's last switch was a share PAUSE of the dwell ago, or a whole dwell
  where it went the other way. This instance's own last switch was a whole dwell ago.

So under constant demand each order lowers the load, and none can undo another. The last instance of a role takes the
role BOTH instead of leaving it; BOTH counts in either pool and is specialised again by the same rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvmesh.services.conductor.balance.demand import Demand
from kvmesh.services.conductor.balance.tally import Tally, TallyCounts, drain_s
from kvmesh.services.conductor.domain import Life, OrderEnded, Role, SwitchRole
from kvmesh.services.conductor.settings import BalanceSettings

HIGH = 0.85
GAIN = 0.15
PAUSE = 0.25  # of the dwell
DEADLINE_S = 10.0  # an order that has not shown by then has failed
MAX_KEPT = 4096


@dataclass(frozen=True, slots=True)
class _Switch:
    """An order to switch; `towards` is +1 for prefill, -1 for decode."""

    order: SwitchRole
    model: str
    towards: int
    at: float


@dataclass(slots=True)
class _Model:
    under_way: _Switch | None = None
    last: _Switch | None = None


class Roles:
    """Orders role switches and handles their outcomes. `number` returns a new number for each order."""

    def __init__(self, settings: BalanceSettings, number: Callable[[], int]) -> None:
        self._dwell_s = settings.dwell_s
        self._window_s = settings.window_s
        self._number = number
        self._models: dict[str, _Model] = {}
        self._switched: dict[Life, float] = {}  # when each was last told, or failed

    def stop(self) -> None:
        """Forgets all orders, because this conductor does not lead any more."""
        self._models.clear()

    def ended(self, event: OrderEnded, now: float) -> None:
        """Notes the end of an order. If it was carried out, the instance registers again."""
        for model in self._models.values():
            if event.error and model.under_way is not None and model.under_way.order.number == event.number:
                self._give_up(model, now)

    def _give_up(self, model: _Model, now: float) -> None:
        assert model.under_way is not None, "what is given up was under way"
        self._switched[model.under_way.order.ref.life] = now  # it is asked again after a dwell
        model.under_way = None

    def look(
        self, tallies: Mapping[str, Tally], demands: Mapping[str, tuple[Demand, float]], now: float
    ) -> list[SwitchRole]:
        """Returns the orders of this moment, at most one a model."""
        for gone in [name for name in self._models if name not in tallies]:
            del self._models[gone]
        for life in [life for life, at in self._switched.items() if now - at >= self._dwell_s]:
            del self._switched[life]
        orders = []
        for name, (demand, watched_s) in demands.items():
            model = self._models.setdefault(name, _Model())
            self._settle(model, tallies[name], now)
            if watched_s >= self._window_s and (order := self._order(name, model, tallies[name], demand, now)):
                orders.append(order)
        return orders

    def _settle(self, model: _Model, tally: Tally, now: float) -> None:
        switch = model.under_way
        if switch is None:
            return
        if tally.roles.get(switch.order.ref.life) is switch.order.role:
            model.last, model.under_way = switch, None
        elif now - switch.at > DEADLINE_S:
            self._give_up(model, now)

    def _order(self, name: str, model: _Model, tally: Tally, demand: Demand, now: float) -> SwitchRole | None:
        pools = tally.counts
        load = demand.load(pools)
        mixed = len(tally.identities) > 1  # an update is rolling through
        if model.under_way is not None or mixed or load < HIGH or len(self._switched) >= MAX_KEPT:
            return None
        best = _best(demand, pools, Counter(role for *_, role in tally.switchable))
        if best is None or best.reached > (1 - GAIN) * load:
            return None
        if model.last is not None and now - model.last.at < self._pause_s(model.last, best.towards):
            return None
        ready = [one for one in tally.switchable if one[3] is best.was and one[2].ref.life not in self._switched]
        if not ready:
            return None
        chosen = min(ready, key=lambda one: one[:2])[2]
        gained_s = (load - best.after) * len(tally.roles) * self._dwell_s
        if chosen.role is not best.was or gained_s <= drain_s(chosen, now):
            return None
        prefill, decode = demand.loads(pools)
        why = (
            f"prefill at {prefill:.2f}, decode at {decode:.2f} of what their instances can do: "
            f"{best.after:.2f} at most with this one as {best.becomes.value} instead of {best.was.value}"
        )
        order = SwitchRole(chosen.ref, best.becomes, why, self._number())
        model.under_way = _Switch(order, name, best.towards, now)
        self._switched[chosen.ref.life] = now
        return order

    def _pause_s(self, last: _Switch, towards: int) -> float:
        return self._dwell_s * (PAUSE if towards == last.towards else 1.0)


@dataclass(frozen=True, slots=True)
class _Move:
    """One instance of role `was` becomes another: the load `after` that, and the load `reached` after all moves that
    follow in the same direction."""

    was: Role
    becomes: Role
    towards: int
    after: float
    reached: float


_STEPS = {
    1: ((Role.DECODE, Role.PREFILL), (Role.BOTH, Role.PREFILL), (Role.DECODE, Role.BOTH)),
    -1: ((Role.PREFILL, Role.DECODE), (Role.BOTH, Role.DECODE), (Role.PREFILL, Role.BOTH)),
}


def _best(demand: Demand, pools: TallyCounts, free: Mapping[Role, int]) -> _Move | None:
    """Returns the first move of the direction that lowers the load most, or None. `free` says how many of each role may
    be switched."""
    found = [move for towards in _STEPS if (move := _way(demand, pools, free, towards)) is not None]
    return min(found, key=lambda move: (move.reached, move.after), default=None)


def _way(demand: Demand, pools: TallyCounts, free: Mapping[Role, int], towards: int) -> _Move | None:
    """Makes moves in one direction, each the best one, as long as each lowers the load."""
    left = Counter(free)
    first: tuple[Role, Role, float] | None = None
    load = demand.load(pools)
    while True:
        steps = [
            (demand.load(pools.moved(was, becomes)), was, becomes)
            for was, becomes in _STEPS[towards]
            if left[was] and _may(pools, was, becomes)
        ]
        after, was, becomes = min(steps, key=lambda step: step[0], default=(load, Role.BOTH, Role.BOTH))
        if after >= load:
            break
        first = first or (was, becomes, after)
        pools, load = pools.moved(was, becomes), after
        left[was] -= 1
    return None if first is None else _Move(first[0], first[1], towards, first[2], load)


def _may(pools: TallyCounts, was: Role, becomes: Role) -> bool:
    """Says whether requests can still be served after the move. An instance takes the role BOTH only if it is the last
    of its role."""
    if becomes is Role.BOTH:
        return not pools.moved(was, Role.DECODE if was is Role.PREFILL else Role.PREFILL).serves
    return pools.moved(was, becomes).serves
