"""How the control plane paces those who speak to it: budgets are kept, and nobody dies of a change of pace."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmesh.clock import Tick
from kvmesh.pacing import (
    BUSY_S,
    BY_DOOR,
    IDLE_S,
    IDLE_SHARE,
    SLACK,
    STEP,
    AnnouncementPacing,
    MembershipLease,
    Pacing,
    Pulse,
    Stretch,
    stretched_s,
)
from kvmesh.services.conductor import domain as conductor
from kvmesh.services.conductor.settings import Settings
from kvmesh.services.conductor.state import ConductorState
from kvmesh.services.store import domain as store
from kvmesh.services.store.state import MasterState
from tests.support.conductor.brain import IDLE, card

BEAT, LEASE = 0.2, 1.5

# ── the policy ────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=30), st.floats(0.01, 10), st.floats(1, 5000))
def test_the_budget_is_kept_and_used(counts: list[int], base_s: float, per_s: float) -> None:
    stretch = Stretch(base_s, per_s)
    for senders in counts:
        stretch.count(senders)
        rate = senders / (base_s * stretch.times)
        assert rate <= per_s * (1 + 1e-6)
        assert stretch.times == 1 or rate >= per_s * SLACK / STEP * (1 - 1e-6), "no longer than it needs to be"


def test_who_comes_and_goes_at_the_edge_changes_nothing() -> None:
    stretch = Stretch(0.2, 500)  # a hundred as they are
    assert not stretch.count(100) and stretch.count(101) and stretch.times == STEP
    assert not any(stretch.count(senders) for senders in [100, 101, 95, 120, 91] * 5)
    assert stretch.count(90) and stretch.times == 1


def test_few_are_never_stretched_nor_is_anybody_without_a_budget() -> None:
    beats, words = Pacing(BEAT, LEASE, 500), AnnouncementPacing(1300)
    beats.count(64)
    words.count(64)
    assert beats.pulse == Pulse(1, BEAT, LEASE)
    assert (words.idle_ms, words.gap_ms) == (1000, 0)
    unbounded, free = Pacing(BEAT, LEASE, 0), AnnouncementPacing(0)
    unbounded.count(10**6)
    free.count(10**6)
    assert unbounded.pulse == Pulse(1, BEAT, LEASE) and (free.idle_ms, free.gap_ms) == (1000, 0)


def test_a_thousand_beat_and_announce_as_rarely_as_the_budget_wants() -> None:
    beats, words = Pacing(BEAT, LEASE, 500), AnnouncementPacing(1300)
    for i in [*range(1000)] * 2:
        beats.count_heartbeat(f"m{i}", by_door=False)
    beats.count(1000)
    words.count(1000)
    assert 2.0 <= beats.pulse.interval_s <= 2.0 * STEP
    assert beats.pulse.lease_s / beats.pulse.interval_s == pytest.approx(LEASE / BEAT), "as many may be lost as ever"
    assert beats.pulse.interval_s == stretched_s(BEAT, 500, 1000)
    assert 1000 / words.idle_s <= 1300 * IDLE_SHARE and 1000 / words.gap_s <= 1300
    assert words.idle_s == stretched_s(IDLE_S, 1300 * IDLE_SHARE, 1000)
    assert words.gap_s == stretched_s(BUSY_S, 1300, 1000)
    assert (beats.pulse.interval_ms, beats.pulse.number) == (round(1000 * beats.pulse.interval_s), 2)


def test_by_doors_four_beat_as_often_as_one_over_grpc() -> None:
    beats = Pacing(BEAT, LEASE, 500)
    beats.count(1000)
    assert beats.pulse.interval_s == stretched_s(BEAT, 500, 250), "newcomers are to come by doors"
    for i in range(1000):
        beats.count_heartbeat(f"m{i}", by_door=False)
    beats.count(1000)
    assert beats.pulse.interval_s == stretched_s(BEAT, 500, 250), "the first one comes over gRPC"
    for i in range(1000):
        beats.count_heartbeat(f"m{i}", by_door=i >= 500)
    beats.count(1000)
    assert beats.pulse.interval_s == stretched_s(BEAT, 500, 500 + 125)
    for i in range(500):
        beats.forget(f"m{i}")
    beats.count(500)
    assert beats.pulse.interval_s == stretched_s(BEAT, 500, 125)
    for i in [*range(1000)] * 2:
        beats.count_heartbeat(f"m{i}", by_door=False)  # of more than are counted
    beats.count(90)
    assert beats.pulse.interval_s == BEAT


def test_a_lease_grows_at_once_and_shrinks_when_the_shorter_interval_was_heard() -> None:
    short, long = Pulse(1, 1.0, 4.0), Pulse(2, 5.0, 20.0)
    lease = MembershipLease(short)
    lease.tell(long, heard=1)
    assert lease.seconds == 20.0, "it may hear of it"
    lease.tell(again := Pulse(3, 1.0, 4.0), heard=2)
    assert lease.seconds == 20.0, "it goes by the long one until it has heard"
    lease.tell(again, heard=2)
    assert lease.seconds == 20.0, "the answer was lost"
    lease.tell(again, heard=3)
    assert lease.seconds == 4.0
    lease.tell(long, heard=1)  # an old copy of an old beat
    lease.tell(Pulse(4, 1.0, 4.0), heard=1)
    assert lease.seconds == 20.0


# ── both brains, with members that do as they are told ────────────────────────────────────────────


class Master:
    """The store master's."""

    def __init__(self, per_s: float) -> None:
        self.state = MasterState(lease_s=LEASE, stall_s=1e9, interval_s=BEAT, heartbeats_per_s=per_s)

    @property
    def pulse(self) -> Pulse:
        return self.state.pulse

    def enter(self, name: str, now: float) -> None:
        self.state.step(store.NodeJoined(store.RegisteredNode(name, "h:1", 1, store.NodeRole.POOL, "node", name)), now)

    def beat(self, name: str, seq: int, pace: int, now: float, *, by_door: bool = False) -> None:
        self.state.step(store.Beat(name, 1, pace=pace, by_door=by_door), now)

    def leave(self, name: str, now: float) -> None:
        self.state.step(store.NodeLeft(name, 1), now)

    def tick(self, now: float) -> None:
        self.state.step(Tick(), now)

    def lives(self, name: str, now: float) -> bool:
        return self.state.lives(name, 1)

    def lease_s(self, name: str) -> float:
        return self.state._lives[name].lease.seconds


class Brain:
    """The conductor's."""

    def __init__(self, per_s: float) -> None:
        numbers = Settings(lease_s=LEASE, heartbeat_s=BEAT, heartbeats_per_s=per_s, stall_s=1e9, forget_s=2.0)
        self.state = ConductorState(numbers, random.Random(1), 0.0)

    @property
    def pulse(self) -> Pulse:
        return self.state.pacing.pulse

    def enter(self, name: str, now: float) -> None:
        ref = conductor.Ref(name, f"{name}:1", 1)
        self.state.step(conductor.Register(ref, conductor.Role.PREFILL, "node", card(), 100, 8), now)

    def beat(self, name: str, seq: int, pace: int, now: float, *, by_door: bool = False) -> None:
        ref = conductor.Ref(name, f"{name}:1", 1)
        self.state.step(conductor.Heartbeat(ref, seq, True, IDLE, pace=pace, by_door=by_door), now)

    def leave(self, name: str, now: float) -> None:
        """Nobody says goodbye here but by silence."""

    def tick(self, now: float) -> None:
        self.state.step(Tick(), now)

    def lives(self, name: str, now: float) -> bool:
        instance = self.state._fleet.named(name)
        able = self.state._view_of_all(now).able
        row = self.state._columns.row(name)
        return instance is not None and "silent" not in self.state.why_not(instance, now) and bool(able[row])

    def lease_s(self, name: str) -> float:
        instance = self.state._fleet.named(name)
        assert instance is not None
        return instance.lease.seconds


@dataclass
class Member:
    """`goes_by`: what it has heard last; `arrived`: when something of it was taken last, as far as it knows."""

    name: str
    goes_by: Pulse
    arrived: float
    seq: int = 1
    by_door: bool = False
    sent: list[tuple[int, int]] = field(default_factory=list)


class Paced(RuleBasedStateMachine):
    """Answers are lost, old beats come late, members come and go, and the pace with them."""

    brain: type[Any]

    def __init__(self) -> None:
        super().__init__()
        self.told = self.brain(per_s=20.0)  # four as they are
        self.now, self.made = 0.0, 0
        self.members: dict[str, Member] = {}

    @precondition(lambda self: len(self.members) < 24)
    @rule(count=st.sampled_from((1, 4, 12)))
    def join(self, count: int) -> None:
        for _ in range(count):
            self.made += 1
            name = f"m{self.made}"
            self.told.enter(name, self.now)
            self.members[name] = member = Member(name, self.told.pulse, self.now)
            self._beat(member, heard=True)

    def _beat(self, member: Member, *, heard: bool) -> None:
        member.seq += 1
        member.sent.append((member.seq, member.goes_by.number))
        self.told.beat(member.name, member.seq, member.goes_by.number, self.now, by_door=member.by_door)
        member.arrived = self.now
        if heard:
            member.goes_by = self.told.pulse

    @precondition(lambda self: self.members)
    @rule(data=st.data(), heard=st.booleans())
    def beat(self, data: st.DataObject, heard: bool) -> None:
        self._beat(self.members[data.draw(st.sampled_from(sorted(self.members)))], heard=heard)

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def the_door(self, data: st.DataObject) -> None:
        """One has found it, or lost it."""
        member = self.members[data.draw(st.sampled_from(sorted(self.members)))]
        member.by_door = not member.by_door

    @rule(heard=st.booleans())
    def all_beat(self, heard: bool) -> None:
        for member in self.members.values():
            self._beat(member, heard=heard)

    @precondition(lambda self: self.members)
    @rule(data=st.data(), heard=st.booleans())
    def enter_again(self, data: st.DataObject, heard: bool) -> None:
        """A call failed: it enters once more, and perhaps that answer is lost, too."""
        member = self.members[data.draw(st.sampled_from(sorted(self.members)))]
        self.told.enter(member.name, self.now)
        member.arrived = self.now
        if heard:
            member.goes_by = self.told.pulse

    @precondition(lambda self: self.members)
    @rule(data=st.data())
    def old_copy(self, data: st.DataObject) -> None:
        """Of a beat that was given up long ago; nobody hears its answer."""
        member = self.members[data.draw(st.sampled_from(sorted(self.members)))]
        self.told.beat(member.name, *data.draw(st.sampled_from(member.sent)), self.now)

    @precondition(lambda self: self.members)
    @rule(data=st.data(), keep=st.integers(0, 3), say=st.booleans())
    def most_go(self, data: st.DataObject, keep: int, say: bool) -> None:
        kept = data.draw(st.permutations(sorted(self.members)))[:keep]
        for name in self.members.keys() - kept if say else ():
            self.told.leave(name, self.now)
        self.members = {name: self.members[name] for name in kept}
        self.told.tick(self.now)

    @rule(share=st.sampled_from((0.1, 0.5, 0.9, 1.0)))
    def time_passes(self, share: float) -> None:
        """As much as members may let pass who go by what they have heard."""
        until = min((m.arrived + m.goes_by.lease_s for m in self.members.values()), default=self.now + 10)
        self.now += max(0.0, share * (until - self.now) - 1e-6)
        self.told.tick(self.now)

    @invariant()
    def nobody_dies_who_does_as_told(self) -> None:
        for member in self.members.values():
            assert self.told.lives(member.name, self.now), member

    def teardown(self) -> None:
        """In the end all are alike again: no lease stays longer than the pace needs."""
        self.all_beat(heard=True)
        for _ in range(25 if self.members else 0):  # longer than any lease here
            self.now += 0.9 * min(m.goes_by.lease_s for m in self.members.values())
            self.told.tick(self.now)
            for member in self.members.values():
                self._beat(member, heard=True)
        for member in self.members.values():
            assert self.told.lives(member.name, self.now)
            assert self.told.lease_s(member.name) == self.told.pulse.lease_s
        weights = sum(BY_DOOR if member.by_door else 1 for member in self.members.values())
        assert weights / self.told.pulse.interval_s <= 20 * (1 + 1e-6)
        assert not weights or self.told.pulse.interval_s <= max(BEAT, STEP * weights / (20 * SLACK)) * (1 + 1e-6)


class PacedMaster(Paced):
    brain = Master


class PacedBrain(Paced):
    brain = Brain


TestMaster = PacedMaster.TestCase
TestBrain = PacedBrain.TestCase
TestMaster.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestBrain.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_master_counts_only_who_is_there() -> None:
    master = Master(per_s=20.0)
    for i in range(40):
        master.enter(f"m{i}", 0.0)
        master.beat(f"m{i}", 0, 1, 0.0)
        master.beat(f"m{i}", 1, 1, 0.0)
    master.tick(0.0)
    assert master.pulse.interval_s >= 2.0
    for i in range(40):
        master.beat(f"m{i}", 2, 1, 0.1)
    for i in range(1, 40):
        master.state.step(store.NodeLeft(f"m{i}", 1), 0.2)
    master.tick(0.2)
    assert master.pulse.interval_s == BEAT
    assert master.lease_s("m0") > LEASE, "it has not heard yet"
    master.beat("m0", 2, 2, 2.0)
    master.beat("m0", 3, master.pulse.number, 2.1)
    assert master.lease_s("m0") == LEASE
    master.tick(2.1 + LEASE)
    assert master.lives("m0", 0.0)
    master.tick(2.1 + LEASE + 0.01)
    assert not master.lives("m0", 0.0), "the short lease is looked at, though a long one was left"
