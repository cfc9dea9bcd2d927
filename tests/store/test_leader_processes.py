"""Three master processes and a real Redis: the leader is killed, frozen, and loses its Redis."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh.cli.up.plan import Ports
from kvmesh.errors import KvmeshError, NotLeader
from kvmesh.kvcache.announce import Announcer
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.membership.announcing import SERVICE, Announcing
from kvmesh.membership.registrar import Registrar
from kvmesh.rpc import channels, status
from kvmesh.rpc.leader_client import LeaderClient, LeaderTracker
from kvmesh.rpc.pb import common_pb2, store_pb2, store_pb2_grpc
from kvmesh.rpc.process import PARENT_ENV
from kvmesh.services.conductor import domain
from kvmesh.services.conductor.fleet.watch import StoreWatch
from tests.support.redis_server import RedisServer, needs_redis, redis_server
from tests.support.services import until
from tests.support.store.mesh import keys

pytestmark = needs_redis

LEASE_MS = 800
SECONDS = 10.0


class MasterProcess:
    def __init__(self, name: str, folder: Path, redis: str) -> None:
        self.port = Ports().take()
        self.address = f"127.0.0.1:{self.port}"
        self._ready = folder / f"{name}.json"
        self._log = folder / f"{name}.log"
        self._redis = redis
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._ready.unlink(missing_ok=True)
        flags = {
            "port": self.port,
            "redis": self._redis,
            "mesh": "tested",
            "leader-lease-ms": LEASE_MS,
            "heartbeat-interval-ms": 50,
            "lease-ms": 1000,
            "ready-file": self._ready,
        }
        argv = [sys.executable, "-m", "kvmesh.cli", "serve", "store", *(f"--{k}={v}" for k, v in flags.items())]
        with self._log.open("ab") as log:
            env = {**os.environ, PARENT_ENV: str(os.getpid())}
            self._process = subprocess.Popen(argv, stdout=log, stderr=log, env=env)

    def wait(self) -> None:
        deadline = time.monotonic() + 60
        while not (self._ready.exists() and json.loads(self._ready.read_text() or "{}")):
            assert self._process is not None and self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait(10)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
            self._process.kill()
            self._process.wait(10)


class Cluster:
    def __init__(self, folder: Path, redis: RedisServer) -> None:
        self.redis = redis
        self.masters = [MasterProcess(f"master-{i}", folder, redis.url) for i in range(3)]

    @property
    def addresses(self) -> str:
        return ",".join(master.address for master in self.masters)

    def at(self, address: str) -> MasterProcess:
        [found] = [master for master in self.masters if master.address == address]
        return found

    async def statuses(self) -> dict[str, store_pb2.GetStoreStatusResponse]:
        """Of those that answer."""
        found = {}
        for master in self.masters:
            with contextlib.suppress(grpc.RpcError):
                found[master.address] = await ask(master.address, "GetStatus", store_pb2.GetStoreStatusRequest(), 0.5)
        return found

    async def leader(self, above: int = 0) -> tuple[MasterProcess, int]:
        """Who leads with a term above `above`."""

        async def look() -> Any:
            return [(a, s.term) for a, s in (await self.statuses()).items() if s.leading and s.term > above]

        [(address, term)] = await until(look)
        return self.at(address), term


async def ask(address: str, method: str, request: Any, timeout_s: float = SECONDS) -> Any:
    async with channels.connect(address) as channel:
        return await getattr(store_pb2_grpc.StoreMasterStub(channel), method)(request, timeout=timeout_s)


async def refused(address: str, method: str, request: Any) -> KvmeshError:
    with pytest.raises(grpc.RpcError) as caught:
        await ask(address, method, request)
    return status.from_rpc_error(caught.value)


async def rest(stream: Any) -> list[store_pb2.StoreEvent]:
    """What still comes, until the stream breaks."""
    found: list[store_pb2.StoreEvent] = []
    with contextlib.suppress(grpc.RpcError):
        while (message := await asyncio.wait_for(stream.read(), SECONDS)) is not grpc.aio.EOF:
            found.extend(message.events)
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("masters")
    with redis_server(folder) as redis:
        made = Cluster(folder, redis)
        try:
            for master in made.masters:
                master.start()
            for master in made.masters:
                master.wait()
            yield made
        finally:
            for master in made.masters:
                master.stop()


class Node:
    """What a real one does towards masters: joins, beats, announces."""

    def __init__(self, name: str, addresses: str) -> None:
        self.name = name
        ref = common_pb2.InstanceRef(instance_id=name, address="127.0.0.1:9", incarnation=random.getrandbits(62) | 1)
        self.store = NodeStore(5000)
        self.registrar = Registrar.pool_node(ref, "here", addresses, store_pb2.StoreUsage)
        self.announcing = Announcing(
            Announcer(name, ref.incarnation, self.store),
            self.registrar.masters,
            0.01,
            lambda: self.registrar.registered["store"],
            self.registrar.urge_store,
        )

    def seal(self, new: list[bytes]) -> None:
        for key, extent in zip(new, self.store.begin(new), strict=True):
            assert extent is not None
            self.store.seal(key)


class Mesh:
    """Two nodes and a conductor's watch."""

    def __init__(self, addresses: str) -> None:
        self.nodes = [Node("a", addresses), Node("b", addresses)]
        self.nodes[0].seal(keys(3000))
        self.nodes[1].seal(keys(3000, salt=1))
        self.caller = LeaderClient(SERVICE, LeaderTracker(addresses))
        self.events: list[domain.Event] = []
        self.watch = StoreWatch(addresses, self.events.append, silence_s=1.0, rng=random.Random(0))

    async def holders(self, wanted: list[bytes]) -> list[list[str]]:
        request = store_pb2.LookupRequest(keys=b"".join(wanted))
        answer = await self.caller.call("Lookup", request, SECONDS)
        return [list(found.store_ids) for found in answer.holders]

    async def whole(self) -> None:
        """Somebody leads, and knows of every block of every node; the watch has heard of both nodes from it."""
        wanted = [key for node in self.nodes for key in sorted(node.store.keys())]
        told = [[node.name] for node in self.nodes for _ in range(len(node.store.keys()))]

        async def known() -> bool:
            return [
                found for i in range(0, len(wanted), 4000) for found in await self.holders(wanted[i : i + 4000])
            ] == told

        await until(known)

        async def followed() -> bool:
            resets = [e for e in self.events if isinstance(e, domain.MembersReset)]
            return bool(resets) and self.watch.status == "connected"

        await until(followed)


@asynccontextmanager
async def mesh(cluster: Cluster) -> AsyncIterator[Mesh]:
    made = Mesh(cluster.addresses)
    stop = asyncio.Event()
    tasks = [asyncio.create_task(node.registrar.run(stop)) for node in made.nodes]
    tasks += [asyncio.create_task(made.watch.run(stop))]
    loops = [asyncio.create_task(node.announcing.run()) for node in made.nodes]
    try:
        yield made
    finally:
        stop.set()
        for task in loops:
            task.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await asyncio.wait_for(asyncio.gather(*tasks), 20)
        await made.caller.close()


async def test_a_killed_leader_is_followed_by_another_that_nodes_rebuild(cluster: Cluster) -> None:
    async with mesh(cluster) as made:
        first, term = await cluster.leader()
        await made.whole()
        others = [master.address for master in cluster.masters if master is not first]

        async def all_name_it() -> bool:  # one that has not been able to ask Redis for a lease names nobody
            told = await cluster.statuses()
            assert [(told[a].leading, told[a].leader, told[a].term) for a in others] == [
                (False, first.address, term)
            ] * 2
            errors = [await refused(a, "Lookup", store_pb2.LookupRequest(keys=keys(1)[0])) for a in others]
            return all(isinstance(error, NotLeader) and error.leader == first.address for error in errors)

        await until(all_name_it)
        first.signal(signal.SIGKILL)
        second, higher = await cluster.leader(above=term)
        assert second is not first and higher > term
        await made.whole()

        async def rebuilt() -> bool:
            told = (await cluster.statuses())[second.address]
            return not told.rebuilding and {s.member.store_id: s.blocks for s in told.stores} == {"a": 3000, "b": 3000}

        await until(rebuilt)
        assert all(node.registrar.masters.terms.highest == higher for node in made.nodes)
        assert not [e for e in made.events if isinstance(e, domain.MemberGone)], "nobody was declared dead"
        first.start()
        await asyncio.to_thread(first.wait)

        async def stands_by() -> bool:
            told = (await cluster.statuses())[first.address]
            return not told.leading and told.leader == second.address

        await until(stands_by)
        assert (await cluster.leader()) == (second, higher)


@pytest.mark.slow
async def test_a_frozen_leader_says_nothing_more_when_it_wakes(cluster: Cluster) -> None:
    async with mesh(cluster) as made:
        first, term = await cluster.leader()
        await made.whole()
        # Callers and a watcher that it has already, and whose calls wait in its sockets while it is frozen.
        async with channels.connect(first.address) as channel:
            stub: Any = store_pb2_grpc.StoreMasterStub(channel)
            stream = stub.Watch(store_pb2.WatchRequest())
            assert (await stream.read()).snapshot
            first.signal(signal.SIGSTOP)
            wanted = b"".join(keys(2))
            calls = [
                stub.Lookup(store_pb2.LookupRequest(keys=wanted), timeout=60),
                stub.ListMembers(store_pb2.ListMembersRequest(), timeout=60),
                stub.Find(store_pb2.FindRequest(keys=wanted), timeout=60),
                stub.Grant(store_pb2.GrantRequest(count=1), timeout=60),
                stub.Remove(store_pb2.RemoveRequest(keys=wanted), timeout=60),
            ]
            second, higher = await cluster.leader(above=term)
            assert second is not first
            await made.whole()
            first.signal(signal.SIGCONT)
            for call in calls:
                with pytest.raises(grpc.RpcError) as caught:
                    await call
                assert isinstance(status.from_rpc_error(caught.value), NotLeader)
            assert not [e for e in await rest(stream) if e.member.change == store_pb2.MEMBER_CHANGE_DIED]
        assert all(holders for holders in await made.holders(keys(2))), "its removal was not carried out"
        assert (await cluster.leader()) == (second, higher)
        assert not [e for e in made.events if isinstance(e, domain.MemberGone)]


@pytest.mark.slow
async def test_without_redis_the_leader_ends_with_its_lease_and_terms_grow_over_a_redis_that_forgot(
    cluster: Cluster,
) -> None:
    async with mesh(cluster) as made:
        _, term = await cluster.leader()
        await made.whole()
        cluster.redis.kill()

        async def nobody_leads() -> bool:
            told = await cluster.statuses()
            return len(told) == 3 and not any(s.leading or s.leader for s in told.values())

        await until(nobody_leads)
        for master in cluster.masters:
            error = await refused(master.address, "Lookup", store_pb2.LookupRequest(keys=keys(1)[0]))
            assert isinstance(error, NotLeader) and not error.leader
        cluster.redis.start()
        await cluster.leader(above=term)
        await made.whole()


@pytest.mark.slow
async def test_a_redis_that_restarts_within_the_lease_is_not_noticed(cluster: Cluster) -> None:
    async with mesh(cluster) as made:
        before = await cluster.leader()
        await made.whole()
        cluster.redis.kill()
        cluster.redis.start()
        deadline = time.monotonic() + 2.5 * LEASE_MS / 1000  # until after the lease that it had
        while time.monotonic() < deadline:
            assert (await cluster.leader())[0] is not None
            await made.holders(keys(1))
        after = await cluster.leader()
        # On a slow machine the restart may have taken the lease's time.
        assert after == before or after[1] > before[1]
        await made.whole()
