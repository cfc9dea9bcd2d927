"""What the services of a mesh say about themselves, asked over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from kvmesh.errors import KvmeshError
from kvmesh.rpc.addresses import split
from kvmesh.rpc.authorisation import ServerRole
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import (
    blocks_pb2,
    blocks_pb2_grpc,
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
    """Ask conductors ("a:1,b:2"), gateway, store masters, every instance that a conductor knows and every node store
    that one of them has or the master knows, all at once.

    Returns plain JSON; a service that does not answer has `error` in the place of its answer."""
    jobs: dict[str, Any] = {"conductor": ask_conductors(conductor)}
    if gateway:
        jobs["gateway"] = ask_gateway(gateway)
    if store:
        jobs["store"], jobs["rank_hosts"] = ask_masters(store), ask_rank_hosts(store)
    found = dict(zip(jobs, await asyncio.gather(*jobs.values()), strict=True))
    instances = found["conductor"].get("instances", [])
    members = found.get("store", {}).get("members", [])
    with_store = [one for one in instances if not one.get("http_url")]  # engines of others have none
    refs = {one["instance"]["instance_id"]: one["instance"] for one in [*with_store, *members]}
    pools, nodes = await asyncio.gather(
        asyncio.gather(*(_pools(one) for one in instances)),
        asyncio.gather(*(_node_store(ref["address"]) for ref in refs.values())),
    )
    for one, pool in zip(instances, pools, strict=True):
        one["pools"] = pool
    found["node_stores"] = dict(zip(refs, nodes, strict=True))
    return found


async def explained(conductors: str, request_id: str) -> dict[str, Any] | None:
    """The last account of one request that a conductor of "a:1,b:2" gives, as plain JSON; None: they know of none.
    KvmeshError: none knows of it, and one does not answer."""
    asking = (_explained(address, request_id) for address in split(conductors, "conductor"))
    told = await asyncio.gather(*asking, return_exceptions=True)
    found = [one for one in told if isinstance(one, dict)]
    for one in told:
        if not found and isinstance(one, BaseException):
            raise one
    return min(found, key=lambda one: int(one["age_ms"]), default=None)


async def _explained(conductor: str, request_id: str) -> dict[str, Any] | None:
    channel = connect(conductor, ServerRole.CONDUCTOR)
    try:
        request = conductor_pb2.ExplainRequest(request_id=request_id)
        return plain(await conductor_pb2_grpc.ConductorStub(channel).Explain(request, timeout=TIMEOUT_S))
    except grpc.RpcError as err:
        if err.code() is grpc.StatusCode.NOT_FOUND:
            return None
        raise from_rpc_error(err) from None
    finally:
        await channel.close()


def plain(message: Message) -> dict[str, Any]:
    """A message as JSON with every field and proto names; 64-bit numbers are numbers."""
    found = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    _numbers(message.DESCRIPTOR, found)
    return found


def _numbers(kind: Any, found: dict[str, Any]) -> None:
    """protobuf writes 64-bit numbers as text, for the sake of JavaScript."""
    for field in kind.fields:
        value = found.get(field.name)
        if value is None:
            continue
        many = value if isinstance(value, list) else [value]
        if field.message_type is not None and isinstance(many[0] if many else None, dict):
            for one in many:
                _numbers(field.message_type, one)
        elif field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
            found[field.name] = [int(one) for one in many] if isinstance(value, list) else int(value)


async def _ask(address: str, call: Any) -> dict[str, Any]:
    """`call(channel)` as plain JSON, or its error."""
    channel = connect(address)
    try:
        return {"address": address, **plain(await call(channel))}
    except grpc.RpcError as err:
        return {"address": address, "error": from_rpc_error(err).message}
    except KvmeshError as err:
        return {"address": address, "error": err.message}
    finally:
        await channel.close()


async def ask_conductors(addresses: str) -> dict[str, Any]:
    """Of several: what the one that leads knows of instances (else the one that knows most), and under `conductors`
    what each says of itself; `peers`: the addresses of conductors that it knows."""
    try:
        every = split(addresses, "conductor")
    except KvmeshError as err:
        return {"address": addresses, "error": err.message}
    told = await asyncio.gather(*(ask_conductor(one) for one in every))

    def rank(one: dict[str, Any]) -> tuple[bool, bool, int]:
        leads = one.get("leadership", {}).get("role") == "leader"
        return "error" not in one, leads, len(one.get("instances", []))

    kept = ("address", "error", "leadership", "store_master")
    each = [{key: one[key] for key in kept if key in one} | _counted(one) for one in told]
    most: dict[str, Any] = max(told, key=rank)
    found = {**most, "peers": most.get("conductors", []), "conductors": each}
    return found if "error" in most else {**found, "group_errors": _errors(told)}


def _errors(told: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What predictions are worth, of each kind and group by the conductor that has compared most: of requests that is
    whoever placed them, which need not be the one that leads."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for error in (error for one in told for error in one.get("group_errors") or one.get("errors", [])):
        known = found.setdefault((error.get("group", ""), error["what"]), error)
        if error["samples"] > known["samples"]:
            found[error.get("group", ""), error["what"]] = error
    return list(found.values())


def _counted(one: dict[str, Any]) -> dict[str, int]:
    return {} if "error" in one else {"known_instances": len(one["instances"])}


async def ask_conductor(address: str) -> dict[str, Any]:
    """What one conductor says, or its error."""
    request = conductor_pb2.GetConductorStatusRequest()
    return await _ask(
        address, lambda channel: conductor_pb2_grpc.ConductorStub(channel).GetStatus(request, timeout=TIMEOUT_S)
    )


async def ask_master(address: str) -> dict[str, Any]:
    """Asks one store master for its status, as JSON; {"error": ...} when it does not answer."""
    request = store_pb2.GetStoreStatusRequest()
    return await _ask(
        address, lambda channel: store_pb2_grpc.StoreMasterStub(channel).GetStatus(request, timeout=TIMEOUT_S)
    )


async def ask_gateway(address: str) -> dict[str, Any]:
    """Asks a gateway for its status, as JSON; {"error": ...} when it does not answer."""
    request = gateway_pb2.GetGatewayStatusRequest()
    return await _ask(
        address, lambda channel: gateway_pb2_grpc.GatewayStub(channel).GetGatewayStatus(request, timeout=TIMEOUT_S)
    )


async def ask_masters(addresses: str) -> dict[str, Any]:
    """Members as the leader tells them, under `map` what it knows of blocks, under `masters` what each says of itself.
    `address`: of the leader, without one of all."""
    try:
        every = split(addresses)
    except KvmeshError as err:
        return {"address": addresses, "error": err.message}
    told = await asyncio.gather(*(ask_master(one) for one in every))
    kept = ("address", "error", "leading", "leader", "term")
    masters = [{key: one[key] for key in kept if key in one} for one in told]
    # A leader that was frozen may not know yet that another leads.
    leading = max((one for one in told if one.get("leading")), key=lambda one: one["term"], default=None)
    if leading is None:
        why = told[0]["error"] if len(told) == 1 and "error" in told[0] else "no store master leads"
        return {"address": addresses, "error": why, "masters": masters}
    members = await _ask(
        leading["address"],
        lambda channel: store_pb2_grpc.StoreMasterStub(channel).ListMembers(
            store_pb2.ListMembersRequest(), timeout=TIMEOUT_S
        ),
    )
    return {**members, "map": leading, "masters": masters}


async def ask_rank_hosts(addresses: str) -> dict[str, Any]:
    """Returns the machines that lend ranks, under `hosts`, as the store master that leads knows them; {"error": ...}
    where none does, or it is of a build that knows of none."""
    masters = await ask_masters(addresses)
    if "error" in masters:
        return masters
    request = store_pb2.ListRankHostsRequest()
    return await _ask(
        masters["address"],
        lambda channel: store_pb2_grpc.StoreMasterStub(channel).ListRankHosts(request, timeout=TIMEOUT_S),
    )


def _node_store(address: str) -> Any:
    request = blocks_pb2.GetNodeStoreRequest()
    return _ask(address, lambda channel: blocks_pb2_grpc.NodeStoreStub(channel).GetStore(request, timeout=TIMEOUT_S))


async def _pools(instance: dict[str, Any]) -> dict[str, Any]:
    stub: Any = prefill_pb2_grpc.PrefillStub if instance["role"] == "ROLE_PREFILL" else decode_pb2_grpc.DecodeStub
    request = common_pb2.GetPoolsRequest()
    address = instance["instance"]["address"]
    told = await _ask(address, lambda channel: stub(channel).GetPools(request, timeout=TIMEOUT_S))
    pools: dict[str, Any] = told.get("pools") or {"error": told.get("error", "no answer")}
    return pools
