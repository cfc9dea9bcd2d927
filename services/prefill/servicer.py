"""kvmesh.v1.Prefill over gRPC: hello, one reader and one writer a stream, counters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from kvmesh.blockservice.shard_wire import from_wire, to_wire
from kvmesh.errors import InvalidRequest, Unavailable
from kvmesh.rpc import protocol
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import prefill_pb2 as pb
from kvmesh.rpc.pb import prefill_pb2_grpc as pb_grpc
from services.prefill.runner import HandoffStream, PrefillRunner

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
# A decode instance that takes nothing for this long is gone, whatever its TCP connection says.
WRITE_TIMEOUT_S = 10.0


class PrefillServicer(pb_grpc.PrefillServicer):
    """`instance` (who this is) and `writers` (transfer engine names of the ranks) are what answers a hello. `pools`:
    what the instance holds, where that is more than the runner's."""

    def __init__(
        self,
        runner: PrefillRunner,
        instance: Callable[[], pb_common.InstanceRef],
        writers: tuple[str, ...],
        pools: Callable[[], pb_common.PoolCounters] | None = None,
    ) -> None:
        self._runner = runner
        self._pools = pools or runner.counters
        self._instance = instance
        self._writers = writers
        self._closing = False

    def close(self) -> None:
        """End every stream once it has taken what is written for it: the instance is about to stop."""
        self._closing = True
        self._runner.wake_streams()

    async def GetPools(  # noqa: N802
        self, request: pb_common.GetPoolsRequest, context: Any
    ) -> pb_common.GetPoolsResponse:
        """What is held right now."""
        return pb_common.GetPoolsResponse(instance=self._instance(), pools=self._pools())

    # A coroutine that writes, where the stubs expect a generator: only so can a write have a deadline.
    async def Handoff(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.HandoffRequest], context: Any
    ) -> None:
        """All handoffs of one decode instance. Raises ProtocolMismatch, InvalidRequest, Unavailable."""
        hello = await self._hello(request_iterator)
        who = f"decode instance {hello.instance.instance_id} at {hello.instance.address}"
        protocol.check(hello.protocol_version, who)
        if self._closing:
            raise Unavailable("this prefill instance is shutting down")
        readers = from_wire(hello.layouts, "layouts")
        stream = self._runner.open_stream(tuple(hello.segment_descriptors), readers)
        log.info("handoff stream of %s", who)
        try:
            reply = pb.HandoffHelloReply(
                protocol_version=protocol.PROTOCOL_VERSION,
                instance=self._instance(),
                writers=self._writers,
                layouts=to_wire(self._runner.state.config.layouts),
            )
            await self._send(context, pb.HandoffEvent(hello=reply))
            await self._talk(stream, request_iterator, context)
        finally:
            self._runner.close_stream(stream)
            log.info("handoff stream of %s has ended", who)

    async def _hello(self, requests: AsyncIterator[pb.HandoffRequest]) -> pb.HandoffHello:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await anext(requests)
        except TimeoutError:
            raise InvalidRequest(f"no hello within {HELLO_TIMEOUT_S:.0f} s", field="hello") from None
        except StopAsyncIteration:
            raise InvalidRequest("the stream ended before its hello", field="hello") from None
        if first.WhichOneof("kind") != "hello":
            raise InvalidRequest.of("kind", first.WhichOneof("kind"), "a stream begins with hello")
        return first.hello

    async def _talk(self, stream: HandoffStream, requests: AsyncIterator[pb.HandoffRequest], context: Any) -> None:
        """Until decode ends the stream, either direction breaks, or the instance stops."""
        parts = [
            asyncio.ensure_future(self._read(stream, requests)),
            asyncio.ensure_future(self._write(stream, context)),
        ]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _read(self, stream: HandoffStream, requests: AsyncIterator[pb.HandoffRequest]) -> None:
        async for request in requests:
            self._runner.take(stream, request)

    async def _write(self, stream: HandoffStream, context: Any) -> None:
        while not self._closing:
            await stream.news.wait()
            stream.news.clear()
            while stream.outbox:
                events, stream.outbox = stream.outbox, []
                for event in events:
                    await self._send(context, event)
        raise Unavailable("this prefill instance is shutting down")

    async def _send(self, context: Any, event: pb.HandoffEvent) -> None:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await context.write(event)
        except TimeoutError:
            raise Unavailable(f"decode took nothing for {WRITE_TIMEOUT_S:.0f} s") from None
