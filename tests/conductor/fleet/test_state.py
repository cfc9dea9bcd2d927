"""Who may get work: leases, incarnations, the master's word, models; and forgetting."""

import dataclasses

import pytest

from kvmesh.clock import Tick
from kvmesh.errors import ContextTooLong, InvalidRequest, ModelNotFound, Unavailable, UnknownInstance
from kvmesh.services.conductor.domain import (
    DecodeSample,
    Load,
    MemberGone,
    Ref,
    Refuse,
    Role,
    StoreLost,
)
from tests.support.conductor.brain import BLOCK, IDLE, Brain, card, chain, joined, reset


def error_of(actions: list[object]) -> Exception:
    (refused,) = actions
    assert isinstance(refused, Refuse)
    return refused.error


def test_a_ready_pair_gets_work() -> None:
    brain = Brain()
    brain.pair()
    placed = brain.placed()
    assert (placed.prefill.instance_id, placed.decode.instance_id) == ("p0", "d0")
    assert 0 < placed.ttft_s < 1
    assert 0 < placed.tbt_s < 1


def test_registered_is_not_ready_until_the_first_heartbeat_says_so() -> None:
    brain = Brain()
    brain.pair()
    brain.register("p0", Role.PREFILL, incarnation=2)
    assert "p0: no heartbeat yet" in str(brain.refused(Unavailable).error)
    brain.beat("p0", ready=False, not_ready_reason="its rank is silent")
    assert "p0: its rank is silent" in str(brain.refused(Unavailable).error)
    assert brain.view("p0").not_ready_reason == "its rank is silent"
    brain.beat("p0")
    assert brain.placed().prefill.incarnation == 2


@pytest.mark.parametrize(("gone", "role"), [("p0", "prefill"), ("d0", "decode")])
def test_the_silent_get_nothing(gone: str, role: str) -> None:
    brain = Brain()
    brain.pair()
    brain.tick(brain.settings.lease_s + 0.1)
    brain.beat("d0" if gone == "p0" else "p0")
    message = str(brain.refused(Unavailable).error)
    assert f"no ready {role} instance ({gone}: silent for 1600 ms)" in message
    assert "demo" in message
    assert not brain.view(gone).ready
    brain.beat(gone)
    brain.placed()


def test_what_is_missing_is_named_for_both_roles() -> None:
    brain = Brain()
    brain.add("p0", Role.PREFILL)
    brain.beat("p0", ready=False)
    message = str(brain.refused(Unavailable).error)
    assert "no ready prefill instance" in message
    assert "no ready decode instance (none registered)" in message


def test_an_unknown_incarnation_is_told_to_register() -> None:
    brain = Brain()
    brain.pair()
    brain.refs["p0"] = Ref("p0", "p0:1", 9)
    assert isinstance(error_of(brain.beat("p0")), UnknownInstance)
    brain.refs["nobody"] = Ref("nobody", "x:1", 1)
    assert isinstance(error_of(brain.beat("nobody")), UnknownInstance)


def test_a_new_incarnation_replaces_the_old_with_its_queue_and_cache() -> None:
    brain = Brain()
    brain.pair()
    keys = chain("x", 10)
    brain.placed(10 * BLOCK + 1, keys=keys)
    assert brain.placed(10 * BLOCK + 1, keys=keys).cached_tokens == 10 * BLOCK
    old = brain.refs["p0"]
    brain.add("p0", Role.PREFILL, incarnation=2)
    assert brain.view("p0").pending == 0
    assert brain.view("p0").queue_s == 0
    placed = brain.placed(10 * BLOCK + 1, keys=keys)
    assert (placed.prefill.incarnation, placed.cached_tokens) == (2, 0)
    brain.refs["p0"] = old
    assert isinstance(error_of(brain.beat("p0")), UnknownInstance)
    assert isinstance(error_of(brain.register("p0", Role.PREFILL, incarnation=1)), InvalidRequest)
    assert brain.view("p0").ref.incarnation == 2


def test_registering_again_keeps_what_is_known() -> None:
    brain = Brain()
    brain.pair()
    keys = chain("x", 4)
    brain.placed(4 * BLOCK + 1, keys=keys)
    assert brain.register("p0", Role.PREFILL) == []
    assert brain.view("p0").ready
    assert brain.placed(4 * BLOCK + 1, keys=keys).cached_tokens == 4 * BLOCK


@pytest.mark.parametrize("how", ["died", "left"])
def test_the_masters_word_counts_for_that_incarnation_only(how: str) -> None:
    brain = Brain()
    brain.pair()
    brain.step(reset(1, "p0", "d0"))
    brain.placed()
    brain.step(MemberGone(("p0", 1), how))
    brain.beat("p0")
    assert f"p0: the store master says it {how}" in str(brain.refused(Unavailable).error)
    brain.step(joined("p0"))
    brain.placed()
    brain.step(MemberGone(("p0", 1), how))
    brain.add("p0", Role.PREFILL, incarnation=2)  # the master has not heard of this one yet
    assert brain.placed().prefill.incarnation == 2


def test_the_dead_lose_queue_and_cache() -> None:
    brain = Brain()
    brain.pair()
    brain.step(reset(1, "p0", "d0"))
    keys = chain("x", 4)
    brain.placed(4 * BLOCK + 1, keys=keys)
    brain.step(MemberGone(("p0", 1), "died"))
    assert brain.view("p0").pending == 0
    brain.step(joined("p0"))
    assert brain.placed(4 * BLOCK + 1, keys=keys).cached_tokens == 0


def test_known_to_the_master_alone_gets_nothing() -> None:
    brain = Brain()
    brain.add("d0", Role.DECODE)
    brain.step(reset(1, "p0", "d0"))
    brain.refused(Unavailable)


def test_without_the_master_heartbeats_decide() -> None:
    brain = Brain()
    brain.pair()
    brain.step(reset(1, "p0", "d0"))
    brain.step(MemberGone(("p0", 1), "died"))
    brain.beat("p0")
    brain.refused(Unavailable)
    brain.step(StoreLost())
    brain.placed()
    brain.step(reset(1, "d0"))  # the same master still says so
    brain.refused(Unavailable)
    brain.step(StoreLost())
    brain.step(reset(2, "d0"))  # a restarted one has not heard of it yet
    brain.placed()


def test_a_death_during_a_broken_stream_is_found_in_the_snapshot() -> None:
    brain = Brain()
    brain.pair()
    brain.step(reset(1, "p0", "d0"))
    brain.step(StoreLost())
    brain.step(reset(1, "d0"))
    brain.beat("p0")
    assert "says it died" in str(brain.refused(Unavailable).error)


def test_a_pause_of_the_conductor_itself_kills_nobody() -> None:
    brain = Brain(stall_s=0.5)
    brain.pair()
    brain.now += 60
    brain.placed()
    for _ in range(10):
        brain.tick(0.2)
    brain.refused(Unavailable)


def test_an_unknown_model_is_404_once_instances_had_time_to_come_back() -> None:
    brain = Brain()
    brain.refused(Unavailable)  # nobody is there at all
    brain.pair()
    brain.refused(Unavailable, model="other")  # it may not have registered again yet
    brain.tick(brain.settings.warm_up_s + 1)
    brain.beat_all()
    refused = brain.refused(ModelNotFound, model="other")
    assert refused.reason == "unknown_model"
    assert "demo" in str(refused.error)
    brain.tick(brain.settings.forget_s + 1)
    assert brain.state.views(brain.now) == []
    brain.refused(Unavailable)  # served here before: it may come back


def test_models_do_not_mix() -> None:
    brain = Brain()
    brain.add("p0", Role.PREFILL, model=card("demo"))
    brain.add("d0", Role.DECODE, model=card("other", "f2"))
    brain.refused(Unavailable)
    brain.refused(Unavailable, model="other")
    assert sorted(m.name for m in brain.state.models(brain.now)) == ["demo", "other"]


def test_one_name_for_two_fingerprints_is_served_by_the_pair_that_fits() -> None:
    brain = Brain()
    brain.add("p-old", Role.PREFILL, model=card(fingerprint="old"))
    brain.add("p-new", Role.PREFILL, model=card(fingerprint="new"))
    brain.add("p-new2", Role.PREFILL, model=card(fingerprint="new"))
    brain.add("d-old", Role.DECODE, model=card(fingerprint="old"))
    for _ in range(5):
        assert brain.placed().prefill.instance_id == "p-old"
    assert [m.fingerprint for m in brain.state.models(brain.now)] == ["old"]
    brain.add("d-new", Role.DECODE, model=card(fingerprint="new"))
    assert [m.fingerprint for m in brain.state.models(brain.now)] == ["new"]
    assert brain.placed().prefill.instance_id.startswith("p-new")


@pytest.mark.parametrize(
    ("prompt", "fits"), [(1, True), (159, True), (160, False), (161, False), (5000, False)], ids=str
)
def test_what_fits_nowhere_is_too_long(prompt: int, fits: bool) -> None:
    brain = Brain()
    brain.add("p0", Role.PREFILL, capacity=100)
    brain.add("d0", Role.DECODE, capacity=10)
    if fits:
        brain.placed(prompt)
    else:
        refused = brain.refused(ContextTooLong, prompt)
        assert str(prompt) in str(refused.error)
        assert "longest prompt is" in str(refused.error)


def test_the_models_own_limit_counts_too() -> None:
    brain = Brain()
    brain.add("p0", Role.PREFILL, model=card(max_context_tokens=128))
    brain.add("d0", Role.DECODE, model=card(max_context_tokens=128))
    brain.placed(127)
    assert "127 tokens" in str(brain.refused(ContextTooLong, 128).error)


def test_too_long_for_the_ready_but_not_for_the_missing_is_unavailable() -> None:
    brain = Brain()
    brain.add("small", Role.PREFILL, capacity=2)
    brain.add("big", Role.PREFILL, capacity=100)
    brain.add("d0", Role.DECODE)
    assert brain.placed(1000).prefill.instance_id == "big"
    brain.beat("big", ready=False)
    assert "big" in str(brain.refused(Unavailable, 1000).error)


@pytest.mark.parametrize("prompt", [0, -1])
def test_an_empty_prompt_is_refused(prompt: int) -> None:
    brain = Brain()
    brain.pair()
    assert "prompt_tokens" in str(brain.refused(InvalidRequest, prompt).error)


def test_more_keys_than_full_blocks_are_refused() -> None:
    brain = Brain()
    brain.pair()
    brain.placed(2 * BLOCK, keys=chain("x", 2))
    assert "block_keys=3" in str(brain.refused(InvalidRequest, 2 * BLOCK, keys=chain("x", 3)).error)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"capacity": 0}, "capacity_blocks"),
        ({"incarnation": 0}, "instance.incarnation"),
        ({"model": card("")}, "model.name"),
        ({"model": card(fingerprint="")}, "model.fingerprint"),
        ({"model": card(block_tokens=0)}, "model.block_tokens"),
    ],
    ids=lambda c: c if isinstance(c, str) else "",
)
def test_a_registration_must_make_sense(change: dict[str, object], field: str) -> None:
    error = error_of(Brain().register("p0", Role.PREFILL, **change))  # type: ignore[arg-type]
    assert isinstance(error, InvalidRequest)
    assert field in str(error)


def test_an_overtaken_heartbeat_tells_no_load() -> None:
    brain = Brain()
    brain.pair()
    brain.beat("p0", dataclasses.replace(IDLE, queued_tokens=5), seq=50)
    brain.beat("p0", dataclasses.replace(IDLE, queued_tokens=9000), seq=49, ready=False)
    assert brain.view("p0").load.queued_tokens == 5
    assert brain.view("p0").ready


def test_samples_sent_twice_are_learnt_once() -> None:
    brain = Brain()
    brain.pair()
    instance = brain.state._fleet.named("p0")
    assert instance is not None
    for _ in range(3):
        brain.done("p0", "r", 100)
    assert len(instance.prefill.fit) == 1


def test_a_newcomer_starts_with_what_its_peers_have_shown() -> None:
    brain = Brain()
    brain.pair()
    for i in range(32):
        brain.done("p0", f"s{i}", 100 + 50 * i, seconds=(100 + 50 * i) * 0.01)
        brain.beat("d0", decode_samples=(DecodeSample(1 + i, 100 * i, 0.4 + i * 0.01),))
    brain.add("p1", Role.PREFILL)
    brain.add("d1", Role.DECODE)
    placed = brain.placed(1000, avoid=frozenset({"p0", "d0"}))
    assert placed.ttft_s == pytest.approx(10, rel=0.1)
    assert placed.tbt_s == pytest.approx(0.41, rel=0.1)


def test_everything_is_forgotten_in_the_end() -> None:
    brain = Brain()
    brain.pair()
    brain.placed(100, keys=chain("x", 6))
    brain.placed(100, keys=chain("y", 6))
    assert brain.view("p0").pending == 2
    for _ in range(400):
        brain.tick(0.5)
        brain.beat_all()
    assert brain.view("p0").pending == brain.view("d0").pending == 0
    assert brain.view("p0").queue_s == 0
    assert len(brain.state._index.pending) == 0
    assert len(brain.state._ledger) == 0
    brain.tick(brain.settings.forget_s + 1)
    assert brain.state.views(brain.now) == []
    assert brain.state.models(brain.now) == []


def test_a_status_line_tells_load_and_silence() -> None:
    brain = Brain()
    brain.pair()
    brain.beat("d0", Load(running_requests=3, free_pages=7))
    brain.tick(0.25)
    view = brain.view("d0")
    assert (view.load.running_requests, view.load.free_pages, view.role, view.model) == (3, 7, Role.DECODE, "demo")
    assert view.silent_s == pytest.approx(0.25)
    assert brain.step(Tick()) == []
