"""Copies and moves at a user's wish, with a real master and real pool nodes: who holds a block, at every moment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from kvmesh.errors import InvalidRequest
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import blocks_pb2_grpc as pb_grpc
from kvmesh.storeclient import ClientConfig, Moved, Pin, StoreClient, SyncStoreClient, content_key, copying
from kvmesh.telemetry import names
from tests.support.nodes import stub
from tests.support.services import until
from tests.support.store_clients import Stores, stores, values
from tests.support.threads import in_thread

GUARD_MS = 300  # a block that was moved just now can be moved on only when its guard is over


@pytest.fixture(scope="module")
def three() -> Iterator[Stores]:
    with in_thread("a", "b", "c") as made:
        yield made


@pytest.fixture(autouse=True)
def short_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "GUARD_MS", GUARD_MS)


@contextlib.asynccontextmanager
async def rpcs(made: Stores, *names: str) -> AsyncIterator[list[pb_grpc.NodeStoreAsyncStub]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(stub(made.nodes[name].address)) for name in names]


async def at(client: StoreClient, *keys: bytes) -> list[list[str]]:
    """Who says that he has each."""
    return [sorted(place.holder.store_id for place in some) for some in await client.locate_many(keys)]


async def put_at(made: Stores, node: str, *datas: bytes, pin: Pin | None = None) -> list[bytes]:
    async with made.client(node_id=f"machine-{node}") as near:
        return [one.key for one in await near.put_many(datas, pin=pin)]


async def hard(rpc: pb_grpc.NodeStoreAsyncStub) -> int:
    return (await rpc.GetStore(pb.GetNodeStoreRequest())).hard_pinned


async def test_a_copy_is_pulled_by_the_node_that_is_named(three: Stores) -> None:
    datas = values(1, 1, 5_000, 70_000, 300_000)
    keys = await put_at(three, "a", *datas)
    async with three.client() as client:
        await until(lambda: all_at(client, keys, ["a"]))
        missing = content_key(b"nobody put this")
        done = await client.copy([*keys, missing, "no such name"], to="b")
        assert done[:4] == [Moved(key, held=True) for key in keys]
        assert [(one.held, one.cause) for one in done[4:]] == [
            (False, "no node has it"),
            (False, "no block has that name"),
        ]
        assert await at(client, *keys) == [["a", "b"]] * 4
        assert await client.copy(keys, to="b") == done[:4], "what is there stays"
        got = await client.get_many(keys, verify=True)
        assert [one.data for one in got] == datas
    async with three.client(node_id="machine-b") as near:
        got = await near.get_many(keys, verify=True)
        assert [(one.store_id, one.data) for one in got] == [("b", data) for data in datas]


async def all_at(client: StoreClient, keys: list[bytes], nodes: list[str]) -> bool:
    return await at(client, *keys) == [nodes] * len(keys)


async def test_a_move_leaves_the_old_node_and_takes_the_hard_pin_along(three: Stores) -> None:
    datas = values(2, 100, 200_000, 60_000, 60_000)
    pinned = await put_at(three, "a", *datas[:2], pin=Pin.HARD)
    free = await put_at(three, "a", *datas[2:])
    keys = [*pinned, *free]
    async with three.client() as client, rpcs(three, "a", "b") as (a, b):
        await until(lambda: all_at(client, keys, ["a"]))
        before = await hard(a), await hard(b)
        done = await client.move(keys, to="b", source="a")
        assert done == [Moved(k, held=True, source="a", pinned=k in pinned) for k in keys]
        assert await at(client, *keys) == [["b"]] * 4
        assert (await hard(a), await hard(b)) == (before[0] - 2, before[1] + 2)
        assert [one.data for one in await client.get_many(keys, verify=True)] == datas
        assert await client.move(keys[:1], to="b") == [Moved(keys[0], held=True)], "done already"
        await client.unpin(*pinned)


async def test_which_copy_goes_is_never_guessed(three: Stores) -> None:
    (key,) = await put_at(three, "a", *values(3, 50_000))
    async with three.client() as client:
        await until(lambda: all_at(client, [key], ["a"]))
        assert (await client.copy([key], to="b"))[0].held
        (unclear,) = await client.move([key], to="c")
        assert not unclear.held and "a, b have it: name the one whose copy is to go" in unclear.cause
        (elsewhere,) = await client.move([key], to="b", source="c")
        assert elsewhere == Moved(key, held=True), "c has none, b has one"
        (done,) = await client.move([key], to="c", source="b")
        assert done == Moved(key, held=True, source="b") and await at(client, key) == [["a", "c"]]
        (none,) = await client.move([key], to="b", source="b2")
        assert none == Moved(key, cause="b2 does not have it") and await at(client, key) == [["a", "c"]]
        with pytest.raises(InvalidRequest, match="source='a': is the node to which"):
            await client.move([key], to="a", source="a")
        with pytest.raises(InvalidRequest, match="to='d': no such node; there are a, b, c"):
            await client.copy([key], to="d")


async def test_what_somebody_reads_stays_until_he_is_done(three: Stores) -> None:
    (key,) = await put_at(three, "a", *values(4, 80_000))
    async with three.client() as client, rpcs(three, "a") as (a,):
        await until(lambda: all_at(client, [key], ["a"]))
        life = (await a.GetStore(pb.GetNodeStoreRequest())).instance.incarnation
        request = pb.LeaseRequest(reader="r", holder_incarnation=life, keys=key, lease_ms=5_000, layout="bytes")
        lease = await a.Lease(request)
        (stays,) = await client.move([key], to="b", timeout_ms=2_000)
        assert stays == Moved(key, held=True, cause="the copy at a stays: it is in use there")
        assert await at(client, key) == [["a", "b"]]
        going = asyncio.ensure_future(client.move([key], to="b"))
        await until(lambda: tried(a, going))
        await a.ReleaseLease(pb.ReleaseBlocksRequest(lease_id=lease.lease_id))
        assert await going == [Moved(key, held=True, source="a")] and await at(client, key) == [["b"]]


async def tried(a: pb_grpc.NodeStoreAsyncStub, going: asyncio.Future[list[Moved]]) -> bool:
    """It has had the time for a try, and has not ended."""
    await asyncio.wait({going}, timeout=0.2)
    return not going.done()


async def test_two_who_move_a_block_past_one_another_do_not_lose_it(three: Stores) -> None:
    datas = values(5, *[20_000] * 40)
    keys = await put_at(three, "a", *datas)
    async with three.client() as one, three.client() as other:
        await until(lambda: all_at(one, keys, ["a"]))
        assert all(done.held for done in await one.copy(keys, to="b"))
        ends = await asyncio.gather(one.move(keys, to="b", source="a"), other.move(keys, to="a", source="b"))
        assert all(done.held for end in ends for done in end), ends
        assert all(len(nodes) == 1 for nodes in await at(one, *keys))
        assert [got.data for got in await one.get_many(keys, verify=True)] == datas


async def test_there_is_a_holder_at_every_moment(three: Stores) -> None:
    """Nodes are asked all the time, the old one first: what it has let go of, the new one has."""
    datas = values(6, *[4_000] * 64)
    keys = await put_at(three, "a", *datas)
    packed = pb.ExistsRequest(keys=b"".join(keys))
    async with three.client() as client, rpcs(three, "a", "b", "c") as (a, b, c):
        await until(lambda: all_at(client, keys, ["a"]))
        looks = 0
        for old, new, name in ((a, b, "b"), (b, c, "c")):
            going = asyncio.ensure_future(client.move(keys, to=name))
            while not going.done():
                before, after = (await old.Exists(packed)).tiers, (await new.Exists(packed)).tiers
                assert all(was or is_ for was, is_ in zip(before, after, strict=True)), "nobody had it"
                looks += 1
            assert all(done.source for done in await going)
        assert looks > 1 and await at(client, *keys) == [["c"]] * len(keys)


async def test_a_master_that_trims_leaves_what_is_being_moved(three: Stores) -> None:
    """A move leases the new copy: as long as both are leased, neither goes."""
    data = values(7, 10_000)[0]
    (key,) = await put_at(three, "a", data)
    async with three.client() as client, rpcs(three, "a", "b") as nodes:
        await until(lambda: all_at(client, [key], ["a"]))
        assert (await client.copy([key], to="b"))[0].held
        await until(lambda: known_at(client, key, 2))
        leases = []
        for node in nodes:
            life = (await node.GetStore(pb.GetNodeStoreRequest())).instance.incarnation
            request = pb.LeaseRequest(reader="m", holder_incarnation=life, keys=key, lease_ms=5_000, layout="bytes")
            leases.append((await node.Lease(request)).lease_id)
        asked = names.STORE_ORDERS.labels(order="remove", outcome="answered")
        before = asked._value.get()
        await client.change_replica([key], 1)
        await until(lambda: tries(asked, before + 2))
        assert await at(client, key) == [["a", "b"]]
        for node, lease in zip(nodes, leases, strict=True):
            await node.ReleaseLease(pb.ReleaseBlocksRequest(lease_id=lease))
        await until(lambda: known_at(client, key, 1))
        assert await client.get(key, verify=True) == data
        await client.change_replica([key], 0)


async def tries(asked: Any, count: float) -> bool:
    return float(asked._value.get()) >= count


async def known_at(client: StoreClient, key: bytes, count: int) -> bool:
    """Whether the master knows of so many copies."""
    return len((await client.replicas([key]))[0]) == count


async def test_what_does_not_fit_stays_where_it_is() -> None:
    async with stores("a", "b", memory_mb=8) as made, made.client() as client:
        full = await put_at(made, "b", *values(8, *[1 << 20] * 3), pin=Pin.HARD)
        datas = values(9, *[1 << 20] * 3)
        keys = await put_at(made, "a", *datas, pin=Pin.HARD)
        await until(lambda: all_at(client, keys, ["a"]))
        done = await client.move(keys, to="b")
        moved = [one for one in done if one.source]
        assert len(moved) <= 1, "half of a node's memory can be pinned"
        for one in done:
            assert bool(one.source) != bool(one.cause), one
        assert [got.data for got in await client.get_many(keys, verify=True)] == datas
        assert await at(client, *full) == [["b"]] * 3


def test_the_blocking_face(three: Stores) -> None:
    with SyncStoreClient(ClientConfig(store=three.address, staging_mb=4, node_id="machine-a")) as client:
        key = client.put(values(10, 9_000)[0], name="moved")
        assert client.copy([key], to="b") == [Moved(key, held=True)]
        assert client.move(["moved"], to="b", source="a", timeout_ms=5_000) == [Moved(key, held=True, source="a")]
        assert client.get("moved") == values(10, 9_000)[0]
