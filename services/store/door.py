"""What callers meet: every RPC goes to the reign of this moment, and only its answers leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from kvmesh.leader.leadership import Leadership
from kvmesh.rpc.errors import InvalidRequest, NotLeader, Unavailable
from kvmesh.rpc.masters import MAX_TERM
from kvmesh.rpc.pb import store_pb2 as pb
from services.store.reign import Reign


class Door:
    """A servicer of StoreMaster with all its RPCs, to be handed to gRPC.

    Before a call reaches a reign, and again before its answer leaves, this master must lead. A term that a node reports
    is heard first. Answers bear the term."""

    def __init__(self, leadership: Leadership, reign: Callable[[], Reign | None], address: Callable[[], str]) -> None:
        """`reign`: None while this master does not lead, or has only just begun to."""
        self._leadership = leadership
        self._reign = reign
        self._address = address
        for method in pb.DESCRIPTOR.services_by_name["StoreMaster"].methods:
            if method.name != "GetStatus":
                setattr(self, method.name, self._guarded(method.name))

    def _guarded(self, name: str) -> Callable[[Any, Any], Any]:
        async def call(request: Message, context: Any) -> Any:
            self._listen(request)
            reign = self._leading()
            answer = await getattr(reign.servicer, name)(request, context)
            if self._leading() is not reign:
                raise self._not_leader()
            if isinstance(answer, pb.FindResponse):
                answer.rebuilding = reign.young() or bool(reign.state.policy.known.unheard)
            if answer is not None and "term" in answer.DESCRIPTOR.fields_by_name and not answer.term:
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
        return answer

    def _listen(self, request: Message) -> None:
        """A term that the caller has heard of may be the end of ours."""
        if not isinstance(request, pb.JoinRequest | pb.BeatRequest | pb.AnnounceRequest) or not request.term:
            return
        if request.term > MAX_TERM:
            raise InvalidRequest.of("term", request.term, f"no master has had one above {MAX_TERM}")
        stranger = False
        if isinstance(request, pb.JoinRequest):
            reign, ref = self._reign(), request.member.instance
            stranger = reign is None or not reign.state.lives(ref.instance_id, ref.incarnation)
        self._leadership.hear(request.term, stranger=stranger)

    def _leading(self) -> Reign:
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
