"""What a client's operations leave behind when they are cut short: nothing that still touches memory."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from typing import Any, cast

import pytest

from kvmesh.errors import DeadlinePassed, TransferError, Unavailable
from kvmesh.kvcache.tiers import Tier
from kvmesh.services.store.config import StoreConfig
from kvmesh.services.store.main import run as run_store
from kvmesh.storeclient import StoreClient, SyncStoreClient, memory
from kvmesh.storeclient.calls import every, turn
from kvmesh.storeclient.config import ClientConfig
from kvmesh.storeclient.memory import ClientMemory
from kvmesh.storeclient.reading.leased import REBUILD_S
from kvmesh.storeclient.reading.reader import LOOK_S
from kvmesh.storeclient.replicas import Holder, Replica
from kvmesh.transfer import EngineConfig, TransferEngine
from tests.support.services import running, until
from tests.support.store_clients import MIB, stores, values


async def _turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_copy_that_is_cancelled_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread cannot be stopped: the staging memory must not be given to another before it has."""
    going, began = threading.Event(), threading.Event()

    def slow(target: memoryview, source: bytes) -> None:
        began.set()
        going.wait()
        target[:] = source

    monkeypatch.setattr(memory, "_copy", slow)
    target = bytearray(3 * MIB)
    task = asyncio.ensure_future(memory.copy(memoryview(target), bytes(3 * MIB)))
    await asyncio.to_thread(began.wait)
    task.cancel()
    await _turns()
    assert not task.done()
    going.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_memory_that_nobody_waits_for_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransferEngine("client:ends", EngineConfig(transports=("tcp",)))
    try:
        own = ClientMemory(engine, MIB)
        regions = len(engine.local_descriptor().regions)
        going, began, allocate = threading.Event(), threading.Event(), engine.allocate

        def slow(nbytes: int) -> Any:
            began.set()
            going.wait()
            return allocate(nbytes)

        monkeypatch.setattr(engine, "allocate", slow)
        task = asyncio.ensure_future(own.stage(2 * MIB, time.monotonic() + 60))
        await asyncio.to_thread(began.wait)
        task.cancel()
        going.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(engine.local_descriptor().regions) == regions
    finally:
        engine.close()


async def test_when_one_fails_the_others_have_ended() -> None:
    """A put of several portions: while one still reads the caller's memory, the put has not returned."""
    left: list[str] = []

    async def fails() -> None:
        raise Unavailable("no")

    async def goes_on() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await _turns()
            left.append("ended")

    with pytest.raises(Unavailable):
        await every([goes_on(), fails()])
    assert left == ["ended"]


async def test_a_turn_has_a_deadline() -> None:
    lock = asyncio.Lock()
    async with lock:
        with pytest.raises(DeadlinePassed):
            async with turn(lock, time.monotonic() + 0.01):
                pass
    async with turn(lock, time.monotonic() + 60):
        assert lock.locked()
    assert not lock.locked()


async def test_a_standby_knows_of_no_pool_nodes() -> None:
    """Its silence about nodes is no answer, though it is asked first."""
    alone = StoreConfig(redis="redis://127.0.0.1:9/0", leader_lease_ms=1_000)
    async with stores("a") as made, running(run_store, alone) as standby:
        config = ClientConfig(store=f"{standby.address},{made.address}", staging_mb=8, node_id="far", host="127.0.0.1")
        async with StoreClient(config) as client:
            (data,) = values(5, 5_000)
            assert await client.get(await client.put(data)) == data


def test_closing_ends_the_calls_of_other_threads() -> None:
    """One that waits for an answer that never comes is told, and hangs no more."""
    client = SyncStoreClient(ClientConfig(store="127.0.0.1:9", staging_mb=8, host="127.0.0.1"))
    began = threading.Event()

    async def never() -> None:
        began.set()
        await asyncio.Event().wait()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cast(Any, client)._run, never())
        began.wait()
        client.close()
        with pytest.raises(Unavailable, match="closed"):
            waiting.result(10)


@pytest.mark.slow
async def test_a_removal_by_name_can_be_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows whether the first one was done: the second one must still know which block was meant."""
    async with stores("a") as made, made.client(namespace="again") as client:
        key = await client.put(b"here", name="mine")

        async def lost(*args: Any, **words: Any) -> None:
            raise Unavailable("no answer")

        with monkeypatch.context() as patched:
            patched.setattr(client.directory, "remove", lost)
            with pytest.raises(Unavailable):
                await client.remove("mine")
        assert (await client.remove("mine")).acknowledged == ("a",)
        assert await client.get(key) is None and await client.get("mine") is None
        await client.put(b"else", name="mine")
        assert await client.get("mine") == b"else"


async def test_nobody_is_said_to_have_it_before_all_were_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """`exists` and `pin` believe a master that rebuilds as little as `get` does."""
    async with stores("a") as made, made.client(namespace="rebuilds") as client:
        key = await client.put(b"here")
        find, asked = client.directory.find, 0

        async def rebuilding(keys: Any, timeout_s: float) -> Any:
            nonlocal asked
            asked += 1
            if asked % 3:
                return [[] for _ in keys], False
            return await find(keys, timeout_s)

        monkeypatch.setattr(client.directory, "find", rebuilding)
        monkeypatch.setattr(client._hints, "of", lambda key, now: ())
        assert await client.exists(key) is Tier.DRAM
        assert await client.pin(key, ttl_ms=1_000) == [1]
        asked = 0
        with pytest.raises(Unavailable, match="not heard from all"):
            await client.exists(key, timeout_ms=60)


async def test_a_block_is_nowhere_only_if_all_were_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one holder that a new master knows of has it no more; others have yet to tell it what they have."""
    async with stores("a", "b") as made, made.client(namespace="rebuilds", transports="tcp") as client:
        (put,) = await client.put_many([b"here"])
        key, find, asked = put.key, client.directory.find, 0
        (other,) = (one for one in await client.directory.pools(10) if one.store_id != put.store_id)
        stranger = Replica(Holder(other.store_id, other.address, other.incarnation, other.node_id))

        async def announced() -> bool:
            return bool((await find([key], 10))[0][0])

        await until(announced)

        async def rebuilding(keys: Any, timeout_s: float) -> Any:
            nonlocal asked
            asked += 1
            return await find(keys, timeout_s) if asked == 3 else ([[stranger] for _ in keys], False)

        monkeypatch.setattr(client.directory, "find", rebuilding)
        monkeypatch.setattr(client._hints, "of", lambda key, now: ())
        assert await client.get(key) == b"here"
        asked = 3
        with pytest.raises(Unavailable, match="not heard from all"):
            await client.get(key, timeout_ms=300)


async def test_a_name_is_resolved_again_while_the_master_rebuilds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block that it stood for is gone, which a master that has not heard from all can never say."""
    config = {"namespace": "rebuilds", "transports": "tcp"}
    async with stores("a") as made, made.client(**config) as writer, made.client(**config) as reader:
        old = await writer.put(b"old", name="x")
        assert await reader.get("x") == b"old"
        find, resolved = reader.directory.find, reader._keys.resolved

        asked = 0

        async def rebuilding(keys: Any, timeout_s: float) -> Any:
            nonlocal asked
            asked += list(keys) == [old]
            return ([[]], False) if list(keys) == [old] else await find(keys, timeout_s)

        async def resolved_then_replaced(refs: Any, deadline: float) -> Any:
            keys = await resolved(refs, deadline)
            if keys == [old] and refs == ["x"]:
                await writer.put(b"new", name="x", replace=True)
                await writer.remove(old)
            return keys

        monkeypatch.setattr(reader.directory, "find", rebuilding)
        monkeypatch.setattr(reader._keys, "resolved", resolved_then_replaced)
        assert await reader.get("x", timeout_ms=4_000) == b"new"
        assert asked <= LOOK_S / REBUILD_S + 1, "asked until the deadline"
        with pytest.raises(Unavailable, match="not heard from all"):
            await reader.get(old, timeout_ms=300)


async def test_memory_that_a_frozen_node_still_reads_stalls_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine waits for the reader, and gives up after a while; meanwhile the loop goes on, and later it is tried
    again."""
    engine = TransferEngine("client:frozen", EngineConfig(transports=("tcp",)))
    try:
        own = ClientMemory(engine, MIB)
        regions = len(engine.local_descriptor().regions)
        unregister, loop_thread, frozen = engine.unregister_memory, threading.get_ident(), True

        def slow(region: Any) -> None:
            assert threading.get_ident() != loop_thread, "the event loop waits"
            if frozen:
                raise TransferError("is still being read")
            unregister(region)

        monkeypatch.setattr(engine, "unregister_memory", slow)
        own.give_back(await own.stage(2 * MIB, time.monotonic() + 60))
        await own.close()
        frozen = False
        own.give_back(await own.stage(2 * MIB, time.monotonic() + 60))
        await own.close()
        assert len(engine.local_descriptor().regions) == regions
    finally:
        engine.close()
