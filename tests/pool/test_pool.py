"""A pool node as it is served: several models, copies at others' wish, and the real store master that hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from kvmesh.errors import ConfigError, InvalidRequest
from kvmesh.kvcache.keys import split
from kvmesh.kvcache.sources import PullRange
from kvmesh.pool import pool
from kvmesh.pool.config import PoolConfig
from kvmesh.rpc import channels, status
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import store_pb2 as pb_store
from kvmesh.rpc.pb import store_pb2_grpc as pb_store_grpc
from kvmesh.services.store.config import StoreConfig
from kvmesh.services.store.main import run as run_store
from tests.support.nodes import LAYOUT, SHARD, Bench, Node, bench, keys_of, node, stub
from tests.support.services import Running, running, until


class Master:
    """A client of the real one."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.rpc = pb_store_grpc.StoreMasterStub(channel)

    async def holders(self, key: bytes) -> list[str]:
        answer = await self.rpc.Lookup(pb_store.LookupRequest(keys=key))
        return sorted(answer.holders[0].store_ids)

    async def stores(self) -> dict[str, pb_store.StoreStatus]:
        answer = await self.rpc.GetStatus(pb_store.GetStoreStatusRequest())
        return {s.member.store_id: s for s in answer.stores}


@asynccontextmanager
async def master(port: int = 0) -> AsyncIterator[Master]:
    config = StoreConfig(heartbeat_interval_ms=50, lease_ms=1_000, port=port)
    async with running(run_store, config) as service:
        channel = channels.connect(service.address)
        try:
            yield Master(service.address, channel)
        finally:
            await channel.close()


@pytest.fixture
async def desk() -> AsyncIterator[Bench]:
    async with bench() as made:
        yield made


def pool_config(store: str, transports: str = "shm,tcp") -> PoolConfig:
    return PoolConfig(instance_id="pool-0", store=store, memory_mb=4, transports=transports, announce_ms=10)


async def ask(pool_address: str, holder: Node, keys: list[bytes], layout: str = LAYOUT, shard: int = SHARD) -> bytes:
    async with stub(pool_address) as rpc:
        request = pb.PullBlocksRequest(
            keys=b"".join(keys), holders=[holder.ref], layout=layout, shard_bytes=shard, timeout_ms=5_000
        )
        return (await rpc.Pull(request, timeout=20)).held


async def of_pool(service: Running, count: int) -> PullRange:
    async with stub(service.address) as rpc:
        told = await rpc.GetStore(pb.GetNodeStoreRequest())
    return PullRange("pool-0", service.address, told.instance.incarnation, 0, count)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.slow
async def test_blocks_go_to_the_pool_and_from_there_to_others(desk: Bench, transport: str) -> None:
    keys = keys_of(*range(10))
    async with master() as store, running(pool.run, pool_config(store.address, transport)) as service:
        async with node("b", transports=(transport,)) as reader:
            async with node("a", transports=(transport,)) as first:
                await first.fill(desk, keys)
                assert await ask(service.address, first, [*keys, keys_of("no")[0]]) == b"\1" * 10 + b"\0"
                assert await ask(service.address, first, keys) == b"\1" * 10
            pulled = await reader.ended(reader.pull(keys, [await of_pool(service, 10)]))
            assert pulled.arrived == tuple(range(10)), pulled
            await reader.check(desk, keys)
        async with stub(service.address) as rpc:
            told = await rpc.GetStore(pb.GetNodeStoreRequest())
            assert (told.pulled_blocks, told.pools.store_blocks, told.pools.store_writing) == (10, 10, 0)
            assert (told.layout, told.shard_bytes, told.capacity_bytes) == (LAYOUT, SHARD, 4 << 20)


async def test_two_layouts_in_one_pool_and_one_announcer(desk: Bench) -> None:
    ours, theirs, shared = keys_of(*range(5)), keys_of(*range(10, 15)), keys_of("in both")
    async with (
        master() as store,
        running(pool.run, pool_config(store.address)) as service,
        node("a") as a,
        node("c", layout="another model", shard=24_576) as c,
    ):
        await a.fill(desk, ours + shared)
        await c.fill(desk, theirs + shared)
        assert all(await ask(service.address, a, ours + shared))
        assert all(await ask(service.address, c, theirs + shared, "another model", 24_576))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(service.address, a, keys_of("x"), "another model", SHARD)
        assert isinstance(status.from_rpc_error(caught.value), InvalidRequest)
        for key in (*ours, *theirs, *shared):
            await until(lambda key=key: has(store, key, ["pool-0"]))  # type: ignore[misc]
        usage = (await store.stores())["pool-0"]
        assert usage.blocks == 11
        async with stub(service.address) as rpc:
            told = await rpc.GetStore(pb.GetNodeStoreRequest())
            assert told.layout == "" and told.pools.store_blocks == 12
            listed = [key async for part in rpc.ListBlocks(pb.ListBlocksRequest()) for key in split(part.keys)]
            assert sorted(listed) == sorted(ours + theirs + shared)
        async with node("b") as b, node("d", layout="another model", shard=24_576) as d:
            count = await of_pool(service, 6)
            assert len((await b.ended(b.pull(ours + shared, [count]))).arrived) == 6
            assert len((await d.ended(d.pull(theirs + shared, [count]))).arrived) == 6
            await b.check(desk, ours + shared)
            await d.check(desk, theirs + shared)
            wrong = await b.ended(b.pull(theirs, [count]))
            assert wrong.arrived == (), "blocks of another layout are not held"


async def has(store: Master, key: bytes, holders: list[str]) -> bool:
    return await store.holders(key) == holders


async def test_a_pool_leaves_the_master_with_its_blocks(desk: Bench) -> None:
    keys = keys_of(1)
    async with master() as store:
        async with running(pool.run, pool_config(store.address)) as service, node("a") as a:
            a.join(store.address)
            await a.fill(desk, keys)
            assert all(await ask(service.address, a, keys))
            await until(lambda: has(store, keys[0], ["a", "pool-0"]))
            stores = await store.stores()
            assert stores["pool-0"].usage.capacity_bytes == 4 << 20
        await until(lambda: has(store, keys[0], []))
        assert not await store.stores()


async def test_a_master_that_comes_back_learns_everything_again(desk: Bench) -> None:
    keys = keys_of(*range(6))
    async with node("a") as a:
        async with master() as store:
            port = int(store.address.rpartition(":")[2])
            a.join(store.address)
            await a.fill(desk, keys[:3])
            await until(lambda: has(store, keys[2], ["a"]))
        await a.fill(desk, keys[3:])  # while nobody listens
        a.store.allocate(0)
        async with master(port) as store:
            for key in keys:
                await until(lambda key=key: has(store, key, ["a"]))  # type: ignore[misc]


@pytest.mark.slow
async def test_cold_blocks_are_offloaded_to_the_pool_once(desk: Bench) -> None:
    keys = keys_of(*range(40))
    async with master() as store, running(pool.run, pool_config(store.address)) as service:
        async with node("a", total=40, offload_percent=50) as a:
            a.join(store.address)
            await a.fill(desk, keys)  # above the high watermark: some are gone at once
            count = a.store.stats.sealed - 20
            cold = a.store.coldest(count)
            for key in cold:
                await until(lambda key=key: has(store, key, ["a", "pool-0"]))  # type: ignore[misc]
            async with stub(a.address) as rpc:
                told = await rpc.GetStore(pb.GetNodeStoreRequest())
                assert told.offloaded_blocks == count
            # Being copied was no use of them: they are still the first to go. Only the pool has them then.
            await until(lambda: settled(a, cold))
            a.store.allocate(30)
            await until(lambda: has(store, cold[0], ["pool-0"]))
        async with node("b") as b:
            pulled = await b.ended(b.pull(cold, [await of_pool(service, count)]))
            assert len(pulled.arrived) == count
            await b.check(desk, cold)


async def settled(a: Node, cold: list[bytes]) -> bool:
    return set(a.store.coldest(len(cold))) == set(cold)


async def test_hostile_pulls_leave_the_pool_as_it_was(desk: Bench) -> None:
    async with master() as store, running(pool.run, pool_config(store.address)) as service, node("a") as a:
        await a.fill(desk, keys_of(1))
        async with stub(service.address) as rpc:
            many = b"".join(keys_of(*range(2_000)))
            for layout, shard in (("x", 1024), ("y", 4 << 20), ("z", 70_000)):
                request = pb.PullBlocksRequest(
                    keys=many, holders=[a.ref], layout=layout, shard_bytes=shard, timeout_ms=300
                )  # fmt: skip
                assert not any((await rpc.Pull(request, timeout=20)).held)
                told = await rpc.GetStore(pb.GetNodeStoreRequest())
                assert told.pools.extents_total == 0, "memory went to a layout that holds nothing"
        assert all(await ask(service.address, a, keys_of(1)))


async def test_a_pool_whose_memory_dies_ends_with_an_error() -> None:
    stop = asyncio.Event()
    with pytest.raises(ConfigError, match="transports='smoke'"):
        PoolConfig(transports="smoke")
    with pytest.raises(ConfigError, match="store_low_percent=97"):
        PoolConfig(store_low_percent=97)
    made = pool.PoolNode(PoolConfig(memory_mb=1))
    ready = asyncio.Event()
    running_ = asyncio.create_task(made.run(stop, lambda _: ready.set()))
    await asyncio.wait_for(ready.wait(), 20)
    made._rank._process.kill()  # type: ignore[union-attr]
    with pytest.raises(Exception, match="lost its memory"):
        await asyncio.wait_for(running_, 20)
