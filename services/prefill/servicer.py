"""The gRPC service kvmesh.v1.Prefill has a hello, one reader and one writer for each stream, counters."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from kvmesh.blockservice.shard_wire import from_wire, to_wire
from kvmesh.errors import ConfigError, Unavailable
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.rpc import protocol
from kvmesh.rpc.bidi import ServerStream
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import prefill_pb2 as pb
from kvmesh.rpc.pb import prefill_pb2_grpc as pb_grpc
from kvmesh.services.prefill.runner import PrefillRunner

log = logging.getLogger(__name__)


class PrefillServicer(pb_grpc.PrefillServicer):
    """Serves Handoff streams. A hello is answered with `instance` (who this is) and `writers` (the transfer engine
    names of the ranks). `pools` returns what the instance holds, where that is more than the runner counts."""

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
        """Ends every stream once the events that wait for it are written: the instance is about to stop."""
        self._closing = True
        self._runner.wake_streams()

    async def GetPools(  # noqa: N802
        self, request: pb_common.GetPoolsRequest, context: Any
    ) -> pb_common.GetPoolsResponse:
        return pb_common.GetPoolsResponse(instance=self._instance(), pools=self._pools())

    # It is a coroutine that writes, where the stubs expect a generator, because only so can a write have a deadline.
    async def Handoff(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.HandoffRequest], context: Any
    ) -> None:
        """Serves all handoffs of one decode instance. Raises ProtocolMismatch or InvalidRequest for a wrong hello or
        message, and Unavailable when this instance is shutting down."""
        talk = ServerStream[pb.HandoffRequest, pb.HandoffEvent](request_iterator, context)
        hello: pb.HandoffHello = await talk.hello()
        who = talk.who = f"decode instance {hello.instance.instance_id} at {hello.instance.address}"
        protocol.check(hello.protocol_version, who)
        if self._closing:
            raise Unavailable("this prefill instance is shutting down")
        readers = self._readers(hello, who)
        stream = self._runner.open_stream(tuple(hello.segment_descriptors), readers)
        log.info("handoff stream of %s", who)
        try:
            own = to_wire(self._runner.state.config.layouts)
            reply = pb.HandoffHelloReply(
                protocol_version=protocol.PROTOCOL_VERSION,
                instance=self._instance(),
                writers=self._writers,
                **{self._layouts_field: own},
            )
            await talk.write(pb.HandoffEvent(hello=reply))
            if await talk.serve(
                lambda request: self._runner.take(stream, request), stream.take, stream.news, lambda: self._closing
            ):
                raise Unavailable("this prefill instance is shutting down")
        finally:
            self._runner.close_stream(stream)
            log.info("handoff stream of %s has ended", who)

    @property
    def _layouts_field(self) -> str:
        """Where a hello has the layouts of a model such as this instance's."""
        return "group_layouts" if self._runner.state.config.groups else "layouts"

    def _readers(self, hello: pb.HandoffHello, who: str) -> tuple[ShardLayout, ...]:
        """Returns how the ranks of decode cut blocks. Raises ConfigError when its model is not kept by cache groups and
        this instance's is, or the other way round."""
        grouped = bool(self._runner.state.config.groups)
        if bool(hello.group_layouts) != grouped:
            why = "kept by cache groups, of which it says none" if grouped else "of one cache group, it names several"
            raise ConfigError(f"group_layouts: {who} cannot take the KV of a model {why}", field="group_layouts")
        return from_wire(getattr(hello, self._layouts_field), self._layouts_field)
