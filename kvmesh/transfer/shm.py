"""The shm transport at the opener: two processes of one machine, one copy, no byte through a socket.

    WRITE   opener ── (source offset, target offset, length) × n ──▶ copier of the target: admit, copy, leave
                   ◀───────────────── answer ──────────────────────
    READ    opener ── WANT region ──▶ ◀── its descriptor (SCM_RIGHTS) ──   then copies by itself from a read-only map

The socket is AF_UNIX SEQPACKET: one packet is one frame of up to 512 slices. A caller's thread sends it itself, without
blocking: a small write costs the caller one system call and wakes nobody but the copier.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from itertools import count

from kvmesh.rpc.errors import TransferError
from kvmesh.transfer import wire
from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.memory import Mapping, copy_runs
from kvmesh.transfer.segment import LocalRegion, RegionInfo, SegmentDescriptor, machine_id
from kvmesh.transfer.serving import Server
from kvmesh.transfer.shm_server import PACKET_BYTES, PeerMaps, ShmAccepted, receive, send_region
from kvmesh.transfer.transport import Frame, FrameLimits, Kind, Transport, TransportHost
from kvmesh.transfer.wire import Asked, Gone, Hello, ProtocolBroken, Refused

_FRAME_BYTES = 2 << 20
_INFLIGHT_FRAMES = 8
_SEND_BUFFER_BYTES = 1 << 20


class ShmTransport(Transport):
    """Reaches engines of the same machine whose socket can be reached."""

    name = "shm"

    def __init__(self, host: TransportHost, config: EngineConfig) -> None:
        self.host = host
        self.config = config
        frame_bytes = max(_FRAME_BYTES, config.shm_slice_bytes)
        self.limits = FrameLimits(config.shm_slice_bytes, frame_bytes, wire.MAX_PARTS, _INFLIGHT_FRAMES)
        self.conn_ids = count(1)
        self._machine = machine_id()
        self._lock = threading.Lock()
        self._paths: dict[str, _Path] = {}
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._server: Server | None = None
        self._address = ""

    def start(self) -> None:
        label = f"kvmesh-{os.getpid()}-{secrets.token_hex(8)}"
        self._address = os.path.join(self.config.shm_dir, label) if self.config.shm_dir else "@" + label
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.bind(_raw(self._address))
            self._server = Server("shm", self.host, sock, ShmAccepted, self.config.connect_timeout_s)
            self._server.start()
        except OSError as err:
            sock.close()
            raise TransferError(f"shm cannot listen on {self._address!r}: {err}", field="shm_dir") from err

    def endpoint(self) -> dict[str, str]:
        return {"path": self._address}

    def reaches(self, descriptor: SegmentDescriptor) -> bool:
        return "shm" in descriptor.endpoints and descriptor.machine == self._machine

    def carries(self, kind: Kind, local: LocalRegion, remote: RegionInfo) -> bool:
        return remote.shared if kind is Kind.READ else local.fd >= 0

    def post(self, frame: Frame) -> None:
        segment = frame.lane.name
        with self._lock:
            path = self._paths.get(segment)
            if path is None and not self._closed and not frame.lane.closed:
                path = self._paths[segment] = _Path(self, frame.lane.descriptor)
        if path is None or not path.take(frame):
            frame.lost(frame.lane.closed or "closed", settled=True)

    def recall(self, frame: Frame) -> bool:
        path = self._paths.get(frame.lane.name)
        return path is not None and path.recall(frame)

    def expire(self, frame: Frame, idle_s: float) -> None:
        path = self._paths.get(frame.lane.name)
        if path is not None:
            if path.recall(frame):
                frame.lost("no connection in time", settled=True)
            else:
                path.expire(frame, idle_s)

    def forget(self, segment: str, cause: str) -> None:
        with self._lock:
            path = self._paths.pop(segment, None)
        if path is not None:
            path.close(cause)

    def idle(self, segment: str) -> bool:
        path = self._paths.get(segment)
        return path is None or path.idle()

    def spawn(self, thread: threading.Thread) -> None:
        with self._lock:
            self._threads = {t for t in self._threads if t.is_alive() or t.ident is None} | {thread}
        thread.start()

    def close(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            paths, self._paths = list(self._paths.values()), {}
        for path in paths:
            path.close("engine closed")
        if self._server is not None:
            self._server.close(timeout_s)
            if not self._address.startswith("@"):
                with contextlib.suppress(OSError):
                    os.unlink(self._address)
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


class _Path:
    """The connection to one segment. Its owner thread connects, takes answers and recovers; it lives while there is a
    connection or work that needs one. A second thread copies READs, once there is one."""

    def __init__(self, transport: ShmTransport, descriptor: SegmentDescriptor) -> None:
        self.transport = transport
        self.host = transport.host
        self.config = transport.config
        self.descriptor = descriptor
        self.changed = threading.Condition()
        self.sock: socket.socket | None = None
        self.ready = False  # greeted: frames may be sent
        self.broken = ""
        self.closed = ""
        self.backlog: deque[Frame] = deque()
        self.inflight: dict[int, Frame] = {}
        self.copies: deque[tuple[Frame, Mapping, int]] = deque()
        self.wanted: dict[int, list[Frame]] = {}  # READs by the region they wait for
        self.progress_at = 0.0
        self._seq = 0
        self._told: set[int] = set()  # own regions that the peer's copier has mapped
        self._maps = PeerMaps()
        self._stranded: list[Frame] = []
        self._supersedes: tuple[int, ...] = ()
        self._owner: threading.Thread | None = None
        self._copier: threading.Thread | None = None

    # ── called by any thread ──────────────────────────────────────────────────────────────────────

    def take(self, frame: Frame) -> bool:
        start: threading.Thread | None = None
        with self.changed:
            if self.closed:
                return False
            self.backlog.append(frame)
            if self.ready:
                self._flush()
            elif self._owner is None:
                start = self._owner = threading.Thread(target=self._run, name="kvmesh-shm", daemon=True)
        if start is not None:
            self.transport.spawn(start)
        return True

    def recall(self, frame: Frame) -> bool:
        with self.changed:
            if frame in self.backlog:
                self.backlog.remove(frame)
                return True
            for waiting in self.wanted.values():
                if frame in waiting:
                    waiting.remove(frame)
                    return True
            for entry in self.copies:
                if entry[0] is frame:
                    self.copies.remove(entry)
                    return True
        return False

    def expire(self, frame: Frame, idle_s: float) -> None:
        with self.changed:
            if frame in self.inflight.values() and time.monotonic() - self.progress_at >= idle_s:
                self._shut(f"no answer from {self.descriptor.name} over shm")

    def idle(self) -> bool:
        with self.changed:
            return not (self.backlog or self.inflight or self._stranded or self.copies or self.wanted)

    def close(self, cause: str) -> None:
        with self.changed:
            self.closed = cause
            self._shut(cause)

    # ── sending; self.changed held ────────────────────────────────────────────────────────────────

    def _shut(self, cause: str) -> None:
        self.broken = self.broken or cause
        self.ready = False
        if self.sock is not None:
            try:
                self.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # not connected
        self.changed.notify_all()

    def _flush(self) -> None:
        assert self.sock is not None, "ready without a socket"
        while self.backlog:
            frame = self.backlog[0]
            try:
                if frame.kind is Kind.READ:
                    self._start_read(self.sock, frame)
                else:
                    self._send_frame(self.sock, frame)
            except BlockingIOError:
                return  # goes on with the next answer
            except OSError as err:
                self._shut(f"send to {self.descriptor.name}: {err}")
                return
            self.backlog.popleft()

    def _send_frame(self, sock: socket.socket, frame: Frame) -> None:
        seq = self._seq + 1
        if frame.notice is not None:
            payload = frame.notice.payload
            packet = wire.HEAD.pack(wire.NOTIFY, 0, 0, 0, seq, frame.epoch, len(payload))
            packet += frame.notice.serial.to_bytes(8, "little") + payload
        else:
            local = frame.local
            if local.base not in self._told:
                send_region(sock, local.base, local.length, local.fd)
                self._told.add(local.base)
            shift = local.base - local.address
            rows = [n for _, address, offset, length in frame.parts for n in (address + shift, offset, length)]
            packet = wire.HEAD.pack(wire.WRITE, 0, 0, len(frame.parts), seq, frame.epoch, frame.nbytes)
            packet += struct.pack(f"<{len(rows)}Q", *rows)
        sock.send(packet, socket.MSG_DONTWAIT)
        self._seq = seq
        if not self.inflight:
            self.progress_at = time.monotonic()
        self.inflight[seq] = frame

    def _start_read(self, sock: socket.socket, frame: Frame) -> None:
        assert frame.group is not None, "a READ has memory"
        base = frame.group.remote.base_offset
        found = self._maps.find(base, 1)
        if found is not None:
            self._copy_later(frame, found[0], base)
        else:
            if base not in self.wanted:
                sock.send(wire.HEAD.pack(wire.WANT, 0, 0, 0, base, 0, 0), socket.MSG_DONTWAIT)
            self.wanted.setdefault(base, []).append(frame)

    def _copy_later(self, frame: Frame, mapping: Mapping, base: int) -> None:
        self.copies.append((frame, mapping, base))
        if self._copier is None:
            self._copier = threading.Thread(target=self._copy, name="kvmesh-shm-read", daemon=True)
            self.transport.spawn(self._copier)
        self.changed.notify_all()

    # ── the owner thread ──────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while True:
            sock, cause = self._connect()
            if sock is None:
                self._end(cause, down=True)
                return
            settled, self._stranded = self._stranded, []
            for frame in settled:
                frame.lost("sent again: connection broke", settled=True)
            with self.changed:
                if not self.broken:
                    self.ready = True
                    self._flush()
            ended_by_peer = self._receive(sock)
            sock.close()
            if not self._gather(ended_by_peer):
                return

    def _connect(self) -> tuple[socket.socket | None, str]:
        pause = self.config.backoff_s
        cause = "closed"
        for attempt in range(self.config.max_attempts):
            if attempt:
                with self.changed:
                    self.changed.wait_for(lambda: bool(self.closed), pause)
                pause *= 2
            if self.closed:
                return None, self.closed
            try:
                return self._dial(), ""
            except Refused as err:
                cause = str(err)
                if not err.retry:
                    break
            except (ConnectionRefusedError, FileNotFoundError) as err:
                cause = f"{self.descriptor.name} is gone: {err}"
                break  # nobody listens on a socket of this machine: trying again will not help
            except (OSError, Gone, ProtocolBroken) as err:
                cause = f"connection to {self.descriptor.name}: {err}"
        return None, cause

    def _dial(self) -> socket.socket:
        descriptor = self.descriptor
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self.changed:
            self.sock, self.broken = sock, self.closed
        try:
            if self.broken:
                raise Gone(self.broken)
            sock.settimeout(self.config.connect_timeout_s)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            sock.connect(_raw(descriptor.endpoints["shm"].get("path", "")))
            conn_id = next(self.transport.conn_ids)
            sock.send(
                wire.encode_hello(
                    Hello(
                        wire.WIRE_VERSION, self.host.name, descriptor.name, descriptor.token, conn_id, self._supersedes
                    )
                )
            )
            buffer = bytearray(wire.MAX_HELLO_BYTES)
            got, _ = receive(sock, buffer)
            wire.decode_welcome(bytes(buffer[:got]))
            sock.settimeout(None)
        except BaseException:
            with self.changed:
                self.sock = None
            sock.close()
            raise
        self._supersedes = (conn_id,)
        self.host.count("shm.connected")
        return sock

    def _receive(self, sock: socket.socket) -> bool:
        """Until the connection ends. True: the peer's copier ended it, so it can land nothing more."""
        buffer = bytearray(PACKET_BYTES)
        by_peer = False
        try:
            while True:
                got, fd = receive(sock, buffer)
                if got < wire.HEAD_BYTES:
                    raise ProtocolBroken(f"packet of {got} bytes")
                answer = Asked.parse(buffer)
                if answer.kind == wire.REGION:
                    self._mapped(answer, fd)
                else:
                    self._answer(answer, memoryview(buffer)[wire.HEAD_BYTES : got])
        except (Gone, ConnectionResetError):
            cause, by_peer = f"{self.descriptor.name} closed the connection", True
        except (OSError, ProtocolBroken) as err:
            cause = f"connection to {self.descriptor.name}: {err}"
        with self.changed:
            by_peer = by_peer and not self.broken
            self._shut(cause)
        return by_peer

    def _answer(self, answer: Asked, rest: memoryview) -> None:
        with self.changed:
            frame = self.inflight.pop(answer.seq, None)
            self.progress_at = time.monotonic()
            if self.backlog and self.ready:
                self._flush()
        if answer.kind != wire.ANSWER or frame is None or answer.flags >= len(wire.CAUSES):
            raise ProtocolBroken("answer to nothing asked")
        if len(rest) != 4 * answer.count:
            raise ProtocolBroken("answer of another length")
        refused = struct.unpack(f"<{answer.count}I", rest) if answer.count else ()
        frame.done(refused, wire.CAUSES[answer.flags])

    def _mapped(self, region: Asked, fd: int) -> None:
        with self.changed:
            known = self._maps.add(region, fd)
            frames = self.wanted.pop(region.seq, [])
            found = self._maps.find(region.seq, 1) if known else None
            if found is not None:
                for frame in frames:
                    self._copy_later(frame, found[0], region.seq)
                return
        for frame in frames:
            frame.done(range(len(frame.parts)), wire.CAUSES[wire.NO_MEMORY])

    def _gather(self, ended_by_peer: bool) -> bool:
        """After a connection ended: whether another one is needed."""
        with self.changed:
            cause = self.broken
            unanswered = list(self.inflight.values())
            self.inflight.clear()
            reads = [f for waiting in self.wanted.values() for f in waiting] + [c[0] for c in self.copies]
            self.wanted.clear()
            self.copies.clear()
            self.sock = None
            self._told.clear()
            self._maps.clear()
            if not ended_by_peer:
                self._stranded, unanswered = unanswered, []
        for frame in unanswered + reads:
            frame.lost(cause, settled=True)
        if self.closed:
            self._end(self.closed, down=False)
            return False
        with self.changed:
            if not self._stranded and not self.backlog:
                self._owner = None
                return False
        return True

    def _end(self, cause: str, *, down: bool) -> None:
        """The path is closed, or cannot be connected."""
        with self.changed:
            waiting = list(self.backlog)
            self.backlog.clear()
            stranded, self._stranded = self._stranded, []
            self._owner = None
        down = down and not self.closed
        for frame in stranded:
            frame.lost(cause, settled=False, down=down)
        for frame in waiting:
            frame.lost(cause, settled=True, down=down)

    # ── the reading thread ────────────────────────────────────────────────────────────────────────

    def _copy(self) -> None:
        while True:
            with self.changed:
                while not self.copies and not self.closed:
                    self.changed.wait()
                if not self.copies:
                    return
                frame, mapping, base = self.copies.popleft()
            shift = mapping.address - base
            parts = frame.parts
            copy_runs([p[1] for p in parts], [p[2] + shift for p in parts], [p[3] for p in parts])
            frame.done()
            del frame, mapping


def _raw(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address
