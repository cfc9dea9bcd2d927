"""What the client decides: keys, replicas, placement, READs. No I/O."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import ConfigError, InvalidRequest
from kvmesh.kvcache.keys import tenant_tag
from kvmesh.kvcache.tiers import Tier
from kvmesh.storeclient import placement, replicas
from kvmesh.storeclient.config import ClientConfig
from kvmesh.storeclient.naming import GrantedKeys, check_name, content_key, granted_key
from kvmesh.storeclient.placement import PoolCandidate
from kvmesh.storeclient.reading import leased
from kvmesh.storeclient.reading.leased import GATHER_BELOW, Shard
from kvmesh.storeclient.replicas import Holder, ReaderLocation, Replica, order, share_out
from kvmesh.storeclient.writing import PUT_BLOCKS, _portions

HERE = ReaderLocation("me", frozenset({"10.0.0.1"}))


def holder(name: str, node: str = "far", address: str = "10.0.0.9:1", sending: int = 0, leases: int = 0) -> Holder:
    return Holder(name, address, 1, node, sending, leases)


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────


def test_keys_tell_contents_and_namespaces_apart() -> None:
    keys = {content_key(data, space) for data in (b"a", b"b") for space in ("", "x", "y")}
    assert len(keys) == 6 and all(len(key) == 16 for key in keys)
    assert content_key(b"a", "x").startswith(tenant_tag("x"))
    assert content_key(memoryview(b"abc")[:1], "x") == content_key(bytearray(b"a"), "x")


@given(st.lists(st.integers(1, 300), max_size=12), st.integers(0, 5))
def test_granted_keys_are_given_out_once(takes: list[int], term: int) -> None:
    grants, next_number, seen = GrantedKeys(tenant_tag("t"), most=256), 0, set()
    for n in takes:
        while count := grants.wanted(n):
            grants.add(term, next_number, count)
            next_number += count
        keys = grants.take(n)
        assert len(keys) == n and seen.isdisjoint(keys)
        seen.update(keys)
    assert len(seen) == sum(takes) and grants.left == next_number - len(seen)
    assert all(key.startswith(tenant_tag("t")) for key in seen)


def test_granted_keys_of_two_terms_differ() -> None:
    tag = tenant_tag("")
    assert len({granted_key(tag, term, number) for term in (1, 2) for number in (0, 1, 2**63)}) == 6
    with pytest.raises(ValueError, match="term=4294967296"):
        granted_key(tag, 1 << 32, 0)


@pytest.mark.parametrize("name", ["", "x" * 1025, "\udc80"])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(InvalidRequest, match="name="):
        check_name(name)


# ── which replica ────────────────────────────────────────────────────────────────────────────────


def test_the_nearest_first_then_the_tier_then_who_sends_least() -> None:
    replicas = [
        Replica(holder("far ssd"), Tier.SSD),
        Replica(holder("far busy", sending=1 << 30)),
        Replica(holder("far leased", leases=9)),
        Replica(holder("far")),
        Replica(holder("same host", address="10.0.0.1:7", leases=50)),
        Replica(holder("same node ssd", node="me", address="10.0.0.8:7"), Tier.SSD),
        Replica(holder("same node", node="me", address="10.0.0.8:7", sending=1 << 33)),
    ]
    random.Random(1).shuffle(replicas)
    names = [replica.holder.store_id for replica in order(replicas, HERE, random.Random(2))]
    assert names == ["same node", "same node ssd", "same host", "far", "far leased", "far busy", "far ssd"]


def test_equal_holders_share_the_readers_but_not_the_keys_of_one_call() -> None:
    holders = [holder(name) for name in "abcd"]
    known = {i: [Replica(one) for one in holders] for i in range(100)}
    drawn: Counter[str] = Counter()
    for seed in range(400):
        plan = share_out(known, {}, HERE, random.Random(seed))
        ((only, positions),) = plan.items()
        assert positions == list(range(100))
        drawn[only.store_id] += 1
    assert min(drawn[name] for name in "abcd") > 60, drawn


def test_who_has_failed_for_a_key_is_not_asked_for_it_again() -> None:
    a, b = holder("a", node="me"), holder("b")
    known = {0: [Replica(a), Replica(b)], 1: [Replica(a)], 2: [Replica(b)], 3: []}
    assert share_out(known, {}, HERE, random.Random(0)) == {a: [0, 1], b: [2]}
    assert share_out(known, {a: {0}}, HERE, random.Random(0)) == {b: [0, 2], a: [1]}
    assert share_out(known, {a: {0, 1}, b: {0, 2}}, HERE, random.Random(0)) == {}


# ── where a put goes ─────────────────────────────────────────────────────────────────────────────


def pool(name: str, free: int, node: str = "", draining: bool = False, capacity: int = 1000) -> PoolCandidate:
    return PoolCandidate(name, f"{name}:1", node, 1, free, capacity, draining)


def test_local_first_while_there_is_room() -> None:
    def first(*nodes: PoolCandidate, policy: str = "local", nbytes: int = 10) -> set[str]:
        return {placement.order(nodes, policy, nbytes, nbytes, "me", random.Random(s))[0].store_id for s in range(50)}

    assert first(pool("near", 100, "me"), pool("far", 1000)) == {"near"}
    assert first(pool("near", 20, "me"), pool("far", 1000)) == {"far"}, "without room it is one of many"
    assert first(pool("near", 0, "me"), pool("far", 0)) == {"near"}, "all must evict: the nearest"
    assert first(pool("near", 500, "me", draining=True), pool("far", 20)) == {"far"}
    assert first(pool("near", 100, "me"), pool("far", 1000), policy="best2") == {"far"}
    assert first(pool("near", 100, "me"), pool("far", 1000), policy="random") == {"near", "far"}
    assert placement.order([pool("small", 5, capacity=5)], "local", 6, 6, "me", random.Random(0)) == []
    assert first(pool("silent", 0, capacity=0)) == {"silent"}, "it has joined and not said yet how much it has"
    with pytest.raises(ConfigError, match="placement='best'"):
        ClientConfig(placement="best")


@pytest.mark.parametrize(("nodes", "most"), [(3, 0.72), (5, 0.46), (20, 0.16)])
def test_an_empty_node_that_comes_back_does_not_draw_everything(nodes: int, most: float) -> None:
    """Many clients between two heartbeats: all have the same old figures."""
    pools = [pool(f"full-{i}", 50) for i in range(nodes - 1)] + [pool("empty", 1000)]
    rng = random.Random(3)
    drawn = Counter(placement.order(pools, "best2", 1, 1, "", rng)[0].store_id for _ in range(4000))
    assert 2 / nodes * 0.85 < drawn["empty"] / 4000 < most, drawn


def test_puts_by_two_choices_even_out() -> None:
    """Figures a hundred puts old, one node of five begins empty: it never draws most of them, and the gap closes."""
    free = {f"p{i}": 6_000 for i in range(4)} | {"empty": 20_000}
    rng = random.Random(4)
    for _ in range(200):
        seen = [pool(name, left, capacity=20_000) for name, left in free.items()]
        drawn = Counter(placement.order(seen, "best2", 1, 1, "", rng)[0].store_id for _ in range(100))
        assert drawn["empty"] <= 60, drawn
        for name, count in drawn.items():
            free[name] -= count
    assert min(free.values()) > 2_500 and max(free.values()) - min(free.values()) < 0.7 * 14_000, free


# ── READs ────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 200_000)), max_size=60), st.integers(1, 1 << 20))
def test_every_block_is_read_once_and_lies_in_its_run(pieces: list[tuple[int, int]], most: int) -> None:
    shards, at = [], 0
    for i, (gap, nbytes) in enumerate(pieces):
        at += gap * 100
        shards.append(Shard(i, at, nbytes))
        at += nbytes
    random.Random(len(pieces)).shuffle(shards)
    direct, gathered = leased.plan(shards)
    inside = [shard for run in gathered for shard in run.shards]
    assert sorted([*direct, *inside], key=lambda s: s.position) == sorted(shards, key=lambda s: s.position)
    for run in gathered + leased.runs(shards, most):
        assert all(run.offset <= s.offset and s.offset + s.nbytes <= run.offset + run.nbytes for s in run.shards)
        assert run.nbytes <= max(sum(s.nbytes for s in run.shards) * 1.25, 1), "gaps are small beside the blocks"
    assert all(run.nbytes <= most or len(run.shards) == 1 for run in leased.runs(shards, most))
    assert all(shard.nbytes < GATHER_BELOW for shard in inside)
    groups = leased.portions(gathered, most)
    assert [run for group in groups for run in group] == gathered
    assert all(len(group) == 1 or sum(run.nbytes for run in group) <= most for group in groups)


def test_small_neighbours_come_in_one_read() -> None:
    small = [Shard(i, 4096 * i, 4000) for i in range(64)]
    direct, gathered = leased.plan(small)
    assert not direct and [len(run.shards) for run in gathered] == [64]
    large = [Shard(i, GATHER_BELOW * i, GATHER_BELOW) for i in range(64)]
    assert leased.plan(large) == (large, [])
    scattered = [Shard(i, 65536 * i, 4096) for i in range(64)]
    assert leased.plan(scattered) == (scattered, [])


@given(st.lists(st.integers(1, 5000), max_size=3000), st.integers(1, 9000))
def test_portions_of_puts(sizes: list[int], most: int) -> None:
    parts = _portions(sizes, most)
    assert [i for a, b in parts for i in range(a, b)] == list(range(len(sizes)))
    assert all(b - a <= PUT_BLOCKS and (b - a == 1 or sum(sizes[a:b]) <= most) for a, b in parts)


# ── hints ────────────────────────────────────────────────────────────────────────────────────────


def test_hints_are_few_short_lived_and_forgotten_when_wrong() -> None:
    known = replicas.Hints(3)
    a, b = Replica(holder("a")), Replica(holder("b"))
    for i in range(5):
        known.learn(bytes([i]), [a, b], now=0.0)
    assert len(known) == 3 and known.of(b"\0", 0.0) == () and known.of(b"\4", 1.0) == [a, b]
    known.forget_holder(b"\4", {"a"})
    assert known.of(b"\4", 1.0) == [b]
    known.forget_holder(b"\4", {"b"})
    assert known.of(b"\4", 1.0) == ()
    assert known.of(b"\3", replicas.LIVE_S + 0.1) == () and len(known) == 1
    known.forget_tag(b"\2")
    assert len(known) == 0
