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
    """By what factor (`times`) an interval is longer than its base so that all senders together stay within a budget of
    messages a second. The factor goes in steps; it grows at once, and shrinks only when a margin is kept."""

    def __init__(self, base_s: float, per_s: float) -> None:
        """`base_s` is the interval of a small mesh in seconds, `per_s` the budget of all senders together in messages a
        second; 0 means no budget, and no stretching."""
        self._alone = base_s * per_s if per_s > 0 else math.inf
        self._level = 0
        self._senders = 0.0  # as of the last count

    @property
    def times(self) -> float:
        return float(STEP**self._level)

    def count(self, senders: float) -> bool:
        """Sets the number of senders (a sender may count as a fraction). Returns whether this changed the factor."""
        if senders == self._senders:
            return False
        self._senders = senders
        least, most = _level(senders / self._alone), _level(senders / (self._alone * SLACK))
        before, self._level = self._level, min(max(self._level, least), most)
        return self._level != before


def _level(wanted: float) -> int:
    """Returns the least n with STEP**n >= `wanted`."""
    return 0 if wanted <= 1 else math.ceil(math.log(wanted, STEP) - 1e-9)


def stretched_s(base_s: float, per_s: float, senders: float) -> float:
    """Returns the interval, in seconds, of a mesh that grew to `senders` senders from none."""
    stretch = Stretch(base_s, per_s)
    stretch.count(senders)
    return base_s * stretch.times


@dataclass(frozen=True, slots=True)
class Pulse:
    """The heartbeat settings that members are told. `number` grows with each change during one life of the receiver. A
    member that is silent for longer than `lease_s` counts as dead."""

    number: int
    interval_s: float
    lease_s: float

    @property
    def interval_ms(self) -> int:
        return max(1, round(self.interval_s * 1000))

    @property
    def lease_ms(self) -> int:
        return max(self.interval_ms, round(self.lease_s * 1000))


class Pacing:
    """Sets how often members send heartbeats. The configured `Pulse` holds while all heartbeats fit into the budget;
    beyond that, interval and lease grow by the same factor, so that as many heartbeats in a row may be lost as before.
    """

    def __init__(self, interval_s: float, lease_s: float, per_s: float) -> None:
        """`per_s` is the budget for all members together, in gRPC heartbeats a second; one over the fast path counts as
        BY_DOOR of one. 0 means no budget."""
        self._base = interval_s, lease_s
        self._stretch = Stretch(interval_s, per_s)
        # Whose last heartbeat came over gRPC, and whose last two did: while one looks for the fast path its first does.
        self._once: set[str] = set()
        self._over_grpc: set[str] = set()
        self.paced = per_s > 0
        self.pulse = Pulse(1, interval_s, lease_s)

    @property
    def longer_s(self) -> float:
        """The seconds by which the lease now exceeds the configured one."""
        return self.pulse.lease_s - self._base[1]

    def count_heartbeat(self, member: str, *, by_door: bool) -> Pulse:
        """Notes by which path the heartbeat of `member` came, and returns the pulse to answer it with."""
        if by_door:
            self.forget(member)
        elif member in self._once:
            self._over_grpc.add(member)
        else:
            self._once.add(member)
        return self.pulse

    def forget(self, member: str) -> None:
        """Removes a member that has left."""
        self._once.discard(member)
        self._over_grpc.discard(member)

    def count(self, members: int) -> None:
        """Sets the number of live members, and makes a new pulse when the interval changes by that."""
        over_grpc = min(members, len(self._over_grpc))
        if self._stretch.count(over_grpc + BY_DOOR * (members - over_grpc)):
            interval_s, lease_s = (base * self._stretch.times for base in self._base)
            self.pulse = Pulse(self.pulse.number + 1, interval_s, lease_s)


class MembershipLease:
    """How long one member may be silent. The member goes by one of the pulses that it was told, and only its next
    heartbeat says which; until then the longest of their leases counts."""

    __slots__ = ("_told", "seconds")

    def __init__(self, pulse: Pulse) -> None:
        """`pulse` is what a new member is told."""
        self._told, self.seconds = pulse, pulse.lease_s

    def tell(self, pulse: Pulse, heard: int = 0) -> None:
        """Notes a heartbeat that is answered with `pulse`. `heard` is the number of the pulse that the member says it
        goes by; 0 when it names none or has just registered again."""
        if heard == self._told.number:
            self.seconds = self._told.lease_s
        self._told, self.seconds = pulse, max(self.seconds, pulse.lease_s)


class AnnouncementPacing:
    """Sets how often nodes announce their blocks."""

    def __init__(self, per_s: float) -> None:
        """`per_s` is the budget in announcements a second of all nodes together; 0 means none."""
        self._idle, self._busy = Stretch(IDLE_S, per_s * IDLE_SHARE), Stretch(BUSY_S, per_s)

    def count(self, stores: int) -> None:
        """Sets the number of nodes that announce."""
        self._idle.count(stores)
        self._busy.count(stores)

    @property
    def idle_s(self) -> float:
        """The interval, in seconds, at which a node without changes announces."""
        return IDLE_S * self._idle.times

    @property
    def gap_s(self) -> float:
        """The least time in seconds between two announcements of a node; 0 leaves it to the node's own interval."""
        return BUSY_S * self._busy.times if self._busy.times > 1 else 0.0

    @property
    def idle_ms(self) -> int:
        return round(self.idle_s * 1000)

    @property
    def gap_ms(self) -> int:
        return round(self.gap_s * 1000)
