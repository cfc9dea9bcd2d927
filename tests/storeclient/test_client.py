"""The public client against a real master and real pool nodes: every byte is compared."""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvmesh.errors import DeadlinePassed, InvalidRequest, PinLimit, Unavailable
from kvmesh.kvcache.keys import tenant_tag
from kvmesh.kvcache.tiers import Tier
from kvmesh.storeclient import Pin, Policy, Quota, StoreClient, SyncStoreClient, content_key
from kvmesh.storeclient.config import ClientConfig
from tests.support.services import until
from tests.support.store_clients import MIB, Stores, stores, values
from tests.support.threads import in_thread

SIZES = (1, 100, 4095, 4096, 70_000, MIB, MIB + 17)


@pytest.fixture(scope="module")
def two() -> Iterator[Stores]:
    """For all tests here that end nothing: what they put lies in namespaces of their own, or under its contents."""
    with in_thread("a", "b") as made:
        yield made


@pytest.mark.parametrize("transports", ["shm,tcp", "tcp"])
async def test_what_is_put_is_got_by_everybody(two: Stores, transports: str) -> None:
    datas = values(len(transports), *SIZES)
    async with two.client(transports=transports) as writer, two.client(transports=transports) as reader:
        puts = await writer.put_many(datas, verify=True)
        assert [one.key for one in puts] == [content_key(data) for data in datas]
        assert all(one.held for one in puts), puts
        got = await writer.get_many([one.key for one in puts], verify=True)
        assert [one.data for one in got] == datas and {one.tier for one in got} == {Tier.DRAM}
        for one, data in zip(puts, datas, strict=True):
            await until(lambda key=one.key: reader.exists(key))  # type: ignore[misc]
            assert await reader.get(one.key) == data
        assert await reader.get(content_key(b"nobody put this")) is None
        places = (await reader.locate_many([puts[4].key]))[0]
        assert [(place.tier, place.nbytes) for place in places] == [(Tier.DRAM, 70_000)]


async def test_memory_of_ones_own(two: Stores) -> None:
    """Allocated and registered buffers, many small blocks and large ones, some wanted twice, in no order."""
    sizes = [4096] * 40 + [10_000] * 20 + [300_000] * 3
    datas = values(2, *sizes)
    async with two.client(keys="granted") as client:
        mapped = client.allocate(sum(sizes))
        spans, at = [], 0
        for data in datas:
            spans.append(mapped.span(at, len(data)))
            spans[-1].memory[:] = data
            at += len(data)
        puts = await client.put_many_from(spans)
        assert all(one.held for one in puts) and len({one.key for one in puts}) == len(datas)
        mapped.view[:] = bytes(len(mapped))

        own = np.zeros(2 * sum(sizes), np.uint8)
        buffer = client.register(own)
        order = [*range(len(datas)), 5, 61]
        random.Random(3).shuffle(order)
        targets, at = [], 0
        for i in order:
            targets.append(buffer.span(at, len(datas[i]) + 3))
            at += len(datas[i]) + 3
        got = await client.get_many_into([puts[i].key for i in order], targets, verify=True)
        for i, one, target in zip(order, got, targets, strict=True):
            assert one.nbytes == len(datas[i]) and bytes(target.memory[:-3]) == datas[i] and not any(target.memory[-3:])
        assert client.counters()["gathered"] >= 40

        own[: len(datas[-1])] = np.frombuffer(datas[-1], np.uint8)
        key = await client.put_from(buffer.span(0, len(datas[-1])))
        own[:] = 0
        assert await client.get(key) == datas[-1]
        with pytest.raises(InvalidRequest, match="target: 10 bytes for a block of 300000"):
            await client.get_into(key, mapped.span(0, 10))
        client.unregister(buffer)
        client.unregister(mapped)
        assert client.counters()["staging_free"] == 8 * MIB


async def test_values_larger_than_staging_and_more_of_them_than_it_holds(two: Stores) -> None:
    large, many = values(4, 9 * MIB)[0], values(5, *[700_000] * 24)
    async with two.client(staging_mb=4) as client:
        assert await client.get(await client.put(large)) == large
        puts = await client.put_many(many)
        got = await client.get_many([one.key for one in puts])
        assert [one.data for one in got] == many
        assert client.counters()["staging_free"] == 4 * MIB


async def test_keys_that_others_could_use_are_refused(two: Stores) -> None:
    async with two.client(namespace="x") as client, two.client(namespace="y") as other:
        a, b = values(6, 500, 500)
        for key in (content_key(b, "x"), content_key(a, "y"), bytes(16)):
            with pytest.raises(InvalidRequest, match=f"key='{key.hex()}'"):
                await client.put(a, key=key)
        assert await client.put(a, key=content_key(a, "x")) == content_key(a, "x")
        granted, spare = await client.grant(2)
        assert await client.put(a, key=granted) == granted
        with pytest.raises(InvalidRequest, match="not used yet"):
            await client.put(b, key=granted)
        with pytest.raises(InvalidRequest, match="not used yet"):
            await other.put(b, key=spare)
        assert await client.get(granted) == a
        assert len({*(await client.grant(300)), *(await other.grant(300)), granted, spare}) == 602
        for bad, name in ((b"", "data"), ("text", "data"), (memoryview(a)[::2], "data")):
            with pytest.raises(InvalidRequest, match=name):
                await client.put(bad)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="timeout_ms=0"):
            await client.put(a, timeout_ms=0)


async def test_computed_keys_are_the_callers_own_within_the_namespace(two: Stores) -> None:
    """Two clients put different bytes under one key, at nodes of their own: the first ones count."""
    a, b, c = values(8, 500, 70_000, 500)
    async with (
        two.client(namespace="kv", keys="computed", node_id="machine-a") as one,
        two.client(namespace="kv", keys="computed", node_id="machine-b") as other,
    ):
        keys = [one.tag + bytes([at]) * 12 for at in (1, 2)]
        puts = await one.put_many([a, b], keys=keys)
        assert [put.store_id for put in puts] == ["a", "a"] and [put.key for put in puts] == keys
        await until(lambda: other.exists(keys[1]))
        await until(lambda: _known_to_master(other, keys))
        again = await other.put_many([c, b], keys=keys)
        assert [put.store_id for put in again] == ["a", "a"] and other.counters()["blocks_put"] == 0
        assert [got.data for got in await other.get_many(keys)] == [a, b]
        for key in (bytes(16), tenant_tag("others") + bytes(12), one.tag):
            with pytest.raises(InvalidRequest, match="key="):
                await one.put(a, key=key)
        with pytest.raises(InvalidRequest, match="keys=None: 1 blocks, as many keys"):
            await one.put(a)
        with pytest.raises(InvalidRequest, match="keys=1: 2 blocks"):
            await one.put_many([a, b], keys=keys[:1])


async def _known_to_master(client: StoreClient, keys: list[bytes]) -> bool:
    return all(await client.replicas(keys))


async def test_names(two: Stores) -> None:
    a, b = values(7, 1000, 2000)
    async with two.client(namespace="n") as client, two.client(namespace="m") as other:
        key = await client.put(a, name="report")
        assert await client.get("report") == a and await client.put(a, name="report") == key
        await until(lambda: other.exists(key))
        with pytest.raises(InvalidRequest, match=f"name='report': stands for block {key.hex()}"):
            await client.put(b, name="report")
        assert await client.get("report") == a
        assert await other.get("report") is None, "another namespace's"
        await client.put(b, name="report", replace=True)
        assert await client.get("report") == b
        got = await client.get_many(["report", "nothing", key])
        assert [one.data for one in got] == [b, None, a]
        done = await client.remove("report")
        assert done.acknowledged and not done.pending
        assert await client.get("report") is None and await client.get(key) == a
        with pytest.raises(InvalidRequest, match="name=''"):
            await client.get("")


async def test_a_name_that_somebody_binds_anew_meanwhile_is_theirs(two: Stores) -> None:
    """Whoever removes a name's block unbinds what it has seen, and nothing that came since."""
    a, c = values(70, 1000, 3000)
    async with two.client(namespace="anew") as one, two.client(namespace="anew") as other:
        await one.put(a, name="report")
        unbind = one._directory.unbind

        async def late(*args: Any) -> Any:
            await other.put(c, name="report", replace=True)
            return await unbind(*args)

        one._directory.unbind = late  # type: ignore[method-assign, assignment]
        await one.remove("report")
        assert await one.get("report") == c


async def test_removed_blocks_are_missed_and_can_be_put_again(two: Stores) -> None:
    datas = values(8, *[5000] * 10)
    async with two.client(namespace="gone") as client, two.client(namespace="stays") as other:
        kept = await other.put(datas[0])
        puts = await client.put_many(datas)
        await until(lambda: known(other, [one.key for one in puts]))
        done = await client.remove(puts[0].key, puts[1].key)
        assert done.acknowledged and not done.pending
        assert done.blocks in (0, 2), "none if the store heard of it with its heartbeat first"
        assert await client.exists_many([one.key for one in puts[:3]]) == [None, None, Tier.DRAM]
        assert [one.data for one in await other.get_many([one.key for one in puts[:3]])] == [None, None, datas[2]]
        assert await client.get(await client.put(datas[0])) == datas[0]
        await client.remove_namespace()
        assert [one.data for one in await client.get_many([one.key for one in puts])] == [None] * 10
        assert await other.get(kept) == datas[0]


async def test_a_get_moves_on_when_a_replica_fails() -> None:
    data = values(9, 200_000)[0]
    async with (
        stores("a", "b") as two,
        two.client(node_id="machine-a") as near,
        two.client(node_id="machine-b") as far,
    ):
        key = await near.put(data)
        await until(lambda: far.exists(key))
        assert [p.holder.store_id for p in (await far.locate_many([key]))[0]] == ["a"], "local first"
        assert await far.prefetch([key], Policy.WAIT) == [True]
        await until(lambda: both(near, key))
        assert (await far.get_many([key]))[0].store_id == "b" and (await near.get_many([key]))[0].store_id == "a"
        await two.nodes["a"].stop()
        got = (await near.get_many([key]))[0]
        assert (got.data, got.store_id) == (data, "b")
        await two.nodes["b"].stop()
        assert await near.get(key, timeout_ms=5_000) is None, "both have left in good order"


async def both(client: StoreClient, key: bytes) -> bool:
    return len((await client.replicas([key]))[0]) == 2


@pytest.mark.slow
async def test_prefetch_returns_when_its_policy_says(two: Stores) -> None:
    datas = values(10, *[50_000] * 30)
    async with two.client(node_id="machine-a") as writer, two.client(node_id="machine-b") as reader:
        keys = [one.key for one in await writer.put_many(datas)]
        for key in keys:
            await until(lambda key=key: reader.exists(key))  # type: ignore[misc]
        await reader.prefetch(keys[:10], Policy.BEST_EFFORT)
        await until(lambda: everywhere(reader, keys[:10]))
        assert await reader.prefetch(keys, Policy.WAIT) == [True] * 30
        await until(lambda: everywhere(reader, keys))  # the master hears of copies a little later
        assert {one.store_id for one in await reader.get_many(keys)} == {"b"}
        assert await reader.prefetch([content_key(b"none")], Policy.DEADLINE, timeout_ms=500) == [False]
    async with two.client(node_id="elsewhere", host="127.0.0.2") as nobody_near:
        with pytest.raises(Unavailable, match="no pool node on elsewhere"):
            await nobody_near.prefetch(keys)


async def everywhere(client: StoreClient, keys: list[bytes]) -> bool:
    return all(len(some) == 2 for some in await client.replicas(keys))


async def known(client: StoreClient, keys: list[bytes]) -> bool:
    return all(await client.replicas(keys))


async def test_pins_and_replicas(two: Stores) -> None:
    datas = values(11, *[100_000] * 4)
    async with two.client() as client:
        keys = [one.key for one in await client.put_many(datas, pin=Pin.HARD)]
        for key in keys:
            await until(lambda key=key: client.exists(key))  # type: ignore[misc]
        assert await client.pin(*keys[:2], ttl_ms=5_000) == [1, 1]
        assert await client.unpin(keys[0], content_key(b"none")) == [1, 0]
        await client.change_replica(keys, 2)
        await until(lambda: everywhere(client, keys))


async def test_quotas(two: Stores) -> None:
    """Beside those of other tests; set under one client's namespace, which need not be the one they are for."""
    long = "ü" * 200
    async with two.client(namespace="other") as client:
        await client.set_quota("counted", 5)
        await client.set_quota(long, 6)
        told = {one.tag: one for one in await client.quotas()}
        assert told[tenant_tag("counted")] == Quota("counted", tenant_tag("counted"), 5, 0)
        assert told[tenant_tag(long)].namespace == "ü" * 128 and told[tenant_tag(long)].blocks == 6
        for blocks in (-1, 1 << 63):
            with pytest.raises(InvalidRequest, match=f"blocks={blocks}: must be in 0"):
                await client.set_quota("counted", blocks)

        def blocking() -> list[bytes]:
            with SyncStoreClient(ClientConfig(store=two.address, staging_mb=4)) as sync:
                sync.set_quota("counted", 0)
                return [one.tag for one in sync.quotas()]

        assert await asyncio.to_thread(blocking) == [tenant_tag(long)]
        await client.set_quota(long, 0)


async def test_a_full_store_says_so_and_hard_pins_stay() -> None:
    async with stores("a", memory_mb=8) as one, one.client() as client:
        with pytest.raises(InvalidRequest, match="data: 10,485,760 bytes: none of 1 pool nodes takes"):
            await client.put(bytes(10 * MIB))
        first = await client.put(values(12, MIB)[0], pin=Pin.HARD)
        for seed in range(13, 17):
            assert all(put.held for put in await client.put_many(values(seed, *[MIB // 2] * 4)))
        assert await client.get(first) == values(12, MIB)[0]

        async def pin_all() -> None:
            for data in values(20, *[MIB] * 8):
                await client.put(data, pin=Pin.HARD)

        with pytest.raises(PinLimit, match="no node has taken the block of 1048576 bytes: a: hard_pins") as caught:
            await pin_all()
        assert caught.value.field == "hard_pins" and not caught.value.retryable
        assert await client.get(first) == values(12, MIB)[0]


async def test_nothing_moves_in_memory_that_was_given_back(two: Stores) -> None:
    """Cancelled gets and puts have ended when they return, and leave nothing behind."""
    data = values(22, 4 * MIB)[0]
    async with two.client() as client:
        key = await client.put(data)
        buffer = client.allocate(len(data))
        rng = random.Random(23)
        for _ in range(12):
            for work in (client.get_into(key, buffer), client.put_from(buffer)):
                task = asyncio.ensure_future(work)
                await asyncio.sleep(rng.random() * 0.004)
                task.cancel()
                await asyncio.wait({task})
                seen = bytes(buffer.view)
                await asyncio.sleep(0.002)
                assert bytes(buffer.view) == seen
        assert await client.get(key) == data
        client.unregister(buffer)
        assert client.counters()["staging_free"] == 8 * MIB


async def test_nobody_answers_and_time_passes() -> None:
    async with stores() as made:
        async with made.client() as client:
            with pytest.raises(Unavailable, match="no pool node"):
                await client.put(b"x")
            assert await client.get(content_key(b"x")) is None
        await made.master.stop()
        async with made.client(timeout_ms=300) as client:
            with pytest.raises((Unavailable, DeadlinePassed)):
                await client.get(content_key(b"x"))
        with pytest.raises(Unavailable, match="closed"):
            await client.get(content_key(b"x"))


def test_the_blocking_face(two: Stores) -> None:
    """From many threads, without a loop."""
    with SyncStoreClient(ClientConfig(store=two.address, staging_mb=8)) as client:
        datas = values(24, *[30_000] * 40)
        with concurrent.futures.ThreadPoolExecutor(4) as crew:
            keys = list(crew.map(client.put, datas))
            assert list(crew.map(client.get, keys)) == datas
        buffer = client.allocate(30_000)
        got = client.get_into(keys[3], buffer)
        assert (got.nbytes, bytes(buffer.view)) == (30_000, datas[3])
        assert client.exists(keys[0]) is Tier.DRAM
        client.close()
        with pytest.raises(Unavailable, match="closed"):
            client.get(keys[0])
