"""The Decode service of an external instance: Sessions of gateways, as any instance that decodes has them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.external.engine_protocol import TokenScore
from kvmesh.rpc import protocol
from kvmesh.rpc.bidi import ServerStream
from kvmesh.rpc.pb import common_pb2, decode_pb2, decode_pb2_grpc
from kvmesh.rpc.status import to_detail

log = logging.getLogger(__name__)

SERVICE = "kvmesh.v1.Decode"
WRITE_TIMEOUT_S = 30.0
EMPTY_SCORE = common_pb2.TokenLogprobs()


class AnswerSlot:
    """One request's place in a Session: what its answer says goes to the gateway, and no faster than that allows."""

    def __init__(self, session: GatewaySession, slot: int, credit_tokens: int) -> None:
        self._session = session
        self._slot = slot
        self._credit = credit_tokens
        self._granted = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def may_send(self) -> bool:
        """Whether the gateway takes tokens now."""
        return self._credit > 0

    async def allowed(self) -> None:
        """Returns once the gateway takes further tokens. The caller sets a deadline."""
        while not self.may_send:
            self._granted.clear()
            await self._granted.wait()

    def grant(self, tokens: int) -> None:
        """The gateway takes so many tokens more."""
        self._credit += tokens
        self._granted.set()

    def prefilled(self, cached_tokens: int, timings: common_pb2.StageTimings) -> None:
        """Tells that the prompt was computed."""
        self._session.news.prefilled.add(slot=self._slot, cached_tokens=cached_tokens, timings=timings)
        self._session.wake.set()

    def tokens(self, first: int, ids: Sequence[int], scores: Sequence[TokenScore]) -> None:
        """Tells tokens of the answer, the first of which has that index."""
        self._credit -= len(ids)
        told = self._session.news.tokens
        before = len(told.slot)
        told.slot.extend([self._slot] * len(ids))
        told.token_id.extend(ids)
        told.token_index.extend(range(first, first + len(ids)))
        if scores or told.logprobs:
            told.logprobs.extend([EMPTY_SCORE] * (before - len(told.logprobs)))
            told.logprobs.extend(map(_score, scores) if scores else [EMPTY_SCORE] * len(ids))
        self._session.wake.set()

    def finished(self, finished: decode_pb2.Finished) -> None:
        """Tells the end of the answer."""
        finished.slot = self._slot
        self._session.news.finished.append(finished)
        self._session.forget(self._slot)

    def failed(self, error: KvmeshError) -> None:
        """Tells why there is no further token."""
        self._session.news.failed.add(slot=self._slot, error=to_detail(error))
        self._session.forget(self._slot)


def _score(score: TokenScore) -> common_pb2.TokenLogprobs:
    told = common_pb2.TokenLogprobs(logprob=score.logprob)
    for token_id, logprob in score.top:
        told.top.add(token_id=token_id, logprob=logprob)
    return told


class GatewaySession:
    """One gateway's Session: what is to be written next, and its requests by slot."""

    def __init__(self) -> None:
        self.news = decode_pb2.SessionResponse()
        self.wake = asyncio.Event()
        self.slots: dict[int, AnswerSlot] = {}

    def take(self) -> Sequence[decode_pb2.SessionResponse]:
        """Returns what has gathered."""
        if not self.news.ByteSize():
            return ()
        news, self.news = self.news, decode_pb2.SessionResponse()
        return (news,)

    def forget(self, slot: int) -> None:
        """The request has ended."""
        self.slots.pop(slot, None)
        self.wake.set()


class EngineAnswers(Protocol):
    """The part of an external instance that is needed here."""

    @property
    def ref(self) -> common_pb2.InstanceRef: ...

    def start(self, slot: AnswerSlot, request: decode_pb2.StartRequest) -> asyncio.Task[None]:
        """Begins an answer in a task, which ends the slot in any case but cancellation."""
        ...

    def pools(self) -> common_pb2.PoolCounters: ...


class EngineServicer(decode_pb2_grpc.DecodeServicer):
    """Serves all Sessions of one external instance. A Session that ends, however it ends, cancels its requests."""

    def __init__(self, answers: EngineAnswers) -> None:
        self._answers = answers
        self._sessions: set[GatewaySession] = set()
        self._closing = False

    @property
    def sessions(self) -> int:
        """Sessions that are open."""
        return len(self._sessions)

    async def Session(  # type: ignore[override]  # noqa: N802  # a coroutine that writes, no generator
        self, request_iterator: AsyncIterator[decode_pb2.SessionRequest], context: Any
    ) -> None:
        """Serves one gateway until it or this instance ends the stream. Raises ProtocolMismatch or InvalidRequest if
        the stream does not begin with a valid hello, and Unavailable when the instance shuts down."""
        if self._closing:
            raise Unavailable("external instance is shutting down")
        stream = ServerStream[decode_pb2.SessionRequest, decode_pb2.SessionResponse](
            request_iterator, context, write_timeout_s=WRITE_TIMEOUT_S
        )
        hello: decode_pb2.SessionHello = await stream.hello()
        stream.who = f"gateway {hello.gateway_id!r}"
        protocol.check(hello.protocol_version, stream.who)
        reply = decode_pb2.SessionHelloReply(protocol_version=protocol.PROTOCOL_VERSION, instance=self._answers.ref)
        await stream.write(decode_pb2.SessionResponse(hello=reply))
        session = GatewaySession()
        self._sessions.add(session)
        try:
            await stream.serve(
                lambda request: self._take(session, request),
                session.take,
                session.wake,
                lambda: self._closing and not session.slots,
            )
        finally:
            self._sessions.discard(session)
            for slot in session.slots.values():
                if slot.task is not None:
                    slot.task.cancel()

    def _take(self, session: GatewaySession, request: decode_pb2.SessionRequest) -> None:
        match request.WhichOneof("kind"):
            case "start":
                start = request.start
                if start.slot in session.slots:
                    raise Unavailable(f"slot={start.slot}: the gateway has used it already")
                slot = session.slots[start.slot] = AnswerSlot(session, start.slot, start.credit_tokens)
                slot.task = self._answers.start(slot, start)
            case "credit":
                if (known := session.slots.get(request.credit.slot)) is not None:
                    known.grant(request.credit.tokens)
            case "cancel":
                if (gone := session.slots.pop(request.cancel.slot, None)) is not None:
                    assert gone.task is not None, "started with its slot"
                    gone.task.cancel()
                    session.wake.set()
            case kind:
                log.warning("unexpected %s in a session", kind)

    def close(self) -> None:
        """Refuses new Sessions; a running one ends once its answers have ended and were sent."""
        self._closing = True
        for session in self._sessions:
            session.wake.set()

    async def GetPools(  # noqa: N802
        self, request: common_pb2.GetPoolsRequest, context: Any
    ) -> common_pb2.GetPoolsResponse:
        return common_pb2.GetPoolsResponse(instance=self._answers.ref, pools=self._answers.pools())
