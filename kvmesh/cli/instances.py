"""How commands call one instance: by its address, through `kvmesh.v1.Instance`."""

from __future__ import annotations

from typing import Any

from kvmesh.errors import ConfigError, ProtocolMismatch


def host_port(instance: str) -> str:
    """Returns `instance` when it is HOST:PORT, "" when it is a name. ConfigError: it is neither."""
    host, colon, port = instance.rpartition(":")
    if not colon:
        return ""
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"instance={instance!r}: must be a name, or HOST:PORT")
    return instance


async def call_instance(address: str, method: str, request: Any, timeout_s: float) -> Any:
    """Calls `method` of the Instance service there. Raises KvmeshError as the instance answered, or, with the address,
    that none does."""
    import grpc

    from kvmesh.rpc.authorisation import ServerRole
    from kvmesh.rpc.channels import connect
    from kvmesh.rpc.pb import instance_pb2_grpc
    from kvmesh.rpc.status import from_rpc_error

    async with connect(address, ServerRole.INSTANCE) as channel:
        try:
            return await getattr(instance_pb2_grpc.InstanceStub(channel), method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise ProtocolMismatch(f"{address}: what listens there is no instance that knows {method}") from None
            raise from_rpc_error(error) from None
