"""This module makes spans, metrics and heartbeats of a decode instance: what others see of its brain. Nothing here
changes the brain."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from dataclasses import dataclass

from opentelemetry.trace import Span
from prometheus_client import Gauge

from kvmesh.errors import (
    DeadlinePassed,
    HandoffLost,
    InvalidRequest,
    KvmeshError,
    ModelNotFound,
    Overloaded,
    RequestCancelled,
)
from kvmesh.kvcache.sources import Pulled, PullJob
from kvmesh.ranks.protocol import DecodeStepDone
from kvmesh.rpc.pb import common_pb2, conductor_pb2, decode_pb2
from kvmesh.rpc.pb import conductor_pb2 as pb
from kvmesh.services.decode.events import Phase, Reason
from kvmesh.services.decode.handoff import Handoff
from kvmesh.services.decode.state import DecodeState
from kvmesh.telemetry import names, spans
from kvmesh.telemetry.summed_gauges import SummedGauges

# The conductor is told how each request went: what it measured, and which instance is to blame for a failure. Pure.
#
# Nobody is to blame when the client left, when there was no room or no time, or when the request was invalid. A failure
# is the prefill instance's when its handoff brought it, and this instance's otherwise.

_NOBODYS = (Overloaded, DeadlinePassed, InvalidRequest, ModelNotFound)


def judge(error: KvmeshError, *, by_writer: bool, prefill: str, own: str) -> tuple[pb.Outcome.ValueType, str]:
    """Returns the kind of end that `error` is, and the id of the instance to blame ("" for nobody). `by_writer` says
    that prefill, or the connection to it, brought the error."""
    if isinstance(error, RequestCancelled):
        return pb.OUTCOME_CANCELLED, ""
    if isinstance(error, _NOBODYS):
        return pb.OUTCOME_REFUSED, ""
    return pb.OUTCOME_FAILED, prefill if by_writer or isinstance(error, HandoffLost) else own


def outcome_of(h: Handoff, end: Reason | KvmeshError, attempt: int, prefill: str, own: str) -> pb.RequestOutcome:
    """Returns the report on a request that was admitted and has ended, in us. `prefill` and `own` are instance ids."""
    times, gaps = h.times, h.times.gaps
    told = pb.RequestOutcome(
        request_id=h.spec.request_id,
        attempt=attempt,
        outcome=pb.OUTCOME_DONE,
        output_tokens=h.made,
        ttft_us=_us(times.first - times.received) if times.first else 0,
        tbt_us=_us(gaps.slowest_ns),
        mean_tbt_us=_us(gaps.mean_ns),
        duration_us=_us(times.ended - times.received),
    )
    if isinstance(end, KvmeshError):
        by_writer = times.writer_lost > 0
        told.outcome, told.blamed = judge(end, by_writer=by_writer, prefill=prefill, own=own)
        told.error = end.code
    return told


def refusal_of(request_id: str, attempt: int, error: KvmeshError) -> pb.RequestOutcome:
    """Returns the report on a request that was not admitted."""
    kind = pb.OUTCOME_CANCELLED if isinstance(error, RequestCancelled) else pb.OUTCOME_REFUSED
    return pb.RequestOutcome(request_id=request_id, attempt=attempt, outcome=kind, error=error.code)


def _us(ns: float) -> int:
    return max(0, round(ns / 1000))


NS = 1e-9
MAX_FINISHED = 8192
MAX_OUTCOMES = 4096


@dataclass(slots=True)
class RequestTrace:
    """Has what the shell keeps with a request (Spec.carry)."""

    span: Span
    start: decode_pb2.StartRequest | None  # dropped once prefill was asked: prompts are large
    attempt: int = 0
    prefill: str = ""  # instance_id


def begin_request(start: decode_pb2.StartRequest, received_ns: int, instance_id: str) -> Span:
    """Begins the span of a request's whole life in this instance, a child of the gateway's span."""
    attributes: dict[str, spans.Value] = {
        names.REQUEST_ID: start.request_id,
        names.ATTEMPT: start.attempt,
        names.PRIORITY: start.priority,
        names.INSTANCE: instance_id,
        names.PREFILL_INSTANCE: start.placement.prefill.instance_id,
        names.PROMPT_TOKENS: len(start.token_ids) // 4,
    }
    return spans.begin(names.SPAN_REQUEST, spans.context_from(start.traceparent), attributes, start_ns=received_ns)


def end_request(span: Span, h: Handoff, outcome: str, error: str) -> None:
    """Records a span for each stage whose begin and end are known, then ends the request's span."""
    times, parent = h.times, spans.context_of(span)
    stages = (
        (names.SPAN_ADMIT, times.received, times.asked),
        (names.SPAN_RESERVE, times.begin_fill, times.landing),
        (names.SPAN_LOAD, times.load_start, times.load_end),
        (names.SPAN_FIRST_DECODE, times.joined, times.second),
        (names.SPAN_GENERATE, times.second, times.ended),
    )
    for name, start, end in stages:
        if start and end:
            spans.record(name, parent, start, end, {names.REQUEST_ID: h.spec.request_id})
    span.set_attributes(
        {
            names.OUTPUT_TOKENS: h.made,
            names.CACHED_TOKENS: times.cached_tokens,
            names.AT_DECODE_TOKENS: times.at_decode_tokens,
            names.DECODE_PULLED_TOKENS: times.pulled_blocks * h.shape.block_tokens,
            names.PREEMPTIONS: times.preemptions,
            names.HANDOFF_EPOCH: h.epoch,
            names.OUTCOME: outcome,
        }
    )
    spans.finish(span, end_ns=times.ended, error=error)


class Observer:
    """Keeps the counts and times of one decode instance, for metrics and heartbeats. `gauges` are those of all that
    run in this process."""

    def __init__(self, state: DecodeState, instance_id: str, gauges: SummedGauges | None = None) -> None:
        self._state = state
        self._gauges = gauges or SummedGauges()
        self._instance_id = instance_id
        self._finished: deque[str] = deque(maxlen=MAX_FINISHED)
        self._outcomes: deque[conductor_pb2.RequestOutcome] = deque(maxlen=MAX_OUTCOMES)
        self._last_end = 0
        self._pulled_bytes = 0
        self._pulls: dict[int, Span] = {}  # by ticket, under way

    def pulling(self, job: PullJob, h: Handoff, now: int) -> PullJob:
        """Begins the span of a pull, which `pulled` ends. Returns the job with that span as its parent, so that what is
        fetched from each holder becomes a child of it."""
        attributes: dict[str, spans.Value] = {names.REQUEST_ID: h.spec.request_id, names.WANTED_BLOCKS: len(job.keys)}
        parent = spans.context_of(h.spec.carry.span)
        span = self._pulls[job.ticket] = spans.begin(names.SPAN_PULL, parent, attributes, start_ns=now)
        return dataclasses.replace(job, traceparent=spans.traceparent(span))

    def pulled(self, result: Pulled) -> None:
        """Ends the span of a pull."""
        self._pulled_bytes += result.bytes_done
        span = self._pulls.pop(result.ticket)
        span.set_attributes({names.BLOCKS: len(result.arrived), names.PULL_BYTES: result.bytes_done})
        spans.finish(span, error=result.cause)

    def step_done(self, step: DecodeStepDone) -> None:
        """Counts one engine step. It is called once a step, not once a token."""
        names.DECODE_STEP.observe((step.end_ns - step.start_ns) * NS)
        names.DECODE_BATCH.observe(step.batch)
        names.DECODE_OUTPUT_TOKENS.inc(len(step.tokens))
        for drafter, drafted, kept in step.drafts:
            names.DECODE_DRAFT_TOKENS.labels(drafter=drafter).inc(drafted)
            names.DECODE_ACCEPTED_DRAFT_TOKENS.labels(drafter=drafter).inc(kept)
        if before := step.since_ns or self._last_end:
            a_row = max(1.0, len(step.tokens) / step.batch) if step.drafts else 1.0
            names.DECODE_TBT.observe((step.end_ns - before) * NS / a_row)
        # If an answer goes on, the time until the next step's end is a time between tokens.
        self._last_end = step.end_ns if any(not t.finish for t in step.tokens) else 0

    def over(self, h: Handoff, end: Reason | KvmeshError) -> None:
        """Counts a request whose client has been told its end, and keeps its outcome for the next heartbeat."""
        self._finished.append(h.spec.request_id)
        outcome, error = (end.name.lower(), "") if isinstance(end, Reason) else (end.code, end.message)
        times = h.times
        names.DECODE_AT_DECODE_TOKENS.inc(times.at_decode_tokens)
        names.DECODE_REQUESTS.labels(outcome=outcome).inc()
        if times.preemptions:
            names.DECODE_PREEMPTIONS.inc(times.preemptions)
        for histogram, begun, done in (
            (names.DECODE_RESERVE, times.begin_fill, times.landing),
            (names.DECODE_FILL, times.landing, times.filled),
            (names.DECODE_LOAD, times.load_start, times.load_end),
            (names.DECODE_FIRST_DECODE, times.joined, times.second),
        ):
            if begun and done:
                histogram.observe(max(0, done - begun) * NS)
        carry: RequestTrace = h.spec.carry
        self._outcomes.append(outcome_of(h, end, carry.attempt, carry.prefill, self._instance_id))
        end_request(carry.span, h, outcome, error)

    def refused(self, request_id: str, attempt: int, span: Span, error: KvmeshError) -> None:
        """Counts a request that was not admitted, and keeps its outcome for the next heartbeat."""
        span.set_attribute(names.OUTCOME, error.code)
        spans.finish(span, error=error.message)
        names.DECODE_REQUESTS.labels(outcome=error.code).inc()
        self._outcomes.append(refusal_of(request_id, attempt, error))

    def counters(self, streams: int) -> common_pb2.PoolCounters:
        state, scheduler = self._state, self._state.scheduler
        requests, stats = state.requests.values(), scheduler.store_stats
        store = stats[0]
        return common_pb2.PoolCounters(
            groups=scheduler.group_counters,
            pages_total=scheduler.pages.total,
            pages_free=scheduler.pages.free,
            extents_total=scheduler.extents.total,
            extents_free=scheduler.extents.free,
            handoffs=len(requests),
            requests=scheduler.live,
            streams=streams,
            windows=sum(len(h.windows) for h in requests),
            quarantined=sum(h.phase is Phase.QUARANTINED for h in requests),
            store_blocks=store.sealed,
            store_writing=sum(one.writing for one in stats),
            store_leases=sum(one.leases for one in stats),
            pulls=len(state.pulls),
        )

    def report(self) -> conductor_pb2.HeartbeatRequest:
        """Returns the next heartbeat: the load as it is now, and the samples, finished ids and outcomes since the last
        one."""
        state, scheduler = self._state, self._state.scheduler
        beat = conductor_pb2.HeartbeatRequest()
        load = beat.load
        load.running_requests = scheduler.seats
        computing = sum(h.adopts and h.first is None for h in state.requests.values())  # no rows yet
        load.waiting_requests = max(0, scheduler.live - scheduler.seats - computing)
        load.free_pages = scheduler.pages.free
        load.free_extents = scheduler.extents.free
        load.context_tokens = self._context_tokens()
        load.store_blocks = scheduler.extents.stats.sealed
        load.store_capacity = scheduler.extents.total
        load.pulled_bytes = self._pulled_bytes
        while state.steps:
            batch, context_tokens, duration_ns = state.steps.popleft()
            beat.decode_samples.add(batch=batch, context_tokens=context_tokens, duration_us=duration_ns // 1000)
        beat.finished_request_ids.extend(self._finished)
        self._finished.clear()
        beat.outcomes.extend(self._outcomes)
        self._outcomes.clear()
        return beat

    def _context_tokens(self) -> int:
        return sum(h.context for h in self._state.scheduler.running.values())

    def publish(self, sessions: int, handoffs: int, ready: bool) -> None:
        """Sets the gauges. It is called every half second."""
        scheduler = self._state.scheduler
        requests = self._state.requests.values()
        phases = Counter(h.phase for h in requests)
        values: dict[Gauge, float] = {
            names.DECODE_HANDOFFS.labels(state=phase.name.lower()): phases[phase]
            for phase in Phase
            if phase is not Phase.FREE
        }
        values[names.DECODE_RUNNING] = scheduler.seats
        values[names.DECODE_WAITING] = max(0, scheduler.live - scheduler.seats)
        values[names.DECODE_CONTEXT_TOKENS] = self._context_tokens()
        in_doubt = [h for h in requests if h.phase is Phase.QUARANTINED]
        for number, (group, pages, store) in enumerate(scheduler.memory):
            values[names.DECODE_PAGES.labels(state="total", group=group)] = pages.total
            values[names.DECODE_PAGES.labels(state="free", group=group)] = pages.free
            quarantined = sum(len(h.extents_of(number)) for h in in_doubt)
            extents = {"total": store.total, "free": store.free, "sealed": store.stats.sealed}
            for state, count in (extents | {"quarantined": quarantined}).items():
                values[names.DECODE_EXTENTS.labels(state=state, group=group)] = count
        values[names.DECODE_STREAMS.labels(kind="session")] = sessions
        values[names.DECODE_STREAMS.labels(kind="handoff")] = handoffs
        self._gauges.set(self, values)
        names.DECODE_READY.set(int(ready))
