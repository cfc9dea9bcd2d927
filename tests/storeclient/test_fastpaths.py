"""The client through doors: real masters and pool nodes, every byte compared, and what happens when a node ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from kvmesh.blockservice import servicer as node_doors
from kvmesh.blockservice.peers import ways
from kvmesh.errors import ConfigError, DeadlinePassed, KvmeshError, Unavailable
from kvmesh.pool import pool
from kvmesh.pool.config import PoolConfig
from kvmesh.rpc import channels, security
from kvmesh.rpc.authorisation import ALL_IDENTITIES, identities
from kvmesh.rpc.certificates import make_role_certificates
from kvmesh.rpc.fastpath.client import Way
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import blocks_pb2_grpc as pb_grpc
from kvmesh.rpc.security import Security
from kvmesh.storeclient import StoreClient
from kvmesh.storeclient.config import ClientConfig
from kvmesh.transfer.segment import machine_id, network_id
from tests.support.services import running, until
from tests.support.store_clients import MIB, Stores, stores, values
from tests.support.threads import in_thread

SIZES = (1, 100, 4096, 70_000, MIB + 17)


@pytest.fixture(scope="module")
def two() -> Iterator[Stores]:
    with in_thread("a", "b") as made:
        yield made


def door_of(client: StoreClient, address: str) -> Way | None:
    """The way that calls to the node at this address go now; None: over gRPC."""
    peer = client._peers._peers.get(address)
    if peer is None or not peer.calls.by_door:
        return None
    assert peer.calls._fast_path is not None and peer.calls._fast_path._transport is not None
    sock = peer.calls._fast_path._transport.get_extra_info("socket")
    name = sock.getpeername()
    return "@" + name[1:].decode() if isinstance(name, bytes) else tuple(name[:2])


async def through_doors(client: StoreClient, *addresses: str) -> None:
    """Say something to each of them until it goes through a door."""

    async def asked() -> bool:
        for address in addresses:
            async with client._peers.use(address) as peer:
                with contextlib.suppress(KvmeshError):
                    await peer.call("GetStore", pb.GetNodeStoreRequest(), 5.0)
        return all(door_of(client, address) for address in addresses)

    await until(asked)


@pytest.mark.parametrize(("transports", "kind"), [("shm,tcp", str), ("tcp", tuple)])
async def test_what_is_put_is_got_through_doors(two: Stores, transports: str, kind: type) -> None:
    datas = values(len(transports) + 50, *SIZES)
    addresses = [node.address for node in two.nodes.values()]
    async with two.client(transports=transports) as writer, two.client(transports=transports) as reader:
        await through_doors(writer, *addresses)
        await through_doors(reader, *addresses)
        puts = await writer.put_many(datas, verify=True)
        assert all(one.held for one in puts), puts
        for one, data in zip(puts, datas, strict=True):
            await until(lambda key=one.key: reader.exists(key))  # type: ignore[misc]
            assert await reader.get(one.key, verify=True) == data
        for one in puts:
            assert await writer.pin(one.key, ttl_ms=60_000) == [1]
        assert [isinstance(door_of(reader, address), kind) for address in addresses] == [True, True]


async def test_a_node_that_stops_is_left_for_the_other() -> None:
    """What was sent to it is refused or lost, and asked of the next one: nobody hears of it."""
    async with stores("a", "b") as made, made.client(placement="random") as client:
        await through_doors(client, *(node.address for node in made.nodes.values()))
        datas = values(4, *[50_000] * 8)
        assert all(one.held for one in await client.put_many(datas))
        gone = made.nodes["a"].address
        await made.nodes["a"].stop()
        assert door_of(client, gone) is None
        puts = await client.put_many(values(5, *[50_000] * 8))
        assert {one.store_id for one in puts} == {"b"}, puts


# ── real processes ───────────────────────────────────────────────────────────────────────────────


@contextlib.asynccontextmanager
async def served(folder: Path, name: str, *flags: str) -> AsyncIterator[tuple[str, subprocess.Popen[bytes]]]:
    """`kvmesh serve NAME`: its address, and its process, which may be ended earlier."""
    ready = folder / f"{name}-{len(os.listdir(folder))}.json"
    argv = [sys.executable, "-m", "kvmesh.cli", "serve", name, "--ready-file", str(ready), *flags]
    process = await asyncio.to_thread(subprocess.Popen, [*argv, "--log-level", "error"], stdout=subprocess.DEVNULL)

    async def there() -> bool:
        assert process.poll() is None, f"kvmesh serve {name} has ended"
        return ready.exists() and bool(ready.read_text())

    try:
        await until(there, 60)
        yield str(json.loads(ready.read_text())["address"]), process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        await asyncio.to_thread(process.wait, 20)


@pytest.mark.slow
async def test_a_frozen_node_and_one_that_is_killed(tmp_path: Path) -> None:
    """Over its door as over gRPC: no answer in time, another try when it wakes; another life is met afresh."""
    (data,) = values(7, 300_000)
    async with served(tmp_path, "store", "--heartbeat-interval-ms=100", "--lease-ms=60000") as (master, _):
        flags = (f"--store={master}", "--memory-mb=16", "--instance-id=p")
        async with StoreClient(ClientConfig(store=master, timeout_ms=20_000, node_id="far")) as client:
            async with served(tmp_path, "pool", *flags) as (address, process):
                await until(lambda: _put(client, data))
                await through_doors(client, address)
                assert isinstance(door_of(client, address), str)
                process.send_signal(signal.SIGSTOP)
                with pytest.raises((Unavailable, DeadlinePassed)):
                    await client.get(key_of(client, data), verify=True, timeout_ms=400)
                process.send_signal(signal.SIGCONT)
                await until(lambda: _got(client, data))
                await through_doors(client, address)
                process.kill()
                await asyncio.to_thread(process.wait, 20)
                assert not await _got(client, data)
                assert door_of(client, address) is None
            again = f"--port={address.rpartition(':')[2]}"
            async with served(tmp_path, "pool", *flags, again) as (same, _):
                assert same == address
                await until(lambda: _put(client, data))
                assert await _got(client, data)
                await through_doors(client, address)
                assert await client.get(key_of(client, data), verify=True) == data


def key_of(client: StoreClient, data: bytes) -> bytes:
    return client.content_key(data)


async def _put(client: StoreClient, data: bytes) -> bool:
    with contextlib.suppress(KvmeshError):
        return bool(await client.put(data, timeout_ms=2_000))
    return False


async def _got(client: StoreClient, data: bytes) -> bool:
    with contextlib.suppress(KvmeshError):
        return await client.get(key_of(client, data), verify=True, timeout_ms=2_000) == data
    return False


# ── where doors are ──────────────────────────────────────────────────────────────────────────────


def test_ways_to_a_door() -> None:
    told = pb.DoorsResponse(machine=machine_id(), network=network_id(), calls_path="@here", calls_port=7)
    assert ways(told, "10.0.0.1:70", True) == ("@here", ("10.0.0.1", 7))
    assert ways(told, "[fe80::1]:70", False) == (("fe80::1", 7),)
    for there in (
        pb.DoorsResponse(machine="other", network=network_id(), calls_path="@there"),
        pb.DoorsResponse(machine=machine_id(), network="other", calls_path="@there"),
        pb.DoorsResponse(machine=machine_id(), network=network_id(), calls_path="/a/file"),
    ):
        assert ways(there, "10.0.0.1:70", True) == ()


async def told_by(address: str) -> pb.DoorsResponse:
    async with channels.connect(address) as channel:
        return await pb_grpc.NodeStoreStub(channel).Doors(pb.DoorsRequest(), timeout=10)


async def test_what_a_node_tells_of_its_doors(two: Stores) -> None:
    told = await told_by(two.nodes["a"].address)
    assert told.incarnation and told.calls_port and told.calls_path.startswith("@kvmesh-door-")
    assert (told.machine, told.network) == (machine_id(), network_id())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for asked, expected in ((-1, 0), (port, port)):
        config = PoolConfig(instance_id="c", store=two.address, memory_mb=8, door_port=asked)
        async with running(pool.run, config) as node:
            told = await told_by(node.address)
            assert told.calls_port == expected and told.calls_path
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = PoolConfig(instance_id="c", store=two.address, memory_mb=8, door_port=port)
        with pytest.raises(ConfigError, match=f"door_port={port}"):
            async with running(pool.run, config):
                pass


async def test_with_certificates_doors_and_the_index_take_whom_grpc_knows(tmp_path: Path) -> None:
    """A ticket over gRPC opens the calls' socket, another one the index's. Whose role may not ask gets none."""
    wanted = {"all": ALL_IDENTITIES, "gateway": identities(["gateway"])}
    tls = {who: Security.load(one.files) for who, one in make_role_certificates(tmp_path, wanted).items()}
    before = security.use(tls["all"])
    try:
        with in_thread("a") as made:
            address = made.nodes["a"].address
            async with made.client() as client:
                await through_doors(client, address)
                key = await client.put(b"x" * 5000)
                await until(lambda: client.exists(key))
                assert await client.get(key) == b"x" * 5000

                async def mapped() -> bool:
                    return client._reader.local.nodes == 1

                await until(mapped)
            async with channels.connect(address, tls=tls["gateway"]) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await pb_grpc.NodeStoreStub(channel).Doors(pb.DoorsRequest(), timeout=10)
                assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    finally:
        security.use(before)


async def test_with_tls_there_is_no_door_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.rpc.security.current", lambda: Security(cert=b"a certificate", key=b"a key"))
    doors = node_doors.FastPathServers(pb_grpc.NodeStoreServicer, 5)  # type: ignore[arg-type]
    try:
        await doors.open("127.0.0.1", 0)
        assert doors.describe(None).calls_port == 0 and doors.describe(None).calls_path
    finally:
        await doors.close()
    assert not doors.describe(None).calls_path
