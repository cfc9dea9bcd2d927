"""The whole state of the master against brute-force models: announcements, losses, duplicates, restarts, removals,
replicas, drains, deaths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvmesh.clock import Tick
from kvmesh.kvcache.tiers import Tier, store_name
from kvmesh.services.store import block_map
from kvmesh.services.store.policy import drains, replicas, tombstones
from kvmesh.services.store.policy.copies import PullOrder, TrimOrder
from kvmesh.services.store.policy.quotas import TagQuota
from kvmesh.services.store.policy.store_policy import PolicyLimits
from tests.support.store.world import LEASE, Node, World

TAGS = [b"ten1", b"ten2"]
KEYS = [tag + bytes([i]) * 12 for tag in TAGS for i in range(1, 3)]
NAMES = ["a", "b", "c", "d"]
LIMITS = PolicyLimits(tombstone_retention_s=250.0, max_tombstone_keys=60, hot_lookups=0)

keys = st.sampled_from(KEYS)
some_keys = st.lists(keys, min_size=1, max_size=4, unique=True)
who = st.sampled_from(NAMES)
any_of = st.sets(who)
mostly = st.sampled_from([True, True, True, False])


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        nodes = [Node(name, (Tier.DRAM, Tier.SSD) if name < "c" else (Tier.DRAM,), f"m-{name}") for name in NAMES]
        self.world = World(nodes, LIMITS)
        self.world.state.blocks.map.first_keys = 0  # every sweep has others between its steps
        self.targets: dict[bytes, tuple[int, bool]] = {}
        self.drains: set[str] = set()
        self.quotas: set[bytes] = set()
        for node in nodes:
            self.world.beat(node)

    def node(self, name: str) -> Node | None:
        node = self.world.nodes[name]
        return None if node.frozen else node

    # ── nodes ────────────────────────────────────────────────────────────────────────────────────────

    @initialize(held=st.lists(some_keys, min_size=len(NAMES), max_size=len(NAMES)))
    def begin(self, held: list[list[bytes]]) -> None:
        for name, some in zip(NAMES, held, strict=True):
            self.seal(name, some, ssd=False, say=True)

    @rule(name=who, some=some_keys, ssd=st.booleans(), say=mostly)
    def seal(self, name: str, some: list[bytes], ssd: bool, say: bool) -> None:
        if node := self.node(name):
            for key in some:
                node.seal(key, Tier.SSD if ssd and Tier.SSD in node.tiers else Tier.DRAM)
            if say:
                self.world.announce_all(node)

    @rule(name=who, key=keys, asked=any_of)
    def renew(self, name: str, key: bytes, asked: set[str]) -> None:
        """Removed, and sealed anew at once."""
        self.remove([key], False, asked | {name}, set())
        self.seal(name, [key], ssd=False, say=False)

    @rule(name=who, some=some_keys)
    def evict(self, name: str, some: list[bytes]) -> None:
        if node := self.node(name):
            node.drop([key for key in some if key not in node.pins | node.own_pins], Tier.DRAM)

    @rule(name=who, key=keys)
    def pin(self, name: str, key: bytes) -> None:
        """A client pins it hard."""
        node = self.node(name)
        if node and node.holds(key):
            node.own_pins.add(key)

    @rule(name=who, lost=st.sampled_from(["", "", "request", "answer"]), words=st.integers(1, 4))
    def announce(self, name: str, lost: str, words: int) -> None:
        if node := self.node(name):
            for tier in node.tiers:
                for _ in range(words):
                    self.world.announce(node, tier, lost)

    @rule(name=who, pick=st.integers(0, 1000))
    def repeat(self, name: str, pick: int) -> None:
        node = self.world.nodes[name]
        if node.old_words:
            self.world.deliver(node, node.old_words[pick % len(node.old_words)])

    @rule(name=who, lost=st.booleans())
    def beat(self, name: str, lost: bool) -> None:
        if node := self.node(name):
            self.world.beat(node, lost)

    @rule(name=who)
    def freeze(self, name: str) -> None:
        self.world.nodes[name].frozen = True

    @rule(name=who)
    def wake(self, name: str) -> None:
        self.world.nodes[name].frozen = False

    @rule(name=who, warm=st.booleans(), spared=mostly)
    def restart(self, name: str, warm: bool, spared: bool) -> None:
        node = self.world.nodes[name]
        if not spared:
            node.restart(warm)
            node.frozen = False

    @rule(seconds=st.sampled_from([0.3, 0.3, 1.0, 1.0, 3.0, 6.0, 30.0, LEASE + 1]))
    def wait(self, seconds: float) -> None:
        """Who is not frozen beats meanwhile."""
        self.world.now += seconds * 0.9
        if seconds < LEASE:
            for node in self.world.nodes.values():
                if not node.frozen:
                    self.world.beat(node)
        self.world.now += seconds * 0.1
        self.tick(frozenset())

    # ── the master ───────────────────────────────────────────────────────────────────────────────────

    @rule(some=some_keys, prefix=mostly.map(lambda yes: not yes), asked=any_of, deaf=any_of)
    def remove(self, some: list[bytes], prefix: bool, asked: set[str], deaf: set[str]) -> None:
        self.tick(frozenset())
        begin = some[0][: 4 + len(some) % 2] if prefix else b""
        gone = self.world.remove(() if prefix else tuple(some), begin, asked, deaf)
        self.targets = {key: target for key, target in self.targets.items() if not gone.covers(key)}

    @rule(some=some_keys, n=st.integers(0, 3), hard=st.booleans())
    def change_replicas(self, some: list[bytes], n: int, hard: bool) -> None:
        self.world.state.policy.change_replicas(some, n, hard and n > 0, self.world.now)
        for key in some:
            self.targets.pop(key, None)
            if n:
                self.targets[key] = (n, hard)

    @rule(name=who, cancel=st.booleans())
    def drain(self, name: str, cancel: bool) -> None:
        self.world.state.policy.drain(name, cancel)
        (self.drains.discard if cancel else self.drains.add)(name)

    @rule(tag=st.sampled_from(TAGS), blocks=st.integers(0, 9))
    def quota(self, tag: bytes, blocks: int) -> None:
        self.world.state.policy.set_quota(TagQuota(tag, blocks))
        (self.quotas.add if blocks else self.quotas.discard)(tag)

    @rule(unreached=st.frozensets(st.integers(0, 5)))
    def tick(self, unreached: frozenset[int]) -> None:
        world = self.world
        world._ended(world.state.step(Tick(), world.now))
        self.drains = {name for name in self.drains if name in world.state.policy.drains}
        world.state.blocks.sweep(5)
        orders, _ = world.state.policy.tick(world.now)
        for order in orders:
            self.check_order(order.work)
        for number, order in enumerate(orders):
            world.carry_out(order, number not in unreached)

    def check_order(self, work: Any) -> None:
        policy = self.world.state.policy
        match work:
            case PullOrder(receiver, holders, some):
                assert receiver.instance_id not in policy.drains, "a draining node takes no copies"
                assert holders and receiver not in holders
                for key in some:
                    assert receiver.instance_id not in policy.replicas.now(key, self.world.now)
            case TrimOrder(holder, keepers, some):
                assert holder not in keepers
                assert all(len(keepers) >= self.targets[key][0] for key in some), "fewer than wished for"

    # ── what must hold ───────────────────────────────────────────────────────────────────────────────

    @invariant()
    def the_map_shows_what_was_said(self) -> None:
        known = self.world.state.blocks.map
        for key in KEYS:
            assert set(known.holders(key)) == self.world.shown.holders(key), key
        known.check_integrity()

    @invariant()
    def quotas_count_what_is_shown(self) -> None:
        if self.world.state.blocks.map.sweeping:
            return
        used = {quota.tag: used for quota, used in self.world.state.policy.quotas.all()}
        dram = [life.keys for name, life in self.world.shown.stores.items() if "#" not in name]
        assert used == {tag: sum(key.startswith(tag) for held in dram for key in held) for tag in self.quotas}

    def teardown(self) -> None:
        """When everybody is reached again, everything comes right."""
        world = self.world
        for node in world.nodes.values():
            node.frozen = False
        for _ in range(16):
            world.now += 20
            for _ in range(3):
                for node in world.nodes.values():
                    world.beat(node)
                for node in world.nodes.values():
                    world.announce_all(node)
                self.tick(frozenset())
        self.the_map_shows_what_was_said()
        for node in world.nodes.values():
            for tier, store in node.stores.items():
                shown = world.shown.stores[store_name(node.name, tier)].keys
                assert set(store.keys()) == shown, f"{node.name} {tier.name}"
            assert not world.state.policy.tombstones.newer(node.name)
        for key, (wanted, hard) in self.targets.items():
            self.check_target(key, wanted, hard)
        for name in self.drains:
            self.check_drained(name)

    def check_target(self, key: bytes, wanted: int, hard: bool) -> None:
        holders = {name for name, node in self.world.nodes.items() if node.holds(key)}
        if not holders:
            return
        free, staying = set(NAMES) - holders - self.drains, holders - self.drains
        pinned = {name for name in staying if key in self.world.nodes[name].own_pins} if not hard else set()
        enough = max(wanted, len(pinned))
        assert len(staying) == enough or (len(staying) < wanted and not free), (key, holders, wanted, self.drains)
        for name in holders:
            assert (key in self.world.nodes[name].pins) == hard, (key, name, hard)

    def check_drained(self, name: str) -> None:
        staying = [node for other, node in self.world.nodes.items() if other not in self.drains]
        drain = self.world.state.policy.drains.get(name)
        assert drain is not None
        if staying:
            sole = {key for key in self.world.nodes[name].blocks() if not any(node.holds(key) for node in staying)}
            assert not sole and drain.done, (name, sole, drain)


MODEL = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
TestMaster = Machine.TestCase
TestMaster.settings = MODEL


def test_a_pin_that_failed_is_made_where_no_more_copies_can_be() -> None:
    """Found by the machine: the first pin fails, and of three nodes that should have the block two are drained."""
    machine, key = Machine(), KEYS[0]
    machine.begin(held=[[key], [], [], [key]])
    for name in ("b", "d"):
        machine.drain(name, cancel=False)
    machine.change_replicas([key], 3, hard=True)
    machine.tick(unreached=frozenset(range(6)))
    machine.teardown()
    assert key in machine.world.nodes["a"].pins


def nothing_is_masked(self: Any, instance_id: str, keys: Any) -> set[bytes]:
    return set()


def nothing_is_swept(self: block_map.MasterMap, key: bytes, longest: int = 16) -> int:
    return 0


def nobody_owes(self: Any, store_id: str) -> None:
    """What was masked is not asked for again."""


def drains_count_for_each_other(self: drains.Drains) -> int:
    return sum(bit for _, bit in self._map.shown())


def trims_one_too_many(self: replicas.Replicas, key: bytes, now: float, needs: Any) -> None:
    target = self._targets.get(key)
    if target is not None and target.replicas > 1:
        target.replicas -= 1
    RIGHT_LOOK(self, key, now, needs)


RIGHT_LOOK = replicas.Replicas._look


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (block_map.MasterMap, "_swept", nothing_is_swept),
        (tombstones.Tombstones, "masked", nothing_is_masked),
        pytest.param(tombstones.Tombstones, "owes", nobody_owes, marks=pytest.mark.slow),
        pytest.param(drains.Drains, "_staying", drains_count_for_each_other, marks=pytest.mark.slow),
        (replicas.Replicas, "_look", trims_one_too_many),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_master_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: Callable[..., Any]
) -> None:
    monkeypatch.setattr(owner, name, broken)
    quick = settings(MODEL, max_examples=4000, derandomize=True, phases=[Phase.generate])
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(Machine, settings=quick)
