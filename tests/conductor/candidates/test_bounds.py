"""Screening finds what weighing everybody finds, up to ties, whatever the fleet is like."""

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, CacheLayout
from kvmesh.kvcache.tiers import Tier, TierUse, split_name, store_name
from kvmesh.services.conductor.candidates import bounds, columns, fields, select
from kvmesh.services.conductor.costs.cache_cost import CardGroups
from kvmesh.services.conductor.domain import (
    Cordon,
    CordonState,
    DecodeSample,
    Fetch,
    Lane,
    Load,
    MemberGone,
    Placed,
    PrefillSample,
    Refuse,
    Role,
    Schedule,
    StoreLost,
)
from kvmesh.services.conductor.placing import placement, ties
from kvmesh.services.conductor.settings import AffinitySettings
from tests.support.conductor.brain import BLOCK, Brain, card, chain, joined, reset

PROMPTS = [chain(name, 200) for name in "xy"]
TIER_USE = TierUse(Tier.SSD, 1 << 40, 1 << 30, 100, 200_000, 2e9)


def of_groups(block_bytes: int) -> CardGroups:
    """A half of the block's bytes is of all tokens, the other of the last 300; a state weighs as much as three."""
    layout = CacheLayout(2, 1, 8)
    return (
        (CacheGroup("all", (0,), layout), block_bytes // 2),
        (CacheGroup("window300", (1,), layout, CacheKind.WINDOW, 300), block_bytes // 2),
        (CacheGroup("state", (2,), layout, CacheKind.STATE, 4), 3 * block_bytes),
    )


class Fleet:
    """A random mesh: instances of all roles with queues, batches, samples, blocks in memory, below it and coming."""

    def __init__(self, seed: int, size: int, *, alike: bool = False, grouped: bool = False, **settings: object) -> None:
        self.rng = rng = random.Random(seed)
        self.brain = brain = Brain(seed, slo_ttft_s=1e3, slo_tbt_s=1e3, **settings)
        self.card = card(max_context_tokens=0, kv_bytes_per_token=rng.choice([1024, 65536]))
        self.grouped = grouped
        if grouped:
            self.card = replace(self.card, cache_groups=of_groups(self.card.kv_bytes_per_token * BLOCK))
        both = rng.random() < 0.3
        self.names: list[str] = []
        for i in range(size):
            role = Role.BOTH if both and rng.random() < 0.5 else Role.PREFILL if rng.random() < 0.5 else Role.DECODE
            self.names.append(f"{role.value[0]}{i}")
            more: dict[str, Any] = {"local_prefill_tokens": rng.choice([0, 0, 500]) if role is Role.DECODE else 0}
            if role is Role.PREFILL:
                more["tenant_fairness"] = i % 3 > 0
            brain.add(self.names[-1], role, model=self.card, capacity=rng.choice([260, 1000]), **more)
        pools = [f"pool{i}" for i in range(rng.randrange(3))]
        brain.step(reset(1, *[n for n in (*self.names, *pools) if rng.random() < 0.95]))
        for name in pools if not alike else ():
            self.seal(name, rng.choice(PROMPTS)[: rng.randrange(200)])
        for name in self.names if not alike else ():
            self.vary(name)

    def seal(self, name: str, keys: tuple[bytes, ...]) -> None:
        """What a store announces: of groups states at every fourth block, and sometimes a window with holes."""
        holes = self.rng.choice([0.0, 0.0, 0.02]) if self.grouped else 0.0
        masks = [
            1 | 2 * (self.rng.random() >= holes) | 4 * (int(key.split(b"-")[1].strip(b".")) % 4 == 3) for key in keys
        ]
        self.brain.seal(name, keys, **({"groups": bytes(masks)} if self.grouped and keys else {}))

    def vary(self, name: str) -> None:
        """Some of its past, and what it tells of now."""
        rng, brain = self.rng, self.brain
        if rng.random() < 0.3:
            self.seal(name, rng.choice(PROMPTS)[rng.choice([0, 0, 0, 5]) : rng.randrange(200)])
        if rng.random() < 0.15:
            self.seal(store_name(name, Tier.SSD), rng.choice(PROMPTS)[: rng.randrange(200)])
        slow = rng.choice([1.0, 1.0, 3.0])
        for i in range(rng.choice([0, 0, 3, 12])):
            tokens = rng.randrange(1, 3000)
            pulls = {"pull_bytes": 1 << 20, "pull_s": 0.02 * slow} if rng.random() < 0.5 else {}
            cut = {"steps": 2, "chunks": 2} if rng.random() < 0.3 else {}
            took_s = 1e-4 * slow * tokens
            sample = PrefillSample(f"{name}-{i}", tokens, 0, took_s, tokens * 1024, 0.001, **pulls, **cut)
            step = DecodeSample(1 + i, 100 * i, 0.01 * slow * (1 + i / 4))
            brain.beat(name, prefill_samples=(sample,), decode_samples=(step,))
        load = Load(
            queued_tokens=rng.choice([0, 0, 500, 5000]),
            running_requests=rng.choice([0, 0, 1, 8, 64, 70]),
            waiting_requests=rng.choice([0, 0, 2]),
            context_tokens=rng.randrange(0, 50_000),
            free_pages=rng.choice([1000, 1000, 20]),
            free_extents=rng.choice([1000, 20]),
        )
        tiers = (TIER_USE,) if rng.random() < 0.3 else ()
        brain.beat(name, load, ready=rng.random() < 0.95, tiers=tiers)

    def request(self, i: int, **more: object) -> Schedule:
        rng = self.rng
        keys = rng.choice([*PROMPTS, chain(f"new{i}", 200), PROMPTS[0][:20] + chain("fork", 180)])
        tokens = rng.choice([300, 1600, 3201])
        avoid = frozenset(rng.sample(self.names, min(2, len(self.names)))) if rng.random() < 0.2 else frozenset[str]()
        told: dict[str, object] = {
            "ttft_slo_s": rng.choice([0.0, 0.0, 0.5, 0.05]),
            "tbt_slo_s": rng.choice([0.0, 0.0, 0.1, 0.02]),
            "priority": rng.choice([0, 0, 0, 1, -1]),
            "lane": rng.choice([Lane.INTERACTIVE] * 5 + [Lane.BATCH]),
            "session": rng.choice(["", "s1", "s2"]),
            "origin": rng.choice(["", "o1"]),
            "avoid": avoid,
            "tenant": rng.choice("abc"),
        }
        return Schedule(f"r{i}", 0, "demo", tokens, 16, keys[: tokens // BLOCK], **(told | more))  # type: ignore[arg-type]


ALIKE: dict[str, Any] = {
    "priority": 0,
    "lane": Lane.INTERACTIVE,
    "avoid": frozenset(),
    "ttft_slo_s": 0.0,
    "tbt_slo_s": 0.0,
}


class Asked(Exception):
    """What the brain would choose by."""


def asked(brain: Brain, request: Schedule) -> tuple[Any, ...] | None:
    """Prefills, decodes, places, mesh and terms for one request; None: it is refused before. Nothing is committed."""

    def stop(*args: Any) -> None:
        raise Asked(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(brain.state.scheduling.chooser, "choose", stop)
        try:
            brain.state.step(request, brain.now)
        except Asked as found:
            return found.args[1:]
    return None


@pytest.fixture(autouse=True)
def _all_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "FEW", 0)
    monkeypatch.setattr(select, "DEEP", 10_000)


def near(floor: float) -> float:
    return ties.as_good(floor) + 1e-6


def compare(fleet: Fleet, request: Schedule, *, by_tenant: bool = False) -> str:
    """Screened, and weighed one and all: the same up to ties. Returns what became of it."""
    found = asked(fleet.brain, request)
    if found is None:
        return "refused"
    prefills, decodes, places, mesh, terms = found
    terms = replace(terms, overtaking=replace(terms.overtaking, by_tenant=by_tenant))
    _alones(request, decodes, places, mesh, terms)
    if not placement.pairable(prefills, decodes):
        return "no pair"
    if len(prefills) == 1:
        decodes = placement.without(decodes, {prefills[0].ref.instance_id})
    one = select.screen_of(request, decodes, mesh, terms)
    assert one is not None
    among = placement.without(decodes, request.avoid) or decodes
    every = placement._weigh_decodes(request, list(among), places, mesh, terms, None)
    some = placement._weigh_decodes(request, among, places, mesh, terms, one)
    best, picked = (placement.pick_decode(request, w.weighed, terms, w.floor) for w in (every, some))
    if isinstance(best, Refuse) or isinstance(picked, Refuse):
        assert isinstance(best, Refuse)
        assert isinstance(picked, Refuse)
        assert picked.error.retry_after_ms == best.error.retry_after_ms  # type: ignore[attr-defined]
        return "no decode"

    def decode_s(c: Any) -> float:
        return float(c.score_s + terms.near.decode_s(c.instance.ref.instance_id))

    may = [c for c in every.weighed if terms.judge.decode(c).passes]
    may = [c for c in may if not c.short] or may
    assert picked in may
    best = min(may, key=decode_s)
    assert decode_s(picked) <= near(decode_s(best)) + _handicap(some, may, placement.DECODE_EVEN * best.score_s)
    assert len(some.weighed) <= len(every.weighed)
    among = placement.without(prefills, {picked.instance.ref.instance_id})
    among = placement.without(among, request.avoid) or among
    every = placement._weigh_prefills(request, list(among), picked, places, mesh, terms, None)
    few = placement._weigh_prefills(request, among, picked, places, mesh, terms, one)
    here, there = (placement.pick_prefill(w.weighed, picked.landing_wait_s, terms, w.floor) for w in (every, few))
    if isinstance(here, Refuse) or isinstance(there, Refuse):
        assert isinstance(here, Refuse)
        assert isinstance(there, Refuse), there
        assert there.reason == here.reason
        if here.reason == "ttft":
            assert there.error.retry_after_ms == here.error.retry_after_ms  # type: ignore[attr-defined]
        return "no prefill"

    def prefill_s(c: Any) -> float:
        return float(c.cost_s + terms.near.prefill_s(c.instance.ref.instance_id))

    slo_s = terms.ttft_slo_s - picked.landing_wait_s
    ways = [way for c in every.weighed if (way := c.best(slo_s, terms.tbt_slo_s)) is not None]
    cheapest = min(ways, key=prefill_s)
    assert prefill_s(there) <= near(prefill_s(cheapest)) + _handicap(few, ways, cheapest.prefill_s)
    return "placed"


def _handicap(weighed: Any, passing: list[Any], most_s: float) -> float:
    """What evening out may cost among a few that were all weighed (see ties.even_out)."""
    return most_s if weighed.floor == math.inf and 1 < len(passing) <= placement.FEW else 0.0


def _alones(request: Schedule, decodes: Any, places: Any, mesh: Any, terms: Any) -> None:
    every = placement._alones(request, list(decodes), places, mesh, terms, [])
    some = placement._alones(request, decodes, places, mesh, terms, [])
    passing, found = ([o for o in w.weighed if o.passes] for w in (every, some))
    assert bool(passing) == bool(found)
    if passing:
        clean = [o for o in passing if not o.names & request.avoid] or passing
        picked = ties.pick(found, lambda o: o.cost_s, lambda o: placement._crowd(o, 0.0), random.Random(0), some.floor)
        assert picked.cost_s <= near(min(o.cost_s for o in clean))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1 << 32), st.integers(2, 14), st.sampled_from(list(Fetch)), st.booleans(), st.booleans())
@example(1, 13, Fetch.CHEAPER, False, True)  # only other tenants' prompts make a queue too long
def test_what_is_screened_out_could_not_have_been_chosen(
    seed: int, size: int, fetch: Fetch, nearness: bool, grouped: bool
) -> None:
    affinity = AffinitySettings(0.2, 0.1) if nearness else AffinitySettings()
    fleet = Fleet(seed, size, grouped=grouped, fetch=fetch, affinity=affinity)
    for i in range(6):
        compare(fleet, fleet.request(i), by_tenant=fleet.rng.random() < 0.5)
        fleet.brain.step(fleet.request(100 + i))
        fleet.vary(fleet.rng.choice(fleet.names))
        fleet.brain.now += fleet.rng.choice([0.0, 0.01, 0.2])


def test_each_outcome_is_among_those_compared() -> None:
    seen = Counter[str]()
    for seed in range(30):
        fleet = Fleet(seed, 10)
        seen.update(compare(fleet, fleet.request(i)) for i in range(4))
    assert seen["placed"] > 25
    assert seen["no prefill"] > 1
    assert seen["no decode"] > 1


def test_what_a_tenant_passes_is_never_bounded_too_high() -> None:
    fleet = Fleet(0, 0)
    for i in range(8):
        weight = {"tenant_fairness": i > 0, "size_weight": 16.0 * (i % 2)} if i < 6 else {}
        fleet.brain.add(f"n{i}", Role.PREFILL if i < 6 else Role.DECODE, model=fleet.card, capacity=1 << 20, **weight)
    for i in range(90):
        fleet.brain.step(fleet.request(i, tenant="greedy", **ALIKE))
    (queue_s, *_) = sorted(i.queue.wait_s(fleet.brain.now) for i in fleet.brain.state.instances if i.queue.works)
    seen = Counter[str]()
    for i, share in enumerate((0.01, 0.1, 0.3, 0.5, 0.9)):
        modest = fleet.request(100 + i, tenant="modest", **ALIKE | {"ttft_slo_s": queue_s * share})
        seen[compare(fleet, modest, by_tenant=True)] += 1
        assert compare(fleet, modest) == "no prefill"
    assert seen["placed"] and seen["no prefill"], seen


def _compare_many() -> None:
    for seed in range(100):
        fleet = Fleet(seed, 12)
        for i in range(4):
            compare(fleet, fleet.request(i))


@pytest.mark.parametrize("broken", ["queue_s", "held"])
def test_a_wrong_bound_is_found(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "held":
        nothing = lambda view, survey: bounds.HeldBlocks(*(np.zeros(len(view.columns)) for _ in range(3)))  # noqa: E731
        monkeypatch.setattr(select, "held", nothing)
    else:
        monkeypatch.setattr(bounds.CostBounds, "queue_s", property(lambda self: 16 * self.wait_s))
    with pytest.raises(AssertionError):
        _compare_many()


def test_columns_hold_what_the_instances_are_after_any_history(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(12):
        monkeypatch.setattr(columns, "FEW", 16 if seed % 2 else 0)  # loads are filled when asked for, or at once
        fleet = Fleet(seed, 8)
        brain, table = fleet.brain, fleet.brain.state._columns
        for i in range(25):
            name = fleet.rng.choice(fleet.names)
            move = fleet.rng.randrange(8)
            if move < 3:
                brain.step(fleet.request(i))
            elif move == 3:
                fleet.vary(name)
            elif move == 4:
                brain.tick(fleet.rng.choice([0.1, 2.0, 70.0]))
            elif move == 5:
                brain.step(fleet.rng.choice([joined(name, 2), MemberGone((name, 1), "died"), StoreLost()]))
            elif move == 6:
                brain.register(
                    name, fleet.rng.choice(list(Role)), incarnation=fleet.rng.choice([1, 2]), model=fleet.card
                )
            else:
                state = fleet.rng.choice(list(CordonState))
                brain.step(Cordon(name, state, kept=True))
            _check(brain, table)


def _check(brain: Brain, table: columns.Columns) -> None:
    state, now = brain.state, brain.now
    view = table.view(now, state.why_not, state._breakers.tripped)
    assert sorted(i.ref.instance_id for i in table.instances) == sorted(i.ref.instance_id for i in state._fleet)
    filled = columns.Columns(state._fleet, state._index, state._members, state._is_open)
    filled.wires = table.wires
    for row, instance in enumerate(table.instances):
        name = instance.ref.instance_id
        assert state._fleet.named(name) is instance
        assert view.able[row] == (not state.why_not(instance, now))
        filled.touch(name)
    filled.settle()
    table.settle()
    for field in {*range(columns.FIELDS)} - {columns.ColumnField.GROUP}:
        again = {i.ref.instance_id: float(filled[field][r]) for r, i in enumerate(filled.instances)}
        assert {i.ref.instance_id: float(table[field][r]) for r, i in enumerate(table.instances)} == again, field
    for which in range(fields.RareField.COUNT):
        having = {table.instances[row].ref.instance_id for row in table.rare(which)}
        assert having == {filled.instances[row].ref.instance_id for row in filled.rare(which)}, which
    for field in (columns.ColumnField.PREFILLS, columns.ColumnField.DECODES, columns.ColumnField.ALONE):
        assert (table.mask(field) == (table[field] > 0)).all()
    truth = state._index.truth
    for store in truth.stores():
        slot, owner = truth.slot(store), split_name(store)[0]
        assert slot is not None
        asked_for = sum(table.asked(1 << slot, view.able, ()).values())
        member, instance = state._members.member(owner), state._fleet.named(owner)
        there = member is not None and member.ref.incarnation == truth.incarnation(store)
        if instance is not None:
            there = there and instance.ref.incarnation == truth.incarnation(store) and not state.why_not(instance, now)
        assert bool(asked_for) == there


def test_few_are_weighed_of_many_busy_ones_too() -> None:
    """Bounds are tight: also where prompts are promised, pulled and pushed, queues wait and rows run."""
    fleet = Fleet(2, 300, alike=True)
    for i in range(400):
        fleet.brain.now += 0.002
        fleet.brain.schedule(1600, request_id=f"q{i}", keys=PROMPTS[i % 2][: 40 + i % 60])
        if i % 4 == 0:
            fleet.brain.beat(fleet.names[i % 300], Load(running_requests=i % 9, context_tokens=500 * i, free_pages=900))
        found = fleet.brain.state.explain(f"q{i}")
        assert found is not None
        assert len(found.candidates) < 60, i


def test_thousands_of_idle_instances_share_evenly_and_few_are_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(1, 300, alike=True)
    prefills = Counter[str]()
    for i in range(150):
        answer = fleet.brain.schedule(400, request_id=f"q{i}")
        if isinstance(answer, Placed):
            prefills[answer.prefill.instance_id] += 1
        found = fleet.brain.state.explain(f"q{i}")
        assert found is not None
        assert len(found.candidates) < 40
        assert found.screened > 200
    assert max(prefills.values()) == 1
