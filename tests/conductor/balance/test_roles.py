"""Role switches: they follow the load within the dwell, never flap, and never leave requests without a pool."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.pacing import MembershipLease, Pulse
from kvmesh.services.conductor.balance.demand import Demand
from kvmesh.services.conductor.balance.roles import DEADLINE_S, HIGH, PAUSE, Roles
from kvmesh.services.conductor.balance.tally import MIXED, Tally, TallyCounts
from kvmesh.services.conductor.domain import Load, OrderEnded, Ref, Register, Role, SwitchRole
from kvmesh.services.conductor.fleet.instance import Instance, ModelFits
from kvmesh.services.conductor.settings import BalanceSettings
from tests.support.conductor.brain import card
from tests.support.conductor.loop import Loop

P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH
DWELL_S = 20.0
SETTINGS = BalanceSettings(switch_roles=True, dwell_s=DWELL_S, window_s=2.0)


def instance(name: str, role: Role, **more: Any) -> Instance:
    values = {"switchable": True} | more
    return Instance(
        Register(Ref(name, f"{name}:1", 1), role, "node", values.pop("model", card()), 1000, 32, **values),
        0,
        ModelFits(),
        MembershipLease(Pulse(1, 0.2, 1.5)),
        0.0,
    )


def tallied(instances: Sequence[Instance], now: float, tally: Tally | None = None) -> Tally:
    """All of them met."""
    tally = tally or Tally(0.1)
    for one in instances:
        tally.add(one, now)
    return tally


class World:
    """Instances under `Roles`; orders are obeyed when `obeys` says so."""

    def __init__(self, *roles: Role, **more: Any) -> None:
        numbers = itertools.count(1)
        self.fleet = [instance(f"i{n}", role, **more) for n, role in enumerate(roles)]
        self.roles = Roles(SETTINGS, lambda: next(numbers))
        self.now = 0.0
        self.orders: list[tuple[float, SwitchRole]] = []
        self.towards: dict[float, Role] = {}  # by the time of each order

    def look(self, demand: Demand, *, obeys: bool = True, seconds: float = 1.0, watched_s: float = 60.0) -> None:
        self.now += seconds
        for order in self.roles.look({"demo": tallied(self.fleet, self.now)}, {"demo": (demand, watched_s)}, self.now):
            self.orders.append((self.now, order))
            told = next(i for i in self.fleet if i.ref == order.ref)
            self.towards[self.now] = P if order.role is P or (order.role is B and told.role is D) else D
            if obeys:
                told.role = order.role

    @property
    def counts(self) -> tuple[int, int, int]:
        roles = [i.role for i in self.fleet]
        return roles.count(P), roles.count(D), roles.count(B)


def test_loads_of_pools_share_coupled_instances() -> None:
    demand = Demand(1.0, 2.0)
    assert demand.loads(TallyCounts(2, 2)) == (0.5, 1.0)
    assert demand.loads(TallyCounts(0, 0, 3)) == pytest.approx((3 / (3 * MIXED),) * 2)
    assert demand.loads(TallyCounts(4, 1, 1)) == pytest.approx((0.25, 2 / (1 + MIXED)))
    assert demand.load(TallyCounts(3, 0)) == math.inf
    assert Demand().load(TallyCounts(0, 0)) == 0.0


def test_the_idle_pool_gives_to_the_busy_one() -> None:
    world = World(P, P, D, D)
    world.look(Demand(2.4, 0.5))
    ((_, order),) = world.orders
    assert (order.role, world.counts) == (P, (3, 1, 0))
    assert "prefill at 1.20, decode at 0.25" in order.why
    assert "0.80 at most" in order.why


@pytest.mark.parametrize(
    ("demand", "roles"),
    [
        (Demand(1.6, 0.2), (P, P, D, D)),  # below HIGH
        (Demand(1.9, 1.6), (P, P, D, D)),  # both are busy: nothing is gained
        (Demand(9.0, 9.0), (P, P, D, D)),
        (Demand(3.6, 2.4), (P, P, P, P, D, D, D, D)),  # 0.90 would become 0.80: too little
    ],
)
def test_in_the_dead_band_nothing_is_ordered(demand: Demand, roles: tuple[Role, ...]) -> None:
    world = World(*roles)
    for _ in range(50):
        world.look(demand)
    assert world.orders == []


def test_the_last_of_a_role_does_both() -> None:
    world = World(P, D)
    for _ in range(200):
        world.look(Demand(0.2, 1.4))
    assert [order.role for _, order in world.orders] == [B]
    assert world.counts == (0, 1, 1)
    for _ in range(200):
        world.look(Demand(1.4, 0.2))
    assert world.counts in ((1, 1, 0), (1, 0, 1))


def test_a_lost_pool_is_filled_again() -> None:
    """All prefill instances died: nothing can be answered until somebody takes their place."""
    world = World(D, D)
    world.look(Demand(0.3, 0.0))
    assert world.counts == (1, 1, 0)


def test_who_cannot_switch_is_not_asked() -> None:
    world = World(P, D, D, switchable=False)
    for _ in range(100):
        world.look(Demand(3.0, 0.1))
    assert world.orders == []


def test_instances_of_two_kinds_of_kv_are_left_alone() -> None:
    """An update is rolling through."""
    world = World(P, D, D)
    world.fleet.append(instance("new", D, model=card(fingerprint="f2")))
    world.look(Demand(3.0, 0.1))
    assert world.orders == []


def test_nothing_is_ordered_before_the_load_is_known() -> None:
    world = World(P, P, D, D)
    world.look(Demand(3.0, 0.1), watched_s=SETTINGS.window_s / 2)
    assert world.orders == []


def test_the_one_that_drains_soonest_is_taken() -> None:
    world = World(P, P, D, D)
    world.fleet[2].batch.report(Load(running_requests=9), 0.0)
    world.look(Demand(2.4, 0.2))
    assert [order.ref.instance_id for _, order in world.orders] == ["i3"]


def test_draining_that_costs_more_than_is_gained_is_not_ordered() -> None:
    world = World(P, D, D)
    for one in world.fleet[1:]:
        one.batch.report(Load(running_requests=9), 0.0)
        one.batch.residence_s = 1000.0
    world.look(Demand(1.1, 0.1))
    assert world.orders == []


def test_a_large_pool_moves_one_by_one() -> None:
    """No single move gains the share GAIN; all of them do. The same way they follow after a part of the dwell."""
    world = World(*[P] * 20, *[D] * 20)
    for _ in range(400):
        world.look(Demand(26.0, 4.0), seconds=0.5)
    prefill = world.counts[0]
    assert 29 <= prefill <= 36
    times = [at for at, _ in world.orders]
    assert all(b - a >= PAUSE * DWELL_S for a, b in itertools.pairwise(times))
    assert len(times) == prefill - 20


def test_a_load_that_turns_round_waits_for_a_dwell() -> None:
    world = World(P, P, D, D)
    world.look(Demand(2.4, 0.5))
    assert world.counts == (3, 1, 0)
    for _ in range(int(DWELL_S) - 1):
        world.look(Demand(0.5, 2.4))
        assert world.counts == (3, 1, 0)
    world.look(Demand(0.5, 2.4))
    assert world.counts == (2, 2, 0)


def test_one_order_at_a_time_and_a_silent_one_is_given_up() -> None:
    world = World(P, P, D, D, D)
    world.look(Demand(4.0, 0.1), obeys=False)
    for _ in range(int(DEADLINE_S) - 1):
        world.look(Demand(4.0, 0.1), obeys=False)
    assert len(world.orders) == 1
    for _ in range(3):
        world.look(Demand(4.0, 0.1), obeys=False)
    assert len({order.ref.instance_id for _, order in world.orders}) == 2, "another one is asked"


def test_an_instance_that_refuses_rests_for_a_dwell() -> None:
    world = World(P, D, D)
    asked = []
    for _ in range(int(3 * DWELL_S)):
        before = len(world.orders)
        world.look(Demand(1.8, 0.2), obeys=False)
        for at, order in world.orders[before:]:
            asked.append((at, order.ref.instance_id))
            world.roles.ended(OrderEnded(order.number, error="refused"), world.now)
    for name in ("i1", "i2"):
        times = [at for at, who in asked if who == name]
        assert len(times) >= 2
        assert all(b - a >= DWELL_S for a, b in itertools.pairwise(times))


@given(
    level=st.floats(0.05, 4.0),
    balance=st.floats(0.0, 1.0),
    noise=st.floats(0.0, 0.3),
    roles=st.lists(st.sampled_from([P, D, B]), min_size=2, max_size=8),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=80, deadline=None)
def test_noise_around_any_level_never_flaps(
    level: float, balance: float, noise: float, roles: list[Role], seed: int
) -> None:
    """However the load jumps: an instance is told at most once a dwell, and so is a model to turn round."""
    world, rng = World(*roles), random.Random(seed)
    for _ in range(160):
        shaken = [value * rng.uniform(1 - noise, 1 + noise) for value in (balance, 1 - balance)]
        served = TallyCounts(*world.counts).serves
        world.look(Demand(*(len(roles) * level * value for value in shaken)))
        assert TallyCounts(*world.counts).serves or not served, "nobody was left for a role"
    told: dict[str, float] = {}
    for at, order in world.orders:
        assert at - told.get(order.ref.instance_id, -math.inf) >= DWELL_S
        told[order.ref.instance_id] = at
    for (a, _), (b, _) in itertools.pairwise(world.orders):
        same = world.towards[a] == world.towards[b]
        assert b - a >= DWELL_S * (PAUSE if same else 1.0)


@given(
    prefill=st.floats(0.0, 8.0),
    decode=st.floats(0.0, 8.0),
    roles=st.lists(st.sampled_from([P, D, B]), min_size=2, max_size=9),
)
@settings(max_examples=80, deadline=None)
def test_constant_load_settles_and_no_order_undoes_another(prefill: float, decode: float, roles: list[Role]) -> None:
    demand = Demand(prefill, decode)
    world = World(*roles)
    loads = [demand.load(TallyCounts(*world.counts))]
    for _ in range(40):
        before = len(world.orders)
        world.look(demand, seconds=DWELL_S)
        if len(world.orders) > before:
            loads.append(demand.load(TallyCounts(*world.counts)))
    assert all(b < a for a, b in itertools.pairwise(loads)), "each order lowers the load"
    assert len(world.orders) <= 2 * len(roles)
    if loads[0] < HIGH:
        assert world.orders == []


@pytest.mark.slow
def test_the_pools_follow_a_load_that_shifts_and_comes_back() -> None:
    """Long prompts and short answers, then the other way round, then back. In each phase the pools settle within two
    dwells, and from then on nobody is told anything; with pools as they were at first, queues would grow for ever."""
    dwell_s = 15.0
    shapes = ((13.0, 3000, 8), (15.0, 200, 400), (13.0, 3000, 8))  # three decode instances are full at 16.5 a second
    on = BalanceSettings(replicate=False, switch_roles=True, dwell_s=dwell_s, window_s=3.0)
    loop, fixed = Loop(2, 2, balance=on), Loop(2, 2, balance=dataclasses.replace(on, switch_roles=False))
    for shape, pool in zip(shapes, (0, 1, 0), strict=True):
        loop.run(2 * dwell_s, *shape)
        switched = len(loop.switched)
        assert loop.pools[pool] == 3
        loop.run(2 * dwell_s, *shape)
        assert len(loop.switched) == switched, loop.switched
        assert loop.waiting < 6
        fixed.run(4 * dwell_s, *shape)
        assert fixed.waiting > 60
    assert min(loop.gaps()) >= PAUSE * dwell_s
    assert len(loop.switched) <= 12
    assert fixed.switched == []
