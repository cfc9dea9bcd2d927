"""The shm transport at the opener.

A caller's thread sends a frame itself, without blocking: a small write costs the caller one system call and wakes
nobody but the target's copier. The owner thread connects, takes answers and recovers; it lives while there is a
connection, or work that needs one. READs are copied here: `read`.

When a connection ends, the next greeting supersedes it (see `wire`): only then are its unanswered frames lost and
settled. When nobody listens on the target's socket any more, they are settled too: a process closes its listener after
its last copier has ended, and the kernel closes a dead process's files after the last of its threads has let go of the
memory.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvmesh.transfer.memory import Mapping
from kvmesh.transfer.segment import SegmentDescriptor
from kvmesh.transfer.transports import wire
from kvmesh.transfer.transports.base import Frame, FrameKind
from kvmesh.transfer.transports.dialing import AnswerReader, connect_patiently
from kvmesh.transfer.transports.shm.read import OWN_READ_BYTES, ShmReader
from kvmesh.transfer.transports.shm.server import PACKET_BYTES, PeerMaps, receive, send_region
from kvmesh.transfer.transports.wire import Asked, ConnectionRefused, Gone, Hello, ProtocolBroken

if TYPE_CHECKING:
    from kvmesh.transfer.transports.shm.transport import ShmTransport


class ShmAnswers(AnswerReader):
    """The answers on one connection. A packet is a whole answer or a region; `take(answer, fd, rest)` handles it."""

    def __init__(
        self, sock: socket.socket, take: Callable[[Asked, int, memoryview], None], broke: Callable[[Exception], None]
    ) -> None:
        super().__init__(sock, broke)
        self._packets = sock
        self._take = take
        self._buffer = bytearray(PACKET_BYTES)

    def advance(self) -> bool:
        buffer = self._buffer
        try:
            got, fd = receive(self._packets, buffer, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        self._take(Asked.parse_packet(buffer, got, fd), fd, memoryview(buffer)[wire.HEAD_BYTES : got])
        return True


_SEND_BUFFER_BYTES = 1 << 20


def raw_address(address: str) -> str:
    """Returns a socket address: "@name" stands for Linux's abstract namespace."""
    return "\0" + address[1:] if address.startswith("@") else address


class ShmPath:
    """The connection to one segment (a `dialing.Path`)."""

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
        self.wanted: dict[int, list[Frame]] = {}  # READs by the region they wait for
        self.progress_at = 0.0
        self._seq = 0
        self._told: set[int] = set()  # own regions that the peer's copier has mapped
        self._maps = PeerMaps()
        self._reader = ShmReader(transport, descriptor.name)
        self._stranded: list[Frame] = []
        self._supersedes: tuple[int, ...] = ()
        self._met_at = ""  # where the target listened
        self._gone = False  # the peer does not listen there any more
        self._owner: threading.Thread | None = None
        self._answers: ShmAnswers | None = None  # while connected

    # ── called by any thread ──────────────────────────────────────────────────────────────────────

    def take(self, frame: Frame) -> bool:
        start: threading.Thread | None = None
        if frame.kind is FrameKind.READ and frame.nbytes <= OWN_READ_BYTES and self._read_here(frame):
            return True
        with self.changed:
            if self.closed:
                return False
            self.backlog.append(frame)
            if self.ready:
                self._flush()
            elif self._owner is None:
                start = self._owner = threading.Thread(target=self._run, name="kvmesh-shm", daemon=True)
        if start is not None:
            try:
                self.transport.spawn(start)
            except OSError as err:
                self._end(str(err))
        return True

    def _read_here(self, frame: Frame) -> bool:
        """Copies a READ in the caller's thread if the memory is mapped; returns whether it did."""
        assert frame.group is not None, "a READ has memory"
        base, length = frame.group.remote.base_offset, frame.group.remote.length
        with self.changed:
            found = self._maps.find(base, length) if self.ready else None
        return found is not None and self._reader.read_here(frame, found[0], base)

    def mapped(self, offset: int, nbytes: int) -> tuple[Mapping, int] | None:
        """Returns what the function `mapped` of `shm.transport` does."""
        with self.changed:
            return self._maps.find(offset, nbytes) if self.ready else None

    def recall(self, frame: Frame) -> bool:
        with self.changed:
            if frame in self.backlog:
                self.backlog.remove(frame)
                return True
            for waiting in self.wanted.values():
                if frame in waiting:
                    waiting.remove(frame)
                    return True
        return self._reader.recall(frame)

    def assist(self, frame: Frame, seconds: float) -> None:
        if frame.kind is FrameKind.READ:
            self._reader.assist(frame, seconds)
            return
        with self.changed:
            answers = self._answers if frame in self.inflight.values() else None
        if answers is not None:
            answers.help(frame, seconds)

    def expire(self, frame: Frame, idle_s: float) -> None:
        with self.changed:
            asked = frame in self.inflight.values() or any(frame in waiting for waiting in self.wanted.values())
            if asked and time.monotonic() - self.progress_at >= idle_s:
                self._shut(f"no answer from {self.descriptor.name} over shm")

    def idle(self) -> bool:
        with self.changed:
            return not (self.backlog or self.inflight or self._stranded or self.wanted or self._reader.waiting)

    def close(self, cause: str) -> None:
        with self.changed:
            self.closed = cause
            self._shut(cause)
        self._reader.close()

    def withdraw(self, base: int) -> None:
        """Tells the peer's copier that a local region is gone."""
        with self.changed:
            if base in self._told and self.sock is not None:
                self._told.discard(base)
                try:
                    send_region(self.sock, base, 0, -1)
                except OSError:
                    pass  # full or ended: the peer's map goes with the connection

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
                if frame.kind is FrameKind.READ:
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
        if frame.kind is not FrameKind.WRITE:
            packet = wire.encode_question(seq, frame)
        else:
            local = frame.local
            if local.base not in self._told:
                send_region(sock, local.base, local.length, local.fd)
                self._told.add(local.base)
            shift = local.base - local.address
            rows = [0] * (3 * len(frame.parts))
            _, addresses, rows[1::3], rows[2::3] = zip(*frame.parts, strict=True)
            rows[0::3] = [address + shift for address in addresses]
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
        found = self._maps.find(base, frame.group.remote.length)
        if found is not None:
            self._reader.put(frame, found[0], base)
        else:
            if base not in self.wanted:
                sock.send(wire.HEAD.pack(wire.WANT, 0, 0, 0, base, 0, 0), socket.MSG_DONTWAIT)
                if not self.inflight:
                    self.progress_at = time.monotonic()
            self.wanted.setdefault(base, []).append(frame)

    # ── the owner thread ──────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while True:
            self._gone = False
            answers, cause = connect_patiently(self._dial, self.config, lambda: self.closed, self._pause)
            if answers is None:
                self._end(cause)
                return
            settled, self._stranded = self._stranded, []
            for frame in settled:
                frame.lost("the connection broke", settled=True)
            with self.changed:
                self._answers = answers
                if not self.broken:
                    self.ready = True
                    self._flush()
            answers.run()
            answers.close()  # no caller reads any more
            answers.sock.close()
            if not self._gather():
                return

    def _pause(self, seconds: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: bool(self.closed), seconds)

    def _dial(self) -> ShmAnswers:
        descriptor = self.descriptor
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self.changed:
            self.sock, self.broken = sock, self.closed
        try:
            if self.broken:
                raise Gone(self.broken)
            sock.settimeout(self.config.connect_timeout_s)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            path = descriptor.endpoints["shm"].get("path", "")
            try:
                sock.connect(raw_address(path))
            except (ConnectionRefusedError, FileNotFoundError) as err:
                # A file can be deleted under a living process; "refused" is the kernel's word that nobody listens.
                self._gone = isinstance(err, ConnectionRefusedError) and path == self._met_at
                raise ConnectionRefused(f"{descriptor.name} is gone: {err.strerror}", retry=False) from err
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
            answers = ShmAnswers(sock, self._take, self._ended)
        except BaseException:
            with self.changed:
                self.sock = None
            sock.close()
            raise
        self._supersedes, self._met_at = (conn_id,), path
        self.host.count("shm.connected")
        return answers

    def _take(self, answer: Asked, fd: int, rest: memoryview) -> None:
        if answer.kind == wire.REGION:
            self._mapped(answer, fd)
        else:
            self._answer(answer, rest)

    def _ended(self, err: Exception) -> None:
        with self.changed:
            self._shut(f"connection to {self.descriptor.name}: {err}")

    def _answer(self, answer: Asked, rest: memoryview) -> None:
        with self.changed:
            frame = self.inflight.get(answer.seq)
            if answer.kind != wire.ANSWER or frame is None or answer.flags >= len(wire.CAUSES):
                raise ProtocolBroken("answer to nothing asked")
            asked = 0 if answer.count or frame.kind is not FrameKind.CHECKSUM else len(frame.parts)
            if len(rest) != 4 * (answer.count + asked):
                raise ProtocolBroken("answer of another length")
            del self.inflight[answer.seq]
            self.progress_at = time.monotonic()
            if self.backlog and self.ready:
                self._flush()
        refused = struct.unpack(f"<{answer.count}I", rest) if answer.count else ()
        if asked:
            frame.sums = wire.unpack_sums(bytes(rest))
        frame.done(refused, wire.CAUSES[answer.flags])

    def _mapped(self, region: Asked, fd: int) -> None:
        with self.changed:
            known = self._maps.add(region, fd)
            short = []
            for frame in self.wanted.get(region.seq, []):
                assert frame.group is not None, "a READ has memory"
                found = self._maps.find(region.seq, frame.group.remote.length) if known else None
                if found is None:
                    short.append(frame)  # gone, or less than its descriptor says
                else:
                    self._reader.put(frame, found[0], region.seq)
            self.wanted.pop(region.seq, None)
        for frame in short:
            frame.done(range(len(frame.parts)), wire.CAUSES[wire.NO_MEMORY])

    def _gather(self) -> bool:
        """Sorts the frames of a connection that ended; returns whether another connection is needed."""
        with self.changed:
            cause = self.broken
            asked = list(self.inflight.values())
            self._stranded = [f for f in asked if f.kind is not FrameKind.CHECKSUM]
            self.inflight.clear()
            traceless = [f for f in asked if f.kind is FrameKind.CHECKSUM]
            traceless += [f for waiting in self.wanted.values() for f in waiting] + self._reader.take_back()
            self.wanted.clear()
            self.sock = self._answers = None
            self._told.clear()
            self._maps.clear()
        for frame in traceless:
            frame.lost(cause, settled=True)
        if self.closed:
            self._end(self.closed)
            return False
        with self.changed:
            if not self._stranded and not self.backlog:
                self._owner = None
                return False
        return True

    def _end(self, cause: str) -> None:
        """Loses all frames, because the path is closed or cannot connect."""
        with self.changed:
            waiting = list(self.backlog)
            self.backlog.clear()
            stranded, self._stranded = self._stranded, []
            self._owner = None
        down = not self.closed
        for frame in stranded:
            frame.lost(cause, settled=self._gone, down=down)
        for frame in waiting:
            frame.lost(cause, settled=True, down=down)
