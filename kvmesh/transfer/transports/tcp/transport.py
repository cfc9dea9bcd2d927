"""The tcp transport: several streams a rail, IPv4 or IPv6. `path` is the opener, `server` the acceptor.

With `tcp_nics` it listens on each of them, binds each connection's source to one, and pairs them with the peer's
(`nics`). What was on a NIC that fell silent is settled over another one: the greeting there supersedes the
connections here, as the acceptor keeps one table for all of its sockets.
"""

from __future__ import annotations

import socket
from contextlib import suppress

from kvmesh.errors import TransferError
from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.segment import LocalRegion, NicInfo, RegionInfo, SegmentDescriptor, network_id
from kvmesh.transfer.transports import wire
from kvmesh.transfer.transports.base import FrameKind, FrameLimits, Rail, TransportHost
from kvmesh.transfer.transports.dialing import DialingTransport
from kvmesh.transfer.transports.serving import AcceptingServer
from kvmesh.transfer.transports.tcp import nics as tcp_nics
from kvmesh.transfer.transports.tcp.dial import TcpRoute, nic_routes, numeric, plain_routes
from kvmesh.transfer.transports.tcp.nics import Address, LinkWatch, PeerNic, TcpNic, family
from kvmesh.transfer.transports.tcp.path import TcpPath
from kvmesh.transfer.transports.tcp.server import TcpAccepted
from kvmesh.transfer.transports.tls import TlsIdentity
from kvmesh.transfer.transports.wire import ConnectionRefused

_FRAME_BYTES = 4 << 20  # of 1, 2, 4 and 8 MiB the smallest beyond which a GB costs hardly less CPU
_FRAMES_PER_STREAM = 3


class TcpTransport(DialingTransport):
    """Reaches every peer whose descriptor has a tcp endpoint."""

    name = "tcp"

    def __init__(self, host: TransportHost, config: EngineConfig) -> None:
        super().__init__(host, config)
        frame_bytes = max(_FRAME_BYTES, config.tcp_slice_bytes)
        frames = _FRAMES_PER_STREAM * config.tcp_streams
        self.limits = FrameLimits(config.tcp_slice_bytes, frame_bytes, wire.MAX_PARTS, frames)
        self.identity: TlsIdentity | None = None  # none: bytes go in plain
        if config.tls_cert:
            self.identity = TlsIdentity(config.tls_cert, config.tls_key, config.tls_ca, config.tls_server_name)
        self._port = 0
        self._nics: dict[str, TcpNic] = {}
        self._endpoints: dict[str, str] = {}  # "nic:NAME" → where it listens
        self._own: frozenset[tcp_nics.IpAddress] = frozenset()
        self._watch: LinkWatch | None = None
        self._links_down: set[int] = set()
        self._failing: set[tuple[str, Rail]] = set()  # rails whose last attempt to connect failed

    # ── listening ─────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        config = self.config
        try:
            known = tcp_nics.host_addresses() if config.tcp_nics or config.nics else []
        except OSError as err:
            raise TransferError(f"tcp cannot list this host's addresses: {err}", field="tcp_nics") from err
        nics = tcp_nics.resolve(config.tcp_nics or _among(config.nics, known), known)
        if not nics:
            self._listen([self._bind_host()])
            return
        self._own = frozenset(address.ip for address in known)
        self._nics = {nic.name: nic for nic in nics}
        socks: list[socket.socket] = []
        try:
            for nic in nics:
                bound = [(address, self._bind(address)) for address in nic.addresses]
                socks += [sock for _, sock in bound]
                listening = [(address, sock.getsockname()[1]) for address, sock in bound]
                self._endpoints[f"nic:{nic.name}"] = tcp_nics.encode_nic(listening)
        except TransferError:
            for sock in socks:
                sock.close()
            raise
        self._listen(socks)
        with suppress(OSError):  # without it a link that goes down is found out by silence
            self._watch = LinkWatch(self._link_changed)
            self._watch.start()

    def _bind_host(self) -> socket.socket:
        config = self.config
        try:
            found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            return _bound(found[0][0], found[0][4])
        except OSError as err:
            raise TransferError(
                f"tcp cannot listen on {config.host!r} port {config.port}: {err}", field="host"
            ) from err

    def _bind(self, address: Address) -> socket.socket:
        try:
            return _bound(family(address.ip), address.sockaddr(self.config.port))
        except OSError as err:
            raise TransferError(
                f"tcp cannot listen on {address.ip} ({address.interface}) port {self.config.port}: {err}",
                field="tcp_nics",
            ) from err

    def _listen(self, socks: list[socket.socket]) -> None:
        server = AcceptingServer("tcp", self.host, socks[0], self._accept, self.config.connect_timeout_s)
        for sock in socks[1:]:
            server.also(sock)
        try:
            self._port = socks[0].getsockname()[1]
            server.start()
        except OSError as err:
            for sock in socks:
                sock.close()
            raise TransferError(f"tcp cannot listen: {err}", field="host") from err
        self._server = server

    def _accept(self, server: AcceptingServer, sock: socket.socket) -> TcpAccepted:
        return TcpAccepted(server, sock, self.config, self.identity, many_nics=bool(self._nics))

    def endpoint(self) -> dict[str, str]:
        host = self.config.advertise_host
        if self._nics:
            first = next(iter(self._nics.values())).addresses[0]
            return {"host": host or str(first.ip), "port": str(self._port), "network": network_id()} | self._endpoints
        return {"host": host or self.config.host, "port": str(self._port), "network": network_id()}

    # ── NICs ──────────────────────────────────────────────────────────────────────────────────────

    def nics(self) -> tuple[NicInfo, ...]:
        return tuple(
            NicInfo("tcp", nic.name, str(nic.addresses[0].ip), _sysfs(nic, "device/numa_node"), _gbps(nic))
            for nic in self._nics.values()
        )

    def reaches(self, descriptor: SegmentDescriptor) -> bool:
        return "tcp" in descriptor.endpoints and bool(self.rails(descriptor))

    def rails(self, descriptor: SegmentDescriptor) -> tuple[Rail, ...]:
        """Returns pairs of NICs of one address family. Those that share a subnet are direct; a local NIC that shares
        none with the peer (routed networks, link-local addresses) is paired with the remote one of equal rank."""
        if not self._nics:
            return (Rail(self),)
        far = _far_nics(descriptor)
        if not far:
            return (Rail(self),)
        near: list[Rail] = []
        detours: list[Rail] = []
        for rank, mine in enumerate(self._nics.values()):
            its = [other for other in far if tcp_nics.routes(mine, other)]
            joined = [other for other in its if tcp_nics.straight(mine, other)]
            joined = joined or [its[rank % len(its)]] if its else []
            for other in its:
                detour = other not in joined
                (detours if detour else near).append(Rail(self, mine.name, other.name, detour))
        return (*near, *detours)

    def ways(self, descriptor: SegmentDescriptor, rail: Rail) -> list[TcpRoute]:
        """Returns the routes to try, in order, to connect over this rail. Raises ConnectionRefused or OSError when
        there is none."""
        endpoint = descriptor.endpoints["tcp"]
        mine = self._nics.get(rail.local)
        if mine is None:
            return plain_routes(endpoint)
        try:
            far = _far_nics(descriptor)
        except TransferError as err:
            raise ConnectionRefused(str(err), retry=False) from err
        for other in far:
            if other.name == rail.remote:
                return nic_routes(mine, other, self._own)
        raise ConnectionRefused(f"{descriptor.name} has no NIC {rail.remote!r}", retry=False)

    def others(self, descriptor: SegmentDescriptor, rail: Rail) -> list[Rail]:
        """Returns the other rails to this peer, the more promising first."""
        rails = [other for other in self.rails(descriptor) if other != rail]

        def doubt(other: Rail) -> tuple[bool, bool, bool]:
            away = other.local == rail.local or other.remote == rail.remote
            return self._link_down(other), (descriptor.name, other) in self._failing, away

        return sorted(rails, key=doubt)

    def tried(self, segment: str, rail: Rail, *, connected: bool) -> None:
        with self._lock:
            (self._failing.discard if connected else self._failing.add)((segment, rail))

    def other_way(self, descriptor: SegmentDescriptor, rail: Rail) -> bool:
        """Says whether another rail is likely to work, so that this one need not be tried for long."""
        return any(
            not self._link_down(other) and (descriptor.name, other) not in self._failing
            for other in self.others(descriptor, rail)
        )

    def _link_down(self, rail: Rail) -> bool:
        return rail.local in self._nics and self._nics[rail.local].addresses[0].index in self._links_down

    def _link_changed(self, index: int, up: bool) -> None:
        with self._lock:
            (self._links_down.discard if up else self._links_down.add)(index)
            paths = list(self._paths.items())
        for (_, rail), path in paths if not up else ():
            mine = self._nics.get(rail.local)
            if mine is not None and mine.addresses[0].index == index and isinstance(path, TcpPath):
                path.cut(f"{mine.interface} is down")

    # ── frames ────────────────────────────────────────────────────────────────────────────────────

    def carries(self, kind: FrameKind, local: LocalRegion, remote: RegionInfo) -> bool:
        return True

    def new_path(self, descriptor: SegmentDescriptor, rail: Rail) -> TcpPath:
        return TcpPath(self, descriptor, rail)

    def forget(self, segment: str, cause: str, rail: Rail | None = None) -> None:
        super().forget(segment, cause, rail)
        if rail is None:
            with self._lock:
                self._failing = {key for key in self._failing if key[0] != segment}

    def close(self, timeout_s: float) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        super().close(timeout_s)


def _among(names: tuple[str, ...], known: list[Address]) -> tuple[str, ...]:
    """Returns those names of EngineConfig.nics that are tcp's."""
    own = {address.interface for address in known} | {str(address.ip) for address in known}
    return tuple(name for name in names if name in own)


def _far_nics(descriptor: SegmentDescriptor) -> tuple[PeerNic, ...]:
    endpoint = descriptor.endpoints.get("tcp", {})
    one = numeric(endpoint)
    return tcp_nics.decode_nics(endpoint) or ((one,) if one is not None else ())


def _bound(family: int, address: object) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)  # type: ignore[arg-type]
    except OSError:
        sock.close()
        raise
    return sock


def _sysfs(nic: TcpNic, name: str) -> int:
    try:
        with open(f"/sys/class/net/{nic.interface}/{name}") as file:
            return int(file.read())
    except (OSError, ValueError):
        return -1


def _gbps(nic: TcpNic) -> float:
    return max(0, _sysfs(nic, "speed")) / 1000
