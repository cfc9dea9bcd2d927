"""Each plain policy does what its name says, among instances that may get work, with right predictions."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import ConfigError, Overloaded
from kvmesh.rpc import channels
from kvmesh.rpc.pb import conductor_pb2, conductor_pb2_grpc
from kvmesh.services.conductor import main
from kvmesh.services.conductor.config import ConductorConfig
from kvmesh.services.conductor.domain import Cordon, CordonState, Load, Role
from kvmesh.services.conductor.main import settings_of
from kvmesh.services.conductor.policies.registry import BUILT_IN
from kvmesh.services.conductor.policies.session_hash import POINTS, Ring, Rings
from kvmesh.services.conductor.settings import AffinitySettings, ThresholdMode
from tests.support.conductor.brain import BLOCK, Brain, chain, reset
from tests.support.services import running

POLICIES = [*BUILT_IN]
PLAIN = [p for p in POLICIES if p not in ("kvcache", "cache_aware")]


def mesh(policy: str, prefills: int = 4, decodes: int = 4, *, seed: int = 0, **more: Any) -> Brain:
    brain = Brain(seed, policy=policy, **{"lease_s": 1e9, **more})
    for n in range(prefills):
        brain.add(f"p{n}", Role.PREFILL)
    for n in range(decodes):
        brain.add(f"d{n}", Role.DECODE)
    return brain


def run(brain: Brain, requests: int, *, done: bool = True, **more: Any) -> list[tuple[str, str]]:
    """Where so many requests go; each is over before the next one comes, unless not `done`."""
    went = []
    for _ in range(requests):
        placed = brain.placed(**more)
        went.append((placed.prefill.instance_id, placed.decode.instance_id))
        if done:
            for name in went[-1]:
                brain.beat(name, finished_request_ids=(f"r{brain.requests}",))
        brain.now += 0.5
    return went


def test_random_goes_everywhere_alike() -> None:
    went = run(mesh("random", seed=7), 800)
    for half in zip(*went, strict=True):
        counts = Counter(half)
        assert len(counts) == 4
        chi_square = sum((n - 200) ** 2 / 200 for n in counts.values())
        assert chi_square < 16.3, counts  # 3 degrees of freedom, 1 in 1,000
    pairs = Counter(went)
    assert len(pairs) == 16, "the halves are drawn apart"


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_chooses_the_same(policy: str) -> None:
    one, same = (run(mesh(policy, seed=3), 40, done=False) for _ in range(2))
    assert one == same


def test_round_robin_takes_turns() -> None:
    brain = mesh("round_robin", 3, 2)
    prefills, decodes = zip(*run(brain, 7), strict=True)
    assert prefills == ("p0", "p1", "p2", "p0", "p1", "p2", "p0")
    assert decodes == ("d0", "d1", "d0", "d1", "d0", "d1", "d0")


def test_round_robin_while_instances_come_and_go() -> None:
    """A newcomer is next, then in line; nobody loses or gains a turn because another one went."""
    brain = mesh("round_robin", 3, 1)
    prefill = lambda n: [p for p, _ in run(brain, n)]  # noqa: E731
    assert prefill(2) == ["p0", "p1"]
    brain.beat("p2", ready=False)
    assert prefill(3) == ["p0", "p1", "p0"]
    brain.add("p3", Role.PREFILL)
    brain.beat("p2")
    assert prefill(8) == ["p2", "p3", "p1", "p0", "p2", "p3", "p1", "p0"]


def test_least_loaded_has_the_shortest_queue_and_the_least_tbt() -> None:
    """Whatever it has cached."""
    brain = mesh("least_loaded", 3, 3)
    brain.step(reset(1, "p0", "p1", "p2", "d0", "d1", "d2"))
    keys = chain("k", 10)
    brain.seal("p0", keys)
    for name, tokens in (("p0", 4000), ("p1", 200), ("p2", 3000)):
        brain.beat(name, Load(queued_requests=1, queued_tokens=tokens, free_pages=1000, free_extents=1000))
    for name, rows in (("d0", 9), ("d1", 7), ("d2", 2)):
        load = Load(running_requests=rows, context_tokens=rows * 1000, free_pages=1000, free_extents=1000)
        brain.beat(name, load)
    placed = brain.placed(10 * BLOCK + 1, keys=keys)
    assert (placed.prefill.instance_id, placed.decode.instance_id) == ("p1", "d2")
    assert placed.cached_tokens == 0 and not placed.pulls


def test_power_of_two_takes_the_better_of_two() -> None:
    """Of four instances whose queues differ the worst is never the better one of two, and the best is in half of the
    draws: 1/2, 1/3, 1/6, 0."""
    brain = mesh("power_of_two", 4, 1, seed=5)
    counts: Counter[str] = Counter()
    for _ in range(600):
        for n in range(4):
            load = Load(queued_requests=1, queued_tokens=1 + 2000 * n, free_pages=1000, free_extents=1000)
            brain.beat(f"p{n}", load)
        counts[run(brain, 1)[0][0]] += 1
    assert counts["p3"] == 0
    for name, share in (("p0", 1 / 2), ("p1", 1 / 3), ("p2", 1 / 6)):
        assert abs(counts[name] - 600 * share) < 4 * (600 * share * (1 - share)) ** 0.5, counts


def test_power_of_two_with_one_instance() -> None:
    assert set(run(mesh("power_of_two", 1, 1), 3)) == {("p0", "d0")}


def test_cache_aware_never_fetches() -> None:
    """Where its own prefix is, it goes; where that instance is busy, another one computes all of it."""
    for policy, pulled in (("kvcache", 64), ("cache_aware", 0)):
        brain = mesh(policy, 2, 1)
        brain.step(reset(1, "p0", "p1", "d0"))
        keys = chain("k", 64)
        brain.seal("p0", keys)
        for name in ("p0", "p1"):  # what a pull takes is known: next to nothing
            for n in range(5):
                brain.done(name, f"warm{n}", 100 + n, seconds=0.1 * (100 + n))
        assert brain.placed(64 * BLOCK + 1, keys=keys).cached_tokens == 64 * BLOCK
        brain.beat("p0", Load(queued_requests=9, queued_tokens=90_000, free_pages=1000, free_extents=1000))
        placed = brain.placed(64 * BLOCK + 1, keys=keys)
        assert placed.prefill.instance_id == "p1"
        assert sum(r.blocks for r in placed.pulls) == pulled, policy


def test_a_session_stays_where_it_is() -> None:
    brain = mesh("session_hash", 8, 8)
    homes = {name: set(run(brain, 5, session=name)) for name in (f"s{n}" for n in range(40))}
    assert all(len(went) == 1 for went in homes.values())
    assert len({went for found in homes.values() for went in found}) > 10, "sessions spread"
    before = dict(homes)
    brain.beat("p3", ready=False)
    after = {name: set(run(brain, 1, session=name)) for name in homes}
    moved = [name for name in homes if {p for p, _ in before[name]} != {p for p, _ in after[name]}]
    assert moved == [name for name in homes if {p for p, _ in before[name]} == {"p3"}], "only those move"


def test_without_a_session_its_first_block_counts() -> None:
    brain = mesh("session_hash", 8, 8)
    one = {went for n in range(4) for went in run(brain, 1, prompt=100 + n, keys=chain("k", 6))}
    assert len(one) == 1
    others = {went for n in range(20) for went in run(brain, 1, keys=chain(f"k{n}", 6))}
    assert len(others) > 5
    assert len({p for p, _ in run(brain, 20)}) > 2, "nothing to go by: the request itself"


def test_a_hot_session_is_shared_out() -> None:
    """At most 1.25 times the mean, rounded up."""
    brain = mesh("session_hash", 4, 4)
    counts = Counter(p for p, _ in run(brain, 40, session="hot", done=False))
    assert sum(counts.values()) == 40 and max(counts.values()) <= 13, counts


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 99), min_size=1, max_size=12), st.lists(st.binary(max_size=8), max_size=60))
def test_no_name_has_more_than_its_share(names: set[int], keys: list[bytes]) -> None:
    rings, known = Rings(), tuple(sorted(map(str, names)))
    loads = [0] * len(known)
    for key in keys:
        loads[rings.pick(key, known, loads)] += 1
        assert max(loads) <= -(-1.25 * (sum(loads)) // len(known))


def test_a_ring_is_about_even() -> None:
    ring = Ring([f"i{n}" for n in range(10)])
    counts = Counter(ring.first(f"k{n}".encode(), lambda _: True) for n in range(5000))
    spread = 6 * 500 / POINTS**0.5
    assert all(abs(counts[n] - 500) < spread for n in range(10)), counts


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_who_may_get_no_work_gets_any(policy: str) -> None:
    brain = mesh(policy, 6, 6, seed=11, lease_s=1.5)
    brain.beat("p0", ready=False)
    brain.beat("d0", ready=False)
    brain.step(Cordon("p1", CordonState.CORDONED, "work"))
    brain.step(Cordon("d1", CordonState.DRAINING, "work"))
    brain.register("p2", Role.PREFILL, incarnation=2)  # a new life that is not heard of
    brain.now += 1.0
    for name in ("p0", "p1", "p3", "p4", "p5", "d0", "d1", "d3", "d4", "d5"):
        brain.beat(name, ready=name not in ("p0", "d0"))
    brain.now += 1.0  # d2 has been silent for longer than its lease
    went = [
        (placed.prefill.instance_id, placed.decode.instance_id)
        for placed in (brain.placed(avoid=frozenset({"p3", "d3"}), session="s") for _ in range(60))
    ]
    assert {p for p, _ in went} <= {"p4", "p5"} and {d for _, d in went} <= {"d4", "d5"}, policy


@pytest.mark.parametrize("policy", PLAIN)
def test_the_prediction_is_that_of_the_mesh(policy: str) -> None:
    """One pair: what a plain policy says of it is what Algorithm 1 says."""
    answers = []
    for each in (policy, "cache_aware"):
        brain = mesh(each, 1, 1)
        brain.step(reset(1, "p0", "d0"))
        brain.seal("p0", chain("k", 5))
        brain.seal("d0", chain("k", 3))
        brain.beat("p0", Load(queued_requests=1, queued_tokens=500, free_pages=1000, free_extents=1000))
        answers.append(brain.placed(10 * BLOCK, keys=chain("k", 10)))
    assert answers[0] == answers[1] and answers[0].cached_tokens == 5 * BLOCK


@pytest.mark.parametrize("policy", PLAIN)
def test_it_refuses_by_the_slo_of_the_one_it_took(policy: str) -> None:
    brain = mesh(policy, 1, 1)
    brain.beat("p0", Load(queued_requests=9, queued_tokens=1_000_000, free_pages=1000, free_extents=1000))
    assert brain.refused(Overloaded, ttft_slo_s=0.5).reason == "ttft"
    assert brain.placed(ttft_slo_s=1e6).ttft_s > 0.5


@pytest.mark.parametrize("policy", PLAIN)
def test_coupled_instances_keep_what_they_get(policy: str) -> None:
    brain = Brain(policy=policy)
    for n in range(3):
        brain.add(f"c{n}", Role.BOTH)
    assert all(p == d for p, d in run(brain, 12))
    lone = Brain(policy=policy)
    lone.add("d0", Role.DECODE, local_prefill_tokens=200)
    assert run(lone, 1) == [("d0", "d0")], "nobody else computes prompts"


@pytest.mark.parametrize("policy", PLAIN)
def test_explain_tells_whom_it_took(policy: str) -> None:
    brain = mesh(policy, 3, 3)
    placed = brain.placed()
    decision = brain.state.explain("r1")
    assert decision is not None
    chosen = {c.ref.instance_id: decision.verdict(c) for c in decision.candidates if decision.is_chosen(c)}
    assert chosen == {placed.prefill.instance_id: "chosen", placed.decode.instance_id: "chosen"}
    took_another = f"the policy {policy} took another"
    assert sum(decision.verdict(c) == took_another for c in decision.candidates) == 4


def test_the_service_is_told_by_its_configuration() -> None:
    for policy in POLICIES:
        assert settings_of(ConductorConfig(policy=policy)).policy == policy
    told = next(f for f in dataclasses.fields(ConductorConfig) if f.name == "policy").metadata["choices"]
    assert set(told) == set(POLICIES)
    made = settings_of(ConductorConfig(threshold_mode="adaptive", session_affinity_ms=50, origin_affinity_ms=20))
    assert made.threshold_mode is ThresholdMode.ADAPTIVE and made.affinity == AffinitySettings(0.05, 0.02)
    with pytest.raises(ConfigError, match="session_affinity_ms=-1"):
        ConductorConfig(session_affinity_ms=-1)


async def test_status_tells_policy_and_threshold() -> None:
    config = ConductorConfig(policy="round_robin", balancing_threshold=1.5)
    async with running(main.run, config) as service, channels.connect(service.address) as channel:
        stub = conductor_pb2_grpc.ConductorStub(channel)
        told = await stub.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=10)
    assert (told.policy, told.balancing_threshold) == ("round_robin", 1.5)
