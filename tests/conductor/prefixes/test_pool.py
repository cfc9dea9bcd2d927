"""Blocks of those who die, restart or promise; what pulls teach and refuse; several models."""

import dataclasses
from collections import Counter

import pytest

from kvmesh.errors import Overloaded
from kvmesh.services.conductor.domain import MemberGone, OutOfStep, Placed, PrefillSample, Role, StoreLost
from tests.support.conductor.brain import BLOCK, IDLE, Brain, card, chain, joined, reset
from tests.support.conductor.sharing import BYTES, LONG, X, mesh, other, ranges

# ── lives and masters ─────────────────────────────────────────────────────────────────────────────


def test_a_restarted_instances_old_blocks_draw_no_request() -> None:
    brain = mesh(2, 1)
    brain.seal("p0", X)
    assert brain.view("p0").indexed_blocks == 64
    brain.add("p0", Role.PREFILL, incarnation=2)  # the master has not heard of it yet
    assert brain.view("p0").indexed_blocks == 0
    for _ in range(4):
        placed = brain.placed(LONG, keys=X, request_id="r")
        assert (placed.cached_tokens, placed.pulls) == (0, ())
    brain.step(joined("p0", 2))
    placed = brain.placed(LONG, keys=X, request_id="r")
    assert (placed.cached_tokens, placed.pulls) == (0, ())
    brain.seal("p0", chain("late", 3), seq=2)  # a word of the old life, overtaken
    assert brain.view("p0").indexed_blocks == 0
    brain.seal("p0", X, incarnation=2)
    brain.seal("p0", chain("late", 3), seq=3)
    assert brain.view("p0").indexed_blocks == 64
    assert brain.placed(LONG, keys=X, request_id="r").prefill == brain.refs["p0"]


def test_death_takes_blocks_at_once_and_only_that_lifes() -> None:
    brain = mesh()
    brain.seal("p0", X)
    brain.step(MemberGone(("p0", 0), "died"))
    assert brain.view("p0").indexed_blocks == 64
    brain.step(MemberGone(("p0", 1), "left"))
    assert brain.view("p0").indexed_blocks == 0
    assert brain.state.indexed_blocks == 0


def test_a_lost_stream_changes_nothing_that_is_known() -> None:
    brain = mesh()
    brain.seal("p0", X)
    brain.step(StoreLost())
    assert ranges(other(brain).pulls) == [("p0", 0, 64)]
    for _ in range(100):
        brain.tick(1.0)
        brain.beat_all()
    assert brain.placed(LONG, keys=X, request_id="r2").cached_tokens == 64 * BLOCK
    brain.step(reset(1, "p0", "p1", "d0"))
    assert brain.view("p0").indexed_blocks == 64


def test_a_restarted_master_is_given_time_to_hear_of_its_members() -> None:
    brain = mesh(2, 1, pools=1)
    brain.seal("p0", X)
    brain.seal("pool0", X)
    brain.step(StoreLost())
    brain.step(reset(2))
    brain.tick(brain.settings.member_grace_s - 0.1)
    brain.beat_all()
    assert brain.view("p0").indexed_blocks == 64
    assert ranges(other(brain, request_id="r").pulls) == [("p0", 0, 64)]
    brain.beat("p1", finished_request_ids=("r",))
    brain.step(joined("p0"))
    brain.seal("p0", X[:32], snapshot=True)
    brain.tick(0.2)
    brain.beat_all()
    assert brain.view("p0").indexed_blocks == 32
    assert brain.state.indexed_blocks == 32  # the pool node did not come back in time
    assert brain.view("p0").ready
    assert brain.view("p1").ready  # absent, but nobody says that it died


def test_a_restarted_master_that_names_another_life_ends_the_old_one() -> None:
    brain = mesh(2, 1, pools=1)
    brain.seal("pool0", X)
    brain.step(reset(2, ("pool0", 2)))
    assert brain.state.indexed_blocks == 0


def test_while_a_restarted_master_is_lost_again_nobody_is_given_up() -> None:
    brain = mesh(1, 1, pools=1)
    brain.seal("pool0", X)
    brain.step(reset(2))
    brain.step(StoreLost())
    brain.tick(brain.settings.member_grace_s + 1)
    assert brain.state.indexed_blocks == 64
    brain.step(reset(2))
    brain.tick(0)
    assert brain.state.indexed_blocks == 0


def test_a_life_that_is_no_member_yet_is_not_asked() -> None:
    brain = mesh(1, 1, pools=1)
    brain.seal("pool0", X, incarnation=2)  # of the next snapshot, whose members come last
    assert brain.placed(LONG, keys=X, request_id="r").pulls == ()
    brain.step(reset(1, "p0", "d0", ("pool0", 2)))
    brain.now += 1
    brain.beat_all()
    brain.beat("p0", finished_request_ids=("r",))
    assert [r.incarnation for r in brain.placed(LONG, keys=X).pulls] == [2]


def test_blocks_of_strangers_are_dropped_with_the_next_snapshot() -> None:
    brain = mesh()
    brain.seal("ghost", X)
    assert other(brain).pulls == ()
    brain.step(reset(1, "p0", "p1", "d0"))
    assert brain.state.indexed_blocks == 0


def test_an_announcement_that_does_not_follow_wants_a_new_stream() -> None:
    brain = mesh()
    brain.seal("p0", X[:4])
    assert brain.seal("p0", X[:8], seq=9) == [OutOfStep("p0")]
    assert brain.seal("p0", X[:4], seq=1) == []
    assert brain.view("p0").indexed_blocks == 4


# ── pending blocks, and no herd ───────────────────────────────────────────────────────────────────


def test_what_was_placed_counts_until_it_is_announced_or_forgotten() -> None:
    brain = mesh()
    first = brain.placed(LONG, keys=X, request_id="r")
    name = first.prefill.instance_id
    brain.now += 0.5
    brain.beat_all()
    assert brain.placed(LONG, keys=X, request_id="s").prefill.instance_id == name
    brain.beat(name, finished_request_ids=("s",))
    brain.done(name, "r", LONG)
    brain.now += brain.settings.confirmed_s - 0.1
    brain.beat_all()
    brain.tick(0)
    assert brain.placed(LONG, keys=X, request_id="t").cached_tokens == 64 * BLOCK
    brain.beat(name, finished_request_ids=("t",))
    brain.tick(0.2)
    assert brain.placed(LONG, keys=X, request_id="u").cached_tokens == 0  # a full store sealed nothing
    brain.beat(name, finished_request_ids=("u",))


def test_announced_blocks_stay_when_their_promise_ends() -> None:
    brain = mesh(1)
    brain.placed(LONG, keys=X, request_id="r")
    brain.seal("p0", X[:10])
    brain.beat("p0", finished_request_ids=("r",))
    assert brain.placed(LONG, keys=X).cached_tokens == 10 * BLOCK
    brain.seal("p0", removed=X[5:10])
    brain.beat("p0", finished_request_ids=("r2",))


def test_a_hot_prefix_spreads_and_the_load_with_it() -> None:
    brain = mesh(4, 2)
    brain.seal("p0", X)
    placed: dict[str, list[Placed]] = {}
    for i in range(400):
        brain.now += 0.002
        if i % 20 == 0:
            brain.beat("d0")
            brain.beat("d1")
        found = brain.placed(LONG + 300, keys=X, request_id=f"h{i}")
        placed.setdefault(found.prefill.instance_id, []).append(found)
        assert found.cached_tokens == 64 * BLOCK or found.pulls == ()
    counts = {name: len(found) for name, found in placed.items()}
    assert set(counts) == {"p0", "p1", "p2", "p3"}
    assert max(counts.values()) < 1.3 * min(counts.values())
    fetches = {name: sum(bool(p.pulls) for p in found) for name, found in placed.items()}
    assert fetches == {"p0": 0, "p1": 1, "p2": 1, "p3": 1}
    holders = Counter(p.pulls[0].instance_id for found in placed.values() for p in found if p.pulls)
    assert set(holders) == {"p0"}  # nobody fetches what is only promised


# ── what is learnt ────────────────────────────────────────────────────────────────────────────────


def _pulled(brain: Brain, name: str, n: int, seconds: float, nbytes: int = 64 * BYTES) -> None:
    for i in range(n):
        sample = PrefillSample(f"{name}-{brain.seq}-{i}", 100, 1024, 0.015, 0, 0.0, 1024, nbytes, seconds)
        brain.beat(name, prefill_samples=(sample,))


def test_slow_pulls_are_learnt_and_given_another_chance() -> None:
    brain = mesh()
    brain.seal("p0", X)
    _pulled(brain, "p1", 40, 5.0)
    placed = other(brain, request_id="r")
    assert (placed.prefill.instance_id, placed.pulls) == ("p1", ())
    brain.beat("p1", finished_request_ids=("r",))
    brain.now += 600
    brain.beat_all()
    assert ranges(other(brain, request_id="r").pulls) == [("p0", 0, 64)]


def test_a_newcomer_knows_what_its_peers_pull() -> None:
    brain = mesh()
    brain.seal("p0", X)
    _pulled(brain, "p1", 40, 0.2)
    brain.add("p9", Role.PREFILL)
    p1, p9 = (brain.state._fleet.named(name) for name in ("p1", "p9"))
    assert p1 is not None
    assert p9 is not None
    assert p9.pull.fit.coefficients.at(64 * BYTES, 0) == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize(("push_s", "bytes_per_s"), [(0.1, 0.5e9), (0.001, 1e10)])
def test_an_unmeasured_pull_is_tried_however_slow_pushes_are(push_s: float, bytes_per_s: float) -> None:
    """A push waits for the computation: it may show that the wire is faster than thought, never that it is slower."""
    brain = mesh(1, 1, pools=1)
    for i in range(40):
        sample = PrefillSample(f"s{i}", 100, 0, 0.015, 10_000_000, push_s)
        brain.beat("p0", prefill_samples=(sample,))
    found = brain.state._fleet.named("p0")
    assert found is not None
    assert found.pull.seconds(1e8, 1, brain.now) == pytest.approx(0.010 + 1e8 / bytes_per_s, rel=0.1)


# ── refusing ──────────────────────────────────────────────────────────────────────────────────────


def test_a_pull_may_save_a_request_from_refusal() -> None:
    brain = mesh(1, 1, pools=1)
    need_s = brain.placed(LONG, keys=X, request_id="r").ttft_s
    brain.beat("p0", finished_request_ids=("r",))
    brain.refused(Overloaded, LONG, keys=X, ttft_slo_s=need_s * 0.6)
    brain.seal("pool0", X)
    assert brain.placed(LONG, keys=X, ttft_slo_s=need_s * 0.6).pulls


def test_retry_after_counts_what_drains_and_no_pull() -> None:
    brain = mesh(1, 1, pools=1)
    brain.seal("pool0", X)
    alone = brain.placed(LONG, keys=X, request_id="r")
    brain.beat("p0", finished_request_ids=("r",))
    slo_s = alone.ttft_s + 0.05
    brain.beat("p0", dataclasses.replace(IDLE, queued_tokens=60_000))
    queue_s = brain.view("p0").queue_s
    refused = brain.refused(Overloaded, LONG, keys=X, ttft_slo_s=slo_s)
    rest_s = alone.ttft_s - alone.terms["pull_ms"] / 1000
    expected_s = queue_s + rest_s - slo_s
    assert refused.error.retry_after_ms / 1000 == pytest.approx(expected_s, abs=0.01)
    # That long a wait is true: with the queue as it will be then, the request is taken.
    brain.now += refused.error.retry_after_ms / 1000
    for name in ("p0", "d0"):
        found = brain.state._fleet.named(name)
        assert found is not None
        found.last_seen = brain.now
        brain.state._columns.touch(name)
    brain.placed(LONG, keys=X, ttft_slo_s=slo_s + 0.001)


def test_waiting_for_another_than_the_fastest_may_be_what_helps() -> None:
    brain = mesh()
    name = brain.placed(LONG, keys=X, request_id="r").prefill.instance_id  # only coming: nobody can fetch it
    brain.beat(name, dataclasses.replace(IDLE, queued_tokens=20_000))
    queue_s = brain.view(name).queue_s
    refused = brain.refused(Overloaded, LONG, keys=X, ttft_slo_s=0.045)
    assert queue_s > 1  # so that the idle one, which would have to compute all of it, is the nearest
    assert refused.error.retry_after_ms / 1000 == pytest.approx(queue_s, abs=0.05)


def test_no_wait_helps_what_a_pull_alone_makes_late() -> None:
    brain = mesh(1, 1, pools=1)
    brain.seal("pool0", X)
    assert brain.refused(Overloaded, LONG, keys=X, ttft_slo_s=0.012).error.retry_after_ms == 1000


# ── several models ────────────────────────────────────────────────────────────────────────────────


def test_two_models_side_by_side_share_nothing() -> None:
    brain = Brain()
    for model in ("one", "two"):
        for role in (Role.PREFILL, Role.DECODE):
            brain.add(f"{model}-{role.value}", role, model=card(model, fingerprint=model))
    brain.add("two-more", Role.PREFILL, model=card("two", fingerprint="two"))
    brain.step(reset(1, *brain.refs))
    brain.seal("one-prefill", X)
    for i in range(40):
        brain.now += 0.1
        brain.done("one-prefill", f"s{i}", 100 + 10 * i, seconds=2.0 + 0.1 * i)
        brain.beat("two-prefill")
        brain.beat("two-more")
        brain.beat("one-decode")
        brain.beat("two-decode")
    one = brain.placed(LONG, keys=X, model="one")
    two = brain.placed(LONG, keys=chain("y", 64), model="two")  # another namespace: other keys
    assert (one.prefill.instance_id, one.decode.instance_id) == ("one-prefill", "one-decode")
    assert two.prefill.instance_id.startswith("two-")
    assert two.decode.instance_id == "two-decode"
    assert one.cached_tokens == 64 * BLOCK
    assert (two.cached_tokens, two.pulls) == (0, ())
    assert two.ttft_s < 0.5 < one.ttft_s  # what one model takes says nothing of the other
    assert sorted(m.name for m in brain.state.models(brain.now)) == ["one", "two"]
    assert {v.model for v in brain.state.views(brain.now)} == {"one", "two"}
    assert brain.view("one-prefill").indexed_blocks == 64
    assert brain.view("two-prefill").indexed_blocks == 0


# ── instances that cannot work together ───────────────────────────────────────────────────────────


@pytest.mark.parametrize("other", [{"block_tokens": 64}, {"kv_dtype": "bfloat16"}, {"fingerprint": "f2"}])
def test_instances_whose_kv_does_not_fit_say_so(other: dict[str, object]) -> None:
    """Ready would be a lie: every request would be refused."""
    brain = Brain()
    brain.add("p0", Role.PREFILL)
    brain.add("d0", Role.DECODE, model=card(**other))
    for name, fellow in (("p0", "d0"), ("d0", "p0")):
        view = brain.view(name)
        assert not view.ready
        assert fellow in view.not_ready_reason
        assert str(next(iter(other.values()))) in view.not_ready_reason
    brain.add("d1", Role.DECODE)
    assert brain.view("p0").ready
    assert not brain.view("d0").ready
    assert brain.placed(32).decode.instance_id == "d1"


def test_another_model_is_no_reason_to_be_stranded() -> None:
    brain = Brain()
    brain.add("p0", Role.PREFILL)
    brain.add("d0", Role.DECODE, model=card("other", block_tokens=64))
    assert brain.view("p0").ready
