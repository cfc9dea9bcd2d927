"""What the services of a mesh say about themselves, asked over gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
from google.protobuf.json_format import MessageToDict

from kvmesh.rpc.channels import connect
from kvmesh.rpc.errors import KvmeshError
from kvmesh.rpc.pb import (
    common_pb2,
    conductor_pb2,
    conductor_pb2_grpc,
    decode_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    prefill_pb2_grpc,
    store_pb2,
    store_pb2_grpc,
)
from kvmesh.rpc.status import from_rpc_error

TIMEOUT_S = 2.0


async def collect(conductor: str, gateway: str, store: str) -> dict[str, Any]:
    """Ask conductor, gateway, store master and every instance that the conductor knows, all at once.

    Returns plain JSON; a service that does not answer has `error` in the place of its answer."""
    jobs: dict[str, Any] = {"conductor": _conductor(conductor)}
    if gateway:
        jobs["gateway"] = _gateway(gateway)
    if store:
        jobs["store"] = _store(store)
    found = dict(zip(jobs, await asyncio.gather(*jobs.values()), strict=True))
    instances = found["conductor"].get("instances", [])
    pools = await asyncio.gather(*(_pools(one) for one in instances))
    for one, pool in zip(instances, pools, strict=True):
        one["pools"] = pool
    return found


def _plain(message: Any) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


async def _ask(address: str, call: Any) -> dict[str, Any]:
    """`call(channel)` as plain JSON, or its error."""
    channel = connect(address)
    try:
        return {"address": address, **_plain(await call(channel))}
    except grpc.RpcError as err:
        return {"address": address, "error": from_rpc_error(err).message}
    except KvmeshError as err:
        return {"address": address, "error": err.message}
    finally:
        await channel.close()


def _conductor(address: str) -> Any:
    request = conductor_pb2.GetConductorStatusRequest()
    return _ask(
        address, lambda channel: conductor_pb2_grpc.ConductorStub(channel).GetStatus(request, timeout=TIMEOUT_S)
    )


def _gateway(address: str) -> Any:
    request = gateway_pb2.GetGatewayStatusRequest()
    return _ask(
        address, lambda channel: gateway_pb2_grpc.GatewayStub(channel).GetGatewayStatus(request, timeout=TIMEOUT_S)
    )


def _store(address: str) -> Any:
    request = store_pb2.ListMembersRequest()
    return _ask(
        address, lambda channel: store_pb2_grpc.StoreMasterStub(channel).ListMembers(request, timeout=TIMEOUT_S)
    )


async def _pools(instance: dict[str, Any]) -> dict[str, Any]:
    stub: Any = prefill_pb2_grpc.PrefillStub if instance["role"] == "ROLE_PREFILL" else decode_pb2_grpc.DecodeStub
    request = common_pb2.GetPoolsRequest()
    address = instance["instance"]["address"]
    told = await _ask(address, lambda channel: stub(channel).GetPools(request, timeout=TIMEOUT_S))
    pools: dict[str, Any] = told.get("pools") or {"error": told.get("error", "no answer")}
    return pools
