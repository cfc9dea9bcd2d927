"""The SSD tier of a node: real rank processes, real folders, and what front and readers make of them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvmesh.blockservice.tiers.parts import TierSettings
from kvmesh.errors import ConfigError
from kvmesh.kvcache.sources import PullJob
from kvmesh.kvcache.tiers import Tier
from kvmesh.pool import pool
from kvmesh.pool.config import PoolConfig
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import store_pb2 as pb_store
from tests.pool.test_pool import Master, ask, master, of_pool
from tests.support.nodes import LAYOUT, SHARD, Bench, Node, bench, keys_of, node, stub, until
from tests.support.putting import Caller, pool_and_caller
from tests.support.services import running
from tests.support.services import until as eventually

CAPACITY = 16 << 20


def settings(path: Path, **changes: Any) -> TierSettings:
    return TierSettings(
        path=path, **{"capacity_bytes": CAPACITY, "offload_percent": 0, "staging_percent": 25, **changes}
    )


@pytest.fixture
async def desk() -> AsyncIterator[Bench]:
    async with bench() as made:
        yield made


async def below(n: Node, keys: Sequence[bytes]) -> None:
    """All of them have reached the tier."""
    assert n.blocks is not None
    await until(lambda: set(keys) <= set(n.blocks.lower_keys()))  # type: ignore[union-attr]
    await until(lambda: not n.store.usage.held)  # what was lent for that is back


def evict(n: Node) -> None:
    """Everything idle goes."""
    extents = n.store.allocate(n.store.free)
    n.store.release(extents)
    assert n.store.keys() == []


async def fill_below(n: Node, desk: Bench, keys: Sequence[bytes]) -> None:
    """These are on the SSD, and nothing is in DRAM."""
    await n.fill(desk, keys)
    await below(n, keys)
    evict(n)


def own_pull(n: Node, keys: Sequence[bytes]) -> PullJob:
    assert n.blocks is not None and n.blocks.lower is not None
    return n.pull(keys, n.blocks.lower.ranges(keys))


async def counted(n: Node, **wanted: int) -> pb.TierCounters:
    """What the rank counted has reached the front (with its next pong)."""
    async with asyncio.timeout(20), stub(n.address) as rpc:
        while True:
            n.rank.ping()
            told = (await rpc.GetStore(pb.GetNodeStoreRequest())).tiers[0]
            if all(getattr(told, name) == value for name, value in wanted.items()):
                return told
            await asyncio.sleep(0.01)


async def lease(n: Node, keys: Sequence[bytes]) -> pb.LeaseResponse:
    request = pb.LeaseRequest(
        reader="test", holder_incarnation=n.incarnation, keys=b"".join(keys), lease_ms=30_000, layout=n.layout
    )
    async with stub(n.address) as rpc:
        return await rpc.Lease(request, timeout=20)


async def test_written_behind_evicted_and_read_back(desk: Bench, tmp_path: Path) -> None:
    keys, never = keys_of(*range(20)), keys_of("never")
    async with node("a", tiers=settings(tmp_path)) as a, node("b") as b:
        await fill_below(a, desk, keys)
        pulled = await a.ended(own_pull(a, keys[:8]))
        assert pulled.arrived == pulled.lower == tuple(range(8)) and pulled.bytes_done == 0, pulled
        await a.check(desk, keys[:8])
        # Others lease what lies below like anything else.
        got = await b.ended(b.pull([*keys[4:12], *never], [a.range_of(0, 9)]))
        assert got.arrived == tuple(range(8)) and not got.lower, got
        await b.check(desk, keys[4:12])
        told = await counted(a, hits=12, blocks=20)
        assert told.bytes_per_s > 0 and told.read_bytes == 12 * SHARD and not told.misses, told
        assert a.blocks is not None and a.blocks.usage.tiers[0].blocks == 20
        assert a.store.stats.writing == 0


async def test_a_lease_tells_which_tier_served(desk: Bench, tmp_path: Path) -> None:
    keys = keys_of(*range(6))
    async with node("a", tiers=settings(tmp_path)) as a:
        await fill_below(a, desk, keys[:4])
        await a.fill(desk, keys[4:])
        answer = await lease(a, [*keys, *keys_of("no")])
        assert answer.held == b"\1" * 6 + b"\0"
        assert answer.tiers == bytes([Tier.SSD] * 4 + [Tier.DRAM] * 2 + [0])
        assert (await lease(a, keys)).tiers == bytes([Tier.DRAM] * 6)


async def test_staging_is_bounded_and_the_head_comes_first(desk: Bench, tmp_path: Path) -> None:
    keys = keys_of(*range(20))
    async with node("a", total=40, tiers=settings(tmp_path, staging_percent=10)) as a:
        await fill_below(a, desk, keys)
        first, second = await asyncio.gather(lease(a, keys), lease(a, keys))
        assert first.held[:4] == second.held[:4] == b"\1" * 4
        assert 4 <= sum(first.held) <= 8 and 4 <= sum(second.held) <= 8, "4 at once, for both of them"
        assert a.store.stats.writing == 0


async def test_a_restart_serves_and_announces_what_the_disk_holds(desk: Bench, tmp_path: Path) -> None:
    keys, gone = keys_of(*range(12)), keys_of("removed", "removed too")
    async with node("a", tiers=settings(tmp_path)) as a:
        await fill_below(a, desk, [*keys, *gone])
        await a.fill(desk, gone[:1])
        assert a.blocks is not None
        assert await a.blocks.forget([*gone, *keys_of("never was")]) == 2
        a.kill_rank()
        await until(lambda: a.lost)
        assert a.blocks.lower_keys() == []
        dead = await a.ended(own_pull(a, keys[:2]))
        assert dead.arrived == () and dead.cause, dead
    async with master() as store, node("a", incarnation=8, tiers=settings(tmp_path)) as a, node("b") as b:
        assert a.blocks is not None
        await until(lambda: len(a.blocks.lower_keys()) == 12)  # type: ignore[union-attr]
        a.join(store.address)
        for key in keys:
            await eventually(lambda key=key: holds(store, key, {("a", Tier.SSD)}))  # type: ignore[misc]
        assert await holds(store, gone[0], set())
        assert (await a.ended(own_pull(a, keys[:6]))).arrived == tuple(range(6))
        assert (await b.ended(b.pull([*keys, *gone], [a.range_of(0, 14)]))).arrived == tuple(range(12))
        await a.check(desk, keys)
        await b.check(desk, keys)
        assert await a.blocks.forget(keys) == 12
        await eventually(lambda: holds(store, keys[0], set()))


async def holds(store: Master, key: bytes, wanted: set[tuple[str, Tier]]) -> bool:
    """What the master says of this key, tier by tier."""
    answer = await store.rpc.Find(pb_store.FindRequest(keys=key), timeout=30)
    nodes = [holder.member.instance.instance_id for holder in answer.holders]
    found = answer.replicas[0]
    return {(nodes[at], Tier(tier)) for at, tier in zip(found.holder, found.tier, strict=True)} == wanted


async def test_damage_is_a_miss(desk: Bench, tmp_path: Path) -> None:
    keys = keys_of(*range(10))
    async with node("a", tiers=settings(tmp_path)) as a:
        await fill_below(a, desk, keys)
    (bucket,) = (tmp_path / "rank-0").glob("bucket-*.kv")
    whole = bucket.read_bytes()
    place = whole.index(keys[3])  # in its record's header; the payload follows on the next page
    at = (place // 4096 + 1) * 4096 + 100
    bucket.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
    async with node("a", incarnation=8, tiers=settings(tmp_path)) as a:
        assert a.blocks is not None
        await until(lambda: len(a.blocks.lower_keys()) >= 9)  # type: ignore[union-attr]
        pulled = await a.ended(own_pull(a, keys))
        assert pulled.arrived == (*range(3), *range(4, 10)), pulled
        await a.check(desk, [*keys[:3], *keys[4:]])
        await until(lambda: keys[3] not in a.blocks.lower_keys())  # type: ignore[union-attr]


async def test_a_copy_for_others_waits_for_the_tier_and_loses_nothing(desk: Bench, tmp_path: Path) -> None:
    old, new = keys_of(*range(60)), keys_of(*range(100, 140))
    async with node("a", total=64, tiers=settings(tmp_path, offload_percent=90)) as a, node("b") as b:
        await a.fill(desk, old)
        await b.fill(desk, new)
        async with stub(a.address) as rpc:
            request = pb.PullBlocksRequest(
                keys=b"".join(new), holders=[b.ref], layout=LAYOUT, shard_bytes=SHARD, timeout_ms=60_000
            )
            assert all((await rpc.Pull(request, timeout=90)).held)
        assert a.blocks is not None
        await until(lambda: not a.store.usage.held)
        assert set(old) <= {*a.store.keys(), *a.blocks.lower_keys()}


async def test_a_frozen_rank_gives_memory_back_when_it_wakes(desk: Bench, tmp_path: Path) -> None:
    keys = keys_of(*range(8))
    async with node("a", tiers=settings(tmp_path)) as a:
        await fill_below(a, desk, keys)
        os.kill(a.rank.pid, signal.SIGSTOP)
        try:
            leasing = asyncio.create_task(lease(a, keys[:4]))
            await until(lambda: a.store.stats.writing == 4)
            leasing.cancel()  # its reader has gone
            await asyncio.gather(leasing, return_exceptions=True)
            assert a.store.stats.writing == 4, "the tier may still write to them"
        finally:
            os.kill(a.rank.pid, signal.SIGCONT)
        await until(lambda: not a.store.stats.writing)
        a.store.check_integrity()


async def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match=r"ssd_path=.*file") as caught:
        async with node("a", tiers=settings(tmp_path / "file")):
            pass
    assert caught.value.field == "ssd_path"
    async with node("a", tiers=settings(tmp_path / "ssd")):
        pass
    with pytest.raises(ConfigError, match="its blocks are of identity"):
        async with node("a", layout="another model", tiers=settings(tmp_path / "ssd")):
            pass
    with pytest.raises(ConfigError, match="ssd_capacity_mb=0"):
        async with node("a", tiers=settings(tmp_path / "small", capacity_bytes=4096)):
            pass


@pytest.mark.slow
async def test_a_pool_node_keeps_layouts_apart_on_its_disk(desk: Bench, tmp_path: Path) -> None:
    ours, theirs, third = keys_of(*range(6)), keys_of(*range(10, 16)), keys_of("third")
    async with master() as store, node("a") as a, node("c", layout="another model", shard=24_576) as c:
        config = PoolConfig(
            instance_id="pool-0",
            store=store.address,
            memory_mb=4,
            announce_ms=10,
            ssd_path=str(tmp_path),
            ssd_capacity_mb=64,
            ssd_offload_percent=0,
        )
        await a.fill(desk, ours)
        await c.fill(desk, theirs)
        async with running(pool.run, config) as service:
            assert all(await ask(service.address, a, ours))
            assert all(await ask(service.address, c, theirs, "another model", 24_576))
            for key in (*ours, *theirs):
                await eventually(lambda key=key: holds(store, key, {("pool-0", Tier.DRAM), ("pool-0", Tier.SSD)}))  # type: ignore[misc]
            async with node("d", layout="a third") as d:
                await d.fill(desk, third)
                assert all(await ask(service.address, d, third, "a third"))
            async with stub(service.address) as rpc:
                told = (await rpc.GetStore(pb.GetNodeStoreRequest())).tiers[0]
            assert told.blocks == 12 and "ssd_layouts=2" in told.why_not, told
        assert len(list((tmp_path / "rank-0").iterdir())) == 2
        reading = node("b"), node("d", layout="another model", shard=24_576)
        async with running(pool.run, config) as service, reading[0] as b, reading[1] as d:
            for key in (*ours, *theirs):
                await eventually(lambda key=key: holds(store, key, {("pool-0", Tier.SSD)}))  # type: ignore[misc]
            source = await of_pool(service, 6)
            assert len((await b.ended(b.pull(ours, [source]))).arrived) == 6
            assert len((await d.ended(d.pull(theirs, [source]))).arrived) == 6
            await b.check(desk, ours)
            await d.check(desk, theirs)
        async with running(pool.run, replace(config, ssd_layouts=1)):
            assert len(list((tmp_path / "rank-0").iterdir())) == 1, "what nobody uses would hear of no removal"


async def test_values_of_any_length_outlive_a_pool_nodes_memory(tmp_path: Path) -> None:
    keys = keys_of(*range(48))
    sizes = [random.Random(n).choice((1, 700, 4096, 4097, 9_000, 33_333)) + n for n in range(48)]
    disk: dict[str, Any] = {"ssd_path": str(tmp_path), "ssd_capacity_mb": 64, "ssd_offload_percent": 0}
    async with pool_and_caller(**disk) as caller:
        for at in range(0, 48, 12):
            assert all((await caller.put(keys[at : at + 12], sizes[at : at + 12])).held)
        await eventually(lambda: stored(caller, 48))
        await caller.rpc.Remove(pb.RemoveBlocksRequest(keys=keys[0]))
        put = caller.blocks
    async with pool_and_caller(**disk) as caller:
        caller.blocks = put
        await eventually(lambda: stored(caller, 47))
        assert not (await caller.lease(keys[:1])).lease_id
        for at in range(1, 48, 6):
            some = keys[at : at + 6]
            lease = await caller.lease(some)
            assert lease.tiers == bytes([Tier.SSD] * len(some)), "read from the disk"
            await caller.read(some, lease)
            await caller.release(lease)
        await caller.idle()


async def stored(caller: Caller, blocks: int) -> bool:
    return (await caller.counts()).tiers[0].blocks == blocks
