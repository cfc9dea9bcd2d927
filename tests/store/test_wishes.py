"""Wishes for copies and pins: they end with their blocks, in small steps; what is to be undone outlives a leader."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvmesh.kvcache.announce import Announcement
from kvmesh.rpc.pb.store_pb2 import StoreUsage
from kvmesh.services.store import durable
from kvmesh.services.store.block_map import MasterMap
from kvmesh.services.store.domain import NodeRole, RegisteredNode
from kvmesh.services.store.policy.copies import Order, PinOrder
from kvmesh.services.store.policy.records import Write
from kvmesh.services.store.policy.store_policy import PolicyLimits, StorePolicy
from tests.support.tracing import lines

TAGS = [b"tag1", b"tag2", b"tag9"]


def key(i: int, tag: bytes = b"tag1") -> bytes:
    return tag + i.to_bytes(12, "big")


def keep(kept: durable.Kept, writes: list[Write]) -> None:
    for write in writes:
        kept[write.kind].update(write.puts)
        for gone in write.drops:
            kept[write.kind].pop(gone, None)


def lead(term: int, kept: durable.Kept, now: float = 0.0) -> StorePolicy:
    policy = StorePolicy(MasterMap(), PolicyLimits(), wall_ns=term)
    assert policy.lead(term, kept, now) == []
    return policy


def join(policy: StorePolicy, name: str, *keys: bytes, incarnation: int = 1) -> None:
    policy.joined(RegisteredNode(name, f"{name}:1", incarnation, NodeRole.POOL, name, name), policy.tombstones.last)
    policy.beat(name, StoreUsage(capacity_bytes=1 << 20, free_bytes=1 << 20), policy.tombstones.last)
    said = Announcement(name, incarnation, 1, keys, snapshot=True)
    policy.took(said, policy._map.apply(said))


class Wishes(RuleBasedStateMachine):
    """A dict of wishes, and what is kept of them, whatever is removed, wished for again, swept or taken over."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = durable.nothing()
        self.policy = lead(1, self.kept)
        self.term = 1
        self.wanted: dict[bytes, int] = {}

    @rule(keys=st.sets(st.integers(0, 5), min_size=1), tag=st.sampled_from(TAGS), replicas=st.integers(0, 3))
    def change(self, keys: set[int], tag: bytes, replicas: int) -> None:
        some = [key(i, tag) for i in keys]
        keep(self.kept, self.policy.change_replicas(some, replicas, False, 0.0)[1])
        for each in some:
            self.wanted.pop(each, None)
            if replicas:
                self.wanted[each] = replicas

    @rule(tag=st.sampled_from(TAGS), length=st.sampled_from([1, 4, 16]), i=st.integers(0, 5))
    def remove_prefix(self, tag: bytes, length: int, i: int) -> None:
        prefix = key(i, tag)[:length]
        keep(self.kept, self.policy.remove([], prefix, 0.0)[1])
        self.wanted = {each: n for each, n in self.wanted.items() if not each.startswith(prefix)}

    @rule(keys=st.sets(st.integers(0, 5)), tag=st.sampled_from(TAGS))
    def remove(self, keys: set[int], tag: bytes) -> None:
        some = [key(i, tag) for i in keys]
        if some:
            keep(self.kept, self.policy.remove(some, b"", 0.0)[1])
            for each in some:
                self.wanted.pop(each, None)

    @rule(most=st.integers(1, 4), written=st.booleans())
    def sweep(self, most: int, written: bool) -> None:
        self.policy.replicas.sweep(most)
        writes = self.policy.owed()
        if written:
            keep(self.kept, writes)
        else:
            self.policy.not_kept(writes)

    @rule()
    def another_leader(self) -> None:
        self.term += 1
        self.policy = lead(self.term, self.kept)

    def teardown(self) -> None:
        self.agrees()
        while self.policy.replicas.sweep(1):
            self.agrees()
        keep(self.kept, self.policy.owed())
        assert self.kept[durable.TARGET].keys() == self.wanted.keys()
        assert len(self.policy.replicas) == len(self.wanted)

    def agrees(self) -> None:
        for each in (key(i, tag) for tag in TAGS for i in range(6)):
            found = self.policy.replicas.target(each)
            assert (found and found.replicas) == self.wanted.get(each)


TestWishes = Wishes.TestCase
TestWishes.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)


def test_a_removal_by_prefix_costs_the_same_however_many_wishes_there_are() -> None:
    def cost(count: int) -> int:
        policy = lead(1, durable.nothing())
        for start in range(0, count, 1000):
            policy.change_replicas([key(i) for i in range(start, start + 1000)], 2, False, 0.0)
        worst = lines(lambda: policy.remove([], b"tag1", 0.0), "services/store/policy")
        assert policy.replicas.target(key(0)) is None and len(policy.replicas) == count
        while policy.replicas.sweep(0):
            worst = max(worst, lines(lambda: policy.replicas.sweep(100), "services/store/policy"))
        assert len(policy.replicas) == 0
        return worst

    assert cost(8000) == cost(2000)


def test_what_is_wished_for_again_before_it_is_forgotten_stays_kept() -> None:
    kept = durable.nothing()
    policy = lead(1, kept)
    keep(kept, policy.change_replicas([key(1), key(2)], 2, False, 0.0)[1])
    keep(kept, policy.remove([], b"tag1", 0.0)[1])
    assert not policy.replicas.sweep(10)
    keep(kept, policy.change_replicas([key(1)], 3, False, 0.0)[1])
    keep(kept, policy.owed())
    assert set(kept[durable.TARGET]) == {key(1)}


# ── pins ──────────────────────────────────────────────────────────────────────────────────────────


def pins(policy: StorePolicy, now: float) -> list[Order]:
    orders = policy.replicas.tick(now, policy.tombstones.last, random.Random(0))
    return [order for order in orders if isinstance(order.work, PinOrder)]


def carry_out(policy: StorePolicy, pinned: dict[str, set[bytes]], now: float, *, deaf: str = "") -> None:
    """Every node but `deaf` does what it is asked."""
    for order in pins(policy, now):
        assert isinstance(order.work, PinOrder)
        name, keys = order.work.holder.instance_id, order.work.keys
        if name == deaf:
            order.then(frozenset(), False, now)
            continue
        (pinned[name].update if order.work.hard else pinned[name].difference_update)(keys)
        order.then(frozenset(keys), True, now)


@pytest.mark.parametrize("when", ["wish ends before", "wish ends after"])
def test_a_pin_is_undone_though_the_leader_changes(when: str) -> None:
    """It was pinned under one leader; the node does not answer when it is to be undone, and another leads."""
    kept, pinned = durable.nothing(), {"a": set[bytes](), "b": set[bytes]()}
    old = lead(1, kept)
    for name in "ab":
        join(old, name, key(1))
    keep(kept, old.change_replicas([key(1)], 2, True, 0.0)[1])
    for now in range(5):
        carry_out(old, pinned, float(now))
    assert pinned == {"a": {key(1)}, "b": {key(1)}}
    if when == "wish ends before":
        keep(kept, old.change_replicas([key(1)], 0, False, 5.0)[1])
        carry_out(old, pinned, 6.0, deaf="a")
        keep(kept, old.owed())
        assert pinned == {"a": {key(1)}, "b": set()} and len(kept[durable.UNPIN]) == 1
    new = lead(2, kept, 7.0)
    for name in "ab":
        join(new, name, key(1))
    if when == "wish ends after":
        keep(kept, new.change_replicas([key(1)], 0, False, 8.0)[1])
    for now in range(9, 30):
        carry_out(new, pinned, float(now))
    assert pinned == {"a": set(), "b": set()}
    keep(kept, new.owed())
    assert not kept[durable.UNPIN]


def test_what_ended_with_its_life_or_is_wished_for_again_is_forgotten() -> None:
    kept, pinned = durable.nothing(), {"a": set[bytes](), "b": set[bytes]()}
    policy = lead(1, kept)
    for name in "ab":
        join(policy, name, key(1), key(2))
    keep(kept, policy.change_replicas([key(1), key(2)], 2, True, 0.0)[1])
    for now in range(5):
        carry_out(policy, pinned, float(now))
    keep(kept, policy.change_replicas([key(1), key(2)], 0, False, 5.0)[1])
    assert len(kept[durable.UNPIN]) == 4
    keep(kept, policy.change_replicas([key(2)], 2, True, 5.0)[1])
    policy.ended("a", 6.0)
    join(policy, "a", key(1), key(2), incarnation=2)
    assert not any(not order.work.hard and order.work.holder.instance_id == "a" for order in pins(policy, 7.0))  # type: ignore[union-attr]
    for _ in range(3):
        writes = policy.owed()
        policy.not_kept(writes)  # a failure is made good
    keep(kept, policy.owed())
    assert {raw[:16] for raw in kept[durable.UNPIN]} == {key(1)}, "that of b, under way"
