"""Scale hints: so many instances that each pool runs at the target, and no change of mind without a reason."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.clock import Tick
from kvmesh.errors import ConfigError
from kvmesh.services.conductor import mapping
from kvmesh.services.conductor.balance.demand import Demand, Demands
from kvmesh.services.conductor.balance.gauges import MAX_LOAD, ScaleGauges
from kvmesh.services.conductor.balance.scale import CALM, Hint, Scale
from kvmesh.services.conductor.balance.tally import MIXED
from kvmesh.services.conductor.balance.uses import MAX_MODELS, ModelUses
from kvmesh.services.conductor.config import ConductorConfig
from kvmesh.services.conductor.domain import Action, Event, Lane, Load, Refuse, RequestsHeld, Role, Schedule
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.settings import AdmissionSettings, BalanceSettings, Settings
from kvmesh.telemetry import names
from tests.conductor.balance.test_roles import instance, tallied
from tests.support.conductor.brain import Brain
from tests.support.conductor.loop import Loop

P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH
SETTINGS = BalanceSettings(window_s=2.0, target_load=0.7)


class Pools:
    def __init__(self, *roles: Role, **settings: Any) -> None:
        self.scale = Scale(dataclasses.replace(SETTINGS, **settings))
        self.uses = ModelUses()
        self.now = 0.0
        self.have(*roles)

    def have(self, *roles: Role) -> None:
        self.fleet = [instance(f"i{n}", role) for n, role in enumerate(roles)]

    def look(self, demand: Demand, seconds: float = 1.0, watched_s: float = 60.0) -> dict[Role, int]:
        self.now += seconds
        tallies = {"demo": tallied(self.fleet, self.now)} if self.fleet else {}
        self.uses.look(tallies, self.now)
        self.scale.look(tallies, {"demo": (demand, watched_s)} if self.fleet else {}, self.uses, self.now)
        return {hint.role: hint.change for hint in self.scale.hints}


def test_places_of_one_instance_count_once() -> None:
    """Two instances of two places each: work for 1.2 places is work for 0.6 instances."""
    pools = Pools(P)
    pools.fleet += [instance(name, D) for name in ("d0", "d0.dp1", "d1", "d1.dp1")]
    assert pools.look(Demand(0.1, 1.2)) == {P: 0, D: 0}
    assert [(hint.role, hint.instances) for hint in pools.scale.hints] == [(P, 1), (D, 2)]
    assert pools.look(Demand(0.1, 4.9)) == {P: 0, D: 2}  # 2.45 / 0.7 = 3.5


def test_more_are_wanted_at_once_and_fewer_after_a_while_of_calm() -> None:
    pools = Pools(P, P, D)
    assert pools.look(Demand(1.2, 0.4)) == {P: 0, D: 0}
    assert pools.look(Demand(3.1, 0.4)) == {P: 3, D: 0}  # 3.1 / 0.7 = 4.4
    pools.have(P, P, P, P, P, D)
    assert pools.look(Demand(3.1, 0.4)) == {P: 0, D: 0}
    calm_s = CALM * SETTINGS.window_s
    assert pools.look(Demand(0.5, 0.4)) == {P: 0, D: 0}
    assert pools.look(Demand(0.5, 0.4), seconds=calm_s - 0.1) == {P: 0, D: 0}
    assert pools.look(Demand(3.1, 0.4)) == {P: 0, D: 0}, "the calm was over: it begins again"
    assert pools.look(Demand(0.5, 0.4)) == {P: 0, D: 0}
    assert pools.look(Demand(0.5, 0.4), seconds=calm_s) == {P: -4, D: 0}


def test_the_last_one_stays_and_none_of_a_role_is_one_too_few() -> None:
    pools = Pools(P)
    pools.look(Demand())
    assert pools.look(Demand(), seconds=1000.0) == {P: 0, D: 1}
    assert pools.scale.hints[1].load == 0.0
    pools.look(Demand(0.1, 0.0))
    assert pools.scale.hints[1].load == float("inf")


def test_instances_that_went_are_wanted_again_only_if_they_are_missed() -> None:
    pools = Pools(P, P, P, D)
    pools.look(Demand(1.9, 0.1))
    pools.have(P, P, D)
    assert pools.look(Demand(1.9, 0.1)) == {P: 1, D: 0}
    pools.have(P, D)
    assert pools.look(Demand(0.3, 0.1)) == {P: 0, D: 0}


def test_coupled_instances_are_a_pool_of_their_own() -> None:
    pools = Pools(B, B)
    changes = pools.look(Demand(1.5, 1.5))
    assert changes == {B: 4}  # 3 / MIXED / 0.7 = 5.4
    (hint,) = pools.scale.hints
    assert abs(hint.load - 3.0 / (2 * MIXED)) < 1e-9
    assert (hint.instances, hint.role) == (2, B)
    pools.have(B, P)
    assert set(pools.look(Demand(0.5, 0.2))) == {B, P}


def test_nothing_is_wanted_before_the_load_is_known() -> None:
    pools = Pools(P, D)
    assert pools.look(Demand(50.0, 50.0), watched_s=1.0) == {P: 0, D: 0}
    assert all("watched" in hint.reason for hint in pools.scale.hints)


@given(level=st.floats(0.0, 6.0), seed=st.integers(0, 1 << 30), there=st.integers(1, 6))
@settings(max_examples=25, deadline=None)
def test_noise_of_a_tenth_changes_the_hint_at_most_twice(level: float, seed: int, there: int) -> None:
    """Once up, and once down after a calm that noise had broken before; with an autoscaler that follows each hint."""
    pools, rng = Pools(*[P] * there, D), random.Random(seed)
    wanted = []
    for _ in range(200):
        change = pools.look(Demand(level * rng.uniform(0.95, 1.05), 0.3))[P]
        there += change
        assert there >= 1
        pools.have(*[P] * there, D)
        wanted.append(there)
    changes = sum(a != b for a, b in itertools.pairwise(wanted))
    assert changes <= 2, wanted
    assert level <= 0.9 * there


# ── what it goes by ───────────────────────────────────────────────────────────────────────────────


def look(demands: Demands, fleet: list[Instance], now: float) -> tuple[Demand, float]:
    return demands.look({"demo": tallied(fleet, now, demands.tally("demo"))}, now)["demo"]


def asked(name: str, **more: Any) -> Schedule:
    return Schedule(
        **({"request_id": name, "attempt": 0, "model": "demo", "prompt_tokens": 2000, "max_tokens": 9} | more)
    )


def test_demand_counts_who_was_refused_but_neither_attempts_nor_the_batch_lane() -> None:
    demands = Demands(Settings(slo_tbt_s=1.0, balance=BalanceSettings(window_s=4.0)))
    fleet = [instance("p", P), instance("d", D)]
    now = 0.0
    demand = Demand()
    for n in range(200):
        now += 0.1
        demands.asked(asked(f"r{n}"), now)
        demands.asked(asked(f"r{n}", attempt=1), now)
        demands.asked(asked(f"b{n}", lane=Lane.BATCH), now)
        demand, watched_s = look(demands, fleet, now)
    whole_s = fleet[0].seconds_per_token() * 2000
    assert abs(demand.prefill - 10 * whole_s) < 0.05 * 10 * whole_s
    assert watched_s > 19
    assert demands.look({}, now) == {}


def test_rows_count_at_the_slo_of_their_model_or_by_their_room() -> None:
    """Ten rows where one instance carries 20 within its SLO: half of it, whatever other models are held to."""
    d = instance("d", D)
    d.load = Load(running_requests=10, context_tokens=1_000)
    d.batch.report(d.load, 0.0)
    step_s = d.decode.predict(20, 2_000)
    room = {"demo": 10 / 20, "other": 10 / 32}  # by its SLO; by max_running, as 10 s hold nobody back
    for name, right in room.items():
        demands = Demands(Settings(slo_tbt_s=10.0, admission=AdmissionSettings(by_model=((name, 1.0, step_s),))))
        demands.asked(asked("r"), 0.0)
        assert abs(look(demands, [instance("p", P), d], 0.0)[0].decode - right) < 1e-9
    d.capacity_blocks = 54  # 100 tokens each take 6.75 blocks, as they end anywhere in their last one
    demands = Demands(Settings(slo_tbt_s=10.0))
    demands.asked(asked("r"), 0.0)
    assert look(demands, [d], 0.0)[0].decode == 10 / 8


def test_who_waits_for_prefill_is_no_work_for_decode() -> None:
    """Decode instances count whoever they wait for, too."""
    p, d = instance("p", P), instance("d", D)
    p.load = Load(queued_requests=12, queued_tokens=24_000)
    d.load = Load(running_requests=4, waiting_requests=14, context_tokens=400)
    d.batch.report(d.load, 0.0)
    demands = Demands(Settings(slo_tbt_s=10.0))
    demands.asked(asked("r"), 0.0)
    assert look(demands, [p, d], 0.0)[0].decode == 6 / 32


def test_a_loop_in_overload_asks_for_what_it_needs() -> None:
    """2.2 instances' worth of prompts at two: the hint says four (2.2 / 0.7 = 3.2 and what is queued)."""
    loop = Loop(2, 1, balance=BalanceSettings(window_s=3.0, replicate=False))
    loop.run(20, 13.0, 3000, 8)
    found = {hint.role: hint for hint in loop.brain.state.hints(loop.brain.now)}
    assert found[P].instances == 2
    assert found[P].change == 2
    assert 1.05 < found[P].load < 1.3
    assert found[D].change == 0


def test_who_leads_and_places_nothing_wants_what_the_one_that_places_wants() -> None:
    """A gateway stays with one conductor, which need not be the one that leads: that sees what instances compute."""
    balance = BalanceSettings(window_s=3.0, replicate=False)
    placing, leader = Loop(2, 1, balance=balance), Brain(balance=balance)
    step = placing.brain.step

    def heard_by_both(event: Event) -> list[Action]:
        if not isinstance(event, Schedule):
            leader.now = placing.brain.now
            leader.step(event)
        return step(event)

    placing.brain.step = heard_by_both  # type: ignore[method-assign]
    for name, site in placing.sites.items():
        placing._register(name)
        placing._beat(name, site)
    placing.run(20, 13.0, 3000, 8)
    mine, theirs = ({h.role: h for h in brain.state.hints(brain.now)} for brain in (leader, placing.brain))
    assert mine[P].change == theirs[P].change == 2
    assert mine[P].load == pytest.approx(theirs[P].load, rel=0.2)
    assert mine[D].change == theirs[D].change == 0


@pytest.mark.parametrize(
    ("history", "why"),
    [
        ((1.4,), "work for 1.40 instances; at a load of 0.70 that wants 2"),
        (
            (2.0, 1.3),
            "work for 1.30 instances; at a load of 0.70 that wants 2; "
            "3 were, and are until so little has lasted for 12 s",
        ),
        ((0.9,), "work for 0.90 instances; at a load of 0.70 that wants 2"),
        ((0.6,), "work for 0.60 instances; at a load of 0.70 that wants 1; 2 stay until so little has lasted for 12 s"),
        ((1.4, 1.6), "work for 1.60 instances; 2 carry it at a load of 0.80, more are wanted above 0.84"),
    ],
)
def test_a_reason_says_what_is_wanted_and_why_that_many(history: tuple[float, ...], why: str) -> None:
    pools = Pools(P, P, D)
    for demand in history:
        pools.look(Demand(demand, 0.1))
    assert pools.scale.hints[0].reason == why


@pytest.mark.parametrize("target", [0.0, 1.5, float("nan")])
def test_a_target_that_cannot_be(target: float) -> None:
    with pytest.raises(ConfigError, match=f"scale_target={target}: must be at least 0.05, at most 1"):
        ConductorConfig(scale_target=target)


# ── to zero and back ──────────────────────────────────────────────────────────────────────────────


def test_nobody_wants_it_for_long_enough_and_then_somebody_does() -> None:
    pools = Pools(P, D, zero_after_s=100.0)
    assert pools.look(Demand(), seconds=0.0) == {P: 0, D: 0}
    assert pools.look(Demand(), seconds=99.9) == {P: 0, D: 0}
    assert pools.look(Demand(), seconds=0.1) == {P: -1, D: -1}
    assert pools.scale.hints[0].reason == "nobody has wanted it for 100 s; scale_to_zero_after_s=100"
    pools.have()
    assert pools.look(Demand()) == {P: 0, D: 0}, "a wish of none is told, not silence"
    assert [hint.instances for hint in pools.scale.hints] == [0, 0]
    pools.uses.held([("demo", 3)], pools.now)
    assert pools.look(Demand(), seconds=0.0) == {P: 1, D: 1}
    assert pools.scale.hints[0].reason == "no instance is there, and a gateway holds requests for one (3)"
    assert pools.look(Demand(), seconds=99.0) == {P: 1, D: 1}, "it may take so long to start"
    assert pools.look(Demand(), seconds=1.0) == {P: 0, D: 0}
    pools.uses.used("demo", pools.now)
    assert pools.look(Demand(), seconds=1.0) == {P: 1, D: 1}
    pools.have(P)
    assert pools.look(Demand(), watched_s=0.0) == {P: 0, D: 1}, "the other one is still starting"
    pools.have(P, D)
    assert pools.look(Demand(), seconds=99.0, watched_s=0.0) == {P: 0, D: 0}
    assert pools.look(Demand(), seconds=99.0) == {P: 0, D: 0}, "it has come only now"
    assert pools.look(Demand(), seconds=1.0) == {P: -1, D: -1}


def test_what_was_wanted_before_it_broke_is_wanted_again() -> None:
    pools = Pools(P, D)
    pools.look(Demand(3.1, 0.4))
    pools.have()
    assert pools.look(Demand()) == {P: 5, D: 1}
    assert pools.look(Demand(), seconds=100.0) == {}, "without the setting nothing is said of what nobody wants"


def test_an_instance_with_a_request_is_not_idle() -> None:
    pools = Pools(P, D, zero_after_s=10.0)
    pools.fleet[1].load = Load(running_requests=1, context_tokens=100)
    for _ in range(5):
        assert pools.look(Demand(), seconds=6.0) == {P: 0, D: 0}
    pools.fleet[1].load = Load()
    assert pools.look(Demand(), seconds=10.0) == {P: -1, D: -1}


def test_of_a_model_that_was_never_here_each_pool_takes_one() -> None:
    """Once its instances have had the time to register with a conductor that has just started."""
    pools = Pools()
    pools.uses.held([("demo", 1)], pools.now)
    assert pools.look(Demand(), seconds=1.0) == {}
    pools.uses.held([("demo", 1)], pools.now)
    assert pools.look(Demand(), seconds=1.0) == {P: 1, D: 1, B: 1}


def test_strangers_names_take_no_more_room_than_there_is() -> None:
    uses = ModelUses()
    uses.look({"demo": tallied([instance("p", P)], 0.0)}, 0.0)
    uses.held([(f"m{n}", 1) for n in range(2 * MAX_MODELS)], 1.0)
    assert len(uses.absent) == MAX_MODELS - 1 and uses.of("demo") is not None
    assert uses.of(f"m{2 * MAX_MODELS - 1}") is not None


@given(
    happens=st.lists(
        st.tuples(st.sampled_from(("look", "asked", "held", "start", "stop")), st.floats(0.0, 60.0)), max_size=30
    )
)
@settings(max_examples=25, deadline=None)
def test_none_is_wanted_exactly_when_nobody_has_wanted_it_for_so_long(happens: list[tuple[str, float]]) -> None:
    pools, known, used = Pools(zero_after_s=100.0), False, -math.inf
    for what, seconds in happens:
        pools.now += seconds
        if what == "asked" and known:  # the conductor counts models that it has seen
            pools.uses.used("demo", pools.now)
            used = pools.now
        if what == "held":
            pools.uses.held([("demo", 1)], pools.now)
            used, known = pools.now, True
        if what == "start" and not pools.fleet:
            pools.have(P, D)
            used, known = pools.now, True
        if what == "stop":
            pools.have()
        changes = pools.look(Demand(), seconds=0.0)
        wanted = {role: len([i for i in pools.fleet if i.role is role]) + change for role, change in changes.items()}
        if pools.now - used >= 100.0:
            assert not any(wanted.values())
        elif wanted:
            assert all(wanted.values()), (wanted, pools.now - used)
        else:
            assert not pools.fleet, "of none that was never here, for a moment"


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_an_idle_time_that_cannot_be(seconds: float) -> None:
    with pytest.raises(ConfigError, match="scale_to_zero_after_s"):
        ConductorConfig(scale_to_zero_after_s=seconds)


def test_the_brain_goes_by_what_gateways_hold_and_by_requests_that_it_refuses() -> None:
    balance = BalanceSettings(window_s=1.0, replicate=False, zero_after_s=30.0)
    brain = Brain(balance=balance)

    def wants(seconds: float, *, beats: bool = False) -> dict[Role, int]:
        for _ in range(round(seconds / 0.5)):
            brain.now += 0.5
            if beats:
                brain.beat_all()
            brain.step(Tick())
        return {hint.role: hint.instances + hint.change for hint in brain.state.hints(brain.now)}

    brain.pair()
    assert wants(29, beats=True) == {P: 1, D: 1}
    assert wants(2, beats=True) == {P: 0, D: 0}
    assert wants(70) == {P: 0, D: 0}, "they have gone"
    brain.step(RequestsHeld((("demo", 2),)))
    assert wants(1) == {P: 1, D: 1}
    assert wants(30) == {P: 0, D: 0}
    assert isinstance(brain.schedule(), Refuse)
    assert wants(1) == {P: 1, D: 1}


# ── how it is shown ───────────────────────────────────────────────────────────────────────────────


def value(gauge: Any, *labels: str) -> float | None:
    found = {
        sample.labels["role"]: sample.value for sample in gauge.collect()[0].samples if sample.labels["model"] == "m"
    }
    return found.get(labels[0])


def test_gauges_forget_pools_that_are_no_more() -> None:
    shown = ScaleGauges()
    shown.show([Hint("m", P, 2, 3, 1.5, ""), Hint("m", D, 0, 1, float("inf"), "")])
    assert value(names.CONDUCTOR_SCALE_HINT, "prefill") == 3
    assert value(names.CONDUCTOR_SCALE_WANTED, "prefill") == 5
    assert value(names.CONDUCTOR_POOL_LOAD, "decode") == MAX_LOAD
    shown.show([Hint("m", P, 2, -1, 0.1, "")])
    assert value(names.CONDUCTOR_SCALE_HINT, "prefill") == -1
    assert value(names.CONDUCTOR_SCALE_HINT, "decode") is None
    shown.show([])
    assert value(names.CONDUCTOR_SCALE_WANTED, "prefill") is None


def test_a_hint_on_the_wire() -> None:
    told = mapping.hint_out(Hint("m", D, 3, -1, 0.25, "why"))
    assert (told.model, told.instances, told.change, told.load, told.reason) == ("m", 3, -1, 0.25, "why")
