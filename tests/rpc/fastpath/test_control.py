"""A control service's door: found over gRPC, for its frequent methods alone; gRPC where there is none."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest

from kvmesh.errors import ConfigError, InvalidRequest, ProtocolMismatch
from kvmesh.rpc import channels, security
from kvmesh.rpc.fastpath.caller import FastCaller, control_calls
from kvmesh.rpc.fastpath.client import dial
from kvmesh.rpc.fastpath.control import ControlFastPath
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import blocks_pb2_grpc as pb_grpc
from kvmesh.rpc.pb import conductor_pb2
from kvmesh.rpc.pb import doors_pb2 as pb_doors
from kvmesh.rpc.pb import doors_pb2_grpc as pb_doors_grpc
from kvmesh.rpc.server import Server
from kvmesh.rpc.status import from_rpc_error
from tests.support.fastpath_service import SERVICE, Desk
from tests.support.services import until

LONG_S = 60.0


@dataclass
class Standing:
    """A service with a door, and one who calls it."""

    caller: FastCaller
    channel: grpc.aio.Channel

    async def lease(self) -> bytes:
        answer = await self.caller.call("Lease", pb.LeaseRequest(keys=b"k"), LONG_S)
        return bytes(answer.held)

    async def find(self, service: str = SERVICE.full_name) -> pb_doors.FindDoorResponse:
        request = pb_doors.FindDoorRequest(service=service)
        try:
            return await pb_doors_grpc.DoorsStub(self.channel).FindDoor(request, timeout=LONG_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


@contextlib.asynccontextmanager
async def standing(port: int = 0) -> AsyncIterator[Standing]:
    desk = Desk()
    server = Server("127.0.0.1", 0)
    pb_grpc.add_NodeStoreServicer_to_server(desk, server.grpc)
    door = ControlFastPath(SERVICE, desk, ("Lease", "Put"), port)
    door.add_to(server)
    await server.start()
    try:
        await door.open("127.0.0.1")
        async with channels.connect(server.address) as channel:
            caller = control_calls(server.address, channel, SERVICE)
            try:
                yield Standing(caller, channel)
            finally:
                await caller.close()
    finally:
        await door.close()
        await server.stop(0)


async def test_calls_go_through_the_door_once_it_is_found() -> None:
    async with standing() as one:

        async def through() -> bool:
            assert await one.lease() == b"k"
            return one.caller.by_door

        await until(through)
        assert await one.lease() == b"k"


async def test_the_door_is_for_the_methods_that_it_names_alone() -> None:
    async with standing() as one:
        told = await one.find()
        assert list(told.methods) == ["Lease", "Put"]
        door = await dial((("127.0.0.1", told.port),), told.life, LONG_S)
        try:
            with pytest.raises(ProtocolMismatch, match="not behind this door"):
                await door.call(b"Touch", b"", LONG_S)
        finally:
            door.close()


async def test_who_asks_for_another_service_hears_which_stands_here() -> None:
    async with standing() as one:
        other = conductor_pb2.DESCRIPTOR.services_by_name["Conductor"].full_name
        with pytest.raises(InvalidRequest, match=SERVICE.full_name) as caught:
            await one.find(other)
        assert caught.value.field == "service"


async def test_no_door_where_none_is_wanted_or_where_it_would_bypass_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    async with standing(port=-1) as one:
        assert (await one.find()).port == 0
        for _ in range(3):
            assert await one.lease() == b"k"
        assert not one.caller.by_door

    class Tls:
        def server_credentials(self) -> object:
            return object()

    door = ControlFastPath(SERVICE, Desk(), ("Lease",), 0)
    with monkeypatch.context() as patched:
        patched.setattr(security, "current", Tls)
        await door.open("127.0.0.1")
    assert (await door.FindDoor(pb_doors.FindDoorRequest(service=SERVICE.full_name), None)).port == 0
    assert security.current().server_credentials() is None


async def test_a_port_that_is_taken_is_named() -> None:
    async with standing() as one:
        port = (await one.find()).port
        door = ControlFastPath(SERVICE, Desk(), ("Lease",), port)
        with pytest.raises(ConfigError, match=f"door_port={port}"):
            await door.open("127.0.0.1")
