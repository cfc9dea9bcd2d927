"""What comes back on a tcp connection, and who reads it: one thread at a time, whoever has the `turn`.

    nothing in flight   the reading thread sleeps in epoll, without the turn
    an answer comes     it wakes, takes the turn and reads, blocking from then on, until nothing is in flight
    a caller waits      for a frame of its own: it takes the turn before the answer comes and reads it itself, so that
                        one thread less is woken. The reading thread sleeps on: epoll is armed only while nobody reads

How far an answer has been read is kept here, so the next thread goes on where the last one left.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

from kvmesh.transfer.transports import wire
from kvmesh.transfer.transports.base import Frame, FrameKind
from kvmesh.transfer.transports.tcp.adaptive_spin import AdaptiveSpin
from kvmesh.transfer.transports.tcp.frames import local_views
from kvmesh.transfer.transports.wire import Asked, Gone, ProtocolBroken

if TYPE_CHECKING:
    from kvmesh.transfer.transports.tcp.path import TcpStream

_ARMED = select.EPOLLIN | select.EPOLLONESHOT


class TcpAnswers:
    """Of one connection; `run` is the body of its reading thread. `quiet_s`: how long nothing may come before the peer
    is pinged; 0: for ever."""

    def __init__(self, stream: TcpStream, sock: socket.socket, quiet_s: float) -> None:
        self._stream = stream
        self._sock = sock
        self._fd = sock.fileno()
        self._quiet_s = quiet_s
        self._turn = threading.Lock()
        self._epoll = select.epoll()
        self._epoll.register(self._fd, _ARMED)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._patience = AdaptiveSpin()  # of callers
        self._head = bytearray(wire.HEAD_BYTES)
        self._answer: Asked | None = None  # its head has come
        self._frame: Frame | None = None
        self._indices: bytearray | None = None
        self._views = [memoryview(self._head)]
        self._left = wire.HEAD_BYTES

    # ── threads ───────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Until the connection ends."""
        stream, timeout = self._stream, self._quiet_s or None
        try:
            while True:
                if not self._epoll.poll(timeout):
                    stream.ping()
                    continue
                with self._turn:
                    if self._advance(socket.MSG_DONTWAIT) or self._answer is not None:
                        while stream.inflight:
                            if not self._advance(socket.MSG_WAITALL):
                                stream.ping()
                    self._epoll.modify(self._fd, _ARMED)
        except (Gone, OSError, ProtocolBroken) as err:
            stream.broke(err)

    def help(self, frame: Frame, seconds: float) -> None:
        """The caller reads until this frame is answered; returns earlier when another thread reads, after `seconds`, or
        when the connection ends."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            self._epoll.modify(self._fd, 0)
            try:
                self._read_until(frame, seconds)
            finally:
                self._epoll.modify(self._fd, _ARMED)
        except (Gone, OSError, ProtocolBroken) as err:
            self._stream.broke(err)
        finally:
            self._turn.release()

    def _read_until(self, frame: Frame, seconds: float) -> None:
        spin_until = self._patience.begin()
        deadline = time.monotonic() + seconds
        while not frame.answered:
            if self._advance(socket.MSG_DONTWAIT):
                continue
            now = time.monotonic()
            if now >= spin_until and (now >= deadline or not self._poll.poll((deadline - now) * 1000)):
                return
        self._patience.met(frame.nbytes)

    def close(self) -> None:
        """After `run` has ended and the socket is shut down: returns when no caller reads any more."""
        self._turn.acquire()  # for ever
        self._epoll.close()

    # ── bytes ─────────────────────────────────────────────────────────────────────────────────────

    def _advance(self, flags: int) -> bool:
        """Reads until an answer is whole, and reports its frame. False: nothing came. The turn is held."""
        while True:
            while self._left:
                try:
                    got = self._sock.recvmsg_into(self._views[: wire.IOV_MAX], 0, flags)[0]
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
        """Where what follows the head goes."""
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
