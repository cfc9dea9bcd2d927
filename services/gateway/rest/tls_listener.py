"""Accepts TLS connections and counts those whose handshake is not done: event loops tell nobody about them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable

from kvmesh.telemetry import names
from services.gateway.rest.http_protocol import HttpConnections

log = logging.getLogger(__name__)

_BACKLOG = 2048
_OUT_OF_DESCRIPTORS_S = 0.05


class TlsListener:
    """What uvicorn needs of an asyncio server. Together with `connections` there are never more than
    `connections.most`, a quarter of which may be in their handshake; the one that began first makes room."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        make: Callable[[], asyncio.BaseProtocol],
        connections: HttpConnections,
    ) -> None:
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self.sockets = (listener,)
        self._listener = listener
        self._context = context
        self._make = make
        self._connections = connections
        self._most = max(4, connections.most // 4)
        self._shaking: dict[asyncio.Task[None], socket.socket] = {}
        self._accepting = asyncio.create_task(self._accept(), name="https")

    @property
    def handshakes(self) -> int:
        """How many are not done."""
        return len(self._shaking)

    def close(self) -> None:
        """Accepts no more."""
        self._accepting.cancel()
        for sock in self._shaking.values():
            _cut(sock)

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._shaking, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as err:
                log.warning("https listener: %s", err)
                await asyncio.sleep(_OUT_OF_DESCRIPTORS_S)  # out of descriptors: let some go
                continue
            if (
                len(self._shaking) >= self._most
                or len(self._shaking) + self._connections.count >= self._connections.most
            ):
                self._make_room()
            task = asyncio.create_task(self._shake(sock))
            self._shaking[task] = sock
            task.add_done_callback(self._shaking.pop)

    def _make_room(self) -> None:
        if self._shaking:
            names.GATEWAY_HTTP_REFUSED.labels(reason="connections").inc()
            _cut(next(iter(self._shaking.values())))
        else:
            self._connections.shed()

    async def _shake(self, sock: socket.socket) -> None:
        # A connection that is cut, speaks no TLS or takes too long has nobody to be told.
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make,
                sock,
                ssl=self._context,
                ssl_handshake_timeout=self._connections.limits.head_timeout_s,
                ssl_shutdown_timeout=1.0,
            )
        except (OSError, TimeoutError, ssl.SSLError):
            sock.close()


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
