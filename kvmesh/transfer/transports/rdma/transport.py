"""The rdma transport: every active port of this host, every peer that says which ports it has."""

from __future__ import annotations

import logging
import socket
import threading
import time
from functools import partial

from kvmesh.errors import TransferError
from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.segment import LocalRegion, NicInfo, RegionInfo, SegmentDescriptor
from kvmesh.transfer.transports.base import Frame, FrameKind, FrameLimits, Rail, Transport, TransportHost
from kvmesh.transfer.transports.dialing import begin, conn_ids
from kvmesh.transfer.transports.rdma import gids, library
from kvmesh.transfer.transports.rdma.device import RdmaNic
from kvmesh.transfer.transports.rdma.gids import Gid, Pair
from kvmesh.transfer.transports.rdma.path import RdmaPath
from kvmesh.transfer.transports.rdma.server import RdmaAccepted, fence_peer
from kvmesh.transfer.transports.serving import AcceptingServer

log = logging.getLogger(__name__)

_FRAME_SLICES = 16  # a frame is one chain: its Python is shared by so many work requests ...
_FRAME_BYTES = 16 << 20  # ... but what is sent again when a rail fails, and what others wait for, stays bounded
_FRAMES = 8  # on one rail
_PARTS = 128


class RdmaTransport(Transport):
    """One-sided writes and reads; the package's docstring describes the parts."""

    name = "rdma"
    device_memory = True

    def __init__(self, host: TransportHost, config: EngineConfig) -> None:
        self.host = host
        self.config = config
        self.conn_ids = conn_ids()
        parts = min(_PARTS, config.rdma_queue_depth)
        slice_bytes = config.rdma_slice_bytes
        frame_bytes = min(max(_FRAME_SLICES * slice_bytes, 1 << 20), max(_FRAME_BYTES, slice_bytes))
        self.limits = FrameLimits(slice_bytes, frame_bytes, parts, _FRAMES)
        self.own_nics: tuple[RdmaNic, ...] = ()
        self._by_name: dict[str, RdmaNic] = {}
        self._nics_lock = threading.Lock()  # which NICs there are, and that each has every region
        self._retired: list[RdmaNic] = []  # failed; closed at the end
        self._server: AcceptingServer | None = None
        self._port = 0
        self._lock = threading.Lock()
        self._paths: dict[str, RdmaPath] = {}
        self._threads: set[threading.Thread] = set()
        self._closed = False

    # ── life ──────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        loaded = library.load()
        opened: list[RdmaNic] = []
        try:
            for device, port in self._ports():
                opened.append(RdmaNic(loaded, device, port, self.config))
            self._listen()
        except BaseException:
            for nic in opened:
                nic.close(self.config.close_timeout_s)
            raise
        self.own_nics = tuple(opened)
        self._by_name = {nic.name: nic for nic in opened}
        for nic in opened:
            nic.start()

    def _ports(self) -> list[tuple[str, int]]:
        """Returns the (device, port) pairs that the configuration names, or all active ones. Raises TransferError when
        there is none."""
        known = library.devices()
        if not known:
            raise TransferError("rdma: this host has no RDMA device (`ibv_devices` lists none)", field="transports")
        wanted = [name for name in self.config.nics if name in known]
        if self.config.nics and not wanted:
            raise TransferError(
                f"nics={','.join(self.config.nics)!r}: none is an RDMA device; there are {', '.join(known)}",
                field="nics",
            )
        found = []
        for name in wanted or known:
            states = {
                int(path.parent.name): path.read_text()
                for path in (gids.SYS_INFINIBAND / name / "ports").glob("*/state")
            }
            active = [port for port, state in sorted(states.items()) if state.startswith("4:")]
            if active:
                found.append((name, active[0]))
            elif wanted:
                raise TransferError(f"nics={name!r}: no port of it is active", field="nics")
        if not found:
            raise TransferError(f"rdma: no port is active of {', '.join(known)}", field="nics")
        return found

    def _listen(self) -> None:
        config = self.config
        try:
            family, kind, proto, _, address = socket.getaddrinfo(
                config.host, config.rdma_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            sock = socket.socket(family, kind, proto)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(address)
                accept = partial(RdmaAccepted, transport=self)
                server = AcceptingServer("rdma", self.host, sock, accept, config.connect_timeout_s)
                server.start()
            except OSError:
                sock.close()
                raise
        except OSError as err:
            raise TransferError(
                f"rdma cannot listen on {config.host!r} port {config.rdma_port}: {err}", field="host"
            ) from err
        self._server = server
        self._port = sock.getsockname()[1]

    def close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            paths, self._paths = list(self._paths.values()), {}
            threads = list(self._threads)
        for path in paths:
            path.close("engine closed")
        if self._server is not None:
            self._server.close(timeout_s)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        with self._nics_lock:
            nics = [*self.own_nics, *self._retired]
            self.own_nics, self._retired = (), []
        for nic in nics:
            nic.close(max(0.1, deadline - time.monotonic()))

    def spawn(self, thread: threading.Thread) -> None:
        """Starts a thread that `close` waits for. Raises OSError when the system allows no more threads."""
        with self._lock:
            begin(thread)
            self._threads = {t for t in self._threads if t.is_alive()} | {thread}

    # ── who and where ─────────────────────────────────────────────────────────────────────────────

    def nic(self, name: str) -> RdmaNic:
        return self._by_name[name]

    def living_nic(self, name: str) -> RdmaNic | None:
        """Returns the NIC of this name, or None. A device that failed or was removed is opened anew once it is back."""
        with self._nics_lock:
            nic = self._by_name.get(name)
            if nic is None or not nic.cause or self._closed:
                return nic
            try:
                fresh = RdmaNic(library.load(), name, nic.port, self.config)
                if not fresh.why_down():
                    for region in self.host.segment.regions:
                        fresh.register(region)
            except TransferError as err:
                log.info("rdma: %s is not back: %s", name, err)
                return nic
            fresh.start()
            self.own_nics = tuple(fresh if other is nic else other for other in self.own_nics)
            self._by_name[name] = fresh
            self._retired.append(nic)
            log.warning("rdma: %s is back", name)
            return fresh

    def nics(self) -> tuple[NicInfo, ...]:
        return tuple(
            NicInfo("rdma", nic.name, str(nic.gids[0].address), nic.numa(), nic.gbps()) for nic in self.own_nics
        )

    def endpoint(self) -> dict[str, str]:
        return {
            "host": self.config.advertise_host or self.config.host,
            "port": str(self._port),
            "gids": gids.encode({nic.name: nic.gids for nic in self.own_nics}),
        }

    def reaches(self, descriptor: SegmentDescriptor) -> bool:
        return "rdma" in descriptor.endpoints and bool(self._pairs(descriptor))

    def rails(self, descriptor: SegmentDescriptor) -> tuple[Rail, ...]:
        return tuple(Rail(self, pair.local, pair.remote) for pair in self._pairs(descriptor))

    def _pairs(self, descriptor: SegmentDescriptor) -> list[Pair]:
        local: dict[str, list[Gid]] = {nic.name: nic.gids for nic in self.own_nics}
        try:
            remote = gids.decode(descriptor.endpoints.get("rdma", {}).get("gids", ""))
        except TransferError:
            return []
        if self.config.rdma_pairs:
            return gids.given_pairs(self.config.rdma_pairs, local, remote)
        return gids.pairs(local, remote, gids.read_networks())

    def carries(self, kind: FrameKind, local: LocalRegion, remote: RegionInfo) -> bool:
        return all(nic.cause or nic.registration(local.base) is not None for nic in self.own_nics)

    # ── frames ────────────────────────────────────────────────────────────────────────────────────

    def post(self, frame: Frame) -> None:
        segment = frame.link.name
        with self._lock:
            # A closed link's name may be open again, as that of another process: its frames must not get there.
            path = None if frame.link.closed else self._paths.get(segment)
            descriptor = frame.link.descriptor
            if not (self._closed or frame.link.closed) and (path is None or path.descriptor is not descriptor):
                pairs = {Rail(frame.rail.transport, p.local, p.remote): p for p in self._pairs(descriptor)}
                if path is None:
                    path = self._paths[segment] = RdmaPath(self, descriptor, pairs)
                elif "rdma" in descriptor.endpoints:
                    path.renew(descriptor, pairs)
        if path is None or not path.take(frame):
            frame.lost(frame.link.closed or "closed", settled=True)

    def recall(self, frame: Frame) -> bool:
        path = self._paths.get(frame.link.name)
        return path is not None and path.recall(frame)

    def expire(self, frame: Frame, idle_s: float) -> None:
        path = self._paths.get(frame.link.name)
        if path is not None:
            path.expire(frame, idle_s)

    def forget(self, segment: str, cause: str, rail: Rail | None = None) -> None:
        if rail is not None:
            path = self._paths.get(segment)
            if path is not None:
                path.forget(rail, cause)
            return
        with self._lock:
            path = self._paths.pop(segment, None)
        if path is not None:
            path.close(cause)

    def idle(self, segment: str, rail: Rail) -> bool:
        path = self._paths.get(segment)
        return path is None or path.idle(rail)

    # ── memory and the fence ──────────────────────────────────────────────────────────────────────

    def registered(self, region: LocalRegion) -> None:
        """Registers a region with every NIC. Raises TransferError when one cannot take it; then none keeps it."""
        done: list[RdmaNic] = []
        with self._nics_lock:
            try:
                for nic in self.own_nics:
                    if not nic.cause:
                        nic.register(region)
                        done.append(nic)
            except TransferError:
                for nic in done:
                    nic.unregister(region)
                raise

    def unregistered(self, region: LocalRegion) -> None:
        with self._nics_lock:
            for nic in self.own_nics:
                nic.unregister(region)

    def fence(self, peer: str, epoch: int) -> None:
        if self._server is not None:
            fence_peer(self._server, peer, epoch, self.config.fence_grace_s)
