"""The line to a control service: by its door while that answers, over gRPC otherwise; dropped and dialled again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from kvmesh.errors import DeadlinePassed, KvmeshError, Overloaded
from kvmesh.membership.control_client import GRPC_ONLY_S, ControlClient
from kvmesh.rpc.fastpath import frames
from kvmesh.rpc.fastpath.control import ControlFastPath
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import blocks_pb2_grpc as pb_grpc
from kvmesh.rpc.pb import doors_pb2, doors_pb2_grpc
from kvmesh.rpc.server import Server
from tests.support.fastpath_service import SERVICE, Desk
from tests.support.services import until

LONG_S = 20.0


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class There:
    """One life of a service behind a door."""

    server: Server
    desk: Desk = field(default_factory=Desk)

    def __post_init__(self) -> None:
        pb_grpc.add_NodeStoreServicer_to_server(self.desk, self.server.grpc)
        self.door = ControlFastPath(SERVICE, self.desk, ("Lease", "Put"), 0)


@contextlib.asynccontextmanager
async def there(port: int = 0) -> AsyncIterator[There]:
    made = There(Server("127.0.0.1", port))
    made.door.add_to(made.server)
    await made.server.start()
    await made.door.open("127.0.0.1")
    try:
        yield made
    finally:
        await made.door.close()
        await made.server.stop(0)


async def leased(line: ControlClient, timeout_s: float = LONG_S) -> bytes:
    answer = await line.say("Lease", pb.LeaseRequest(keys=b"k"), timeout_s)
    return bytes(answer.held)


async def by_door(line: ControlClient, door: ControlFastPath) -> None:
    async def connected() -> bool:
        assert await leased(line) == b"k"
        return len(door) == 1

    await until(connected)


async def test_it_follows_a_service_through_its_lives() -> None:
    line = ControlClient(SERVICE)
    async with there() as one:
        address = one.server.address
        line.dial(address)
        await by_door(line, one.door)
        with pytest.raises(Overloaded) as refused:
            await line.say("Put", pb.PutBlocksRequest(), LONG_S)
        assert refused.value.retry_after_ms == 123
    with pytest.raises(KvmeshError):
        await leased(line, 5.0)
    await line.drop()
    assert line.address == ""
    async with there(one.server.port) as other:
        line.dial(address)
        await by_door(line, other.door)
    await line.drop()
    await line.drop()


class Swallows(doors_pb2_grpc.DoorsServicer):
    """Tells of a door that greets, and then hears without ever answering."""

    life = 5

    def __init__(self) -> None:
        self.port = 0
        self.greeted = 0

    async def FindDoor(  # noqa: N802
        self, request: doors_pb2.FindDoorRequest, context: object
    ) -> doors_pb2.FindDoorResponse:
        return doors_pb2.FindDoorResponse(life=self.life, port=self.port)

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.greeted += 1
        writer.write(frames.hello(self.life))
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()


async def test_a_door_that_swallows_calls_is_left_alone_for_a_while() -> None:
    """Each dial would find it again: an instance would lose half of its heartbeats, and be taken for dead."""
    desk, swallows, clock = Desk(), Swallows(), Clock()
    server = Server("127.0.0.1", 0)
    pb_grpc.add_NodeStoreServicer_to_server(desk, server.grpc)
    doors_pb2_grpc.add_DoorsServicer_to_server(swallows, server.grpc)
    listening = await asyncio.start_server(swallows.greet, "127.0.0.1", 0)
    swallows.port = listening.sockets[0].getsockname()[1]
    await server.start()
    line = ControlClient(SERVICE, clock)
    try:

        async def swallowed() -> bool:
            try:
                await leased(line, 0.3)
            except DeadlinePassed:
                return True
            return False

        line.dial(server.address)
        await until(swallowed)
        assert swallows.greeted == 1
        await line.drop()
        line.dial(server.address)
        for _ in range(20):
            assert await leased(line) == b"k"
        assert swallows.greeted == 1, "over gRPC alone"
        clock.now += GRPC_ONLY_S
        await until(swallowed)
        assert swallows.greeted == 2, "it is tried again"
    finally:
        await line.drop()
        listening.close()
        await server.stop(0)
