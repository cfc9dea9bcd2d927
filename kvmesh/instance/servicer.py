"""The gRPC service kvmesh.v1.Instance has what every instance answers about itself, whatever its role."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvmesh.errors import FixedRole, InvalidRequest, Unavailable, UnknownInstance
from kvmesh.instance.profiling import RankProfiles, on_wire
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import instance_pb2, instance_pb2_grpc
from kvmesh.rpc.server import Server

SERVICE = "kvmesh.v1.Instance"
ROLES = (pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_BOTH)


class Switchable(Protocol):
    """The part of kvmesh.instance.front.Front that is needed here."""

    role: pb.Role.ValueType
    switch: Callable[[pb.Role.ValueType], None] | None
    profiles: RankProfiles

    @property
    def ref(self) -> pb.InstanceRef: ...

    @property
    def not_ready_reason(self) -> str: ...


class InstanceServicer(instance_pb2_grpc.InstanceServicer):
    """Serves the calls of one instance."""

    def __init__(self, front: Switchable) -> None:
        self._front = front

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

    def _ref(self, incarnation: int) -> pb.InstanceRef:
        """Who we are. Raises UnknownInstance when another life of us is meant."""
        ref = self._front.ref
        if incarnation not in (0, ref.incarnation):
            raise UnknownInstance(f"{ref.instance_id} lives as {ref.incarnation:x}, not {incarnation:x}")
        return ref


def add_instance(front: Switchable, server: Server) -> None:
    """Serves Instance on `server`."""
    instance_pb2_grpc.add_InstanceServicer_to_server(InstanceServicer(front), server.grpc)
    server.serves(SERVICE)
