"""What goes wrong in the middle of a get or a prefetch, with real processes and a transport that misfares on order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from kvmesh.errors import Unavailable
from kvmesh.services.store.config import StoreConfig
from kvmesh.services.store.main import run as run_store
from kvmesh.storeclient import ClientConfig, Policy, StoreClient
from kvmesh.testing.fault.rules import Rule, Script
from tests.chaos.network import Loopback
from tests.chaos.processes import PORTS, Process, service
from tests.support.services import running, until
from tests.support.store_clients import MIB, stores, values

SLOW_READS = Rule(kind="bandwidth", op="read", bandwidth_mbps=48)  # 6 MB a second


@contextlib.asynccontextmanager
async def two_processes(folder: Path) -> AsyncIterator[tuple[str, dict[str, Process]]]:
    """The master's address, and pool nodes "a" and "b" that can be killed. The master gives them long leases: that one
    is dead is for its readers to find out."""
    async with contextlib.AsyncExitStack() as stack:
        config = StoreConfig(heartbeat_interval_ms=100, lease_ms=60_000)
        master = await stack.enter_async_context(running(run_store, config))
        nodes: dict[str, Process] = {}
        for name in ("a", "b"):
            flags = {"instance_id": name, "node_id": f"machine-{name}", "store": master.address, "memory_mb": 32}
            nodes[name] = service("pool", name, Loopback(), PORTS.take(), folder, {**flags, "announce_ms": 5})
            stack.callback(nodes[name].end)
            nodes[name].start()
        await asyncio.gather(*(node.ready() for node in nodes.values()))
        yield master.address, nodes


@pytest.mark.slow
async def test_a_holder_killed_in_the_middle_of_a_get_is_left_for_the_next(tmp_path: Path) -> None:
    datas = values(1, *[500_000] * 12)
    async with two_processes(tmp_path) as (store, nodes):
        settings = ClientConfig(
            store=store, node_id="machine-a", host="127.0.0.1", transports="tcp", staging_mb=16, fault="{}"
        )
        async with StoreClient(settings) as client:
            assert client._engine.fault is not None
            await until(lambda: _pools(client, 2))
            keys = [put.key for put in await client.put_many(datas)]
            await client.change_replica(keys, 2)
            await until(lambda: _copies(client, keys, 2))
            assert {got.store_id for got in await client.get_many(keys)} == {"a"}, "the nearest"

            client._engine.fault.add(SLOW_READS)
            buffer = client.allocate(sum(map(len, datas)))
            before = bytes(buffer.view)
            targets = [buffer.span(i * 500_000, 500_000) for i in range(len(datas))]
            getting = asyncio.ensure_future(client.get_many_into(keys, targets))

            async def under_way() -> bool:
                return buffer.view[: len(before)] != before

            await until(under_way)
            assert not getting.done()
            nodes["a"].signal(signal.SIGKILL, nodes["a"].pids())
            client._engine.fault.clear()
            got = await asyncio.wait_for(getting, 30)
            assert {one.store_id for one in got} >= {"b"}, [one.cause for one in got]
            assert all(one.here for one in got), [one.cause for one in got]
            assert [bytes(target.memory) for target in targets] == datas
            assert (await client.get_many(keys[:1]))[0].store_id == "b", "nobody asks the dead one again"


async def _pools(client: StoreClient, count: int) -> bool:
    client._directory.forget_pools()
    return sum(one.free_bytes > 0 for one in await client._directory.pools(5)) == count


async def _copies(client: StoreClient, keys: list[bytes], count: int) -> bool:
    return all(len(some) == count for some in await client.replicas(keys))


@pytest.mark.slow
async def test_wrong_bytes_on_the_wire_are_never_given_out_when_checksums_are_asked_for() -> None:
    """Of two holders the other one is read; of one alone the get says why it failed."""
    datas = values(2, 300, 70_000, MIB)
    async with (
        stores("a", "b") as two,
        two.client(transports="tcp", fault="{}", node_id="machine-a") as client,
    ):
        fault = client._engine.fault
        assert fault is not None
        keys = [put.key for put in await client.put_many(datas)]
        assert [got.store_id for got in await client.get_many(keys, verify=True)] == ["a"] * 3
        fault.add(Rule(kind="corrupt", op="read"))
        for key, data in zip(keys, datas, strict=True):
            assert await client.get(key) != data, "the fault strikes"
        for key in keys:
            with pytest.raises(Unavailable, match="a: wrong bytes: the checksum differs"):
                await client.get(key, verify=True)
        fault.clear()
        await client.change_replica(keys, 2)
        await until(lambda: _copies(client, keys, 2))
        fault.add(Rule(kind="corrupt", op="read", peer="a*"))
        for key, data in zip(keys, datas, strict=True):
            (got,) = await client.get_many([key], verify=True)
            assert (got.data, got.store_id) == (data, "b")


@pytest.mark.slow
async def test_a_prefetch_with_a_deadline_returns_with_what_is_there_and_the_rest_comes_later() -> None:
    datas = values(3, *[MIB] * 6)
    async with (
        stores("a", "b", transports="tcp", fault=msgspec.json.encode(Script(rules=(SLOW_READS,))).decode()) as two,
        two.client(node_id="machine-a", transports="tcp") as writer,
        two.client(node_id="machine-b", transports="tcp") as reader,
    ):
        keys = [put.key for put in await writer.put_many(datas[:1])]
        await until(lambda: _copies(reader, keys, 1))
        assert await reader.prefetch(keys, Policy.DEADLINE, timeout_ms=10_000) == [True], "early when all is there"
        keys += [put.key for put in await writer.put_many(datas[1:])]
        await until(lambda: _copies(writer, keys[1:], 1))
        told = await reader.prefetch(keys, Policy.DEADLINE, timeout_ms=200)
        assert told[0] and not all(told), "5 MiB do not come in a fifth of a second"

        await until(lambda: _copies(reader, keys, 2))
        got = await reader.get_many(keys)
        assert [(one.data, one.store_id) for one in got] == [(data, "b") for data in datas]
