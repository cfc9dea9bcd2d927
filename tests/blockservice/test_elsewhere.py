"""Blocks of which others have copies go before those that nobody else has: real nodes, a real master."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kvmesh.blockservice import replica_tracker as elsewhere
from kvmesh.blockservice.replica_tracker import ReplicaTracker
from kvmesh.kvcache.size_classes import BYTES
from kvmesh.pool.partitions import PoolPartitions
from kvmesh.rpc import channels
from kvmesh.rpc.leader_client import LeaderTracker
from kvmesh.rpc.pb import store_pb2, store_pb2_grpc
from kvmesh.services.store import main
from kvmesh.services.store.config import StoreConfig
from tests.support.nodes import Bench, Node, bench, keys_of, node, until
from tests.support.services import running
from tests.support.services import until as until_so
from tests.support.store.mesh import Node as Announcer

MIB = 1 << 20
MASTER = StoreConfig(heartbeat_interval_ms=100, lease_ms=5_000)


async def known(master: str, keys: list[bytes], holders: int) -> bool:
    async with channels.connect(master) as channel:
        request = store_pb2.LookupRequest(keys=b"".join(keys))
        answer = await store_pb2_grpc.StoreMasterStub(channel).Lookup(request, timeout=30)
    return all(len(one.store_ids) == holders for one in answer.holders)


async def copied(desk: Bench, a: Node, b: Node, keys: list[bytes], master: str) -> None:
    """From a to b, and the master knows it."""
    await b.ended(b.pull(keys, [a.range_of(0, len(keys))]))
    await b.check(desk, keys)
    await until_so(lambda: known(master, keys, 2))


def asker(
    a: Node,
    master: str,
    clock: Callable[[], float] = time.monotonic,
    below: Callable[[str, bytes], bool] = lambda layout, key: False,
) -> ReplicaTracker:
    assert a.blocks is not None
    return ReplicaTracker(a.name, a.blocks.partitions, below, LeaderTracker(master), lambda: True, clock)


async def test_what_others_have_goes_first() -> None:
    """32 extents, 24 blocks, the hotter half of which has copies at another node. Fourteen new ones need the places of
    some: those of shared ones, though the others are colder."""
    async with running(main.run, MASTER) as service, bench() as desk, node("a", total=32) as a, node("b") as b:
        for each in (a, b):
            each.join(service.address)
        sole, shared = keys_of(*range(12)), keys_of(*range(100, 112))
        await a.fill(desk, shared)
        await until_so(lambda: known(service.address, shared, 1))
        await copied(desk, a, b, shared, service.address)
        await a.fill(desk, sole)
        a.store.touch(shared)
        await until(lambda: set(a.store.coldest(12)) == set(shared))
        new = keys_of(*range(200, 214))
        await a.fill(desk, new)
        assert all(map(a.store.holds, [*sole, *new]))
        assert sum(map(a.store.holds, shared)) <= 6
        await a.check(desk, sole)


async def test_when_the_copies_are_gone_age_decides_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elsewhere, "INTERVAL_S", 1000.0)  # the node does not ask by itself
    async with running(main.run, MASTER) as service, bench() as desk, node("a", total=32) as a:
        a.join(service.address)
        sole, shared = keys_of(*range(12)), keys_of(*range(100, 112))
        now = [0.0]
        made = asker(a, service.address, lambda: now[0])
        try:
            async with node("b") as b:
                b.join(service.address)
                await a.fill(desk, [*sole, *shared])
                await until_so(lambda: known(service.address, [*sole, *shared], 1))
                await copied(desk, a, b, shared, service.address)
                assert await made.turn()
                assert set(a.store.coldest(12)) == set(shared)
            await until_so(lambda: known(service.address, shared, 1))
            now[0] += 1.0
            assert await made.turn()
            assert set(a.store.coldest(12)) == set(shared), "not asked about again so soon"
            now[0] += 100.0
            assert await made.turn()
            assert set(a.store.coldest(12)) == set(sole)
        finally:
            await made._caller.close()


async def test_a_copy_in_its_own_lower_tier_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """That nobody else has a block does not undo what the node knows of its own SSD."""
    monkeypatch.setattr(elsewhere, "INTERVAL_S", 1000.0)
    async with running(main.run, MASTER) as service, bench() as desk, node("a", total=10) as a:
        a.join(service.address)
        keys = keys_of(*range(8))
        await a.fill(desk, keys)
        await until_so(lambda: known(service.address, keys, 1))
        a.store.replicated(keys[4:])
        assert set(a.store.coldest(4)) == set(keys[4:])
        made = asker(a, service.address, below=lambda layout, key: key in keys[6:])
        assert await made.turn()
        assert set(a.store.coldest(2)) == set(keys[6:])
        await made._caller.close()


async def test_whole_runs_of_a_pool_go_first_when_others_have_all_that_is_in_them() -> None:
    """16 MiB in runs of 256 KiB, four blocks each; the colder half nobody else has."""
    async with running(main.run, MASTER) as service, channels.connect(service.address) as channel:
        made = PoolPartitions(0, 16 * MIB, high_percent=95, low_percent=90, lease_seed=1)
        sole, shared = keys_of(*range(96)), keys_of(*range(100, 220))
        seal_in(made, [*sole, *shared])
        a, b = Announcer(channel, "a"), Announcer(channel, "b")
        for each, keys in ((a, [*sole, *shared]), (b, shared[:-2])):
            await each.join()
            each.seal(keys)
            await each.announce()
        asking = ReplicaTracker("a", made, lambda layout, key: False, LeaderTracker(service.address), lambda: True)
        assert await asking.turn()
        await asking._caller.close()
        seal_in(made, keys_of(*range(300, 400)))
        (partition,) = made.all()
        assert all(map(partition.store.holds, sole))
        assert all(map(partition.store.holds, shared[-4:])), "nobody else has two of these four"
        assert sum(map(partition.store.holds, shared)) < 60


def seal_in(made: PoolPartitions, keys: list[bytes]) -> None:
    for key in keys:
        partition = made.room(BYTES, 65_536, 1)
        assert partition.store.begin([key]) != [None]
        partition.store.seal(key)
        made.settle()


async def test_a_master_that_does_not_answer_changes_nothing_and_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bench() as desk, node("a", total=8) as a:
        keys = keys_of(*range(8))
        await a.fill(desk, keys)
        before = a.store.coldest(8)
        made = asker(a, "127.0.0.1:1")
        monkeypatch.setattr(elsewhere, "CALL_S", 0.3)
        assert not await made.turn()
        assert a.store.coldest(8) == before
        assert made._known.choose(before, 0.0) == before
        await made._caller.close()


async def test_with_room_left_nobody_is_asked() -> None:
    async with bench() as desk, node("a", total=32) as a:
        await a.fill(desk, keys_of(*range(16)))
        made = asker(a, "127.0.0.1:1")
        assert await made.turn(), "it would have failed"
        await made._caller.close()
