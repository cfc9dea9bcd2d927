"""The few parts of ZeroMQ's wire protocol (ZMTP 3.0, NULL mechanism) that a reader of an engine's KV events needs: one
connection as SUB, which subscribes to everything, or as DEALER, which asks for what was missed.

It is written here because it is short, needs no library that brings its own threads and queues, and lets what a peer
sends be bounded before it is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Sequence

from kvmesh.errors import InternalError, Unavailable

MAX_MESSAGE_BYTES = 4 << 20
MAX_PARTS = 8  # of one message
GREETING_BYTES = 64
_SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
_GREETING = (_SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0")).ljust(GREETING_BYTES, b"\0")
_MORE, _LONG, _COMMAND = 1, 2, 4
MAX_COMMAND_BYTES = 4_096
SUBSCRIBE_ALL = b"\x01"


def frame(body: bytes, flags: int = 0) -> bytes:
    """Returns a frame as it is sent."""
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | _LONG,)) + struct.pack(">Q", len(body)) + body


def message(parts: Sequence[bytes]) -> bytes:
    """Returns a message of some parts as it is sent."""
    last = len(parts) - 1
    return b"".join(frame(part, _MORE if at < last else 0) for at, part in enumerate(parts))


def ready_command(socket_type: bytes) -> bytes:
    """Returns the command that ends a handshake."""
    told = b"\x05READY"
    for name, value in ((b"Socket-Type", socket_type), (b"Identity", b"")):
        told += bytes((len(name),)) + name + struct.pack(">I", len(value)) + value
    return frame(told, _COMMAND)


class ZmtpConnection:
    """One connection whose handshake is done. Raises Unavailable where the peer is gone or silent, InternalError where
    it does not speak the protocol."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, where: str) -> None:
        self._reader, self._writer, self._where = reader, writer, where

    @staticmethod
    @contextlib.asynccontextmanager
    async def open(host: str, port: int, socket_type: bytes, timeout_s: float) -> AsyncIterator[ZmtpConnection]:
        """Connects as a socket of that type ("SUB", "DEALER"), and closes at the end."""
        where = f"tcp://{host}:{port}"
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(host, port)
        except TimeoutError:
            raise Unavailable(f"{where} did not take a connection within {timeout_s:g} s") from None
        except OSError as err:
            raise Unavailable(f"{where} cannot be reached: {err.strerror or err}") from None
        try:
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # an engine may have nothing to tell for hours
            found = ZmtpConnection(reader, writer, where)
            try:
                async with asyncio.timeout(timeout_s):
                    await found._shake_hands(socket_type)
            except TimeoutError:
                raise Unavailable(f"{where} did not end the handshake of ZMTP within {timeout_s:g} s") from None
            yield found
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await writer.wait_closed()

    async def _shake_hands(self, socket_type: bytes) -> None:
        self._writer.write(_GREETING)
        told = await self._exactly(GREETING_BYTES)
        if told[0] != 0xFF or told[9] != 0x7F or told[10] < 3:
            raise InternalError(f"{self._where} does not speak ZMTP 3")
        if (mechanism := told[12:32].rstrip(b"\0")) != b"NULL":
            raise InternalError(f"{self._where} wants the security mechanism {mechanism!r}; only NULL is known here")
        self._writer.write(ready_command(socket_type))
        flags, body = await self._frame(MAX_COMMAND_BYTES)
        if not flags & _COMMAND or not body.startswith(b"\x05READY"):
            raise InternalError(f"{self._where} refused the handshake: {body[:80]!r}")

    async def send(self, parts: Sequence[bytes], timeout_s: float) -> None:
        """Sends one message."""
        self._writer.write(message(parts))
        try:
            async with asyncio.timeout(timeout_s):
                await self._writer.drain()
        except (OSError, TimeoutError) as err:
            raise Unavailable(f"{self._where} takes nothing: {err}") from None

    async def receive(self, timeout_s: float | None) -> list[bytes]:
        """Returns the parts of the next message. `timeout_s` None: it may never come, as with events of an engine that
        has nothing to do; a message that has begun is waited for as well."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    flags, body = await self._frame(MAX_MESSAGE_BYTES - size)
                    if flags & _COMMAND:
                        continue
                    parts.append(body)
                    size += len(body)
                    if not flags & _MORE:
                        return parts
                    if len(parts) == MAX_PARTS:
                        raise InternalError(f"{self._where} sent a message of more than {MAX_PARTS} parts")
        except TimeoutError:
            raise Unavailable(f"{self._where} sent nothing for {timeout_s:g} s") from None

    async def _frame(self, most: int) -> tuple[int, bytes]:
        flags = (await self._exactly(1))[0]
        if flags & ~(_MORE | _LONG | _COMMAND):
            raise InternalError(f"{self._where} sent a frame with the flags {flags:#04x}")
        length = int.from_bytes(await self._exactly(8 if flags & _LONG else 1), "big")
        if length > most:
            raise InternalError(f"{self._where} sent a message of more than {MAX_MESSAGE_BYTES} bytes")
        return flags, await self._exactly(length)

    async def _exactly(self, count: int) -> bytes:
        try:
            return await self._reader.readexactly(count)
        except asyncio.IncompleteReadError:
            raise Unavailable(f"{self._where} closed the connection") from None
        except OSError as err:
            raise Unavailable(f"the connection to {self._where} broke: {err.strerror or err}") from None
