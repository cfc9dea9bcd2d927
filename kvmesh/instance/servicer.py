"""The gRPC service kvmesh.v1.Instance has what every instance answers about itself, whatever its role."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvmesh.errors import FixedRole, InvalidRequest, Unavailable, UnknownInstance
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import instance_pb2, instance_pb2_grpc
from kvmesh.rpc.server import Server

SERVICE = "kvmesh.v1.Instance"
ROLES = (pb.ROLE_PREFILL, pb.ROLE_DECODE, pb.ROLE_BOTH)


class Switchable(Protocol):
    """The part of kvmesh.instance.front.Front that is needed here."""

    role: pb.Role.ValueType
    switch: Callable[[pb.Role.ValueType], None] | None

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
        ref = front.ref
        if request.incarnation not in (0, ref.incarnation):
            raise UnknownInstance(f"{ref.instance_id} lives as {ref.incarnation:x}, not {request.incarnation:x}")
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


def add_instance(front: Switchable, server: Server) -> None:
    """Serves Instance on `server`."""
    instance_pb2_grpc.add_InstanceServicer_to_server(InstanceServicer(front), server.grpc)
    server.serves(SERVICE)
