"""What a watcher knows equals what the master knows, whatever happens while it reads."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.kvcache.announce import MAX_KEYS, Announcement, snapshot_parts
from kvmesh.kvcache.block_map import BlockMap, Verdict
from services.store import blocks, checks
from services.store.blocks import Blocks
from services.store.domain import Action, Announce, Beat, Change, Heard, Join, Leave, Member, Publish, Relay, Role, Tick
from services.store.state import MasterState

LEASE = 10.0
NAMES = ["a", "b", "c"]
KEYS = [bytes([i]) * 16 for i in range(16)]
Known = tuple[frozenset[Member], dict[str, frozenset[bytes]]]


def member(name: str, incarnation: int = 1) -> Member:
    return Member(name, "h:1", incarnation, Role.PREFILL, "node", name)


def known_of(members: list[Member], held: BlockMap) -> Known:
    found = {name: frozenset(held.keys_of(name)) for name in NAMES}
    return frozenset(members), {name: keys for name, keys in found.items() if keys}


class Node:
    """One instance, told of by what it says. Its announcements may be lost, said twice, or come late."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name, self.incarnation, self._rng = name, 0, rng
        self.restart()

    def restart(self) -> None:
        self.incarnation += 1
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
            self.blocks.drop(event.member.store_id, event.member.incarnation)

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

    def say(self, *events: Join | Beat | Leave | Announce | Tick) -> Heard | None:
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
        match self.rng.randrange(13):
            case 0:
                self.say(Join(member(node.name, node.incarnation)))
            case 1:
                self.say(Leave(node.name, node.incarnation))
            case 2:
                node.restart()
            case 3:
                self.now += self.rng.choice([1.0, LEASE / 2, LEASE])
                self.say(Tick())
            case 4:
                self.watchers.append(Watcher(self.state))
            case 5:
                node.batch()  # lost on its way
            case 6 if node.said:
                self.say(Announce(self.rng.choice(node.said)))  # late, or once more
            case 7:
                for part in node.snapshot(self.rng.choice([1, 3, 100])):
                    self.say(Announce(part))
                    if self.rng.random() < 0.3:
                        self.read()
                    if self.rng.random() < 0.1:
                        break
            case 8:
                self.state.blocks.sweep(self.rng.randrange(4))
            case 9 | 10:
                self.say(Beat(node.name, node.incarnation), Announce(node.batch()))
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
    patch.setattr(blocks, "READ_KEYS", slice_keys)  # so that reading one store takes many turns
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
            world.say(Leave(node.name, node.incarnation))
            node.restart()
            node.batch()
            world.say(Join(member(node.name, node.incarnation)))
            heard = world.say(Announce(node.batch()))
            assert heard is not None and heard.want_snapshot
            for part in node.snapshot(5):
                heard = world.say(Announce(part))
            assert heard == Heard(Verdict.APPLIED, False, node.seq)
            assert set(world.state.blocks.map.keys_of(node.name)) == node.held
        while world.state.blocks.sweep(100):
            pass
        assert world.state.blocks.map.unswept == 0
        world.state.blocks.map.check_integrity()
    finally:
        patch.undo()


def test_a_snapshot_goes_on_to_watchers_only_when_whole() -> None:
    held = Blocks(max_store_blocks=100)
    first, second = snapshot_parts("a", 1, 7, KEYS, 8)
    assert held.apply(first) == (Verdict.PARTIAL, ())
    assert held.map.replicas == 0
    assert held.apply(first)[0] is Verdict.DUPLICATE
    assert held.apply(second) == (Verdict.APPLIED, (first, second))
    assert held.apply(second) == (Verdict.DUPLICATE, ())
    assert held.map.replicas == len(KEYS)


def test_an_unfinished_snapshot_leaves_nothing_behind() -> None:
    held = Blocks(max_store_blocks=100)
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
    state.step(Join(member("a")), 0.0)

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
    error = checks.announcement(said)
    assert error is not None
    assert error.field == f"announcement.{field}"
    assert str(error).startswith(f"announcement.{field}=")


def test_a_silent_store_with_a_number_is_told_to_watchers() -> None:
    """Else its next batch would be a gap there."""
    state = MasterState(lease_s=LEASE, stall_s=1e9)
    state.step(Join(member("a")), 0.0)
    state.step(Announce(Announcement("a", 1, 1, (KEYS[0],))), 0.0)
    state.step(Announce(Announcement("a", 1, 2, (), (KEYS[0],))), 0.0)
    (told,) = state.read().announcements()
    assert told == Announcement("a", 1, 2, (), snapshot=True)
