"""A control connection: one thread reads it and runs deferred actions; any thread may send, without waiting."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from kvmesh.transfer.transports.rdma import protocol
from kvmesh.transfer.transports.wire import Gone, ProtocolBroken

_MAX_OUTBOX_BYTES = 32 << 20
_READ_BYTES = 256 << 10


class Channel:
    """A control connection over a connected socket, which it owns. `run` is its thread's body."""

    def __init__(self, sock: socket.socket) -> None:
        self.broken = ""
        self._sock = sock
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._outbox = bytearray()
        self._todo: deque[Callable[[], None]] = deque()
        self._woken = False
        sock.setblocking(False)

    def send(self, data: bytes) -> None:
        """Sends or queues a message without blocking. A peer that takes nothing breaks the connection once much is
        queued."""
        with self._lock:
            if self.broken:
                return
            if not self._outbox:
                try:
                    sent = self._sock.send(data)
                except BlockingIOError:
                    sent = 0
                except OSError as err:
                    self._shut(str(err))
                    return
                if sent == len(data):
                    return
                data = data[sent:]
            self._outbox += data
            if len(self._outbox) > _MAX_OUTBOX_BYTES:
                self._shut("the peer takes no messages")
            self._ring()

    def defer(self, action: Callable[[], None]) -> None:
        """Has the channel's thread call `action`; actions left when it ends are in `leftovers`."""
        with self._lock:
            self._todo.append(action)
            self._ring()

    def shut(self, cause: str) -> None:
        """Makes `run` end soon."""
        with self._lock:
            self._shut(cause)

    def leftovers(self) -> deque[Callable[[], None]]:
        with self._lock:
            todo, self._todo = self._todo, deque()
            return todo

    def close(self) -> None:
        """Closes the socket; it follows the end of `run`."""
        with self._lock:
            self.broken = self.broken or "closed"
            self._sock.close()
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def run(self, take: Callable[[memoryview], None], due: Callable[[float], float]) -> None:
        """Reads messages until Gone or ProtocolBroken is raised. `due(now)` is called before each wait: it may shut the
        channel, and returns when it wants to be called again (infinity: only after a message)."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        fd = self._sock.fileno()
        inbox = bytearray()
        while True:
            now = time.monotonic()
            until = due(now)
            with self._lock:
                broken, waiting = self.broken, bool(self._outbox)
            if broken:
                raise Gone(broken)
            poll.register(fd, select.POLLIN | (select.POLLOUT if waiting else 0))
            timeout = None if until == float("inf") else max(0.0, until - now) * 1000 + 1
            for ready, events in poll.poll(timeout):
                if ready != fd:
                    self._run_todo()
                    continue
                if events & select.POLLOUT:
                    self._flush()
                if events & ~select.POLLOUT:
                    self._read(inbox)
                    self._take(inbox, take)

    def _run_todo(self) -> None:
        with self._lock:
            os.eventfd_read(self._wake)
            self._woken = False
            todo, self._todo = self._todo, deque()
        for action in todo:
            action()

    def _flush(self) -> None:
        with self._lock:
            try:
                del self._outbox[: self._sock.send(bytes(self._outbox[:_READ_BYTES]))]
            except BlockingIOError:
                pass
            except OSError as err:
                self._shut(str(err))

    def _read(self, inbox: bytearray) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as err:
            raise Gone(str(err)) from err
        if not data:
            raise Gone(self.broken or "closed by the peer")
        inbox += data

    @staticmethod
    def _take(inbox: bytearray, take: Callable[[memoryview], None]) -> None:
        at = 0
        head = protocol.LENGTH.size
        if len(inbox) < head or len(inbox) < head + protocol.LENGTH.unpack_from(inbox)[0] <= protocol.MAX_MESSAGE_BYTES:
            return  # a large one is still coming
        data = bytes(inbox)
        while len(data) - at >= head:
            (length,) = protocol.LENGTH.unpack_from(data, at)
            if length > protocol.MAX_MESSAGE_BYTES:
                raise ProtocolBroken(f"message of {length} bytes")
            if len(data) - at - head < length:
                break
            take(memoryview(data)[at + head : at + head + length])
            at += head + length
        del inbox[:at]

    def _ring(self) -> None:
        if not self._woken and self._wake >= 0:
            self._woken = True
            os.eventfd_write(self._wake, 1)

    def _shut(self, cause: str) -> None:
        self.broken = self.broken or cause
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # not connected any more
        self._ring()
