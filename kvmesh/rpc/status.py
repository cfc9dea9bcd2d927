"""`kvmesh.errors` carried over gRPC: a status code, a message and an `ErrorDetail` in trailing metadata."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvmesh.errors import (
    BY_CODE,
    BodyTooLarge,
    DeadlinePassed,
    InternalError,
    InvalidRequest,
    KvmeshError,
    NotLeader,
    Overloaded,
    PermissionDenied,
    ProtocolMismatch,
    RequestCancelled,
    TlsFailed,
    Unauthorized,
    Unavailable,
    UnknownInstance,
)
from kvmesh.rpc import security
from kvmesh.rpc.pb import common_pb2

log = logging.getLogger(__name__)

DETAIL_KEY = "kvmesh-error-bin"
# Trailing metadata is limited to 8 KiB by default; message and detail both carry the text.
MAX_TEXT = 1_500


class Unreachable(Unavailable):
    """The connection cannot be made, or broke; the peer itself has said nothing. Whether a call under way was executed
    is unknown. `why` is what is wrong with TLS, "" if nothing is known to be."""

    def __init__(self, message: str, *, field: str | None = None, retry_after_ms: int = 0, why: str = "") -> None:
        super().__init__(message, field=field, retry_after_ms=retry_after_ms)
        self.why = why


class NotServed(ProtocolMismatch):
    """The peer does not know the method: another service, or another version, listens there."""


_BY_STATUS: dict[grpc.StatusCode, type[KvmeshError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: UnknownInstance,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlinePassed,
    grpc.StatusCode.CANCELLED: RequestCancelled,
    grpc.StatusCode.FAILED_PRECONDITION: ProtocolMismatch,
    grpc.StatusCode.UNIMPLEMENTED: NotServed,
    grpc.StatusCode.UNAUTHENTICATED: Unauthorized,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}


def _clean(text: str) -> str:
    """Returns valid UTF-8 of at most MAX_TEXT characters, because user text may hold lone surrogates."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def to_detail(err: KvmeshError) -> common_pb2.ErrorDetail:
    """Returns the wire form of `err`."""
    return common_pb2.ErrorDetail(
        code=err.code,
        message=_clean(err.message),
        field=_clean(err.field or ""),
        retryable=err.retryable,
        retry_after_ms=max(0, min(err.retry_after_ms, 0xFFFFFFFF)),
        leader=_clean(err.leader) if isinstance(err, NotLeader) else "",
    )


def from_detail(detail: common_pb2.ErrorDetail) -> KvmeshError:
    """Returns the named error of `detail`; a code that this build does not know becomes Unavailable or
    InternalError."""
    cls = BY_CODE.get(detail.code) or (Unavailable if detail.retryable else InternalError)
    if cls is NotLeader:
        return NotLeader(
            detail.message, leader=detail.leader, field=detail.field or None, retry_after_ms=detail.retry_after_ms
        )
    return cls(detail.message, field=detail.field or None, retry_after_ms=detail.retry_after_ms)


def from_rpc_error(err: grpc.RpcError) -> KvmeshError:
    """Returns the named error of a failed call: the peer's own when it sent one, else the nearest to its status."""
    trailing = getattr(err, "trailing_metadata", lambda: None)()
    for key, value in trailing or ():
        if key == DETAIL_KEY:
            return from_detail(common_pb2.ErrorDetail.FromString(bytes(value)))
    code: Any = getattr(err, "code", lambda: None)()
    message = getattr(err, "details", lambda: None)() or str(code or err)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        return BodyTooLarge(message)  # gRPC's own limit, not a full peer
    if code is grpc.StatusCode.UNAVAILABLE and (why := security.explain(message)):
        return why if isinstance(why, TlsFailed) else Unreachable(why.message, why=why.message)
    return _BY_STATUS.get(code, InternalError)(message)


async def called(call: Any) -> Any:
    """Returns the answer of a gRPC call. Raises KvmeshError."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None


def trailing_metadata(err: KvmeshError) -> tuple[tuple[str, bytes], ...]:
    """Returns metadata from which `from_rpc_error` rebuilds `err` at the caller."""
    return ((DETAIL_KEY, to_detail(err).SerializeToString()),)


async def abort(context: Any, err: KvmeshError) -> NoReturn:
    """Ends the call of a servicer `context` with the status of `err`."""
    code = grpc.StatusCode[err.grpc_status]
    await context.abort(code, _clean(err.message), trailing_metadata=trailing_metadata(err))
    raise AssertionError("abort returned")


def named(method: str, err: Exception) -> KvmeshError:
    """Returns the error that a caller of `method` gets for what its handler raised; a defect is logged."""
    if isinstance(err, grpc.RpcError):
        err = from_rpc_error(err)
    if isinstance(err, DecodeError):  # not the service's fault: wrong bytes, or text that is not UTF-8
        err = InvalidRequest(f"message: cannot be read: {err}", field="message")
    if not isinstance(err, KvmeshError):
        log.error("%s failed: %s", method, err, exc_info=err)
        err = InternalError(f"{method.rsplit('/', 1)[-1]} failed: {type(err).__name__}: {err}")
    return err


async def _fail(context: Any, method: str, err: Exception) -> NoReturn:
    if isinstance(err, grpc.aio.AbortError | grpc.aio.UsageError):
        raise err  # the handler ended the call itself
    await abort(context, named(method, err))


_Behavior = Callable[[Any, Any], Any]
# (path, message, context): raises when the caller may not call that. Of a stream it is asked twice: without a message
# (None) when the call comes, and about the first one.
Guard = Callable[[str, Any, Any], None]


class GuardedRequests:
    """The messages of a stream of requests, of which the first is shown to `check` before anybody reads it."""

    def __init__(self, requests: AsyncIterator[Any], check: Callable[[Any], None]) -> None:
        self._requests = requests
        self._check = check
        self._checked = False

    def __aiter__(self) -> AsyncIterator[Any]:
        return aiter(self._requests) if self._checked else self  # further messages cost nothing more

    async def __anext__(self) -> Any:
        message = await anext(aiter(self._requests))
        if not self._checked:
            self._check(message)
            self._checked = True
        return message


def _guarded(request: Any, method: str, guard: Guard | None, context: Any) -> Any:
    """Returns the request, or the stream of them. Raises when the caller may not make this call, or sent no message."""
    if isinstance(request, DecodeError):
        raise request
    if guard is None:
        return request
    if not hasattr(request, "__aiter__"):
        guard(method, request, context)
        return request
    guard(method, None, context)
    return GuardedRequests(request, lambda message: guard(method, message, context))


def _readable(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Wraps `parse` so that it returns its DecodeError: gRPC would answer a raised one with UNKNOWN and a traceback."""

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as err:
            return err

    return read


def _guard_call(behavior: _Behavior, method: str, guard: Guard | None) -> Callable[[Any, Any], Awaitable[Any]]:
    async def call(request: Any, context: Any) -> Any:
        try:
            return await behavior(_guarded(request, method, guard, context), context)
        except asyncio.CancelledError:
            raise
        except Exception as err:
            await _fail(context, method, err)

    return call


def _guard_stream(behavior: _Behavior, method: str, guard: Guard | None) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for response in behavior(_guarded(request, method, guard, context), context):
                yield response
        except asyncio.CancelledError:
            raise
        except Exception as err:
            await _fail(context, method, err)

    return stream


class errors_to_status(grpc.aio.ServerInterceptor):  # noqa: N801
    """A server interceptor that turns a raised KvmeshError into its status and detail, and anything else into INTERNAL,
    logged. `guard` is asked about every call, and a stream's first message.

    It covers unary-unary, unary-stream, stream-stream and stream-unary handlers, written as coroutines or as
    asynchronous generators.
    """

    def __init__(self, guard: Guard | None = None) -> None:
        self._guard = guard
        self._wrapped: dict[str, tuple[Any, Any]] = {}  # method → (its handler, the same guarded)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler that `continuation` finds."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None  # gRPC answers UNIMPLEMENTED
        known = self._wrapped.get(handler_call_details.method)
        if known is not None and known[0] is handler:
            return known[1]
        sides = handler.request_streaming, handler.response_streaming
        kind = "_".join("stream" if streaming else "unary" for streaming in sides)
        behavior = getattr(handler, kind)
        method = handler_call_details.method
        generator = inspect.isasyncgenfunction(behavior)
        wrap = _guard_stream if generator else _guard_call
        wrapped = wrap(behavior, method, self._guard)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        parse = handler.request_deserializer
        made = make(
            wrapped,
            request_deserializer=parse if parse is None or handler.request_streaming else _readable(parse),
            response_serializer=handler.response_serializer,
        )
        self._wrapped[method] = handler, made
        return made
