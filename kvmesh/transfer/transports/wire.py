"""The messages on the sockets of shm and tcp.

A connection belongs to the engine that opened it: it asks, the acceptor answers.

    opener                                                acceptor
      Hello(version, name, token, conn_id, supersedes) ─▶   checks; kills the superseded connections and waits
                                                            until their threads are outside every slice
      ◀─ Welcome(cause)                                     "" = accepted; only now may frames be sent
      Head(WRITE, n, seq, epoch, bytes) rows payload ─▶     admit, land, leave
      ◀─ Head(ANSWER, refused, seq, flags, bytes) indices payload-of-a-read

A row is (offset, length) on tcp, (source offset, target offset, length) on shm, where no payload follows: the target
copies. A CHECKSUM asks like a READ; instead of the bytes come their zlib.crc32, one u32 a row. Numbers are
little-endian. Superseding is what makes sending again safe: a slice that was on a broken connection goes out on another
one only after the Welcome that names the broken one as superseded.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvmesh.transfer.transports.tls import ByteStream, TlsSocket

if TYPE_CHECKING:
    from kvmesh.transfer.transports.base import Frame

WIRE_VERSION = 1
MAX_HELLO_BYTES = 16 << 10
MAX_PARTS = 512
MAX_FRAME_BYTES = 64 << 20
MAX_NOTIFY_BYTES = 32 << 10
IOV_MAX = 1024

HEAD = struct.Struct("<BBHIQQQ")  # kind, flags, 0, count, seq, epoch, bytes
HEAD_BYTES = HEAD.size
LENGTH = struct.Struct("<I")

WRITE, READ, NOTIFY, CHECKSUM = 1, 2, 3, 4  # as base.FrameKind
PING = 5  # tcp only, no answer: the kernel's acknowledgement tells the opener that the way is good
ANSWER, REGION, WANT = 16, 17, 18  # the last two on shm only

CAUSES = ("", "window closed", "outside the window", "no such memory at the peer", "nobody listens for notifications")
WINDOW_CLOSED, OUTSIDE_WINDOW, NO_MEMORY, NO_LISTENER = 1, 2, 3, 4


class Hello(msgspec.Struct, frozen=True, array_like=True):
    version: int
    peer: str  # who opens: its engine's name
    segment: str  # whom it means to reach
    token: str
    conn_id: int
    supersedes: tuple[int, ...] = ()


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    version: int
    cause: str = ""  # "" = accepted
    retry: bool = False  # the same greeting may be accepted later


class ProtocolBroken(Exception):
    """The peer violated the protocol; its connection is closed."""


class Gone(Exception):
    """The connection ended."""


class ConnectionRefused(Exception):
    """The acceptor does not take this connection."""

    def __init__(self, cause: str, *, retry: bool) -> None:
        super().__init__(cause)
        self.retry = retry


class Asked(msgspec.Struct, frozen=True, gc=False):
    """The head of a frame."""

    kind: int
    flags: int
    count: int
    seq: int
    epoch: int
    nbytes: int

    @classmethod
    def parse(cls, data: bytes | bytearray | memoryview) -> Asked:
        kind, flags, _, count, seq, epoch, nbytes = HEAD.unpack_from(data)
        if kind != REGION and (count > MAX_PARTS or nbytes > MAX_FRAME_BYTES):
            raise ProtocolBroken(f"frame of {count} parts, {nbytes} bytes")
        return cls(kind, flags, count, seq, epoch, nbytes)

    @classmethod
    def parse_packet(cls, data: bytearray, got: int, fd: int) -> Asked:
        """Parses the head of a packet of `got` bytes. Only a REGION may come with a descriptor; any other's is closed.
        Raises ProtocolBroken when the packet is malformed."""
        try:
            if got < HEAD_BYTES:
                raise ProtocolBroken(f"packet of {got} bytes")
            asked = cls.parse(data)
            if fd >= 0 and asked.kind != REGION:
                raise ProtocolBroken(f"a descriptor in a packet of kind {asked.kind}")
        except ProtocolBroken:
            if fd >= 0:
                os.close(fd)
            raise
        return asked


# What decoding bytes of a stranger can raise: texts that are not UTF-8 and nesting without end have no MsgspecError.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode_hello(message: Hello | Welcome) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_hello(data: bytes) -> Hello:
    try:
        return msgspec.msgpack.decode(data, type=Hello)
    except UNREADABLE as err:
        raise ProtocolBroken(f"hello: {err}") from err


def decode_welcome(data: bytes) -> None:
    """Raises ConnectionRefused when the Welcome carries a cause, and ProtocolBroken when it is malformed."""
    try:
        welcome = msgspec.msgpack.decode(data, type=Welcome)
    except UNREADABLE as err:
        raise ProtocolBroken(f"welcome: {err}") from err
    if welcome.cause:
        raise ConnectionRefused(welcome.cause, retry=welcome.retry)


def encode_question(seq: int, frame: Frame) -> bytes:
    """Returns a NOTIFY whole; for a READ, a CHECKSUM and a WRITE (whose bytes follow) the head and the rows."""
    if frame.notice is not None:
        payload = frame.notice.payload
        head = HEAD.pack(NOTIFY, 0, 0, 0, seq, frame.epoch, len(payload))
        return head + frame.notice.serial.to_bytes(8, "little") + payload
    rows = [n for _, _, offset, length in frame.parts for n in (offset, length)]
    head = HEAD.pack(frame.kind, 0, 0, len(frame.parts), seq, frame.epoch, frame.nbytes)
    return head + struct.pack(f"<{len(rows)}Q", *rows)


def encode_answer(seq: int, refused: Sequence[int], code: int) -> bytes:
    """Returns an answer without payload. `code` is an index of CAUSES, `refused` are the parts that it concerns."""
    count = len(refused)
    head = HEAD.pack(ANSWER, code, 0, count, seq, 0, 0)
    return head + struct.pack(f"<{count}I", *refused) if count else head


def pack_sums(sums: Iterable[int]) -> bytes:
    """Returns the payload of the answer to a CHECKSUM."""
    numbers = tuple(sums)
    return struct.pack(f"<{len(numbers)}I", *numbers)


def unpack_sums(data: bytes | bytearray) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}I", data)


# ── exact reads and writes on a stream socket ─────────────────────────────────────────────────────


def receive(sock: ByteStream, views: Sequence[memoryview], flags: int) -> int:
    """Returns how many bytes came into `views`; 0: the end of the stream."""
    if isinstance(sock, TlsSocket):
        return sock.recv_views(views, flags)
    return sock.recvmsg_into(views[:IOV_MAX], 0, flags)[0]


def recv_exact(sock: ByteStream, nbytes: int, silent: Callable[[], None] | None = None) -> bytearray:
    """Receives exactly `nbytes` bytes, as `recv_views` does."""
    data = bytearray(nbytes)
    recv_views(sock, [memoryview(data)], nbytes, silent)
    return data


def recv_views(
    sock: ByteStream, views: list[memoryview], nbytes: int, silent: Callable[[], None] | None = None
) -> None:
    """Fills all views in order, usually with one system call. `silent` is called whenever nothing has come for the
    socket's SO_RCVTIMEO. Raises Gone at the end of the stream."""
    while nbytes > 0:
        try:
            got = receive(sock, views, socket.MSG_WAITALL)
        except BlockingIOError:
            if silent is None:
                raise
            silent()
            continue
        if got == 0:
            raise Gone("closed by the peer")
        nbytes -= got
        if nbytes > 0:
            views = advanced(views, got)


def send_now(sock: ByteStream, views: list[memoryview]) -> list[memoryview]:
    """Sends what the socket takes without waiting. Returns the rest, which `send_rest` sends."""
    if isinstance(sock, TlsSocket):
        return sock.send_now(views)
    try:
        return advanced(views, sock.sendmsg(views[:IOV_MAX], (), socket.MSG_DONTWAIT))
    except BlockingIOError:
        return views


def send_rest(sock: ByteStream, views: list[memoryview], nbytes: int) -> None:
    """Sends what `send_now` has left over."""
    if isinstance(sock, TlsSocket):
        sock.finish()
    else:
        send_views(sock, views, nbytes)


def send_views(sock: ByteStream, views: list[memoryview], nbytes: int) -> None:
    """Sends all views in order, in plain usually with one system call."""
    if isinstance(sock, TlsSocket):
        sock.send_views(views)
        return
    while nbytes > 0:
        sent = sock.sendmsg(views[:IOV_MAX])
        nbytes -= sent
        if nbytes > 0:
            views = advanced(views, sent)


def advanced(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """Returns what is left of `views` after their first `done` bytes."""
    at = 0
    while at < len(views) and done >= len(views[at]):
        done -= len(views[at])
        at += 1
    return [views[at][done:], *views[at + 1 :]] if at < len(views) else []
