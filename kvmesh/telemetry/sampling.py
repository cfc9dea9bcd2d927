"""Which spans are kept: a share of all traces, chosen where they begin, and what failed or was slow of the others.

The second part ends at this process: the spans of other services in such a trace are kept only if they failed or were
slow there as well."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace import SpanContext, StatusCode, TraceFlags

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


@dataclass
class _Root:
    """A span whose parent is not of this process, and the spans below it."""

    members: set[int] = field(default_factory=set)
    spans: list[ReadableSpan] = field(default_factory=list)
    kept: bool | None = None  # None: it has not ended


class UnsampledSpans(SpanProcessor):
    """Holds the spans of traces that are not kept until their local root ends, and hands them to `out` if the root
    failed or took longer than `slow_ms` (0: only if it failed). It is bounded: the oldest are forgotten first."""

    def __init__(self, out: Sequence[SpanProcessor], slow_ms: int) -> None:
        self._out = out
        self._slow_ns = slow_ms * 1_000_000
        self._roots: OrderedDict[int, _Root] = OrderedDict()  # by the root's span id
        self._root_of: dict[int, int] = {}  # span id → its root's
        self._held = 0
        self._lock = threading.Lock()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Notes which local root the span belongs to."""
        own = span.get_span_context()
        if own is None or own.trace_flags.sampled:
            return
        with self._lock:
            parent = span.parent
            if parent is None or parent.is_remote:
                root_id = own.span_id
                self._roots[root_id] = _Root()
            elif (known := self._root_of.get(parent.span_id)) is not None:
                root_id = known
            else:
                return
            self._root_of[own.span_id] = root_id
            self._roots[root_id].members.add(own.span_id)
            while len(self._roots) > MOST_ROOTS or len(self._root_of) > MOST_SPANS:
                self._forget()

    def on_end(self, span: ReadableSpan) -> None:
        """Holds the span, or decides about all spans of its root."""
        own = span.get_span_context()
        if own is None or own.trace_flags.sampled:
            return
        with self._lock:
            root_id = self._root_of.get(own.span_id)
            if root_id is None:
                return
            root = self._roots[root_id]
            if root.kept is not False:
                root.spans.append(span)
                self._held += 1
            if own.span_id == root_id:
                root.kept = self._is_wanted(span)
            if root.kept is None:
                return
            found, root.spans = root.spans, []
            self._held -= len(found)
            wanted = found if root.kept else []
        for one in wanted:
            for out in self._out:
                out.on_end(_sampled(one))

    def _is_wanted(self, root: ReadableSpan) -> bool:
        took = (root.end_time or 0) - (root.start_time or 0)
        return root.status.status_code is StatusCode.ERROR or (0 < self._slow_ns <= took)

    def _forget(self) -> None:
        _, root = self._roots.popitem(last=False)
        self._held -= len(root.spans)
        for member in root.members:
            self._root_of.pop(member, None)

    def shutdown(self) -> None:
        """Forgets the spans held, whose roots have not failed."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Returns True, because nothing held here is to be written."""
        return True


def _sampled(span: ReadableSpan) -> ReadableSpan:
    own = span.get_span_context()
    assert own is not None, "an ended span has a context"
    return ReadableSpan(
        name=span.name,
        context=SpanContext(own.trace_id, own.span_id, False, TraceFlags(TraceFlags.SAMPLED), own.trace_state),
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
