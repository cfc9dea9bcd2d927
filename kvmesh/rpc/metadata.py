"""W3C trace context in the metadata of unary calls (streams carry it inside their messages)."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.context import Context

from kvmesh.telemetry.spans import Traceable, context_from, traceparent

TRACEPARENT = "traceparent"


def metadata(parent: Traceable) -> tuple[tuple[str, str], ...]:
    """Call metadata that makes the server's spans children of `parent`; empty when there is no span."""
    value = traceparent(parent)
    return ((TRACEPARENT, value),) if value else ()


def context_from_metadata(pairs: Iterable[tuple[str, str | bytes]] | None) -> Context:
    """The caller's context from `context.invocation_metadata()`; an empty one when it sent none."""
    for key, value in pairs or ():
        if key == TRACEPARENT and isinstance(value, str):
            return context_from(value)
    return Context()
