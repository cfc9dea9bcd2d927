"""This module reports handoffs: by spans, metrics, a line in the log where one failed, samples for the conductor."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from opentelemetry.context import Context
from opentelemetry.trace import Span
from prometheus_client import Gauge

from kvmesh.kvcache.sources import Pulled, PullJob
from kvmesh.ranks import protocol as m
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import conductor_pb2 as pb_conductor
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.handoff import PrefillPhase
from kvmesh.services.prefill.pipeline_times import PromptTimes
from kvmesh.services.prefill.state import PrefillState
from kvmesh.telemetry import names, spans
from kvmesh.telemetry.summed_gauges import SummedGauges

log = logging.getLogger(__name__)

S = 1e-9  # one nanosecond in seconds


@dataclass(frozen=True, slots=True)
class Origin:
    """Says who asked for a prefill. The shell keeps it; the brain does not know it."""

    request_id: str
    attempt: int
    life: Span  # child of the request's span at decode; parent of what happens here, on other nodes too


class Reporter:
    """Turns the ends of handoffs into spans, metrics and samples. `instance_id` names this instance in spans; `gauges`
    are those of all that run in this process."""

    def __init__(self, state: PrefillState, instance_id: str, gauges: SummedGauges | None = None) -> None:
        self.instance_id = instance_id
        self._gauges = gauges or SummedGauges()
        self._state = state
        self._beat = pb_conductor.HeartbeatRequest()
        self._counted = pb_conductor.Load()  # counters since the start of the instance
        self._pulls: dict[int, Span] = {}  # by ticket, under way
        self._told_ns: dict[tuple[int, str], int] = {}  # what metrics say already of stages, busy and idle

    def began(self, request_id: str, attempt: int, traceparent: str, now: int) -> Origin:
        """Begins the span of a request; `ended` or `refused` ends it."""
        attributes: dict[str, spans.Value] = {
            names.REQUEST_ID: request_id,
            names.ATTEMPT: attempt,
            names.INSTANCE: self.instance_id,
        }
        parent = spans.context_from(traceparent)
        return Origin(request_id, attempt, spans.begin(names.SPAN_PREFILL, parent, attributes, start_ns=now))

    def rank_said(self, message: m.ToFront) -> None:
        """Counts what single messages of ranks say."""
        match message:
            case m.PrefillStepDone(_, start, end):
                names.PREFILL_STEP.observe((end - start) * S)
            case m.PushFailed(_, _, cause) if "lease" in cause:
                names.PREFILL_LEASE_STOPS.inc()
            case _:
                pass

    def pulling(self, job: PullJob, now: int) -> PullJob:
        """Begins the span of a pull, which `pulled` ends. Returns the job with that span as its parent, so that what is
        fetched from each holder becomes a child of it."""
        parent = spans.context_from(job.traceparent)
        attributes: dict[str, spans.Value] = {names.REQUEST_ID: job.request_id, names.WANTED_BLOCKS: len(job.keys)}
        span = self._pulls[job.ticket] = spans.begin(names.SPAN_PULL, parent, attributes, start_ns=now)
        return replace(job, traceparent=spans.traceparent(span))

    def pulled(self, result: Pulled) -> None:
        """Ends the span of a pull."""
        self._counted.pulled_bytes += result.bytes_done
        span = self._pulls.pop(result.ticket)
        span.set_attributes({names.BLOCKS: len(result.arrived), names.PULL_BYTES: result.bytes_done})
        spans.finish(span, error=result.cause)

    def ended(self, end: ev.HandoffEnded, origin: Origin, now: int) -> None:
        """Reports one handoff that is over, at `now` (monotonic ns)."""
        self._spans(end, origin, now)
        self._metrics(end)
        if not end.adopt:  # an adopted request stays in this instance until its answer ends
            self._beat.finished_request_ids.append(origin.request_id)
        if end.outcome is ev.PrefillOutcome.DONE:
            whole = end.computed_tokens + end.found.cached_tokens
            own_pairs = (whole**2 - end.found.cached_tokens**2) // 2
            self._beat.prefill_samples.add(
                request_id=origin.request_id,
                computed_tokens=end.computed_tokens,
                cached_tokens=end.found.cached_tokens,
                duration_us=(end.last_step_ns - end.first_step_ns) // 1000,
                transfer_bytes=end.transfer_bytes,
                transfer_us=end.wire_ns // 1000,
                pulled_tokens=end.found.pulled_tokens,
                pull_bytes=end.found.pull_bytes,
                pull_us=end.found.pull_ns // 1000,
                steps=end.meanwhile.steps,
                chunks=end.chunks,
                beside_tokens=max(0, end.meanwhile.tokens - end.computed_tokens),
                beside_pairs=max(0, end.meanwhile.double_pairs // 2 - own_pairs),
            )
        elif end.outcome is ev.PrefillOutcome.FAILED:
            log.warning("prefill failed: %s", end.cause, extra={"request_id": origin.request_id})

    def refused(self, origin: Origin, code: str, now: int) -> None:
        """Reports a request that never reached the brain."""
        names.PREFILL_REQUESTS.labels(outcome=ev.PrefillOutcome.FAILED.value).inc()
        origin.life.set_attributes({names.OUTCOME: ev.PrefillOutcome.FAILED.value, names.ERROR_TYPE: code})
        spans.finish(origin.life, end_ns=now, error=code)
        self._beat.finished_request_ids.append(origin.request_id)

    def beat(self) -> pb_conductor.HeartbeatRequest:
        """Returns the heartbeat: what is new since the last call. It also sets the gauges."""
        beat, self._beat = self._beat, pb_conductor.HeartbeatRequest()
        load, store = self._state.load(), self._state.store
        beat.load.CopyFrom(self._counted)
        beat.load.queued_requests = load.queued_requests
        beat.load.queued_tokens = load.queued_tokens
        beat.load.running_requests = load.running_requests
        beat.load.free_pages = load.free_pages
        beat.load.free_extents = store.free
        beat.load.store_blocks = store.stats.sealed
        beat.load.store_capacity = store.total
        values: dict[Gauge, float] = {
            names.PREFILL_QUEUED: load.queued_requests,
            names.PREFILL_QUEUED_TOKENS: load.queued_tokens,
            names.PREFILL_RUNNING: load.running_requests,
        }
        for group, pool, cached in self._state.page_pools():
            for state, count in {"total": pool.total, "free": pool.free, "cached": cached}.items():
                values[names.PREFILL_PAGES.labels(state=state, group=group)] = count
        self._count_stages()
        phases = [h.phase for h in self._state.handoffs.values()]
        for phase in PrefillPhase:
            values[names.PREFILL_HANDOFFS.labels(state=phase.value.lower())] = phases.count(phase)
        self._gauges.set(self, values)
        return beat

    def pools(self, streams: int) -> pb_common.PoolCounters:
        """Returns how much of each kind of memory and request the instance holds now."""
        state, store = self._state, self._state.store.stats
        return pb_common.PoolCounters(
            pages_total=state.pool.total,
            pages_free=state.pool.free,
            pages_cached=state.cached_pages,
            extents_total=state.store.total,
            extents_free=state.store.free,
            store_blocks=store.sealed,
            store_writing=store.writing,
            store_leases=store.leases,
            pulls=state.pulls,
            handoffs=len(state.handoffs),
            requests=len(state.handoffs),
            streams=streams,
            groups=self._groups(),
        )

    def _groups(self) -> list[pb_common.GroupPages]:
        """Returns the counts of each cache group; none where the model has one."""
        table = self._state.grouped
        if table is None:
            return []
        return [
            pb_common.GroupPages(
                group=g,
                pages_total=pool.total,
                pages_free=table.pages.free(g),
                extents_total=store.total,
                extents_free=store.free,
            )
            for g, (pool, store) in enumerate(zip(table.pages.pools, table.blocks.store.stores, strict=True))
        ]

    def _spans(self, end: ev.HandoffEnded, origin: Origin, now: int) -> None:
        done, found = end.outcome is ev.PrefillOutcome.DONE, end.found
        prefix: dict[str, spans.Value] = {
            names.CACHED_TOKENS: found.cached_tokens,
            names.DEVICE_TOKENS: found.device_tokens,
            names.HOST_TOKENS: found.host_tokens,
            names.LOWER_TOKENS: found.lower_tokens,
            names.PULLED_TOKENS: found.pulled_tokens,
        }
        if found.short:
            prefix[names.SHORT_GROUPS] = ",".join(self._state.config.groups[g].name for g in found.short)
        computed: dict[str, spans.Value] = {names.COMPUTED_TOKENS: end.computed_tokens, names.CHUNKS: end.chunks}
        attributes = prefix | computed | {names.OUTCOME: end.outcome.value, names.PROMPT_TOKENS: end.prompt_tokens}
        error = ""
        if end.outcome is ev.PrefillOutcome.FAILED:
            attributes[names.ERROR_TYPE], _, error = end.cause.partition(": ")
        last = max(end.last_step_ns, end.last_ack_ns) if done else now
        life = spans.context_of(origin.life)
        began = end.first_step_ns or now
        spans.record(names.SPAN_QUEUE, life, end.arrived_ns, began)
        if found.load_until_ns:
            loaded: dict[str, spans.Value] = {
                names.HOST_TOKENS: found.host_tokens,
                names.PULLED_TOKENS: found.pulled_tokens,
            }
            spans.record(names.SPAN_LOAD, life, found.load_from_ns, found.load_until_ns, loaded)
        if end.first_step_ns:
            bubble: dict[str, spans.Value] = {names.BUBBLE: round(end.times.bubble, 4)} if end.times.busy_ns else {}
            compute = spans.record(names.SPAN_COMPUTE, life, began, end.last_step_ns, prefix | computed | bubble)
            _record_stages(compute, end.times)
        if end.first_post_ns:
            moved = names.transfer_attributes("write", end.transfer_bytes, end.carried.rails, end.carried.resent)
            moved |= {names.CHUNKS: end.chunks}
            spans.record(names.SPAN_TRANSFER, life, end.first_post_ns, end.last_ack_ns, moved, error=error)
        origin.life.set_attributes(attributes)
        spans.finish(origin.life, end_ns=max(last, end.arrived_ns), error=error)

    def _metrics(self, end: ev.HandoffEnded) -> None:
        names.PREFILL_REQUESTS.labels(outcome=end.outcome.value).inc()
        names.PREFILL_TRANSFER_BYTES.inc(end.transfer_bytes)
        if end.first_step_ns:
            names.PREFILL_QUEUE.observe(max(end.first_step_ns - end.arrived_ns, 0) * S)
            names.PREFILL_COMPUTED_TOKENS.inc(end.computed_tokens)
            names.PREFILL_CACHED_TOKENS.inc(end.found.cached_tokens)
            self._count_hits(end)
            for g in end.found.short:
                names.PREFILL_SHORT_BLOCKS.labels(group=self._state.config.groups[g].name).inc(end.found.short_blocks)
        if end.times.busy_ns:
            names.PREFILL_BUBBLE.observe(end.times.bubble)
        if end.outcome is ev.PrefillOutcome.DONE:
            names.PREFILL_COMPUTE.observe((end.last_step_ns - end.first_step_ns) * S)
            if not end.adopt:
                names.PREFILL_TRANSFER.observe((end.last_ack_ns - end.first_post_ns) * S)

    def _count_stages(self) -> None:
        pipeline = self._state.pipeline
        for state, sums in {"busy": pipeline.busy_ns, "idle": pipeline.idle_ns}.items():
            for stage, ns in enumerate(sums):
                told = self._told_ns.get((stage, state), 0)
                names.PREFILL_STAGE_SECONDS.labels(stage=str(stage), state=state).inc((ns - told) * S)
                self._told_ns[stage, state] = ns

    def _count_hits(self, end: ev.HandoffEnded) -> None:
        counted, found = self._counted, end.found
        counted.prompt_tokens += end.prompt_tokens
        counted.device_hit_tokens += found.device_tokens
        counted.host_hit_tokens += found.host_tokens
        counted.remote_hit_tokens += found.pulled_tokens
        for tier, tokens in (
            ("device", found.device_tokens),
            ("host", found.host_tokens - found.lower_tokens),
            ("lower", found.lower_tokens),
            ("remote", found.pulled_tokens),
        ):
            names.PREFILL_HIT_TOKENS.labels(tier=tier).inc(tokens)


def _record_stages(compute: Context, times: PromptTimes) -> None:
    """Records the chunks of a prompt at each stage of a pipeline. Chunks that were only summed are one span."""
    for stage, (first, last) in enumerate(zip(times.first_ns, times.last_ns, strict=True)):
        told: dict[str, spans.Value] = {
            names.STAGE: stage,
            names.CHUNKS: len(times.chunks) + times.left_out,
            names.STAGE_BUSY_MS: times.busy_ns[stage] / 1e6,
            names.STAGE_IDLE_MS: times.idle_ns[stage] / 1e6,
        }
        own = spans.record(names.SPAN_STAGE, compute, first, last, told)
        for chunk in times.chunks:
            time = chunk.stages[stage]
            of_chunk: dict[str, spans.Value] = {
                names.CHUNK_START: chunk.start,
                names.CHUNK_END: chunk.end,
                names.STAGE_IDLE_MS: time.idle_ns / 1e6,
            }
            spans.record(names.SPAN_CHUNK, own, time.from_ns, time.until_ns, of_chunk)
        if times.left_out:
            shown_ns = times.chunks[-1].stages[stage].until_ns if times.chunks else first
            spans.record(names.SPAN_CHUNK, own, shown_ns, last, {names.CHUNKS: times.left_out})
