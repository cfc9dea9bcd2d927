"""Frames of a fast path: calls and their answers on one connection.

    caller ── HELLO ──▶ ◀── HELLO ──           this protocol, the life that is meant, the caller's ticket if it has one
           ── CALL ───▶ ◀── ANSWER | ERROR ──  any number under way, answered in any order
           ── CANCEL ─▶                        nobody waits for that call any more

A frame is a header of 16 bytes, the method's name (of a CALL) and a body: the protobuf message that gRPC would carry,
or of an ERROR an ErrorDetail. Little-endian.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from kvmesh.rpc.fastpath.tickets import TICKET_BYTES

HELLO, CALL, ANSWER, ERROR, CANCEL = range(1, 6)
MAX_FRAME = 16 << 20  # name and body of an answer: who reads it has chosen whom to call
MAX_REQUEST = 1 << 20  # name and body of what callers say; larger messages go over gRPC

_HEADER = struct.Struct("<IIBBHI")  # bytes after it, call, kind, length of the name, 0, ms left to the caller
_MAGIC = b"kvmesh-door-1\0\0\0"
_LIFE = struct.Struct("<Q")
HELLO_BYTES = len(_MAGIC) + _LIFE.size
MAX_HELLO_BYTES = HELLO_BYTES + TICKET_BYTES
_MAX_MS = (1 << 32) - 1


class BadFrame(Exception):
    """What came is no frame. The connection ends, and calls that wait on it raise `Unavailable`."""


class CallFrame(NamedTuple):
    kind: int
    call: int
    body: bytes = b""
    name: bytes = b""
    ms: int = 0


def encode(kind: int, call: int, body: bytes = b"", name: bytes = b"", ms: int = 0) -> bytes:
    """Returns the bytes of a frame; `ms` is cut to 49 days."""
    return b"".join(
        (_HEADER.pack(len(name) + len(body), call, kind, len(name), 0, min(ms, _MAX_MS)), name, body),
    )


def hello(life: int, ticket: bytes = b"") -> bytes:
    """Returns the frame that each side sends first. `life` is the incarnation of the process behind the fast path,
    `ticket` what it has given the caller."""
    return encode(HELLO, 0, _MAGIC + _LIFE.pack(life) + ticket)


def life_of(frame: CallFrame) -> int:
    """Returns the incarnation that a HELLO names. Raises BadFrame when the frame is no HELLO."""
    if (
        frame.kind != HELLO
        or len(frame.body) not in (HELLO_BYTES, MAX_HELLO_BYTES)
        or not frame.body.startswith(_MAGIC)
    ):
        raise BadFrame(f"a greeting of kind {frame.kind} with {len(frame.body)} bytes")
    life: int = _LIFE.unpack_from(frame.body, len(_MAGIC))[0]
    return life


def ticket_of(frame: CallFrame) -> bytes:
    """Returns the ticket in a HELLO that `life_of` has read, empty when there is none."""
    return frame.body[HELLO_BYTES:]


class FrameReader:
    """Cuts a byte stream into frames, the first of which is a HELLO. `most` bounds the bytes after the header of the
    others."""

    def __init__(self, most: int = MAX_FRAME) -> None:
        self._most = MAX_HELLO_BYTES  # of the next one: a stranger makes nobody keep more
        self._later = most
        self._kept = bytearray()
        self._need = _HEADER.size  # bytes of the next frame, as far as they are known

    @property
    def held(self) -> int:
        """The bytes kept of an incomplete frame."""
        return len(self._kept)

    def feed(self, data: bytes) -> list[CallFrame]:
        """Returns the frames that are complete now. Raises BadFrame when the stream holds no frame."""
        if not self._kept:
            frames, used = self._cut(data)
            if used < len(data):
                self._kept += data[used:]
            return frames
        self._kept += data
        if len(self._kept) < self._need:
            return []
        frames, used = self._cut(bytes(self._kept))
        del self._kept[:used]
        return frames

    def _cut(self, data: bytes) -> tuple[list[CallFrame], int]:
        """Returns the whole frames of `data`, and where the first incomplete one begins."""
        frames: list[CallFrame] = []
        at, size, end = 0, _HEADER.size, len(data)
        while end - at >= size:
            length, call, kind, name, zero, ms = _HEADER.unpack_from(data, at)
            if not HELLO <= kind <= CANCEL or zero or name > length or (name and kind != CALL):
                raise BadFrame(f"kind={kind}, name={name}, length={length}: no such frame")
            if length > self._most:
                raise BadFrame(f"length={length}: at most {self._most} bytes in this frame")
            body = at + size + name
            stop = at + size + length
            if stop > end:
                self._need = stop - at
                return frames, at
            frames.append(CallFrame(kind, call, data[body:stop], data[at + size : body], ms))
            at, self._most = stop, self._later
        self._need = size
        return frames, at
