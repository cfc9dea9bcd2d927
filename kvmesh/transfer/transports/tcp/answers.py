"""What comes back on a tcp connection: heads, refused parts, bytes of READs straight into registered memory."""

from __future__ import annotations

import socket
import struct
import time
from typing import TYPE_CHECKING

from kvmesh.transfer.transports import wire
from kvmesh.transfer.transports.base import Frame, FrameKind
from kvmesh.transfer.transports.dialing import AnswerReader
from kvmesh.transfer.transports.tls import ByteStream, TlsSocket
from kvmesh.transfer.transports.wire import Asked, Gone, ProtocolBroken

if TYPE_CHECKING:
    from kvmesh.transfer.transports.tcp.path import TcpStream


class TcpAnswers(AnswerReader):
    """The answers on one connection. After `quiet_s` without a byte the peer is pinged."""

    def __init__(self, stream: TcpStream, sock: ByteStream, quiet_s: float) -> None:
        super().__init__(sock, stream.broke, quiet_s)
        self._stream = stream
        self._head = bytearray(wire.HEAD_BYTES)
        self._answer: Asked | None = None  # its head has come
        self._frame: Frame | None = None
        self._indices: bytearray | None = None
        self._views = [memoryview(self._head)]
        self._left = wire.HEAD_BYTES

    def quiet(self) -> None:
        self._stream.ping()

    def drain(self) -> None:
        """Reads from the first byte of an answer on until nothing is in flight; it blocks."""
        if self.advance() or self._answer is not None:
            while self._stream.inflight:
                if not self._read(socket.MSG_WAITALL):
                    self._stream.ping()

    def leave_nothing(self) -> None:
        """Reads the answers that came with the one that was waited for: what TLS has taken from the socket wakes
        nobody."""
        while isinstance(self.sock, TlsSocket) and self.sock.buffered and self.advance():
            pass

    def advance(self) -> bool:
        return self._read(socket.MSG_DONTWAIT)

    def _read(self, flags: int) -> bool:
        """Does what `advance` does; whether it waits is in `flags`."""
        while True:
            while self._left:
                try:
                    got = wire.receive(self.sock, self._views, flags)
                except BlockingIOError:
                    return False
                if got == 0:
                    raise Gone("closed by the peer")
                self._left -= got
                if self._left:
                    self._views = wire.advanced(self._views, got)
            if self._answer is not None:
                break
            answer = Asked.parse(self._head)
            frame = self._of(answer)
            self._expect(answer, frame)
            self._answer, self._frame = answer, frame  # last: who reads after an error meets it again
        self._report(self._answer)
        return True

    def _of(self, answer: Asked) -> Frame:
        with self._stream.path.changed:
            frame = self._stream.inflight.get(answer.seq)
        if answer.kind != wire.ANSWER or frame is None or answer.flags >= len(wire.CAUSES):
            raise ProtocolBroken("answer to nothing asked")
        return frame

    def _expect(self, answer: Asked, frame: Frame) -> None:
        """Prepares the memory for what follows the head."""
        if answer.count:
            self._indices = bytearray(4 * answer.count)
        elif frame.kind is FrameKind.READ:
            if answer.nbytes != frame.nbytes:
                raise ProtocolBroken(f"read of {frame.nbytes} bytes answered with {answer.nbytes}")
            self._views, self._left = local_views(frame), frame.nbytes
            return
        elif frame.kind is FrameKind.CHECKSUM:
            if answer.nbytes != 4 * len(frame.parts):
                raise ProtocolBroken(f"checksums of {len(frame.parts)} parts in {answer.nbytes} bytes")
            self._indices = bytearray(answer.nbytes)
        if self._indices is not None:
            self._views, self._left = [memoryview(self._indices)], len(self._indices)

    def _report(self, answer: Asked) -> None:
        frame, numbers, stream = self._frame, self._indices, self._stream
        assert frame is not None, "the head came first"
        self._answer = self._frame = self._indices = None
        self._views, self._left = [memoryview(self._head)], wire.HEAD_BYTES
        refused: tuple[int, ...] = ()
        if numbers is not None:
            found = struct.unpack(f"<{len(numbers) // 4}I", numbers)
            if answer.count:
                refused = found
            else:
                frame.sums = found
        with stream.path.changed:
            del stream.inflight[answer.seq]
            stream.progress_at = time.monotonic()
        frame.done(refused, wire.CAUSES[answer.flags])


def local_views(frame: Frame) -> list[memoryview]:
    """Returns a view of the local memory of each part."""
    region = frame.local
    base, view = region.address, region.view
    return [view[address - base : address - base + length] for _, address, _, length in frame.parts]
