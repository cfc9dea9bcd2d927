"""The gRPC server every service stands on: limits, health, reflection, named errors."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvmesh.errors import ConfigError, Overloaded
from kvmesh.rpc import authorisation, security
from kvmesh.rpc.call_limits import MEMBERS, CallLimits
from kvmesh.rpc.channels import KEEPALIVE_MS
from kvmesh.rpc.pb import traces_pb2_grpc
from kvmesh.rpc.protocol import MAX_MESSAGE_BYTES
from kvmesh.rpc.public_calls import WINDOW_BYTES, PublicCalls
from kvmesh.rpc.status import errors_to_status
from kvmesh.rpc.traces import SERVICE as TRACES
from kvmesh.rpc.traces import TracesServicer
from kvmesh.telemetry import readiness

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
RETRY_AFTER_MS = 5_000
_STATES = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers health checks for the services that it knows, and keeps no state for callers that ask about
    another one."""

    def __init__(self, max_watchers: int) -> None:
        self._max_watchers = max_watchers
        self._states: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._shut_down = False
        self.watchers = 0

    def set(self, service: str, serving: bool) -> None:
        """Sets the state of a service and tells its watchers. After `shut_down` it does nothing."""
        if not self._shut_down:
            self._states[service] = _STATES.SERVING if serving else _STATES.NOT_SERVING
            self._wake()

    def shut_down(self) -> None:
        """Reports every service as not serving from now on."""
        self._shut_down = True
        self._states = dict.fromkeys(self._states, int(_STATES.NOT_SERVING))
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Any:  # noqa: N802
        """Returns the state of one service; NOT_FOUND when it is not served here."""
        state = self._states.get(request.service)
        if state is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        return _STATES(status=state)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802
        """Writes the state of one service whenever it changes; for a service not served here SERVICE_UNKNOWN, once.
        Raises Overloaded when there are too many watchers."""
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


_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 16 << 10),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),  # two servers on one port would share its calls silently
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 3 * KEEPALIVE_MS),  # finds dead clients, so that their streams end
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),
)


# Without probes of the bandwidth a call that nobody reads takes one window of its caller's bytes; with them, many MiB.
# A message that is being received gets larger windows.
_PUBLIC_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
)


def _options(limits: CallLimits, *, public: bool) -> list[tuple[str, int]]:
    options = [
        *_OPTIONS,
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_concurrent_streams", limits.streams),
        ("grpc.max_allowed_incoming_connections", limits.connections),
        # Calls that have come and that the event loop has not seen yet. From 1,000 on gRPC ends some of them, by
        # default and at random, with a CANCELLED without a reason.
        ("grpc.server.max_pending_requests", limits.calls),
        ("grpc.server.max_pending_requests_hard_limit", limits.calls),
        # And those that it has not seen for 30 s, likewise: a busy loop is slow, callers have deadlines of their own.
        ("grpc.server_max_unrequested_time_in_server", UNSEEN_S),
    ]
    if limits.idle_s:
        options.append(("grpc.max_connection_idle_ms", int(limits.idle_s * 1000)))
    return options + list(_PUBLIC_OPTIONS if public else ())


UNSEEN_S = 600


def join(host: str, port: int) -> str:
    """Returns `host:port`, with brackets around an IPv6 address."""
    try:
        return f"[{host}]:{port}" if ipaddress.ip_address(host).version == 6 else f"{host}:{port}"
    except ValueError:
        return f"{host}:{port}"


def check_port(host: str, port: int, key: str = "port") -> None:
    """Raises ConfigError, which names `key`, unless a server could listen on `host:port` now. Port 0 always can."""
    try:
        infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as err:
        raise ConfigError(f"host={host!r}: cannot be resolved ({err})", field="host") from None
    family, kind, proto, _, address = infos[0]
    with socket.socket(family, kind, proto) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)  # only listening tells a port in use under SO_REUSEADDR
        except OSError as err:
            if err.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"host={host!r}: is no address of this machine", field="host") from None
            raise ConfigError(f"{key}={port}: {_why(err)} on {host}", field=key) from None


def _why(err: OSError) -> str:
    if err.errno == errno.EADDRINUSE:
        return "the port is in use"
    if err.errno == errno.EACCES:
        return "this user may not open the port"
    return f"cannot be opened ({err.strerror})"


def _may_call(path: str, request: Any, context: Any) -> None:
    authorisation.check(authorisation.grpc_caller(context), path, request)


class Server:
    """One listening gRPC server. Add servicers to `.grpc` and name them with `.serves` before `start`.

    It speaks TLS when this process was configured so (`security.configure`; `tls` overrides that), and then asks
    clients for certificates unless it is `public`; who may call what then depends on these (`authorisation`). A
    public server may be called by strangers; `public_calls` bounds their calls, and reflection is off where keys are
    required.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        public: PublicCalls | None = None,
        limits: CallLimits = MEMBERS,
        tls: security.Security | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self._public = public
        self._tls = tls or security.current()
        # Whoever needs no certificate cannot be told from others: then only the network decides who calls what.
        guard = _may_call if public is None and self._tls.asks_clients else None
        interceptors: tuple[grpc.aio.ServerInterceptor, ...] = (errors_to_status(guard),)
        self.grpc = grpc.aio.server(
            options=_options(limits, public=public is not None),
            interceptors=interceptors if public is None else (public, *interceptors),
            # A public server refuses by itself, with a named error.
            maximum_concurrent_rpcs=limits.calls if public is None else None,
        )
        self._health = HealthServicer(limits.watchers)
        self._services: list[str] = []
        self._probes: dict[str, bool] = {}  # names of health alone; whether they only say that the process lives
        self._ready = False

    def serves(self, full_service_name: str) -> None:
        """Registers a service, e.g. "kvmesh.v1.Gateway", with health and reflection."""
        self._services.append(full_service_name)

    def answers_probe(self, name: str, *, live: bool) -> None:
        """Registers a name with health that is no service: `live` ones serve from `start` to `stop`, others while the
        server is ready."""
        self._probes[name] = live

    @property
    def address(self) -> str:
        """`host:port`, once started."""
        return join(self.host, self.port)

    async def start(self) -> int:
        """Listens and returns the bound port. Health is NOT_SERVING until `set_ready(True)`. Raises ConfigError when
        the port is in use."""
        check_port(self.host, self.port)  # before gRPC, which would log its own account first
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        if self._public is None:
            traces_pb2_grpc.add_TracesServicer_to_server(TracesServicer(), self.grpc)
            self.serves(TRACES)
        self._publish(False)
        if self._public is None or not self._public.keys_required:
            names = (*self._services, HEALTH, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self.grpc)
        try:
            self.port = self._listen()
        except RuntimeError:
            raise ConfigError(f"port={self.port}: the port is in use on {self.host}", field="port") from None
        await self.grpc.start()
        return self.port

    def _listen(self) -> int:
        credentials = self._tls.server_credentials(public=self._public is not None)
        if credentials is None:
            return self.grpc.add_insecure_port(self.address)
        return self.grpc.add_secure_port(self.address, credentials)

    def set_ready(self, ready: bool, why_not: str = "not ready") -> None:
        """Answers health checks with SERVING or NOT_SERVING, and `/ready` of the metrics port with `why_not`."""
        readiness.PROCESS.why_not = "" if ready else why_not
        if ready != self._ready:
            self._ready = ready
            self._publish(ready)

    def _publish(self, ready: bool) -> None:
        for name in ("", *self._services):
            self._health.set(name, ready)
        for name, live in self._probes.items():
            self._health.set(name, ready or live)

    async def stop(self, grace_s: float) -> None:
        """Reports NOT_SERVING, takes no new calls, gives running ones `grace_s` seconds, and cancels what is left."""
        readiness.PROCESS.why_not = "shutting down"
        self._health.shut_down()
        await self.grpc.stop(grace_s)
