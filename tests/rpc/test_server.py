"""The server every service stands on: ports, health, reflection, limits, trace context."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvmesh.errors import ConfigError, ProtocolMismatch
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import store_pb2_grpc
from kvmesh.rpc.protocol import PROTOCOL_VERSION, check
from kvmesh.rpc.server import Server, check_port, join
from kvmesh.telemetry.spans import context_from, context_from_metadata, metadata, traceparent

STORE = "kvmesh.v1.StoreMaster"
HEALTH = health_pb2.HealthCheckResponse


async def test_a_port_in_use_is_one_line_that_names_it() -> None:
    first = Server("127.0.0.1", 0)
    port = await first.start()
    with pytest.raises(ConfigError, match=f"port={port}: the port is in use on 127.0.0.1") as caught:
        await Server("127.0.0.1", port).start()
    assert caught.value.field == "port"
    await first.stop(0)
    again = Server("127.0.0.1", port)  # free at once after the first is gone
    assert await again.start() == port
    await again.stop(0)


async def test_a_port_taken_by_another_program_is_found_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"http_port={port}"):
            check_port("127.0.0.1", port, "http_port")
    with pytest.raises(ConfigError, match=r"host='no\.such\.host\.invalid'"):
        check_port("no.such.host.invalid", 0)


async def test_health_follows_readiness_for_the_server_and_each_service() -> None:
    server = Server("127.0.0.1", 0)
    store_pb2_grpc.add_StoreMasterServicer_to_server(store_pb2_grpc.StoreMasterServicer(), server.grpc)
    server.serves(STORE)
    await server.start()
    async with connect(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status(name: str) -> int:
            return int((await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=30)).status)

        assert [await status(name) for name in ("", STORE)] == [HEALTH.NOT_SERVING] * 2
        server.set_ready(True)
        assert [await status(name) for name in ("", STORE)] == [HEALTH.SERVING] * 2
        with pytest.raises(grpc.RpcError) as caught:
            await status("kvmesh.v1.Other")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]

        watch: Any = stub.Watch(health_pb2.HealthCheckRequest(service=STORE))
        assert (await watch.read()).status == HEALTH.SERVING
        server.set_ready(False)
        assert (await watch.read()).status == HEALTH.NOT_SERVING
        server.set_ready(True)
        assert (await watch.read()).status == HEALTH.SERVING
        stopping = asyncio.create_task(server.stop(5))
        assert (await watch.read()).status == HEALTH.NOT_SERVING
        watch.cancel()
        await stopping


async def test_reflection_lists_the_services() -> None:
    server = Server("127.0.0.1", 0)
    store_pb2_grpc.add_StoreMasterServicer_to_server(store_pb2_grpc.StoreMasterServicer(), server.grpc)
    server.serves(STORE)
    await server.start()
    async with connect(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asks = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=STORE),
        ]
        answers: Any = stub.ServerReflectionInfo(iter(asks), timeout=30)
        found = [answer async for answer in answers]
    names = {service.name for service in found[0].list_services_response.service}
    assert names == {STORE, "kvmesh.v1.Traces", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert b"ListMembers" in found[1].file_descriptor_response.file_descriptor_proto[0]
    await server.stop(0)


async def test_messages_of_many_megabytes_pass_both_ways() -> None:
    async def echo(request: StringValue, context: Any) -> StringValue:
        return request

    server = Server("127.0.0.1", 0)
    handler = grpc.unary_unary_rpc_method_handler(echo, StringValue.FromString, StringValue.SerializeToString)  # type: ignore[arg-type]
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Echo": handler}),))
    await server.start()
    async with connect(server.address) as channel:
        unary = channel.unary_unary("/t.T/Echo", StringValue.SerializeToString, StringValue.FromString)
        big = StringValue(value="x" * (32 << 20))
        assert await unary(big, timeout=30) == big
    await server.stop(0)


async def test_the_trace_context_travels_in_metadata() -> None:
    parent = context_from(f"00-{'a1' * 16}-{'b2' * 8}-01")
    seen: list[str] = []

    async def look(request: StringValue, context: Any) -> StringValue:
        seen.append(traceparent(context_from_metadata(context.invocation_metadata())))
        return request

    server = Server("127.0.0.1", 0)
    handler = grpc.unary_unary_rpc_method_handler(look, StringValue.FromString, StringValue.SerializeToString)  # type: ignore[arg-type]
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Look": handler}),))
    await server.start()
    async with connect(server.address) as channel:
        unary = channel.unary_unary("/t.T/Look", StringValue.SerializeToString, StringValue.FromString)
        await unary(StringValue(), metadata=metadata(parent), timeout=30)
        await unary(StringValue(), metadata=(("traceparent", "nonsense"),), timeout=30)
        await unary(StringValue(), timeout=30)
    await server.stop(0)
    assert seen == [f"00-{'a1' * 16}-{'b2' * 8}-01", "", ""]


def test_an_unknown_protocol_version_is_refused_with_both_numbers() -> None:
    check(PROTOCOL_VERSION, "decode-0")
    with pytest.raises(ProtocolMismatch, match="decode-0 speaks protocol version 7, this build speaks 1"):
        check(7, "decode-0")
    with pytest.raises(ProtocolMismatch, match="no protocol version"):
        check(0, "prefill-0")


def test_addresses_of_both_families() -> None:
    assert [join("127.0.0.1", 1), join("::1", 2), join("host", 3)] == ["127.0.0.1:1", "[::1]:2", "host:3"]
