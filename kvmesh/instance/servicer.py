"""The gRPC service kvmesh.v1.Instance has what every instance answers about itself, whatever its role."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from kvmesh.errors import FixedRole, InvalidRequest, Unavailable, UnknownInstance
from kvmesh.instance.order_holds import (
    LEAST_LEASE_MS,
    MAX_RESULT,
    MOST_LEASE_MS,
    MOST_PAUSE_MS,
    HoldOutcome,
    OrderIdentity,
)
from kvmesh.instance.pausing import PauseMode
from kvmesh.instance.profiling import RankProfiles, on_wire
from kvmesh.instance.served_weights import NewWeights, ServedWeights, WeightsTaken
from kvmesh.instance.sleeping import MemoryReleased, SleepLevel
from kvmesh.ranks.protocol import RemoteTensor
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import instance_pb2, instance_pb2_grpc
from kvmesh.rpc.running_orders import RunningOrders
from kvmesh.rpc.server import Server

SERVICE = "kvmesh.v1.Instance"
ROLES = (pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_BOTH)


PAUSE_MODES = {
    pb.PAUSE_MODE_UNSPECIFIED: PauseMode.KEEP,
    pb.PAUSE_MODE_KEEP: PauseMode.KEEP,
    pb.PAUSE_MODE_ABORT: PauseMode.ABORT,
    pb.PAUSE_MODE_FINISH: PauseMode.FINISH,
}
PAUSE_MS, UPDATE_MS, MOST_MS = 60_000, 600_000, 3_600_000
MAX_REASON = 200


class Switchable(Protocol):
    """The part of kvmesh.instance.front.Front that is needed here."""

    role: pb.Role.ValueType
    switch: Callable[[pb.Role.ValueType], None] | None
    profiles: RankProfiles

    @property
    def ref(self) -> pb.InstanceRef: ...

    @property
    def not_ready_reason(self) -> str: ...

    @property
    def weights(self) -> ServedWeights: ...

    def hold_order(self, order: OrderIdentity, lease_s: float) -> HoldOutcome: ...

    async def pause(
        self, mode: PauseMode, reason: str, deadline_s: float, order: OrderIdentity | None, for_s: float
    ) -> int: ...

    def resume(self) -> int: ...

    def end_order(
        self, order: OrderIdentity, *, result: bytes, needs_epoch: int, pause_s: float, ends_pause: bool
    ) -> int: ...

    async def update_weights(self, new: NewWeights, deadline_s: float, order: OrderIdentity | None) -> WeightsTaken: ...

    async def sleep(
        self, level: SleepLevel, mode: PauseMode, reason: str, deadline_s: float, order: OrderIdentity | None = None
    ) -> MemoryReleased: ...

    async def wake(self, deadline_s: float, order: OrderIdentity | None = None) -> int: ...


class InstanceServicer(instance_pb2_grpc.InstanceServicer):
    """Serves the calls of one instance."""

    def __init__(self, front: Switchable) -> None:
        self._front = front
        self._orders = RunningOrders()

    async def SetRole(  # noqa: N802
        self, request: instance_pb2.SetRoleRequest, context: Any
    ) -> instance_pb2.SetRoleResponse:
        """Takes another role. Raises UnknownInstance (another incarnation), InvalidRequest, FixedRole (this instance
        has only one) or Unavailable (it cannot serve now)."""
        front = self._front
        ref = self._ref(request.incarnation)
        if request.role not in ROLES:
            raise InvalidRequest.of("role", request.role, "prefill, decode or both")
        if front.switch is None:
            name = pb.Role.Name(front.role).removeprefix("ROLE_").lower()
            why = "one that can switch is started with `kvmesh serve coupled`"
            raise FixedRole(f"{ref.instance_id} was started as a {name} instance and stays one; {why}", field="role")
        if front.not_ready_reason:
            raise Unavailable(f"{ref.instance_id}: {front.not_ready_reason}")
        was = front.role
        front.switch(request.role)
        return instance_pb2.SetRoleResponse(instance=ref, was=was)

    async def Profile(  # noqa: N802
        self, request: instance_pb2.ProfileRequest, context: Any
    ) -> instance_pb2.ProfileResponse:
        """Time the next steps. Raises UnknownInstance (another life) and as RankProfiles.profile does."""
        ref = self._ref(request.incarnation)
        answers = await self._front.profiles.profile(ref.instance_id, request.steps, request.deadline_ms)
        return instance_pb2.ProfileResponse(instance=ref, role=self._front.role, ranks=map(on_wire, answers))

    async def HoldOrder(  # noqa: N802
        self, request: instance_pb2.HoldOrderRequest, context: Any
    ) -> instance_pb2.HoldOrderResponse:
        """Raises UnknownInstance, or InvalidRequest."""
        ref = self._ref(request.incarnation)
        order = OrderIdentity(request.order.id, request.order.conductor)
        if not LEAST_LEASE_MS <= request.lease_ms <= MOST_LEASE_MS:
            raise InvalidRequest.of("lease_ms", request.lease_ms, f"in {LEAST_LEASE_MS}..{MOST_LEASE_MS}")
        held = self._front.hold_order(order, request.lease_ms / 1000)
        answer = instance_pb2.HoldOrderResponse(instance=ref, result=held.result, seen=held.seen)
        if held.other is not None:
            answer.held_by.id, answer.held_by.conductor = held.other.id, held.other.conductor
            answer.wait_ms = max(1, int(held.left_s * 1000))
        return answer

    async def Pause(self, request: instance_pb2.PauseRequest, context: Any) -> instance_pb2.PauseResponse:  # noqa: N802
        """Raises UnknownInstance, InvalidRequest, DeadlinePassed, Overloaded or OrderLapsed (see the proto)."""
        ref = self._ref(request.incarnation)
        mode, left_s = pause_mode(request.mode), deadline_s(request.deadline_ms, PAUSE_MS)
        pause = self._front.pause(mode, request.reason[:MAX_REASON], left_s, order_of(request), pause_s(request.for_ms))
        return instance_pb2.PauseResponse(instance=ref, ended=await self._orders.carry_out(pause))

    async def Resume(  # noqa: N802
        self, request: instance_pb2.ResumeRequest, context: Any
    ) -> instance_pb2.ResumeResponse:
        """Raises UnknownInstance, InvalidRequest, Overloaded while another order runs, or FailedWeights where a pause
        by hand ends and the weights are not whole."""
        ref, order = self._ref(request.incarnation), order_of(request)
        if order is None:
            return instance_pb2.ResumeResponse(instance=ref, weights_epoch=self._front.resume())
        if len(request.result) > MAX_RESULT:
            raise InvalidRequest.of("result", f"{len(request.result)} bytes", f"at most {MAX_RESULT}")
        epoch = self._front.end_order(
            order,
            result=request.result,
            needs_epoch=request.needs_epoch,
            pause_s=pause_s(request.for_ms) if request.keep_paused else 0.0,
            ends_pause=request.ends_pause,
        )
        return instance_pb2.ResumeResponse(instance=ref, weights_epoch=epoch)

    async def UpdateWeights(  # noqa: N802
        self, request: instance_pb2.UpdateWeightsRequest, context: Any
    ) -> instance_pb2.UpdateWeightsResponse:
        """Raises UnknownInstance, and as Front.update_weights does. One order's update is carried out once: another
        conductor that goes on with the order gets the first answer."""
        ref, order = self._ref(request.incarnation), order_of(request)
        new = new_weights(request.weights_epoch, request.source)
        left_s = deadline_s(request.deadline_ms, UPDATE_MS)
        update = self._front.update_weights(new, left_s, order)
        order_id = order.id if order is not None else ""
        taken = await self._orders.carry_out(update, order_id, f"weights of epoch {new.epoch}")
        return instance_pb2.UpdateWeightsResponse(
            taken=pb.WeightsTaken(
                instance=ref,
                weights_epoch=self._front.weights.epoch,
                bytes=taken.nbytes,
                seconds=taken.seconds,
                apply_seconds=taken.apply_s,
            )
        )

    async def Sleep(self, request: instance_pb2.SleepRequest, context: Any) -> instance_pb2.SleepResponse:  # noqa: N802
        """Raises UnknownInstance, and as Front.sleep does."""
        ref = self._ref(request.incarnation)
        level, mode = SleepLevel.told(request.level), pause_mode(request.mode)
        left_s = deadline_s(request.deadline_ms, PAUSE_MS)
        sleep = self._front.sleep(level, mode, request.reason[:MAX_REASON], left_s, order_of(request))
        given = await self._orders.carry_out(sleep)
        return instance_pb2.SleepResponse(
            released=pb.MemoryReleased(
                instance=ref,
                level=given.level,
                page_bytes=given.page_bytes,
                weight_bytes=given.weight_bytes,
                ended=given.ended,
            )
        )

    async def Wake(self, request: instance_pb2.WakeRequest, context: Any) -> instance_pb2.WakeResponse:  # noqa: N802
        """Raises UnknownInstance, and as Front.wake does."""
        ref = self._ref(request.incarnation)
        left_s = deadline_s(request.deadline_ms, UPDATE_MS)
        epoch = await self._orders.carry_out(self._front.wake(left_s, order_of(request)))
        return instance_pb2.WakeResponse(instance=ref, weights_epoch=epoch)

    def _ref(self, incarnation: int) -> pb.InstanceRef:
        """Who we are. Raises UnknownInstance when another life of us is meant."""
        ref = self._front.ref
        if incarnation not in (0, ref.incarnation):
            raise UnknownInstance(f"{ref.instance_id} lives as {ref.incarnation:x}, not {incarnation:x}")
        return ref


def pause_mode(mode: pb.PauseMode.ValueType) -> PauseMode:
    """Raises InvalidRequest for a number that is no mode."""
    if mode not in PAUSE_MODES:
        raise InvalidRequest.of("mode", mode, "keep, abort or finish")
    return PAUSE_MODES[mode]


def order_of(
    request: instance_pb2.PauseRequest
    | instance_pb2.ResumeRequest
    | instance_pb2.UpdateWeightsRequest
    | instance_pb2.SleepRequest
    | instance_pb2.WakeRequest,
) -> OrderIdentity | None:
    """Returns the order to which a call belongs; None: it is given by hand. Raises InvalidRequest."""
    return OrderIdentity(request.order.id, request.order.conductor) if request.HasField("order") else None


def pause_s(told_ms: int) -> float:
    """Returns for how long a pause by hand lasts. Raises InvalidRequest for too long a time."""
    if told_ms > MOST_PAUSE_MS:
        raise InvalidRequest.of("for_ms", told_ms, f"at most {MOST_PAUSE_MS}, seven days; 0: until it is resumed")
    return told_ms / 1000 if told_ms else math.inf


def deadline_s(told_ms: int, default_ms: int) -> float:
    """Returns the deadline of a call in seconds. Raises InvalidRequest for one that is too late."""
    if told_ms > MOST_MS:
        raise InvalidRequest.of("deadline_ms", told_ms, f"at most {MOST_MS}")
    return (told_ms or default_ms) / 1000


def new_weights(epoch: int, source: pb.WeightsSource) -> NewWeights:
    """Returns where the weights are that an order names."""
    tensors = tuple(RemoteTensor(one.name, one.dtype, tuple(one.shape), one.offset) for one in source.tensors)
    return NewWeights(epoch, source.path, source.segment_descriptor, tensors)


def add_instance(front: Switchable, server: Server) -> None:
    """Serves Instance on `server`."""
    instance_pb2_grpc.add_InstanceServicer_to_server(InstanceServicer(front), server.grpc)
    server.serves(SERVICE)
