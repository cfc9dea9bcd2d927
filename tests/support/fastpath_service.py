"""A servicer for doors: what it does depends on the method, and it tells what became of its calls."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from kvmesh.errors import NotLeader, Overloaded
from kvmesh.rpc.fastpath import frames
from kvmesh.rpc.fastpath.client import FastChannel, Way, dial
from kvmesh.rpc.fastpath.server import FastServer
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import blocks_pb2_grpc as pb_grpc
from kvmesh.rpc.pb import doors_pb2, doors_pb2_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["NodeStore"]
LIFE = 0xFEED << 40


async def streams(way: Way, **more: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to a Unix fast path; what is said there is the test's own."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect("\0" + str(way)[1:])
    return await asyncio.open_unix_connection(sock=sock, **more)


class Desk(pb_grpc.NodeStoreServicer):
    """Lease answers at once, with the time that is left; Exists when `go` is set, with its keys; Pin never. Put, Touch
    and Remove raise; GetStore waits a turn and raises."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.begun = self.cancelled = 0
        self.pinned = asyncio.Event()

    async def Lease(self, request: pb.LeaseRequest, context: Any) -> pb.LeaseResponse:  # noqa: N802
        return pb.LeaseResponse(held=request.keys, lease_ms=int(context.time_remaining() * 1000))

    async def Exists(self, request: pb.ExistsRequest, context: Any) -> pb.ExistsResponse:  # noqa: N802
        await self.go.wait()
        return pb.ExistsResponse(tiers=request.keys)

    async def Pin(self, request: pb.PinBlocksRequest, context: Any) -> pb.PinBlocksResponse:  # noqa: N802
        self.begun += 1
        self.pinned.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        raise AssertionError("nobody answers it")

    async def Put(self, request: pb.PutBlocksRequest, context: Any) -> pb.PutBlocksResponse:  # noqa: N802
        raise Overloaded("no room: it is full", field="nbytes", retry_after_ms=123)

    async def Touch(self, request: pb.TouchBlocksRequest, context: Any) -> pb.TouchBlocksResponse:  # noqa: N802
        raise ValueError("a defect")

    async def Remove(self, request: pb.RemoveBlocksRequest, context: Any) -> pb.RemoveBlocksResponse:  # noqa: N802
        raise asyncio.CancelledError

    async def GetStore(self, request: pb.GetNodeStoreRequest, context: Any) -> pb.GetNodeStoreResponse:  # noqa: N802
        await asyncio.sleep(0)
        raise NotLeader("term=3: another leads", leader="there:1", field="term")

    async def ReleaseLease(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ReleaseBlocksResponse()

    RenewLease = Pull = Doors = ReleaseLease  # of no interest here

    async def ListBlocks(self, request: Any, context: Any) -> AsyncIterator[pb.ListBlocksResponse]:  # noqa: N802
        yield pb.ListBlocksResponse()


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


@contextlib.asynccontextmanager
async def serving(
    desk: Desk | None = None, kind: str = "unix", **more: Any
) -> AsyncIterator[tuple[FastServer, Desk, Way]]:
    desk = desk or Desk()
    server = FastServer(SERVICE, desk, LIFE, **more)
    way: Way = await server.listen_unix() if kind == "unix" else ("127.0.0.1", 0)
    if not isinstance(way, str):
        way = ("127.0.0.1", await server.listen_tcp("127.0.0.1", 0, "door_port"))
    try:
        yield server, desk, way
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def opened(way: Way, life: int = LIFE) -> AsyncIterator[FastChannel]:
    door = await dial((way,), life, 5.0)
    try:
        yield door
    finally:
        door.close()
