"""The store master's brain: who lives. Pure: `step(event, now) -> actions`.

Membership is soft state: a member is alive while it beats. Every change is published with a seq that has no gaps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvmesh.rpc.errors import InvalidRequest, KvmeshError, UnknownInstance

MAX_REPLACED = 4096


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True)
class Member:
    """One life of one instance, as it introduced itself."""

    instance_id: str
    address: str
    incarnation: int
    role: Role
    node_id: str
    store_id: str


class Change(Enum):
    JOINED = "joined"
    LEFT = "left"  # said goodbye
    DIED = "died"  # lease ran out, or a new incarnation took its name


# ── events ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Join:
    member: Member


@dataclass(frozen=True)
class Beat:
    instance_id: str
    incarnation: int


@dataclass(frozen=True)
class Leave:
    instance_id: str
    incarnation: int


@dataclass(frozen=True)
class Tick:
    pass


Event = Join | Beat | Leave | Tick


# ── actions ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Publish:
    """Tell every watcher. `seq` counts from 1 without gaps."""

    seq: int
    change: Change
    member: Member


@dataclass(frozen=True)
class Refuse:
    """The answer to the event is this error."""

    error: KvmeshError


Action = Publish | Refuse


@dataclass
class _Life:
    member: Member
    last_beat: float


class MasterState:
    """Members and their leases. Times are seconds on any one monotonic clock."""

    def __init__(self, *, lease_s: float, stall_s: float) -> None:
        """`stall_s`: a pause between two steps longer than this was the master's own silence, not the members'."""
        self._lease_s = lease_s
        self._stall_s = stall_s
        self._lives: dict[str, _Life] = {}
        self._replaced: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._stepped_at: float | None = None
        self.seq = 0

    @property
    def members(self) -> list[Member]:
        """Those alive now, oldest first."""
        return [life.member for life in self._lives.values()]

    def longest_silence_s(self, now: float) -> float:
        """Of any live member; 0 when there is none."""
        return max((now - life.last_beat for life in self._lives.values()), default=0.0)

    def step(self, event: Event, now: float) -> Sequence[Action]:
        """Apply one event at `now` (never decreasing). Deaths found on the way are among the actions."""
        actions: list[Action] = []
        self._forgive_own_stall(now)
        self._bury(now, actions)
        match event:
            case Join(member):
                self._join(member, now, actions)
            case Beat(instance_id, incarnation):
                self._beat(instance_id, incarnation, now, actions)
            case Leave(instance_id, incarnation):
                life = self._lives.get(instance_id)
                if life is not None and life.member.incarnation == incarnation:
                    self._end(life, Change.LEFT, actions)
            case Tick():
                pass
        return actions

    def _forgive_own_stall(self, now: float) -> None:
        """While the master was stopped nobody could be heard: that time counts against no lease."""
        last, self._stepped_at = self._stepped_at, now
        if last is not None and now - last > self._stall_s:
            for life in self._lives.values():
                life.last_beat += now - last

    def _bury(self, now: float, actions: list[Action]) -> None:
        """Ends every life silent for longer than the lease, the one that beats too late included."""
        for life in [life for life in self._lives.values() if now - life.last_beat > self._lease_s]:
            self._end(life, Change.DIED, actions)

    def _join(self, member: Member, now: float, actions: list[Action]) -> None:
        error = _invalid(member) or self._superseded(member)
        if error is not None:
            actions.append(Refuse(error))
            return
        old = self._lives.get(member.instance_id)
        if old is not None and old.member == member:
            old.last_beat = now
            return
        if old is not None:
            self._end(old, Change.DIED, actions)
            if old.member.incarnation != member.incarnation:
                self._replaced[(old.member.instance_id, old.member.incarnation)] = None
                if len(self._replaced) > MAX_REPLACED:
                    self._replaced.popitem(last=False)
        self._lives[member.instance_id] = _Life(member, now)
        self._publish(Change.JOINED, member, actions)

    def _superseded(self, member: Member) -> KvmeshError | None:
        """Two processes under one name must not take it from each other for ever: the later one keeps it."""
        if (member.instance_id, member.incarnation) not in self._replaced:
            return None
        return InvalidRequest.of(
            "member.instance.incarnation",
            member.incarnation,
            f"a later incarnation has taken the name {member.instance_id!r}; give each instance a name of its own",
        )

    def _beat(self, instance_id: str, incarnation: int, now: float, actions: list[Action]) -> None:
        life = self._lives.get(instance_id)
        if life is None or life.member.incarnation != incarnation:
            error = UnknownInstance(f"instance {instance_id!r} incarnation {incarnation} is no member: join again")
            actions.append(Refuse(error))
        else:
            life.last_beat = now

    def _end(self, life: _Life, change: Change, actions: list[Action]) -> None:
        del self._lives[life.member.instance_id]
        self._publish(change, life.member, actions)

    def _publish(self, change: Change, member: Member, actions: list[Action]) -> None:
        self.seq += 1
        actions.append(Publish(self.seq, change, member))


def _invalid(member: Member) -> InvalidRequest | None:
    if not member.instance_id:
        return InvalidRequest.of("member.instance.instance_id", member.instance_id, "must not be empty")
    if not member.address:
        return InvalidRequest.of("member.instance.address", member.address, "must be host:port")
    if member.incarnation == 0:
        return InvalidRequest.of("member.instance.incarnation", 0, "must be new at every process start, never 0")
    return None
