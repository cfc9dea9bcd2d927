"""Ticks in a large mesh: none looks at many instances, together they look at all."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvmesh.clock import Tick
from kvmesh.services.conductor.balance import rounds
from kvmesh.services.conductor.balance.hot import MAX_LISTED
from kvmesh.services.conductor.domain import Lead, Load, Role
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.fleet.walk import MOST_S, Pace, Walk
from kvmesh.services.conductor.settings import BalanceSettings
from kvmesh.services.conductor.state import EXPIRED, SURVEYED
from tests.conductor.balance.test_roles import instance
from tests.support.conductor.brain import BLOCK, Brain, card, chain, joined

MANY = 1000
TICK_S = 0.02
HOT = chain("hot", 64)
LOAD = Load(free_pages=1000, free_extents=1000, store_capacity=4000)


def test_a_pace_is_so_much_a_second_and_some_a_tick() -> None:
    pace = Pace(1000, 20)
    assert [pace.count(s) for s in (0.0, 0.01, 0.05, 0.5)] == [20, 20, 50, 500]
    assert pace.count(1e9) == 1000 * MOST_S


def test_a_walk_meets_everybody_once() -> None:
    rng, everybody = random.Random(5), [instance(f"i{n}", Role.PREFILL) for n in range(107)]
    walk = Walk(Pace(100, 3))
    walk.begin(everybody)
    met: list[Instance] = []
    while walk.under_way:
        met += walk.next(rng.choice((0.0, 0.05, 0.2)))
    assert met == everybody
    assert walk.next(1.0) == ()


class Looks:
    """Which instances are looked at: whose name, role or queue is read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: set[str] = set()
        for name in ("ref", "role", "queue"):
            monkeypatch.setattr(Instance, name, self._watched(name), raising=False)

    def _watched(self, name: str) -> property:
        def get(instance: Instance) -> Any:
            self.at.add(instance.__dict__["ref"].instance_id)
            return instance.__dict__[name]

        def put(instance: Instance, value: Any) -> None:
            instance.__dict__[name] = value

        return property(get, put)

    def during(self, act: Callable[[], object]) -> set[str]:
        self.at.clear()
        act()
        return set(self.at)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


def large_mesh() -> Brain:
    """With a prefix that is hot, and a leader, so that all rounds have something to do."""
    balance = BalanceSettings(window_s=10.0, switch_roles=True)
    brain = Brain(balance=balance, slo_ttft_s=1e9, lease_s=1e9, forget_s=1e9)
    for n in range(MANY):
        name = f"i{n}"
        brain.register(name, Role.PREFILL if n % 2 else Role.DECODE, switchable=True)
        brain.step(joined(name))
        brain.beat(name, LOAD)
    brain.seal("i1", HOT)
    brain.step(Lead(1))
    brain.tick(1.0)
    return brain


def use(brain: Brain) -> None:
    placed = brain.placed(len(HOT) * BLOCK + 8, keys=HOT)
    for ref in (placed.prefill, placed.decode):
        brain.beat(ref.instance_id, LOAD, finished_request_ids=(f"r{brain.requests}",))


def test_no_tick_looks_at_many_instances_and_together_they_look_at_all(looks: Looks) -> None:
    brain = large_mesh()
    most = sum(pace.count(TICK_S) for pace in (rounds.INSTANCES, SURVEYED, EXPIRED)) + 10
    assert most < MANY / 5
    met: set[str] = set()
    orders, counts = [], []

    def tick() -> None:
        brain.now += TICK_S
        orders.extend(brain.step(Tick()))

    for _ in range(int(3 / TICK_S)):
        use(brain)
        seen = looks.during(tick)
        counts.append(len(seen))
        met |= seen
    # One of them also looks for who takes a copy of what is hot.
    assert sorted(counts)[-2] <= most and max(counts) <= most + 2 * MAX_LISTED, sorted(counts)[-3:]
    assert len(met) == MANY
    assert orders, "the prefix is hot"
    assert {(hint.role, hint.instances) for hint in brain.state.hints(brain.now)} == {
        (Role.PREFILL, MANY // 2),
        (Role.DECODE, MANY // 2),
    }


def test_a_tick_that_comes_rarely_sees_all() -> None:
    """As in the simulator."""
    brain = large_mesh()
    assert sum(hint.instances for hint in brain.state.hints(brain.now)) == MANY


def test_readiness_is_that_of_the_views_whatever_fits_together() -> None:
    """An update rolls through: who finds nobody of the other role with his KV is stranded, not ready."""
    rng, brain = random.Random(7), Brain()
    for n in range(300):
        name = f"i{n % 60}"
        if rng.random() < 0.6:
            model = card(rng.choice(("one", "two", "three")), rng.choice(("old", "new")))
            more = {"local_prefill_tokens": 64} if rng.random() < 0.1 else {}
            brain.register(name, rng.choice(list(Role)), incarnation=n + 1, model=model, **more)
        elif name in brain.refs:
            brain.beat(name, ready=rng.random() < 0.8)
        views = brain.state.views(brain.now)
        count, _ = brain.state.readiness(brain.now)
        assert {key: number for key, number in count.items() if number} == {
            (role, ready): number
            for role in Role
            for ready in (True, False)
            if (number := sum((v.role, v.ready) == (role, ready) for v in views))
        }
