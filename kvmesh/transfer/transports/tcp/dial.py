"""How a tcp connection comes to be: where from, where to, its socket options, the greeting."""

from __future__ import annotations

import errno
import ipaddress
import math
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.transports import wire
from kvmesh.transfer.transports.tcp.nics import Address, IpAddress, PeerNic, TcpNic, family, port_of, routes, sockaddr
from kvmesh.transfer.transports.wire import ConnectionRefused, Hello, ProtocolBroken

OWN_HOST_BYTES = 512 << 10
IP_BIND_ADDRESS_NO_PORT = 24  # <linux/in.h>: the port is chosen at connect, so that one may serve many targets
# The way, not the process at its end, is the trouble: another NIC may do.
SILENCE = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL})


@dataclass(frozen=True, slots=True)
class TcpRoute:
    """One thing to try. `source` none: as the kernel routes. `device`: leave by this interface alone."""

    family: int
    target: tuple[str, int] | tuple[str, int, int, int]
    source: Address | None = None
    device: str = ""


def plain_routes(endpoint: dict[str, str]) -> list[TcpRoute]:
    """To the peer's one address, as the kernel routes. OSError when the name is not found."""
    try:
        found = socket.getaddrinfo(endpoint["host"], port_of(endpoint["port"]), type=socket.SOCK_STREAM)
    except (KeyError, ValueError) as err:
        raise ConnectionRefused(f"bad tcp endpoint {endpoint!r}", retry=False) from err
    except OSError as err:
        raise OSError(f"host {endpoint['host']!r}: {err.strerror}") from err
    return [TcpRoute(found[0][0], found[0][4])]  # type: ignore[arg-type]


def at(route: TcpRoute, err: OSError) -> OSError:
    """With the address that was tried."""
    host, port = route.target[:2]
    why = f"{err.strerror or err}: {f'[{host}]' if ':' in host else host}:{port}"
    return OSError(err.errno, why) if err.errno else OSError(why)


def numeric(endpoint: dict[str, str]) -> PeerNic | None:
    """The peer's one address as a NIC without a name; None when it is a name or no address at all."""
    try:
        return PeerNic("", ((ipaddress.ip_address(endpoint["host"]), port_of(endpoint["port"])),))
    except (KeyError, ValueError):
        return None


def nic_routes(mine: TcpNic, its: PeerNic, own: frozenset[IpAddress]) -> list[TcpRoute]:
    """`own`: every address of this host; what goes there never leaves by an interface."""
    found = []
    for source, ip, port in routes(mine, its):
        device = "" if ip in own or ip.is_loopback else mine.interface
        found.append(TcpRoute(family(ip), sockaddr(ip, port, source.index), source, device))
    return found


def tune(sock: socket.socket, config: EngineConfig, *, many_nics: bool) -> None:
    """For both ends. With many NICs a silent one is given up after tcp_user_timeout_s: data that nobody acknowledges by
    TCP_USER_TIMEOUT, an idle connection by keep-alive probes, which it bounds too. (Their unit is a second, so an
    opener that waits for an answer sends a PING.)"""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if many_nics:
        idle_s = max(1, math.ceil(config.tcp_user_timeout_s / 2))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(config.tcp_user_timeout_s * 1000))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)


def size_buffers(sock: socket.socket, config: EngineConfig) -> None:
    """For both ends, once connected. A network needs what its bandwidth times its delay comes to, which the kernel
    finds out; on one host there is no delay, and what stays in the cache is copied faster."""
    nbytes = config.tcp_socket_bytes
    mine, its = sock.getsockname()[0], sock.getpeername()[0]
    if not nbytes and (mine == its or ipaddress.ip_address(its.partition("%")[0]).is_loopback):
        nbytes = OWN_HOST_BYTES
    if nbytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)


def forget_unsent(sock: socket.socket) -> None:
    """What the kernel holds of it goes with `close`. It would be sent for minutes, and with MSG_ZEROCOPY from memory
    that may have another use by then."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))


def prepared(route: TcpRoute, config: EngineConfig) -> socket.socket:
    """Bound to its source, not connected yet."""
    sock = socket.socket(route.family, socket.SOCK_STREAM)
    try:
        tune(sock, config, many_nics=route.source is not None)
        sock.settimeout(config.connect_timeout_s)
        if route.source is not None:
            sock.settimeout(min(config.connect_timeout_s, config.tcp_user_timeout_s))
            seconds, rest = divmod(config.tcp_user_timeout_s / 2, 1)
            quiet = struct.pack("@ll", int(seconds), max(1000, int(rest * 1e6)))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, quiet)
            sock.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
            sock.bind(route.source.sockaddr(0))
        if route.device:
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, route.device.encode())
            except PermissionError:
                pass  # an old kernel without privilege: the source address alone then chooses
    except BaseException:
        sock.close()
        raise
    return sock


def greet(sock: socket.socket, hello: Hello) -> None:
    """Returns when the acceptor has taken us: then nothing that `hello` supersedes can land any more.
    ConnectionRefused, Gone, ProtocolBroken or OSError otherwise."""
    data = wire.encode_hello(hello)
    sock.sendall(wire.LENGTH.pack(len(data)) + data)
    (length,) = wire.LENGTH.unpack(wire.recv_exact(sock, wire.LENGTH.size))
    if length > wire.MAX_HELLO_BYTES:
        raise ProtocolBroken(f"welcome of {length} bytes")
    wire.decode_welcome(bytes(wire.recv_exact(sock, length)))
    sock.settimeout(None)
