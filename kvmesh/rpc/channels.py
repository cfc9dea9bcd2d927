"""Client channels: one set of limits and timers for every connection of the mesh."""

from __future__ import annotations

import grpc
import grpc.aio

from kvmesh.rpc import security
from kvmesh.rpc.protocol import MAX_MESSAGE_BYTES

KEEPALIVE_MS = 10_000

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


def connect(address: str, *, tls: security.Security | None = None) -> grpc.aio.Channel:
    """Opens a channel to `host:port`. It connects at the first call; the caller owns and closes it.

    It uses TLS when this process was configured so (`security.configure`); `tls` overrides that.
    """
    tls = security.current() if tls is None else tls
    credentials = tls.channel_credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options: list[tuple[str, str | int]] = [*CHANNEL_OPTIONS]
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(address, credentials, options=options)
