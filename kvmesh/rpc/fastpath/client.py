"""The caller's side: one connection to one incarnation, with any number of calls on it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import socket
import time
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from kvmesh.errors import DeadlinePassed, KvmeshError, Unavailable
from kvmesh.rpc import status
from kvmesh.rpc.fastpath import frames
from kvmesh.rpc.fastpath.calls import Sweep
from kvmesh.rpc.pb import common_pb2

log = logging.getLogger(__name__)

MAX_CALLS = 1000  # under way at once; the server takes a few more
_BUFFERED = 1 << 20  # bytes that wait to be sent, before other ways are better
_MAX_ID = 1 << 32

Way = str | tuple[str, int]  # "@name" of a Unix socket, or (host, port)


class FastChannelClosed(status.Unreachable):
    """The connection does not exist or broke: whether a call under way was executed is unknown."""


class _Pending:
    __slots__ = ("answer", "deadline", "method", "sent")

    def __init__(self, answer: asyncio.Future[bytes], method: bytes, sent: float, timeout_s: float) -> None:
        self.answer = answer
        self.method = method
        self.sent = sent
        self.deadline = sent + timeout_s


class FastChannel(asyncio.Protocol):
    """One connection over a fast path. `dial` makes it; it lives on one event loop and must be closed."""

    def __init__(self, life: int, ticket: bytes = b"") -> None:
        self.answered = False  # it has kept its promise once
        self.greeted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._life = life
        self._ticket = ticket
        self._loop = asyncio.get_running_loop()
        self._reader = frames.FrameReader()
        self._transport: asyncio.Transport | None = None
        self._pending: dict[int, _Pending] = {}
        self._ids = itertools.count(1)
        self._sweep = Sweep(self._due)
        self._heard = 0.0
        self._open = self._silent = self._full = False

    @property
    def open(self) -> bool:
        """Whether the connection is alive, as far as is known."""
        return self._transport is not None

    @property
    def usable(self) -> bool:
        """Whether a call sent now is likely to be answered: the connection is open and not full, and no call's whole
        time has passed on it without a byte."""
        return self._open and not self._silent and not self._full and len(self._pending) < MAX_CALLS

    async def call(self, method: bytes, body: bytes, timeout_s: float) -> bytes:
        """Returns the answer's bytes. Raises what the servicer raised; DeadlinePassed; FastChannelClosed when the
        connection breaks meanwhile, or is not open."""
        if not self._open or self._transport is None:
            raise FastChannelClosed("the door is closed")
        call = next(self._ids) % _MAX_ID
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._pending[call] = pending = _Pending(answer, method, time.monotonic(), timeout_s)
        self._sweep.by(pending.deadline)
        self._transport.write(frames.encode(frames.CALL, call, body, method, max(1, int(timeout_s * 1000))))
        try:
            return await answer
        except asyncio.CancelledError:
            self._drop(call)
            if answer.done() and not answer.cancelled():
                answer.exception()  # it came too late for its caller
            raise

    def close(self, why: str = "the door was closed here") -> None:
        """Closes the connection; waiting calls raise Unavailable. It is idempotent."""
        transport, self._transport = self._transport, None
        self._open = False
        if transport is not None:
            transport.abort()
        self._sweep.close()
        pending, self._pending = self._pending, {}
        for one in pending.values():
            if not one.answer.done():
                one.answer.set_exception(FastChannelClosed(f"{one.method.decode()}: {why}"))
        if not self.greeted.done():
            self.greeted.set_exception(Unavailable(why))
            self.greeted.exception()  # heard, whether or not anybody is there

    # ── the connection ───────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.set_write_buffer_limits(high=_BUFFERED)
        transport.write(frames.hello(self._life, self._ticket))

    def connection_lost(self, error: Exception | None) -> None:
        self.close(f"the connection broke{f': {error}' if error else ''}")

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False

    def data_received(self, data: bytes) -> None:
        self._heard, self._silent = time.monotonic(), False
        try:
            for frame in self._reader.feed(data):
                self._take(frame)
        except (frames.BadFrame, DecodeError) as err:
            log.warning("a door is closed: not understood: %s", err)
            self.close(f"its answer was not understood: {err}")

    def _take(self, frame: frames.CallFrame) -> None:
        if not self._open:
            if frames.life_of(frame) != self._life:
                raise frames.BadFrame("another life answers")
            self._open = True
            if not self.greeted.done():
                self.greeted.set_result(None)
            return
        if frame.kind not in (frames.ANSWER, frames.ERROR):
            raise frames.BadFrame(f"kind={frame.kind}: not said by those who answer")
        self.answered = True
        pending = self._pending.pop(frame.call, None)
        if pending is None or pending.answer.done():
            return  # nobody waits any more
        if frame.kind == frames.ANSWER:
            pending.answer.set_result(frame.body)
        else:
            pending.answer.set_exception(_error(frame.body))

    def _drop(self, call: int) -> None:
        """Forgets a call that nobody waits for any more, and tells the server."""
        if self._pending.pop(call, None) is not None and self._transport is not None:
            self._transport.write(frames.encode(frames.CANCEL, call))

    def _due(self, now: float) -> float:
        for call, one in list(self._pending.items()):
            if one.deadline > now:
                continue
            self._drop(call)
            self._silent = self._silent or self._heard < one.sent
            if not one.answer.done():
                waited = one.deadline - one.sent
                one.answer.set_exception(DeadlinePassed(f"{one.method.decode()}: no answer within {waited:.3f} s"))
        if self._silent and not self._pending:
            self.close("it is silent")
        return min((one.deadline for one in self._pending.values()), default=math.inf)


def _error(body: bytes) -> KvmeshError:
    """Returns the error in an ERROR frame. Raises DecodeError when there is none."""
    return status.from_detail(common_pb2.ErrorDetail.FromString(body))


async def dial(ways: Sequence[Way], life: int, timeout_s: float, ticket: bytes = b"") -> FastChannel:
    """Returns a connection by the first of these paths that leads to incarnation `life`; each is tried for `timeout_s`.
    `ticket` is what the process has given for it. Raises Unavailable when none does."""
    why = "there is none"
    for way in ways:
        door = FastChannel(life, ticket)
        try:
            async with asyncio.timeout(timeout_s):
                await _connect(door, way)
                await door.greeted
            return door
        except (OSError, TimeoutError, KvmeshError) as err:
            why = f"{way}: {err or type(err).__name__}"
            door.close()
        except BaseException:
            door.close()
            raise
    raise Unavailable(f"no door leads there: {why}")


async def _connect(door: FastChannel, way: Way) -> None:
    loop = asyncio.get_running_loop()
    if not isinstance(way, str):
        await loop.create_connection(lambda: door, *way)
        return
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect("\0" + way[1:])  # a Unix socket's caller never waits: it is taken, or refused
        await loop.create_unix_connection(lambda: door, sock=sock)
    except BaseException:
        sock.close()
        raise
