"""Two-way gRPC streams: a hello each way, then messages in both directions until one side ends it.

`ClientStream` dials, `ServerStream` answers. Both read in one task and write in another; every write has a deadline,
and what waits to be written is bounded. Nothing here dials again: whoever needs the peer next opens another stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from kvmesh.errors import HandoffLost, InternalError, InvalidRequest, KvmeshError, ProtocolMismatch, Unavailable
from kvmesh.rpc import channels, protocol, status
from kvmesh.rpc.authorisation import ServerRole

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
WRITE_TIMEOUT_S = 10.0  # a peer that takes nothing for this long is gone, whatever its TCP connection says
END_TIMEOUT_S = 1.0  # for the peer's last words
MOST_QUEUED = 1 << 14  # messages that the peer has not taken yet

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


class WriteDeadline:
    """The deadline of each write of one stream. One timer serves them all: a write only notes until when it may last,
    and the timer looks now and then whether one is late. A timer a write costs as much as the message."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._until = 0.0  # of the write under way; 0: there is none
        self._writer: asyncio.Task[Any] | None = None
        self._late = False
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self, write: Awaitable[Any], timeout_s: float) -> None:
        """Wait for `write`. Raises TimeoutError when it takes longer."""
        self._until = self._loop.time() + timeout_s
        self._writer = asyncio.current_task()
        if self._timer is None:
            self._timer = self._loop.call_at(self._until, self._look)
        elif self._timer.when() > self._until:
            self._timer.cancel()
            self._timer = self._loop.call_at(self._until, self._look)
        try:
            await write
        except asyncio.CancelledError:
            if not self._late or (self._writer is not None and self._writer.uncancel()):
                raise
            raise TimeoutError from None
        finally:
            self._until, self._late, self._writer = 0.0, False, None

    def _look(self) -> None:
        self._timer = None
        if not self._until or self._writer is None:
            return  # the next write begins another
        if self._loop.time() < self._until:
            self._timer = self._loop.call_at(self._until, self._look)
        else:
            self._late = True
            self._writer.cancel()

    def close(self) -> None:
        """No write follows."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ClientStream(Generic[RequestT, ResponseT]):
    """One stream to one server, and its channel. `who` names the server in errors. `send` may be called before `open`
    has returned, which saves a round trip; the hello is sent first all the same."""

    def __init__(self, who: str, address: str, method: Callable[[grpc.aio.Channel], Any]) -> None:
        self.who = who
        self._method = method
        self._channel = channels.connect(address, ServerRole.INSTANCE)  # only those serve streams
        self._call: Any = None
        self._queue: deque[tuple[RequestT, Callable[[], None] | None]] = deque()
        self._news = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._stuck = False  # the peer takes no messages

    def send(self, message: RequestT, written: Callable[[], None] | None = None) -> None:
        """Queues a message without blocking; `written` is called when gRPC has taken it. A full queue ends the
        stream."""
        if len(self._queue) < MOST_QUEUED:
            self._queue.append((message, written))
            self._news.set()
        else:
            self._give_up()

    async def open(self, hello: RequestT, timeout_s: float) -> ResponseT:
        """Dials, exchanges hellos and returns the server's. Raises Unavailable when nobody answers in time, HandoffLost
        or ProtocolMismatch when the stream ends instead."""
        self._queue.appendleft((hello, None))
        self._news.set()
        try:
            async with asyncio.timeout(timeout_s):
                self._call = self._method(self._channel)
                self._writer = asyncio.create_task(self._write(timeout_s), name=f"write to {self.who}")
                first = await self._call.read()
        except TimeoutError:
            raise Unavailable(f"{self.who} did not answer within {timeout_s:g} s") from None
        except (grpc.RpcError, asyncio.InvalidStateError) as err:
            raise await self._why(err) from None
        except asyncio.CancelledError:
            if self._was_cancelled_by_us():
                raise await self._why(None) from None
            raise
        if first is grpc.aio.EOF or self._stuck:
            raise await self._why(None)
        if not first.HasField("hello"):
            raise ProtocolMismatch(f"{self.who} began without a hello", field="protocol_version")
        protocol.check(first.hello.protocol_version, self.who)
        welcome: ResponseT = first
        return welcome

    async def read(self, take: Callable[[ResponseT], None]) -> KvmeshError:
        """Gives every message to `take` until the stream ends, and returns why it ended. A message that `take` cannot
        read ends it, too."""
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                take(message)
            return await self._why(None)
        except (grpc.RpcError, asyncio.InvalidStateError) as err:
            return await self._why(err)
        except asyncio.CancelledError:
            if self._was_cancelled_by_us():
                return await self._why(None)
            raise
        except Exception as err:
            log.exception("%s: bad message", self.who)
            return InternalError(f"{self.who} sent a message that cannot be read: {type(err).__name__}: {err}")

    async def _write(self, connect_s: float) -> None:
        timeout_s = connect_s + WRITE_TIMEOUT_S  # the first write waits for the connection
        deadline = WriteDeadline()
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                while self._queue:
                    message, written = self._queue.popleft()
                    await deadline.wait(self._call.write(message), timeout_s)
                    timeout_s = WRITE_TIMEOUT_S
                    if written is not None:
                        written()
        except TimeoutError:
            log.warning("%s takes no messages", self.who)
            self._give_up()
        except (grpc.RpcError, asyncio.InvalidStateError):
            return  # the reader knows why
        finally:
            deadline.close()

    def _give_up(self) -> None:
        self._stuck = True
        if self._call is not None:
            self._call.cancel()  # the reader ends, and with it the stream

    def _was_cancelled_by_us(self) -> bool:
        """Says whether `_give_up` cancelled the call. The reader then gets a CancelledError as if its task were
        cancelled."""
        task = asyncio.current_task()
        return self._stuck and task is not None and not task.cancelling()

    async def _why(self, err: BaseException | None) -> KvmeshError:
        """Returns the named error of a stream that ended: what the peer said, if it said anything."""
        if self._stuck:
            return HandoffLost(f"{self.who} takes no messages")
        if isinstance(err, grpc.RpcError):
            named = status.from_rpc_error(err)
            return named if isinstance(named, ProtocolMismatch) else HandoffLost(f"{self.who} is lost: {named.message}")
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                code, details = await self._call.code(), await self._call.details()
        except TimeoutError:
            code, details = None, ""
        if code in (None, grpc.StatusCode.OK):
            return HandoffLost(f"{self.who} closed the stream")
        return HandoffLost(f"{self.who} is lost: {details or code.name}")

    async def close(self) -> None:
        """Ends the stream if it is alive; no task or socket of it is left afterwards."""
        if self._call is not None:
            self._call.cancel()
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        await self._channel.close(grace=None)


class ServerStream(Generic[RequestT, ResponseT]):
    """One stream of one client. The servicer's method must be a coroutine that writes to its context, because only then
    can a write have a deadline."""

    def __init__(
        self, requests: AsyncIterator[RequestT], context: Any, *, write_timeout_s: float = WRITE_TIMEOUT_S
    ) -> None:
        self.who = "the client"
        self._deadline = WriteDeadline()
        self._write_timeout_s = write_timeout_s
        self._requests = requests
        self._context = context

    async def hello(self) -> Any:
        """Returns the client's first message. Raises InvalidRequest when that is no hello or does not come in time."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first: Any = await anext(aiter(self._requests))
        except TimeoutError:
            raise InvalidRequest(f"no hello within {HELLO_TIMEOUT_S:g} s", field="hello") from None
        except StopAsyncIteration:
            raise InvalidRequest("the stream ended before its hello", field="hello") from None
        if not first.HasField("hello"):
            raise InvalidRequest.of("kind", first.WhichOneof("kind"), "a stream begins with hello")
        return first.hello

    async def write(self, message: ResponseT) -> None:
        """Writes a message. Raises Unavailable when the client does not take it in time."""
        try:
            await self._deadline.wait(self._context.write(message), self._write_timeout_s)
        except TimeoutError:
            raise Unavailable(f"{self.who} took no message for {self._write_timeout_s:g} s") from None

    async def serve(
        self,
        read: Callable[[RequestT], None],
        outgoing: Callable[[], Sequence[ResponseT]],
        news: asyncio.Event,
        over: Callable[[], bool],
    ) -> bool:
        """Gives every request to `read`, and writes what `outgoing` returns whenever `news` is set; what accumulates
        during a write is written next. Returns False when the client ends the stream or it breaks, True when `over`
        says so; both only when nothing is left to write. An exception of `read` ends the stream, too."""
        reader = asyncio.create_task(self._read(read), name=f"read from {self.who}")
        reader.add_done_callback(lambda _: news.set())
        try:
            while True:
                messages = outgoing()
                for message in messages:
                    await self.write(message)
                if messages:
                    continue
                if reader.done():
                    reader.result()
                    return False
                if over():
                    return True
                await news.wait()
                news.clear()
        finally:
            self._deadline.close()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, read: Callable[[RequestT], None]) -> None:
        try:
            async for request in self._requests:
                read(request)
        except grpc.RpcError:
            return  # the stream broke: the next write, or nothing, is its end
