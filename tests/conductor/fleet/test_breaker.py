"""One instance's circuit breaker: when it opens, how it is tried, that it never stays shut."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmesh.services.conductor.fleet.breaker import Breaker, BreakerPhase, BreakerWindow
from kvmesh.services.conductor.settings import BreakerSettings

S = BreakerSettings(failures=3, share=0.5, window_s=10.0, rest_s=5.0, max_rest_s=20.0, probe_s=30.0)


def opened(now: float = 0.0, s: BreakerSettings = S) -> Breaker:
    breaker = Breaker(s)
    for i in range(s.failures):
        breaker.failed(f"f{i}", now, now)
    assert breaker.phase(now) is BreakerPhase.OPEN
    return breaker


def test_a_life_of_a_breaker() -> None:
    b = opened()
    assert b.why_not(1.0) == "rests for 4.0 s more: 3 of 3 requests failed within 10 s"
    assert not b.placed("early", 4.9)
    assert b.why_not(5.0) == "", "half open: it may have one request"
    assert b.placed("probe", 5.0)
    assert b.why_not(5.1).startswith("is being tried with request probe after its rest")
    assert not b.placed("second", 5.1)
    b.succeeded("probe", 5.0, 6.0)
    assert b.phase(6.0) is BreakerPhase.CLOSED
    assert b.why_not(6.0) == ""


@pytest.mark.parametrize(
    ("good", "phase"),
    [(0, BreakerPhase.OPEN), (3, BreakerPhase.OPEN), (4, BreakerPhase.CLOSED), (5000, BreakerPhase.CLOSED)],
)
def test_a_share_of_its_requests_must_fail(good: int, phase: BreakerPhase) -> None:
    b = Breaker(S)
    for i in range(good):
        b.succeeded(f"s{i}", 0.0, 0.0)
    for i in range(3):
        b.failed(f"f{i}", 0.0, 0.0)
    assert b.phase(0.0) is phase


def test_failures_apart_from_one_another_do_not_count_together() -> None:
    b = Breaker(S)
    for i in range(20):
        b.failed(f"f{i}", 5.1 * i, 5.1 * i)
    assert b.phase(102.0) is BreakerPhase.CLOSED


def test_the_rest_doubles_up_to_its_limit_and_shrinks_while_all_is_well() -> None:
    b, now, rests = opened(), 0.0, []
    for i in range(4):
        while b.phase(now) is BreakerPhase.OPEN:
            now += 0.25
        rests.append(now)
        assert b.placed(f"p{i}", now)
        b.failed(f"p{i}", now, now)
    assert [later - sooner for sooner, later in zip([0.0, *rests], rests, strict=False)] == [5.0, 10.0, 20.0, 20.0]
    now += 20.0
    assert b.placed("good", now)
    b.succeeded("good", now, now)
    for later, rest in ((now + 11.0, 20.0), (now + 60.0, 5.0)):
        again = opened()
        again.__dict__.update({**b.__dict__, "_window": BreakerWindow(S.window_s)})
        for i in range(3):
            again.failed(f"x{i}", later, later)
        assert again.phase(later + rest - 0.01) is BreakerPhase.OPEN
        assert again.phase(later + rest) is BreakerPhase.HALF_OPEN


def test_what_was_under_way_when_it_opened_judges_nothing() -> None:
    b = opened()
    b.succeeded("old", 0.0, 4.0)
    b.failed("old too", 0.0, 6.0)
    b.succeeded("old as well", 4.9, 6.0)
    assert b.phase(6.0) is BreakerPhase.HALF_OPEN
    b.succeeded("another conductor's probe", 5.5, 6.5)
    assert b.phase(6.5) is BreakerPhase.CLOSED


def test_a_probe_without_a_verdict_makes_room_for_the_next() -> None:
    b = opened()
    assert b.placed("a", 5.0)
    b.released("b")
    assert not b.placed("c", 6.0)
    b.released("a")
    assert b.placed("c", 6.0)
    assert not b.placed("d", 35.9)
    assert b.placed("d", 36.0), "nobody has ever told of c"


class Machine(RuleBasedStateMachine):
    """Any order of placements and ends; `mirror` counts by itself what must have happened."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.b = Breaker(S)
        self.recent: list[tuple[float, bool]] = []  # ends while it was closed
        self.under_way: dict[str, float] = {}
        self.probes: dict[str, float] = {}
        self.n = 0

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 4.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def place(self) -> None:
        self.n += 1
        name = f"r{self.n}"
        half = self.b.phase(self.now) is BreakerPhase.HALF_OPEN
        free = self.b.why_not(self.now) == ""
        if not free:
            assert not self.b.placed(name, self.now)
            return
        assert self.b.placed(name, self.now) == half
        if half:
            self.probes = {p: at for p, at in self.probes.items() if self.now < at + S.probe_s}
            assert not self.probes, "a second probe"
            self.probes[name] = self.now
        self.under_way[name] = self.now

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), how=st.sampled_from(["ok", "failed", "failed", "cancelled"]))
    def end(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.under_way)))
        began, before = self.under_way.pop(name), self.b.phase(self.now)
        if how == "cancelled":
            self.b.released(name)
            self.probes.pop(name, None)
            return
        if before is BreakerPhase.CLOSED:
            self.recent.append((self.now, how == "failed"))
        (self.b.succeeded if how == "ok" else self.b.failed)(name, began, self.now)
        after = self.b.phase(self.now)
        if before is BreakerPhase.CLOSED and after is BreakerPhase.OPEN:
            seen = [failed for at, failed in self.recent if self.now - at <= S.window_s]
            assert sum(seen) >= S.failures, "opened without enough failures"
        if after is not before:
            self.recent, self.probes = [], {}
        if before is BreakerPhase.CLOSED:
            near = [failed for at, failed in self.recent if self.now - at <= 0.9 * S.window_s - 1]
            enough = sum(near) >= S.failures and sum(near) >= S.share * len(self.recent)
            assert not enough or after is BreakerPhase.OPEN, "stayed closed in spite of its failures"

    @invariant()
    def is_tried_again(self) -> None:
        """However it stands, without any word it may have a request before its longest rest and a probe are over."""
        assert self.b.why_not(self.now + max(S.max_rest_s, S.probe_s)) == ""


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
