"""Prefixes in lower tiers: used where reading them pays, and only as far as it does."""

import dataclasses

import pytest

from kvmesh.blockservice.tiers.config import checked_id
from kvmesh.errors import ConfigError
from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.tiers import Tier, TierUse, store_name
from kvmesh.services.conductor.costs.models import TIER_HALF_LIFE_S, TIER_PRIORS, TierModel
from kvmesh.services.conductor.domain import Blocks, Fetch, MemberGone, Placed, PrefillSample, Refuse, Role
from tests.support.conductor.brain import BLOCK, IDLE, Brain, chain, joined, reset
from tests.support.conductor.sharing import BYTES, LONG, X, mesh

FAST = (0.0001, 10e9)  # seconds until the first byte, bytes a second
SLOW = (5.0, 1e6)


def seal(brain: Brain, name: str, keys: tuple[bytes, ...], tier: Tier = Tier.SSD, *, incarnation: int = 1) -> None:
    brain.seal(store_name(name, tier), keys, incarnation=incarnation)


def in_ns(rate: tuple[float, float]) -> tuple[int, int]:
    return round(rate[0] * 1e9), round(rate[1])


def tell(brain: Brain, name: str, rate: tuple[float, float], tier: Tier = Tier.SSD) -> None:
    """That instance says how fast it reads out of one tier."""
    use = TierUse(tier, 1 << 30, 1 << 20, 64, *in_ns(rate))
    brain.beat(name, brain.view(name).load, tiers=(use,))


def told(placed: Placed) -> list[tuple[str, int, int, Tier]]:
    return [(r.instance_id, r.first_block, r.blocks, r.tier) for r in placed.pulls]


# ── the model ─────────────────────────────────────────────────────────────────────────────────────


def test_a_tier_is_taken_at_its_word_and_a_slow_word_fades() -> None:
    model = TierModel(Tier.SSD)
    prior = TIER_PRIORS[Tier.SSD].at(1 << 20, 0)
    assert model.seconds(1 << 20, 0.0) == prior
    model.hear(0.0, 0.0, 0.0)  # nothing is measured
    assert model.seconds(1 << 20, 0.0) == prior
    model.hear(1.0, 1 << 20, 0.0)
    assert model.seconds(1 << 20, 0.0) == pytest.approx(2.0)
    model.hear(1.0, 1 << 20, 50.0)  # the same word is no news
    assert model.seconds(1 << 20, TIER_HALF_LIFE_S) == pytest.approx(1.0)
    assert model.seconds(1 << 20, 1e6) == pytest.approx(prior)
    model.hear(1e-6, 1e12, 60.0)
    assert model.seconds(1 << 20, 1e6) == pytest.approx(1e-6 + (1 << 20) / 1e12)  # a fast one stands


# ── at the instance itself ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rate", [None, FAST, SLOW])
def test_its_own_ssd_is_read_when_that_is_cheaper_than_computing(rate: tuple[float, float] | None) -> None:
    brain = mesh(1)
    seal(brain, "p0", X)
    if rate is not None:
        tell(brain, "p0", rate)
    placed = brain.placed(LONG, keys=X)
    if rate is SLOW:
        assert (told(placed), placed.cached_tokens, placed.terms["load_ms"]) == ([], 0, 0)
        assert placed.load_until == 0, "it would find the blocks by itself, and wait for them"
        return
    assert placed.load_until is None
    assert told(placed) == [("p0", 0, 64, Tier.SSD)]
    assert placed.pulls[0].address == "p0:1"
    assert placed.cached_tokens == 64 * BLOCK
    expected = TIER_PRIORS[Tier.SSD].at(64 * BYTES, 0) if rate is None else rate[0] + 64 * BYTES / rate[1]
    assert placed.terms["load_ms"] == pytest.approx(expected * 1000)
    assert placed.terms["pull_ms"] == 0
    decision = brain.state.explain("r1")
    assert decision is not None
    assert decision.best_prefix_blocks == 64
    (chosen,) = (c for c in decision.candidates if c.ref == placed.prefill)
    assert (chosen.local_blocks, chosen.pulled_blocks, chosen.loaded_blocks, chosen.tier) == (0, 0, 64, Tier.SSD)
    assert chosen.named_terms()["load_ms"] == pytest.approx(expected * 1000)
    assert "pull_ms" not in chosen.named_terms()
    rest = (placed.terms["prefill_ms"] + placed.terms["transfer_tail_ms"]) / 1000
    assert placed.ttft_s == pytest.approx(expected + rest)


def test_what_is_hardly_dearer_is_not_forbidden() -> None:
    """An instance reads what it has unless it is told not to; a few milliseconds are within what the models know."""
    compute_s = mesh(1).placed(LONG, keys=X).ttft_s
    for seconds, slo_s, until in (
        (compute_s, 9.0, None),
        (compute_s * 1.05, compute_s * 1.02, 0),
        (compute_s * 4, 9.0, 0),
    ):
        brain = mesh(1)
        seal(brain, "p0", X)
        tell(brain, "p0", (seconds, 1e12))
        placed = brain.placed(LONG, keys=X, ttft_slo_s=slo_s)
        assert (told(placed), placed.cached_tokens, placed.load_until) == ([], 0, until)


def test_memory_is_not_read_again_and_the_ssd_takes_over_behind_it() -> None:
    brain = mesh(1)
    brain.seal("p0", X[:20])
    seal(brain, "p0", X[10:64])
    tell(brain, "p0", FAST)
    placed = brain.placed(LONG, keys=X)
    assert told(placed) == [("p0", 20, 44, Tier.SSD)]
    assert placed.cached_tokens == 64 * BLOCK


def test_what_would_break_the_slo_is_not_used() -> None:
    compute_s = mesh(1).placed(LONG, keys=X).ttft_s
    for seconds, blocks in ((compute_s * 0.8, 64), (compute_s * 2, 0)):
        brain = mesh(1)
        seal(brain, "p0", X)
        tell(brain, "p0", (seconds, 1e12))
        placed = brain.placed(LONG, keys=X, ttft_slo_s=compute_s * 1.1)
        assert placed.cached_tokens == blocks * BLOCK
        assert placed.ttft_s < compute_s * 1.1


def test_only_as_much_as_hides_behind_the_queue() -> None:
    """Byte by byte it is dearer than computing: what is read while others are served costs nothing."""
    brain = mesh(1)
    seal(brain, "p0", X)
    rate = 8 * BYTES  # eight blocks a second
    brain.now += 1
    brain.beat_all()
    tell(brain, "p0", (1e-9, rate))
    assert told(brain.placed(LONG, keys=X, request_id="r")) == []
    brain.beat("p0", finished_request_ids=("r",))
    brain.beat("p0", dataclasses.replace(IDLE, queued_tokens=20_000))
    tell(brain, "p0", (1e-9, rate))
    queue_s = brain.view("p0").queue_s
    assert 1 < queue_s < 7
    placed = brain.placed(LONG, keys=X)
    ((name, first, blocks, tier),) = told(placed)
    assert (name, first, tier) == ("p0", 0, Tier.SSD)
    assert blocks == placed.load_until == int(queue_s * 8)
    assert placed.terms["load_ms"] <= placed.terms["queue_ms"]


def test_two_requests_share_one_disk() -> None:
    brain = mesh(1)
    for prefix in "ab":
        seal(brain, "p0", chain(prefix, 64))
    tell(brain, "p0", FAST)

    def load_ms(prefix: str) -> float:
        brain.beat("p0")
        tell(brain, "p0", FAST)
        return brain.placed(LONG, keys=chain(prefix, 64), request_id=prefix).terms["load_ms"]

    first = load_ms("a")
    second = load_ms("b")
    assert second == pytest.approx(first + 64 * BYTES / FAST[1] * 1000)
    brain.tick(60.0)
    assert len(brain.state._ledger.outgoing) == 0


@pytest.mark.parametrize("rule", Fetch)
def test_the_rule_of_fetching_speaks_of_others(rule: Fetch) -> None:
    brain = mesh(1, fetch=rule)
    seal(brain, "p0", X)
    assert told(brain.placed(LONG, keys=X)) == [("p0", 0, 64, Tier.SSD)]
    brain = mesh(1, pools=1, fetch=rule)
    seal(brain, "pool0", X)
    assert told(brain.placed(LONG, keys=X)) == ([] if rule is Fetch.NEVER else [("pool0", 0, 64, Tier.SSD)])


@pytest.mark.parametrize("rule", [Fetch.CHEAPER, Fetch.ALWAYS])
def test_a_dear_tier_is_used_under_no_rule(rule: Fetch) -> None:
    brain = mesh(2, fetch=rule)
    seal(brain, "p0", X)
    tell(brain, "p0", SLOW)
    for _ in range(4):
        placed = brain.placed(LONG, keys=X, request_id="r")
        assert (told(placed), placed.cached_tokens) == ([], 0)


# ── at others ─────────────────────────────────────────────────────────────────────────────────────


def test_a_holder_in_memory_is_asked_before_one_on_ssd() -> None:
    brain = mesh(1, pools=2)
    seal(brain, "pool0", X)
    alone = brain.placed(LONG, keys=X, request_id="r")
    assert told(alone) == [("pool0", 0, 64, Tier.SSD)]
    assert alone.terms["load_ms"] > 0
    brain.beat("p0", finished_request_ids=("r",))
    brain.seal("pool1", X[:40])
    placed = brain.placed(LONG, keys=X, request_id="r")
    assert told(placed) == [("pool1", 0, 40, Tier.DRAM), ("pool0", 40, 24, Tier.SSD)]
    assert alone.terms["load_ms"] > placed.terms["load_ms"] > 0
    brain.beat("p0", finished_request_ids=("r",))
    brain.seal("pool1", X[40:])
    placed = brain.placed(LONG, keys=X, request_id="r")
    assert told(placed) == [("pool1", 0, 64, Tier.DRAM)]
    assert placed.terms["load_ms"] == 0


def test_a_run_on_ssd_ends_where_somebody_has_the_next_block_in_memory() -> None:
    brain = mesh(1, pools=2)
    seal(brain, "pool0", X)
    brain.seal("pool1", X[30:50])
    placed = brain.placed(LONG, keys=X)
    assert told(placed) == [
        ("pool0", 0, 30, Tier.SSD),
        ("pool1", 30, 20, Tier.DRAM),
        ("pool0", 50, 14, Tier.SSD),
    ]


@pytest.mark.parametrize(("own", "other"), [(FAST, "ssd"), ((0.045, 1e12), "memory")])
def test_between_its_own_ssd_and_anothers_memory_the_faster_one(own: tuple[float, float], other: str) -> None:
    brain = mesh(1, pools=1)
    seal(brain, "p0", X)
    brain.seal("pool0", X)
    tell(brain, "p0", own)
    expected = ("p0", 0, 64, Tier.SSD) if other == "ssd" else ("pool0", 0, 64, Tier.DRAM)
    assert told(brain.placed(LONG, keys=X)) == [expected]


def test_a_slow_ssd_elsewhere_is_left_alone() -> None:
    brain = mesh(2)
    seal(brain, "p0", X)
    tell(brain, "p0", SLOW)
    brain.beat("p0", dataclasses.replace(IDLE, queued_tokens=20_000), tiers=(TierUse(Tier.SSD, 1, 1, 1, *in_ns(SLOW)),))
    assert told(brain.placed(LONG, keys=X)) == []
    brain = mesh(2)
    seal(brain, "p0", X)
    brain.beat("p0", dataclasses.replace(IDLE, queued_tokens=20_000), tiers=(TierUse(Tier.SSD, 1, 1, 1, *in_ns(FAST)),))
    placed = brain.placed(LONG, keys=X)
    assert (placed.prefill.instance_id, told(placed)) == ("p1", [("p0", 0, 64, Tier.SSD)])
    assert placed.terms["pull_ms"] > 0


def test_ssd_is_asked_before_object_storage() -> None:
    brain = mesh(1, pools=2)
    seal(brain, "pool0", X, Tier.OBJECT)
    seal(brain, "pool1", X[:32], Tier.SSD)
    placed = brain.placed(LONG, keys=X)
    assert told(placed)[0] == ("pool1", 0, 32, Tier.SSD)


def test_decode_is_not_sent_to_a_disk() -> None:
    """It fetches itself what lies in memory somewhere; what prefill reads from below is pushed to it."""
    brain = mesh(1, pools=1)
    seal(brain, "pool0", X)
    placed = brain.placed(LONG, keys=X)
    assert (placed.decode_pulls, placed.sources) == ((), b"")


def test_a_pull_that_waited_for_a_disk_says_nothing_of_the_wires() -> None:
    brain = mesh(1, pools=1)
    seal(brain, "pool0", X)
    brain.placed(LONG, keys=X, request_id="r")
    instance = brain.state._fleet.named("p0")
    assert instance is not None
    sample = PrefillSample("r", 5, 1024, 0.01, 0, 0.0, 1024, 64 * BYTES, 9.0)
    brain.beat("p0", prefill_samples=(sample,))
    assert len(instance.pull.fit) == 0


def test_a_pool_nodes_disk_is_known_by_the_pulls_that_waited_for_it() -> None:
    """It does not report to conductors. A slow one is left alone for a while, then tried again."""
    brain = mesh(1, pools=2)
    for prefix in "abcd":
        seal(brain, "pool0", chain(prefix, 64))

    def place(prefix: str) -> Placed:
        brain.beat_all()
        placed = brain.placed(LONG, keys=chain(prefix, 64), request_id=prefix)
        brain.beat("p0", finished_request_ids=() if placed.pulls else (prefix,))
        return placed

    first = place("a")
    assert told(first) == [("pool0", 0, 64, Tier.SSD)]
    sample = PrefillSample("a", 5, 1024, 0.01, 0, 0.0, 1024, 64 * BYTES, 2.0)
    brain.beat("p0", prefill_samples=(sample,), finished_request_ids=("a",))
    assert told(place("b")) == []
    brain.now += 20 * TIER_HALF_LIFE_S
    again = place("c")
    assert told(again) == told(first)
    assert again.terms["load_ms"] == pytest.approx(first.terms["load_ms"])
    assert len(brain.state._tiers) == 1
    brain.step(MemberGone(("pool0", 1), "died"))
    assert len(brain.state._tiers) == 0


def test_no_instance_is_called_like_a_tier() -> None:
    (refused,) = Brain().register("a#ssd", Role.PREFILL)
    assert isinstance(refused, Refuse)
    assert refused.error.field == "instance.instance_id"
    assert checked_id("", "n", "pool").startswith("pool-n-")
    for field, instance_id, node_id in (("instance_id", "a#b", "n"), ("node_id", "", "n#1")):
        with pytest.raises(ConfigError, match=field) as caught:
            checked_id(instance_id, node_id, "pool")
        assert caught.value.field == field


# ── lives ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("end", ["joined", "registered", "announces", "reset", "died"])
def test_none_of_an_old_lifes_blocks_lingers_in_any_tier(end: str) -> None:
    """However the conductor hears of the new life: nothing of the old one is found, or stays in memory."""
    brain = mesh(2, pools=1)
    for tier in Tier:
        seal(brain, "p0", chain(tier.name, 64), tier)
    seal(brain, "pool0", chain("pool", 64))
    assert brain.state.indexed_blocks == 4 * 64
    view = brain.view("p0")
    assert view.indexed_blocks == 64
    if end == "joined":
        brain.step(joined("p0", 2))
    elif end == "registered":
        brain.add("p0", Role.PREFILL, incarnation=2)
    elif end == "announces":
        seal(brain, "p0", chain("new", 1), Tier.SSD, incarnation=2)
    elif end == "reset":
        brain.step(reset(1, ("p0", 2), "p1", "d0", "pool0"))
    else:
        brain.step(MemberGone(("p0", 1), "died"))
    for tier in Tier:
        placed = brain.placed(LONG, keys=chain(tier.name, 64), request_id="r")
        assert (placed.cached_tokens, placed.pulls) == (0, ())
    if end == "registered":
        brain.step(joined("p0", 2))  # what the master has not ended is kept, and shown to nobody
    while brain.state._index.truth.sweep(1 << 20):
        pass
    assert brain.state.indexed_blocks == 64 + (end == "announces")
    # Late words of the old life bring nothing back; the new one is heard.
    brain.step(joined("p0", 2))
    seal(brain, "p0", chain("again", 4), Tier.DRAM, incarnation=2)
    brain.step(Blocks(Announcement("p0#ssd", 1, 2, chain("late", 3))))
    while brain.state._index.truth.sweep(1 << 20):
        pass
    assert brain.state.indexed_blocks == 64 + (end == "announces") + 4
    brain.state._index.truth.check_integrity()


def test_the_status_tells_of_tiers() -> None:
    brain = mesh(1)
    seal(brain, "p0", X)
    tell(brain, "p0", FAST)
    (tier,) = brain.view("p0").tiers
    assert (tier.use.tier, tier.indexed_blocks) == (Tier.SSD, 64)
    assert tier.block_s == pytest.approx(FAST[0] + BYTES / FAST[1])
    brain.beat("p0")
    assert brain.view("p0").tiers == ()
