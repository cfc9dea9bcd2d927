"""The fast path of a control service: it carries heartbeats and announcements of a thousand instances.

One call of `grpc.aio` takes some 0.4 ms of the service's core, a call over the fast path a fifth of that. Entering a
service, and everything that is rare, stays with gRPC.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from prometheus_client import Counter

from kvmesh.errors import InvalidRequest
from kvmesh.rpc.call_queue import CallQueue
from kvmesh.rpc.fastpath.server import FastPathLimits, FastServer
from kvmesh.rpc.pb import doors_pb2 as pb
from kvmesh.rpc.pb import doors_pb2_grpc as pb_grpc
from kvmesh.rpc.server import Server

CONNECTIONS = 4096  # one or two of each instance


class ControlFastPath(pb_grpc.DoorsServicer):
    """The fast path of some unary methods of one servicer: methods that do not wait, or use `asyncio.timeout` only
    after they have waited once. `port` 0 is any free one, -1 means no fast path. `counter` counts calls by `method`;
    the methods in `queued` go through `queue`."""

    def __init__(
        self,
        service: ServiceDescriptor,
        servicer: object,
        methods: Collection[str],
        port: int,
        counter: Counter | None = None,
        *,
        limits: FastPathLimits | None = None,
        queue: CallQueue | None = None,
        queued: Collection[str] = (),
    ) -> None:
        self._service = service
        self._port = port
        life = secrets.randbits(63) | 1
        limits = limits or FastPathLimits(connections=CONNECTIONS)
        self._server = FastServer(service, servicer, life, methods=methods, limits=limits, queue=queue, queued=queued)
        if counter is not None:
            counts = {name.encode(): counter.labels(method=name) for name in methods}
            self._server.on_call = lambda wire: counts[wire].inc()
        self._told = pb.FindDoorResponse(life=life, methods=sorted(methods))

    def add_to(self, server: Server) -> None:
        """Serves FindDoor on `server`, where callers ask for the port."""
        pb_grpc.add_DoorsServicer_to_server(self, server.grpc)
        server.serves(pb.DESCRIPTOR.services_by_name["Doors"].full_name)

    async def open(self, host: str) -> None:
        """Listens (see `FastServer.open_tcp`). Raises ConfigError when door_port is in use."""
        self._told.port = await self._server.open_tcp(host, self._port)

    async def FindDoor(self, request: pb.FindDoorRequest, context: Any) -> pb.FindDoorResponse:  # noqa: N802
        """Returns where the fast path is. Raises InvalidRequest when another service is asked for."""
        if request.service != self._service.full_name:
            raise InvalidRequest.of("service", request.service, f"{self._service.full_name} stands here")
        return self._told

    def __len__(self) -> int:
        """Returns the number of open connections."""
        return len(self._server)

    async def close(self) -> None:
        """Stops listening and ends all connections, within a bound. It is idempotent."""
        self._told.port = 0
        await self._server.close()
