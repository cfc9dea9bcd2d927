"""The store master's brain knows who lives and who holds which block. Pure: `step(event, now)` returns actions.

All of it is soft state: a member is alive while it beats, and its blocks are known while it announces them. Every
change is published with a seq that has no gaps.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvmesh.clock import CaughtUp, Tick
from kvmesh.errors import InvalidRequest, KvmeshError, Overloaded, UnknownInstance
from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.block_map import Verdict
from kvmesh.kvcache.tiers import split_name, store_names
from kvmesh.pacing import AnnouncementPacing, MembershipLease, Pacing, Pulse
from kvmesh.rpc.pb.store_pb2 import StoreStatus, StoreUsage
from kvmesh.services.store.block_map import BlockDirectory
from kvmesh.services.store.domain import (
    MAX_TEXT,
    Action,
    Announce,
    Beat,
    Change,
    Event,
    Heard,
    NodeJoined,
    NodeLeft,
    NodeRole,
    Publish,
    RefuseCall,
    RegisteredNode,
    Relay,
    check_announcement,
    check_member,
)
from kvmesh.services.store.mapping import member_out
from kvmesh.services.store.policy.store_policy import PolicyLimits, StorePolicy

MAX_REPLACED = 4096
MAX_POOLS = 16
MAX_ENDS = 64  # members that are ended in one step: about a millisecond, however many watch


@dataclass
class _Life:
    member: RegisteredNode
    last_beat: float
    lease: MembershipLease
    usage: StoreUsage | None = None
    ended: dict[str, int] | None = None  # after its end: by tier's name, the number of the last announcement taken

    def lives(self) -> bool:
        return self.ended is None


class WatcherCatchUp:
    """Has all that a new watcher must be told: `members` as of `seq`, then `announcements`, taken one by one while the
    state goes on. With them and every event after `seq` the watcher knows what the master knows."""

    def __init__(self, seq: int, lives: tuple[_Life, ...], blocks: BlockDirectory) -> None:
        self.seq = seq
        self.members = tuple(life.member for life in lives)
        self._lives = lives
        self._blocks = blocks

    def announcements(self) -> Iterator[Announcement]:
        """Yields snapshots of the members' stores, store by store. Each step costs O(keys of one announcement)."""
        for life in self._lives:
            member = life.member
            for name in store_names(member.store_id):
                if life.ended is None:
                    yield from self._blocks.read(name, member.incarnation, life.lives)
                elif seq := life.ended.get(name):  # an empty snapshot; earlier announcements and the end follow
                    yield Announcement(name, member.incarnation, seq, snapshot=True)


class MasterState:
    """Keeps the members, their leases and their blocks. Times are seconds on any one monotonic clock."""

    def __init__(
        self,
        *,
        lease_s: float,
        stall_s: float,
        max_members: int = 4096,
        max_store_blocks: int = 1 << 22,
        limits: PolicyLimits | None = None,
        wall_ns: int = 0,
        interval_s: float = 0.0,
        heartbeats_per_s: float = 0.0,
        announcements_per_s: float = 0.0,
    ) -> None:
        """A pause between two steps that is longer than `stall_s` counts as the master's own silence, not the members'.
        `interval_s` and `lease_s` hold while there are few members; budgets of 0 make them hold for any number."""
        self._pacing = Pacing(interval_s or lease_s / 4, lease_s, heartbeats_per_s)
        self._announcement_pacing = AnnouncementPacing(announcements_per_s)
        self._stall_s = stall_s
        self._max_members = max_members
        self._lives: dict[str, _Life] = {}
        self._pools: dict[str, _Life] = {}  # the pool nodes, some of which each heartbeat is answered with
        self._replaced: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._stepped_at: float | None = None
        self._nobody_dies_until = float("-inf")
        self._heard_until = float("inf")  # messages that arrived by then are handled; inf: they are as they arrive
        self._overdue: deque[_Life] = deque()  # members silent for longer than their lease, yet to be ended
        self.blocks = BlockDirectory(max_store_blocks=max_store_blocks)
        self.policy = StorePolicy(self.blocks.map, limits, wall_ns=wall_ns)
        self.seq = 0
        self.membership = 0  # how often it has changed so far

    # ── questions ────────────────────────────────────────────────────────────────────────────────────

    @property
    def members(self) -> list[RegisteredNode]:
        """The members alive now, oldest first."""
        return [life.member for life in self._lives.values()]

    def known(self, instance_id: str) -> tuple[RegisteredNode, StoreUsage | None] | None:
        """Returns a live member and what it last reported of its store; None if there is no such member."""
        life = self._lives.get(instance_id)
        return None if life is None else (life.member, life.usage)

    def lives(self, instance_id: str, incarnation: int) -> bool:
        """Whether exactly this incarnation is a member."""
        life = self._lives.get(instance_id)
        return life is not None and life.member.incarnation == incarnation

    @property
    def pulse(self) -> Pulse:
        """The heartbeat interval and lease that members are told when they join and with each heartbeat."""
        return self._pacing.pulse

    @property
    def announcement_pacing(self) -> AnnouncementPacing:
        """How often to announce, which stores are told when they announce."""
        return self._announcement_pacing

    @property
    def overdue(self) -> bool:
        """Whether members are yet to be ended. Then `step` must be called again soon; other calls may be answered
        between."""
        return bool(self._overdue)

    def longest_silence_s(self, now: float) -> float:
        """Returns the longest silence of any live member in seconds; 0 when there is none."""
        return max((now - life.last_beat for life in self._lives.values()), default=0.0)

    def pools(self, asking: str) -> list[tuple[RegisteredNode, int]]:
        """Returns the live pool nodes that reported room and do not drain, with their free bytes: the MAX_POOLS with
        most of it, `asking` itself never among them."""
        found = [
            (life.member, life.usage.free_bytes)
            for life in self._pools.values()
            if life.usage and life.usage.free_bytes
            if life.member.instance_id not in self.policy.drains
        ]
        return heapq.nlargest(MAX_POOLS, (pool for pool in found if pool[0].instance_id != asking), key=lambda p: p[1])

    def statuses(self) -> list[StoreStatus]:
        """Returns what is known of each live member's node store, the oldest first."""
        known, drains = self.blocks.map, self.policy.drains
        return [
            StoreStatus(
                member=member_out(m),
                blocks=known.count(m.store_id),
                seq=known.seq(m.store_id),
                usage=life.usage,
                draining=m.instance_id in drains,
                sole_blocks=drains.sole_blocks(m.instance_id),
            )
            for life in self._lives.values()
            for m in (life.member,)
        ]

    def read(self) -> WatcherCatchUp:
        """Returns the catch-up of a watcher that begins now. Events with a seq above its own are to be kept for the
        watcher from here on."""
        return WatcherCatchUp(self.seq, tuple(self._lives.values()), self.blocks)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────

    def step(self, event: Event, now: float) -> Sequence[Action]:
        """Applies one event at `now` (never decreasing). Deaths that are found meanwhile are among the actions."""
        actions: list[Action] = []
        self._forgive_own_stall(now)
        if isinstance(event, CaughtUp):
            self._heard_until = min(event.until, now)
        self._end_late(now, actions)
        self._end_if_late(event, now, actions)
        match event:
            case NodeJoined(member):
                self._join(member, now, actions)
                if (life := self._lives.get(member.instance_id)) is not None and life.member == member:
                    self.policy.joined(member, event.removed_seq, event.lasting_seq)
            case Beat():
                self._beat(event, now, actions)
            case NodeLeft(instance_id, incarnation):
                life = self._lives.get(instance_id)
                if life is not None and life.member.incarnation == incarnation:
                    self._end(life, Change.LEFT, actions)
            case Announce(announcement):
                self._announce(announcement, actions)
            case Tick():
                # The pace changes here alone, so that a member's answer is what its lease was told in the same step.
                self._pacing.count(len(self._lives))
                self._announcement_pacing.count(self.blocks.stores)
        return actions

    def _forgive_own_stall(self, now: float) -> None:
        """Extends every lease by the time in which the master itself was stopped and no heartbeat could be taken."""
        last, self._stepped_at = self._stepped_at, now
        if last is not None and now - last > self._stall_s:
            for life in self._lives.values():
                life.last_beat += now - last

    def _end_late(self, now: float, actions: list[Action]) -> None:
        """Ends up to MAX_ENDS members that have been silent for longer than the lease; see `overdue`."""
        if not self._overdue and min(now, self._heard_until) > self._nobody_dies_until:
            self._overdue.extend(life for life in self._lives.values() if self._is_late(life, now))
            # Forgiven stalls only put deaths off; for beats and joins see `_begin_lease`.
            on_time = (
                life.last_beat + life.lease.seconds for life in self._lives.values() if not self._is_late(life, now)
            )
            self._nobody_dies_until = min(on_time, default=float("inf"))
        for _ in range(min(MAX_ENDS, len(self._overdue))):
            life = self._overdue.popleft()
            if life.lives() and self._is_late(life, now):
                self._end(life, Change.DIED, actions)
            elif life.lives():  # it has been forgiven meanwhile
                self._begin_lease(life)

    def _is_late(self, life: _Life, now: float) -> bool:
        """Whether the lease is over. A message that has arrived and is yet to be handled may be the member's
        heartbeat."""
        return min(now, self._heard_until) - life.last_beat > life.lease.seconds

    def _begin_lease(self, life: _Life) -> None:
        """Takes a lease that begins into account: it may end before all others."""
        self._nobody_dies_until = min(self._nobody_dies_until, life.last_beat + life.lease.seconds)

    def _end_if_late(self, event: Event, now: float, actions: list[Action]) -> None:
        """Ends the member that sends this event after its lease, however many are to be ended before it."""
        match event:
            case NodeJoined(member):
                name = member.instance_id
            case Beat(instance_id):
                name = instance_id
            case Announce(announcement):
                name = split_name(announcement.store_id)[0]
            case _:
                return
        life = self._lives.get(name)
        if life is not None and self._is_late(life, now):
            self._end(life, Change.DIED, actions)

    def _join(self, member: RegisteredNode, now: float, actions: list[Action]) -> None:
        old = self._lives.get(member.instance_id)
        error: KvmeshError | None = check_member(member) or self._superseded(member)
        if error is None and old is None and len(self._lives) >= self._max_members:
            error = Overloaded(f"the store master knows {self._max_members} members: max_members", retry_after_ms=1000)
        if error is not None:
            actions.append(RefuseCall(error))
            return
        if old is not None and old.member == member:
            old.last_beat = now
            old.lease.tell(self.pulse)
            self._begin_lease(old)
            return
        if old is not None:
            self._end(old, Change.DIED, actions)
            if old.member.incarnation != member.incarnation:
                self._replaced[(old.member.instance_id, old.member.incarnation)] = None
                if len(self._replaced) > MAX_REPLACED:
                    self._replaced.popitem(last=False)
        self._lives[member.instance_id] = life = _Life(member, now, MembershipLease(self.pulse))
        if member.role is NodeRole.POOL:
            self._pools[member.instance_id] = life
        self._begin_lease(life)
        self._publish(Change.JOINED, member, actions)

    def _superseded(self, member: RegisteredNode) -> KvmeshError | None:
        """Refuses an incarnation that a later one has replaced: else two processes under one name would take it from
        each other for ever."""
        if (member.instance_id, member.incarnation) not in self._replaced:
            return None
        return InvalidRequest.of(
            "member.instance.incarnation",
            member.incarnation,
            f"a later incarnation has taken the name {member.instance_id!r}; give each instance a name of its own",
        )

    def _beat(self, beat: Beat, now: float, actions: list[Action]) -> None:
        life = self._living(beat.instance_id, beat.incarnation, "instance", actions)
        if life is not None:
            life.last_beat = now
            life.lease.tell(self._pacing.count_heartbeat(beat.instance_id, by_door=beat.by_door), beat.pace)
            self._begin_lease(life)
            life.usage = beat.usage or life.usage
            self.policy.beat(beat.instance_id, beat.usage, beat.removed_seq)

    def _announce(self, said: Announcement, actions: list[Action]) -> None:
        """Applies an announcement of a live member. It does not count as a heartbeat: liveness has one source."""
        error = check_announcement(said)
        owner = split_name(said.store_id)[0]
        if error is None and self._living(owner, said.incarnation, "announcement.store_id", actions) is None:
            return
        if error is not None:
            actions.append(RefuseCall(error))
            return
        allowed = self.policy.take_announcement(said)
        bounded = self.blocks.bounded(allowed)
        verdict, relays = self.blocks.apply(bounded)
        cut = len(allowed.sealed) - len(bounded.sealed)
        shed = self.policy.took(said, verdict, cut)
        assert verdict is not Verdict.STALE, "a life that has ended leaves nothing in the map"
        for announcement in relays:
            self.seq += 1
            actions.append(Relay(self.seq, announcement))
        wanted = verdict is Verdict.GAP or self.policy.wants_snapshot(said.store_id)
        actions.append(Heard(verdict, wanted, self.blocks.map.seq(said.store_id), cut, shed))

    def _living(self, instance_id: str, incarnation: int, field: str, actions: list[Action]) -> _Life | None:
        life = self._lives.get(instance_id)
        if life is not None and life.member.incarnation == incarnation:
            return life
        shown = instance_id if len(instance_id) <= MAX_TEXT else instance_id[:MAX_TEXT] + "..."
        text = f"{field}={shown!r} incarnation={incarnation}: is no member, join again"
        actions.append(RefuseCall(UnknownInstance(text, field=field)))
        return None

    def _end(self, life: _Life, change: Change, actions: list[Action]) -> None:
        del self._lives[life.member.instance_id]
        self._pools.pop(life.member.instance_id, None)
        self._pacing.forget(life.member.instance_id)
        life.ended = self.blocks.ends(life.member.store_id)
        self.blocks.drop(life.member.store_id)
        self.policy.ended(life.member.instance_id, self._stepped_at or 0.0)
        self._publish(change, life.member, actions)

    def _publish(self, change: Change, member: RegisteredNode, actions: list[Action]) -> None:
        self.seq += 1
        self.membership += 1
        actions.append(Publish(self.seq, change, member))
