"""Spans across services: W3C context in and out, live spans, and spans recorded afterwards from monotonic times.

Everything works without `kvmesh.telemetry.setup.start`: spans are then no-ops that hand the parent's context on.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable, Mapping

from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    NoOpTracer,
    Span,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    get_current_span,
    set_span_in_context,
)

Value = str | bool | int | float
Traceable = Span | Context | SpanContext

_TRACEPARENT = re.compile("([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

_TRACEPARENT_CHARS = 55  # of version 00

# Monotonic clocks locally, wall time only in what is exported: one offset for the life of the process, so
# spans of one process never overlap by a clock step.
_WALL_OFFSET_NS = time.time_ns() - time.monotonic_ns()

Emit = Callable[[str, SpanContext, SpanContext, int, int, Mapping[str, Value] | None, str], None]
"""Keep a finished span: name, its own and its parent's context, start and end (Unix ns), attributes, error."""

_tracer: Tracer = NoOpTracer()
_emit: Emit | None = None
_hold: Emit | None = None
_keep: Callable[[int], bool] | None = None


def use(
    tracer: Tracer | None,
    emit: Emit | None = None,
    hold: Emit | None = None,
    keep: Callable[[int], bool] | None = None,
) -> None:
    """Makes `tracer` the one that `begin` and `record` use; None turns them into no-ops. `emit` and `hold` are shorter
    paths for finished spans, of a trace that is kept and of one that is not yet; `keep` is called with the id of a
    trace that is to be kept after all, and returns whether anything of it is known here."""
    global _tracer, _emit, _hold, _keep
    _tracer, _emit, _hold, _keep = tracer or NoOpTracer(), emit, hold, keep


def keep(trace_id: int) -> bool:
    """Keeps a trace that was not to be kept, as far as this process still has it. Returns whether it has any of it."""
    return _keep is not None and _keep(trace_id)


def trace_to_keep(source: Traceable) -> int:
    """Returns the id of a trace that is held here and may yet be kept; 0 where it is kept, or nothing is traced."""
    found = _span_context(source)
    return found.trace_id if _keep is not None and found.is_valid and not found.trace_flags.sampled else 0


def wall_ns(monotonic_ns: int) -> int:
    """Returns the Unix time in nanoseconds of a CLOCK_MONOTONIC time in nanoseconds."""
    return monotonic_ns + _WALL_OFFSET_NS


def _span_context(source: Traceable) -> SpanContext:
    if isinstance(source, SpanContext):
        return source
    span = source if isinstance(source, Span) else get_current_span(source)
    return span.get_span_context()


def traceparent(source: Traceable) -> str:
    """Returns the W3C `traceparent` of a span, a context or a span context; "" when there is no valid span."""
    found = _span_context(source)
    if not found.is_valid:
        return ""
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}"


def context_of(source: Traceable) -> Context:
    """Returns a context whose current span is `source`, to be the parent of further spans."""
    if isinstance(source, Context):
        return source
    span = source if isinstance(source, Span) else NonRecordingSpan(source)
    return set_span_in_context(span, Context())


def context_from(traceparent: str) -> Context:
    """Returns the context of a W3C `traceparent` header; an empty one (a new trace) when it is missing or malformed."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if not found or found[1] == "ff" or (found[1] == "00" and found[5]):
        return Context()
    trace_id, span_id, flags = (int(found[group], 16) for group in (2, 3, 4))
    remote = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags & TraceFlags.SAMPLED))
    return context_of(remote) if remote.is_valid else Context()


def is_kept(traceparent: str) -> bool:
    """Says whether spans below this `traceparent`, as members of the mesh write it, are kept here. Where it is not,
    callees that serve many requests do no work at all for the trace."""
    # The last digit has the sampled flag; others stand beside it, such as that of random ids.
    return _emit is not None and len(traceparent) == _TRACEPARENT_CHARS and traceparent[-1] in "13579bdf"


def kept(source: Traceable) -> str:
    """Returns the `traceparent` of a trace that is kept; "" of any other, which is not named to such callees."""
    return traceparent(source) if _span_context(source).trace_flags.sampled else ""


def ambient() -> str:
    """Returns the `traceparent` of the span in which the calling program is, by OpenTelemetry's own context, if its
    trace is kept; else ""."""
    return kept(get_current_span())


def reserve(parent: Context) -> SpanContext | None:
    """Returns the context of a span that `record` makes later (as `own`), so that others can have it as their parent
    before; None where the trace is not kept."""
    above = get_current_span(parent).get_span_context()
    if _emit is None or not above.is_valid or not above.trace_flags.sampled:
        return None
    return SpanContext(above.trace_id, random.getrandbits(64) or 1, False, above.trace_flags, above.trace_state)


def begin(
    name: str, parent: Context, attributes: Mapping[str, Value] | None = None, *, start_ns: int | None = None
) -> Span:
    """Starts a span now, or at `start_ns` (monotonic ns). The caller ends it with `finish`."""
    start = wall_ns(time.monotonic_ns() if start_ns is None else start_ns)
    return _tracer.start_span(name, context=parent, attributes=attributes, start_time=start)


def finish(span: Span, *, end_ns: int | None = None, error: str = "") -> None:
    """Ends a span now, or at `end_ns` (monotonic ns); a non-empty `error` marks it as failed."""
    if error:
        span.set_status(Status(StatusCode.ERROR, error))
    span.end(wall_ns(time.monotonic_ns() if end_ns is None else end_ns))


def record(
    name: str,
    parent: Context,
    start_ns: int,
    end_ns: int,
    attributes: Mapping[str, Value] | None = None,
    *,
    error: str = "",
    own: SpanContext | None = None,
) -> Context:
    """Makes a finished span from monotonic nanoseconds; returns its context, to be the parent of its children. `own` is
    what `reserve` gave."""
    above = get_current_span(parent).get_span_context()
    out = _emit if above.trace_flags.sampled else _hold
    if out is not None and above.is_valid:
        # A request has a handful of these, and the SDK's way (sampler, attributes' checks, a span that could still
        # change) takes five times as long.
        own = own or SpanContext(
            above.trace_id, random.getrandbits(64) or 1, False, above.trace_flags, above.trace_state
        )
        out(name, own, above, wall_ns(start_ns), wall_ns(max(start_ns, end_ns)), attributes, error)
        return context_of(own)
    span = begin(name, parent, attributes, start_ns=start_ns)
    finish(span, end_ns=max(start_ns, end_ns), error=error)
    return context_of(span)


# W3C trace context in the metadata of unary calls (streams carry it inside their messages).

TRACEPARENT = "traceparent"


def metadata(parent: Traceable) -> tuple[tuple[str, str], ...]:
    """Returns call metadata that makes the server's spans children of `parent`; empty when there is no span."""
    value = traceparent(parent)
    return ((TRACEPARENT, value),) if value else ()


def context_from_metadata(pairs: Iterable[tuple[str, str | bytes]] | None) -> Context:
    """Returns the caller's context from `context.invocation_metadata()`; an empty one when the caller sent none."""
    for key, value in pairs or ():
        if key == TRACEPARENT and isinstance(value, str):
            return context_from(value)
    return Context()
