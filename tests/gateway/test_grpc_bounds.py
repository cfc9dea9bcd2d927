"""What strangers can take from the gateway's gRPC: bytes before their key, places, watchers, memory."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvmesh.errors import InvalidRequest, Overloaded, Unauthorized
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import gateway_pb2, gateway_pb2_grpc
from kvmesh.rpc.status import from_rpc_error
from tests.gateway.conftest import Mesh, MeshMaker, seen, until

KEY = "sk-kvmesh-" + "x" * 43
LARGE = 60_000_000
WINDOW = 64 << 10


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[key]]\nname = "alice"\nsha256 = {json.dumps(hashlib.sha256(KEY.encode()).hexdigest())}\n')
    return str(path)


class Counting:
    """A relay before the gateway that counts what clients send."""

    def __init__(self) -> None:
        self.sent = 0
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            while data := await reader.read(1 << 16):
                self.sent += len(data) if counts else 0
                writer.write(data)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def counting(address: str) -> AsyncIterator[Counting]:
    relay = Counting()
    host, _, port = address.rpartition(":")

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            there, back = await asyncio.open_connection(host, int(port))
            await asyncio.gather(
                relay.pump(reader, back, counts=True), relay.pump(there, writer, counts=False), return_exceptions=True
            )

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()


async def ask(stub: Any, text: str, key: str = "", timeout_s: float = 30) -> str:
    """The code with which one call ends; "OK" when all is well."""
    metadata = [("authorization", f"Bearer {key}")] if key else []
    try:
        async for _ in stub.Generate(gateway_pb2.GenerateRequest(text=text), metadata=metadata, timeout=timeout_s):
            pass
    except grpc.aio.AioRpcError as err:
        code: grpc.StatusCode = err.code()
        return code.name
    return "OK"


@pytest.mark.parametrize("key", ["", pytest.param(KEY, marks=pytest.mark.slow)])
async def test_large_messages_are_not_taken(make_mesh: MeshMaker, keys: str, key: str) -> None:
    """16 calls of 60 MB: a window of each is taken, whether they have a key or not."""
    mesh = await make_mesh(api_keys=keys)
    text = "a" * LARGE
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with counting(str(mesh.told["address"])) as relay, contextlib.AsyncExitStack() as stack:
        stubs = []
        for _ in range(4):
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{relay.port}", options=options)
            stack.push_async_callback(channel.close)
            stubs.append(gateway_pb2_grpc.GatewayStub(channel))
        for _ in range(4):  # four at once, for the sake of the client's own memory
            codes = await asyncio.gather(*(ask(stub, text, key) for stub in stubs))
            assert set(codes) == {"RESOURCE_EXHAUSTED" if key else "UNAUTHENTICATED"}
        assert relay.sent <= 16 * (WINDOW + 8192)
    assert await ask(mesh.stub, "Hi", KEY) == "OK"


async def test_a_compressed_message_does_not_swell(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh()
    request = gateway_pb2.GenerateRequest(text="a" * LARGE)
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(str(mesh.told["address"]), options=options) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(request, compression=grpc.Compression.Gzip, timeout=30):
                pass
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("count", [16, pytest.param(200, marks=pytest.mark.slow)])
async def test_ordinary_calls_at_once_all_get_answers(make_mesh: MeshMaker, count: int) -> None:
    """What a message may take until its size is known refuses nobody whose message is small."""
    mesh = await make_mesh()
    codes = await asyncio.gather(*(ask(mesh.stub, "Hi") for _ in range(count)))
    assert Counter(codes) == {"OK": count}


async def test_streams_without_a_message_hold_no_place(make_mesh: MeshMaker) -> None:
    """Many callers that open a call and send nothing; then one that asks."""
    mesh = await make_mesh(grpc_receiving=2, grpc_receive_timeout_s=60.0)
    async with connect(str(mesh.told["address"])) as channel:
        silent = channel.stream_stream("/kvmesh.v1.Gateway/Generate")
        calls = [silent() for _ in range(6)]
        for call in calls:
            await call.wait_for_connection()
        assert await ask(mesh.stub, "Hi") == "OK"
        for call in calls:
            call.cancel()


async def test_too_many_that_wait_are_refused_with_a_time(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(grpc_receiving=1, grpc_waiting=0)
    async with connect(str(mesh.told["address"])) as channel:
        stream = channel.stream_stream("/kvmesh.v1.Gateway/Generate")
        silent = stream()
        await silent.wait_for_connection()

        async def refused() -> Any:
            nonlocal silent
            if silent.done():  # it came while the other was received, and was refused itself
                silent = stream()
                await silent.wait_for_connection()
            try:
                async for _ in mesh.stub.Generate(gateway_pb2.GenerateRequest(text="Hi"), timeout=10):
                    pass
            except grpc.aio.AioRpcError as err:
                return from_rpc_error(err)

        err = await until(refused, bool)
        assert isinstance(err, Overloaded) and err.retry_after_ms > 0
        silent.cancel()
    assert await until(lambda: ask(mesh.stub, "Hi"), lambda code: code == "OK")


async def test_a_message_of_many_fields_is_not_parsed(mesh: Mesh) -> None:
    swelling = b"\xd2\x02\x00" * 100_000  # an unknown field of no bytes, again and again
    async with connect(str(mesh.told["address"])) as channel:
        call = channel.unary_stream("/kvmesh.v1.Gateway/Generate")(swelling, timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    err = from_rpc_error(caught.value)
    assert isinstance(err, InvalidRequest) and "fields" in err.message


async def test_watchers_are_few_and_of_what_is_served(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(grpc_max_watchers=8)
    async with connect(str(mesh.told["address"])) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def watch(name: str) -> tuple[str, int]:
            call = stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=20)
            last = -1
            try:
                async for told in call:
                    last = told.status
                    if name == "":
                        kept.append(call)
                        return "KEPT", last
            except grpc.aio.AioRpcError as err:
                slow = err.details() == "message: not received in time"
                return "SLOW" if slow else err.code().name, last
            return "OK", last

        kept: list[Any] = []
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        names = [f"{index:05d}" + "n" * 60_000 for index in range(40)]
        codes = {code for code, _ in await asyncio.gather(*(watch(name) for name in names))}
        assert codes <= {"NOT_FOUND", "RESOURCE_EXHAUSTED", "SLOW"}  # slow: gave way to those that waited
        assert await watch(names[0]) == ("NOT_FOUND", unknown)
        told = await asyncio.gather(*(watch("") for _ in range(20)))
        assert Counter(code for code, _ in told) == {"KEPT": 8, "RESOURCE_EXHAUSTED": 12}
        for call in kept:
            call.cancel()


async def test_reflection_is_not_for_strangers(make_mesh: MeshMaker, keys: str) -> None:
    for given, code in ((keys, grpc.StatusCode.UNIMPLEMENTED), ("", None)):
        mesh = await make_mesh(api_keys=given)
        async with connect(str(mesh.told["address"])) as channel:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(timeout=10)
            if code is None:
                await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
                told = await call.read()
                assert "kvmesh.v1.Gateway" in {one.name for one in told.list_services_response.service}
                await call.done_writing()
            else:  # refused before a message; one that is written meanwhile may fail first
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() == code


async def test_keyless_calls_end_without_a_message(make_mesh: MeshMaker, keys: str) -> None:
    """A call that never sends one is told at once that it has no key; status needs neither."""
    mesh = await make_mesh(api_keys=keys)
    async with connect(str(mesh.told["address"])) as channel:
        silent = channel.stream_stream("/kvmesh.v1.Gateway/Generate")(timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await silent.read()
        assert isinstance(from_rpc_error(caught.value), Unauthorized)
        status = channel.stream_stream("/kvmesh.v1.Gateway/GetGatewayStatus")(timeout=10)
        assert await status.read()
        status.cancel()


async def test_memory_is_given_back(make_mesh: MeshMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvmesh.services.gateway import request_memory

    made: list[request_memory.RequestMemory] = []
    whole = request_memory.RequestMemory.__init__

    def kept(self: request_memory.RequestMemory, limit_bytes: int) -> None:
        whole(self, limit_bytes)
        made.append(self)

    monkeypatch.setattr(request_memory.RequestMemory, "__init__", kept)
    mesh = await make_mesh()
    (memory,) = made
    call = mesh.stub.Generate(gateway_pb2.GenerateRequest(text="Hi"), timeout=10)
    await call.read()
    await asyncio.gather(*(ask(mesh.stub, "x" * 100_000) for _ in range(5)))
    call.cancel()
    await seen(lambda: memory.held == 0 and memory.working == 0)
