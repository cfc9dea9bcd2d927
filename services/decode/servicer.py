"""Decode over gRPC: one Session stream per gateway, and GetPools. Maps and moves; decides nothing."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from kvmesh.errors import InvalidRequest, RequestCancelled, Unavailable
from kvmesh.rpc import protocol
from kvmesh.rpc.pb import common_pb2, decode_pb2, decode_pb2_grpc
from services.decode import inputs as i
from services.decode import mapping
from services.decode.core import DecodeCore

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
WRITE_TIMEOUT_S = 30.0


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """All Sessions of one instance. A Session that ends, however it ends, cancels its requests. `pools`: what the
    instance holds, where that is more than the core's."""

    def __init__(self, core: DecodeCore, pools: Callable[[], common_pb2.PoolCounters] | None = None) -> None:
        self._core = core
        self._pools = pools or core.counters
        self._numbers = itertools.count(1)
        self._closing = False

    async def Session(  # type: ignore[override]  # noqa: N802  # a coroutine that writes, no generator
        self, request_iterator: AsyncIterator[decode_pb2.SessionRequest], context: Any
    ) -> None:
        """Until the gateway or this instance ends it. ProtocolMismatch, InvalidRequest: a wrong beginning."""
        who = await self._welcome(request_iterator, context)
        session, wake, core = next(self._numbers), asyncio.Event(), self._core
        core.feed(i.SessionOpened(session))
        core.wake[session] = wake
        reader = asyncio.create_task(self._read(session, request_iterator), name=f"session {session} read")
        reader.add_done_callback(lambda _: wake.set())
        cause = "the stream broke"
        try:
            cause = await self._write(session, wake, reader, context)
        except TimeoutError:
            cause = f"{who} took no message for {WRITE_TIMEOUT_S:g} s"
            raise Unavailable(cause) from None
        finally:
            del core.wake[session]
            core.feed(i.SessionClosed(session, cause))
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _welcome(self, requests: AsyncIterator[decode_pb2.SessionRequest], context: Any) -> str:
        if self._closing:
            raise Unavailable("decode instance is shutting down")
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await anext(aiter(requests), None)
        except TimeoutError:
            raise InvalidRequest(f"no hello within {HELLO_TIMEOUT_S:g} s", field="hello") from None
        if first is None or not first.HasField("hello"):
            kind = first.WhichOneof("kind") if first is not None else None
            raise InvalidRequest.of("kind", kind, "a Session begins with hello")
        who = f"gateway {first.hello.gateway_id!r}"
        protocol.check(first.hello.protocol_version, who)
        reply = decode_pb2.SessionHelloReply(
            protocol_version=protocol.PROTOCOL_VERSION, instance=self._core.instance.ref
        )
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await context.write(decode_pb2.SessionResponse(hello=reply))
        return who

    async def _write(self, session: int, wake: asyncio.Event, reader: asyncio.Task[None], context: Any) -> str:
        """Everything that gathers while one message is written goes into the next. Returns why it ended."""
        box = self._core.state.sessions[session]
        while True:
            parcel = box.take()
            if parcel:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await context.write(mapping.response(parcel))
            elif reader.done():
                return "the gateway closed it" if reader.exception() is None else "the stream broke"
            elif self._closing and not box.streams:
                return "this instance is shutting down"
            else:
                await wake.wait()  # a reader that ends, and `close`, wake it too
                wake.clear()

    async def _read(self, session: int, requests: AsyncIterator[decode_pb2.SessionRequest]) -> None:
        core = self._core
        try:
            async for request in requests:
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
        except grpc.RpcError:
            return  # the stream broke; the writer side ends the session

    def close(self) -> None:
        """Refuse new Sessions; running ones end once they have told everything."""
        self._closing = True
        for wake in self._core.wake.values():
            wake.set()

    async def GetPools(  # noqa: N802
        self, request: common_pb2.GetPoolsRequest, context: Any
    ) -> common_pb2.GetPoolsResponse:
        """What the instance holds right now."""
        return common_pb2.GetPoolsResponse(instance=self._core.instance.ref, pools=self._pools())
