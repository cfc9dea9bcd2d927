"""The shm transport: it moves bytes between two processes of one machine with one copy and without a socket.

    WRITE   opener ── (source offset, target offset, length) × n ──▶ copier of the target: admit, copy, leave
                   ◀───────────────── answer ──────────────────────
    READ    opener ── WANT region ──▶ ◀── its descriptor (SCM_RIGHTS) ──   then copies by itself from a read-only map

The socket is AF_UNIX SEQPACKET: one packet is one frame of up to 512 slices. `path` is the opener, `server`
the copier.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Sequence

from kvmesh.errors import TransferError
from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.memory import Mapping
from kvmesh.transfer.segment import LocalRegion, RegionInfo, SegmentDescriptor, machine_id, network_id
from kvmesh.transfer.transports import wire
from kvmesh.transfer.transports.base import FrameKind, FrameLimits, Rail, TransportHost
from kvmesh.transfer.transports.dialing import DialingTransport
from kvmesh.transfer.transports.serving import AcceptingServer
from kvmesh.transfer.transports.shm.copy import Copiers, by_cores
from kvmesh.transfer.transports.shm.path import ShmPath, raw_address
from kvmesh.transfer.transports.shm.server import ShmAccepted

_FRAME_BYTES = 16 << 20  # an answer costs 50 µs where it wakes a core of a VM: as long as half a MiB takes
_INFLIGHT_FRAMES = 3  # one under the copier, one waiting, one being answered


class ShmTransport(DialingTransport):
    """Reaches engines of the same machine (one boot, one user namespace) whose socket can be reached. Memory that is
    not a memfd can only be the target of writes."""

    name = "shm"

    def __init__(self, host: TransportHost, config: EngineConfig) -> None:
        super().__init__(host, config)
        frame_bytes = max(_FRAME_BYTES, config.shm_slice_bytes)
        self.limits = FrameLimits(config.shm_slice_bytes, frame_bytes, wire.MAX_PARTS, _INFLIGHT_FRAMES)
        self._machine = machine_id()
        self._network = network_id()
        self._address = ""
        self.copiers = Copiers(config.shm_copy_threads or by_cores())

    def start(self) -> None:
        label = f"kvmesh-{os.getpid()}-{secrets.token_hex(8)}"
        self._address = os.path.join(self.config.shm_dir, label) if self.config.shm_dir else "@" + label
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.bind(raw_address(self._address))
            server = AcceptingServer("shm", self.host, sock, self._accept, self.config.connect_timeout_s)
            server.start()
        except OSError as err:
            sock.close()
            raise TransferError(f"shm cannot listen on {self._address!r}: {err}", field="shm_dir") from err
        self._server = server

    def _accept(self, server: AcceptingServer, sock: socket.socket) -> ShmAccepted:
        return ShmAccepted(server, sock, self.copiers)

    def endpoint(self) -> dict[str, str]:
        return {"path": self._address, "network": self._network}

    def reaches(self, descriptor: SegmentDescriptor) -> bool:
        """Says whether connecting is worth a try. An abstract name is found only in its own network namespace, so
        another container's would not be; a path may be found across mount namespaces, so it is tried."""
        endpoint = descriptor.endpoints.get("shm")
        if endpoint is None or descriptor.machine != self._machine:
            return False
        return not endpoint.get("path", "").startswith("@") or endpoint.get("network") == self._network

    def carries(self, kind: FrameKind, local: LocalRegion, remote: RegionInfo) -> bool:
        if kind is FrameKind.READ:
            return remote.shared
        return kind is FrameKind.CHECKSUM or local.fd >= 0

    def new_path(self, descriptor: SegmentDescriptor, rail: Rail) -> ShmPath:
        return ShmPath(self, descriptor)

    def mapped(self, segment: str, rail: Rail, offset: int, nbytes: int) -> tuple[Mapping, int] | None:
        """Returns what the function `mapped` does, for one rail."""
        path = self._paths.get((segment, rail))
        return path.mapped(offset, nbytes) if isinstance(path, ShmPath) else None

    def unregistered(self, region: LocalRegion) -> None:
        """Has peers drop their maps of the region, so that its memory can be freed."""
        with self._lock:
            paths = list(self._paths.values())
        for path in paths:
            if isinstance(path, ShmPath):
                path.withdraw(region.base)
        for connection in self._server.connections() if self._server is not None else ():
            if isinstance(connection, ShmAccepted):
                connection.withdraw(region.base)

    def close(self, timeout_s: float) -> None:
        super().close(timeout_s)
        self.copiers.close(timeout_s)
        if self.config.shm_dir:
            with contextlib.suppress(OSError):
                os.unlink(self._address)


def mapped(rails: Sequence[Rail], segment: str, offset: int, nbytes: int) -> tuple[Mapping, int] | None:
    """Returns a read-only map of the peer's memory and the address in it of `offset`, or None while nothing of that
    region was read over shm. The map stays valid as long as it is held, also after the segment is closed. Nothing tells
    when the peer writes there."""
    for rail in rails:
        if isinstance(rail.transport, ShmTransport):
            return rail.transport.mapped(segment, rail, offset, nbytes)
    return None
