"""What a master's answers do to a node: tombstones before it announces, drains, allowances."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from kvmesh.errors import Overloaded
from kvmesh.rpc import status
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import store_pb2 as pb_store
from kvmesh.rpc.pb import store_pb2_grpc as pb_store_grpc
from kvmesh.rpc.server import Server
from tests.support.nodes import Bench, Node, bench, keys_of, node, stub, until


class Master(pb_store_grpc.StoreMasterServicer):
    """Answers as it is told, and writes down what it hears."""

    def __init__(self, term: int = 1) -> None:
        self._term = term
        self.tombstones: list[pb_store.Tombstone] = []
        self.beat = pb_store.BeatResponse(term=term)
        self.joins: list[pb_store.JoinRequest] = []
        self.beats: list[pb_store.BeatRequest] = []
        self.announced: list[pb_store.AnnounceRequest] = []
        self.mute = asyncio.Event()  # cleared: beats are heard, and answered when it is set
        self.mute.set()

    async def Join(self, request: pb_store.JoinRequest, context: object) -> pb_store.JoinResponse:  # noqa: N802
        self.joins.append(request)
        return pb_store.JoinResponse(
            heartbeat_interval_ms=20, lease_ms=1_000, term=self._term, tombstones=self._due(request.removed_seq)
        )

    async def Beat(self, request: pb_store.BeatRequest, context: object) -> pb_store.BeatResponse:  # noqa: N802
        self.beats.append(request)
        await self.mute.wait()
        answer = pb_store.BeatResponse(tombstones=self._due(request.removed_seq))
        answer.MergeFrom(self.beat)
        return answer

    async def Announce(self, request: pb_store.AnnounceRequest, context: object) -> pb_store.AnnounceResponse:  # noqa: N802
        self.announced.append(request)
        return pb_store.AnnounceResponse(term=self._term)

    async def Leave(self, request: pb_store.LeaveRequest, context: object) -> pb_store.LeaveResponse:  # noqa: N802
        return pb_store.LeaveResponse()

    def _due(self, seq: int) -> list[pb_store.Tombstone]:
        return [tombstone for tombstone in self.tombstones if tombstone.seq > seq]


@pytest.fixture
async def desk() -> AsyncIterator[Bench]:
    async with bench() as made:
        yield made


@contextlib.asynccontextmanager
async def master_at(term: int) -> AsyncIterator[tuple[Master, str]]:
    """A master of this term, its address."""
    server, master = Server("127.0.0.1", 0), Master(term)  # type: ignore[abstract]
    pb_store_grpc.add_StoreMasterServicer_to_server(master, server.grpc)
    try:
        yield master, f"127.0.0.1:{await server.start()}"
    finally:
        await server.stop(0)


@pytest.fixture
async def member(desk: Bench) -> AsyncIterator[tuple[Node, Master, str]]:
    """A node that has not joined yet, the master, its address."""
    async with master_at(1) as (master, address), node("a", total=32) as made:
        yield made, master, address


async def test_tombstones_are_applied_before_anything_is_announced(
    desk: Bench, member: tuple[Node, Master, str]
) -> None:
    a, master, address = member
    keys = keys_of(*range(6))
    await a.fill(desk, keys)
    master.tombstones = [pb_store.Tombstone(seq=4, keys=keys[0]), pb_store.Tombstone(seq=6, prefix=keys[1][:5])]
    a.join(address)
    await until(lambda: any(r.announcement.sealed for r in master.announced))
    said = b"".join(request.announcement.sealed for request in master.announced)
    assert keys[0] not in said and keys[1] not in said and keys[2] in said
    assert master.joins[0].removed_seq == 0
    await until(lambda: master.beats and master.beats[-1].removed_seq == 6)
    master.tombstones.append(pb_store.Tombstone(seq=8, keys=keys[3]))
    await until(lambda: not a.store.holds(keys[3]))
    await until(lambda: master.beats[-1].removed_seq == 8)
    assert a.store.keys() == [keys[2], *keys[4:]]


async def test_a_node_that_drains_takes_nothing_more_and_has_no_free_memory(
    desk: Bench, member: tuple[Node, Master, str]
) -> None:
    a, master, address = member
    await a.fill(desk, keys_of(1))
    a.join(address)
    await until(lambda: master.beats and master.beats[-1].usage.free_bytes)
    master.beat.draining = True
    await until(lambda: master.beats[-1].usage.free_bytes == 0)
    async with node("b") as b, stub(a.address) as rpc:
        await b.fill(desk, keys_of(2))
        pull = pb.PullBlocksRequest(keys=keys_of(2)[0], holders=[b.ref], timeout_ms=2_000)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rpc.Pull(pull)
        error = status.from_rpc_error(caught.value)
        assert isinstance(error, Overloaded) and "drains" in error.message
        lease = await rpc.Lease(pb.LeaseRequest(holder_incarnation=7, keys=keys_of(1)[0], lease_ms=50, layout=a.layout))
        assert lease.held == b"\1", "what it has can be read"
        master.beat.draining = False
        await until(lambda: master.beats[-1].usage.free_bytes)
        assert (await rpc.Pull(pull)).held == b"\1"


def of(a: Node, tag: bytes) -> list[bytes]:
    return [key for key in a.store.keys() if key.startswith(tag)]  # noqa: SIM118


async def test_an_allowance_costs_its_tenant_alone(desk: Bench, member: tuple[Node, Master, str]) -> None:
    a, master, address = member
    ours = [b"aaaa" + key[4:] for key in keys_of(*range(8))]
    theirs = [b"bbbb" + key[4:] for key in keys_of(*range(8))]
    await a.fill(desk, [*ours, *theirs])
    a.join(address)
    master.beat.quotas.add(tag=b"aaaa", blocks=3)
    await until(lambda: len(of(a, b"aaaa")) == 3)
    master.beat.ClearField("quotas")  # told once
    assert set(theirs) <= set(a.store.keys())
    new = [b"aaaa" + key[4:] for key in keys_of(*range(20, 22))]
    await a.fill(desk, new)
    assert of(a, b"aaaa")[-2:] == new
    assert len(of(a, b"aaaa")) == 3
    master.beat.quotas.add(tag=b"aaaa", blocks=0)  # none any more
    await until(lambda: not a.partition.store.quotas.limits)
    await a.fill(desk, [b"aaaa" + key[4:] for key in keys_of(*range(30, 36))])
    assert len(of(a, b"aaaa")) == 9
