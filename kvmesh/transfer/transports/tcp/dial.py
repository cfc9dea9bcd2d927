"""How a tcp connection is made: source, target, socket options, the greeting."""

from __future__ import annotations

import errno
import ipaddress
import math
import socket
import ssl
import struct
from contextlib import suppress
from dataclasses import dataclass

from kvmesh.rpc.authorisation import why_no_kv
from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.transports import tls, wire
from kvmesh.transfer.transports.tcp.nics import Address, IpAddress, PeerNic, TcpNic, family, port_of, routes, sockaddr
from kvmesh.transfer.transports.tls import ByteStream, TlsIdentity, TlsSocket
from kvmesh.transfer.transports.wire import ConnectionRefused, Hello, ProtocolBroken

OWN_HOST_BYTES = 512 << 10
IP_BIND_ADDRESS_NO_PORT = 24  # <linux/in.h>: the port is chosen at connect, so that one may serve many targets
# The way, not the process at its end, is the trouble: another NIC may do.
SILENCE = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL})


@dataclass(frozen=True, slots=True)
class TcpRoute:
    """One route to try. Without `source` the kernel chooses the route; `device` is the only interface to leave by."""

    family: int
    target: tuple[str, int] | tuple[str, int, int, int]
    source: Address | None = None
    device: str = ""


def plain_routes(endpoint: dict[str, str]) -> list[TcpRoute]:
    """Returns the route to the peer's one address, which the kernel chooses. Raises OSError when the name is not found,
    ConnectionRefused when the endpoint is malformed."""
    try:
        found = socket.getaddrinfo(endpoint["host"], port_of(endpoint["port"]), type=socket.SOCK_STREAM)
    except (KeyError, ValueError) as err:
        raise ConnectionRefused(f"bad tcp endpoint {endpoint!r}", retry=False) from err
    except OSError as err:
        raise OSError(f"host {endpoint['host']!r}: {err.strerror}") from err
    return [TcpRoute(found[0][0], found[0][4])]  # type: ignore[arg-type]


def at(route: TcpRoute, err: OSError) -> OSError:
    """Returns the error with the address that was tried."""
    host, port = route.target[:2]
    why = f"{err.strerror or err}: {f'[{host}]' if ':' in host else host}:{port}"
    return OSError(err.errno, why) if err.errno else OSError(why)


def numeric(endpoint: dict[str, str]) -> PeerNic | None:
    """Returns the peer's one address as a NIC without a name, or None when the endpoint holds a host name or no
    address."""
    try:
        return PeerNic("", ((ipaddress.ip_address(endpoint["host"]), port_of(endpoint["port"])),))
    except (KeyError, ValueError):
        return None


def nic_routes(mine: TcpNic, its: PeerNic, own: frozenset[IpAddress]) -> list[TcpRoute]:
    """Returns the routes between two NICs. `own` are all addresses of this host; traffic to them never leaves by an
    interface."""
    found = []
    for source, ip, port in routes(mine, its):
        device = "" if ip in own or ip.is_loopback else mine.interface
        found.append(TcpRoute(family(ip), sockaddr(ip, port, source.index), source, device))
    return found


def tune(sock: socket.socket, config: EngineConfig, *, many_nics: bool) -> None:
    """Sets the options of a connection, at either end. With several NICs a silent peer is given up after
    `tcp_user_timeout_s`: unacknowledged data by TCP_USER_TIMEOUT, an idle connection by keep-alive probes, which that
    option bounds too. Their unit is a second, so an opener that waits for an answer sends a PING."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if many_nics:
        idle_s = max(1, math.ceil(config.tcp_user_timeout_s / 2))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(config.tcp_user_timeout_s * 1000))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)


def size_buffers(sock: socket.socket, config: EngineConfig) -> None:
    """Sets the buffers of a connected socket, at either end. Over a network they should hold bandwidth times delay,
    which the kernel finds; on one host there is no delay, and what stays in the cache is copied faster."""
    nbytes = config.tcp_socket_bytes
    mine, its = sock.getsockname()[0], sock.getpeername()[0]
    if not nbytes and (mine == its or ipaddress.ip_address(its.partition("%")[0]).is_loopback):
        nbytes = OWN_HOST_BYTES
    if nbytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, nbytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, nbytes)


def forget_unsent(sock: ByteStream) -> None:
    """Makes `close` drop what the kernel has not sent. It would otherwise go on sending for minutes, with MSG_ZEROCOPY
    from memory that may be reused by then."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))


def prepared(route: TcpRoute, config: EngineConfig) -> socket.socket:
    """Returns a socket that is bound to its source and not connected yet."""
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


def secured(
    sock: socket.socket, identity: TlsIdentity | None, endpoint: dict[str, str], timeout_s: float
) -> ByteStream:
    """Returns the connection over TLS where this side has an identity. The peer's certificate must name the host of its
    endpoint, whichever of its NICs was dialled. Raises ConnectionRefused, which names the setting, or OSError."""
    if identity is None:
        return sock
    host = endpoint.get("host", "")
    try:
        return tls.opened(sock, identity, host, timeout_s)
    except tls.NotTls:
        why = f"{host} speaks no TLS over tcp, and this side does: {tls.SETTING}"
    except tls.TlsRefused as err:
        why = f"TLS with {host}: {err}"
    except ConnectionResetError as err:
        raise OSError(f"{err}: it may speak no TLS ({tls.SETTING}), or be going down") from None
    raise ConnectionRefused(why, retry=False)


def greet(sock: ByteStream, hello: Hello) -> None:
    """Sends the greeting and returns when the acceptor has taken it: nothing that `hello` supersedes can land any more.
    Raises ConnectionRefused, Gone, ProtocolBroken or OSError otherwise."""
    if isinstance(sock, TlsSocket) and (why := why_no_kv(sock.identities, hello.segment)):
        raise ConnectionRefused(f"TLS with {hello.segment}: {why}", retry=False)
    data = wire.encode_hello(hello)
    try:
        sock.sendall(wire.LENGTH.pack(len(data)) + data)
        (length,) = wire.LENGTH.unpack(wire.recv_exact(sock, wire.LENGTH.size))
        if length > wire.MAX_HELLO_BYTES:
            raise ProtocolBroken(f"welcome of {length} bytes")
        wire.decode_welcome(bytes(wire.recv_exact(sock, length)))
    except ssl.SSLError as err:  # the acceptor judges this side's certificate after the opener's part of the handshake
        raise ConnectionRefused(f"TLS with {hello.segment}: {tls.explained(err)}", retry=False) from None
    sock.settimeout(None)
