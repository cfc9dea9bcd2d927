"""What callers meet: every RPC goes to the reign of this moment, and only its answers leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvmesh.errors import InvalidRequest, NotLeader, Unavailable
from kvmesh.leader.leadership import Leadership
from kvmesh.rpc.pb import store_pb2 as pb
from kvmesh.rpc.terms import MAX_TERM
from kvmesh.telemetry import names
from services.store.leader_session import LeaderSession

_TELLING = (pb.JoinRequest, pb.BeatRequest, pb.AnnounceRequest)  # they say which term the caller has heard of


class LeaderGuard:
    """A servicer of StoreMaster with all its RPCs, to be handed to gRPC.

    Before a call reaches a reign, and again before its answer leaves, this master must lead. A term that a node reports
    is heard when the call has shown that it is a member. Answers bear the term."""

    def __init__(
        self, leadership: Leadership, reign: Callable[[], LeaderSession | None], address: Callable[[], str]
    ) -> None:
        """`reign`: None while this master does not lead, or has only just begun to."""
        self._leadership = leadership
        self._reign = reign
        self._address = address
        for method in pb.DESCRIPTOR.services_by_name["StoreMaster"].methods:
            if method.name != "GetStatus":
                setattr(self, method.name, self._guarded(method.name))

    def _guarded(self, name: str) -> Callable[[Any, Any], Any]:
        async def call(request: Any, context: Any) -> Any:
            told = isinstance(request, _TELLING)
            if told and request.term > MAX_TERM:
                raise InvalidRequest.of("term", request.term, f"no master has had one above {MAX_TERM}")
            reign = self._leading()
            stranger = told and _is_stranger(reign, request)
            answer = await getattr(reign.servicer, name)(request, context)
            if told:
                self._listen(request, stranger)
            if self._leading() is not reign:
                raise self._not_leader()
            if isinstance(answer, pb.FindResponse):
                answer.rebuilding = reign.young() or bool(reign.state.policy.known.unheard)
            if answer is not None and "term" in answer.DESCRIPTOR.fields_by_name and (told or not answer.term):
                answer.term = reign.term
            return answer

        return call

    async def GetStatus(self, request: pb.GetStoreStatusRequest, context: Any) -> pb.GetStoreStatusResponse:  # noqa: N802
        """Of every master; one that does not lead knows no blocks."""
        reign = self._reign() if self._leadership.leads() else None
        if reign is None:
            return pb.GetStoreStatusResponse(term=self._leadership.term, leader=self._leadership.leader)
        answer = await reign.servicer.GetStatus(request, context)
        answer.term, answer.leader = reign.term, self._address()
        answer.leading = self._leadership.leads() and self._reign() is reign
        answer.rebuilding.extend(reign.state.policy.known.unheard)
        answer.young = reign.young()
        return answer

    def _listen(self, request: Any, stranger: bool) -> None:
        """A term that a member has heard of. Only who has just been answered as a member is listened to."""
        if request.term and not self._leadership.hear(request.term, stranger=stranger, who=_speaker(request)):
            names.STORE_TERMS_REFUSED.inc()

    def _leading(self) -> LeaderSession:
        if not self._leadership.leads():
            raise self._not_leader()
        reign = self._reign()
        if reign is None:
            raise Unavailable("this store master has only just begun to lead: ask again", retry_after_ms=50)
        return reign

    def _not_leader(self) -> NotLeader:
        leader = self._leadership.leader
        text = f"this store master does not lead; {leader} does" if leader else "this store master does not lead"
        return NotLeader(text, leader=leader)


def _is_stranger(reign: LeaderSession, request: Any) -> bool:
    """Whether this call will make a member of one that is none yet."""
    if not isinstance(request, pb.JoinRequest):
        return False
    ref = request.member.instance
    return not reign.state.lives(ref.instance_id, ref.incarnation)


def _speaker(request: Any) -> str:
    if isinstance(request, pb.JoinRequest):
        return str(request.member.instance.instance_id)
    if isinstance(request, pb.BeatRequest):
        return str(request.instance.instance_id)
    return str(request.announcement.store_id)
