"""The gRPC service kvmesh.v1.Instance has what every instance answers about itself, whatever its role."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvmesh.errors import FixedRole, InvalidRequest, Unavailable, UnknownInstance
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

    async def pause(self, mode: PauseMode, reason: str, deadline_s: float) -> int: ...

    def resume(self) -> int: ...

    async def update_weights(self, new: NewWeights, deadline_s: float) -> WeightsTaken: ...

    async def sleep(self, level: SleepLevel, mode: PauseMode, reason: str, deadline_s: float) -> MemoryReleased: ...

    async def wake(self, deadline_s: float, stay_paused: bool = False) -> int: ...


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

    async def Pause(self, request: instance_pb2.PauseRequest, context: Any) -> instance_pb2.PauseResponse:  # noqa: N802
        """Raises UnknownInstance, InvalidRequest or DeadlinePassed (see the proto)."""
        ref = self._ref(request.incarnation)
        mode, left_s = pause_mode(request.mode), deadline_s(request.deadline_ms, PAUSE_MS)
        ended = await self._orders.carry_out(self._front.pause(mode, request.reason[:MAX_REASON], left_s))
        return instance_pb2.PauseResponse(instance=ref, ended=ended)

    async def Resume(  # noqa: N802
        self, request: instance_pb2.ResumeRequest, context: Any
    ) -> instance_pb2.ResumeResponse:
        """Raises UnknownInstance, or FailedWeights while the weights are not whole."""
        ref = self._ref(request.incarnation)
        return instance_pb2.ResumeResponse(instance=ref, weights_epoch=self._front.resume())

    async def UpdateWeights(  # noqa: N802
        self, request: instance_pb2.UpdateWeightsRequest, context: Any
    ) -> instance_pb2.UpdateWeightsResponse:
        """Raises UnknownInstance, and as Front.update_weights does."""
        ref = self._ref(request.incarnation)
        new = new_weights(request.weights_epoch, request.source)
        left_s = deadline_s(request.deadline_ms, UPDATE_MS)
        taken = await self._orders.carry_out(self._front.update_weights(new, left_s))
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
        given = await self._orders.carry_out(self._front.sleep(level, mode, request.reason[:MAX_REASON], left_s))
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
        epoch = await self._orders.carry_out(self._front.wake(left_s, request.stay_paused))
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
