"""A span for each call of a servicer that belongs to a kept trace."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any

from kvmesh.errors import KvmeshError, RequestCancelled
from kvmesh.telemetry import names, spans


def called_ns(context: Any) -> int:
    """Returns when a call began, in monotonic ns: over a fast path when its bytes came, over gRPC now."""
    arrived = getattr(context, "arrived", None)
    return time.monotonic_ns() if arrived is None else int(arrived * 1e9)


def call_path(context: Any) -> str:
    """Returns how a call came: "fast path" or "grpc"."""
    return "grpc" if getattr(context, "arrived", None) is None else "fast path"


def served(
    span: str, counted: Callable[[Any], int]
) -> Callable[[Callable[..., Awaitable[Any]]], Callable[..., Awaitable[Any]]]:
    """Records a span around a servicer's method whose request has a `traceparent`. `counted(request)` is how many keys
    it names. Requests of other traces cost one comparison of strings.

    A call by a fast path begins when its bytes came, so that the span has its wait in a queue."""

    def wrap(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(method)
        def call(self: Any, request: Any, context: Any) -> Awaitable[Any]:
            if not request.traceparent or not spans.is_kept(request.traceparent):
                return method(self, request, context)
            return traced(self, request, context)

        async def traced(self: Any, request: Any, context: Any) -> Any:
            start_ns = called_ns(context)
            attributes: dict[str, spans.Value] = {
                names.KEYS: counted(request),
                names.CALL_PATH: call_path(context),
            }
            error = RequestCancelled.code
            try:
                answer = await method(self, request, context)
                error = ""
            except KvmeshError as err:
                error = str(err)
                raise
            finally:
                parent = spans.context_from(request.traceparent)
                spans.record(span, parent, start_ns, time.monotonic_ns(), attributes, error=error)
            return answer

        return call

    return wrap
