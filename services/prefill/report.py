"""What a handoff leaves behind: spans, metrics, a line in the log where it failed, samples for the conductor."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from opentelemetry.context import Context

from kvmesh.node import messages as m
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import conductor_pb2 as pb_conductor
from kvmesh.telemetry import names, spans
from services.prefill import events as ev
from services.prefill.handoff import Phase
from services.prefill.state import PrefillState

log = logging.getLogger(__name__)

S = 1e-9  # seconds a nanosecond


@dataclass(frozen=True, slots=True)
class Origin:
    """Who asked: kept by the shell, unknown to the brain."""

    request_id: str
    attempt: int
    parent: Context  # of the request's span at decode


class Reporter:
    """Turns ends of handoffs into spans, metrics and samples. `instance_id` names this instance in spans."""

    def __init__(self, state: PrefillState, instance_id: str) -> None:
        self._state = state
        self._instance_id = instance_id
        self._beat = pb_conductor.HeartbeatRequest()

    def rank_said(self, message: m.ToFront) -> None:
        """Metrics of single messages."""
        match message:
            case m.PrefillStepDone(_, start, end):
                names.PREFILL_STEP.observe((end - start) * S)
            case m.PushFailed(_, _, cause) if "lease" in cause:
                names.PREFILL_LEASE_STOPS.inc()
            case _:
                pass

    def ended(self, end: ev.Ended, origin: Origin, now: int) -> None:
        """One handoff is over, at `now` (monotonic ns)."""
        self._spans(end, origin, now)
        self._metrics(end)
        self._beat.finished_request_ids.append(origin.request_id)
        if end.outcome is ev.Outcome.DONE:
            self._beat.prefill_samples.add(
                request_id=origin.request_id,
                computed_tokens=end.computed_tokens,
                cached_tokens=end.cached_tokens,
                duration_us=(end.last_step_ns - end.first_step_ns) // 1000,
                transfer_bytes=end.transfer_bytes,
                transfer_us=(end.last_ack_ns - end.first_post_ns) // 1000,
            )
        elif end.outcome is ev.Outcome.FAILED:
            log.warning("prefill failed: %s", end.cause, extra={"request_id": origin.request_id})

    def refused(self, origin: Origin, code: str, now: int) -> None:
        """A request that never reached the brain."""
        names.PREFILL_REQUESTS.labels(outcome=ev.Outcome.FAILED.value).inc()
        attributes = self._who(origin) | {names.OUTCOME: ev.Outcome.FAILED.value, names.ERROR_TYPE: code}
        spans.record(names.SPAN_PREFILL, origin.parent, now, now, attributes, error=code)
        self._beat.finished_request_ids.append(origin.request_id)

    def beat(self) -> pb_conductor.HeartbeatRequest:
        """What is new since the last call. Refreshes the gauges."""
        beat, self._beat = self._beat, pb_conductor.HeartbeatRequest()
        load = self._state.load()
        beat.load.queued_requests = load.queued_requests
        beat.load.queued_tokens = load.queued_tokens
        beat.load.running_requests = load.running_requests
        beat.load.free_pages = load.free_pages
        names.PREFILL_QUEUED.set(load.queued_requests)
        names.PREFILL_QUEUED_TOKENS.set(load.queued_tokens)
        names.PREFILL_RUNNING.set(load.running_requests)
        pool, cache = self._state.pool, self._state.cache
        pages = {"total": pool.total, "free": pool.free, "cached": cache.evictable}
        for state, count in pages.items():
            names.PREFILL_PAGES.labels(state=state).set(count)
        phases = [h.phase for h in self._state.handoffs.values()]
        for phase in Phase:
            names.PREFILL_HANDOFFS.labels(state=phase.value.lower()).set(phases.count(phase))
        return beat

    def pools(self, streams: int) -> pb_common.PoolCounters:
        """Live counts for leak checks."""
        state = self._state
        return pb_common.PoolCounters(
            pages_total=state.pool.total,
            pages_free=state.pool.free,
            pages_cached=state.cache.evictable,
            handoffs=len(state.handoffs),
            requests=len(state.handoffs),
            streams=streams,
        )

    def _who(self, origin: Origin) -> dict[str, spans.Value]:
        return {
            names.REQUEST_ID: origin.request_id,
            names.ATTEMPT: origin.attempt,
            names.INSTANCE: self._instance_id,
        }

    def _spans(self, end: ev.Ended, origin: Origin, now: int) -> None:
        done = end.outcome is ev.Outcome.DONE
        attributes = self._who(origin) | {
            names.OUTCOME: end.outcome.value,
            names.PROMPT_TOKENS: end.prompt_tokens,
            names.CACHED_TOKENS: end.cached_tokens,
            names.COMPUTED_TOKENS: end.computed_tokens,
            names.CHUNKS: end.chunks,
        }
        error = ""
        if end.outcome is ev.Outcome.FAILED:
            attributes[names.ERROR_TYPE], _, error = end.cause.partition(": ")
        last = max(end.last_step_ns, end.last_ack_ns) if done else now
        life = spans.record(names.SPAN_PREFILL, origin.parent, end.arrived_ns, last, attributes, error=error)
        began = end.first_step_ns or now
        spans.record(names.SPAN_QUEUE, life, end.arrived_ns, began)
        if end.first_step_ns:
            computed = {key: attributes[key] for key in (names.CACHED_TOKENS, names.COMPUTED_TOKENS, names.CHUNKS)}
            spans.record(names.SPAN_COMPUTE, life, began, end.last_step_ns, computed)
        if end.first_post_ns:
            moved: dict[str, spans.Value] = {names.TRANSFER_BYTES: end.transfer_bytes, names.CHUNKS: end.chunks}
            spans.record(names.SPAN_TRANSFER, life, end.first_post_ns, end.last_ack_ns, moved)

    def _metrics(self, end: ev.Ended) -> None:
        names.PREFILL_REQUESTS.labels(outcome=end.outcome.value).inc()
        names.PREFILL_TRANSFER_BYTES.inc(end.transfer_bytes)
        if end.first_step_ns:
            names.PREFILL_QUEUE.observe(max(end.first_step_ns - end.arrived_ns, 0) * S)
            names.PREFILL_COMPUTED_TOKENS.inc(end.computed_tokens)
            names.PREFILL_CACHED_TOKENS.inc(end.cached_tokens)
        if end.outcome is ev.Outcome.DONE:
            names.PREFILL_COMPUTE.observe((end.last_step_ns - end.first_step_ns) * S)
            names.PREFILL_TRANSFER.observe((end.last_ack_ns - end.first_post_ns) * S)
