"""What holds an instance: leases of orders, pauses by hand and newer weights. Of conductors that die at any step, start
anew and order at once, none leaves an instance paused or lets one compute with a mixture."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvmesh.errors import InvalidRequest, KvmeshError, OrderLapsed, Overloaded, WeightsChanged
from kvmesh.instance.order_holds import OrderHolds, OrderIdentity
from kvmesh.instance.served_weights import ServedWeights

A, B = OrderIdentity("a", "c1"), OrderIdentity("b", "c2")
LEASE = 10.0


def test_an_order_holds_until_its_lease_ends() -> None:
    holds = OrderHolds()
    assert holds.hold(A, LEASE, 0).other is None
    holds.pause(A, "weights", 1)
    other = holds.hold(B, LEASE, 4)
    assert (other.other, other.left_s) == (A, 6)
    for refused in (lambda: holds.pause(None, "by hand", 4), lambda: holds.resume(4), lambda: holds.end(B, 4)):
        with pytest.raises(Overloaded, match="order a of c1 is being carried out"):
            refused()
    holds.hold(A, LEASE, 9)
    assert holds.why_paused(0, 18) == "weights"
    assert holds.why_paused(0, 19) == ""
    with pytest.raises(OrderLapsed, match="order='a': its lease has ended here"):
        holds.check(A, 19)
    assert holds.hold(B, LEASE, 19).other is None
    with pytest.raises(OrderLapsed, match="and order b of c2 runs"):
        holds.pause(A, "late", 20)


def test_a_repeat_is_told_the_result() -> None:
    holds = OrderHolds()
    assert not holds.hold(A, LEASE, 0).seen
    again = OrderIdentity("a", "c2")
    assert holds.hold(again, LEASE, 1).other == A, "the first one may live"
    holds.end(A, 2, result=b"done")
    assert holds.hold(again, LEASE, 3).result == b"done"
    assert holds.running(3) is None


def test_a_pause_by_hand_lasts_as_long_as_it_says() -> None:
    holds = OrderHolds()
    holds.pause(None, "look", 0)
    holds.hold(A, LEASE, 1)
    holds.pause(A, "weights", 1)
    holds.end(A, 2)
    assert holds.why_paused(0, 1e9) == "look"
    holds.resume(3)
    assert holds.why_paused(0, 3) == ""
    holds.pause(None, "for a while", 4, 5)
    assert (holds.why_paused(0, 8.9), holds.why_paused(0, 9)) == ("for a while", "")
    holds.hold(A, LEASE, 10)
    holds.end(A, 11, pause_s=math.inf, needs_epoch=7)
    assert holds.why_paused(7, 1e9)
    holds.hold(A, LEASE, 12)
    holds.end(A, 13, ends_pause=True)
    assert holds.why_paused(6, 13) == "has weights of epoch 6, the model is at epoch 7: update them"
    assert holds.why_paused(7, 13) == ""
    with pytest.raises(OrderLapsed, match="order='b': was not begun here"):
        holds.end(B, 14, needs_epoch=99)


@pytest.mark.parametrize(
    ("order", "conductor", "field"), [("", "c", "id"), ("x" * 65, "c", "id"), ("x", "\n", "conductor")]
)
def test_what_names_no_order(order: str, conductor: str, field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"order.{field}="):
        OrderIdentity(order, conductor)


@dataclass
class Place:
    """One instance. It works unless something holds it; `serves` is what checks its requests."""

    holds: OrderHolds = field(default_factory=OrderHolds)
    epoch: int = 0
    highest: int = 0
    torn: bool = False

    def works(self, now: float) -> bool:
        return not self.torn and not self.holds.why_paused(self.epoch, now)


@dataclass
class Orderer:
    """A conductor in the middle of one update: what it has done at which instances."""

    order: OrderIdentity
    epoch: int
    beat: float
    held: int = 0
    paused: int = 0
    took: int = 0
    new: list[int] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)  # where an instance has not heard of it for a lease
    failed: bool = False


class Conductors(RuleBasedStateMachine):
    """Every conductor does its next step at any time, or dies. Time passes by itself; who lives renews its leases."""

    @initialize(places=st.integers(1, 3))
    def begin(self, places: int) -> None:
        self.now = 0.0
        self.places = [Place() for _ in range(places)]
        self.live: list[Orderer] = []
        self.number = 0
        self.by_hand: set[int] = set()

    @precondition(lambda self: len(self.live) < 2)
    @rule(repeats=st.booleans())
    def order(self, repeats: bool) -> None:
        """A new order, or the last one at another conductor."""
        self.number += 1
        id_, epoch = (self.last.order.id, self.last.epoch) if repeats and self.number > 1 else ("", 0)
        order = OrderIdentity(id_ or f"o{self.number}", f"c{self.number}")
        self.last = Orderer(order, epoch or self.number, self.now)
        self.live.append(self.last)

    @precondition(lambda self: self.live)
    @rule(at=st.integers(0, 1), outcome=st.sampled_from(["taken", "refused", "torn"]))
    def step(self, at: int, outcome: str) -> None:
        one = self.live[at % len(self.live)]
        count = len(self.places)
        if one.held < count and not one.failed:
            hold = self.places[one.held].holds.hold(one.order, LEASE, self.now)
            if hold.other is not None or hold.result:
                one.failed = True
            else:
                one.held += 1
        elif one.paused < count and not one.failed:
            try:
                self.places[one.paused].holds.pause(one.order, "weights", self.now)
                one.paused += 1
            except OrderLapsed:
                one.failed = True
        elif one.took < count and not one.failed:
            self._take(one, one.took, outcome)
            one.took += 1
            one.failed = one.took == count and not one.new
        else:
            self._end(one)

    def _take(self, one: Orderer, at: int, outcome: str) -> None:
        place = self.places[at]
        try:
            place.holds.check(one.order, self.now)
        except OrderLapsed:
            return
        assert not place.works(self.now), "weights change only where nothing is computed"
        if place.epoch == one.epoch and not place.torn:
            one.new.append(at)
            return
        if one.epoch <= place.highest:
            return
        if outcome != "refused":
            place.highest = one.epoch
            place.torn = outcome == "torn"
        if outcome == "taken":
            place.epoch = one.epoch
            one.new.append(at)

    def _end(self, one: Orderer) -> None:
        at = len(one.ended)
        place = self.places[at]
        needs = one.epoch if one.new and at not in one.new else 0
        try:
            place.holds.end(one.order, self.now, result=b"" if one.failed else b"r", needs_epoch=needs)
        except KvmeshError:
            pass
        one.ended.add(at)
        if len(one.ended) == len(self.places):
            self.live.remove(one)

    @precondition(lambda self: self.live)
    @rule(at=st.integers(0, 1))
    def dies(self, at: int) -> None:
        del self.live[at % len(self.live)]

    @rule(seconds=st.floats(0.1, 4.0))
    def passes(self, seconds: float) -> None:
        """Those who live renew in time, unless an instance was out of their reach before."""
        self.now += seconds
        for one in self.live:
            for place in self.places[: one.held]:
                running = place.holds.running(self.now)
                if running is not None and running[0] == one.order:
                    place.holds.hold(one.order, LEASE, self.now)

    @rule(at=st.integers(0, 2))
    def is_cut_off(self, at: int) -> None:
        """An instance hears of no conductor until its lease has ended."""
        at %= len(self.places)
        self.places[at].holds._pass(self.now + LEASE)
        for one in self.live:
            one.lost.add(at)

    @rule(at=st.integers(0, 2), pauses=st.booleans())
    def by_hand(self, at: int, pauses: bool) -> None:
        at %= len(self.places)
        holds = self.places[at].holds
        try:
            holds.pause(None, "look", self.now) if pauses else holds.resume(self.now)
        except Overloaded:
            return
        (self.by_hand.add if pauses else self.by_hand.discard)(at)

    @invariant()
    def nothing_is_computed_with_a_mixture(self) -> None:
        for at, place in enumerate(getattr(self, "places", [])):
            assert not (place.works(self.now) and place.torn)
            assert at not in self.by_hand or not place.works(self.now)

    @invariant()
    def what_one_held_and_paused_does_not_work(self) -> None:
        for one in getattr(self, "live", []):
            for at, place in enumerate(self.places[: one.paused]):
                running = place.holds.running(self.now)
                assert running is None or running[0] != one.order or not place.works(self.now) or at in one.ended

    @invariant()
    def nobody_takes_an_instance_from_one_who_renews(self) -> None:
        for one in getattr(self, "live", []):
            for at in set(range(one.held)) - one.lost - one.ended:
                running = self.places[at].holds.running(self.now)
                assert running is not None and running[0] == one.order

    @invariant()
    def no_two_epochs_exchange_kv(self) -> None:
        works = [place.epoch for place in getattr(self, "places", []) if place.works(self.now)]
        for own in works:
            for other in works:
                if own != other:
                    with pytest.raises(WeightsChanged):
                        ServedWeights("ff", own).check("ff", other)

    def teardown(self) -> None:
        """All conductors have died: what is whole goes on by itself, and a new order mends the rest."""
        self.now += LEASE
        for at, place in enumerate(self.places):
            behind = place.epoch < place.holds._needs_epoch
            assert place.works(self.now) == (not place.torn and at not in self.by_hand and not behind)
        self.number += 1
        last = Orderer(OrderIdentity("last", "c"), self.number, self.now)
        self.live = [last]
        while self.live:
            self.step(0, "taken")
        assert [place.works(self.now) for place in self.places] == [
            at not in self.by_hand for at in range(len(self.places))
        ]
        assert {place.epoch for place in self.places} == {self.number}


TestConductors = Conductors.TestCase
TestConductors.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
