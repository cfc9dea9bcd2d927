"""Which spans are kept: a share of all traces, chosen where they begin, and what failed or was slow of the others.

What a process holds it also writes when another one, which saw the request fail, names the trace: see
`kvmesh.rpc.traces`."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import SpanContext, StatusCode, TraceFlags

from kvmesh.telemetry.spans import Emit, Value

MOST_SPANS = 16_384  # in memory
MOST_ROOTS = 4_096


class HeadSampler(Sampler):
    """Keeps `ratio` of new traces, chosen by their id, and otherwise does as the parent says. What is not kept is
    recorded all the same, for UnsampledSpans."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._inner = ParentBased(TraceIdRatioBased(ratio))

    def should_sample(self, *args: Any, **kwargs: Any) -> SamplingResult:
        """Returns the inner sampler's answer, with RECORD_ONLY in place of DROP."""
        found = self._inner.should_sample(*args, **kwargs)
        if found.decision is not Decision.DROP:
            return found
        return SamplingResult(Decision.RECORD_ONLY, found.attributes, found.trace_state)

    def get_description(self) -> str:
        return f"HeadSampler({self._ratio})"


Finished = tuple[str, SpanContext, SpanContext, int, int, Mapping[str, Value] | None, str]
"""A span as `spans.record` knows it: see `spans.Emit`. Its own context says that it is not sampled."""


@dataclass(eq=False)
class _Root:
    """A span whose parent is not of this process, and the spans below it."""

    trace_id: int
    members: set[int] = field(default_factory=set)
    spans: list[ReadableSpan | Finished] = field(default_factory=list)


class UnsampledSpans(SpanProcessor):
    """Holds the spans of traces that are not kept, and hands them to `out` if their local root fails or takes longer
    than `slow_ms` (0: only if it fails), or as soon as `keep` names their trace. It is thread-safe and bounded: roots
    that have ended are forgotten first, then the oldest.

    `emit` writes a finished span, see `spans.use`."""

    def __init__(self, out: Sequence[SpanProcessor], emit: Emit, slow_ms: int) -> None:
        self._out = out
        self._emit = emit
        self._slow_ns = slow_ms * 1_000_000
        self._running: OrderedDict[int, _Root] = OrderedDict()  # by the root's span id
        self._ended: OrderedDict[int, _Root] = OrderedDict()  # those that went well
        self._root_of: dict[int, int] = {}  # span id → its root's
        self._of_trace: dict[int, set[int]] = {}  # trace id → roots
        self._kept: OrderedDict[int, None] = OrderedDict()  # traces that `keep` named
        self._lock = threading.Lock()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Notes which local root the span belongs to."""
        own = span.get_span_context()
        if own is not None and not own.trace_flags.sampled:
            with self._lock:
                self._enter(own, span.parent)

    def on_end(self, span: ReadableSpan) -> None:
        """Holds the span, or decides about all spans of its root."""
        own = span.get_span_context()
        if own is None or own.trace_flags.sampled:
            return
        took = (span.end_time or 0) - (span.start_time or 0)
        failed = span.status.status_code is StatusCode.ERROR
        with self._lock:
            found = self._leave(own, span, wanted=failed or (0 < self._slow_ns <= took))
        self._write(found)

    def hold(
        self,
        name: str,
        own: SpanContext,
        parent: SpanContext,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, Value] | None,
        error: str,
    ) -> None:
        """Takes a finished span, as `on_start` and `on_end` would."""
        slow = 0 < self._slow_ns <= end_ns - start_ns
        with self._lock:
            self._enter(own, parent)
            span = (name, own, parent, start_ns, end_ns, attributes, error)
            found = self._leave(own, span, wanted=bool(error) or slow)
        self._write(found)

    def keep(self, trace_id: int) -> bool:
        """Writes what is held of a trace, and what ends later. Returns whether anything was held or still runs."""
        with self._lock:
            found = self._release(trace_id)
            runs = trace_id in self._of_trace
        self._write(found)
        return bool(found) or runs

    def _release(self, trace_id: int) -> list[ReadableSpan | Finished]:
        """Returns what is held of a trace, which is kept from now on."""
        self._kept[trace_id] = None
        if len(self._kept) > MOST_ROOTS:
            self._kept.popitem(last=False)
        found: list[ReadableSpan | Finished] = []
        for root_id in self._of_trace.get(trace_id, ()):
            root = self._running.get(root_id) or self._ended[root_id]
            found += root.spans
            root.spans = []
        return found

    def _enter(self, own: SpanContext, parent: SpanContext | None) -> None:
        if parent is None or parent.is_remote:
            root_id = own.span_id
            self._running[root_id] = _Root(own.trace_id)
            self._of_trace.setdefault(own.trace_id, set()).add(root_id)
        elif (known := self._root_of.get(parent.span_id)) is not None:
            root_id = known
        else:
            return
        self._root_of[own.span_id] = root_id
        root = self._running.get(root_id) or self._ended[root_id]
        root.members.add(own.span_id)
        while len(self._running) + len(self._ended) > MOST_ROOTS or len(self._root_of) > MOST_SPANS:
            some = self._ended or self._running
            self._forget(*some.popitem(last=False))

    def _leave(
        self, own: SpanContext, span: ReadableSpan | Finished, *, wanted: bool
    ) -> Sequence[ReadableSpan | Finished]:
        """Holds an ended span; returns what is to be written."""
        root_id = self._root_of.get(own.span_id)
        if root_id is None:
            return ()
        root = self._running.get(root_id)
        if root is None:
            root = self._ended[root_id]
        root.spans.append(span)
        if own.span_id == root_id:
            self._ended[root_id] = self._running.pop(root_id)
            if wanted:
                return self._release(root.trace_id)
        if root.trace_id not in self._kept:
            return ()
        found, root.spans = root.spans, []
        return found

    def _forget(self, root_id: int, root: _Root) -> None:
        for member in root.members:
            self._root_of.pop(member, None)
        roots = self._of_trace[root.trace_id]
        roots.discard(root_id)
        if not roots:
            del self._of_trace[root.trace_id]

    def _write(self, found: Sequence[ReadableSpan | Finished]) -> None:
        for one in found:
            if isinstance(one, ReadableSpan):
                for out in self._out:
                    out.on_end(_sampled(one))
            else:
                name, own, parent, start_ns, end_ns, attributes, error = one
                self._emit(name, _kept_context(own), parent, start_ns, end_ns, attributes, error)

    def shutdown(self) -> None:
        """Forgets the spans held, whose roots have not failed."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Returns True, because nothing held here is to be written."""
        return True


def _kept_context(own: SpanContext) -> SpanContext:
    return SpanContext(own.trace_id, own.span_id, False, TraceFlags(TraceFlags.SAMPLED), own.trace_state)


def _sampled(span: ReadableSpan) -> ReadableSpan:
    own = span.get_span_context()
    assert own is not None, "an ended span has a context"
    return ReadableSpan(
        name=span.name,
        context=_kept_context(own),
        parent=span.parent,
        resource=span.resource,
        attributes=span.attributes,
        events=span.events,
        links=span.links,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )
