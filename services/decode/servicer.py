"""The gRPC service of a decode instance has one Session stream for each gateway, and GetPools. It maps messages and
moves them; it decides nothing."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from kvmesh.errors import RequestCancelled, Unavailable
from kvmesh.rpc import protocol
from kvmesh.rpc.bidi import ServerStream
from kvmesh.rpc.pb import common_pb2, decode_pb2, decode_pb2_grpc
from kvmesh.services.decode import inputs as i
from kvmesh.services.decode import mapping
from kvmesh.services.decode.core import DecodeCore

log = logging.getLogger(__name__)

WRITE_TIMEOUT_S = 30.0


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """Serves all Sessions of one instance. A Session that ends, however it ends, cancels its requests. `pools` returns
    what the instance holds, where that is more than the core counts."""

    def __init__(self, core: DecodeCore, pools: Callable[[], common_pb2.PoolCounters] | None = None) -> None:
        self._core = core
        self._pools = pools or core.counters
        self._numbers = itertools.count(1)
        self._closing = False

    async def Session(  # type: ignore[override]  # noqa: N802  # a coroutine that writes, no generator
        self, request_iterator: AsyncIterator[decode_pb2.SessionRequest], context: Any
    ) -> None:
        """Serves one gateway until it or this instance ends the stream. Raises ProtocolMismatch or InvalidRequest if
        the stream does not begin with a valid hello, and Unavailable when the instance shuts down."""
        if self._closing:
            raise Unavailable("decode instance is shutting down")
        stream = ServerStream[decode_pb2.SessionRequest, decode_pb2.SessionResponse](
            request_iterator, context, write_timeout_s=WRITE_TIMEOUT_S
        )
        hello: decode_pb2.SessionHello = await stream.hello()
        stream.who = f"gateway {hello.gateway_id!r}"
        protocol.check(hello.protocol_version, stream.who)
        core, session, wake = self._core, next(self._numbers), asyncio.Event()
        reply = decode_pb2.SessionHelloReply(protocol_version=protocol.PROTOCOL_VERSION, instance=core.instance.ref)
        await stream.write(decode_pb2.SessionResponse(hello=reply))
        core.feed(i.SessionOpened(session))
        core.wake[session] = wake
        box, cause = core.state.sessions[session], "the stream broke"

        def outgoing() -> Sequence[decode_pb2.SessionResponse]:
            """Returns all that has gathered in the outbox."""
            parcel = box.take()
            return tuple(mapping.responses(parcel)) if parcel else ()

        try:
            over = await stream.serve(
                lambda request: self._take(session, request), outgoing, wake, lambda: self._closing and not box.streams
            )
            cause = "this instance is shutting down" if over else "the gateway closed it"
        except Unavailable as error:
            cause = error.message
            raise
        finally:
            del core.wake[session]
            core.feed(i.SessionClosed(session, cause))

    def _take(self, session: int, request: decode_pb2.SessionRequest) -> None:
        core = self._core
        match request.WhichOneof("kind"):
            case "start":
                core.start(session, request.start)
            case "credit":
                core.feed(i.AddCredit(session, request.credit.slot, request.credit.tokens))
            case "cancel":
                why = RequestCancelled(request.cancel.reason or "cancelled by the gateway")
                core.feed(i.CancelSlot(session, request.cancel.slot, why))
            case kind:
                log.warning("session %d: unexpected %s", session, kind)

    def close(self) -> None:
        """Refuses new Sessions; a running one ends once its answers have ended and were sent."""
        self._closing = True
        for wake in self._core.wake.values():
            wake.set()

    async def GetPools(  # noqa: N802
        self, request: common_pb2.GetPoolsRequest, context: Any
    ) -> common_pb2.GetPoolsResponse:
        return common_pb2.GetPoolsResponse(instance=self._core.instance.ref, pools=self._pools())
