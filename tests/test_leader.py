"""Who leads: several masters against a Redis that is slow, loses answers, forgets and starts anew."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvmesh.clock import Tick
from kvmesh.leader.leader import (
    RISE_EVERY_S,
    RISES,
    Action,
    Ask,
    BeginLead,
    Event,
    LeaderMachine,
    LeaderRole,
    LeaseGranted,
    LeaseHeld,
    LeaseRefused,
    LeaseSilent,
    Release,
    Rise,
    StepDown,
    StopCompeting,
    TermHeard,
)
from kvmesh.rpc.terms import MAX_JUMP, MAX_TERM

LEASE = 1.0
MASTERS = 3
FIRST = 100
MOST = FIRST + MAX_JUMP
LIES = st.sampled_from(
    [1, FIRST, FIRST + 1, 10_000, MOST - 1, MOST, MOST + 1, 1 << 30, MAX_TERM - 1, MAX_TERM, 1 << 60]
)


@dataclass
class Lease:
    token: tuple[int, int]
    term: int
    unsure: bool
    until: float


@dataclass
class Redis:
    """What kvmesh/leader/redis_lease.py asks for, executed at one moment each."""

    lease: Lease | None = None
    term: int = 0
    run: int = 1  # a new one with each start
    term_run: int = 0  # the start that gave `term`
    stale: tuple[int, int] = (0, 0)  # an old snapshot of term and term_run

    def run_script(self, who: int, ask: Ask, now: float) -> Event:
        if self.lease is not None and self.lease.until <= now:
            self.lease = None
        token = (who, ask.life)
        if self.lease is not None and self.lease.token != token:
            left = self.lease.until - now
            return LeaseHeld(ask.number, self.lease.term, str(self.lease.token[0]), left)
        if self.lease is not None:
            self.lease.until = now + LEASE
            self.lease.term = max(self.lease.term, self.term, ask.floor if ask.term else 0)
            self.term, self.term_run = self.lease.term, self.run
            return LeaseGranted(ask.number, self.lease.term, self.lease.unsure)
        if ask.term and self.term > ask.term:
            return LeaseHeld(ask.number, self.term, "", 0.0)
        unsure = not ask.term and self.term_run != self.run
        if ask.floor > max(self.term, FIRST) + MAX_JUMP:
            return LeaseRefused(ask.number, self.term)
        self.term = max(ask.term, ask.floor) if ask.term else max(self.term, ask.floor) + 1
        self.term_run = self.run
        self.lease = Lease(token, self.term, unsure, now + LEASE)
        return LeaseGranted(ask.number, self.term, unsure)

    def release(self, token: tuple[int, int]) -> None:
        if self.lease is not None and self.lease.token == token:
            self.lease = None


@dataclass
class Master:
    leader: LeaderMachine
    offset: float
    rate: float
    paused: bool = False
    life: int = 0
    requests: list[Ask | Release] = field(default_factory=list)
    answers: list[Event] = field(default_factory=list)
    reigns: list[int] = field(default_factory=list)
    in_reign: bool = False

    def clock(self, now: float) -> float:
        return self.offset + now * self.rate

    def step(self, event: Event, now: float) -> list[Action]:
        actions = list(self.leader.step(event, self.clock(now)))
        for action in actions:
            match action:
                case Ask() | Release():
                    self.requests.append(action)
                case BeginLead(term):
                    assert not self.in_reign
                    self.in_reign = True
                    self.reigns.append(term)
                case Rise(term):
                    assert self.in_reign and term > self.reigns[-1]
                    self.reigns.append(term)
                case StepDown():
                    assert self.in_reign
                    self.in_reign = False
        return actions


class Mesh(RuleBasedStateMachine):
    """`now` is the true time; each master has a clock of its own, a little fast or slow."""

    kind: type[LeaderMachine] = LeaderMachine

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.redis = Redis()
        self.masters: list[Master] = []
        self.node_term = 0
        self.forgot = False
        self.last_reign = 0
        self.past_reigns = 0  # of masters that were killed

    @initialize(rates=st.lists(st.sampled_from([0.96, 1.0, 1.04]), min_size=MASTERS, max_size=MASTERS))
    def begin(self, rates: list[float]) -> None:
        self.redis.term_run = self.redis.run  # it has given terms before
        self.masters = [Master(self.kind(LEASE), 100.0 * i, rate) for i, rate in enumerate(rates)]

    def _step(self, master: Master, event: Event) -> None:
        before = len(master.reigns)
        master.step(event, self.now)
        for term in master.reigns[before:]:
            assert self.forgot or term > self.last_reign, "terms grow"
            self.last_reign = max(self.last_reign, term)

    who = st.integers(0, MASTERS - 1)
    pick = st.integers(0, 7)

    @rule(seconds=st.sampled_from([0.01, 0.1, 0.3, 0.35, 0.9, 1.0, 1.1, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(who=who)
    def tick(self, who: int) -> None:
        if not self.masters[who].paused:
            self._step(self.masters[who], Tick())

    @rule(who=who, pick=pick, lost=st.booleans())
    def redis_works(self, who: int, pick: int, lost: bool) -> None:
        """On any request under way, however old; its answer may be lost."""
        master = self.masters[who]
        if not master.requests:
            return
        request = master.requests.pop(pick % len(master.requests))
        if isinstance(request, Release):
            self.redis.release((who, request.life))
            return
        answer = self.redis.run_script(who, request, self.now)
        master.answers.append(LeaseSilent(request.number, "lost") if lost else answer)

    @rule(who=who, pick=pick)
    def answered(self, who: int, pick: int) -> None:
        master = self.masters[who]
        if master.answers and not master.paused:
            self._step(master, master.answers.pop(pick % len(master.answers)))

    @rule(who=who)
    def quickly(self, who: int) -> None:
        """Asks what it wants to and hears at once: what mostly happens."""
        master = self.masters[who]
        if not master.paused:
            self._settle(who)

    @rule(who=who, lie=LIES, stranger=st.booleans())
    def a_liar_tells(self, who: int, lie: int, stranger: bool) -> None:
        """Of any term, or of one just above the master's own. Nobody loses the lead by it."""
        master = self.masters[who]
        if master.paused:
            return
        self._step(master, Tick())
        led = master.in_reign
        for term in (lie, master.leader.term + 1):
            self._step(master, TermHeard(term, stranger, MOST))
        assert master.in_reign == led

    @rule(who=who, seconds=st.sampled_from([0.2, 0.5, 0.8]))
    def slowly(self, who: int, seconds: float) -> None:
        """Redis does at once what it is asked, and its answer takes a while."""
        master = self.masters[who]
        if master.paused:
            return
        self._step(master, Tick())
        answers = [
            self.redis.run_script(who, request, self.now) for request in master.requests if isinstance(request, Ask)
        ]
        master.requests.clear()
        self.now += seconds
        for answer in answers:
            self._step(master, answer)

    def _settle(self, who: int) -> None:
        master = self.masters[who]
        self._step(master, Tick())
        while master.requests:
            request = master.requests.pop(0)
            if isinstance(request, Release):
                self.redis.release((who, request.life))
            else:
                self._step(master, self.redis.run_script(who, request, self.now))

    @rule(who=who)
    def request_lost(self, who: int) -> None:
        if self.masters[who].requests:
            self.masters[who].requests.pop(0)

    @rule(who=who)
    def stopped_or_continued(self, who: int) -> None:
        self.masters[who].paused = not self.masters[who].paused

    @rule(who=who)
    def killed_and_restarted(self, who: int) -> None:
        """A process of its own: nothing is known, and late requests of the dead one still reach Redis."""
        old = self.masters[who]
        self.past_reigns += len(old.reigns) + 1
        fresh = Master(self.kind(LEASE), old.offset, old.rate)
        fresh.leader._life = old.leader._life + 1  # tokens hold a random number in truth
        self.masters[who] = fresh

    @rule(kept=st.sampled_from(["all", "nothing", "old"]))
    def redis_restarts(self, kept: str) -> None:
        self.redis.run += 1
        if kept != "all":
            self.forgot = True
            term, run = self.redis.stale if kept == "old" else (0, 0)
            self.redis = Redis(None, term, self.redis.run, run, self.redis.stale)

    @rule()
    def redis_saves(self) -> None:
        self.redis.stale = (self.redis.term, self.redis.term_run)

    @rule(who=who)
    def node_joins(self, who: int) -> None:
        """It tells what it has heard, and takes orders only of terms that are not lower."""
        master = self.masters[who]
        if master.paused or not master.leader.leads(master.clock(self.now)):
            return
        self._step(master, TermHeard(self.node_term, stranger=True, most=MOST))
        if self.node_term <= master.leader.term:
            self.node_term = master.leader.term

    @invariant()
    def at_most_one_leads(self) -> None:
        leading = [m for m in self.masters if m.leader.leads(m.clock(self.now))]
        assert len(leading) <= 1, f"at {self.now}: {[(m.leader.term, m.offset) for m in leading]}"
        assert all(m.in_reign for m in leading)

    @invariant()
    def terms_stay_far_below_the_maximum(self) -> None:
        """Above what is credible only the leaders themselves count on, by one each."""
        reigns = sum(len(m.reigns) for m in self.masters) + self.past_reigns
        assert all(m.leader.term <= MOST + 1 + reigns for m in self.masters)
        assert self.redis.term <= MOST + 2 + reigns < MAX_TERM

    @precondition(lambda self: self.masters)
    @rule()
    def calm(self) -> None:
        """Once nothing goes wrong, soon one leads; those that think they do and those who may are the same."""
        for master in self.masters:
            master.paused = False
            master.requests.clear()
            master.answers.clear()
        for _ in range(40):
            self.now += 0.1
            for who in range(MASTERS):
                self._settle(who)
                self.at_most_one_leads()
        [leader] = [m for m in self.masters if m.leader.leads(m.clock(self.now))]
        for _ in range(3):  # an honest node is served soon: the leader rises above what it knows, if that is credible
            self._step(leader, TermHeard(self.node_term, stranger=True, most=MOST))
            for _ in range(10):  # longer than RISE_EVERY_S
                self.now += 0.15
                for who in range(MASTERS):
                    self._settle(who)
        assert leader.leader.leads(leader.clock(self.now))
        # Above that, the node itself takes the leader's lower term after a while: see kvmesh.rpc.terms.LeaderTerms.
        assert leader.leader.term >= self.node_term or self.node_term > MOST
        for master in self.masters:
            if master is not leader:
                assert not master.in_reign
                assert master.leader.leader_at(master.clock(self.now)) == str(self.masters.index(leader))


SETTINGS = settings(max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))


def test_at_most_one_master_leads_whatever_happens() -> None:
    run_state_machine_as_test(Mesh, settings=SETTINGS)


class CountsFromTheAnswer(LeaderMachine):
    def _counted_from(self, asked: float, answered: float) -> float:
        return answered


class NeverLooksAtTheClock(LeaderMachine):
    def leads(self, now: float) -> bool:
        return self.role is LeaderRole.LEADING


class TrustsAnyRedis(LeaderMachine):
    def step(self, event: Event, now: float) -> list[Action]:  # type: ignore[override]
        if isinstance(event, LeaseGranted):
            event = LeaseGranted(event.number, event.term, False)
        return list(super().step(event, now))


@pytest.mark.parametrize(
    "broken", [pytest.param(CountsFromTheAnswer, marks=pytest.mark.slow), NeverLooksAtTheClock, TrustsAnyRedis]
)
def test_a_broken_leader_is_found(broken: type[LeaderMachine]) -> None:
    mesh = type("Broken", (Mesh,), {"kind": broken})
    searching = settings(
        SETTINGS, max_examples=2000, report_multiple_bugs=False, phases=[Phase.generate], database=None
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(mesh, settings=searching)


# ── one step at a time ────────────────────────────────────────────────────────────────────────────


def leading(now: float = 0.0) -> LeaderMachine:
    """With the lease of term 5 since `now`."""
    leader = LeaderMachine(LEASE)
    [ask] = leader.step(Tick(), now)
    assert isinstance(ask, Ask)
    assert leader.step(LeaseGranted(ask.number, 5, False), now) == [BeginLead(5)]
    return leader


def test_a_frozen_leader_does_not_lead_when_it_wakes() -> None:
    leader = leading()
    assert leader.leads(0.89)
    assert not leader.leads(0.91)  # asked before anything else in the first turn of the loop
    down, release, ask = leader.step(TermHeard(5), 7.0)
    assert isinstance(down, StepDown) and isinstance(release, Release) and isinstance(ask, Ask)
    assert (ask.term, ask.floor) == (0, 5) and ask.life != release.life


def test_a_leader_rises_above_a_higher_term_and_goes_on_leading() -> None:
    leader = leading()
    assert leader.step(TermHeard(5, stranger=True), 0.1) == []
    [ask] = leader.step(TermHeard(9), 0.1)
    assert isinstance(ask, Ask) and (ask.term, ask.floor) == (5, 10)
    assert leader.leads(0.1) and leader.term == 5, "until Redis says so"
    assert leader.step(TermHeard(9), 0.1) == [], "it is about to"
    assert leader.step(LeaseGranted(ask.number, 10, False), 0.15) == [Rise(10)]
    assert leader.leads(0.9) and leader.term == 10


@pytest.mark.parametrize("lease_s", [None, LEASE])
@pytest.mark.parametrize("term", [1001, MAX_TERM - 1, MAX_TERM, 1 << 40])
def test_a_term_that_is_not_credible_changes_nothing(term: int, lease_s: float | None) -> None:
    leader = leading() if lease_s else LeaderMachine(None)
    leader.step(Tick(), 0.0)
    before = leader.term
    assert leader.step(TermHeard(term, stranger=True, most=1000), 0.1) == []
    assert leader.step(TermHeard(max(term, MAX_TERM - 1)), 0.1) == [], "nor is there one above the maximum"
    assert leader.term == before and leader.leads(0.1)


def test_a_liar_makes_terms_rise_so_often_and_no_more() -> None:
    leader = LeaderMachine(None)
    leader.step(Tick(), 0.0)
    rises = sum(len(leader.step(TermHeard(leader.term + 1), at / 1000)) for at in range(10_000))
    assert rises <= RISES + 10 / RISE_EVERY_S + 1
    assert leader.step(TermHeard(leader.term + 5), 20.0) == [Rise(leader.term)], (
        "an honest member is heard all the same"
    )


def test_a_floor_that_redis_refuses_is_forgotten() -> None:
    leader = LeaderMachine(LEASE)
    [ask] = leader.step(TermHeard(500), 0.0)
    assert isinstance(ask, Ask) and ask.floor == 500
    assert leader.step(LeaseRefused(ask.number, 7), 0.1) == []
    [again] = leader.step(Tick(), 0.5)
    assert isinstance(again, Ask) and again.floor == 7
    assert leader.step(LeaseGranted(again.number, 8, False), 0.6) == [BeginLead(8)]


def test_no_leader_begins_at_the_maximum() -> None:
    with pytest.raises(ValueError, match="first="):
        LeaderMachine(None, first=MAX_TERM)
    leader = LeaderMachine(LEASE)
    [ask] = leader.step(Tick(), 0.0)
    assert isinstance(ask, Ask)
    assert leader.step(LeaseGranted(ask.number, MAX_TERM, False), 0.1) == [] and leader.role is LeaderRole.STANDBY
    [ask] = leader.step(Tick(), 0.5)
    assert isinstance(ask, Ask)
    leader.step(LeaseHeld(ask.number, MAX_TERM, "h:1", 0.5), 0.5)
    assert leader.term == 0, "what is no term is no floor"


def test_answers_to_requests_of_a_lease_that_is_over_prolong_nothing() -> None:
    leader = leading()
    [renewal] = leader.step(Tick(), 0.4)
    assert isinstance(renewal, Ask) and renewal.term == 5
    leader.step(LeaseHeld(0, 0, "", 0.0), 1.0)  # its lease runs out
    assert leader.step(LeaseGranted(renewal.number, 5, False), 1.0) == []
    assert leader.role is LeaderRole.STANDBY


def test_without_redis_one_leads_at_once_and_above_all_that_nodes_have_heard() -> None:
    assert LeaderMachine(None, first=77).step(Tick(), 0.0) == [BeginLead(77)]
    leader = LeaderMachine(None)
    assert leader.step(Tick(), 0.0) == [BeginLead(1)]
    assert leader.leads(1e9)
    assert leader.step(TermHeard(7), 1.0) == [Rise(8)]
    assert leader.step(TermHeard(8), 1.0) == []  # a member: it has this from us
    assert leader.step(TermHeard(8, stranger=True), 1.0) == [Rise(9)]
    assert leader.term == 9 and leader.leads(2.0)


def test_an_unsure_lease_is_not_given_back() -> None:
    """Redis would give a sure one at once, while one whom it has forgotten may still lead."""
    waiting, late = LeaderMachine(LEASE), LeaderMachine(LEASE)
    for leader in (waiting, late):
        [ask] = leader.step(Tick(), 0.0)
        assert isinstance(ask, Ask)
    late.step(TermHeard(5), 0.0)
    actions = late.step(LeaseGranted(ask.number, 5, True), 0.0)
    assert not [action for action in actions if isinstance(action, Release)]
    assert waiting.step(LeaseGranted(ask.number, 5, True), 0.0) == [] and waiting.role is LeaderRole.WAITING
    assert waiting.step(StopCompeting(), 0.1) == []


def test_the_last_word_gives_the_lease_back() -> None:
    leader = leading()
    down, release = leader.step(StopCompeting(), 0.2)
    assert isinstance(down, StepDown) and isinstance(release, Release)
    assert leader.step(Tick(), 9.0) == [] and not leader.leads(0.2)
