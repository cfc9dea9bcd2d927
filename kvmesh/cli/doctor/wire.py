"""How two doctors talk: one TCP connection, each message its length and msgpack; both prove that they know the token.

caller  ── Hello(nonce) ──▶  listener
        ◀── Hello(nonce) ──
        ── Proof(HMAC) ───▶
        ◀── Proof(HMAC) ──   or Sorry
        ── Open, Begin, Check, End, Fill, Shut ──▶  one answer each: Opened, Done or Sorry
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import socket
import struct
import time
from contextlib import suppress

import msgspec

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.transfer.transports.wire import UNREADABLE

VERSION = 1
DEFAULT_PORT = 7040
MAX_MESSAGE = 2 << 20
MAX_QUIET_S = 900.0
_HEAD = struct.Struct("<I")


class Message(msgspec.Struct, frozen=True, tag=True):
    """Anything that is said."""


class Hello(Message, frozen=True):
    """`quiet_s`: the caller may be silent for so long while it measures."""

    version: int
    nonce: bytes
    quiet_s: float = 0.0


class Proof(Message, frozen=True):
    mac: bytes


class Open(Message, frozen=True):
    """Start an engine of this transport with memory of `size` bytes."""

    transport: str
    size: int


class Opened(Message, frozen=True):
    """`left_out`: NICs of the listener that are not tried, and why."""

    descriptor: bytes
    offset: int
    left_out: tuple[str, ...] = ()


class Begin(Message, frozen=True):
    """Wipe the memory and let `writer` write into it in this epoch."""

    writer: str
    epoch: int


class Check(Message, frozen=True):
    """Is the memory what `seed` makes?"""

    seed: int


class End(Message, frozen=True):
    """Fence that epoch."""

    writer: str
    epoch: int


class Fill(Message, frozen=True):
    """Fill the memory with what `seed` makes."""

    seed: int


class Shut(Message, frozen=True):
    """End the engine."""


class Bye(Message, frozen=True):
    """The caller is through; no answer."""


class Done(Message, frozen=True):
    """`differs_at`: the first wrong byte; -1: none."""

    differs_at: int = -1


class Sorry(Message, frozen=True):
    why: str


Any_ = Hello | Proof | Open | Opened | Begin | Check | End | Fill | Shut | Bye | Done | Sorry
_DECODER: msgspec.msgpack.Decoder[Any_] = msgspec.msgpack.Decoder(Any_)


class DoctorGone(KvmeshError):
    """The other doctor is gone, silent, or not one."""


class Channel:
    """One connection; every call has a deadline."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.sock = sock
        self.name = name
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @property
    def local_host(self) -> str:
        return plain(self.sock.getsockname()[0])

    def send(self, message: Message, timeout_s: float) -> None:
        body = msgspec.msgpack.encode(message)
        try:
            self.sock.settimeout(timeout_s)
            self.sock.sendall(_HEAD.pack(len(body)) + body)
        except OSError as err:
            raise DoctorGone(f"{self.name}: {err.strerror or err}") from None

    def take(self, timeout_s: float) -> Any_:
        """The next message. Hung when there is none in time or it is nonsense."""
        deadline = time.monotonic() + timeout_s
        size = int(_HEAD.unpack(self._exactly(_HEAD.size, deadline, timeout_s))[0])
        if size > MAX_MESSAGE:
            raise DoctorGone(f"{self.name}: what answers there is no kvmesh doctor")
        try:
            return _DECODER.decode(self._exactly(size, deadline, timeout_s))
        except UNREADABLE:
            raise DoctorGone(f"{self.name}: what answers there is no kvmesh doctor of this version") from None

    def _exactly(self, size: int, deadline: float, timeout_s: float) -> bytes:
        found = bytearray()
        while len(found) < size:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DoctorGone(f"{self.name}: no answer within {timeout_s:g} s")
            try:
                self.sock.settimeout(left)
                some = self.sock.recv(min(size - len(found), 1 << 16))
            except TimeoutError:
                continue
            except OSError as err:
                raise DoctorGone(f"{self.name}: {err.strerror or err}") from None
            if not some:
                raise DoctorGone(f"{self.name}: hung up")
            found += some
        return bytes(found)

    def ask(self, message: Message, timeout_s: float) -> Any_:
        """The answer; Unavailable with its words when it is Sorry."""
        self.send(message, timeout_s)
        answer = self.take(timeout_s)
        if isinstance(answer, Sorry):
            raise Unavailable(answer.why)
        return answer

    def close(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def plain(host: str) -> str:
    """ "::ffff:10.0.0.1", as a socket of both families says it, is 10.0.0.1."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped) if mapped else host


# ── greeting ──────────────────────────────────────────────────────────────────────────────────────


def greet(channel: Channel, token: str, quiet_s: float, timeout_s: float) -> None:
    """As the caller. Unavailable when the listener refuses, Hung when it is none."""
    mine = secrets.token_bytes(16)
    theirs = _hello(channel.ask(Hello(VERSION, mine, quiet_s), timeout_s), channel)
    answer = channel.ask(Proof(_mac(token, b"call", mine, theirs.nonce)), timeout_s)
    if not isinstance(answer, Proof) or not _same(answer.mac, _mac(token, b"listen", mine, theirs.nonce)):
        raise Unavailable(f"{channel.name}: it does not know the token")


def receive(channel: Channel, token: str, timeout_s: float) -> float:
    """As the listener; returns how long the caller may be silent. Hung when it is no caller, or knows no token."""
    theirs = _hello(channel.take(timeout_s), channel)
    mine = secrets.token_bytes(16)
    channel.send(Hello(VERSION, mine), timeout_s)
    proof = channel.take(timeout_s)
    if not isinstance(proof, Proof) or not _same(proof.mac, _mac(token, b"call", theirs.nonce, mine)):
        channel.send(Sorry("the token is wrong: use the one that `kvmesh doctor --listen` shows"), timeout_s)
        raise DoctorGone(f"{channel.name}: came with a wrong token")
    channel.send(Proof(_mac(token, b"listen", theirs.nonce, mine)), timeout_s)
    return min(max(theirs.quiet_s, timeout_s), MAX_QUIET_S)


def _hello(message: Any_, channel: Channel) -> Hello:
    if not isinstance(message, Hello) or message.version != VERSION:
        raise DoctorGone(f"{channel.name}: is no kvmesh doctor of this version")
    return message


def _mac(token: str, who: bytes, caller: bytes, listener: bytes) -> bytes:
    return hmac.digest(token.encode(), who + caller + listener, hashlib.sha256)


def _same(one: bytes, other: bytes) -> bool:
    return hmac.compare_digest(one, other)
