"""What a stranger may rely on: names that are replaced, errors by what happened, arguments that are checked, forks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvmesh.errors import (
    ConfigError,
    DeadlinePassed,
    InvalidRequest,
    KvmeshError,
    Overloaded,
    PinLimit,
    ProtocolMismatch,
    Unavailable,
)
from kvmesh.pool import pool
from kvmesh.pool.config import PoolConfig
from kvmesh.services.store.config import StoreConfig
from kvmesh.services.store.main import run as run_store
from kvmesh.storeclient import ClientConfig, Pin, Policy, StoreClient, SyncStoreClient, content_key, memory, naming
from tests.chaos.network import Loopback
from tests.chaos.processes import PORTS, Process, service
from tests.support.services import running, until
from tests.support.store_clients import MIB, stores, values

REPLACERS, EACH = 8, 12
SELDOM_MS = 1_000


@asynccontextmanager
async def processes(folder: Path, *names: str, **flags: Any) -> AsyncIterator[tuple[str, dict[str, Process]]]:
    """A master's address, and pool nodes of these names, each a process. Lives are long: a node that is frozen stays a
    member."""
    port = PORTS.take()
    made = {"store": service("store", "store", Loopback(), port, folder, {"lease_ms": 60_000})}
    for name in names:
        more = {"instance_id": name, "node_id": f"machine-{name}", "store": f"127.0.0.1:{port}", "memory_mb": 32}
        made[name] = service("pool", name, Loopback(), PORTS.take(), folder, {**more, **flags})
    try:
        for one in made.values():
            one.start()
        await asyncio.gather(*(one.ready() for one in made.values()))
        yield f"127.0.0.1:{port}", made
    finally:
        for one in made.values():
            one.end()


def client_of(store: str, **more: Any) -> StoreClient:
    words = {"staging_mb": 8, "timeout_ms": 15_000, "node_id": "far", "host": "127.0.0.1", **more}
    return StoreClient(ClientConfig(store=store, **words))


async def pools(client: StoreClient, count: int) -> bool:
    client._directory.forget_pools()
    return sum(one.free_bytes > 0 for one in await client._directory.pools(5)) == count


async def complete(client: StoreClient) -> bool:
    """Whether its master has heard from all, so that what it does not know is a miss."""
    return (await client._directory.find([bytes(16)], 5))[1]


# ── replaced names ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.mesh
@pytest.mark.parametrize("removed", [False, True], ids=["kept", "old ones removed"])
async def test_readers_of_a_name_that_is_replaced_always_find_a_value(tmp_path: Path, removed: bool) -> None:
    """Eight replace it at once, all succeed, and what the last one was told stands in the end."""
    async with processes(tmp_path, "a", "b") as (store, _):
        clients = [client_of(store, locations=0 if i % 2 else 1000) for i in range(REPLACERS + 4)]
        writers, readers = clients[:REPLACERS], clients[REPLACERS:]
        try:
            await until(lambda: pools(clients[0], 2))
            written = {b"first"}
            await writers[0].put(b"first", name="x")
            going, nones, reads = True, 0, 0

            async def replace(number: int, client: StoreClient) -> bytes:
                old: bytes | None = None
                for i in range(EACH):
                    data = f"{number}-{i}".encode() * 50
                    written.add(data)
                    key = await client.put(data, name="x", replace=True)
                    if removed and old is not None:
                        await client.remove(old)
                    old = key
                return data

            async def read(client: StoreClient) -> None:
                nonlocal nones, reads
                while going:
                    found = await client.get("x")
                    reads, nones = reads + 1, nones + (found is None)
                    assert found is None or found in written

            reading = [asyncio.ensure_future(read(client)) for client in readers]
            lasts = await asyncio.gather(*(replace(i, client) for i, client in enumerate(writers)))
            going = False
            await asyncio.gather(*reading)
            assert nones == 0, f"{nones} of {reads} reads were None"
            assert await readers[0].get("x") in lasts
            await writers[3].put(b"last", name="x", replace=True)
            assert [await client.get("x") for client in readers] == [b"last"] * len(readers)
        finally:
            await asyncio.gather(*(client.close() for client in clients))


async def test_a_name_leads_to_its_block_as_soon_as_it_was_put() -> None:
    """Whenever its node announces it."""
    async with contextlib.AsyncExitStack() as stack:
        config = StoreConfig(heartbeat_interval_ms=100, lease_ms=1_000)
        master = await stack.enter_async_context(running(run_store, config))
        node = PoolConfig(instance_id="a", store=master.address, memory_mb=8, announce_ms=SELDOM_MS)
        await stack.enter_async_context(running(pool.run, node))
        reader = await stack.enter_async_context(client_of(master.address, locations=0))
        writer = await stack.enter_async_context(client_of(master.address))
        await until(lambda: pools(writer, 1))
        await until(lambda: complete(reader))
        for i, data in enumerate(values(3, *[1000] * 30)):
            await writer.put(data, name=f"n{i}")
            assert await reader.get(f"n{i}") == data


# ── forks ─────────────────────────────────────────────────────────────────────────────────────────

CALLS: list[Callable[[Any], Any]] = [
    lambda c: c.put(b"x"),
    lambda c: c.put_many([b"x"]),
    lambda c: c.put_from(b"x"),
    lambda c: c.put_many_from([b"x"]),
    lambda c: c.content_key(b"x"),
    lambda c: c.grant(),
    lambda c: c.get(bytes(16)),
    lambda c: c.get_many([bytes(16)]),
    lambda c: c.exists("x"),
    lambda c: c.exists_many(["x"]),
    lambda c: c.locate_many(["x"]),
    lambda c: c.remove("x"),
    lambda c: c.remove_namespace(),
    lambda c: c.pin("x"),
    lambda c: c.unpin("x"),
    lambda c: c.change_replica(["x"], 1),
    lambda c: c.copy(["x"], to="a"),
    lambda c: c.move(["x"], to="a"),
    lambda c: c.prefetch(["x"]),
    lambda c: c.quotas(),
    lambda c: c.set_quota("x", 1),
    lambda c: c.allocate(10),
    lambda c: c.register(bytearray(10)),
]


def in_child(work: Callable[[], str]) -> str:
    """What `work` says in a forked child, which has 20 s."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(20)
            os.write(write, work().encode()[:4000])
        except BaseException as error:
            os.write(write, f"raised {error!r}".encode()[:4000])
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        said = told.read().decode()
    os.waitpid(pid, 0)
    return said


@pytest.mark.slow
async def test_a_client_that_was_made_before_a_fork_says_so_at_once() -> None:
    async with stores("a") as made:

        def use() -> None:
            config = ClientConfig(store=made.address, staging_mb=8, host="127.0.0.1", timeout_ms=15_000)
            with SyncStoreClient(config) as client:
                key = client.put(b"data", name="x")

                def child() -> str:
                    for call in CALLS:
                        try:
                            call(client)
                        except InvalidRequest as error:
                            if error.field != "client" or "forked" not in error.message:
                                return error.message
                        else:
                            return "no error"
                    client.close()
                    try:
                        SyncStoreClient(config)  # in which gRPC would never answer
                    except ConfigError as error:
                        return "all of them said so" if "forked" in error.message else error.message
                    return "a client in a child of one that has used gRPC"

                assert in_child(child) == "all of them said so"
                assert client.get(key) == client.get("x") == b"data", "the parent's goes on"
                assert client.put(b"more")

        await asyncio.to_thread(use)


async def test_an_asynchronous_client_that_was_made_before_a_fork_says_so_at_once() -> None:
    async with stores("a") as made, made.client() as client:
        await client.put(b"data", name="x")

        def child() -> str:
            work = client.get("x")
            try:
                work.send(None)
            except InvalidRequest as error:
                return error.message
            return "no error"

        assert "forked" in in_child(child)
        assert await client.get("x") == b"data"


# ── errors by what happened ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["room-7", "full-8", "a"])
async def test_the_limit_of_pins_and_a_full_node_are_told_apart_whatever_the_node_is_called(name: str) -> None:
    async with stores(name, memory_mb=8) as one, one.client(timeout_ms=5_000) as client:

        async def all_of(datas: list[bytes], **options: Any) -> None:
            for data in datas:
                await client.put(data, **options)

        with pytest.raises(PinLimit) as pinned:
            await all_of(values(1, *[MIB] * 8), pin=Pin.HARD)
        assert not pinned.value.retryable and pinned.value.field == "hard_pins"
        with pytest.raises(Overloaded) as full:
            await client.put(bytes(6 * MIB))
        assert not isinstance(full.value, PinLimit) and full.value.retryable and full.value.retry_after_ms


@pytest.mark.slow
async def test_a_put_that_is_not_done_in_time_is_deadline_passed() -> None:
    before = set(psutil.Process().children())
    async with stores("room-7") as made, made.client() as client:
        await client.put(b"warm")
        ranks = [child for child in psutil.Process().children() if child not in before]
        for rank in ranks:
            rank.suspend()
        try:
            with pytest.raises(DeadlinePassed):
                await client.put(bytes(5000), timeout_ms=600)
        finally:
            for rank in ranks:
                rank.resume()


# ── sizes ─────────────────────────────────────────────────────────────────────────────────────────


async def test_what_no_node_can_hold_is_refused_before_a_byte_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stores("a", memory_mb=8) as one, one.client() as client:
        touched: list[str] = []
        monkeypatch.setattr(naming, "content_key", lambda *args: touched.append("hashed"))
        monkeypatch.setattr(client._memory, "stage", lambda *args: touched.append("staged"))
        large = np.zeros(3 << 30, np.uint8)  # of which no page is there yet
        with pytest.raises(InvalidRequest, match=r"data: 3,221,225,472 bytes: .* the largest has 8,388,608") as caught:
            await client.put(large)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="3,221,225,472"):
            await client.put_many([b"small", large])  # type: ignore[list-item]
        assert caught.value.field == "data" and not touched


# ── a new leader ──────────────────────────────────────────────────────────────────────────────────


async def test_a_put_waits_for_the_nodes_that_a_new_leader_has_not_heard_yet() -> None:
    async with contextlib.AsyncExitStack() as stack:
        config = StoreConfig(heartbeat_interval_ms=100, lease_ms=60_000)
        master = await stack.enter_async_context(running(run_store, config))
        async with client_of(master.address) as client:
            put = asyncio.ensure_future(client.put(b"data", name="x"))
            moved = asyncio.ensure_future(client.copy([bytes(16)], to="a"))
            status = client._directory.status
            asked = 0

            async def counted(timeout_s: float) -> Any:
                nonlocal asked
                asked += 1
                return await status(timeout_s)

            client._directory.status = counted  # type: ignore[method-assign]

            async def often() -> bool:
                return asked > 5

            await until(often)
            assert not put.done() and not moved.done(), "the leader is young"
            node = PoolConfig(instance_id="a", store=master.address, memory_mb=8)
            async with running(pool.run, node):
                await put
                moved.cancel()
                assert await client.get("x") == b"data"


async def test_where_there_is_no_pool_node_a_put_says_so_as_soon_as_the_leader_knows() -> None:
    config = StoreConfig(heartbeat_interval_ms=100, lease_ms=300)
    async with running(run_store, config) as master, client_of(master.address) as client:
        with pytest.raises(Unavailable, match="there is no pool node: start one"):
            await client.put(b"data")


# ── addresses ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("store", "why"),
    [
        ("127.0.0.1:99999", "store='127.0.0.1:99999': its port '99999' is not in 1..65535"),
        ("127.0.0.1:0", "store='127.0.0.1:0': its port"),
        ("127.0.0.1:-1", "store='127.0.0.1:-1': its port"),
        ("127.0.0.1", "store='127.0.0.1': must be HOST:PORT, and has no port"),
        ("localhost", "store='localhost': must be HOST:PORT, and has no port"),
        (":7002", "store=':7002': must be HOST:PORT, and has no host"),
        ("http://127.0.0.1:7002", "store='http://127.0.0.1:7002': must be HOST:PORT, without a scheme"),
        ("a:1,b:x", "store='b:x': its port"),
        ("::1:7002", "store='::1:7002': an IPv6 address"),
        ("a b:7002", "store='a b:7002': its host"),
        (" , ", "store=' , ': names no address"),
    ],
)
def test_an_address_that_cannot_be_one_is_refused(store: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ClientConfig(store=store)
    assert caught.value.message.startswith(why) and caught.value.field == "store"


async def test_the_address_of_a_pool_node_is_not_that_of_a_master() -> None:
    async with stores("a") as made:
        address = made.nodes["a"].address
        async with client_of(address) as client:
            for call in (client.get("x"), client.put(b"data"), client.get(bytes(16))):
                with pytest.raises(ProtocolMismatch, match=f"store='{address}': what answers there is not") as caught:
                    await call
                assert caught.value.field == "store"


# ── arguments ─────────────────────────────────────────────────────────────────────────────────────

BAD: list[tuple[str, Callable[[StoreClient], Any]]] = [
    ("pin_ttl_ms=-5", lambda c: c.put(b"x", pin=Pin.SOFT, pin_ttl_ms=-5)),
    ("pin_ttl_ms=1.5", lambda c: c.put(b"x", pin_ttl_ms=1.5)),
    ("pin=7", lambda c: c.put(b"x", pin=7)),
    ("ttl_ms=-1", lambda c: c.pin("x", ttl_ms=-1)),
    ("ttl_ms=", lambda c: c.pin("x", ttl_ms=1 << 40)),
    ("replicas=-1", lambda c: c.change_replica(["x"], -1)),
    ("replicas=1000", lambda c: c.change_replica(["x"], 1000)),
    ("refs='one'", lambda c: c.get_many("one")),
    ("refs=b'1234567890123456'", lambda c: c.get_many(b"1234567890123456")),
    ("refs='one'", lambda c: c.exists_many("one")),
    ("refs='one'", lambda c: c.change_replica("one", 1)),
    ("refs='one'", lambda c: c.copy("one", to="a")),
    ("refs='one'", lambda c: c.move("one", to="a")),
    ("refs='one'", lambda c: c.prefetch("one")),
    ("refs=5", lambda c: c.get_many(5)),
    ("key=5", lambda c: c.get(5)),
    ("datas=b'abc'", lambda c: c.put_many(b"abc")),
    ("names='d'", lambda c: c.put_many([b"1"], names="d")),
    ("names='d': is there twice", lambda c: c.put_many([b"1", b"2"], names=["d", "d"])),
    ("names=1: 2 blocks", lambda c: c.put_many([b"1", b"2"], names=["d"])),
    ("keys=b'", lambda c: c.put_many([b"1"], keys=bytes(16))),
    ("key=", lambda c: c.put(b"1", key="short")),
    ("timeout_ms=nan", lambda c: c.get("x", timeout_ms=float("nan"))),
    ("timeout_ms=inf", lambda c: c.put(b"x", timeout_ms=float("inf"))),
    ("timeout_ms=-1", lambda c: c.remove("x", timeout_ms=-1)),
    ("timeout_ms='5'", lambda c: c.quotas(timeout_ms="5")),
    ("n=0", lambda c: c.grant(0)),
    ("n='x'", lambda c: c.grant("x")),
    ("target=None", lambda c: c.get_into("x", None)),
    ("target=bytearray", lambda c: c.get_into("x", bytearray(5))),
    ("targets=5", lambda c: c.get_many_into(["x"], 5)),
    ("targets=0: 1 blocks", lambda c: c.get_many_into(["x"], [])),
    ("to=5", lambda c: c.copy(["x"], to=5)),
    ("source=5", lambda c: c.move(["x"], to="a", source=5)),
    ("verify='no'", lambda c: c.get("x", verify="no")),
    ("replace=1", lambda c: c.put(b"x", name="n", replace=1)),
    ("hard=2", lambda c: c.change_replica(["x"], 1, hard=2)),
    ("policy='wait'", lambda c: c.prefetch(["x"], "wait")),
    ("blocks=-1", lambda c: c.set_quota("x", -1)),
    ("namespace=5", lambda c: c.set_quota(5, 1)),
    ("data: a block has at least one byte", lambda c: c.put(b"")),
    ("data='str'", lambda c: c.put("text")),
    ("data='Tensor'", lambda c: c.put(torch.zeros(3))),
    ("data='Tensor'", lambda c: c.put(torch.zeros(3).to_sparse())),
    ("data=.* contiguous", lambda c: c.put(np.zeros((4, 4))[:, 1])),
    ("data='ndarray': holds Python objects", lambda c: c.put(np.array([{}], object))),
]


async def test_bad_arguments_are_refused_with_their_field_and_value() -> None:
    async with client_of("127.0.0.1:1", timeout_ms=400) as client:
        for words, call in BAD:
            with pytest.raises(InvalidRequest, match=f"^{words}"):
                await call(client)
        with pytest.raises(InvalidRequest, match=r"^buffer=5"):
            client.unregister(5)  # type: ignore[arg-type]
        buffer = client.allocate(100)
        for start, nbytes in ((-1, 5), (0, 0), (50, 51), (1.5, 2), (None, 1)):
            with pytest.raises(InvalidRequest):
                buffer.span(start, nbytes)  # type: ignore[arg-type]
        for sparse in (torch.zeros(3).to_sparse(), torch.zeros(3, 3)[:, 1], b"read-only"):
            with pytest.raises(KvmeshError, match="buffer"):
                client.register(sparse)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("timeout_ms", float("nan")),
        ("timeout_ms", float("inf")),
        ("timeout_ms", -1),
        ("timeout_ms", True),
        ("put_stall_ms", 0),
        ("staging_mb", 1.5),
        ("namespace", 5),
        ("near", 1),
        ("store", None),
    ],
)
def test_bad_settings_are_refused_with_their_field_and_value(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        ClientConfig(**{field: value})
    assert caught.value.field == field


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=5), st.binary(max_size=17), st.floats()), max_size=3),
    st.sampled_from([Pin.SOFT, Policy.WAIT, {}, object(), np.zeros(3), torch.zeros(2).to_sparse(), memoryview(b"abc")]),
)
METHODS = [
    ("put", 1, ("key", "name", "replace", "pin", "pin_ttl_ms", "verify", "timeout_ms")),
    ("put_many", 1, ("keys", "names", "replace", "pin", "pin_ttl_ms", "verify", "timeout_ms")),
    ("put_from", 1, ("timeout_ms",)),
    ("put_many_from", 1, ("timeout_ms",)),
    ("get", 1, ("verify", "timeout_ms")),
    ("get_many", 1, ("verify", "timeout_ms")),
    ("get_into", 2, ("verify", "timeout_ms")),
    ("get_many_into", 2, ("timeout_ms",)),
    ("exists", 1, ("timeout_ms",)),
    ("exists_many", 1, ("timeout_ms",)),
    ("locate_many", 1, ("timeout_ms",)),
    ("remove", 2, ("timeout_ms",)),
    ("pin", 1, ("ttl_ms", "timeout_ms")),
    ("unpin", 1, ("timeout_ms",)),
    ("change_replica", 2, ("hard", "timeout_ms")),
    ("prefetch", 2, ("timeout_ms",)),
    ("copy", 1, ("to", "timeout_ms")),
    ("move", 1, ("to", "source", "timeout_ms")),
    ("replicas", 1, ("timeout_ms",)),
    ("grant", 1, ("timeout_ms",)),
    ("set_quota", 2, ("timeout_ms",)),
    ("quotas", 0, ("timeout_ms",)),
    ("allocate", 1, ()),
    ("register", 1, ()),
    ("unregister", 1, ()),
    ("content_key", 1, ()),
]


@pytest.mark.slow
async def test_whatever_is_handed_in_only_errors_of_ours_come_out() -> None:
    """Against a master that is not there, so each call ends in some error, or has nothing to do."""
    loop = asyncio.get_running_loop()
    async with client_of("127.0.0.1:1", timeout_ms=15) as client:

        @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.data())
        def hand_in(data: st.DataObject) -> None:
            name, count, options = data.draw(st.sampled_from(METHODS))
            args = [data.draw(ANYTHING) for _ in range(count)]
            more = {key: data.draw(ANYTHING) for key in options if data.draw(st.booleans())}
            more = {key: value for key, value in more.items() if key != "timeout_ms" or not _long(value)}

            async def call() -> None:
                try:
                    found = getattr(client, name)(*args, **more)
                    if asyncio.iscoroutine(found):
                        await found
                except (KvmeshError, TypeError):
                    pass

            asyncio.run_coroutine_threadsafe(call(), loop).result(60)

        await asyncio.to_thread(hand_in)


def _long(value: Any) -> bool:
    return isinstance(value, int | float) and value > 50


# ── the event loop ────────────────────────────────────────────────────────────────────────────────


async def test_large_values_are_hashed_and_copied_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.get_ident()
    hashed: dict[int, list[bool]] = {}
    copied: list[bool] = []

    def hash_(data: Any, namespace: str = "") -> bytes:
        hashed.setdefault(len(data), []).append(threading.get_ident() == here)
        return content_key(data, namespace)

    def move(to: Any, of: Any, nbytes: int) -> Any:
        copied.append(threading.get_ident() == here)
        return memmove(to, of, nbytes)

    memmove = memory.ctypes.memmove
    monkeypatch.setattr(naming, "content_key", hash_)
    async with stores("a", memory_mb=64) as one, one.client(transports="tcp") as client:
        small, large = values(4, 1000, 8 * MIB)
        keys = [await client.put(small), await client.put(large)]
        assert hashed == {1000: [True], 8 * MIB: [False]}, "a small one costs no thread"
        await client.put_many(values(5, *[100_000] * 20))
        assert hashed[100_000] == [False] * 20, "many small ones are many bytes"
        monkeypatch.setattr(memory.ctypes, "memmove", move)
        assert [await client.get(key) for key in keys] == [small, large]
        assert copied == [False]
        assert await client.get(keys[1], verify=True) == large
        assert await client.put(large, verify=True) == keys[1]


# ── frozen nodes ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.mesh
async def test_a_put_passes_a_frozen_node_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with contextlib.AsyncExitStack() as stack:
        store, nodes = await stack.enter_async_context(processes(tmp_path, "a", "b", "c"))
        async with client_of(store, node_id="machine-a", near=False) as client:
            await until(lambda: pools(client, 3))
            assert (await client.put_many([b"warm"]))[0].store_id == "a", "the nearest"
            nodes["a"].signal(signal.SIGSTOP, nodes["a"].pids())
            asked: list[str] = []
            at = client._writer._at

            async def noted(node: Any, *more: Any) -> None:
                asked.append(node.store_id)
                await at(node, *more)

            monkeypatch.setattr(client._writer, "_at", noted)
            try:
                started = time.monotonic()
                (put,) = await client.put_many([b"data"], names=["x"])
                assert put.held and asked[0] == "a" and len(asked) == 2, asked
                assert time.monotonic() - started < 5, "not the whole of read_within_ms and a second"
                assert await client.get("x") == b"data"
                asked.clear()
                for i in range(5):
                    assert (await client.put_many([b"more %d" % i]))[0].held
                assert "a" not in asked and len(asked) == 5, asked
            finally:
                nodes["a"].signal(signal.SIGCONT, nodes["a"].pids())
