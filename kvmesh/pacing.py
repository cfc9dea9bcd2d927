"""How often members beat and stores announce: the more of them there are, the more rarely each does, so that all
together stay within a budget of messages a second. Pure: how many there are is an argument.

What is told, and by which lease a member is judged, are decided here alone; conductor and store master both go by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BY_DOOR = 0.25  # what a heartbeat over the fast path counts: a ninth of the core, and its samples what they take
STEP = 1.2  # from one interval to the next longer one
SLACK = 0.9  # they must fit into so much of the budget for the next shorter one: who comes and goes changes nothing
IDLE_S = 1.0  # a store with nothing to tell says so this often: by that the master notices a lost tail
IDLE_SHARE = 0.25  # of the budget of announcements, for those with nothing in them
BUSY_S = 0.05  # between two announcements of a busy store, by default


class Stretch:
    """How many `times` its base an interval is, while so many senders share so many messages a second. Grows at once
    and in steps; shrinks when it may by a margin."""

    def __init__(self, base_s: float, per_s: float) -> None:
        """`base_s`: what it is where there are few. `per_s`: of all together at most; 0: it is never stretched."""
        self._alone = base_s * per_s if per_s > 0 else math.inf
        self._level = 0
        self._senders = 0.0  # as of the last count

    @property
    def times(self) -> float:
        """At least 1."""
        return float(STEP**self._level)

    def count(self, senders: float) -> bool:
        """There are so many now, by what each counts; whether that has changed the interval."""
        if senders == self._senders:
            return False
        self._senders = senders
        least, most = _level(senders / self._alone), _level(senders / (self._alone * SLACK))
        before, self._level = self._level, min(max(self._level, least), most)
        return self._level != before


def _level(wanted: float) -> int:
    """Steps until an interval is so many times its base."""
    return 0 if wanted <= 1 else math.ceil(math.log(wanted, STEP) - 1e-9)


def stretched_s(base_s: float, per_s: float, senders: float) -> float:
    """The interval of a mesh that has grown to so many senders."""
    stretch = Stretch(base_s, per_s)
    stretch.count(senders)
    return base_s * stretch.times


@dataclass(frozen=True, slots=True)
class Pulse:
    """What members are told. `number`: a higher one for each change, of one life of the teller. A member silent for
    longer than `lease_s` counts as dead."""

    number: int
    interval_s: float
    lease_s: float

    @property
    def interval_ms(self) -> int:
        """As it is told."""
        return max(1, round(self.interval_s * 1000))

    @property
    def lease_ms(self) -> int:
        """As it is told."""
        return max(self.interval_ms, round(self.lease_s * 1000))


class Pacing:
    """The pulse of this moment: the configured one while all beats fit into the budget, else both of its times grow
    alike, so that as many beats may be lost as ever."""

    def __init__(self, interval_s: float, lease_s: float, per_s: float) -> None:
        """`per_s`: heartbeats over gRPC of all members together (over the fast path: BY_DOOR each). 0: as many as there
        are."""
        self._base = interval_s, lease_s
        self._stretch = Stretch(interval_s, per_s)
        # Whose last heartbeat came over gRPC, and whose last two did: while one looks for the fast path its first does.
        self._once: set[str] = set()
        self._over_grpc: set[str] = set()
        self.paced = per_s > 0
        self.pulse = Pulse(1, interval_s, lease_s)

    @property
    def longer_s(self) -> float:
        """By how much the lease is longer than the configured one."""
        return self.pulse.lease_s - self._base[1]

    def count_heartbeat(self, member: str, *, by_door: bool) -> Pulse:
        """It has beaten that way; what it is answered."""
        if by_door:
            self.forget(member)
        elif member in self._once:
            self._over_grpc.add(member)
        else:
            self._once.add(member)
        return self.pulse

    def forget(self, member: str) -> None:
        """It has gone."""
        self._once.discard(member)
        self._over_grpc.discard(member)

    def count(self, members: int) -> None:
        """So many are alive now."""
        over_grpc = min(members, len(self._over_grpc))
        if self._stretch.count(over_grpc + BY_DOOR * (members - over_grpc)):
            interval_s, lease_s = (base * self._stretch.times for base in self._base)
            self.pulse = Pulse(self.pulse.number + 1, interval_s, lease_s)


class MembershipLease:
    """How long one member may be silent: as long as the longest pulse that it may go by allows. It goes by one that it
    was told, and which of them only its next beat says: until then no shorter lease counts."""

    __slots__ = ("_told", "seconds")

    def __init__(self, pulse: Pulse) -> None:
        """Somebody new, who is told that."""
        self._told, self.seconds = pulse, pulse.lease_s

    def tell(self, pulse: Pulse, heard: int = 0) -> None:
        """It has spoken and is answered with `pulse`. `heard`: the number of the pulse it says it goes by; 0: it does
        not say, or it enters once more."""
        if heard == self._told.number:
            self.seconds = self._told.lease_s
        self._told, self.seconds = pulse, max(self.seconds, pulse.lease_s)


class AnnouncementPacing:
    """How often stores announce, as they are told."""

    def __init__(self, per_s: float) -> None:
        """`per_s`: announcements of all stores together; 0: as many as come."""
        self._idle, self._busy = Stretch(IDLE_S, per_s * IDLE_SHARE), Stretch(BUSY_S, per_s)

    def count(self, stores: int) -> None:
        """So many announce."""
        self._idle.count(stores)
        self._busy.count(stores)

    @property
    def idle_s(self) -> float:
        """Between two of a store with nothing to tell."""
        return IDLE_S * self._idle.times

    @property
    def gap_s(self) -> float:
        """Between two of one store, at least; 0: its own interval counts."""
        return BUSY_S * self._busy.times if self._busy.times > 1 else 0.0

    @property
    def idle_ms(self) -> int:
        """As it is told."""
        return round(self.idle_s * 1000)

    @property
    def gap_ms(self) -> int:
        """As it is told."""
        return round(self.gap_s * 1000)
