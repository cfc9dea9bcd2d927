"""How commands call one instance, by its address, through `kvmesh.v1.Instance`, and how they show its axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def axes_text(told: Mapping[str, Any]) -> str:
    """Returns the axes of a status or candidate in short, as "pp2·tp2" or "dp8·ep(dp)"; "" of one rank."""
    axes = told.get("axes") or {}
    parts = [f"{name}{axes[name]}" for name in ("dp", "pp", "cp", "tp", "dcp") if int(axes.get(name) or 1) > 1]
    if axes.get("ep"):
        parts.append(f"ep({'+'.join(axes['ep'])})")
    return "·".join(parts)


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


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 2 and 3", "ranks 4, 5, 6 and 7"."""
    texts = [str(rank) for rank in sorted(ranks)]
    return f"rank {texts[0]}" if len(texts) == 1 else f"ranks {', '.join(texts[:-1])} and {texts[-1]}"
