"""A frame between a front process and a rank is a u32 little-endian length, then one msgpack message."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections import deque
from typing import Any

import msgspec

from kvmesh.ranks import protocol as m

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 256 << 20
RECEIVE_BYTES = 64 << 10  # as a rule one message; for much more malloc asks the kernel each time
_encoder = msgspec.msgpack.Encoder()


def frame(message: m.Message) -> bytes:
    """Returns one message with its length in front."""
    out = bytearray(HEADER.size)
    _encoder.encode_into(message, out, HEADER.size)
    HEADER.pack_into(out, 0, len(out) - HEADER.size)
    return bytes(out)


class RankFrames:
    """Cuts a byte stream into messages of one direction (`ToRank` or `ToFront`)."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[Any]:
        """Returns the messages completed by `data`. Raises ValueError on a frame that no peer of this build sends."""
        buffer = self._buffer
        buffer += data
        out = []
        at = 0
        while len(buffer) - at >= HEADER.size:
            (length,) = HEADER.unpack_from(buffer, at)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {length} bytes from the peer process")
            end = at + HEADER.size + length
            if len(buffer) < end:
                break
            with memoryview(buffer) as view:
                out.append(self._decoder.decode(view[at + HEADER.size : end]))
            at = end
        if at:
            del buffer[:at]
        return out


class RankPort:
    """Is the rank's end of the socket: sends block and may come from any thread, receives are polled on the main
    thread."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._lock = threading.Lock()
        self._frames = RankFrames(m.ToRank)
        self._queue: deque[m.ToRank] = deque()
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLIN)

    def watch(self, fileno: int) -> None:
        """Makes `receive` return also when there is something to read from this file descriptor."""
        self._poll.register(fileno, select.POLLIN)

    def send(self, message: m.ToFront) -> None:
        """Sends a message to the front. Raises SystemExit when the front is gone: a rank does not outlive it."""
        data = frame(message)
        try:
            with self._lock:
                self._sock.sendall(data)
        except OSError:
            raise SystemExit(0) from None

    def receive(self, timeout_ms: int | None) -> list[m.ToRank]:
        """Returns everything that has arrived; waits up to `timeout_ms` (None: for ever) for the first message. It also
        returns, without a message, when a watched file descriptor has something to read."""
        own = self._sock.fileno()
        while ready := self._poll.poll(timeout_ms):
            if all(fileno != own for fileno, _ in ready):
                return []
            data = self._sock.recv(RECEIVE_BYTES)
            if not data:
                raise SystemExit(0)
            found: list[m.ToRank] = self._frames.feed(data)
            if found:
                return found
        return []
