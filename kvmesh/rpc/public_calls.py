"""Calls of strangers: who may send a message, how many are received at once, and how many calls run.

gRPC receives a message before the handler of a unary call hears of it. Here every call of a public server is served as
a stream, so that nothing beyond a window of 16 KiB (64 KiB before the caller has heard of it) is taken of a call until
its key was checked and it has a place among those that are receiving.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, Protocol

import grpc
import grpc.aio

from kvmesh.errors import DeadlinePassed, InvalidRequest, KvmeshError, Overloaded
from kvmesh.rpc.call_limits import CallLimits
from kvmesh.rpc.status import abort, named

RETRY_AFTER_MS = 1_000
WINDOW_BYTES = 16 << 10  # what a caller may send of a message that is not being received yet
Metadata = Iterable[tuple[str, str | bytes]] | None
_HEALTH = "/grpc.health.v1.Health/"
_REFLECTION = "/grpc.reflection."


class HeldMemory(Protocol):
    """Bytes that a call holds until `release`."""

    def release(self) -> None: ...


class CallPolicy(Protocol):
    """What a public server asks its service before and after it receives a call's message."""

    keys_required: bool

    def authorize(self, method: str, metadata: Metadata) -> str:
        """Returns the caller's name, "" for one without. It is called before the call's message is received. Raises
        Unauthorized."""

    def hold(self, method: str, message: bytes) -> HeldMemory:
        """Reserves memory for a message that was received. Raises Overloaded, BodyTooLarge, or InvalidRequest for a
        message that must not be parsed."""


class ReceivePlaces:
    """Lets at most `places` messages be received at once; further calls wait. Callers (tenants, or addresses where no
    key is required) take turns, so one that opens many calls delays its own.

    A message has `receive_s` seconds; while others wait it has `give_way_s`, so a caller that sends slowly or not at
    all delays the others for no longer.
    """

    def __init__(self, places: int, *, waiting: int, wait_s: float, receive_s: float, give_way_s: float) -> None:
        self._places = places
        self._most_waiting = waiting
        self._wait_s = wait_s
        self._receive_s = receive_s
        self._give_way_s = give_way_s
        self._receiving: dict[asyncio.Timeout, float] = {}  # deadline → start, oldest first
        self._taken = 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by caller; whose turn is next comes first
        self.waiting = 0

    @property
    def taken(self) -> int:
        """The number of places in use."""
        return self._taken

    async def receive(self, read: Callable[[], Awaitable[Any]], caller: str = "") -> Any:
        """Returns what `read` returns. Raises Overloaded when no place became free in time, DeadlinePassed when the
        message did not arrive in time."""
        await self._enter(caller)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._receive_s) as deadline:
                self._receiving[deadline] = loop.time()
                self._press()
                try:
                    return await read()
                finally:
                    del self._receiving[deadline]
        except TimeoutError:
            raise DeadlinePassed("message: not received in time", field="message") from None
        finally:
            self._leave()

    async def _enter(self, caller: str) -> None:
        if self._taken < self._places and not self._waiting:
            self._taken += 1
            return
        if self.waiting >= self._most_waiting:
            raise Overloaded("too many calls wait to be received", retry_after_ms=RETRY_AFTER_MS)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        self.waiting += 1
        self._press()
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except BaseException as err:
            if turn.done() and not turn.cancelled():  # its turn came while it was being given up
                self._leave()
            else:
                self._forget(caller, turn)
            if isinstance(err, TimeoutError):
                raise Overloaded("the call waited too long to be received", retry_after_ms=RETRY_AFTER_MS) from None
            raise

    def _leave(self) -> None:
        while self._waiting:
            caller, turns = next(iter(self._waiting.items()))
            turn = turns.popleft()
            self.waiting -= 1
            del self._waiting[caller]
            if turns:
                self._waiting[caller] = turns  # behind the others
            if not turn.done():
                turn.set_result(None)  # the place passes on
                return
        self._taken -= 1

    def _forget(self, caller: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(caller, deque())
        if turn in turns:
            turns.remove(turn)
            self.waiting -= 1
            if not turns:
                del self._waiting[caller]

    def _press(self) -> None:
        """Shortens the time of as many of the oldest messages as calls wait."""
        for deadline, start in list(self._receiving.items())[: self.waiting]:
            last, when = start + self._give_way_s, deadline.when()
            if not deadline.expired() and when is not None and last < when:
                deadline.reschedule(last)


class PublicCalls(grpc.aio.ServerInterceptor):
    """The outermost interceptor of a public server. `open_methods` need no key; those in `without_message` take an
    empty message, which is not even received."""

    def __init__(
        self,
        limits: CallLimits,
        policy: CallPolicy,
        *,
        open_methods: Collection[str] = (),
        without_message: Collection[str] = (),
    ) -> None:
        self._limits = limits
        self._policy = policy
        self._open = frozenset(open_methods)
        self.keys_required = policy.keys_required
        self._without_message = frozenset(without_message)
        self.calls = 0
        self.open_calls = 0
        self.places = ReceivePlaces(
            limits.receiving,
            waiting=limits.waiting,
            wait_s=limits.wait_s,
            receive_s=limits.receive_s,
            give_way_s=limits.give_way_s,
        )
        # Health checks are tiny and come in one packet with their headers: who is slower gives way almost at once.
        self.open_places = ReceivePlaces(
            limits.receiving, waiting=limits.open_calls, wait_s=2.0, receive_s=2.0, give_way_s=0.1
        )
        self._wrapped: dict[str, tuple[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Serves the handler that `continuation` finds as a stream of raw messages."""
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None  # gRPC answers UNIMPLEMENTED, unread
        known = self._wrapped.get(method)
        if known is not None and known[0] is handler:
            return known[1]
        serve = self._stream(handler, method) if handler.request_streaming else self._message(handler, method)
        made = grpc.stream_stream_rpc_method_handler(
            serve,
            request_deserializer=handler.request_deserializer if handler.request_streaming else None,
            response_serializer=handler.response_serializer,
        )
        self._wrapped[method] = handler, made
        return made

    def _needs_no_key(self, method: str) -> bool:
        return method in self._open or method.startswith((_HEALTH, _REFLECTION))

    @contextlib.contextmanager
    def _counted(self, method: str) -> Any:
        needs_no_key = self._needs_no_key(method)
        if self.calls >= self._limits.calls:
            raise Overloaded(f"{self.calls} calls run already", retry_after_ms=RETRY_AFTER_MS)
        # Who watches health is counted there.
        limit = self._limits.open_calls + (self._limits.watchers if method.startswith(_HEALTH) else 0)
        if needs_no_key and self.open_calls >= limit:
            raise Overloaded(f"{self.open_calls} calls without a key run already", retry_after_ms=RETRY_AFTER_MS)
        self.calls += 1
        self.open_calls += needs_no_key
        try:
            yield
        finally:
            self.calls -= 1
            self.open_calls -= needs_no_key

    def _message(self, handler: Any, method: str) -> Callable[[Any, Any], Awaitable[None]]:
        behavior = handler.unary_stream if handler.response_streaming else handler.unary_unary
        generator = inspect.isasyncgenfunction(behavior)
        needs_no_key = self._needs_no_key(method)
        places = self.open_places if needs_no_key else self.places

        async def serve(_: Any, context: Any) -> None:
            holding: HeldMemory | None = None
            try:
                with self._counted(method):
                    message = b""
                    caller = ""
                    if not needs_no_key:
                        caller = self._policy.authorize(method, context.invocation_metadata())
                    if method not in self._without_message:
                        caller = caller or context.peer().rpartition(":")[0]
                        message = await places.receive(context.read, caller)
                        if message is grpc.aio.EOF:
                            raise InvalidRequest("message: required and missing", field="message")
                        if not needs_no_key:
                            holding = self._policy.hold(method, message)
                    request = handler.request_deserializer(message)
                    del message
                    if generator:
                        async for response in behavior(request, context):
                            await context.write(response)
                        return
                    response = await behavior(request, context)
                    if not handler.response_streaming:
                        await context.write(response)
            except KvmeshError as err:
                await abort(context, err)
            except asyncio.CancelledError:
                raise
            except Exception as err:
                if isinstance(err, grpc.aio.AbortError | grpc.aio.UsageError):
                    raise
                await abort(context, named(method, err))
            finally:
                if holding is not None:
                    holding.release()

        return serve

    def _stream(self, handler: Any, method: str) -> Callable[[Any, Any], Awaitable[None]]:
        """Serves a stream of requests. Only reflection has one; a call of it ends after `receive_s`."""
        behavior = handler.stream_stream

        async def serve(messages: Any, context: Any) -> None:
            try:
                with self._counted(method):
                    if not self._needs_no_key(method):
                        self._policy.authorize(method, context.invocation_metadata())
                    async with asyncio.timeout(self._limits.receive_s):
                        if inspect.isasyncgenfunction(behavior):
                            async for response in behavior(messages, context):
                                await context.write(response)
                        else:
                            await behavior(messages, context)
            except TimeoutError:
                await abort(context, DeadlinePassed(f"calls of this method end after {self._limits.receive_s:g} s"))
            except KvmeshError as err:
                await abort(context, err)

        return serve


def few_fields(message: bytes, most: int, nested: Collection[int] = ()) -> bool:
    """Says whether a protobuf message, with what its fields numbered in `nested` hold, has at most `most` fields,
    without parsing it: a field of two bytes can become an object of a hundred. Bytes that are no message are left to
    the parser, which refuses them."""
    return _fields(message, 0, len(message), most, frozenset(nested)) is not None


def _fields(message: bytes, at: int, end: int, left: int, nested: frozenset[int] | None) -> int | None:
    """Returns how many of `left` fields are still allowed after message[at:end], or None when there are more."""
    while at < end:
        if left <= 0:
            return None
        left -= 1
        tag, at = _varint(message, at, end)
        kind = tag & 7
        if kind == 0:
            _, at = _varint(message, at, end)
        elif kind == 1:
            at += 8
        elif kind == 2:
            length, at = _varint(message, at, end)
            if nested and tag >> 3 in nested:
                inner = _fields(message, at, min(end, at + length), left, None)
                if inner is None:
                    return None
                left = inner
            at += length
        elif kind == 5:
            at += 4
        # 3 and 4 open and close a group: what is in it is counted like the rest.
    return left


def _varint(message: bytes, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 70:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return value, max(at, end)
