"""Announcers, a master's map and a follower's over a channel that loses, repeats and reorders, while nodes and master
restart. At every moment the maps show what was true as of the number they name; once the channel is good they show the
truth, within two calls and a snapshot. Broken maps and announcers are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvmesh.kvcache.announce import Announcement, Announcer, snapshot_parts
from kvmesh.kvcache.block_map import BlockMap, Verdict
from kvmesh.kvcache.node_store import NodeStore
from tests.support.broken_maps import (
    ForgetsChangesOfParts,
    IgnoresTheEmptyBatch,
    KeepsBitsOfTheDead,
    KeepsOldLives,
    MixesParts,
    SameNumberForSnapshot,
    SeesNoGap,
    ShowsParts,
    TakesEverySnapshot,
    WantsNoSnapshot,
)

SETTINGS = settings(max_examples=60, stateful_step_count=60, deadline=None)
KEYS = [bytes([i]) * 16 for i in range(9)]
NAMES = ["a", "b"]
PART = 2  # keys in an announcement
NAME = st.sampled_from(NAMES)


@dataclass
class Node:
    """One life of one instance."""

    name: str
    life: int
    announcer: Announcer
    store: NodeStore
    call: int = 0  # the one that waits for an answer; 0: none
    alive: bool = True
    states: dict[int, set[bytes]] = field(default_factory=lambda: {0: set()})


@dataclass(frozen=True)
class Call:
    node: Node = field(compare=False)
    number: int
    said: Announcement


@dataclass(frozen=True)
class Answer:
    node: Node = field(compare=False)
    number: int
    want_snapshot: bool


class Mesh(RuleBasedStateMachine):
    """`wire` holds what may still arrive, any number of times. No master checks who is a member here: the maps see
    every late word of every life."""

    map_class: type[BlockMap] = BlockMap
    announcer_class: type[Announcer] = Announcer

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.lives: dict[tuple[str, int], Node] = {}
        self.nodes: dict[str, Node] = {}
        self.wire: list[Call | Answer] = []
        self.master_restarts()
        for name in NAMES:
            self.born(name)

    def born(self, name: str) -> None:
        life = len(self.lives) + 1
        store = NodeStore(4, high_percent=100)
        node = Node(name, life, self.announcer_class(name, life, store, max_keys=PART), store)
        self.nodes[name] = self.lives[name, life] = node

    # ── nodes ────────────────────────────────────────────────────────────────────────────────────────

    @rule(name=NAME, keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4))
    def seals(self, name: str, keys: list[bytes]) -> None:
        store = self.nodes[name].store
        for key, extent in zip(keys, store.begin(keys), strict=True):
            if extent is not None:
                store.seal(key)

    @rule(name=NAME, n=st.integers(1, 4))
    def evicts(self, name: str, n: int) -> None:
        store = self.nodes[name].store
        store.release(store.allocate(n))

    @rule(name=NAME, force=st.booleans())
    def announces(self, name: str, force: bool) -> None:
        node = self.nodes[name]
        said = node.announcer.next(force) if node.alive else None
        if said is not None:
            self.calls += 1
            node.call = self.calls
            self.record(node, said)
            self.wire.append(Call(node, self.calls, said))

    @rule(name=NAME, force=st.booleans(), again_later=st.booleans())
    def is_heard_and_answered(self, name: str, force: bool, again_later: bool) -> None:
        """What mostly happens; `again_later`: what was said stays on the wire."""
        before = len(self.wire)
        self.announces(name, force)
        if len(self.wire) > before:
            self.deliver(before, again_later)
            self.deliver(len(self.wire) - 1, again=False)

    def record(self, node: Node, said: Announcement) -> None:
        """What a number of this life means, from what the node holds, not from what it says."""
        if said.snapshot:
            if said.part == 0 and said.seq not in node.states:
                node.states[said.seq] = set(node.store.keys())
        elif said.sealed or said.removed:
            new = node.states[said.seq - 1] - set(said.removed) | set(said.sealed)
            assert node.states.setdefault(said.seq, new) == new, "one number for two contents"

    @rule(name=NAME)
    def gives_up_waiting(self, name: str) -> None:
        node = self.nodes[name]
        if node.call:
            node.call = 0
            node.announcer.failed()

    @rule(name=NAME)
    def joins_again(self, name: str) -> None:
        self.nodes[name].call = 0
        self.nodes[name].announcer.restart()

    @rule(name=NAME)
    def memory_is_lost(self, name: str) -> None:
        self.nodes[name].store.drop_all()

    @rule(name=NAME, again=st.sampled_from([True, True, False]))
    def dies(self, name: str, again: bool) -> None:
        self.nodes[name].alive = False
        if again:
            self.born(name)

    # ── master and follower ──────────────────────────────────────────────────────────────────────────

    @rule()
    def master_restarts(self) -> None:
        self.master = self.map_class()
        self.newest: dict[str, tuple[int, int]] = {}
        self.follower_starts_over()

    @rule()
    def follower_starts_over(self) -> None:
        self.follower = self.map_class()
        for name in self.master.stores():
            self.tell_content(name)

    def tell_content(self, name: str) -> None:
        life, seq = self.master.incarnation(name), self.master.seq(name)
        if not seq:
            self.follower.apply(Announcement(name, life, 0))
        for said in snapshot_parts(name, life, seq, self.master.keys_of(name), PART) if seq else ():
            self.follower.apply(said)

    @rule(name=NAME)
    def suspects(self, name: str) -> None:
        """A member's lease has run out, rightly or not."""
        life = self.master.incarnation(name)
        self.master.drop(name, life)
        self.newest.pop(name, None)
        self.follower.drop(name, life)

    @rule(n=st.integers(0, 5))
    def sweep(self, n: int) -> None:
        for block_map in (self.master, self.follower):
            block_map.sweep(n)

    def heard(self, call: Call) -> Answer:
        said, life = call.said, self.master.incarnation(call.node.name)
        verdict = self.master.apply(said)
        if life and self.master.incarnation(said.store_id) != life:
            self.follower.drop(said.store_id, life)
        if verdict is Verdict.APPLIED and said.snapshot:
            self.tell_content(said.store_id)
        elif verdict is Verdict.APPLIED:
            assert self.follower.apply(said) is Verdict.APPLIED, "the follower is not where the master is"
        return Answer(call.node, call.number, verdict is Verdict.GAP)

    def answered(self, answer: Answer) -> None:
        node = answer.node
        if node.call == answer.number and node.alive:
            node.call = 0
            node.announcer.acked(answer.want_snapshot)

    # ── the channel ──────────────────────────────────────────────────────────────────────────────────

    @precondition(lambda self: self.wire)
    @rule(data=st.data(), again=st.booleans())
    def delivers(self, data: st.DataObject, again: bool) -> None:
        self.deliver(data.draw(st.integers(0, len(self.wire) - 1)), again)

    @precondition(lambda self: self.wire)
    @rule(data=st.data())
    def loses(self, data: st.DataObject) -> None:
        self.wire.pop(data.draw(st.integers(0, len(self.wire) - 1)))

    def deliver(self, index: int, again: bool) -> None:
        what = self.wire[index] if again else self.wire.pop(index)
        if isinstance(what, Call):
            self.wire.append(self.heard(what))
        else:
            self.answered(what)

    # ── what is always true, and what is true in the end ─────────────────────────────────────────────

    @invariant()
    def right_as_of_its_number(self) -> None:
        for block_map in (self.master, self.follower):
            block_map.check_integrity()
            for name in block_map.stores():
                life, seq = block_map.incarnation(name), block_map.seq(name)
                states = self.lives[name, life].states
                assert set(block_map.keys_of(name)) == states.get(seq), "never true of that number"
        for name in self.master.stores():
            shows = self.master.incarnation(name), self.master.seq(name)
            assert self.newest.get(name, shows) <= shows, "it goes back to what is older"
            self.newest[name] = shows
        assert self.shown(self.master) == self.shown(self.follower), "the follower is told something else"

    def shown(self, block_map: BlockMap) -> dict[bytes, list[str]]:
        return {key: sorted(block_map.holders(key)) for key in KEYS}

    def teardown(self) -> None:
        """The channel becomes good: what is still on its way arrives once, and from then on everything does. Each node
        needs 8 calls at most: the one that is repeated, the gap it shows, 2 parts, or 4 batches that were waiting."""
        self.deliver_all()
        for name, node in self.nodes.items():
            self.gives_up_waiting(name)
            for _ in range(8):
                self.announces(name, force=True)
                self.deliver_all()
            if not node.alive:
                self.suspects(name)
        truth = {
            key: [name for name in NAMES if self.nodes[name].alive and self.nodes[name].store.holds(key)]
            for key in KEYS
        }
        assert self.shown(self.master) == truth, "it does not converge"
        self.right_as_of_its_number()

    def deliver_all(self) -> None:
        while self.wire:
            self.deliver(0, again=False)


@pytest.mark.slow
def test_whatever_is_lost_the_map_is_right_and_catches_up() -> None:
    run_state_machine_as_test(Mesh, settings=SETTINGS)


def put_in(broken: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mesh, "map_class" if issubclass(broken, BlockMap) else "announcer_class", broken)


@pytest.mark.parametrize(
    "broken",
    [
        SeesNoGap,
        ShowsParts,
        KeepsOldLives,
        KeepsBitsOfTheDead,
        SameNumberForSnapshot,
        WantsNoSnapshot,
    ],
)
@pytest.mark.slow
def test_a_broken_one_is_found(broken: type, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(broken, monkeypatch)
    found = settings(
        SETTINGS,
        max_examples=3_000,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate],
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Mesh, settings=found)


def told_again_between_its_parts(mesh: Mesh) -> None:
    mesh.joins_again("a")
    mesh.is_heard_and_answered("a", force=False, again_later=False)
    mesh.evicts("a", 4)
    mesh.seals("a", KEYS[4:8])
    mesh.joins_again("a")
    mesh.is_heard_and_answered("a", force=False, again_later=False)
    mesh.is_heard_and_answered("a", force=False, again_later=False)


def changes_between_the_parts(mesh: Mesh) -> None:
    mesh.joins_again("a")
    mesh.is_heard_and_answered("a", force=False, again_later=False)
    mesh.evicts("a", 2)
    mesh.is_heard_and_answered("a", force=False, again_later=False)


def arrives_once_more_when_it_is_old(mesh: Mesh) -> None:
    mesh.evicts("a", 3)
    mesh.joins_again("a")
    mesh.is_heard_and_answered("a", force=False, again_later=True)
    mesh.seals("a", KEYS[4:5])
    mesh.is_heard_and_answered("a", force=False, again_later=False)
    mesh.right_as_of_its_number()
    mesh.deliver(0, again=False)


def nothing_new_to_tell_a_new_master(mesh: Mesh) -> None:
    for _ in range(2):
        mesh.is_heard_and_answered("a", force=False, again_later=False)
    mesh.master_restarts()


@pytest.mark.parametrize(
    ("story", "broken"),
    [
        (told_again_between_its_parts, MixesParts),
        (changes_between_the_parts, ForgetsChangesOfParts),
        (arrives_once_more_when_it_is_old, TakesEverySnapshot),
        (nothing_new_to_tell_a_new_master, IgnoresTheEmptyBatch),
    ],
)
def test_what_chance_finds_late_in_one_line_of_events(
    story: Callable[[Mesh], None], broken: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    def play() -> None:
        mesh = Mesh()
        mesh.seals("a", KEYS[:4])
        story(mesh)
        mesh.right_as_of_its_number()
        mesh.teardown()

    play()
    put_in(broken, monkeypatch)
    with pytest.raises(AssertionError):
        play()
