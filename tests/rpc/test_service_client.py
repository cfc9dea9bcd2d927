"""The client of a service at one address: by its fast path while that answers, over gRPC otherwise; closed and
connected again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from kvmesh.errors import DeadlinePassed, KvmeshError, Overloaded
from kvmesh.rpc.fastpath.control import ControlFastPath
from kvmesh.rpc.leader_client import GRPC_ONLY_S, ServiceClient
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import blocks_pb2_grpc as pb_grpc
from kvmesh.rpc.pb import doors_pb2_grpc
from kvmesh.rpc.server import Server
from tests.support.fastpath_service import SERVICE, Desk, Swallows
from tests.support.services import until

FAST = ("Lease", "Put")
LONG_S = 60.0


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
        self.door = ControlFastPath(SERVICE, self.desk, FAST, 0)


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


async def leased(client: ServiceClient, timeout_s: float = LONG_S) -> bytes:
    answer = await client.call("Lease", pb.LeaseRequest(keys=b"k"), timeout_s)
    return bytes(answer.held)


async def by_door(client: ServiceClient, door: ControlFastPath) -> None:
    async def connected() -> bool:
        assert await leased(client) == b"k"
        return len(door) == 1

    await until(connected)


async def test_it_follows_a_service_through_its_lives() -> None:
    client = ServiceClient(SERVICE, FAST)
    async with there() as one:
        address = one.server.address
        client.connect(address)
        await by_door(client, one.door)
        with pytest.raises(Overloaded) as refused:
            await client.call("Put", pb.PutBlocksRequest(), LONG_S)
        assert refused.value.retry_after_ms == 123
    with pytest.raises(KvmeshError):
        await leased(client, 5.0)
    await client.close()
    assert client.address == ""
    async with there(one.server.port) as other:
        client.connect(address)
        await by_door(client, other.door)
    await client.close()
    await client.close()


async def test_a_door_that_swallows_calls_is_left_alone_for_a_while() -> None:
    """Each dial would find it again: an instance would lose half of its heartbeats, and be taken for dead."""
    desk, swallows, clock = Desk(), Swallows(), Clock()
    server = Server("127.0.0.1", 0)
    pb_grpc.add_NodeStoreServicer_to_server(desk, server.grpc)
    doors_pb2_grpc.add_DoorsServicer_to_server(swallows, server.grpc)
    listening = await asyncio.start_server(swallows.greet, "127.0.0.1", 0)
    swallows.port = listening.sockets[0].getsockname()[1]
    await server.start()
    client = ServiceClient(SERVICE, FAST, clock)
    try:

        async def swallowed() -> bool:
            try:
                await leased(client, 0.3)
            except DeadlinePassed:
                return True
            return False

        client.connect(server.address)
        await until(swallowed)
        assert swallows.greeted == 1
        await client.close()
        client.connect(server.address)
        for _ in range(20):
            assert await leased(client) == b"k"
        assert swallows.greeted == 1, "over gRPC alone"
        clock.now += GRPC_ONLY_S
        await until(swallowed)
        assert swallows.greeted == 2, "it is tried again"
    finally:
        await client.close()
        listening.close()
        await server.stop(0)
