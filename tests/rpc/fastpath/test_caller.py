"""Which way calls go: the door when it is open, gRPC whenever it is not there, silent or closed; never a lost call."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from kvmesh.errors import DeadlinePassed, Overloaded, Unavailable
from kvmesh.rpc import channels
from kvmesh.rpc.fastpath import caller as callers
from kvmesh.rpc.fastpath import frames
from kvmesh.rpc.fastpath.caller import FastCaller, FoundPaths
from kvmesh.rpc.fastpath.client import Way
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import blocks_pb2_grpc as pb_grpc
from kvmesh.rpc.server import Server
from tests.rpc.fastpath.test_server import LONG_S, sure
from tests.support.fastpath_service import LIFE, SERVICE, Desk, serving


@dataclass
class Here:
    """A service over gRPC; `ways`: where its doors are said to be, from the next look on."""

    caller: FastCaller
    desk: Desk
    ways: list[Way] = field(default_factory=list)
    looks: int = 0

    async def lease(self, timeout_s: float = LONG_S) -> bytes:
        answer = await self.caller.call("Lease", pb.LeaseRequest(keys=b"k"), timeout_s)
        return bytes(answer.held)


@contextlib.asynccontextmanager
async def here(*ways: Way) -> AsyncIterator[Here]:
    grpc_desk = Desk()
    server = Server("127.0.0.1", 0)
    pb_grpc.add_NodeStoreServicer_to_server(grpc_desk, server.grpc)
    await server.start()

    async def find(caller: FastCaller) -> FoundPaths:
        made.looks += 1
        return FoundPaths(LIFE, tuple(made.ways))

    async with channels.connect(server.address) as channel:
        made = Here(FastCaller(channel, SERVICE, find), grpc_desk, list(ways))
        try:
            yield made
        finally:
            await made.caller.close()
            await server.stop(0)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "PAUSE_S", 0.01)


async def through_the_door(one: Here) -> None:
    async def asked() -> bool:
        await one.lease()
        return one.caller.by_door

    deadline = time.monotonic() + 10
    while not await asked():
        assert time.monotonic() < deadline, "no door opens"


async def test_the_first_calls_go_over_grpc_and_later_ones_through_the_door() -> None:
    async with serving() as (_, desk, way), here(way) as one:
        assert not one.caller.by_door and await one.lease() == b"k"
        await through_the_door(one)
        with pytest.raises(Overloaded) as caught:
            await one.caller.call("Put", pb.PutBlocksRequest(), LONG_S)
        assert caught.value.field == "nbytes"
        pin = asyncio.ensure_future(one.caller.call("Pin", pb.PinBlocksRequest(), LONG_S))
        await sure(lambda: desk.begun == 1)
        assert one.desk.begun == 0 and one.looks == 1
        await one.caller.close()
        with pytest.raises(Unavailable):
            await pin


async def test_a_door_that_closes_loses_what_was_sent_and_nothing_else() -> None:
    async with here() as one:
        async with serving() as (_, desk, way):
            one.ways = [way]
            await through_the_door(one)
            pin = asyncio.ensure_future(one.caller.call("Pin", pb.PinBlocksRequest(), LONG_S))
            await sure(lambda: desk.begun == 1)
        with pytest.raises(Unavailable):
            await pin
        assert await one.lease() == b"k" and not one.caller.by_door
        async with serving() as (_, _, way):
            one.ways = [way]
            await through_the_door(one)


async def test_nothing_is_lost_where_no_door_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(kind="tcp") as (made, _, way), here("@kvmesh-door-of-nobody", ("127.0.0.1", 1)) as one:
        for _ in range(30):
            assert await one.lease() == b"k"
        assert not one.caller.by_door
        one.ways.append(way)
        await through_the_door(one)
        assert len(made) == 1
        monkeypatch.setattr(callers, "MAX_REQUEST", 300)
        body = pb.ExistsRequest(keys=bytes(1_000))
        one.desk.go.set()  # at the side of gRPC alone
        assert (await one.caller.call("Exists", body, LONG_S)).tiers == bytes(1_000), "too large for a door"


async def test_a_silent_door_costs_one_call() -> None:
    """It greets, and never says anything more: a port that is filtered, a process that is frozen."""
    gone = asyncio.Event()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frames.hello(LIFE))
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        gone.set()

    listening = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with listening, here(listening.sockets[0].getsockname()[:2]) as one:
        assert await one.lease() == b"k"
        await sure(lambda: one.caller.by_door)
        slow = asyncio.ensure_future(one.caller.call("Pin", pb.PinBlocksRequest(), 0.5))
        with pytest.raises(DeadlinePassed):
            await one.lease(0.05)
        one.ways = []
        assert not one.caller.by_door
        for _ in range(5):
            assert await one.lease() == b"k"
        with pytest.raises(DeadlinePassed):
            await slow  # had its time
        await asyncio.wait_for(gone.wait(), 30)  # nobody keeps it


async def test_a_search_in_vain_is_repeated_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "PAUSE_S", 3_600.0)
    async with here() as one:
        for _ in range(20):
            await one.lease()
        await sure(lambda: one.looks == 1)
        for _ in range(20):
            await one.lease()
        assert one.looks == 1


async def test_a_node_without_doors_is_asked_over_grpc() -> None:
    async with here() as one:

        async def find(caller: FastCaller) -> FoundPaths:
            one.looks += 1
            raise Unavailable("it knows no such call")

        one.caller._find = find
        for _ in range(5):
            assert await one.lease() == b"k"
        await sure(lambda: one.looks >= 1)
