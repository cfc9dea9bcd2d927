"""Gets without a lease: nodes that die, freeze and come back, and readers who are not near. Real processes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from kvmesh.errors import KvmeshError
from kvmesh.kvcache import shared_index
from kvmesh.services.store.config import StoreConfig
from kvmesh.services.store.main import run as run_store
from kvmesh.storeclient import ClientConfig, StoreClient
from tests.chaos.network import Loopback
from tests.chaos.processes import PORTS, Process, service
from tests.storeclient.test_near import hits, near_by
from tests.support.services import running, until
from tests.support.store_clients import MIB, Stores, values
from tests.support.threads import in_thread

pytestmark = pytest.mark.skipif(not shared_index.SUPPORTED, reason="rests on x86-64's order of loads and stores")


@pytest.fixture(scope="module")
def one() -> Iterator[Stores]:
    with in_thread("a") as made:
        yield made


@contextlib.asynccontextmanager
async def process(folder: Path, **flags: object) -> AsyncIterator[tuple[str, Process]]:
    """The master's address, and a pool node that can be killed."""
    config = StoreConfig(heartbeat_interval_ms=100, lease_ms=3_000)
    async with running(run_store, config) as master:
        told = {"instance_id": "a", "store": master.address, "memory_mb": 32, "announce_ms": 5, **flags}
        node = service("pool", "a", Loopback(), PORTS.take(), folder, told)
        try:
            node.start()
            await node.ready()
            yield master.address, node
        finally:
            node.end()


def _client(store: str) -> StoreClient:
    return StoreClient(ClientConfig(store=store, staging_mb=8, node_id="far", timeout_ms=15_000))


async def _put(client: StoreClient, datas: Sequence[bytes]) -> list[bytes]:
    async def done() -> list[bytes]:
        with contextlib.suppress(KvmeshError):  # the master may not know the node yet
            puts = await client.put_many(datas)
            return [put.key for put in puts if put.held]
        return []

    keys: list[bytes] = await until(done)
    assert len(keys) == len(datas)
    return keys


@pytest.mark.slow
async def test_a_frozen_node_is_not_believed_for_long_and_a_dead_one_not_at_all(tmp_path: Path) -> None:
    datas = values(11, 50_000, 3 * MIB)
    async with process(tmp_path) as (store, node), _client(store) as client:
        keys = await _put(client, datas)
        await near_by(client)
        target = client.allocate(4 * MIB).span()

        async def here() -> bool:
            return client._reader.local.plan(keys, None) is not None

        async def not_here() -> bool:
            return not await here()

        front = node.pids()[:1]
        node.signal(signal.SIGSTOP, front)
        assert [got.data for got in await client.get_many(keys)] == datas, "they are what they are"
        await until(not_here)
        node.signal(signal.SIGCONT, front)
        await until(here)
        assert (await client.get_into(keys[1], target)).here and bytes(target.memory[: 3 * MIB]) == datas[1]
        plan = client._reader.local.plan(keys, None)
        assert plan is not None
        await node.kill()
        before = hits(client)
        assert client._reader.local.read_here(plan) == [None, None], "nothing else of it counts from its end on"
        with contextlib.suppress(KvmeshError):
            assert await client.get(keys[0], timeout_ms=500) is None
        assert hits(client) == before
        await near_by(client, 0)


@pytest.mark.slow
async def test_a_node_that_comes_back_with_its_memory_has_a_new_index(tmp_path: Path) -> None:
    folder = Path(f"/dev/shm/kvmesh-near-{os.getpid()}")
    datas = values(12, 50_000, 200_000)
    try:
        async with (
            process(tmp_path, warm_segment=folder, store_lease_ms=200) as (store, node),
            _client(store) as client,
        ):
            keys = await _put(client, datas)
            await near_by(client)
            assert [got.data for got in await client.get_many(keys)] == datas
            await node.kill()
            node.start()
            await node.ready()

            async def again() -> bool:
                before = hits(client)
                with contextlib.suppress(KvmeshError):
                    got = await client.get_many(keys, timeout_ms=1000)
                    assert all(one.data in (None, data) for one, data in zip(got, datas, strict=True))
                return hits(client) == before + 2

            await until(again)
            await client.remove(keys[0])
            assert await client.get(keys[0]) is None and await client.get(keys[1]) == datas[1]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


READS = """
import asyncio, hashlib, sys
from kvmesh.storeclient import ClientConfig, StoreClient

async def main(store, key):
    async with StoreClient(ClientConfig(store=store, staging_mb=4, node_id="far")) as client:
        for _ in range(20):
            data = await client.get(bytes.fromhex(key))
            await asyncio.sleep(0.02)
        print(hashlib.sha256(data).hexdigest(), client.counters()["near_hits"])

asyncio.run(main(*sys.argv[1:]))
"""


def possible(inside: Sequence[str]) -> bool:
    try:
        subprocess.run([*inside, sys.executable, "-c", "import kvmesh"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


@pytest.mark.parametrize("who", ["same", "another user", "another user namespace"])
@pytest.mark.slow
async def test_others_of_this_machine_read_the_usual_way(one: Stores, who: str) -> None:
    data = values(13, 200_000)[0]
    async with one.client() as client:
        key = await client.put(data)
    inside = {
        "same": [],
        "another user": ["setpriv", "--reuid=65534", "--clear-groups"],
        "another user namespace": ["unshare", "--user", "--map-current-user"],
    }[who]
    if not possible(inside):
        pytest.skip(f"{' '.join(inside)} fails here: it needs root, util-linux and user namespaces")
    argv = [*inside, sys.executable, "-c", READS, one.address, key.hex()]
    ran = await asyncio.create_subprocess_exec(
        *argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "."}
    )
    said, complaints = await asyncio.wait_for(ran.communicate(), 30)
    assert b"never retrieved" not in complaints and b"Traceback" not in complaints, complaints.decode()
    digest, near_hits = said.split()
    assert digest.decode() == hashlib.sha256(data).hexdigest()
    assert (int(near_hits) > 0) is (who == "same")
