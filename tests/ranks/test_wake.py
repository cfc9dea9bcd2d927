"""Data-parallel groups in step: whoever has work, whenever commands and calls arrive, all of it is done, nobody waits
for ever, and all sleep when there is none."""

from __future__ import annotations

import socket
from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvmesh.errors import InternalError
from kvmesh.ranks.wake import OtherLeaders, RoundChoice, WakeRule

GROUP = st.integers(0, 2)


class LoopingGroup:
    """A group's leader as far as rounds go. Its work is a queue of steps, each so many rounds: one, none where it fails
    before it is computed, several where it is computed again."""

    def __init__(self) -> None:
        self.rule = WakeRule()
        self.calls: deque[int] = deque()  # on their way from the others
        self.work: deque[int] = deque()
        self.done = 0
        self.anyone = False
        self.left = 0  # rounds of the step that it is in the middle of
        self.entered: bool | None = None  # None: not in a round; else whether it has tokens there
        self.finished = 0


class Groups(RuleBasedStateMachine):
    """The instance: a round is over when all groups have entered it."""

    @initialize(count=st.integers(1, 3))
    def begin(self, count: int) -> None:
        self.groups = [LoopingGroup() for _ in range(count)]
        self.given = self.rounds = 0

    def group(self, number: int) -> LoopingGroup:
        return self.groups[number % len(self.groups)]

    @rule(number=GROUP, rounds=st.integers(0, 3))
    def command(self, number: int, rounds: int) -> None:
        """The front gives a group something to compute, at any time."""
        self.group(number).work.append(rounds)
        self.given += 1

    @rule(number=GROUP, arriving=st.integers(0, 3))
    def loop(self, number: int, arriving: int) -> None:
        """The leader's loop comes round, once; calls may be late. In a round it stands still."""
        group = self.group(number)
        if group.entered is not None:
            return
        group.rule.take([group.calls.popleft() for _ in range(min(arriving, len(group.calls)))])
        if group.left:  # still in one step: it makes its next round by itself
            self._enter(group, True)
            return
        run, call = group.rule.choose(group.done, group.anyone, bool(group.work))
        if call:
            assert call == group.done + 1 and run
            for other in self.groups:
                if other is not group:
                    other.calls.append(call)
        if not run:
            return
        if not group.work:
            self._enter(group, False)
            return
        group.left = group.work.popleft()
        if group.left:
            self._enter(group, True)
        else:
            group.finished += 1

    def _enter(self, group: LoopingGroup, tokens: bool) -> None:
        group.entered = tokens
        if any(other.entered is None for other in self.groups):
            return
        anyone = any(other.entered for other in self.groups)
        self.rounds += 1
        for other in self.groups:
            if other.entered:
                other.left -= 1
                other.finished += not other.left
            other.done, other.anyone, other.entered = other.done + 1, anyone, None
            assert other.done == self.rounds

    @invariant()
    def calls_are_for_a_round_that_some_group_has_not_made(self) -> None:
        for group in getattr(self, "groups", ()):
            assert all(call <= group.done + 1 for call in group.calls)

    def teardown(self) -> None:
        """Everything that is left gets done, with nobody stuck; then all sleep, whatever arrives late."""
        if not hasattr(self, "groups"):
            return
        for _ in range(8 * (self.given + 3) + 8):
            for number in range(len(self.groups)):
                self.loop(number, 3)
        assert sum(group.finished for group in self.groups) == self.given
        assert all(group.entered is None and not group.work and not group.calls for group in self.groups)
        before = self.rounds
        for number in range(len(self.groups)):
            self.loop(number, 3)
        assert self.rounds == before  # nobody spins


Groups.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestGroups = Groups.TestCase


def test_a_group_that_gets_work_calls_the_others_once() -> None:
    rule = WakeRule()
    assert rule.choose(4, False, False) == RoundChoice(False, 0)
    assert rule.choose(4, False, True) == RoundChoice(True, 5)
    assert rule.choose(4, False, False) == RoundChoice(True, 0)  # its work failed; the others are on their way
    assert rule.choose(5, True, False) == RoundChoice(True, 0)
    assert rule.choose(6, False, False) == RoundChoice(False, 0)
    rule.take([6, 5])  # late
    assert rule.choose(6, False, False) == RoundChoice(False, 0)
    rule.take([7])
    assert rule.choose(6, False, True) == RoundChoice(True, 0)


def test_calls_cross_the_sockets_and_an_end_is_heard() -> None:
    ours, theirs = socket.socketpair()
    one, other = OtherLeaders([ours]), OtherLeaders([theirs])
    assert other.calls() == [] and one.filenos == [ours.fileno()]
    one.call(0)
    one.call(3)
    one.call(2**40)
    assert other.calls() == [3, 2**40]
    ours.sendall(b"\x07\0\0")
    assert other.calls() == []
    ours.sendall(b"\0\0\0\0\0")
    assert other.calls() == [7]
    ours.close()
    with pytest.raises(InternalError, match="another data-parallel group is gone"):
        other.calls()
    with pytest.raises(InternalError, match="does not listen"):
        other.call(8)
    theirs.close()
