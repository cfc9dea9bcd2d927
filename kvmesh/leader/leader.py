"""Who leads, as one of several masters (or conductors) sees it. Pure: `step(event, now) -> actions`; `leads(now)`
before every answer and order.

A lease in Redis says who leads; its term is a fencing token. A leader counts its lease from before the request that
gave or renewed it, less a margin for clocks that run at different speeds, so that Redis can have given it to nobody
else while `leads` is true. Without Redis (`lease_s` None) there is one master, which leads from the start.

Whoever leads has led alone since it began, so a higher term that a member has heard of is one of the past (that of a
life before a Redis was emptied, say), or a lie. Neither ends a leadership: the leader goes on under a term above it. It
believes no term above what the clock makes credible (`TermHeard.most`), and rises RISES times at once and then every
RISE_EVERY_S, so that a lying member costs a bounded number of terms and nobody their leader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvmesh.clock import Tick
from kvmesh.rpc.terms import MAX_TERM

MARGIN = 0.1  # of the lease
RENEWALS = 3  # in one lease: two of them may be lost
SOONEST = 0.02  # of a lease: a standby asks again, however little the leader has left
RISES, RISE_EVERY_S = 16, 1.0  # to a term that a member has told: so often at once, and how soon again after that
FOREVER = float("inf")


class LeaderRole(Enum):
    STANDBY = "standby"
    WAITING = "waiting"  # holds the lease, and lets those of masters that Redis has forgotten run out
    LEADING = "leading"
    ENDED = "ended"  # the process is about to stop


# ── events ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class LeaseGranted:
    """The lease is ours, by the request `number`. `unsure` says that Redis was restarted since it gave the last term,
    and may have forgotten leases."""

    number: int
    term: int
    unsure: bool


@dataclass(frozen=True)
class LeaseHeld:
    """Another process has the lease, for `left_s` more seconds."""

    number: int
    term: int
    leader: str
    left_s: float


@dataclass(frozen=True)
class LeaseSilent:
    """The outcome of the request is unknown."""

    number: int
    why: str


@dataclass(frozen=True)
class LeaseRefused:
    """Redis does not believe the request's floor, which is far above `term`, the highest that it knows."""

    number: int
    term: int


@dataclass(frozen=True)
class TermHeard:
    """A member has heard of `term`. `stranger` says that it was no member until just now, so the term is not from us.
    No term above `most` is credible."""

    term: int
    stranger: bool = False
    most: int = MAX_TERM


@dataclass(frozen=True)
class StopCompeting:
    pass


Event = Tick | LeaseGranted | LeaseHeld | LeaseSilent | LeaseRefused | TermHeard | StopCompeting


# ── actions ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Ask:
    """Asks for the lease (`term` 0), or renews the one of `term`. A new term must be above `floor`, and at least
    `first` if Redis knows none; a renewal raises its term to `floor`. The answer is an event with this number. `life`
    distinguishes leases; each is for at most one continuous leadership."""

    number: int
    life: int
    term: int
    floor: int
    first: int = 1


@dataclass(frozen=True)
class Release:
    """Gives the lease of `life` back, if it is still held."""

    life: int


@dataclass(frozen=True)
class BeginLead:
    """This process leads from now on, with an empty map."""

    term: int


@dataclass(frozen=True)
class Rise:
    """This process goes on leading under a higher term, because members had heard of an earlier one."""

    term: int


@dataclass(frozen=True)
class StepDown:
    """This process does not lead any more, and all that it knew is void."""

    why: str


Action = Ask | Release | BeginLead | Rise | StepDown


class LeaderMachine:
    """Decides who leads, as one master sees it. `now` is in seconds of a monotonic clock that goes on while the process
    is stopped."""

    def __init__(self, lease_s: float | None, first: int = 1) -> None:
        """`first` is the least term to begin with where no other is known. Raises ValueError when it is no term."""
        if not 0 < first < MAX_TERM:
            raise ValueError(f"first={first}: must be in 1..{MAX_TERM - 1}")
        self._lease_s = lease_s
        self._first = first
        self.role = LeaderRole.STANDBY
        self.term = 0  # ours while leading, else the highest heard
        self.leader = ""  # who leads, when it is another and its lease is not known to be over
        self._leader_until = FOREVER
        self._until = 0.0  # we hold the lease
        self._leads_from = 0.0
        self._unsure = False
        self._floor = 0  # to which our term is to rise with the next renewal
        self._rises, self._rises_at = float(RISES), 0.0  # how many may come at once, as of when
        self._asked: dict[int, float] = {}  # requests under way: since when
        self._number = 0
        self._life = 0
        self._ask_at = 0.0
        self._silent = ""  # why the last request was not answered

    # ── questions ────────────────────────────────────────────────────────────────────────────────────

    def leads(self, now: float) -> bool:
        """Says whether this process may answer and order at this moment."""
        return self.role is LeaderRole.LEADING and now < self._until

    def leader_at(self, now: float) -> str:
        """Returns the address of another process that leads, "" when it is unknown."""
        return self.leader if now < self._leader_until else ""

    @property
    def next_at(self) -> float:
        """The time of the next step if no event comes before."""
        held = self._until if self.role in (LeaderRole.WAITING, LeaderRole.LEADING) else FOREVER
        ready = self._leads_from if self.role is LeaderRole.WAITING else FOREVER
        return min(self._ask_at, held, ready)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────

    def step(self, event: Event, now: float) -> Sequence[Action]:
        """Applies one event at `now`, which never decreases. A lease that has run out is noticed first, whatever the
        event."""
        actions: list[Action] = []
        if self.role is LeaderRole.ENDED:
            return actions
        if self.role in (LeaderRole.WAITING, LeaderRole.LEADING) and now >= self._until:
            why = self._silent or "this process stood still"
            self._fall("its lease ran out: " + why, actions, now)
        match event:
            case LeaseGranted():
                self._granted(event, now, actions)
            case LeaseHeld():
                self._held(event, now, actions)
            case LeaseSilent(number, why):
                if self._asked.pop(number, None) is not None:
                    self._silent = why
            case LeaseRefused():
                self._refused(event)
            case TermHeard():
                self._heard(event, now, actions)
            case StopCompeting():
                self._stop(actions)
                return actions
            case Tick():
                pass
        if self._lease_s is None:
            self._lead_alone(actions)
            return actions
        if self.role is LeaderRole.WAITING and now >= self._leads_from:
            self.role = LeaderRole.LEADING
            actions.append(BeginLead(self.term))
        if now >= self._ask_at:
            self._ask(now, actions)
        return actions

    def _lead_alone(self, actions: list[Action]) -> None:
        if self.role is LeaderRole.STANDBY:
            self.role, self._until, self._ask_at = LeaderRole.LEADING, FOREVER, FOREVER
            self.term = max(self._first, self.term + 1)
            actions.append(BeginLead(self.term))

    def _ask(self, now: float, actions: list[Action]) -> None:
        assert self._lease_s is not None
        self._number += 1
        self._asked[self._number] = now
        # Those older than a lease can prolong nothing any more.
        self._asked = {number: since for number, since in self._asked.items() if now - since < self._lease_s}
        self._ask_at = now + self._lease_s / RENEWALS
        mine = self.role in (LeaderRole.WAITING, LeaderRole.LEADING)
        floor = max(self.term, self._floor) if mine else self.term
        actions.append(Ask(self._number, self._life, self.term if mine else 0, floor, self._first))

    def _granted(self, said: LeaseGranted, now: float, actions: list[Action]) -> None:
        asked = self._asked.pop(said.number, None)
        if asked is None or said.term >= MAX_TERM:
            return
        assert self._lease_s is not None
        self._silent = ""
        until = self._counted_from(asked, now) + self._lease_s * (1 - MARGIN)
        if self.role in (LeaderRole.WAITING, LeaderRole.LEADING):
            if said.term >= self.term:
                self._until = max(self._until, until)
            if said.term > self.term:
                self.term = said.term
                if self.role is LeaderRole.LEADING:
                    actions.append(Rise(self.term))
            return
        if now >= until:
            return  # too late: it may be somebody else's by now
        if said.term <= self.term:
            self._fall(f"term {said.term} has been given before", actions, now, unsure=said.unsure)
            return
        self.role, self.term, self._until, self._unsure = LeaderRole.WAITING, said.term, until, said.unsure
        self.leader, self._leader_until = "", 0.0
        # A Redis that forgets may give a lease, even a term, that another master has: wait until nobody can lead.
        self._leads_from = now + self._lease_s if said.unsure else now

    def _counted_from(self, asked: float, answered: float) -> float:
        """Returns the moment from which our lease counts: Redis may have given it as soon as it was asked."""
        return asked

    def _held(self, said: LeaseHeld, now: float, actions: list[Action]) -> None:
        if self._asked.pop(said.number, None) is None:
            return
        assert self._lease_s is not None
        self._silent = ""
        if self.role in (LeaderRole.WAITING, LeaderRole.LEADING):
            if said.term < self.term:
                return  # answered before we got it
            self._fall(f"{said.leader} has term {said.term}", actions, now)
        if said.term < MAX_TERM - 1:  # another's, if it is no term: Redis begins anew when that lease is over
            self.term = max(self.term, said.term)
        self.leader, self._leader_until = said.leader, now + said.left_s
        self._ask_at = min(self._ask_at, now + max(said.left_s, self._lease_s * SOONEST))

    def _refused(self, said: LeaseRefused) -> None:
        """Forgets the floor, because Redis knows the highest term better than the member that reported it."""
        if self._asked.pop(said.number, None) is None:
            return
        self._silent = ""
        self._floor = 0
        if self.role is LeaderRole.STANDBY:
            self.term = min(self.term, said.term)

    def _heard(self, said: TermHeard, now: float, actions: list[Action]) -> None:
        if said.term > min(said.most, MAX_TERM - 2):  # the next one must be below the maximum
            return
        mine = self.role in (LeaderRole.WAITING, LeaderRole.LEADING)
        # A stranger that knows our very term has it from another life of the mesh, if terms can have been forgotten.
        twin = mine and said.stranger and said.term == self.term and (self._lease_s is None or self._unsure)
        if said.term < self.term or (said.term == self.term and not twin):
            return
        if not mine:
            self.term = said.term
        elif said.term >= self._floor and self._may_rise(now):
            self._rise_above(said.term, now, actions)

    def _rise_above(self, term: int, now: float, actions: list[Action]) -> None:
        if self._lease_s is None:
            self.term = term + 1
            actions.append(Rise(self.term))
        else:
            self._floor = term + 1
            self._ask_at = now

    def _may_rise(self, now: float) -> bool:
        self._rises = min(float(RISES), self._rises + (now - self._rises_at) / RISE_EVERY_S)
        self._rises_at = now
        if self._rises < 1:
            return False
        self._rises -= 1
        return True

    def _fall(self, why: str, actions: list[Action], now: float, *, unsure: bool = False) -> None:
        """Gives up the lease. `unsure` says that it is an unsure one: it is not given back then, because Redis would
        give a sure one after it at once, and others that Redis has forgotten may lead until it has run out."""
        if self.role is LeaderRole.LEADING:
            actions.append(StepDown(why))
        if not (unsure or self._waits_unsure):
            actions.append(Release(self._life))
        self.role, self._until, self._floor = LeaderRole.STANDBY, 0.0, 0
        # Whatever is still under way belongs to the lease that we had.
        self._life += 1
        self._asked.clear()
        self._ask_at = min(self._ask_at, now)

    @property
    def _waits_unsure(self) -> bool:
        return self.role is LeaderRole.WAITING and self._unsure

    def _stop(self, actions: list[Action]) -> None:
        if self.role is LeaderRole.LEADING:
            actions.append(StepDown("this process stops"))
        if (
            self.role in (LeaderRole.WAITING, LeaderRole.LEADING)
            and self._lease_s is not None
            and not self._waits_unsure
        ):
            actions.append(Release(self._life))
        self.role, self._ask_at = LeaderRole.ENDED, FOREVER
