"""What comes back on a shm connection, and who reads it: one thread at a time, whoever has the `turn`.

The path's owner thread sleeps in epoll, which is armed while nobody reads. A caller that waits for a frame of its own
takes the turn and reads the answer itself, so that one thread less is woken. (tcp does the same; there a packet may
come in parts.)
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable

from kvmesh.transfer.transports.base import Frame
from kvmesh.transfer.transports.shm.server import PACKET_BYTES, receive
from kvmesh.transfer.transports.tcp.adaptive_spin import AdaptiveSpin
from kvmesh.transfer.transports.wire import HEAD_BYTES, Asked, Gone, ProtocolBroken

_ARMED = select.EPOLLIN | select.EPOLLONESHOT


class ShmAnswers:
    """Of one connection. `take(answer, fd, rest)` handles a packet, `broke(err)` hears of its end, from any reader.
    OSError when there are no descriptors left."""

    def __init__(
        self, sock: socket.socket, take: Callable[[Asked, int, memoryview], None], broke: Callable[[Exception], None]
    ) -> None:
        self.sock = sock
        self._take = take
        self._broke = broke
        self._turn = threading.Lock()
        self._buffer = bytearray(PACKET_BYTES)
        self._patience = AdaptiveSpin()
        self._epoll = select.epoll()
        self._epoll.register(sock.fileno(), 0)
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)

    def run(self) -> None:
        """The body of the owner thread: until the connection ends; then nobody reads any more."""
        fd = self.sock.fileno()
        try:
            while True:
                with self._turn:
                    while self._next():
                        pass
                    self._epoll.modify(fd, _ARMED)
                self._epoll.poll()
        except (Gone, OSError, ProtocolBroken) as err:
            self._broke(err)
        self._turn.acquire()  # for ever
        self._epoll.close()

    def help(self, frame: Frame, seconds: float) -> None:
        """The caller reads until this frame is answered; returns earlier when another thread reads, after `seconds`,
        or when the connection ends."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            fd = self.sock.fileno()
            self._epoll.modify(fd, 0)
            try:
                self._read_until(frame, seconds)
            finally:
                self._epoll.modify(fd, _ARMED)
        except (Gone, OSError, ProtocolBroken) as err:
            self._broke(err)
        finally:
            self._turn.release()

    def _read_until(self, frame: Frame, seconds: float) -> None:
        spin_until = self._patience.begin()
        deadline = time.monotonic() + seconds
        while not frame.answered:
            if self._next():
                continue
            now = time.monotonic()
            if now >= spin_until and (now >= deadline or not self._poll.poll((deadline - now) * 1000)):
                return
        self._patience.met(frame.nbytes)

    def _next(self) -> bool:
        """Takes a packet; false: there is none. The turn is held."""
        buffer = self._buffer
        try:
            got, fd = receive(self.sock, buffer, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        self._take(Asked.parse_packet(buffer, got, fd), fd, memoryview(buffer)[HEAD_BYTES:got])
        return True
