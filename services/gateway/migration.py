"""One migration as operators see it: a span from the loss to the next token, a count, the length of the gap."""

from __future__ import annotations

import time
from asyncio import TimerHandle

from opentelemetry.context import Context

from kvmesh.services.gateway.recovery import Failure
from kvmesh.telemetry import names, spans

MOVED, FAILED, ABANDONED = "moved", "failed", "abandoned"


class Migration:
    """Begins with a loss, ends once. `timer` ends the request when it takes too long."""

    __slots__ = ("_reason", "_span", "_start_ns", "timer")

    def __init__(self, parent: Context, choice: int, failure: Failure) -> None:
        self._start_ns = time.monotonic_ns()
        self._reason = failure.error.code
        self.timer: TimerHandle | None = None
        attributes: dict[str, spans.Value] = {
            names.CHOICE_INDEX: choice,
            names.FROM_INSTANCE: failure.instance,
            names.LOSS_REASON: self._reason,
            names.CARRIED_TOKENS: failure.answered,
        }
        self._span = spans.begin(names.SPAN_MIGRATE, parent, attributes, start_ns=self._start_ns)

    def moved(self, instance: str) -> None:
        """The answer goes on there."""
        self._span.set_attribute(names.TO_INSTANCE, instance)
        names.GATEWAY_MIGRATION_GAP.observe((time.monotonic_ns() - self._start_ns) / 1e9)
        self._end(MOVED, "")

    def failed(self, error: str) -> None:
        """The request ends with that error; "": its client left."""
        self._end(FAILED if error else ABANDONED, error or "the client went away")

    def _end(self, outcome: str, error: str) -> None:
        if self.timer is not None:
            self.timer.cancel()
        names.GATEWAY_MIGRATIONS.labels(reason=self._reason, outcome=outcome).inc()
        spans.finish(self._span, error=error)
