"""The line of requests that wait for an instance: its rules, under every order of what may happen."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from kvmesh.errors import Unavailable
from kvmesh.services.gateway.hold_line import HeldNews, HeldTicket, HoldLimits, HoldLine

MODELS = ("a", "b")
LIMITS = HoldLimits(6, 100, 10.0)


def test_who_came_first_goes_first_and_each_placement_lets_one_go() -> None:
    line = HoldLine(LIMITS)
    line.set_absent("a", True)
    second = line.join("a", 2, 1, 0.0)
    first = line.join("a", 1, 1, 1.0)
    assert line.advance(2.0) == [] and line.next_at() == 10.0
    line.set_absent("a", False)
    assert line.advance(2.0) == [(first, HeldNews.TURN)]
    assert line.joins("a") and line.advance(2.0) == [], "who comes now is behind them"
    line.leave(first)
    assert line.advance(2.0) == [(second, HeldNews.TURN)]
    line.leave(second)
    assert not line.joins("a") and line.next_at() == math.inf and not line and line.nbytes == 0


def test_who_is_refused_for_load_keeps_its_place_and_those_who_come_do_not_queue_behind_it() -> None:
    line = HoldLine(LIMITS)
    line.set_absent("a", True)
    first, second = line.join("a", 1, 1, 0.0), line.join("a", 2, 1, 0.0)
    line.set_absent("a", False)
    line.advance(0.0)
    line.take_back(first, 0.0, 3.0)
    assert line.advance(0.0) == [] and line.next_at() == 3.0
    assert not line.joins("a")
    assert line.advance(3.0) == [(first, HeldNews.TURN)]
    line.leave(first)
    assert line.joins("a"), "they go on again"
    assert line.advance(3.0) == [(second, HeldNews.TURN)]


def test_an_instance_that_goes_again_takes_the_turn_back() -> None:
    line = HoldLine(LIMITS)
    line.set_absent("a", True)
    first = line.join("a", 1, 1, 0.0)
    line.set_absent("a", False)
    line.advance(1.0)
    line.set_absent("a", True)
    line.take_back(first, 2.0)
    assert line.advance(9.0) == []
    assert line.advance(10.0) == [(first, HeldNews.EXPIRED)]
    assert not line


@pytest.mark.parametrize(("nbytes", "count", "field"), [(1, 6, "hold_requests=6"), (40, 2, "hold_bytes=100")])
def test_a_full_line_names_its_bound(nbytes: int, count: int, field: str) -> None:
    line = HoldLine(LIMITS)
    line.set_absent("a", True)
    for number in range(count):
        line.join("a", number, nbytes, 0.0)
    with pytest.raises(Unavailable, match=field) as found:
        line.join("a", 9, nbytes, 0.0)
    assert found.value.retry_after_ms


class HoldLineMachine(RuleBasedStateMachine):
    """`states` is what each request knows of itself: it waits, or has the turn."""

    tickets = Bundle("tickets")

    @initialize()
    def begin(self) -> None:
        self.line = HoldLine(LIMITS)
        self.now = 0.0
        self.absent = dict.fromkeys(MODELS, True)
        for model in MODELS:
            self.line.set_absent(model, True)
        self.states: dict[HeldTicket, str] = {}
        self.not_before = dict.fromkeys(MODELS, -math.inf)

    def advance(self) -> None:
        for ticket, news in self.line.advance(self.now):
            assert self.states[ticket] == "waits"
            if news is HeldNews.EXPIRED:
                assert ticket.until <= self.now
                del self.states[ticket]
                continue
            assert not self.absent[ticket.model] and self.now >= self.not_before[ticket.model]
            others = [one for one, state in self.states.items() if state == "waits" and one.model == ticket.model]
            assert ticket.order == min(one.order for one in others), "who came first goes first"
            self.states[ticket] = "turn"

    @rule(target=tickets, model=st.sampled_from(MODELS), order=st.integers(0, 100), nbytes=st.integers(1, 60))
    def arrive(self, model: str, order: int, nbytes: int) -> HeldTicket | None:
        if not self.line.joins(model):
            return None
        held = sum(one.nbytes for one in self.states)
        try:
            ticket = self.line.join(model, order, nbytes, self.now)
        except Unavailable:
            assert len(self.states) == LIMITS.requests or held + nbytes > LIMITS.held_bytes
            return None
        assert len(self.states) < LIMITS.requests and held + nbytes <= LIMITS.held_bytes
        self.states[ticket] = "waits"
        self.advance()
        return ticket

    @rule(model=st.sampled_from(MODELS), absent=st.booleans())
    def instances_come_or_go(self, model: str, absent: bool) -> None:
        if absent and not self.absent[model]:
            self.not_before[model] = -math.inf
        self.absent[model] = absent
        self.line.set_absent(model, absent)
        self.advance()

    @rule(ticket=consumes(tickets))
    def leaves_or_is_placed(self, ticket: HeldTicket | None) -> None:
        if ticket is not None:
            self.line.leave(ticket)
            self.line.leave(ticket)
            self.states.pop(ticket, None)
            self.advance()

    @precondition(lambda self: "turn" in self.states.values())
    @rule(data=st.data(), wait_s=st.sampled_from((0.0, 0.5, 4.0)))
    def is_refused(self, data: st.DataObject, wait_s: float) -> None:
        ticket = data.draw(st.sampled_from([one for one, state in self.states.items() if state == "turn"]))
        if not wait_s:
            self.instances_go(ticket.model)
        self.line.take_back(ticket, self.now, wait_s)
        self.not_before[ticket.model] = self.now + wait_s
        self.states[ticket] = "waits"
        self.advance()

    def instances_go(self, model: str) -> None:
        self.absent[model] = True
        self.line.set_absent(model, True)

    @rule(seconds=st.sampled_from((0.1, 1.0, 5.0, 11.0)))
    def time_passes(self, seconds: float) -> None:
        """As the event loop has it: `advance` is called whenever the line said that something may be due."""
        end = self.now + seconds
        while (at := self.line.next_at()) <= end:
            assert at > self.now, "what was due was told"
            self.now = at
            before = len(self.states), list(self.states.values())
            self.advance()
            assert (len(self.states), list(self.states.values())) != before, "it was called for nothing"
        self.now = end
        assert not self.line.advance(end)

    @invariant()
    def nobody_is_lost_and_nobody_waits_who_could_go(self) -> None:
        if not hasattr(self, "line"):
            return
        assert len(self.line) == len(self.states) <= LIMITS.requests
        assert self.line.nbytes == sum(one.nbytes for one in self.states) <= LIMITS.held_bytes
        for model in MODELS:
            mine = [state for one, state in self.states.items() if one.model == model]
            assert mine.count("turn") <= 1
            if "waits" in mine and "turn" not in mine:
                assert self.absent[model] or self.now < self.not_before[model]
            assert self.line.counts().get(model, 0) == len(mine)
        assert all(state == "turn" or one.until > self.now for one, state in self.states.items())


TestHoldLineMachine = HoldLineMachine.TestCase
TestHoldLineMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
