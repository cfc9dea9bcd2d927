"""The end of a rank's socket that is not the rank's: at its front, or at the rank host that carries its frames."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from kvmesh.ranks.ipc import RECEIVE_BYTES


class FrontPort:
    """Owns the socket. Nothing blocks, and all methods belong to the event loop that made it. `on_data` is called with
    what the rank sends; `on_closed` at most once, after the socket is closed because the rank is gone, with what
    failed ("" where the rank's end was closed)."""

    def __init__(self, sock: socket.socket, on_data: Callable[[bytes], None], on_closed: Callable[[str], None]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._on_data, self._on_closed = on_data, on_closed
        self._out = bytearray()
        self._open, self._reads = True, False
        self._loop = asyncio.get_running_loop()
        self.resume()

    @property
    def queued(self) -> int:
        """The bytes that the socket has not taken yet."""
        return len(self._out)

    def send(self, data: bytes) -> None:
        """Sends what the socket takes now; the rest follows when it can."""
        if not self._open:
            return
        if not self._out:
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self._gone(f"send: {error}")
                return
            if sent == len(data):
                return
            data = data[sent:]
            self._loop.add_writer(self._sock, self._writable)
        self._out += data

    def pause(self) -> None:
        """Leaves what the rank sends in the socket, where it waits in turn."""
        if self._open and self._reads:
            self._reads = False
            self._loop.remove_reader(self._sock)

    def resume(self) -> None:
        """Reads (again)."""
        if self._open and not self._reads:
            self._reads = True
            self._loop.add_reader(self._sock, self._readable)

    def close(self) -> None:
        """Closes the socket; it may be called twice."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()

    def _writable(self) -> None:
        try:
            sent = self._sock.send(self._out)
        except BlockingIOError:
            return
        except OSError:
            self._gone()
            return
        del self._out[:sent]
        if not self._out:
            self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._on_data(data)
        else:
            self._gone()

    def _gone(self, cause: str = "") -> None:
        self.close()
        self._on_closed(cause)
