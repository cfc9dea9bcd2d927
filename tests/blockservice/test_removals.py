"""Tombstones: applied once, in order, in every tier, remembered beside the disk, before anything is announced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvmesh.blockservice import removal_applier
from kvmesh.blockservice.partitions import OnePartition, Partition
from kvmesh.blockservice.removal_applier import FILE, RemovalApplier
from kvmesh.blockservice.removals import NotHere, Removals
from kvmesh.errors import ConfigError, Unavailable
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.tombstones import Tombstone
from kvmesh.rpc.pb import store_pb2 as pb_store
from tests.support.nodes import keys_of


class Model(RuleBasedStateMachine):
    """A master that counts and a node that dies: each removal takes effect, and none a second time, on a block that was
    put again since, as long as the node remembers."""

    make: type[Removals] = Removals

    def __init__(self) -> None:
        super().__init__()
        self.node = self.make()
        self.seq = 0
        self.pending: dict[int, int] = {}  # the master's: seq → key, not known to be applied by this node
        self.here: set[int] = set()
        self.durable = 0
        self.acted: set[int] = set()  # removals that this life has carried out

    @rule(key=st.integers(0, 3))
    def put(self, key: int) -> None:
        self.here.add(key)

    @rule(key=st.integers(0, 3), heard=st.sampled_from(["yes", "no", "answer lost"]))
    def remove(self, key: int, heard: str) -> None:
        self.seq += 1
        if heard != "no":
            self.here.discard(key)
            self.node.direct(self.seq)
            self.acted.add(self.seq)
        if heard != "yes":
            self.pending[self.seq] = key

    @rule()
    def beat(self) -> None:
        told = [Tombstone(seq, (bytes([key]),)) for seq, key in self.pending.items() if seq > self.node.applied]
        for tombstone in self.node.due(reversed(told)):
            key = tombstone.keys[0][0]
            assert tombstone.seq not in self.acted, "a second time"
            self.here.discard(key)
            self.acted.add(tombstone.seq)
            self.node.done(tombstone.seq)
        if told:
            self.node.done(max(tombstone.seq for tombstone in told))
        self.durable = self.node.applied
        assert self.pending.keys() <= self.acted, "still found"
        self.pending = {seq: key for seq, key in self.pending.items() if seq > self.node.applied}

    @rule()
    def restart(self) -> None:
        """What was carried out and never told of is carried out again: a cache may lose what was put since."""
        self.node = self.make(self.durable)
        self.acted.clear()

    @invariant()
    def never_ahead(self) -> None:
        assert self.node.applied <= self.seq


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


class Forgetful(Removals):
    """Does not know which removals were carried out directly."""

    def direct(self, seq: int) -> None:
        pass


class Hasty(Removals):
    """Takes a direct removal for all that came before it."""

    def direct(self, seq: int) -> None:
        self.done(seq)


def finding(examples: int, steps: int) -> settings:
    """Looks for one failure with a fixed seed, and does not make it smaller."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        print_blob=False,
    )


@pytest.mark.parametrize("broken", [Forgetful, Hasty])
def test_the_model_notices(broken: type[Removals], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "make", broken)
    monkeypatch.setattr(Model.TestCase, "settings", finding(examples=200, steps=15))
    with pytest.raises(AssertionError):
        Model.TestCase("runTest").runTest()


class PutsModel(RuleBasedStateMachine):
    """A client removes keys and puts them again at a node that hears the master late, and some orders later still: what
    the node says it holds it does not lose to a removal that was over before the put. The master asks directly in
    order, or not at all, and may lose its tombstones."""

    make: type[Removals] = Removals

    def __init__(self) -> None:
        super().__init__()
        self.node = self.make()
        self.now = self.seq = self.over_ns = 0
        self.tombstones: list[Tombstone] = []  # the master's
        self.applied = 0  # what the master knows of the node
        self.orders: list[int] = []  # direct ones, on their way
        self.answers: list[tuple[int, list[Tombstone]]] = []  # to beats, with the time of these
        self.keys: dict[int, int] = {}  # seq → key
        self.held: dict[int, int] = {}  # key → the last removal that was over when it was put

    def carry_out(self, seq: int) -> None:
        key = self.keys[seq]
        assert self.held.get(key, 0) < seq, "a put is lost"
        self.held.pop(key, None)

    @rule(key=st.integers(0, 1))
    def remove(self, key: int) -> None:
        self.seq += 1
        self.now += 1
        self.keys[self.seq] = key
        if self.applied == self.seq - 1:
            self.orders.append(self.seq)
        self.tombstones.append(Tombstone(self.seq, (bytes([key]),)))
        self.over_ns = self.now

    @rule()
    def order_arrives(self) -> None:
        if self.orders:
            seq = self.orders.pop(0)
            if not self.node.carried_out(seq):
                self.carry_out(seq)
                self.node.direct(seq)

    @rule(reports=st.booleans())
    def master_answers(self, reports: bool) -> None:
        self.now += 1
        if reports:
            self.applied = max(self.applied, self.node.applied)
        self.answers.append((self.now, [each for each in self.tombstones if each.seq > self.node.applied]))

    @rule()
    def node_hears(self) -> None:
        if self.answers:
            asked, tombstones = self.answers.pop(0)
            for each in self.node.due(tombstones):
                self.carry_out(each.seq)
                self.node.done(each.seq)
            if tombstones:
                self.node.done(tombstones[-1].seq)
            else:
                self.node.heard_all(asked)

    @rule()
    def beat(self) -> None:
        self.answers.clear()
        self.master_answers(False)
        self.node_hears()

    @rule()
    def master_forgets(self) -> None:
        self.tombstones.clear()
        self.answers.clear()
        self.orders.clear()

    @rule(key=st.integers(0, 1))
    def put(self, key: int) -> None:
        self.now += 1
        if self.node.has_heard(self.seq, self.over_ns):
            self.held[key] = self.seq


TestPutsModel = PutsModel.TestCase
TestPutsModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


class Deaf(Removals):
    """Takes a put whatever its caller knows."""

    def has_heard(self, seq: int, over_ns: int) -> bool:
        return True


class Tireless(Removals):
    """Carries out an order as often as it comes."""

    def carried_out(self, seq: int) -> bool:
        return False


class Early(Removals):
    """Counts an answer whose question was asked before the removal was over."""

    def heard_all(self, asked_ns: int) -> None:
        self._heard_ns = 1 << 62


@pytest.mark.parametrize("broken", [Deaf, Tireless, Early])
def test_the_model_of_puts_notices(broken: type[Removals], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PutsModel, "make", broken)
    monkeypatch.setattr(PutsModel.TestCase, "settings", finding(examples=1000, steps=30))
    with pytest.raises(AssertionError, match="a put is lost"):
        PutsModel.TestCase("runTest").runTest()


class Bench:
    """A store, something below it, and the desk."""

    def __init__(self, folder: Path | None = None) -> None:
        self.store = NodeStore(32)
        self.partitions = OnePartition(Partition("l", 4096, self.store, (0,)))
        self.below: set[bytes] = set()
        self.broken = False
        self.desk = RemovalApplier(self.partitions, self.forget, lambda: sorted(self.below), folder)

    async def forget(self, keys: Sequence[bytes], /) -> int:
        here = {key for key, was in zip(keys, self.store.remove(keys), strict=True) if was}
        if not self.broken:  # told in the turn in which memory lets go
            here |= self.below.intersection(keys)
            self.below.difference_update(keys)
        await asyncio.sleep(0)
        if self.broken:
            raise Unavailable("the disk")
        return len(here)

    def seal(self, *keys: bytes) -> None:
        assert None not in self.store.begin(keys)
        for key in keys:
            self.store.seal(key)


def told(seq: int, *keys: bytes, prefix: bytes = b"") -> pb_store.Tombstone:
    return pb_store.Tombstone(seq=seq, keys=b"".join(keys), prefix=prefix)


async def test_whoever_keeps_copies_elsewhere_hears_of_each_block_while_it_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(removal_applier, "SLICE", 2)
    made = Bench()
    keys = keys_of(*"abcde")
    made.seal(*keys[:4])
    heard: list[NotHere] = []

    def listen(gone: NotHere) -> None:
        assert all(made.store.holds(key) for key in gone.keys), "not a turn later"
        heard.append(gone)

    made.desk.listeners.append(listen)
    assert await made.desk.remove(keys[:3]) == 3
    assert heard == [NotHere(frozenset(keys[:2])), NotHere(frozenset(keys[2:3]))]
    heard.clear()
    assert await made.desk.remove((), prefix=keys[3][:2]) == 1
    assert heard[0] == NotHere(frozenset(), keys[3][:2]) and keys[3] in heard[1].keys
    assert keys[3] in heard[0] and NotHere(frozenset(keys[:2]), keys[4]).first(keys[2:]) == 2
    heard.clear()
    await made.desk.apply([told(5)])
    assert heard == [NotHere(frozenset(), b"")] and keys[0] in heard[0]


async def test_tombstones_reach_every_tier_once_and_are_remembered(tmp_path: Path) -> None:
    made = Bench(tmp_path / "ssd")
    a, b, c, d = keys_of(*"abcd")
    made.seal(a, b, c)
    made.below |= {b, d}
    await made.desk.apply([told(5, a), told(7, prefix=b[:4])])
    assert made.store.keys() == [c] and made.below == {d} and made.desk.removed_seq == 7
    made.seal(a)
    await made.desk.apply([told(5, a), told(7, prefix=b[:4])])
    assert made.store.holds(a), "applied already"
    await made.desk.remove([a], seq=9)
    made.seal(a)
    await made.desk.apply([told(8, c), told(9, a)])
    assert made.store.keys() == [a] and made.desk.removed_seq == 9, "removed directly, put again since"
    assert await made.desk.remove([a], seq=9) == 0 and made.store.holds(a), "an order that waited in a frozen socket"
    assert (tmp_path / "ssd" / FILE).read_text() == "9"
    assert Bench(tmp_path / "ssd").desk.removed_seq == 9
    assert Bench().desk.removed_seq == 0, "without a disk nothing outlives the process"
    (tmp_path / "ssd" / FILE).write_text("nine")
    with pytest.raises(ConfigError, match="removed_seq"):
        Bench(tmp_path / "ssd")


async def test_what_could_not_be_written_down_is_said_again(tmp_path: Path) -> None:
    made = Bench(tmp_path)
    a, b = keys_of("a", "b")
    made.seal(a, b)
    made.broken = True
    with pytest.raises(Unavailable, match="the disk"):
        await made.desk.apply([told(3, a), told(4, b)])
    assert made.desk.removed_seq == 0
    made.broken = False
    await made.desk.apply([told(3, a), told(4, b)])
    assert made.desk.removed_seq == 4 and not made.store.keys()


async def test_what_is_under_way_is_not_sealed() -> None:
    made = Bench()
    a, b, c = keys_of(*"abc")
    made.store.begin([a, b, c])
    watch = made.desk.watch()
    assert await made.desk.remove([a], b"") == 1
    assert await made.desk.remove([], b[:4]) == 1
    assert [watch.gone(key) for key in (a, b, c)] == [True, True, False]
    assert [made.store.seal(key) for key in (a, b, c)] == [False, False, True]
    made.desk.unwatch(watch)
    await made.desk.remove([c])
    assert not watch.gone(c)


async def test_a_great_removal_lets_others_run() -> None:
    made = Bench()
    made.below = set(keys_of(*range(10_000)))
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    assert await made.desk.remove(list(made.below)) == 10_000
    task.cancel()
    assert turns >= 3 and not made.below


async def looking(monkeypatch: pytest.MonkeyPatch, made: Bench) -> AsyncIterator[int]:
    """Removes all that begins with "gone", two names a turn, yielding after each turn until it has returned."""
    monkeypatch.setattr(removal_applier, "LOOK", 2)
    removing = asyncio.ensure_future(made.desk.remove([], b"gone"))
    turn = 0
    while not removing.done():
        await asyncio.sleep(0)
        turn += 1
        yield turn
    await removing


def named(*numbers: int, head: bytes = b"gone") -> list[bytes]:
    return [head + number.to_bytes(12, "big") for number in numbers]


async def test_a_prefix_is_looked_for_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Bench()
    made.seal(*named(*range(10), head=b"stay"), *named(1, 2))
    made.below |= {*named(*range(10), head=b"stay"), *named(2, 3)}
    turns = [turn async for turn in looking(monkeypatch, made)]
    assert len(turns) > 10, "24 names, two a turn"
    assert set(made.store.keys()) == made.below == set(named(*range(10), head=b"stay"))


@pytest.mark.parametrize("at", range(1, 9))
async def test_what_moves_or_comes_while_a_prefix_is_looked_for(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Whenever it happens: what was there goes, whichever tier it is in by then, and what is new stays."""
    made = Bench()
    up, down, written, fresh = named(1, 2, 3, 4)
    made.below |= {up, *named(*range(6), head=b"stay")}
    made.seal(down, *named(*range(6), head=b"Stay"))
    made.store.begin([written])
    last = 0
    async for turn in looking(monkeypatch, made):
        last = turn
        if turn == at:
            made.seal(fresh)
            if up in made.below:
                made.below.remove(up)
                made.seal(up)
            if made.store.remove([down]) == [True]:
                made.below.add(down)
    assert last >= 8, "it was over before that"
    assert not made.store.seal(written)
    assert {key for key in (up, down, written, fresh) if made.store.holds(key) or key in made.below} == {fresh}
