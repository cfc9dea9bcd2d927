"""What a watcher knows equals what the master knows, whatever happens while it reads."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.clock import Tick
from kvmesh.errors import InvalidRequest, UnknownInstance
from kvmesh.kvcache.announce import MAX_KEYS, Announcement, snapshot_parts
from kvmesh.kvcache.block_map import BlockMap, Verdict
from kvmesh.kvcache.tiers import Tier, store_names
from kvmesh.rpc.pb import common_pb2
from kvmesh.rpc.pb import store_pb2 as pb
from kvmesh.services.store import block_map, mapping
from kvmesh.services.store.block_map import BlockDirectory
from kvmesh.services.store.domain import (
    Action,
    Announce,
    Beat,
    Change,
    Heard,
    NodeJoined,
    NodeLeft,
    NodeRole,
    Publish,
    RefuseCall,
    RegisteredNode,
    Relay,
    check_announcement,
    check_member,
)
from kvmesh.services.store.state import MasterState

LEASE = 10.0
NAMES = ["a", "b", "c"]
TIERS = [name for node in NAMES for name in store_names(node)[:2]]  # "a", "a#ssd", ...
KEYS = [bytes([i]) * 16 for i in range(16)]
Known = tuple[frozenset[RegisteredNode], dict[str, frozenset[bytes]]]


def member(name: str, incarnation: int = 1) -> RegisteredNode:
    return RegisteredNode(name, "h:1", incarnation, NodeRole.PREFILL, "node", name)


def known_of(members: list[RegisteredNode], held: BlockMap) -> Known:
    found = {name: frozenset(held.keys_of(name)) for name in TIERS}
    return frozenset(members), {name: keys for name, keys in found.items() if keys}


class Node:
    """One instance, told of by what it says. Its tiers tell of themselves, each with numbers of its own."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name, self.incarnation, self._rng = name, 0, rng
        self.restart()

    def restart(self) -> None:
        self.incarnation += 1
        self.tiers = [Told(tier, self.incarnation, self._rng) for tier in store_names(self.name)[:2]]


class Told:
    """One tier of one life. Its announcements may be lost, said twice, or come late."""

    def __init__(self, name: str, incarnation: int, rng: random.Random) -> None:
        self.name, self.incarnation, self._rng = name, incarnation, rng
        self.seq, self.held = 0, set[bytes]()
        self.said: list[Announcement] = []

    def batch(self) -> Announcement:
        self.seq += 1
        sealed = {key for key in self._rng.sample(KEYS, 4) if key not in self.held}
        removed = set(self._rng.sample(sorted(self.held), min(len(self.held), 2)))
        self.held = self.held - removed | sealed
        self.said.append(Announcement(self.name, self.incarnation, self.seq, tuple(sealed), tuple(removed)))
        return self.said[-1]

    def snapshot(self, max_keys: int) -> list[Announcement]:
        self.seq += 1
        self.said = list(snapshot_parts(self.name, self.incarnation, self.seq, sorted(self.held), max_keys))
        return self.said


class Watcher:
    """Reads its snapshot and the events after it as slowly as it likes; keeps members and a BlockMap."""

    def __init__(self, state: MasterState) -> None:
        self.reading = state.read()
        self.seq = self.reading.seq
        self.members = {m.instance_id: m for m in self.reading.members}
        self.blocks = BlockMap()
        self._parts: Iterator[Announcement] | None = self.reading.announcements()
        self.read_until: int | None = None
        self.waiting: list[Publish | Relay] = []

    def read(self, state: MasterState) -> None:
        if self._parts is not None:
            part = next(self._parts, None)
            if part is None:
                self._parts, self.read_until = None, state.seq
            else:
                assert self.blocks.apply(part) in (Verdict.APPLIED, Verdict.PARTIAL)
        elif self.waiting:
            self._take(self.waiting.pop(0))

    def _take(self, event: Publish | Relay) -> None:
        assert event.seq == self.seq + 1
        self.seq = event.seq
        if isinstance(event, Relay):
            verdict = self.blocks.apply(event.announcement)
            assert verdict is not Verdict.GAP
            assert verdict is not Verdict.STALE
        elif event.change is Change.JOINED:
            assert event.member.instance_id not in self.members
            self.members[event.member.instance_id] = event.member
        else:
            assert self.members.pop(event.member.instance_id) == event.member
            for name in store_names(event.member.store_id):
                self.blocks.drop(name, event.member.incarnation)

    @property
    def exact(self) -> bool:
        """Every change that its snapshot may hold already has been heard as an event too."""
        return self.read_until is not None and self.seq >= self.read_until

    def known(self) -> Known:
        return known_of(list(self.members.values()), self.blocks)


class World:
    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now = rng, 0.0
        self.state = MasterState(lease_s=LEASE, stall_s=1e9)
        self.nodes = {name: Node(name, rng) for name in NAMES}
        self.watchers: list[Watcher] = []
        self.history = {0: known_of([], self.state.blocks.map)}

    def say(self, *events: NodeJoined | Beat | NodeLeft | Announce | Tick) -> Heard | None:
        """Apply; what watchers are to hear waits for them. Deaths on the way are in the same step."""
        heard = None
        for event in events:
            actions: list[Action] = list(self.state.step(event, self.now))
            for action in actions:
                if isinstance(action, Publish | Relay):
                    for watcher in self.watchers:
                        watcher.waiting.append(action)
                elif isinstance(action, Heard):
                    heard = action
            self.history[self.state.seq] = known_of(self.state.members, self.state.blocks.map)
        return heard

    def step(self) -> None:
        node = self.nodes[self.rng.choice(NAMES)]
        told = self.rng.choice(node.tiers)
        match self.rng.randrange(13):
            case 0:
                self.say(NodeJoined(member(node.name, node.incarnation)))
            case 1:
                self.say(NodeLeft(node.name, node.incarnation))
            case 2:
                node.restart()
            case 3:
                self.now += self.rng.choice([1.0, LEASE / 2, LEASE])
                self.say(Tick())
            case 4:
                self.watchers.append(Watcher(self.state))
            case 5:
                told.batch()  # lost on its way
            case 6 if told.said:
                self.say(Announce(self.rng.choice(told.said)))  # late, or once more
            case 7:
                for part in told.snapshot(self.rng.choice([1, 3, 100])):
                    self.say(Announce(part))
                    if self.rng.random() < 0.3:
                        self.read()
                    if self.rng.random() < 0.1:
                        break
            case 8:
                self.state.blocks.sweep(self.rng.randrange(4))
            case 9 | 10:
                self.say(Beat(node.name, node.incarnation), Announce(told.batch()))
            case _:
                self.read()

    def read(self) -> None:
        for watcher in self.watchers:
            for _ in range(self.rng.randrange(3)):
                watcher.read(self.state)
                if watcher.exact and watcher.seq in self.history:
                    assert watcher.known() == self.history[watcher.seq]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 5, MAX_KEYS]))
def test_every_watcher_knows_what_the_master_knew_at_its_seq(seed: int, slice_keys: int) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(block_map, "READ_KEYS", slice_keys)  # so that reading one store takes many turns
    try:
        world = World(random.Random(seed))
        for _ in range(150):
            world.step()
            world.state.blocks.map.check_integrity()
        for watcher in world.watchers:
            while not (watcher.exact and watcher.seq == world.state.seq):
                watcher.read(world.state)
            assert watcher.known() == world.history[world.state.seq]
        # Told that it is behind, a node that announces a snapshot is known in full.
        for node in world.nodes.values():
            world.say(NodeLeft(node.name, node.incarnation))
            node.restart()
            world.say(NodeJoined(member(node.name, node.incarnation)))
            for told in node.tiers:
                told.batch()
                heard = world.say(Announce(told.batch()))
                assert heard is not None and heard.want_snapshot
                for part in told.snapshot(5):
                    heard = world.say(Announce(part))
                assert heard == Heard(Verdict.APPLIED, False, told.seq)
                assert set(world.state.blocks.map.keys_of(told.name)) == told.held
        for key in KEYS:
            at = [
                (n.name, t)
                for n in world.nodes.values()
                for t, told in zip(Tier, n.tiers, strict=False)
                if key in told.held
            ]
            assert sorted(world.state.blocks.holders(key)) == sorted(at)
            assert sorted(world.state.blocks.store_ids(key)) == sorted({name for name, _ in at})
        while world.state.blocks.sweep(100):
            pass
        assert world.state.blocks.map.unswept == 0
        world.state.blocks.map.check_integrity()
    finally:
        patch.undo()


def test_a_snapshot_goes_on_to_watchers_only_when_whole() -> None:
    held = BlockDirectory(max_store_blocks=100)
    first, second = snapshot_parts("a", 1, 7, KEYS, 8)
    assert held.apply(first) == (Verdict.PARTIAL, ())
    assert held.map.replicas == 0
    assert held.apply(first)[0] is Verdict.DUPLICATE
    assert held.apply(second) == (Verdict.APPLIED, (first, second))
    assert held.apply(second) == (Verdict.DUPLICATE, ())
    assert held.map.replicas == len(KEYS)


def test_an_unfinished_snapshot_leaves_nothing_behind() -> None:
    held = BlockDirectory(max_store_blocks=100)
    for seq in range(1, 4):
        held.apply(next(snapshot_parts("a", 1, seq, KEYS, 8)))
    held.drop("a")
    assert held.apply(Announcement("a", 1, 3, (KEYS[9],), snapshot=True, part=1)) == (Verdict.GAP, ())
    while held.sweep(1):
        pass
    assert held.map.unswept == 0
    held.drop("a")
    held.sweep(1)
    held.map.check_integrity()
    assert held._parts == {}


def test_what_is_too_much_of_one_store_is_not_in_the_map() -> None:
    """What is shown stays true, and the store is never asked to say it again: it would be as much as before."""
    state, follower = MasterState(lease_s=LEASE, stall_s=1e9, max_store_blocks=4), BlockMap()
    state.step(NodeJoined(member("a")), 0.0)

    def say(*said: object, **more: object) -> tuple[set[bytes], int]:
        *relays, heard = state.step(Announce(Announcement("a", 1, *said, **more)), 0.0)  # type: ignore[arg-type]
        assert isinstance(heard, Heard)
        assert heard.verdict in (Verdict.APPLIED, Verdict.PARTIAL)
        assert not heard.want_snapshot
        for relay in relays:
            assert isinstance(relay, Relay)
            follower.apply(relay.announcement)
        held = set(state.blocks.map.keys_of("a"))
        assert held == set(follower.keys_of("a"))
        return held, heard.cut

    a, b, c, d, e, f, g = KEYS[:7]
    assert say(1, (a, b, c)) == ({a, b, c}, 0)
    assert say(2, (d, e)) == ({a, b, c, d}, 1)
    assert say(3, (f,)) == ({a, b, c, d}, 1)  # nothing is left of it, and yet it is no gap
    assert say(4, (g,), (a, f)) == ({b, c, d, g}, 0)
    assert say(5, (), (b, e)) == ({c, d, g}, 0)
    assert say(6, (a, b), tuple(KEYS[7:])) == ({a, c, d, g}, 1)  # removing what is not there makes no room
    assert say(7, tuple(KEYS[:3]), snapshot=True, more=True) == ({a, c, d, g}, 0)
    assert say(7, tuple(KEYS[3:6]), snapshot=True, part=1) == ({a, b, c, d}, 2)
    assert say(8, (e,), (a,)) == ({b, c, d, e}, 0)


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (Announcement("", 1, 1), "store_id"),
        (Announcement("a" * 300, 1, 1), "store_id"),
        (Announcement("a", 0, 1), "incarnation"),
        (Announcement("a", 1, 0, (KEYS[0],)), "seq"),
        (Announcement("a", 1, 0, snapshot=True), "seq"),
        (Announcement("a", 1, 1, (KEYS[0],) * (MAX_KEYS + 1)), "sealed"),
        (Announcement("a", 1, 1, removed=(KEYS[0],) * (MAX_KEYS + 1)), "removed"),
        (Announcement("a", 1, 1, removed=(KEYS[0],), snapshot=True), "removed"),
        (Announcement("a", 1, 1, part=1), "part"),
        (Announcement("a", 1, 1, more=True), "more"),
        (Announcement("a", 1, 1, snapshot=True, part=1 << 31), "part"),
    ],
)
def test_an_announcement_is_checked_field_by_field(said: Announcement, field: str) -> None:
    error = check_announcement(said)
    assert error is not None
    assert error.field == f"announcement.{field}"
    assert str(error).startswith(f"announcement.{field}=")


def test_a_silent_store_with_a_number_is_told_to_watchers() -> None:
    """Else its next batch would be a gap there."""
    state = MasterState(lease_s=LEASE, stall_s=1e9)
    state.step(NodeJoined(member("a")), 0.0)
    state.step(Announce(Announcement("a", 1, 1, (KEYS[0],))), 0.0)
    state.step(Announce(Announcement("a", 1, 2, (), (KEYS[0],))), 0.0)
    (told,) = state.read().announcements()
    assert told == Announcement("a", 1, 2, (), snapshot=True)


def test_the_limit_is_of_each_tier() -> None:
    state = MasterState(lease_s=LEASE, stall_s=1e9, max_store_blocks=4)
    state.step(NodeJoined(member("a")), 0.0)
    for name, cut in (("a", 0), ("a#ssd", 0), ("a", 1)):
        seq = state.blocks.map.seq(name) + 1
        *_, heard = state.step(Announce(Announcement(name, 1, seq, tuple(KEYS[4 * cut : 4 * cut + 4 - 3 * cut]))), 0.0)
        assert heard == Heard(Verdict.APPLIED, False, seq, cut)
    assert state.blocks.map.replicas == 8


@pytest.mark.parametrize("last", [NodeLeft("a", 1), NodeJoined(member("a", 2))])
def test_a_life_ends_in_all_its_tiers(last: NodeLeft | NodeJoined) -> None:
    state = MasterState(lease_s=LEASE, stall_s=1e9)
    state.step(NodeJoined(member("a")), 0.0)
    for name in store_names("a"):
        state.step(Announce(Announcement(name, 1, 1, (KEYS[0],))), 0.0)
    assert [tier for _, tier in state.blocks.holders(KEYS[0])] == list(Tier)
    assert state.blocks.store_ids(KEYS[0]) == ["a"]
    reading = state.read()
    state.step(last, 0.0)
    assert state.blocks.holders(KEYS[0]) == []
    assert [(said.store_id, said.seq, said.sealed) for said in reading.announcements()] == [
        (name, 1, ()) for name in store_names("a")
    ]
    (refused,) = state.step(Announce(Announcement("a#ssd", 1, 2, (KEYS[1],))), 0.0)
    assert isinstance(refused, RefuseCall)
    assert isinstance(refused.error, UnknownInstance)


def test_what_a_member_calls_itself_is_no_tiers_name() -> None:
    for field, who in (
        ("member.instance.instance_id", RegisteredNode("a#ssd", "h:1", 1, NodeRole.POOL, "n", "a#ssd")),
        ("member.store_id", RegisteredNode("a", "h:1", 1, NodeRole.POOL, "n", "a#x")),
    ):
        error = check_member(who)
        assert error is not None
        assert error.field == field


@pytest.mark.parametrize(
    ("said", "field"),
    [
        (pb.Announcement(store_id="a", incarnation=1, seq=1, tier=9), "tier"),  # type: ignore[arg-type]
        (pb.Announcement(store_id="a#ssd", incarnation=1, seq=1), "store_id"),
        (pb.Announcement(store_id="a#", incarnation=1, seq=1, tier=common_pb2.TIER_SSD), "store_id"),
    ],
)
def test_a_tier_that_cannot_be_is_refused_by_name(said: pb.Announcement, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        mapping.announcement_in(said)
    assert caught.value.field == f"announcement.{field}"


@pytest.mark.parametrize("tier", Tier)
def test_a_tier_travels_as_a_number(tier: Tier) -> None:
    said = Announcement(store_names("a")[tier - 1], 1, 3, tuple(KEYS[:2]), (KEYS[2],))
    told = mapping.announcement_out(said)
    assert (told.store_id, told.tier) == ("a", tier.value)
    assert mapping.announcement_in(told) == said


def test_usage_keeps_the_tiers_it_knows() -> None:
    ssd = pb.TierUsage(tier=common_pb2.TIER_SSD, capacity_bytes=9, used_bytes=5, blocks=2, read_ns=70, bytes_per_s=8)
    usage = pb.StoreUsage(capacity_bytes=4, free_bytes=3, blocks=1, tiers=[ssd], sending_bytes_per_s=6, leases=7)
    assert mapping.usage_in(usage) == usage
    usage.tiers.append(pb.TierUsage(tier=77))  # type: ignore[arg-type]
    assert list(mapping.usage_in(usage).tiers) == [ssd]
