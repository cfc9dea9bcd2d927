"""The standard health service of gRPC, with bounds: a stranger may call it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.errors import Overloaded

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
RETRY_AFTER_MS = 5_000
_STATES = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers for the services that it was told of, and keeps nothing of a caller that asks for another one."""

    def __init__(self, max_watchers: int) -> None:
        self._max_watchers = max_watchers
        self._states: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._shut_down = False
        self.watchers = 0

    def set(self, service: str, serving: bool) -> None:
        """Tells whoever watches `service`. After `shut_down` it does nothing."""
        if not self._shut_down:
            self._states[service] = _STATES.SERVING if serving else _STATES.NOT_SERVING
            self._wake()

    def shut_down(self) -> None:
        """Nothing is served from now on, for ever."""
        self._shut_down = True
        self._states = dict.fromkeys(self._states, int(_STATES.NOT_SERVING))
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Any:  # noqa: N802
        """The state of one service; NOT_FOUND when it is not served here."""
        state = self._states.get(request.service)
        if state is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        return _STATES(status=state)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802
        """The state of one service whenever it changes. A service that is not served here is SERVICE_UNKNOWN, once.
        Raises Overloaded when as many callers watch already as may."""
        service = request.service
        if service not in self._states:
            await context.write(_STATES(status=_STATES.SERVICE_UNKNOWN))
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        if self.watchers >= self._max_watchers:
            raise Overloaded(f"{self.watchers} callers watch already", retry_after_ms=RETRY_AFTER_MS)
        self.watchers += 1
        try:
            told = None
            while True:
                changed, state = self._changed, self._states[service]
                if state != told:
                    await context.write(_STATES(status=state))
                    told = state
                await changed.wait()
        finally:
            self.watchers -= 1
