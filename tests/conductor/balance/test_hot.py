"""Hot prefixes: what is counted of them, when copies are ordered, from whom, to whom, and when no more."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.clock import Tick
from kvmesh.kvcache.keys import Keys
from kvmesh.services.conductor.balance.heat import PrefixHeat, depths
from kvmesh.services.conductor.balance.hot import DEADLINE_S, REST_S, SETTLE_S
from kvmesh.services.conductor.domain import (
    Cordon,
    CordonState,
    Lead,
    Load,
    OrderEnded,
    Replicate,
    Role,
    Schedule,
)
from kvmesh.services.conductor.prefixes.index import HeldRun, PrefixSurvey
from kvmesh.services.conductor.settings import BalanceSettings
from tests.support.conductor.brain import BLOCK, Brain, chain, joined

HOT = chain("hot", 64)  # 1,024 tokens: 51 ms of prefill by the prior, and something for attention
BLOCK_BYTES = BLOCK * 1024


def survey(*runs: tuple[int, int, int]) -> PrefixSurvey:
    return PrefixSurvey(tuple(HeldRun(first, end, sealed, 0) for first, end, sealed in runs))


def request(keys: tuple[bytes, ...], tokens: int = 0) -> Schedule:
    return Schedule("r", 0, "demo", tokens or len(keys) * BLOCK + 8, 8, keys)


# ── what is counted ───────────────────────────────────────────────────────────────────────────────


def test_depths_are_powers_of_two_and_the_borders_of_holders() -> None:
    assert depths(PrefixSurvey(()), 10) == ()
    assert depths(survey((0, 5, 1), (5, 12, 2)), 20) == [1, 2, 4, 5, 8, 12]
    assert depths(survey((0, 1, 1)), 1) == [1]


def test_a_rate_is_that_of_the_uses_and_fades() -> None:
    heat, now = PrefixHeat(10.0), 0.0
    while now < 100.0:
        heat.use(request(HOT), survey((0, 64, 1)), now)
        now += 0.5
    (hot,) = heat.hottest(now, most=8, least_rate=0.01)
    assert tuple(hot.keys) == HOT
    assert hot.prompt_tokens == pytest.approx(64 * BLOCK + 8)
    assert hot.rate == pytest.approx(2.0, rel=0.05)
    assert heat.hottest(now + 30.0, most=8, least_rate=0.01)[0].rate == pytest.approx(0.25, rel=0.1)
    assert heat.hottest(now + 1e6, most=8, least_rate=0.01) == []


def test_what_nobody_holds_is_not_hot() -> None:
    heat = PrefixHeat(10.0)
    for _ in range(50):
        heat.use(request(HOT), PrefixSurvey(()), 1.0)
    assert len(heat) == 0


def test_a_shared_beginning_is_told_beside_what_goes_on_from_it() -> None:
    heat = PrefixHeat(10.0)
    for n in range(40):
        keys = HOT[:16] + chain(f"own{n % 4}", 16)
        heat.use(request(keys), survey((0, 16, 3), (16, 32, 1)), n / 10)
    found = heat.hottest(4.0, most=9, least_rate=0.01)
    assert Counter(len(hot.keys) for hot in found) == {16: 1, 32: 4}
    assert next(hot for hot in found if len(hot.keys) == 16).keys == Keys.of(HOT[:16])


@given(seed=st.integers(0, 1 << 30), capacity=st.integers(16, 64))
@settings(max_examples=40, deadline=None)
def test_memory_is_bounded_and_what_is_hot_is_found_among_what_is_not(seed: int, capacity: int) -> None:
    """Space-saving: who has more than 1/capacity of all uses is in the table, and no rate is ever overstated."""
    rng, heat, now = random.Random(seed), PrefixHeat(5.0, capacity=capacity, max_packed_bytes=64 * 16 * 8), 0.0
    used: Counter[bytes] = Counter()
    for n in range(1500):
        now += 0.01
        keys = chain("hot", 1) if n % 5 == 0 else chain(f"cold{rng.randrange(2000)}", 1)
        used[keys[0]] += 1
        heat.use(request(keys), survey((0, 1, 1)), now)
        assert len(heat) <= capacity
        assert heat.packed_bytes <= 64 * 16 * 8
    found = {hot.keys[-1]: hot.rate for hot in heat.hottest(now, most=capacity, least_rate=0.001)}
    assert chain("hot", 1)[0] in found
    assert found[chain("hot", 1)[0]] > 5
    # Each use of the last 15 s weighs ln 2 / 5 s at most.
    assert all(rate <= used[key] * 0.1387 for key, rate in found.items())


def test_what_becomes_hot_finds_a_place_among_what_was() -> None:
    """A newcomer inherits the count of whom it replaces: with a fourth of all uses it stays, though the other uses are
    of prefixes never seen before, and all old ones were used more than it at first."""
    heat, now = PrefixHeat(1e9, capacity=16), 0.0
    for n in range(16 * 5):
        heat.use(request(chain(f"old{n % 16}", 1)), survey((0, 1, 1)), now)
    for n in range(160):
        keys = chain("new", 1) if n % 4 == 0 else chain(f"once{n}", 1)
        heat.use(request(keys), survey((0, 1, 1)), now)
    assert chain("new", 1) in {tuple(hot.keys) for hot in heat.hottest(now, most=16, least_rate=1e-12)}


def test_a_long_life_does_not_wear_out_its_numbers() -> None:
    heat = PrefixHeat(1.0, capacity=8)
    for hour in range(50):
        for n in range(20):
            heat.use(request(HOT[: 1 + n % 3]), survey((0, 1 + n % 3, 1)), 3600.0 * hour + n / 10)
        (hot, *_) = heat.hottest(3600.0 * hour + 2, most=4, least_rate=0.01)
        assert 1.0 < hot.rate < 20.0


# ── when copies are ordered ───────────────────────────────────────────────────────────────────────


class Mesh(Brain):
    """Prefill instances with stores; `use` is a request for the hot prefix, computed at once."""

    def __init__(self, prefills: int = 3, *, leads: bool = True, **balance: Any) -> None:
        super().__init__(balance=BalanceSettings(**({"window_s": 10.0} | balance)), slo_ttft_s=1e9)
        for n in range(prefills):
            self.add(f"p{n}", Role.PREFILL)
        self.add("d0", Role.DECODE)
        for name in self.refs:
            self.step(joined(name))
        self.blocks = 4000
        self.stores()
        if leads:
            self.step(Lead(1))

    def stores(self) -> None:
        self.load = Load(free_pages=1000, free_extents=1000, store_capacity=self.blocks)
        for name in self.refs:
            self.beat(name, self.load)

    def use(
        self, times: int, every_s: float = 0.2, keys: tuple[bytes, ...] = HOT, further_tokens: int = 8
    ) -> list[Replicate]:
        orders = []
        for _ in range(times):
            self.placed(len(keys) * BLOCK + further_tokens, keys=keys)
            for name in self.refs:
                self.beat(name, self.load, finished_request_ids=(f"r{self.requests}",))
            orders += self.wait(every_s)
        return orders

    def wait(self, seconds: float) -> list[Replicate]:
        """Nobody asks for anything."""
        orders = []
        for _ in range(max(1, round(seconds / 0.5))):
            self.now += min(0.5, seconds)
            self.stores()
            orders += self.orders()
        return orders

    def orders(self) -> list[Replicate]:
        found = self.step(Tick())
        assert all(isinstance(one, Replicate) for one in found)
        return found  # type: ignore[return-value]

    def copied(self, order: Replicate) -> None:
        self.seal(order.target.instance_id, order.keys)
        self.step(OrderEnded(order.number, held=len(order.keys)))


def test_a_hot_prefix_gets_a_second_holder_and_no_third() -> None:
    mesh = Mesh()
    mesh.seal("p0", HOT)
    (order,) = mesh.use(40)
    assert (order.keys, order.source.instance_id) == (HOT, "p0")
    assert order.target.instance_id in ("p1", "p2")
    assert "1 have it, 2 wanted" in order.why
    mesh.copied(order)
    assert mesh.use(100) == []


@pytest.mark.parametrize(("further_tokens", "holders"), [(8, 2), (700, 3), (2000, 5)])
def test_so_many_holders_as_its_uses_fill(further_tokens: int, holders: int) -> None:
    """40 uses a second. With the prefix each takes 10, 47 or 115 ms, so together 0.4, 1.9 or 4.6 instances' time."""
    mesh = Mesh(5, window_s=1.0)
    mesh.seal("p0", HOT)
    targets = []
    for _ in range(200):
        for order in mesh.use(1, every_s=0.025, further_tokens=further_tokens):
            targets.append(order.target.instance_id)
            mesh.copied(order)
    assert len(targets) == len(set(targets)) == holders - 1


def test_one_that_is_used_rarely_stays_alone() -> None:
    mesh = Mesh()
    mesh.seal("p0", HOT)
    assert mesh.use(40, every_s=5.0) == []


def test_a_short_one_is_not_worth_it() -> None:
    mesh = Mesh()
    mesh.seal("p0", HOT[:1])
    assert mesh.use(60, keys=HOT[:1]) == []


@pytest.mark.parametrize("why", ["standby", "off"])
def test_only_a_leader_that_may_orders(why: str) -> None:
    mesh = Mesh(leads=why != "standby", replicate=why != "off")
    mesh.seal("p0", HOT)
    assert mesh.use(40) == []


def test_whoever_comes_to_lead_knows_what_is_hot() -> None:
    mesh = Mesh(leads=False)
    mesh.seal("p0", HOT)
    assert mesh.use(40) == []
    mesh.step(Lead(7))
    assert len(mesh.wait(1)) == 1


def test_a_target_that_fails_rests_and_another_is_asked() -> None:
    mesh = Mesh()
    mesh.seal("p0", HOT)
    (first,) = mesh.use(40)
    mesh.step(OrderEnded(first.number, error="no room"))
    (second,) = mesh.wait(0.5)
    assert second.target != first.target
    mesh.step(OrderEnded(second.number, held=3))  # not all of it: a failure, too
    assert mesh.wait(REST_S / 2) == []
    assert len(mesh.wait(REST_S)) == 1


def test_an_order_without_an_answer_has_failed() -> None:
    mesh = Mesh(2)
    mesh.seal("p0", HOT)
    (order,) = mesh.use(40)
    asked = []
    for _ in range(int(DEADLINE_S + REST_S) * 4):
        asked += mesh.use(1, every_s=0.25)
    assert [one.target for one in asked] == [order.target]
    assert mesh.now >= 100 + DEADLINE_S + REST_S


def test_limits_of_orders_and_bytes() -> None:
    """One order at a time, and 16 blocks: the beginning goes first, what follows later."""
    mesh = Mesh(2, copy_orders=1, copy_bytes=16 * BLOCK_BYTES)
    mesh.seal("p0", HOT)
    (order,) = mesh.use(40)
    got = [order]
    for _ in range(8):
        mesh.copied(got[-1])
        got += mesh.use(int(SETTLE_S / 0.2) + 1)
    assert [one.keys for one in got] == [HOT[n : n + 16] for n in range(0, 64, 16)]


def test_a_store_too_small_for_it_is_left_alone() -> None:
    mesh = Mesh()
    mesh.seal("p0", HOT)
    mesh.blocks = 200
    assert mesh.use(40) == []


def test_of_an_instance_that_leaves_what_is_hot_is_saved() -> None:
    mesh = Mesh(4)
    mesh.seal("p0", HOT)
    mesh.seal("p1", HOT)
    assert mesh.use(40) == []
    for name in ("p0", "p1"):
        mesh.step(Cordon(name, CordonState.DRAINING))
    orders = mesh.wait(1)
    assert {order.target.instance_id for order in orders} == {"p2", "p3"}
    assert {order.source.instance_id for order in orders} <= {"p0", "p1"}


def test_a_copy_that_is_not_announced_yet_is_not_ordered_again() -> None:
    mesh = Mesh()
    mesh.seal("p0", HOT)
    (order,) = mesh.use(40)
    mesh.step(OrderEnded(order.number, held=len(HOT)))
    assert mesh.use(int(SETTLE_S / 0.25) - 1) == []
    assert len(mesh.wait(SETTLE_S)) == 1, "it was evicted at once: so there are still too few"
