"""Gets without a lease, against real pool nodes: every byte is compared, and nodes and clients count what was asked."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import random
from collections.abc import Iterator

import numpy as np
import pytest

from kvmesh.errors import InvalidRequest, KvmeshError
from kvmesh.kvcache import shared_index
from kvmesh.kvcache.tiers import Tier
from kvmesh.pool import shared_index as index
from kvmesh.rpc import channels
from kvmesh.rpc.pb import blocks_pb2, blocks_pb2_grpc
from kvmesh.storeclient import ClientConfig, StoreClient, SyncStoreClient, content_key
from kvmesh.storeclient.reading import local as near
from tests.support.services import until
from tests.support.store_clients import MIB, Stores, stores, values
from tests.support.threads import in_thread

pytestmark = pytest.mark.skipif(not shared_index.SUPPORTED, reason="rests on x86-64's order of loads and stores")

SIZES = (1, 100, 4095, 4096, 70_000, MIB, 3 * MIB + 17)


@pytest.fixture(scope="module")
def one() -> Iterator[Stores]:
    """For tests that end nothing and evict nothing."""
    with in_thread("a") as made:
        yield made


async def counted(address: str) -> blocks_pb2.GetNodeStoreResponse:
    async with channels.connect(address) as channel:
        found: blocks_pb2.GetNodeStoreResponse
        found = await blocks_pb2_grpc.NodeStoreStub(channel).GetStore(blocks_pb2.GetNodeStoreRequest(), timeout=30)
        return found


async def near_by(client: StoreClient, nodes: int = 1) -> None:
    """Until it has found them: it looks for whoever has answered it."""

    async def found() -> bool:
        return client._reader.local.nodes == nodes

    await until(found)


def hits(client: StoreClient) -> int:
    return client.counters()["near_hits"]


async def test_no_lease_and_no_message(one: Stores) -> None:
    """Into memory of either kind and as bytes, small and large, some wanted twice, and no room for one."""
    datas = values(1, *SIZES)
    async with one.client(keys="granted", namespace="quiet") as client:
        keys = [put.key for put in await client.put_many(datas)]
        await near_by(client)
        before = await counted(one.nodes["a"].address)
        assert [got.data for got in await client.get_many(keys)] == datas
        shared, own = client.allocate(16 * MIB), client.register(np.zeros(16 * MIB, np.uint8))
        for buffer in (shared, own):
            order = [*range(len(keys)), 3, 6]
            random.Random(2).shuffle(order)
            spans, at = [], 0
            for i in order:
                spans.append(buffer.span(at, len(datas[i]) + 3))
                at += len(datas[i]) + 3
            got = await client.get_many_into([keys[i] for i in order], spans)
            for i, block, span in zip(order, got, spans, strict=True):
                said = (block.key, block.nbytes, block.tier, block.store_id, block.cause)
                assert said == (keys[i], len(datas[i]), Tier.DRAM, "a", "")
                assert bytes(span.memory[:-3]) == datas[i] and not any(span.memory[-3:])
        asked = len(keys) + 2 * (len(keys) + 2)
        assert hits(client) == asked == client.counters()["blocks_got"]
        after = await counted(one.nodes["a"].address)
        assert after.leases_given == before.leases_given

        async def told() -> bool:
            return (await counted(one.nodes["a"].address)).block_hits == before.block_hits + asked

        await until(told)
        with pytest.raises(InvalidRequest, match="target: 10 bytes for a block of 70000"):
            await client.get_into(keys[4], shared.span(0, 10))
        assert hits(client) == asked


async def test_names_and_keys_that_are_not_here_go_the_usual_way(one: Stores) -> None:
    datas = values(3, 5000, 6000)
    async with one.client(namespace="named") as client:
        await client.put(datas[0], name="first")
        key = await client.put(datas[1])
        await near_by(client)
        got = await client.get_many(["first", key, content_key(b"nobody's", "named"), "no such name"])
        assert [block.data for block in got] == [*datas, None, None]
        assert await client.get("first") == datas[0] and await client.get(bytes(16)) is None
        assert [block.data for block in await client.get_many([key, "first"])] == datas[::-1]
        assert hits(client) == 3
        with pytest.raises(InvalidRequest, match="16 bytes"):
            await client.get(b"short")


@pytest.mark.parametrize("settings", [{"transports": "tcp"}, {"near": False}, {"fault": "{}"}, {"verify": True}])
async def test_who_does_not_want_it_leases(one: Stores, settings: dict[str, object]) -> None:
    data = values(4, 40_000)[0]
    async with one.client(**settings) as client, one.client() as other:
        key = await client.put(data)
        await until(lambda: other.get(key))
        await near_by(other)  # by then the first one had time enough
        before = (await counted(one.nodes["a"].address)).leases_given
        assert await client.get(key) == data and await other.get(key) == data
        assert await other.get(key, verify=True) == data
        assert hits(client) == 0 < hits(other)
        assert (await counted(one.nodes["a"].address)).leases_given == before + 2


async def test_a_removed_block_is_missed_at_once(one: Stores) -> None:
    data = values(5, 300_000)[0]
    async with one.client(namespace="gone") as client, one.client(namespace="gone") as other:
        for _ in range(20):
            key = await client.put(data)
            await near_by(client)
            assert await client.get(key) == data
            done = await other.remove(key)
            assert done.acknowledged == ("a",) and not done.pending
            assert await client.get(key) is None
        assert hits(client) >= 19
        await client.put(data)
        await client.remove_namespace()
        assert await client.get(key) is None


def test_threads_without_an_event_loop(one: Stores) -> None:
    datas = values(6, 10, 70_000, MIB, 5 * MIB)
    with SyncStoreClient(ClientConfig(store=one.address, staging_mb=8, node_id="far")) as client:
        keys = [put.key for put in client.put_many(datas)]
        asyncio.run(near_by(client.client))
        buffers = [client.allocate(7 * MIB) for _ in range(4)]

        def reads(i: int) -> bool:
            rng, right = random.Random(i), True
            for _ in range(40):
                n = rng.randrange(len(keys))
                right &= client.get(keys[n]) == datas[n]
                right &= client.get_into(keys[n], buffers[i].span(5, 6 * MIB)).nbytes == len(datas[n])
                right &= bytes(buffers[i].view[5 : 5 + len(datas[n])]) == datas[n]
            return right

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert all(pool.map(reads, range(4)))
        spans = [buffers[0].span(0, 10), buffers[0].span(10, 70_000)]
        assert [got.nbytes for got in client.get_many_into(keys[:2], spans)] == [10, 70_000]
        assert [got.data for got in client.get_many(keys)] == datas
        assert client.counters()["near_hits"] == 4 * 80 + 2 + 4


# ── what changes hands ───────────────────────────────────────────────────────────────────────────


async def _fill(client: StoreClient, seed: int, size: int, count: int) -> list[bytes]:
    """So many blocks, put one after the other; their keys are made of their contents."""
    rng = random.Random(seed)
    keys = []
    for _ in range(count):
        data = rng.randbytes(size)
        keys.append(await client.put(data))
    return keys


@pytest.mark.parametrize(("size", "other"), [(60_000, 60_000), (2 * MIB, 2 * MIB), (2 * MIB, 60_000)])
@pytest.mark.slow
async def test_a_reader_that_stands_still_while_its_block_is_evicted_has_a_miss(size: int, other: int) -> None:
    """Stopped before its copy, and after it, while the node gives the very memory to others: of the same size, and,
    slabs and all, of another."""
    async with stores("a", memory_mb=8) as made, made.client() as client, made.client() as filler:
        target = client.allocate(size).span()
        for copied_before in (False, True):
            data = values(size + other + copied_before, size)[0]
            key = await client.put(data)
            await near_by(client)
            plan = client._reader.local.plan([key], [target])
            assert plan is not None and plan.places[0] is not None
            if copied_before:
                near._copy(plan.places[0], target)
                assert bytes(target.memory) == data
            node, _, _, where, _ = plan.places[0]
            for seed in range(20):
                if bytes(node.memory[where : where + size]) != data:
                    break
                await _fill(filler, size * other + 40 * copied_before + seed, other, 8 * MIB // other)
            assert bytes(node.memory[where : where + size]) != data, "it was to be somebody else's"
            got = client._reader.local._result(plan, None) if copied_before else client._reader.local.read_here(plan)
            assert got == [None]
            assert await client.get(key) is None


@pytest.mark.slow
async def test_what_is_read_while_everything_is_evicted_is_right() -> None:
    """A pool of 8 MiB, twice as much put into it in turn, readers of all of it beside."""
    sizes = (60_000, 700_000, 3 * MIB)
    rng = random.Random(8)
    async with stores("a", memory_mb=8) as made, made.client() as reader, made.client() as writer:
        pairs = [(rng.randbytes(16) * (size // 16), size) for size in sizes for _ in range(6 * MIB // size)]
        known = {content_key(data): data for data, _ in pairs}
        first = await writer.put(pairs[0][0])
        await until(lambda: reader.get(first))
        await near_by(reader)
        going, wrong, got = True, 0, 0

        async def read(seed: int) -> None:
            nonlocal wrong, got
            mine, keys = random.Random(seed), list(known)
            buffer = reader.allocate(16 * MIB)
            while going:
                some = mine.sample(keys, 5)
                spans = [buffer.span(i * 3 * MIB, 3 * MIB) for i in range(5)]
                for key, block, span in zip(some, await reader.get_many_into(some, spans), spans, strict=True):
                    got += block.here
                    wrong += block.here and bytes(span.memory[: block.nbytes]) != known[key]

        readers = [asyncio.ensure_future(read(seed)) for seed in (1, 2)]
        for round_ in range(30):
            if round_ >= 3 and hits(reader) > 20:  # a node that is held up for long is read under leases meanwhile
                break
            order = list(known.values())
            rng.shuffle(order)
            for data in order:
                await writer.put(data)
            with contextlib.suppress(KvmeshError):
                await writer.remove(*rng.sample(list(known), 20))
        going = False
        await asyncio.gather(*readers)
        assert not wrong and got >= hits(reader) > 20, (wrong, got, hits(reader))


@pytest.mark.slow
async def test_reads_without_a_lease_keep_blocks_warm() -> None:
    """Those that are read stay while others of their size go, and while their slabs are wanted by another size."""
    async with stores("a") as made, made.client() as client:
        warm = await _fill(client, 9, 300_000, 20)
        await near_by(client)
        for round_ in range(4):
            assert all(got.here for got in await client.get_many(warm))
            before = (await counted(made.nodes["a"].address)).block_hits
            await client.get_many(warm)

            async def told(before: int = before) -> bool:
                return (await counted(made.nodes["a"].address)).block_hits >= before + len(warm)

            await until(told)
            await _fill(client, 100 + round_, 300_000 if round_ < 2 else 60_000, 60 if round_ < 2 else 300)
        assert (await counted(made.nodes["a"].address)).evicted > 50
        assert hits(client) == 8 * len(warm), "all of them were there all the time"


async def test_what_has_no_room_in_the_index_is_read_under_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MAX_BLOCKS", 1)
    datas = values(10, *[500] * 300)
    async with stores("a") as made, made.client() as client:
        keys = [put.key for put in await client.put_many(datas)]
        await near_by(client)
        assert [got.data for got in await client.get_many(keys)] == datas
        assert 40 < hits(client) < 200
