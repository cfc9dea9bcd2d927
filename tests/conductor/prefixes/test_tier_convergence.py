"""Nodes of several tiers, a master and a conductor over a channel that loses, repeats and delays, while nodes and
master restart, members are dropped and the watch stream breaks. Once the channel is good, the maps of both equal the
truth in every tier, and nothing of an earlier life is left. The protos of the wire are in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvmesh.errors import UnknownInstance
from kvmesh.kvcache.announce import Announcer
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.tiers import Tier, store_name
from kvmesh.membership.announcing import to_proto
from kvmesh.rpc.pb import store_pb2 as pb
from kvmesh.services.conductor.domain import Event, Life, OutOfStep, StoreLost
from kvmesh.services.conductor.domain import Tick as Later
from kvmesh.services.conductor.fleet.watch import _Follower
from kvmesh.services.conductor.prefixes.index import Index
from kvmesh.services.conductor.settings import Settings
from kvmesh.services.conductor.state import ConductorState
from kvmesh.services.store import domain, mapping
from kvmesh.services.store.block_map import BlockDirectory
from kvmesh.services.store.state import MasterState

KEYS = [bytes([i]) * 16 for i in range(6)]
NAMES = ["a", "b"]
TIERS = [Tier.DRAM, Tier.SSD]
PART = 2  # keys in an announcement
NAME, TIER = st.sampled_from(NAMES), st.sampled_from(TIERS)
SETTINGS = settings(max_examples=120, stateful_step_count=50, deadline=None)


class Source:
    """One tier of one life: its announcer, and the call that waits for an answer."""

    def __init__(self, name: str, life: int) -> None:
        self.store = NodeStore(4, high_percent=100)
        self.announcer = Announcer(name, life, self.store, max_keys=PART)
        self.call = 0


class Node:
    def __init__(self, name: str, life: int) -> None:
        self.name, self.life, self.alive = name, life, True
        self.tiers = {tier: Source(store_name(name, tier), life) for tier in TIERS}

    @property
    def member(self) -> domain.RegisteredNode:
        return domain.RegisteredNode(self.name, "h:1", self.life, domain.NodeRole.PREFILL, "n", self.name)


@dataclass(frozen=True)
class Call:
    node: Node = field(compare=False)
    tier: Tier
    number: int
    said: pb.Announcement = field(compare=False)


class Mesh(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now, self.calls, self.lives, self.masters = 0.0, 0, 0, 0
        self.nodes: dict[str, Node] = {}
        self.wire: list[Call] = []  # each may arrive any number of times; its answer may be lost
        self.conductor = ConductorState(Settings(stall_s=1e9), random.Random(0), 0.0)
        self.follower: _Follower | None = None
        self.stream: list[pb.StoreEvent] = []
        self.master_restarts()
        for name in NAMES:
            self.born(name)

    def born(self, name: str) -> None:
        self.lives += 1
        self.nodes[name] = Node(name, self.lives)
        self.joins(name)

    # ── nodes ────────────────────────────────────────────────────────────────────────────────────

    @rule(name=NAME, tier=TIER, keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4))
    def seals(self, name: str, tier: Tier, keys: list[bytes]) -> None:
        store = self.nodes[name].tiers[tier].store
        for key, extent in zip(keys, store.begin(keys), strict=True):
            if extent is not None:
                store.seal(key)

    @rule(name=NAME, tier=TIER, n=st.integers(1, 4))
    def evicts(self, name: str, tier: Tier, n: int) -> None:
        store = self.nodes[name].tiers[tier].store
        store.release(store.allocate(n))

    @rule(name=NAME)
    def joins(self, name: str) -> None:
        node = self.nodes[name]
        if node.alive:
            self.say(domain.NodeJoined(node.member))

    @rule(name=NAME, tier=TIER, force=st.booleans())
    def announces(self, name: str, tier: Tier, force: bool) -> None:
        node = self.nodes[name]
        source = node.tiers[tier]
        said = source.announcer.next(force) if node.alive else None
        if said is not None:
            self.calls += 1
            source.call = self.calls
            self.wire.append(Call(node, tier, self.calls, to_proto(said)))

    @rule(name=NAME, tier=TIER)
    def is_heard(self, name: str, tier: Tier) -> None:
        """What mostly happens."""
        before = len(self.wire)
        self.announces(name, tier, force=True)
        if len(self.wire) > before:
            self.deliver(before, again=False, answered=True)

    @rule(name=NAME, tier=TIER)
    def gives_up_waiting(self, name: str, tier: Tier) -> None:
        source = self.nodes[name].tiers[tier]
        if source.call:
            source.call = 0
            source.announcer.failed()

    @rule(name=NAME, how=st.sampled_from(["crashes", "restarts", "leaves"]))
    def ends(self, name: str, how: str) -> None:
        node = self.nodes[name]
        node.alive = False
        if how == "leaves":
            self.say(domain.NodeLeft(name, node.life))
        if how == "restarts":
            self.born(name)

    # ── the channel ──────────────────────────────────────────────────────────────────────────────

    @precondition(lambda self: self.wire)
    @rule(data=st.data(), again=st.booleans(), answered=st.booleans())
    def delivers(self, data: st.DataObject, again: bool, answered: bool) -> None:
        self.deliver(data.draw(st.integers(0, len(self.wire) - 1)), again, answered)

    @precondition(lambda self: self.wire)
    @rule(data=st.data())
    def loses(self, data: st.DataObject) -> None:
        self.wire.pop(data.draw(st.integers(0, len(self.wire) - 1)))

    def deliver(self, index: int, again: bool, answered: bool) -> None:
        call = self.wire[index] if again else self.wire.pop(index)
        heard = self.say(domain.Announce(mapping.announcement_in(call.said)))
        source = call.node.tiers[call.tier]
        if not (answered and call.node.alive and source.call == call.number):
            return
        source.call = 0
        if isinstance(heard, domain.Heard):
            source.announcer.acked(heard.want_snapshot)
        else:
            for each in call.node.tiers.values():
                each.call = 0
                each.announcer.restart()
            self.say(domain.NodeJoined(call.node.member))

    # ── master and conductor ─────────────────────────────────────────────────────────────────────

    def say(self, event: domain.Event) -> domain.Heard | None:
        heard = None
        for action in self.master.step(event, self.now):
            match action:
                case domain.Publish() | domain.Relay():
                    self.stream.append(mapping.event_out(action))
                case domain.Heard():
                    heard = action
                case domain.RefuseCall(error):
                    assert isinstance(error, UnknownInstance) or isinstance(event, domain.NodeJoined), error
        return heard

    @rule()
    def master_restarts(self) -> None:
        self.masters += 1
        self.master = MasterState(lease_s=1e9, stall_s=1e9)
        self.stream_breaks()

    @rule(name=NAME)
    def is_dropped(self, name: str) -> None:
        """Rightly or not."""
        self.say(domain.NodeLeft(name, self.nodes[name].life))

    @rule(n=st.integers(0, 5))
    def sweep(self, n: int) -> None:
        self.master.blocks.sweep(n)
        self.conductor._index.truth.sweep(n)

    @rule()
    def stream_breaks(self) -> None:
        self.follower, self.stream = None, []
        self.conductor.step(StoreLost(), self.now)

    @rule(n=st.integers(1, 8))
    def conductor_reads(self, n: int) -> None:
        if self.follower is None:
            self.follow()
        for _ in range(min(n, len(self.stream))):
            event = self.stream.pop(0)
            self.take([event], event.seq, snapshot=False)

    def follow(self) -> None:
        """From a snapshot on."""
        self.follower = _Follower(self.hear)
        reading = self.master.read()
        self.stream = []
        told: list[domain.Publish | domain.Relay] = []
        told += [domain.Publish(reading.seq, domain.Change.JOINED, member) for member in reading.members]
        told += [domain.Relay(reading.seq, said) for said in reading.announcements()]
        self.take([mapping.event_out(one) for one in told], reading.seq, snapshot=True)

    def take(self, events: list[pb.StoreEvent], seq: int, *, snapshot: bool) -> None:
        assert self.follower is not None
        told = pb.StoreEvents(master_incarnation=self.masters, seq=seq, snapshot=snapshot, events=events)
        self.follower.take(pb.StoreEvents.FromString(told.SerializeToString()))

    def hear(self, event: Event) -> None:
        for action in self.conductor.step(event, self.now):
            assert not isinstance(action, OutOfStep), f"{event}: what the master relays follows"

    # ── what is always true, and what is true in the end ─────────────────────────────────────────

    @invariant()
    def whole(self) -> None:
        self.master.blocks.map.check_integrity()
        truth = self.conductor._index.truth
        truth.check_integrity()
        for name in NAMES:
            lives = {life for tier in Tier if (life := truth.incarnation(store_name(name, tier)))}
            assert len(lives) < 2, "two lives of one name"

    def teardown(self) -> None:
        """Everything arrives from now on, once. Each tier needs 8 calls: see `tests.kvcache.test_convergence`."""
        while self.wire:
            self.deliver(0, again=False, answered=True)
        for name, node in self.nodes.items():
            if not node.alive:
                self.say(domain.NodeLeft(name, node.life))
                continue
            self.joins(name)
            for tier in TIERS * 8:
                self.gives_up_waiting(name, tier)
                self.is_heard(name, tier)
        self.conductor_reads(1 << 20)
        self.now += 1e3
        self.conductor.step(Later(), self.now)  # whom a new master has not named by now is gone
        held = {
            key: sorted(
                (name, tier)
                for name, node in self.nodes.items()
                for tier, source in node.tiers.items()
                if node.alive and source.store.holds(key)
            )
            for key in KEYS
        }
        index = self.conductor._index
        assert {key: sorted(self.master.blocks.holders(key)) for key in KEYS} == held, "the master's map"
        shown = {key: sorted(index.truth.holders(key)) for key in KEYS}
        assert shown == {key: sorted(store_name(*at) for at in found) for key, found in held.items()}, "the conductor's"
        for node in self.nodes.values():
            place = index.place_of((node.name, node.life))
            for key in KEYS:
                bits = {Tier.DRAM: place.sealed, **dict(place.lower)}
                at = [(node.name, tier) for tier, bit in bits.items() if index.truth.mask(key) & bit]
                assert at == [each for each in held[key] if each[0] == node.name]
        while self.master.blocks.sweep(1 << 20) or index.truth.sweep(1 << 20):
            pass
        assert self.master.blocks.map.unswept == index.truth.unswept == 0
        self.whole()


@pytest.mark.slow
def test_whatever_is_lost_master_and_conductor_know_every_tier() -> None:
    run_state_machine_as_test(Mesh, settings=SETTINGS)


def only_memory(blocks: BlockDirectory, store_id: str) -> None:
    blocks._parts.pop(store_id, None)
    blocks.map.drop(store_id)


def only_its_memory(index: Index, life: Life) -> None:
    if index.truth.incarnation(life[0]) == life[1]:
        index.truth.drop(life[0])


@pytest.mark.parametrize(("owner", "broken"), [(BlockDirectory, only_memory), (Index, only_its_memory)])
def test_a_broken_one_is_found(owner: type, broken: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    def play() -> None:
        mesh = Mesh()
        mesh.seals("a", Tier.SSD, KEYS[:2])
        mesh.is_heard("a", Tier.SSD)
        mesh.conductor_reads(99)
        mesh.ends("a", "leaves")
        mesh.whole()
        mesh.teardown()

    play()
    monkeypatch.setattr(owner, "drop", broken)
    with pytest.raises(AssertionError):
        play()
