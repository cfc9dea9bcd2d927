"""The network interfaces that tcp uses: their addresses, which pairs belong together, and their links as they change.

Linux says all of it over netlink (rtnetlink(7)): a dump of addresses, and a message when a link changes. A NIC is an
interface with at most one address a family; an interface of which two IPv4 addresses are named counts as two NICs.

    "eth1"                     its first IPv4 and its first IPv6 address (a link-local one only when it has no other)
    "10.0.0.7", "fe80::1%eth1" that address; the NIC is called by its interface all the same
"""

from __future__ import annotations

import ipaddress
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvmesh.errors import TransferError

_HEAD = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, seq, pid
_IFADDR = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix length, flags, scope, index
_IFINFO = struct.Struct("=BxHiII")  # ifinfomsg: family, type, index, flags, change
_ATTR = struct.Struct("=HH")
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NEWLINK, _DELLINK, _NEWADDR, _GETADDR = 16, 17, 20, 22
_REQUEST_DUMP = 0x301
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_IFA_UNUSABLE = 0x01 | 0x08 | 0x20 | 0x40  # temporary, duplicate detection failed, deprecated, not over yet
_GROUP_LINK = 1
_IFF_UP, _IFF_RUNNING = 0x1, 0x40

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Address:
    """An address of this host. `index` is its interface's number, which is also the scope of a link-local address."""

    ip: IpAddress
    prefix: int
    interface: str
    index: int

    def near(self, other: IpAddress) -> bool:
        return other in ipaddress.ip_network((self.ip, self.prefix), strict=False)

    def sockaddr(self, port: int) -> tuple[str, int] | tuple[str, int, int, int]:
        return sockaddr(self.ip, port, self.index)


@dataclass(frozen=True, slots=True)
class TcpNic:
    name: str
    interface: str
    addresses: tuple[Address, ...]


@dataclass(frozen=True, slots=True)
class PeerNic:
    """A peer's NIC and the addresses to dial, as its endpoint names them."""

    name: str
    addresses: tuple[tuple[IpAddress, int], ...]  # and ports


def family(ip: IpAddress) -> socket.AddressFamily:
    return socket.AF_INET if ip.version == 4 else socket.AF_INET6


def sockaddr(ip: IpAddress, port: int, index: int) -> tuple[str, int] | tuple[str, int, int, int]:
    if ip.version == 4:
        return str(ip), port
    return str(ip), port, 0, index if ip.is_link_local else 0


# ── this host ─────────────────────────────────────────────────────────────────────────────────────


def host_addresses() -> list[Address]:
    """Returns all usable addresses of this network namespace, in the kernel's order. Raises OSError where netlink is
    not available."""
    found: list[Address] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as sock:
        sock.settimeout(5.0)
        ask = _IFADDR.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        sock.send(_HEAD.pack(_HEAD.size + len(ask), _GETADDR, _REQUEST_DUMP, 1, 0) + ask)
        while True:
            for kind, body in _messages(sock.recv(1 << 17)):
                if kind == _NLMSG_DONE:
                    return found
                if kind == _NLMSG_ERROR:
                    raise OSError(-struct.unpack_from("=i", body)[0], "netlink refused to list addresses")
                if kind == _NEWADDR and (address := _address(body)) is not None:
                    found.append(address)


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _HEAD.size <= len(data):
        length, kind, *_ = _HEAD.unpack_from(data, at)
        if length < _HEAD.size:
            return
        yield kind, data[at + _HEAD.size : at + length]
        at += (length + 3) & ~3


def _address(body: bytes) -> Address | None:
    af, prefix, flags, _, index = _IFADDR.unpack_from(body)
    if af not in (socket.AF_INET, socket.AF_INET6) or (flags & _IFA_UNUSABLE and af == socket.AF_INET6):
        return None
    attributes: dict[int, bytes] = {}
    at = _IFADDR.size
    while at + _ATTR.size <= len(body):
        length, kind = _ATTR.unpack_from(body, at)
        if length < _ATTR.size:
            break
        attributes[kind] = body[at + _ATTR.size : at + length]
        at += (length + 3) & ~3
    raw = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
    try:
        name = socket.if_indextoname(index)
    except OSError:
        return None  # it has just gone
    return None if raw is None else Address(ipaddress.ip_address(raw), prefix, name, index)


def resolve(names: Sequence[str], known: Sequence[Address]) -> tuple[TcpNic, ...]:
    """Returns the NICs of these names. Raises TransferError (field tcp_nics) for a name that is neither an address nor
    an interface with one."""
    chosen: dict[str, list[Address]] = {}
    for name in names:
        for address in _named(name, known):
            mine = chosen.setdefault(address.interface, [])
            if address not in mine:
                mine.append(address)
    nics = []
    for interface, addresses in chosen.items():
        if len({a.ip.version for a in addresses}) == len(addresses):
            nics.append(TcpNic(interface, interface, tuple(addresses)))
        else:
            nics += [TcpNic(str(a.ip), interface, (a,)) for a in addresses]
    return tuple(nics)


def _named(name: str, known: Sequence[Address]) -> list[Address]:
    try:
        ip = ipaddress.ip_address(name)
    except ValueError:
        return _of_interface(name, known)
    scope = ip.scope_id if isinstance(ip, ipaddress.IPv6Address) else None
    plain = ipaddress.ip_address(name.partition("%")[0])
    for address in known:
        if address.ip == plain and scope in (None, address.interface, str(address.index)):
            return [address]
    for address in known:  # all of 127.0.0.0/8 is this host's
        if plain.is_loopback and address.near(plain):
            return [Address(plain, address.prefix, address.interface, address.index)]
    raise TransferError(f"tcp_nics={name!r}: no interface of this host has this address", field="tcp_nics")


def _of_interface(name: str, known: Sequence[Address]) -> list[Address]:
    best: dict[int, Address] = {}
    for address in known:
        if address.interface == name:
            other = best.get(address.ip.version)
            if other is None or (other.ip.is_link_local and not address.ip.is_link_local):
                best[address.ip.version] = address
    if not best:
        names = ", ".join(dict.fromkeys(a.interface for a in known))
        raise TransferError(
            f"tcp_nics={name!r}: not an interface with an address (these have one: {names})", field="tcp_nics"
        )
    return [best[version] for version in sorted(best)]


# ── peers ─────────────────────────────────────────────────────────────────────────────────────────


def encode_nic(listening: Sequence[tuple[Address, int]]) -> str:
    """Returns one NIC's addresses and ports as text, for the endpoint's field "nic:NAME"."""
    return " ".join(f"{address.ip}@{port}" for address, port in listening)


def port_of(text: str) -> int:
    """Parses a port. Raises ValueError when it is not in 1..65535."""
    port = int(text)
    if not 0 < port < 1 << 16:
        raise ValueError(f"port {port}")
    return port


def decode_nics(endpoint: dict[str, str]) -> tuple[PeerNic, ...]:
    """Parses the NICs of an endpoint. Raises TransferError when a field is malformed."""
    nics = []
    for key, value in endpoint.items():
        if key.startswith("nic:"):
            try:
                pairs = [entry.rsplit("@", 1) for entry in value.split()]
                addresses = tuple((ipaddress.ip_address(ip), port_of(port)) for ip, port in pairs)
            except ValueError as err:
                raise TransferError(f"tcp endpoint {key}={value!r}: {err}", field="endpoints") from err
            nics.append(PeerNic(key[4:], addresses))
    return tuple(nics)


def routes(mine: TcpNic, its: PeerNic) -> list[tuple[Address, IpAddress, int]]:
    """Returns (source, target address, port) for every pair of one address family, pairs of one subnet first."""
    pairs = [(a, ip, port) for a in mine.addresses for ip, port in its.addresses if a.ip.version == ip.version]
    return sorted(pairs, key=lambda pair: (not pair[0].near(pair[1]), pair[1].is_link_local))


def straight(mine: TcpNic, its: PeerNic) -> bool:
    """Says whether the two NICs share a subnet. Link-local addresses do not count, since all of them seem to."""
    return any(a.near(ip) and not ip.is_link_local for a, ip, _ in routes(mine, its))


# ── links ─────────────────────────────────────────────────────────────────────────────────────────


class LinkWatch:
    """A thread that calls `changed(interface index, whether it can carry packets)` whenever a link changes."""

    def __init__(self, changed: Callable[[int, bool], None]) -> None:
        """Raises OSError where netlink is not available."""
        self._changed = changed
        self._sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._wake, self._woken = socket.socketpair()
        self._sock.bind((0, _GROUP_LINK))
        self._thread = threading.Thread(target=self._run, name="kvmesh-tcp-links", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._wake.close()
        if self._thread.ident is not None:
            self._thread.join(5.0)
        self._sock.close()
        self._woken.close()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            if any(fd == self._woken.fileno() for fd, _ in poll.poll()):
                return
            try:
                data = self._sock.recv(1 << 17, socket.MSG_DONTWAIT)
            except OSError:
                continue  # an overrun: what was lost is found out by silence
            for kind, body in _messages(data):
                if kind in (_NEWLINK, _DELLINK) and len(body) >= _IFINFO.size:
                    _, _, index, flags, _ = _IFINFO.unpack_from(body)
                    up = kind == _NEWLINK and flags & (_IFF_UP | _IFF_RUNNING) == _IFF_UP | _IFF_RUNNING
                    self._changed(index, up)
