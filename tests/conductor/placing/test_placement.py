"""Which of several instances gets a request, and when none does."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import ContextTooLong, ModelNotFound, Overloaded, Unavailable
from kvmesh.services.conductor.domain import (
    DecodeSample,
    Load,
    MemberGone,
    Placed,
    Refuse,
    Role,
    Source,
    StoreLost,
)
from tests.support.conductor.brain import BLOCK, IDLE, Brain, card, chain, joined, reset


def mesh(prefills: int, decodes: int, seed: int = 0, **more: object) -> Brain:
    brain = Brain(seed, **more)
    for i in range(prefills):
        brain.add(f"p{i}", Role.PREFILL)
    for i in range(decodes):
        brain.add(f"d{i}", Role.DECODE)
    return brain


def test_the_prefix_draws_a_request_to_where_it_lies() -> None:
    brain = mesh(4, 1)
    keys = chain("x", 32)
    first = brain.placed(32 * BLOCK + 5, keys=keys)
    brain.now += 1
    brain.done(first.prefill.instance_id, "r1", 32 * BLOCK + 5)
    for _ in range(5):
        brain.now += 1
        brain.beat_all()
        again = brain.placed(32 * BLOCK + 5, keys=keys)
        assert again.prefill == first.prefill
        assert again.cached_tokens == 32 * BLOCK
        assert again.ttft_s < first.ttft_s


def test_the_last_token_is_never_cached() -> None:
    brain = mesh(1, 1)
    keys = chain("x", 4)
    brain.placed(4 * BLOCK, keys=keys)
    assert brain.placed(4 * BLOCK, keys=keys).cached_tokens == 3 * BLOCK


def test_a_long_queue_outweighs_a_prefix() -> None:
    brain = mesh(2, 1)
    keys = chain("x", 8)
    first = brain.placed(8 * BLOCK + 1, keys=keys)
    brain.now += 1
    brain.beat_all()
    brain.beat(first.prefill.instance_id, dataclasses.replace(IDLE, queued_tokens=100_000))
    again = brain.placed(8 * BLOCK + 1, keys=keys)
    assert again.prefill != first.prefill
    assert again.cached_tokens == 0


def test_a_burst_between_two_heartbeats_spreads() -> None:
    brain = mesh(4, 4)
    prefills, decodes = Counter[str](), Counter[str]()
    for _ in range(40):
        placed = brain.placed(500)
        prefills[placed.prefill.instance_id] += 1
        decodes[placed.decode.instance_id] += 1
    assert set(prefills.values()) == {10}
    assert set(decodes.values()) == {10}


def test_ties_are_broken_by_chance() -> None:
    firsts = {
        (placed.prefill.instance_id, placed.decode.instance_id)
        for placed in (mesh(3, 3, seed).placed() for seed in range(60))
    }
    assert len(firsts) == 9


def test_the_same_seed_places_the_same() -> None:
    def places(seed: int) -> list[tuple[str, str]]:
        brain = mesh(3, 3, seed)
        found = [brain.placed(100 + i) for i in range(20)]
        return [(p.prefill.instance_id, p.decode.instance_id) for p in found]

    assert places(5) == places(5)


def test_decode_goes_to_the_least_loaded_with_room() -> None:
    brain = mesh(1, 3)
    brain.beat("d0", Load(running_requests=30, context_tokens=60_000, free_pages=500, free_extents=500))
    brain.beat("d1", Load(running_requests=2, context_tokens=2_000, free_pages=500, free_extents=500))
    brain.beat("d2", Load(running_requests=1, context_tokens=100, free_pages=1, free_extents=1))
    assert brain.placed(400).decode.instance_id == "d1"
    brain.beat("d1", Load(running_requests=64, context_tokens=2_000, free_pages=500, free_extents=500))
    assert brain.placed(400).decode.instance_id == "d0"  # the batch of d1 has no place left


def test_failed_instances_are_avoided_while_there_are_others() -> None:
    brain = mesh(2, 2)
    for _ in range(10):
        placed = brain.placed(avoid=frozenset({"p0", "d1"}))
        assert (placed.prefill.instance_id, placed.decode.instance_id) == ("p1", "d0")
    brain.beat("p1", ready=False)
    assert brain.placed(avoid=frozenset({"p0"})).prefill.instance_id == "p0"


def test_a_second_attempt_takes_the_first_ones_work_back() -> None:
    brain = mesh(2, 2)
    first = brain.placed(1000, request_id="r", keys=chain("x", 10))
    assert brain.view(first.prefill.instance_id).queue_s > 0
    avoid = frozenset({first.prefill.instance_id, first.decode.instance_id})
    second = brain.placed(1000, request_id="r", attempt=1, keys=chain("x", 10), avoid=avoid)
    assert second.prefill != first.prefill
    assert brain.view(first.prefill.instance_id).queue_s == 0
    assert brain.view(first.prefill.instance_id).pending == 0
    assert brain.view(first.decode.instance_id).pending == 0
    again = brain.placed(1000, keys=chain("x", 10), avoid=frozenset({second.prefill.instance_id}))
    assert again.cached_tokens == 0


def test_over_the_ttft_slo_is_429_with_the_time_the_queue_needs() -> None:
    brain = mesh(2, 1)
    brain.beat("p0", dataclasses.replace(IDLE, queued_tokens=200_000))
    brain.beat("p1", dataclasses.replace(IDLE, queued_tokens=100_000))
    queue_s = brain.view("p1").queue_s
    assert queue_s > 2
    refused = brain.refused(Overloaded, 100, ttft_slo_s=1.0)
    assert refused.reason == "ttft"
    assert "TTFT" in str(refused.error)
    retry_s = refused.error.retry_after_ms / 1000
    assert retry_s == pytest.approx(queue_s - 1.0, abs=0.1)
    brain.placed(100, ttft_slo_s=queue_s + 1)
    brain.now += retry_s + 0.1
    brain.beat("d0")
    for name in ("p0", "p1"):
        view = brain.view(name)
        brain.step(joined(name, view.ref.incarnation))
    p1 = brain.state._fleet.named("p1")
    assert p1 is not None
    p1.last_seen = brain.now  # the queue has drained as predicted, unreported
    brain.state._columns.touch("p1")
    brain.placed(100, ttft_slo_s=1.2)


def test_what_no_idle_instance_can_meet_is_429_too() -> None:
    brain = mesh(1, 1)
    refused = brain.refused(Overloaded, 1000, ttft_slo_s=0.001)
    assert refused.error.retry_after_ms == 1000
    assert brain.view("p0").pending == 0
    assert brain.view("p0").queue_s == 0


def test_retry_after_is_at_least_100_ms() -> None:
    brain = mesh(1, 1)
    brain.beat("p0", dataclasses.replace(IDLE, queued_tokens=1000))
    alone = mesh(1, 1).placed(100).ttft_s
    queue_s = brain.view("p0").queue_s
    refused = brain.refused(Overloaded, 100, ttft_slo_s=alone + queue_s - 0.001)
    assert refused.error.retry_after_ms == 100


def test_over_the_tbt_slo_is_429() -> None:
    brain = mesh(1, 2)
    for i in range(64):
        for name in ("d0", "d1"):
            brain.beat(name, decode_samples=(DecodeSample(1 + i, 100 * (1 + i), 0.01 * (1 + i)),))
    for name in ("d0", "d1"):
        brain.beat(name, Load(running_requests=30, context_tokens=3000, free_pages=900, free_extents=900))
    refused = brain.refused(Overloaded, 100, tbt_slo_s=0.2)
    assert refused.reason == "tbt"
    assert 100 <= refused.error.retry_after_ms <= 2000
    assert brain.placed(100, tbt_slo_s=0.4).tbt_s == pytest.approx(0.31, rel=0.1)


def test_waiting_for_room_at_decode_counts_towards_ttft() -> None:
    brain = mesh(1, 1)
    free = brain.placed(400).ttft_s
    brain.now += 1
    brain.beat("p0")
    brain.beat("d0", Load(running_requests=4, context_tokens=4000, free_pages=3, free_extents=3))
    assert brain.placed(400).ttft_s > free + 0.1


def test_instances_of_one_model_learn_apart() -> None:
    """A slow machine gets less."""
    brain = mesh(2, 1)
    for i in range(64):
        brain.now += 0.1
        brain.done("p0", f"f{i}", 100 + 30 * i, seconds=(100 + 30 * i) * 1e-4)
        brain.done("p1", f"s{i}", 100 + 30 * i, seconds=(100 + 30 * i) * 4e-4)
        brain.beat("d0")
    counts = Counter(brain.placed(1000).prefill.instance_id for _ in range(50))
    assert counts["p0"] == pytest.approx(40, abs=2)


# ── everything together ───────────────────────────────────────────────────────────────────────────

NAMES = ("p0", "p1", "d0", "d1", "b0", "px", "dx")
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
names = st.sampled_from(NAMES)
moves = st.one_of(
    st.tuples(st.just("register"), names, st.integers(1, 3)),
    st.tuples(st.just("beat"), names, st.booleans()),
    st.tuples(st.just("load"), names, st.integers(0, 50_000)),
    st.tuples(st.just("schedule"), st.sampled_from(["demo", "other"]), st.integers(1, 3000)),
    st.tuples(st.just("schedule"), st.sampled_from(["demo", "other"]), st.integers(1, 3000)),
    st.tuples(st.just("finish"), names, st.integers(1, 20)),
    st.tuples(st.just("sample"), names, st.integers(1, 20)),
    st.tuples(st.just("gone"), names, st.integers(1, 3)),
    st.tuples(st.just("joined"), st.sampled_from((*NAMES, "mx", "m0")), st.integers(1, 3)),
    st.tuples(st.just("seal"), st.sampled_from((*NAMES, "mx", "m0")), st.integers(1, 3)),
    st.tuples(st.just("seal"), st.sampled_from((*NAMES, "mx", "m0")), st.integers(1, 3)),
    st.tuples(st.just("lost"), st.none(), st.none()),
    st.tuples(st.just("reset"), st.sets(names), st.integers(1, 2)),
    st.tuples(st.just("wait"), st.none(), st.floats(0, 2)),
)


class Reference:
    """Who may get work, kept as plainly as can be."""

    def __init__(self) -> None:
        self.life: dict[str, int] = {}
        self.heard: dict[str, float] = {}
        self.ready: dict[str, bool] = {}
        self.dead: set[tuple[str, int]] = set()
        self.members: dict[str, int] = {}
        self.awaited: set[str] = set()  # of them: the master has restarted and not mentioned them yet
        self.master = 0
        self.connected = False

    def usable(self, name: str, now: float, lease_s: float) -> bool:
        life = (name, self.life.get(name, 0))
        silent = now - self.heard.get(name, -1e9) > lease_s
        return self.ready.get(name, False) and not silent and not (self.connected and life in self.dead)


def model_of(name: str) -> str:
    return "other" if name.endswith("x") else "demo"


def _apply(brain: Brain, known: Reference, move: str, name: object, value: object) -> Placed | Refuse | None:
    match move, name, value:
        case "register", str(), int():
            fresh = known.life.get(name) != value
            model = card(model_of(name), model_of(name))
            before = brain.refs.get(name)
            if brain.register(name, ROLES[name[0]], incarnation=value, model=model):
                assert before is not None
                brain.refs[name] = before
            else:
                known.life[name], known.heard[name] = value, brain.now
                known.ready[name] = known.ready.get(name, False) and not fresh
        case "beat" | "load", str(), _ if name in brain.refs:
            ready = value if isinstance(value, bool) else True
            load = IDLE if isinstance(value, bool) else dataclasses.replace(IDLE, queued_tokens=value)
            if not brain.beat(name, load, ready=ready):
                known.heard[name], known.ready[name] = brain.now, ready
        case "finish" | "sample", str(), int() if name in brain.refs:
            if move == "finish":
                answer = brain.beat(name, finished_request_ids=(f"r{value}",))
            else:
                answer = brain.done(name, f"r{value}", 100)
            if not (answer and isinstance(answer[0], Refuse)):
                known.heard[name], known.ready[name] = brain.now, True
        case "gone", str(), int():
            brain.step(MemberGone((name, value), "died"))
            known.dead.add((name, value))
            if known.members.get(name) == value:
                del known.members[name]
                known.awaited.discard(name)
        case "joined", str(), int():
            brain.step(joined(name, value))
            if known.members.get(name, value) != value:
                known.dead.add((name, known.members[name]))
            known.dead.discard((name, value))
            known.awaited.discard(name)
            known.members[name] = value
        case "lost", _, _:
            brain.step(StoreLost())
            known.connected = False
        case "reset", set(), int():
            new = {str(n): known.life.get(str(n), 1) for n in name}
            brain.step(reset(value, *new.items()))
            absent = {n for n in known.members if n not in new}
            if value != known.master:
                known.dead.clear()
                known.awaited = absent
            replaced = {(n, i) for n, i in known.members.items() if n in new and new[n] != i}
            known.dead |= replaced | {(n, known.members[n]) for n in absent - known.awaited}
            known.dead -= set(new.items())
            known.awaited -= set(new)
            known.members = {n: known.members[n] for n in known.awaited} | new
            known.master, known.connected = value, True
        case "seal", str(), int():
            for letter in "abc"[:value]:
                brain.seal(name, chain(model_of(name) + letter, 40), incarnation=value)
        case "wait", _, float():
            brain.tick(value)
        case "schedule", str(), int():
            keys = chain(name + "abc"[value % 3], min(40, value // BLOCK))
            return brain.schedule(value, model=name, keys=keys, request_id=f"r{1 + value % 20}")
    return None


@settings(max_examples=200, deadline=None)
@given(st.lists(moves, max_size=70), st.integers(0, 3))
def test_never_on_the_dead_the_unready_or_another_model(steps: list[tuple[str, object, object]], seed: int) -> None:
    brain = Brain(seed, slo_ttft_s=1e9, slo_tbt_s=1e9, forget_s=1e9, member_grace_s=1e9)
    known = Reference()
    for move, name, value in steps:
        answer = _apply(brain, known, move, name, value)
        lease_s = brain.settings.lease_s
        if answer is not None:
            able = [n for n in known.life if model_of(n) == name and known.usable(n, brain.now, lease_s)]
            roles = {ROLES[n[0]] for n in able}
            possible = any(r.prefills for r in roles) and any(r.decodes for r in roles)
            assert isinstance(answer, Placed) == possible
            if isinstance(answer, Placed):
                assert answer.prefill.instance_id in able
                assert answer.decode.instance_id in able
                assert ROLES[answer.prefill.instance_id[0]].prefills
                assert ROLES[answer.decode.instance_id[0]].decodes
                assert answer.prefill.incarnation == known.life[answer.prefill.instance_id]
                _check_pulls(brain, known, answer)
                assert answer.ttft_s >= 0
                assert answer.tbt_s >= 0
            else:
                assert isinstance(answer.error, Unavailable | ContextTooLong | ModelNotFound)
        assert all(view.queue_s >= 0 and view.pending >= 0 for view in brain.state.views(brain.now))
    _quiet_down(brain, known)


def _check_pulls(brain: Brain, known: Reference, placed: Placed) -> None:
    """Only blocks that are there, at known members that may be asked, and never at who asks."""
    for puller, ranges in ((placed.prefill, placed.pulls), (placed.decode, placed.decode_pulls)):
        assert len(ranges) <= 8
        for r in ranges:
            life = (r.instance_id, r.incarnation)
            assert r.instance_id != puller.instance_id
            assert known.members.get(r.instance_id) == r.incarnation
            assert life not in known.dead
            if r.instance_id in known.life:
                assert known.life[r.instance_id] == r.incarnation
                assert known.usable(r.instance_id, brain.now, brain.settings.lease_s)
            assert brain.state._index.count(life) >= r.blocks > 0
    firsts = [r.first_block for r in placed.pulls]
    assert firsts == sorted(set(firsts))
    told = [Source(b) for b in placed.sources]
    assert told == sorted(told, key=[Source.AT_DECODE, Source.DECODE_PULLS, Source.PREFILL_PUSHES].index)
    fetched = sum(r.blocks for r in placed.decode_pulls)
    assert told.count(Source.DECODE_PULLS) >= fetched
    assert bool(fetched) == (Source.DECODE_PULLS in told)


def _quiet_down(brain: Brain, known: Reference) -> None:
    """Once every placement's time is over and the instances report idle, nothing is left of the load."""
    brain.step(StoreLost())
    for _ in range(3):
        brain.tick(100_000.0)
        for name, incarnation in known.life.items():
            assert brain.refs[name].incarnation == incarnation
            assert brain.beat(name) == []
    for view in brain.state.views(brain.now):
        assert (view.queue_s, view.pending) == (0, 0)
    assert len(brain.state._ledger) == 0
