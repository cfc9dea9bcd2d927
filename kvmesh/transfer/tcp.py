"""The tcp transport: several streams a peer, IPv4 or IPv6. `tcp_path` is the opener, `tcp_server` the acceptor."""

from __future__ import annotations

import socket

from kvmesh.rpc.errors import TransferError
from kvmesh.transfer import wire
from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.dialing import DialingTransport
from kvmesh.transfer.segment import LocalRegion, RegionInfo, SegmentDescriptor
from kvmesh.transfer.serving import Server
from kvmesh.transfer.tcp_path import TcpPath
from kvmesh.transfer.tcp_server import TcpAccepted
from kvmesh.transfer.transport import FrameLimits, Kind, Rail, TransportHost

_FRAME_BYTES = 1 << 20
_FRAMES_PER_STREAM = 4


class TcpTransport(DialingTransport):
    """Reaches every peer that says where it listens."""

    name = "tcp"

    def __init__(self, host: TransportHost, config: EngineConfig) -> None:
        super().__init__(host, config)
        frame_bytes = max(_FRAME_BYTES, config.tcp_slice_bytes)
        frames = _FRAMES_PER_STREAM * config.tcp_streams
        self.limits = FrameLimits(config.tcp_slice_bytes, frame_bytes, wire.MAX_PARTS, frames)
        self._port = 0

    def start(self) -> None:
        config = self.config
        try:
            family, kind, proto, _, address = socket.getaddrinfo(
                config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            sock = socket.socket(family, kind, proto)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(address)
                server = Server("tcp", self.host, sock, TcpAccepted, config.connect_timeout_s)
                server.start()
            except OSError:
                sock.close()
                raise
        except OSError as err:
            raise TransferError(
                f"tcp cannot listen on {config.host!r} port {config.port}: {err}", field="host"
            ) from err
        self._server = server
        self._port = sock.getsockname()[1]

    def endpoint(self) -> dict[str, str]:
        return {"host": self.config.advertise_host or self.config.host, "port": str(self._port)}

    def reaches(self, descriptor: SegmentDescriptor) -> bool:
        return "tcp" in descriptor.endpoints

    def carries(self, kind: Kind, local: LocalRegion, remote: RegionInfo) -> bool:
        return True

    def new_path(self, descriptor: SegmentDescriptor, rail: Rail) -> TcpPath:
        return TcpPath(self, descriptor)
