"""Client channels: one set of limits and timers for every connection of the mesh."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from kvmesh.rpc import security
from kvmesh.rpc.authorisation import ServerRole
from kvmesh.rpc.protocol import MAX_MESSAGE_BYTES

KEEPALIVE_MS = 10_000
END_S = 24 * 3600.0  # how long calls under way may go on after their certificate was replaced

# A restarted peer keeps its port, so reconnecting soon matters more than sparing it attempts. Each channel has
# its own subchannels: closing one never cuts another owner's calls. Proxies of the environment are for HTTP.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    # A peer that is frozen but whose kernel still acknowledges is given up by this one, which is a minute unless told.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),
    # A peer that comes back elsewhere under its name (a container made anew) is found at the next try, not after 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)


def connect(
    address: str, server: ServerRole = ServerRole.MEMBER, *, tls: security.Security | None = None
) -> grpc.aio.Channel:
    """Opens a channel to `host:port`. It connects at the first call; the caller owns and closes it. `server` is what
    must answer there, where `tls_server_name` asks for roles.

    It uses TLS when this process was configured so (`security.configure`); `tls` overrides that. When the certificate's
    files change, later calls go over a new connection, and calls under way end on the old one.
    """
    tls = security.current() if tls is None else tls
    if not tls.ca:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return _secure(address, server, tls) if tls.source is None else RenewedChannel(address, server, tls)


def _secure(address: str, server: ServerRole, tls: security.Security) -> grpc.aio.Channel:
    credentials = tls.channel_credentials()
    assert credentials is not None, "only with tls_ca"
    options: list[tuple[str, str | int]] = [*CHANNEL_OPTIONS]
    if name := tls.name_of(server):
        options.append(("grpc.ssl_target_name_override", name))
    return grpc.aio.secure_channel(address, credentials, options=options)


class RenewedChannel(grpc.aio.Channel):
    """A channel whose certificate is replaced when its files are. Each call begins on the newest one."""

    def __init__(self, address: str, server: ServerRole, tls: security.Security) -> None:
        self._address = address
        self._server = server
        self._tls = tls
        self._newest = _secure(address, server, tls)
        self._old: dict[grpc.aio.Channel, asyncio.Task[None]] = {}
        self._closed = False

    def newest(self) -> grpc.aio.Channel:
        """Returns the channel for calls that begin now."""
        tls = self._tls.renewed()
        if tls is not self._tls and not self._closed:
            old, self._tls = self._newest, tls
            self._newest = _secure(self._address, self._server, tls)
            self._old[old] = task = asyncio.get_running_loop().create_task(old.close(END_S), name="end old channel")
            task.add_done_callback(lambda _: self._old.pop(old, None))
        return self._newest

    async def close(self, grace: float | None = None) -> None:
        """Closes the channel, and those of before whose calls have not ended."""
        self._closed = True
        old = dict(self._old)
        for task in old.values():
            task.cancel()
        await asyncio.gather(*old.values(), return_exceptions=True)
        await asyncio.gather(self._newest.close(grace), *(one.close(grace) for one in old))

    async def __aenter__(self) -> RenewedChannel:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Returns the newest connection's state."""
        return self._newest.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Waits until the newest connection's state is another one."""
        await self._newest.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Waits until the newest connection stands."""
        await self._newest.channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a callable whose calls begin on the newest channel."""
        return _RenewedCall(self, "unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See `unary_unary`."""
        return _RenewedCall(self, "unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """See `unary_unary`."""
        return _RenewedCall(self, "stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See `unary_unary`."""
        return _RenewedCall(self, "stream_stream", args, kwargs)


class _RenewedCall:
    """A method of a `RenewedChannel`."""

    __slots__ = ("_call", "_channel", "_made_on", "_method", "_rest")

    def __init__(self, channel: RenewedChannel, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._channel = channel
        self._method = kind
        self._rest = args, kwargs
        self._made_on: grpc.aio.Channel | None = None
        self._call: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        newest = self._channel.newest()
        if newest is not self._made_on:
            given, named = self._rest
            self._made_on, self._call = newest, getattr(newest, self._method)(*given, **named)
        return self._call(*args, **kwargs)
