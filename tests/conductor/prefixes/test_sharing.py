"""Algorithm 1: what is fetched from whom, and what decode need not be sent."""

import dataclasses
from collections import Counter

import pytest

from kvmesh.services.conductor.domain import Fetch, MemberGone, PrefillSample, Source
from tests.support.conductor.brain import BLOCK, IDLE, Brain, chain, joined, reset
from tests.support.conductor.sharing import BYTES, LONG, X, mesh, monotone, other, ranges

# ── fetch or compute ──────────────────────────────────────────────────────────────────────────────


def test_a_long_prefix_is_fetched_when_its_holder_is_busy() -> None:
    brain = mesh()
    brain.seal("p0", X)
    placed = other(brain)
    assert placed.prefill.instance_id == "p1"
    assert ranges(placed.pulls) == [("p0", 0, 64)]
    assert placed.pulls[0].address == "p0:1"
    assert placed.pulls[0].incarnation == 1
    assert placed.cached_tokens == 64 * BLOCK
    assert placed.terms["pull_ms"] > 0


def test_an_idle_holder_computes_itself() -> None:
    brain = mesh()
    brain.seal("p0", X)
    placed = brain.placed(LONG, keys=X)
    assert (placed.prefill.instance_id, placed.cached_tokens, placed.pulls) == ("p0", 64 * BLOCK, ())
    assert placed.terms["pull_ms"] == 0


@pytest.mark.parametrize(
    ("local", "remote", "threshold", "fetched"),
    [
        (0, 64, 1.0, 64),
        (0, 4, 1.0, 0),  # computed sooner than fetched
        (32, 64, 1.0, 32),
        (60, 64, 1.0, 0),
        (64, 64, 1.0, 0),
        (64, 32, 1.0, 0),
        (32, 64, 1.9, 32),
        (32, 64, 2.0, 0),  # the best must be more than twice the local one
        (0, 64, 1000.0, 64),  # nothing local counts as infinitely worse
        (32, 64, 0.0, 32),
        (64, 32, 0.0, 0),
    ],
)
def test_when_a_prefix_is_fetched(local: int, remote: int, threshold: float, fetched: int) -> None:
    brain = mesh(balancing_threshold=threshold)
    brain.seal("p0", X[:remote])
    brain.seal("p1", X[:local])
    placed = other(brain)
    assert placed.prefill.instance_id == "p1"
    assert ranges(placed.pulls) == ([("p0", local, fetched)] if fetched else [])
    assert placed.cached_tokens == (local + fetched) * BLOCK


@pytest.mark.parametrize(("rule", "fetched"), [(Fetch.CHEAPER, 0), (Fetch.ALWAYS, 4), (Fetch.NEVER, 0)])
def test_the_rule_of_fetching_over_what_is_predicted(rule: Fetch, fetched: int) -> None:
    brain = mesh(fetch=rule)
    brain.seal("p0", X[:4])
    assert other(brain).cached_tokens == fetched * BLOCK
    brain = mesh(fetch=rule)
    brain.seal("p0", X)
    assert other(brain).cached_tokens == (0 if rule is Fetch.NEVER else 64 * BLOCK)


def test_a_pull_hides_behind_the_queue() -> None:
    brain = mesh(1)
    brain.step(joined("pool0"))
    brain.seal("pool0", X)
    alone = brain.placed(LONG, keys=X)
    pull_s = alone.terms["pull_ms"] / 1000
    assert alone.terms["queue_ms"] == 0
    assert alone.ttft_s == pytest.approx(pull_s + (alone.terms["prefill_ms"] + alone.terms["transfer_tail_ms"]) / 1000)
    brain.now += 1
    brain.beat("p0", dataclasses.replace(IDLE, queued_tokens=2000))
    brain.beat("d0")
    queued = brain.placed(LONG, keys=(*chain("y", 1), *X[1:]))  # another prompt: nothing of it is pending
    assert queued.pulls == ()
    brain.seal("pool0", (y := chain("y", 64)))
    queued = brain.placed(LONG, keys=y)
    assert queued.terms["queue_ms"] > queued.terms["pull_ms"] > 0
    rest = (queued.terms["prefill_ms"] + queued.terms["transfer_tail_ms"] + queued.terms["queue_ms"]) / 1000
    assert queued.ttft_s == pytest.approx(rest)


def test_the_last_token_is_computed_and_its_block_not_fetched() -> None:
    brain = mesh()
    brain.seal("p0", X)
    placed = other(brain, 64 * BLOCK)
    assert ranges(placed.pulls) == [("p0", 0, 63)]
    assert placed.cached_tokens == 63 * BLOCK


# ── from whom ─────────────────────────────────────────────────────────────────────────────────────


def test_several_holders_bring_what_none_has_alone() -> None:
    brain = mesh(2, 1, pools=1)
    brain.seal("p0", X[:25])
    brain.seal("pool0", X[20:60])
    brain.seal("d0", X[58:64])
    placed = other(brain)
    assert ranges(placed.pulls) == [("p0", 0, 25), ("pool0", 25, 35), ("d0", 60, 4)]


def test_own_blocks_behind_a_hole_are_not_fetched() -> None:
    brain = mesh()
    brain.seal("p0", X)
    brain.seal("p1", X[20:40])
    assert ranges(other(brain).pulls) == [("p0", 0, 64)]  # one lease; what is there already is passed over
    brain.seal("p0", removed=X[20:40])
    brain.now += 100
    brain.beat("d0")
    brain.beat("p1")
    brain.state._index.pending.close(1)
    brain.state._index.pending.open(1000)
    placed = other(brain)
    assert ranges(placed.pulls) == [("p0", 0, 20), ("p0", 40, 24)]


def test_at_most_eight_ranges() -> None:
    brain = mesh(2, 1, pools=2)
    for i in range(16):
        brain.seal(f"pool{i % 2}", X[4 * i : 4 * i + 4])
    placed = other(brain)
    assert len(placed.pulls) == 8
    assert placed.cached_tokens == 32 * BLOCK


def test_among_equal_holders_the_one_with_the_least_to_send() -> None:
    brain = mesh(2, 1, pools=2)
    for name in ("pool0", "pool1"):
        for prefix in "abcd":
            brain.seal(name, chain(prefix, 64))
    named = [other(brain, keys=chain(prefix, 64)).pulls[0].instance_id for prefix in "abcd"]
    assert Counter(named) == {"pool0": 2, "pool1": 2}


def test_among_equally_idle_holders_the_one_on_the_same_node() -> None:
    brain = mesh(1)
    for name, node in (("h0", "far"), ("h1", "node"), ("h2", "far")):
        brain.step(joined(name, node=node))
        brain.seal(name, X)
    assert brain.placed(LONG, keys=X).pulls[0].instance_id == "h1"


def test_what_a_holder_has_to_send_makes_it_slower_until_reported_or_over() -> None:
    brain = mesh(1, 1, pools=1)
    for prefix in "abcdefgh":
        brain.seal("pool0", chain(prefix, 64))

    def pull_ms(prefix: str) -> float:
        brain.beat("p0")
        return brain.placed(LONG, keys=chain(prefix, 64), request_id=prefix).terms["pull_ms"]

    first = pull_ms("a")
    assert pull_ms("b") > first
    sample = PrefillSample("a", 5, 1024, 0.01, 0, 0.0, 1024, 64 * BYTES, first / 1000)
    brain.beat("p0", prefill_samples=(sample,))
    brain.beat("p0", finished_request_ids=("b",))
    assert pull_ms("c") == pytest.approx(first, rel=0.05)
    brain.tick(1.0)
    brain.beat_all()
    assert len(brain.state._ledger.outgoing) == 0
    assert pull_ms("d") == pytest.approx(first, rel=0.05)


def _kill(brain: Brain) -> None:
    brain.step(MemberGone(("p0", 1), "died"))


def _never_joined(brain: Brain) -> None:
    brain.step(reset(1, "p1", "d0", "pool0"))


def _other_life(brain: Brain) -> None:
    brain.step(joined("p0", 2))


def _not_ready(brain: Brain) -> None:
    brain.beat("p0", ready=False)


def _silent(brain: Brain) -> None:
    brain.tick(brain.settings.lease_s + 0.1)
    brain.beat("p1")
    brain.beat("d0")


def _avoided(brain: Brain) -> None:
    pass


@pytest.mark.parametrize("end", [_kill, _never_joined, _other_life, _not_ready, _silent, _avoided])
def test_nothing_is_fetched_from_whom_one_cannot_rely_on(end: object) -> None:
    brain = mesh(2, 1, pools=1)
    brain.seal("p0", X)
    assert ranges(other(brain, request_id="r0").pulls) == [("p0", 0, 64)]
    brain.beat("p1", finished_request_ids=("r0",))
    end(brain)  # type: ignore[operator]
    avoid = frozenset({"p0"}) if end is _avoided else frozenset[str]()
    placed = brain.placed(LONG, keys=X, avoid=avoid)
    assert (placed.prefill.instance_id, placed.pulls) == ("p1", ())
    brain.beat("p1", finished_request_ids=(f"r{brain.requests}",))
    brain.seal("pool0", X[:60])
    assert ranges(brain.placed(LONG, keys=X, avoid=avoid).pulls) == [("pool0", 0, 60)]


def test_a_pool_node_is_never_given_work() -> None:
    brain = mesh(2, 1, pools=2)
    brain.seal("pool0", X)
    for _ in range(20):
        placed = brain.placed(LONG, keys=X)
        assert placed.prefill.instance_id in ("p0", "p1")
        assert placed.decode.instance_id == "d0"


def test_nobody_fetches_from_itself() -> None:
    brain = mesh(1, 1)
    brain.seal("p0", X[:10] + X[20:])
    placed = brain.placed(LONG, keys=X)
    assert (placed.cached_tokens, placed.pulls) == (10 * BLOCK, ())
    brain.seal("d0", X[:12])
    assert all(r.instance_id != "p0" for r in brain.placed(LONG, keys=X).pulls)


# ── decode ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prefill", "remote", "decode", "at_decode", "pulled", "decode_pulls"),
    [
        (64, 0, 0, 0, 0, []),
        (64, 0, 20, 20, 0, []),  # prefill has it: it pushes the rest
        (0, 64, 0, 0, 64, [("pool0", 0, 64)]),
        (0, 64, 20, 20, 44, [("pool0", 20, 44)]),
        (10, 64, 10, 10, 54, [("pool0", 10, 54)]),
        (10, 64, 9, 9, 0, []),  # block 9 is pushed, so are those behind it
        (0, 0, 64, 64, 0, []),
        (0, 3, 0, 0, 0, []),  # computed, not fetched
    ],
)
def test_where_decode_gets_each_block_from(
    prefill: int, remote: int, decode: int, at_decode: int, pulled: int, decode_pulls: list[tuple[str, int, int]]
) -> None:
    brain = mesh(1, 1, pools=1)
    for name, blocks in (("p0", prefill), ("pool0", remote), ("d0", decode)):
        brain.seal(name, X[:blocks])
    placed = brain.placed(LONG, keys=X)
    counts = Counter(placed.sources)
    if at_decode or pulled:
        assert len(placed.sources) == 65
        assert monotone(placed.sources)
        assert (counts[Source.AT_DECODE], counts[Source.DECODE_PULLS]) == (at_decode, pulled)
    else:
        assert placed.sources == b""
    assert ranges(placed.decode_pulls) == decode_pulls


def test_prefill_fetches_from_decodes_store_too() -> None:
    brain = mesh(1, 1)
    brain.seal("d0", X)
    placed = brain.placed(LONG, keys=X)
    assert ranges(placed.pulls) == [("d0", 0, 64)]
    assert placed.decode_pulls == ()
    assert placed.sources == bytes([Source.AT_DECODE] * 64 + [Source.PREFILL_PUSHES])


def test_decode_where_blocks_lie_already_is_preferred_a_little() -> None:
    brain = mesh(1, 3)
    brain.seal("d1", X)
    for _ in range(3):
        assert brain.placed(LONG, keys=X, request_id="r").decode.instance_id == "d1"
    brain.beat("d1", dataclasses.replace(IDLE, running_requests=60, context_tokens=400_000))
    assert brain.placed(LONG, keys=X, request_id="r").decode.instance_id != "d1"


def test_what_decode_has_shortens_the_tail() -> None:
    cold, warm = mesh(1, 1), mesh(1, 1)
    for brain in (cold, warm):
        brain.seal("p0", X)
    warm.seal("d0", X[:60])
    tails = [brain.placed(LONG, keys=X).terms["transfer_tail_ms"] for brain in (cold, warm)]
    assert tails[1] < tails[0] / 5
