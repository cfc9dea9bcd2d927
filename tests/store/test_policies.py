"""The master's policies one by one: names, numbers, tombstones, quotas, placement, heat, memory; what a new leader
knows."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from typing import Any

import pytest

from kvmesh.errors import Overloaded
from kvmesh.kvcache.announce import Announcement
from kvmesh.rpc.pb.store_pb2 import StoreUsage
from kvmesh.services.store import durable
from kvmesh.services.store.block_map import LOG_SLACK_BYTES, MasterMap
from kvmesh.services.store.domain import Announce, Beat, Heard, NodeJoined, NodeRole, RegisteredNode
from kvmesh.services.store.policy.copies import Nodes, PullOrder
from kvmesh.services.store.policy.heat import KeyHeat
from kvmesh.services.store.policy.names import Names
from kvmesh.services.store.policy.quotas import Quotas, TagQuota
from kvmesh.services.store.policy.records import Write
from kvmesh.services.store.policy.store_policy import PolicyLimits, StorePolicy
from kvmesh.services.store.policy.tombstones import MAX_AWAY, Tombstones
from kvmesh.services.store.state import MasterState


def key(i: int, tag: bytes = b"tag1") -> bytes:
    return tag + i.to_bytes(12, "big")


def member(name: str, machine: str = "", incarnation: int = 1) -> RegisteredNode:
    return RegisteredNode(name, f"{name}:1", incarnation, NodeRole.POOL, machine or name, name)


def batch(name: str, seq: int, sealed: list[bytes], removed: list[bytes] | None = None, **more: Any) -> Announcement:
    return Announcement(name, 1, seq, tuple(sealed), tuple(removed or ()), **more)


# ── names ─────────────────────────────────────────────────────────────────────────────────────────


class Held:
    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.removed: dict[bytes, int] = {}
        self.names = Names(
            self.keys.__contains__, lambda key, seq: self.removed.get(key, 0) > seq, grace_s=30.0, most=3
        )

    def bind(self, name: str, to: bytes, now: float, after: int = 0) -> bytes:
        keys, new, _ = self.names.bind("n", [(name, to)], after, now)
        self.names.bound(new, after, now)
        return keys[0]


def test_the_first_binding_stands_while_its_block_is_somewhere() -> None:
    held = Held()
    assert held.bind("x", key(1), 0.0) == key(1)
    assert held.bind("x", key(2), 29.0) == key(1)
    held.keys.add(key(1))
    assert held.bind("x", key(2), 31.0) == key(1)
    held.keys.clear()
    assert held.bind("x", key(2), 32.0) == key(2)
    assert held.names.resolve("n", ["x", "y"]) == [key(2), None]
    assert held.names.resolve("other", ["x"]) == [None]
    held.names.unbound([("n", "x"), ("n", "y")])
    assert held.names.resolve("n", ["x"]) == [None]


def test_a_removed_block_frees_its_name_at_once_and_for_good() -> None:
    held = Held()
    held.bind("x", key(1), 0.0, after=5)
    held.keys.add(key(1))
    held.removed[key(1)] = 6
    assert held.names.resolve("n", ["x"]) == [None]
    assert held.bind("x", key(1), 1.0, after=6) == key(1)  # the same bytes, put again
    assert held.names.resolve("n", ["x"]) == [key(1)]


def test_names_are_bounded_and_only_dead_ones_make_room() -> None:
    held = Held()
    for i in range(3):
        held.bind(f"x{i}", key(i), 0.0)
    held.keys.update([key(0), key(2)])
    with pytest.raises(Overloaded, match="max_names"):
        held.bind("more", key(9), 10.0)
    assert held.bind("more", key(9), 40.0) == key(9)
    assert held.names.resolve("n", ["x0", "x1", "x2", "more"]) == [key(0), None, key(2), key(9)]
    with pytest.raises(Overloaded):
        held.bind("yet more", key(10), 41.0)


# ── tombstones ────────────────────────────────────────────────────────────────────────────────────


def test_who_missed_what_is_forgotten_starts_from_nothing() -> None:
    books = Tombstones(retention_s=10.0)
    for name in "ab":
        books.joined(name, 0)
    first = books.add(1, [key(1)], b"", 0.0)
    assert (first.seq >> 32, books.newer("a")) == (1, [first])
    books.reported("a", first.seq)
    books.ended("b", 0.0)  # away, and has not heard of it
    assert books.retire(10.0) == [] and books.retire(10.1) == [first]
    second = books.add(2, [], b"tag2", 11.0)
    assert second.seq >> 32 == 2
    books.joined("c", 0)
    for name in "bc":
        books.joined(name, 0)
        assert [(each.seq, each.keys, each.prefix) for each in books.newer(name)] == [(first.seq, (), b"")]
        assert books.masked(name, [key(7)]) == {key(7)}
        books.reported(name, first.seq)
        assert books.newer(name) == [second]
        assert books.masked(name, [key(7), key(7, b"tag2")]) == {key(7, b"tag2")}
    books.reported("a", second.seq)
    books.ended("a", 0.0)
    books.joined("a", 0)  # another life that reports nothing: the last one had applied it
    assert books.newer("a") == [second]
    books.joined("a", 0, lasting=0)  # one that leaves out the tier of its disk
    books.reported("a", second.seq)
    books.ended("a", 0.0)
    books.joined("a", 0)  # ... which is there again, with what was removed meanwhile
    assert [(each.seq, each.keys, each.prefix) for each in books.newer("a")] == [(first.seq, (), b"")]


def test_tombstones_reach_nodes_in_order_and_not_beside_a_call() -> None:
    books = Tombstones()
    books.joined("a", 0)
    first, second = (books.add(1, [key(i)], b"", 0.0) for i in range(2))
    assert books.is_next("a", first.seq) and not books.is_next("a", second.seq)
    books.asking("a", first.seq)
    assert books.newer("a") == []
    books.asking("a", 0)
    books.applied("a", first.seq)
    assert books.is_next("a", second.seq)
    assert books.newer("a") == [first, second]  # it does not report what it was asked directly, and passes over it
    assert books.newer("a", most=1) == [first]
    books.reported("a", second.seq)
    assert books.newer("a") == []


def test_tombstones_are_bounded_though_somebody_never_reports() -> None:
    books = Tombstones(max_keys=100)
    books.joined("frozen", 0)
    for i in range(50):
        books.add(1, [key(10 * i + j) for j in range(10)], b"", 0.0)
        books.retire(0.0)
        assert len(books) <= 100 // 18 + 1
    assert [each.prefix or each.keys for each in books.newer("frozen")] == [()]


# ── what a new leader knows ───────────────────────────────────────────────────────────────────────


def test_a_new_leader_knows_what_was_kept() -> None:
    kept = {kind: dict[bytes, bytes]() for kind in durable.KINDS}

    def keep(writes: list[Write]) -> None:
        for write in writes:
            kept[write.kind].update(write.puts)
            for drop in write.drops:
                kept[write.kind].pop(drop, None)

    old = StorePolicy(MasterMap(), PolicyLimits(tombstone_retention_s=10.0), wall_ns=5)
    old.lead(3, kept, 0.0)
    forgotten, writes = old.remove([key(0)], b"", 0.0)
    keep(writes)
    gone, writes = old.remove([key(1)], b"", 11.0)
    keep(writes)
    keep(old.remove([], b"tag9", 11.0)[1])
    _, writes, bound = old.bind("ns", [("name", key(2)), ("gone", key(4))], 12.0)
    bound()
    keep(writes)
    keep(old.remove([key(4)], b"", 12.0)[1])
    keep(old.change_replicas([key(2), key(3)], 2, True, 12.0)[1])
    keep(old.change_replicas([key(3)], 0, False, 12.0)[1])
    keep(old.set_quota(TagQuota(b"tag1", 7, "näme")))
    keep(old.drain("a", cancel=False))
    new = StorePolicy(MasterMap(), PolicyLimits(), wall_ns=10**9)
    assert new.lead(4, kept, 100.0) == []
    assert new.tombstones.floor == forgotten.seq and len(new.tombstones) == 3
    assert new.remove([key(5)], b"", 101.0)[0].seq >> 32 == 4
    assert new.names.resolve("ns", ["name", "gone"]) == [key(2), None]
    assert new.bind("ns", [("gone", key(6))], 101.0)[0] == [key(6)]
    assert len(new.replicas) == 1
    assert [quota for quota, _ in new.quotas.all()] == [TagQuota(b"tag1", 7, "näme")]
    new.joined(member("a"), forgotten.seq)
    assert "a" in new.drains and (node := new.nodes.get("a")) is not None and node.draining
    assert new.tombstones.newer("a")[0].seq == gone.seq
    assert new.grants.take(10) + 10 <= new.grants.take(1)
    kept[durable.QUOTA][b"bad"] = b"1"
    kept[durable.NAME][b"\xff"] = b"k"
    assert len(StorePolicy(MasterMap()).lead(5, kept, 0.0)) == 2


# ── quotas ────────────────────────────────────────────────────────────────────────────────────────


def test_allowances_never_make_more_than_the_quota() -> None:
    blocks = MasterMap()
    names = ["a", "b", "c"]
    quotas = Quotas(blocks, names)
    rng = random.Random(3)
    held = {"a": 40, "b": 5, "c": 0}
    for name, count in held.items():
        blocks.apply(batch(name, 1, [key(rng.getrandbits(60)) for _ in range(count)]))
    quotas.set(TagQuota(b"tag1", 60))
    told = {name: quotas.news(name, 3, 0.0)[b"tag1"] for name in names}
    assert all(told[name] >= held[name] for name in names) and sum(told.values()) <= 60
    assert quotas.news("a", 3, 1.0) == {} and quotas.news("a", 3, 20.0) == {b"tag1": told["a"]}
    quotas.set(TagQuota(b"tag1", 9))
    told = {name: quotas.news(name, 3, 21.0)[b"tag1"] for name in names}
    assert told == {"a": 8, "b": 1, "c": 1}  # one at least, as none would be no quota
    quotas.set(TagQuota(b"tag1", 0))
    assert {name: quotas.news(name, 3, 22.0)[b"tag1"] for name in names} == dict.fromkeys(names, 0)
    assert quotas.all() == []


# ── placement ─────────────────────────────────────────────────────────────────────────────────────


def test_an_empty_node_does_not_draw_everything() -> None:
    nodes, rng = Nodes(), random.Random(1)
    for i in range(8):
        nodes.joined(member(f"n{i}", f"m{i % 4}"), draining=False)
        node = nodes.get(f"n{i}")
        assert node is not None
        node.usage = StoreUsage(capacity_bytes=1000, free_bytes=1000 if i == 0 else 300 + i, blocks=1)
    drawn = Counter(
        found.member.instance_id for _ in range(2000) if (found := nodes.receiver(["n4"], 0.0, rng)) is not None
    )
    # n0 and n4 share a machine, where one copy is already: others are preferred, whatever room there is. The fullest
    # of all never wins against another.
    assert set(drawn) == {f"n{i}" for i in (2, 3, 5, 6, 7)}
    drawn = Counter(found.member.instance_id for _ in range(2000) if (found := nodes.receiver([], 0.0, rng)))
    assert 0.15 < drawn["n0"] / 2000 < 0.35
    for i in range(8):
        if i not in (0, 4):
            nodes.ended(f"n{i}")
    last = nodes.receiver(["n4"], 0.0, rng)
    assert last is not None and last.member.instance_id == "n0"
    last.avoid_until = 5.0
    assert nodes.receiver(["n4"], 4.9, rng) is None and nodes.receiver(["n4"], 5.0, rng) is last


# ── heat ──────────────────────────────────────────────────────────────────────────────────────────


def test_heat_is_a_fair_sample_that_cools_down() -> None:
    heat = KeyHeat(window_s=10.0, stride=16, max_keys=100)
    heat.decay(0.0)
    for _ in range(4000):
        heat.note([key(i) for i in range(10)])
    assert all(3000 <= heat.of(key(i)) <= 5000 for i in range(10))
    heat.decay(9.0)
    assert heat.of(key(0)) >= 3000
    heat.decay(10.0)
    assert heat.of(key(0)) <= 2500
    for i in range(10):
        assert heat.of(key(i)) > 0
    for now in range(20, 150, 10):
        heat.decay(now)
    assert len(heat) == 0
    heat.note([key(i) for i in range(10_000)])
    assert len(heat) == 100


def test_what_is_asked_for_much_gets_one_copy_more() -> None:
    limits = PolicyLimits(hot_lookups=50, heat_stride=1)
    state = MasterState(lease_s=10.0, stall_s=1e9, limits=limits)
    for name in "abcdef":
        state.step(NodeJoined(member(name)), 0.0)
        state.step(Beat(name, 1, StoreUsage(capacity_bytes=1000, free_bytes=900, blocks=1)), 0.0)
    state.step(Announce(batch("a", 1, [key(1), key(2)])), 0.0)
    state.policy.tick(0.0)
    for _ in range(49):
        state.policy.asked([key(1), key(9)], 0.0)
    assert state.policy.tick(0.0)[0] == []
    state.policy.asked([key(1)], 0.1)
    (order,) = state.policy.tick(0.1)[0]
    assert isinstance(order.work, PullOrder) and order.work.keys == (key(1),)
    order.then(frozenset([key(1)]), True, 0.2)
    for _ in range(100):
        state.policy.asked([key(1)], 0.3)
    assert state.policy.tick(0.3)[0] == [], "one, not one a look-up"


# ── memory ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_the_map_stays_below_its_limit_and_keeps_what_is_asked_for() -> None:
    limit = 3 << 20
    state = MasterState(
        lease_s=10.0, stall_s=1e9, limits=PolicyLimits(max_map_bytes=limit, heat_stride=1, hot_lookups=0)
    )
    for name in "ab":
        state.step(NodeJoined(member(name)), 0.0)
    wanted = [key(i) for i in range(500)]
    rng = random.Random(1)

    def say(name: str, seq: int, sealed: list[bytes], **more: Any) -> Heard:
        actions = state.step(Announce(batch(name, seq, sealed, **more)), 0.0)
        return next(action for action in actions if isinstance(action, Heard))

    tracemalloc.start()
    try:
        say("a", 1, wanted)
        all_keys = list(wanted)
        for seq in range(2, 22):
            state.policy.asked(wanted, 0.0)
            fresh = [key(rng.getrandbits(90)) for _ in range(2000)]
            say("a", seq, fresh)
            all_keys += fresh
            assert state.blocks.map.bound_bytes <= limit
        del fresh
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    known, memory = state.blocks.map, state.policy.memory
    known.check_integrity()
    assert memory.missing == memory.shed == len(all_keys) - len(known) > 20_000
    heat_bytes, ours = 1 << 20, len(all_keys) * 80  # the test's own list of keys, the counts of look-ups
    assert used < limit + LOG_SLACK_BYTES + heat_bytes + ours
    kept = sum(bool(known.mask(k)) for k in wanted) / len(wanted)
    others = (len(known) - kept * len(wanted)) / (len(all_keys) - len(wanted))
    assert kept > 0.95 > 2 * others

    assert not say("a", 21, []).want_snapshot
    gone = [k for k in all_keys if not known.mask(k)]
    assert not say("a", 22, [], removed=gone[:-1000]).want_snapshot
    assert memory.missing == 1000
    held = [k for k in all_keys if known.mask(k)]
    assert say("a", 23, [], removed=held[:8000]).want_snapshot, "there is room again"
    left = held[8000:] + gone[-1000:]
    assert not say("a", 24, left, snapshot=True).want_snapshot
    assert memory.missing == 0 and len(known) == len(left)


def test_without_a_limit_nothing_is_left_out() -> None:
    state = MasterState(lease_s=10.0, stall_s=1e9)
    state.step(NodeJoined(member("a")), 0.0)
    state.step(Announce(batch("a", 1, [key(i) for i in range(5000)])), 0.0)
    assert (len(state.blocks.map), state.policy.memory.shed) == (5000, 0)


def test_pages_of_keys_cover_each_key_once() -> None:
    blocks = MasterMap()
    keys = [bytes([i % 3]) * 4 + random.Random(i).randbytes(11) + b"\0" for i in range(300)]
    blocks.apply(batch("a", 1, keys[:200]))
    blocks.apply(batch("b", 1, keys[100:]))
    blocks.apply(batch("a", 2, [], keys[:50]))
    for prefix in (b"", b"\1", bytes(4), b"\2" * 4, keys[250], b"\3"):
        for name, mine in (("a", keys[50:200]), ("b", keys[100:])):
            found: list[bytes] = []
            while page := blocks.page(name, prefix, found[-1] if found else b"", 7):
                found += page
            assert found == sorted(k for k in mine if k.startswith(prefix))


def test_who_left_within_the_retention_is_away_until_it_is_back() -> None:
    kept = Tombstones(retention_s=100.0)
    for name in ("a", "b", "c"):
        kept.joined(name, 0)
    assert kept.away(0.0) == []
    kept.ended("a", 10.0)
    kept.ended("b", 50.0)
    assert kept.away(60.0) == ["b", "a"] and kept.away(111.0) == ["b"]
    kept.joined("b", 0)
    assert kept.away(60.0) == ["a"]
    kept.ended("b", 70.0)
    assert kept.away(71.0) == ["b", "a"] and kept.away(171.0) == []
    for i in range(MAX_AWAY + 5):
        kept.ended(f"n{i}", 80.0)
    assert len(kept.away(80.0)) == MAX_AWAY
