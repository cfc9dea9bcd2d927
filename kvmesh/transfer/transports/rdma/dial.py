"""Opens the control connection to a target: a greeting, as on tcp."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.segment import SegmentDescriptor
from kvmesh.transfer.transports import wire
from kvmesh.transfer.transports.tcp.dial import TcpRoute, at
from kvmesh.transfer.transports.wire import ConnectionRefused, Hello, ProtocolBroken

# Greetings that may be under way at once in one process: after a restart, everybody dials everybody.
_HANDSHAKES = threading.BoundedSemaphore(16)


def dial(
    descriptor: SegmentDescriptor,
    name: str,
    conn_id: int,
    supersedes: tuple[int, ...],
    config: EngineConfig,
    opened: Callable[[socket.socket], None],
) -> socket.socket:
    """Returns a connected socket after the greeting. `opened` gets the socket before it connects, so that others can
    shut it; it may raise Gone. Raises OSError, Gone, ProtocolBroken or ConnectionRefused."""
    endpoint = descriptor.endpoints["rdma"]
    try:
        found = socket.getaddrinfo(endpoint["host"], int(endpoint["port"]), type=socket.SOCK_STREAM)
    except (KeyError, ValueError) as err:
        raise ConnectionRefused(f"bad rdma endpoint {endpoint!r}", retry=False) from err
    family, kind, proto, _, address = found[0]
    if not _HANDSHAKES.acquire(timeout=config.connect_timeout_s):
        raise OSError("too many handshakes at once")
    sock: socket.socket | None = None
    try:
        sock = socket.socket(family, kind, proto)
        opened(sock)
        sock.settimeout(config.connect_timeout_s)
        try:
            sock.connect(address)
        except OSError as err:
            raise at(TcpRoute(family, address), err) from err  # type: ignore[arg-type]
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        data = wire.encode_hello(Hello(wire.WIRE_VERSION, name, descriptor.name, descriptor.token, conn_id, supersedes))
        sock.sendall(wire.LENGTH.pack(len(data)) + data)
        (length,) = wire.LENGTH.unpack(wire.recv_exact(sock, wire.LENGTH.size))
        if length > wire.MAX_HELLO_BYTES:
            raise ProtocolBroken(f"welcome of {length} bytes")
        wire.decode_welcome(bytes(wire.recv_exact(sock, length)))
        return sock
    except BaseException:
        if sock is not None:
            sock.close()
        raise
    finally:
        _HANDSHAKES.release()
