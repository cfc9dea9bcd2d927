"""The Conductor service over gRPC: it converts protos for the brain, and back. Nothing is decided here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvmesh.clock import Tick
from kvmesh.errors import InvalidRequest, Unavailable, UnknownRequest
from kvmesh.kvcache.keys import KEY_BYTES
from kvmesh.membership.places import instance_of
from kvmesh.rpc import protocol
from kvmesh.rpc.addresses import split
from kvmesh.rpc.call_queue import CallQueue
from kvmesh.rpc.fastpath.server import FastContext
from kvmesh.rpc.pb import conductor_pb2 as pb
from kvmesh.rpc.pb import conductor_pb2_grpc as pb_grpc
from kvmesh.services.conductor import domain, mapping
from kvmesh.services.conductor.balance.gauges import LoadGauges, ScaleGauges, error_shares
from kvmesh.services.conductor.domain import (
    Action,
    Event,
    Measured,
    OutOfStep,
    Placed,
    Refuse,
    Replicate,
    Role,
    SwitchRole,
)
from kvmesh.services.conductor.model_control import ModelControl
from kvmesh.services.conductor.peers.leadership import ConductorLeadership
from kvmesh.services.conductor.state import ConductorState
from kvmesh.telemetry import names, spans
from kvmesh.telemetry.present_series import PresentSeries
from kvmesh.telemetry.spans import context_from_metadata

log = logging.getLogger(__name__)

COUNTED_S = 0.15  # between two counts of the instances for gauges: ticks of many instances come more often
SHOWN_S = 1.0  # between two looks at what gauges show and takes long to find out
MOST_RELEASED = 1024  # requests in one Release
VIEWED = 25  # instances of a status, before others have their turn

Step = Callable[[Event, float], Sequence[Action]]


class ConductorServicer(pb_grpc.ConductorServicer):
    """`clock` gives monotonic seconds. `store_status` is what GetStatus shows of the store master. `step` is the
    brain's, or that of a Recorder around it. `store` and `peers` are the addresses of the store masters and of other
    conductors. `queue` holds Schedules over gRPC until their turn; over the fast path they have waited before they come
    here."""

    def __init__(
        self,
        state: ConductorState,
        *,
        clock: Callable[[], float],
        store_status: Callable[[], str],
        leadership: ConductorLeadership,
        step: Step | None = None,
        store: str = "",
        peers: tuple[str, ...] = (),
        queue: CallQueue | None = None,
    ) -> None:
        self._state = state
        self._step: Step = step or state.step
        self._clock = clock
        self._store_status = store_status
        self._leadership = leadership
        self._masters = split(store) if store else ()
        self._peers = peers
        self._queue = queue or CallQueue(1024, "max_schedules")
        self.grpc_calls = 0  # Register, Heartbeat and Schedule so far
        self.control = ModelControl(lambda: state.instances, state.weights_ordered)
        self._gauges = ScaleGauges()
        self._errors = PresentSeries(names.CONDUCTOR_PREDICTION_ERROR)
        self._idle = PresentSeries(names.CONDUCTOR_IDLE)
        self._loads = LoadGauges(lambda some: state.loads(some, clock()))
        self._orders: list[Action] = []
        self._shown_at = self._counted_at = self._ticked_at = float("-inf")
        self._shows: list[Callable[[], None]] = []  # what is still to be shown, one thing a tick

    @property
    def instances(self) -> int:
        """How many instances are known."""
        return len(self._state.instances)

    def deliver(self, event: Event) -> Placed | None:
        """Gives an event to the brain and returns the placement, if it is one. Raises the error that answers the event
        (Unavailable: the master's stream must start over)."""
        placed = None
        for action in self._step(event, self._clock()):
            match action:
                case Placed():
                    placed = action
                case Refuse(error):
                    raise error
                case OutOfStep(store_id):
                    raise Unavailable(f"an announcement of {store_id!r} does not follow what is known of it")
                case SwitchRole() | Replicate():
                    self._orders.append(action)
                case Measured(_, predicted_s, actual_s):
                    names.CONDUCTOR_TTFT_ERROR.observe(abs(predicted_s - actual_s))
        return placed

    def take_orders(self) -> list[Action]:
        """Returns the brain's orders to other processes, which the caller carries out."""
        orders, self._orders = self._orders, []
        return orders

    def tick(self) -> None:
        """Lets time pass in the brain, and updates the metrics."""
        self.deliver(Tick())
        now = self._clock()
        passed_s, self._ticked_at = now - self._ticked_at, now
        if now >= self._counted_at + COUNTED_S:
            self._counted_at = now
            self._show_instances(now)
        if now >= self._shown_at + SHOWN_S:
            self._shown_at = now
            self._loads.begin(self._state.instances)
            self._shows = [self._show_hints, lambda: self._errors.show(error_shares(self._state.group_errors(now)))]
        if self._shows:
            self._shows.pop()()
        self._loads.tick(passed_s)

    def _show_instances(self, now: float) -> None:
        count, silent_s = self._state.readiness(now)
        for role in Role:
            for ready, label in ((True, "ready"), (False, "not_ready")):
                names.CONDUCTOR_INSTANCES.labels(role=role.value, state=label).set(count.get((role, ready), 0))
        self._idle.show({(name,): idle for name, idle in self._state.idle(now).items()})
        names.CONDUCTOR_INDEX_BLOCKS.set(self._state.indexed_blocks)
        names.CONDUCTOR_HEARTBEAT_AGE.set(silent_s)
        names.CONDUCTOR_HEARTBEAT_INTERVAL.set(self._state.pacing.pulse.interval_s)

    def _show_hints(self) -> None:
        """Shows scale hints if this conductor leads. Another knows less of the load, and an autoscaler would believe
        its hints as much."""
        self._gauges.show(self._state.hints(self._clock()) if self._leadership.leads() else ())

    async def Register(  # noqa: N802
        self, request: pb.RegisterInstanceRequest, context: Any
    ) -> pb.RegisterInstanceResponse:
        """Raises ProtocolMismatch, or InvalidRequest."""
        self.grpc_calls += 1
        who = request.instance.instance_id or "a nameless instance"
        protocol.check(request.protocol_version, f"{who} at {request.instance.address}")
        self.deliver(mapping.register_in(request))
        if stranded := self._state.stranded(request.instance.instance_id):
            log.warning("%s registered, but gets no work: %s", who, stranded)
        pulse = self._state.pacing.pulse
        return pb.RegisterInstanceResponse(
            heartbeat_interval_ms=pulse.interval_ms, lease_ms=pulse.lease_ms, pace=pulse.number
        )

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:  # noqa: N802
        """Raises UnknownInstance, or InvalidRequest for blocks whose keys are not whole."""
        by_door = isinstance(context, FastContext)
        if by_door:
            names.CONDUCTOR_HEARTBEAT_WAIT.observe(time.monotonic() - context.arrived)
        else:
            self.grpc_calls += 1
        self.deliver(mapping.heartbeat_in(request, by_door=by_door))
        names.CONDUCTOR_HEARTBEATS.inc()
        pulse = self._state.pacing.pulse
        return pb.HeartbeatResponse(
            heartbeat_interval_ms=pulse.interval_ms,
            lease_ms=pulse.lease_ms,
            pace=pulse.number,
            want_snapshot=self._lacks_blocks(request),
        )

    def _lacks_blocks(self, request: pb.HeartbeatRequest) -> bool:
        """Takes what an external instance says of its engine's blocks, and returns whether something is missing before
        it."""
        if not self._state.is_external(request.instance.instance_id):
            return False
        blocks = mapping.external_blocks_in(request)
        return blocks is not None and any(isinstance(action, OutOfStep) for action in self._step(blocks, self._clock()))

    async def Schedule(self, request: pb.ScheduleRequest, context: Any) -> pb.ScheduleResponse:  # noqa: N802
        """Raises Overloaded, Unavailable, ModelNotFound, ContextTooLong or InvalidRequest."""
        if isinstance(context, FastContext):
            return self._schedule(request, context)
        self.grpc_calls += 1
        return await self._queue.call(lambda: self._schedule(request, context))

    def _schedule(self, request: pb.ScheduleRequest, context: Any) -> pb.ScheduleResponse:
        start_ns = time.monotonic_ns()
        attributes: dict[str, spans.Value] = {
            names.REQUEST_ID: request.request_id,
            names.ATTEMPT: request.attempt,
            names.REQUEST_MODEL: request.model,
            names.PROMPT_TOKENS: request.prompt_tokens,
            names.BLOCKS: len(request.block_keys) // KEY_BYTES,
        }
        outcome, failure = "placed", ""
        try:
            if not self._leadership.opened:
                raise Unavailable("this conductor has just started")
            placed = self._place(mapping.schedule_in(request), attributes)
            placement = mapping.placement_out(placed)
            placement.weights_epoch = self._state.weights_epoch(placed.decode.instance_id)
            return pb.ScheduleResponse(placement=placement)
        except Exception as err:
            outcome, failure = getattr(err, "code", "internal"), str(err)
            attributes[names.ERROR_TYPE] = outcome
            raise
        finally:
            end_ns = time.monotonic_ns()
            attributes[names.OUTCOME] = outcome
            traced = request.traceparent  # over the fast path there is no metadata
            parent = spans.context_from(traced) if traced else context_from_metadata(context.invocation_metadata())
            spans.record(names.SPAN_PLACE, parent, start_ns, end_ns, attributes, error=failure)
            names.CONDUCTOR_DECISIONS.labels(outcome=outcome).inc()
            names.CONDUCTOR_SCHEDULE.observe((end_ns - start_ns) / 1e9)

    def _place(self, event: domain.Schedule, attributes: dict[str, spans.Value]) -> Placed:
        (answer,) = self._step(event, self._clock())
        if isinstance(answer, Refuse):
            names.CONDUCTOR_REJECTIONS.labels(reason=answer.reason, lane=event.lane.value).inc()
            raise answer.error
        assert isinstance(answer, Placed), "a Schedule is answered by a placement or a refusal"
        attributes[names.PREFILL_INSTANCE] = answer.prefill.instance_id
        attributes[names.DECODE_INSTANCE] = answer.decode.instance_id
        attributes[names.PREDICTED_TTFT_MS] = answer.expected_ttft_s * 1000
        attributes[names.PREDICTED_TBT_MS] = answer.expected_tbt_s * 1000
        attributes[names.PREDICTED_CACHED_TOKENS] = answer.cached_tokens
        attributes.update({f"{names.PREDICTED_TERM}.{term}": value for term, value in answer.terms.items()})
        names.CONDUCTOR_ADMITTED.labels(lane=event.lane.value).inc()
        names.CONDUCTOR_PREDICTED_TTFT.observe(answer.expected_ttft_s)
        names.CONDUCTOR_FETCHED_BLOCKS.inc(sum(r.blocks for r in answer.pulls))
        return answer

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:  # noqa: N802
        """Raises InvalidRequest, and then has released none."""
        if len(request.requests) > MOST_RELEASED:
            raise InvalidRequest.of("requests", len(request.requests), f"at most {MOST_RELEASED} at once")
        for event in [mapping.released_in(told) for told in request.requests]:
            self.deliver(event)
        return pb.ReleaseResponse()

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:  # noqa: N802
        """Returns one card per model name. Raises InvalidRequest."""
        if request.held:
            self.deliver(mapping.held_in(request))
        return pb.ListModelsResponse(models=[mapping.card_out(c) for c in self._state.models(self._clock())])

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> pb.ExplainResponse:  # noqa: N802
        """Raises InvalidRequest, or UnknownRequest."""
        if not request.request_id:
            raise InvalidRequest.of("request_id", request.request_id, "must not be empty")
        decision = self._state.explain(request.request_id)
        if decision is None:
            text = f"request_id={request.request_id!r}: no decision on it here, or it was forgotten"
            raise UnknownRequest(text, field="request_id")
        return mapping.decision_out(decision, self._clock())

    async def GetStatus(  # noqa: N802
        self, request: pb.GetConductorStatusRequest, context: Any
    ) -> pb.GetConductorStatusResponse:
        """Returns every instance known here, and how the store master is reached."""
        everybody, told = self._state.instances, []
        for first in range(0, len(everybody), VIEWED):
            views = self._state.views(self._clock(), everybody[first : first + VIEWED])
            told += [mapping.view_out(view) for view in views]
            await asyncio.sleep(0)  # of thousands it takes a tenth of a second: decisions are made between them
        now, pulse = self._clock(), self._state.pacing.pulse
        return pb.GetConductorStatusResponse(
            instances=told,
            store_master=self._store_status(),
            leadership=self._leadership.as_proto,
            policy=self._state.policy,
            admission=self._state.admission.value,
            errors=[mapping.error_out(error) for error in self._state.prediction_errors(now)],
            group_errors=[mapping.error_out(error) for error in self._state.group_errors(now)],
            balancing_threshold=self._state.balancing_threshold(now),
            protocol_version=protocol.PROTOCOL_VERSION,
            store_masters=self._masters,
            conductors=dict.fromkeys(one for one in (self._leadership.address, *self._peers) if one),
            heartbeat_interval_ms=pulse.interval_ms,
            lease_ms=pulse.lease_ms,
        )

    async def Cordon(self, request: pb.CordonRequest, context: Any) -> pb.CordonResponse:  # noqa: N802
        """Raises InvalidRequest, UnknownInstance, Overloaded or Unavailable (see ConductorLeadership.cordon)."""
        if request.state not in mapping.CORDONS:
            raise InvalidRequest.of("state", request.state, "must be open (0), cordoned or draining")
        was = self._state.cordon_of(request.instance_id)
        event = domain.Cordon(instance_of(request.instance_id), mapping.CORDONS[request.state], request.reason)
        if error := self._state.cordon_refusal(event):
            raise error
        await self._leadership.cordon(event, was, self._state.places(event.instance_id) or [event.instance_id])
        return pb.CordonResponse(was=mapping.CORDONS_OUT[was])

    async def PauseModel(self, request: pb.PauseModelRequest, context: Any) -> pb.PauseModelResponse:  # noqa: N802
        """See ModelControl.pause."""
        return await self.control.pause(request)

    async def ResumeModel(self, request: pb.ResumeModelRequest, context: Any) -> pb.ResumeModelResponse:  # noqa: N802
        """See ModelControl.resume."""
        return await self.control.resume(request)

    async def UpdateModelWeights(  # noqa: N802
        self, request: pb.UpdateModelWeightsRequest, context: Any
    ) -> pb.UpdateModelWeightsResponse:
        """See ModelControl.update."""
        return await self.control.update(request)

    async def GatherModel(self, request: pb.GatherModelRequest, context: Any) -> pb.GatherModelResponse:  # noqa: N802
        """See ModelControl.gather."""
        return await self.control.gather(request)

    async def SleepModel(self, request: pb.SleepModelRequest, context: Any) -> pb.SleepModelResponse:  # noqa: N802
        """See ModelControl.sleep."""
        return await self.control.sleep(request)

    async def WakeModel(self, request: pb.WakeModelRequest, context: Any) -> pb.WakeModelResponse:  # noqa: N802
        """See ModelControl.wake."""
        return await self.control.wake(request)

    async def GetScaleHints(  # noqa: N802
        self, request: pb.GetScaleHintsRequest, context: Any
    ) -> pb.GetScaleHintsResponse:
        """Returns what each pool wants if this conductor leads, else who leads."""
        hints = self._state.hints(self._clock()) if self._leadership.leads() else ()
        told = [mapping.hint_out(hint) for hint in hints]
        return pb.GetScaleHintsResponse(hints=told, leadership=self._leadership.as_proto)
