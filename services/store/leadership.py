"""While the store master leads it has one session for each continuous time as leader, and a guard before it.

A session has its map, its members and its streams, all of which are void once it has ended. The guard lets a call reach
the session of this moment, and an answer leave, only while this master leads.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvmesh.errors import InvalidRequest, NotLeader, Unavailable
from kvmesh.leader.leadership import Leadership
from kvmesh.rpc.pb import store_pb2 as pb
from kvmesh.rpc.terms import MAX_TERM
from kvmesh.services.store.config import StoreConfig
from kvmesh.services.store.domain import NodeRole
from kvmesh.services.store.durable import Durable, Kept
from kvmesh.services.store.orders import StoreOrderQueue
from kvmesh.services.store.policy.store_policy import PolicyLimits
from kvmesh.services.store.servicer import StoreMasterServicer
from kvmesh.services.store.state import MasterState
from kvmesh.services.store.watchers import Watchers
from kvmesh.telemetry import names
from kvmesh.telemetry.present_series import PresentSeries

log = logging.getLogger(__name__)


class LeaderSession:
    """Is one continuous time as leader. `may_lead` is asked in the turn of the loop in which something is answered,
    published or ordered; `kept` is what earlier leaders kept (see durable.py)."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        term: int,
        kept: Kept,
        durable: Durable,
        may_lead: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._may_lead = may_lead
        self._ended = False
        self._began_at = float("inf")
        self.incarnation = secrets.randbits(63) | 1
        self.state = MasterState(
            lease_s=config.lease_ms / 1000,
            stall_s=config.lease_ms / 2000,
            max_members=config.max_members,
            max_store_blocks=config.max_store_blocks,
            limits=PolicyLimits(
                max_map_bytes=config.max_map_mb << 20,
                hot_lookups=config.hot_lookups,
                max_names=config.max_names,
                tombstone_retention_s=config.tombstone_s,
            ),
            wall_ns=time.time_ns(),
            interval_s=config.heartbeat_interval_ms / 1000,
            heartbeats_per_s=config.heartbeats_per_s,
            announcements_per_s=config.announcements_per_s,
        )
        for bad in self.state.policy.lead(term, kept, clock()):
            log.error("what an earlier leader kept cannot be read: %s", bad)
        self._drained = PresentSeries(names.STORE_DRAINED)
        self.watchers = Watchers(
            incarnation=self.incarnation,
            interval_s=config.heartbeat_interval_ms / 1000,
            max_events=config.watch_queue,
            max_bytes=config.watch_queue_bytes,
            max_watchers=config.max_watchers,
            leads=self.leads,
            term=lambda: self.term,
        )
        self.servicer = StoreMasterServicer(
            self.state,
            self.watchers,
            incarnation=self.incarnation,
            clock=clock,
            leads=self.leads,
            durable=durable,
            orders=StoreOrderQueue(self.leads),
        )

    @property
    def term(self) -> int:
        """The term of what the session answers and orders."""
        return self.state.policy.term

    def leads(self) -> bool:
        """Whether this session goes on, at this moment."""
        return not self._ended and self._may_lead()

    def begin(self) -> None:
        """Opens the session to members. It is called on the event loop; making a session may be left to a thread."""
        self._began_at = self._clock()

    def young(self) -> bool:
        """Whether members of the session before may not have found this one yet. Those that live find it within a
        lease, and the lease depends on the number of members: while some are still to come, those who have come make it
        longer than they have taken."""
        return self._clock() < self._began_at + self.state.pulse.lease_s

    def rise(self, term: int) -> None:
        """Goes on under a higher term."""
        self.state.policy.term = term

    def end(self) -> None:
        """Ends the session: from now on nothing is answered, published or ordered. `close` is to follow."""
        self._ended = True
        self.watchers.close()

    def tick(self) -> None:
        """Lets leases run out and sets gauges."""
        self.servicer.tick()
        roles = Counter(member.role for member in self.state.members)
        for role in NodeRole:
            names.STORE_MEMBERS.labels(role=role.value).set(roles[role])
        names.STORE_HEARTBEAT_AGE.set(self.state.longest_silence_s(self._clock()))
        names.STORE_HEARTBEAT_INTERVAL.set(self.state.pulse.interval_s)
        names.STORE_ANNOUNCE_IDLE.set(self.state.announcement_pacing.idle_s)
        names.STORE_ANNOUNCE_GAP.set(self.state.announcement_pacing.gap_s)
        names.STORE_WATCHERS.set(len(self.watchers))
        self._drained.show({(name,): done for name, done in self.state.policy.drains.drained.items()})
        known = self.state.blocks.map
        names.STORE_BLOCKS.set(len(known))
        names.STORE_REPLICAS.set(known.replicas)
        names.STORE_UNSWEPT.set(known.unswept)
        names.STORE_MAP_BYTES.set(known.memory_bytes())

    async def close(self) -> None:
        """Ends the session's streams and tasks."""
        self.end()
        self._drained.show({})
        await self.servicer.close()


# Requests in which the caller reports the highest term that it knows.
_WITH_TERM = {one.DESCRIPTOR.full_name for one in (pb.JoinRequest, pb.BeatRequest, pb.AnnounceRequest)}


class LeaderGuard:
    """Is a servicer of StoreMaster with all its RPCs, to be handed to gRPC.

    Before a call reaches a session, and again before its answer leaves, this master must lead. A term that a node
    reports is taken into account once the call has shown that the node is a member. Answers carry the term.
    """

    def __init__(
        self, leadership: Leadership, session: Callable[[], LeaderSession | None], address: Callable[[], str]
    ) -> None:
        """`session()` is None while this master does not lead, or has only just begun to."""
        self._leadership = leadership
        self._session = session
        self._address = address
        for method in pb.DESCRIPTOR.services_by_name["StoreMaster"].methods:
            if method.name != "GetStatus":
                told = method.input_type.full_name in _WITH_TERM
                has_term = not method.server_streaming and "term" in method.output_type.fields_by_name
                setattr(self, method.name, self._guarded(method.name, told, has_term))

    def _guarded(self, name: str, told: bool, has_term: bool) -> Callable[[Any, Any], Any]:
        """Returns the guarded method `name`. `told` says that its request has a term; `has_term` that its answer has
        one."""
        finds = name == "Find"

        async def call(request: Any, context: Any) -> Any:
            if told and request.term > MAX_TERM:
                raise InvalidRequest.of("term", request.term, f"no master has had one above {MAX_TERM}")
            session = self._leading()
            stranger = told and _is_stranger(session, request)
            answer = await getattr(session.servicer, name)(request, context)
            if told:
                self._listen(request, stranger)
            if self._leading() is not session:
                raise self._not_leader()
            if finds:
                answer.rebuilding = session.young() or bool(session.state.policy.known.unheard)
            if has_term and (told or not answer.term):
                answer.term = session.term
            return answer

        return call

    async def GetStatus(self, request: pb.GetStoreStatusRequest, context: Any) -> pb.GetStoreStatusResponse:  # noqa: N802
        """Answers at every master; one that does not lead knows no blocks."""
        session = self._session() if self._leadership.leads() else None
        if session is None:
            return pb.GetStoreStatusResponse(term=self._leadership.term, leader=self._leadership.leader)
        answer = await session.servicer.GetStatus(request, context)
        answer.term, answer.leader = session.term, self._address()
        answer.leading = self._leadership.leads() and self._session() is session
        answer.rebuilding.extend(session.state.policy.known.unheard)
        answer.young = session.young()
        return answer

    def _listen(self, request: Any, stranger: bool) -> None:
        """Takes a term that a member reports. It is called only when the caller has just been answered as a member."""
        if request.term and not self._leadership.hear(request.term, stranger=stranger, who=_speaker(request)):
            names.STORE_TERMS_REFUSED.inc()

    def _leading(self) -> LeaderSession:
        if not self._leadership.leads():
            raise self._not_leader()
        session = self._session()
        if session is None:
            raise Unavailable("this store master has only just begun to lead: ask again", retry_after_ms=50)
        return session

    def _not_leader(self) -> NotLeader:
        leader = self._leadership.leader
        text = f"this store master does not lead; {leader} does" if leader else "this store master does not lead"
        return NotLeader(text, leader=leader)


def _is_stranger(session: LeaderSession, request: Any) -> bool:
    """Whether this call will make the caller a member that is none yet."""
    if not isinstance(request, pb.JoinRequest):
        return False
    ref = request.member.instance
    return not session.state.lives(ref.instance_id, ref.incarnation)


def _speaker(request: Any) -> str:
    if isinstance(request, pb.JoinRequest):
        return str(request.member.instance.instance_id)
    if isinstance(request, pb.BeatRequest):
        return str(request.instance.instance_id)
    return str(request.announcement.store_id)
