"""The REST listener: uvicorn on this event loop, with or without TLS."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from kvmesh.errors import ConfigError
from kvmesh.rpc.server import check_port, join
from kvmesh.services.gateway.config import GatewayConfig
from kvmesh.services.gateway.rest.hosts import Application
from kvmesh.services.gateway.rest.http_protocol import BoundedHttpProtocol, HttpConnections
from kvmesh.telemetry import names
from kvmesh.watched_files import WatchedFiles

log = logging.getLogger(__name__)

_BACKLOG = 2048
_GRACE_S = 2
_OUT_OF_DESCRIPTORS_S = 0.05


class TlsListener:
    """What uvicorn needs of an asyncio server. It accepts TLS connections and counts those whose handshake is not done:
    event loops tell nobody about them. Together with `connections` there are never more than
    `connections.most`, a quarter of which may be in their handshake; the one that began first makes room."""

    def __init__(
        self,
        listener: socket.socket,
        tls: WatchedFiles[ssl.SSLContext],
        make: Callable[[], asyncio.BaseProtocol],
        connections: HttpConnections,
    ) -> None:
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self.sockets = (listener,)
        self._listener = listener
        self._tls = tls
        self._make = make
        self._connections = connections
        self._most = max(4, connections.most // 4)
        self._shaking: dict[asyncio.Task[None], socket.socket] = {}
        self._accepting = asyncio.create_task(self._accept(), name="https")

    @property
    def handshakes(self) -> int:
        """How many handshakes are not done."""
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
                ssl=self._tls.value(),  # a renewed certificate is for connections from then on
                ssl_handshake_timeout=self._connections.limits.head_timeout_s,
                ssl_shutdown_timeout=1.0,
            )
        except (OSError, TimeoutError, ssl.SSLError):
            sock.close()


def _cut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its hold on signals, which belong to the process, and with a moment called started."""

    def __init__(
        self, config: uvicorn.Config, connections: HttpConnections, tls: WatchedFiles[ssl.SSLContext] | None
    ) -> None:
        super().__init__(config)
        self._tls = tls
        self.accepting = asyncio.Event()
        self._connections = connections

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        tls = self._tls
        if tls is None or not sockets:
            await super().startup(sockets)
        else:
            await self.lifespan.startup()
            protocol: Any = self.config.http_protocol_class
            make = functools.partial(protocol, self.config, self.server_state, {})
            self.servers = [TlsListener(sock, tls, make, self._connections) for sock in sockets]  # type: ignore[misc]
            self.started = True
        self.accepting.set()


class HttpServer:
    """uvicorn on this event loop; HTTPS with `tls`."""

    def __init__(
        self, application: Application, config: GatewayConfig, tls: WatchedFiles[ssl.SSLContext] | None
    ) -> None:
        self._host = config.host
        self._port = config.http_port
        self._limits = config.http_limits
        self._connections = HttpConnections(self._limits)
        self._server = _Uvicorn(
            uvicorn.Config(
                application,
                http=functools.partial(BoundedHttpProtocol, bounds=self._connections),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=_GRACE_S,
                backlog=_BACKLOG,
                timeout_keep_alive=self._limits.idle_timeout_s,  # type: ignore[arg-type]
            ),
            self._connections,
            tls,
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """`host:port` once started."""
        return join(self._host, self._port)

    async def start(self) -> None:
        """Listen. ConfigError naming the port when it is in use."""
        check_port(self._host, self._port, "http_port")
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self._host, self._port))
        except OSError as err:
            listener.close()
            raise ConfigError(f"http_port={self._port}: {err.strerror} on {self._host}", field="http_port") from None
        self._port = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve([listener]), name="http")
        accepting = asyncio.create_task(self._server.accepting.wait())
        await asyncio.wait((self._task, accepting), return_when=asyncio.FIRST_COMPLETED, timeout=10)
        accepting.cancel()
        if self._task.done():
            self._task.result()
            raise ConfigError(f"http_port={self._port}: the server ended at its start", field="http_port")

    async def stop(self) -> None:
        """Stop listening, let answers end for a moment, cancel the rest."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
