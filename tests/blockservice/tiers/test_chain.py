"""DRAM, SSD and object storage in one node: real ranks, real folders, a real S3 server."""

from __future__ import annotations

import logging
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from kvmesh.blockservice.tiers import reads as tier_reads
from kvmesh.blockservice.tiers.parts import TierSettings
from kvmesh.kvcache.keys import split
from kvmesh.kvcache.sources import PullRange, ranges_with
from kvmesh.kvcache.tiers import Tier
from kvmesh.pool.config import PoolConfig
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import blocks_pb2_grpc as pb_grpc
from tests.blockservice.tiers.test_tiers import evict, holds, lease, own_pull
from tests.pool.test_pool import master
from tests.support.nodes import Bench, Node, bench, keys_of, node, stub, until
from tests.support.s3_server import S3, s3_server
from tests.support.services import until as eventually
from tests.support.store_clients import stores

CAPACITY = 1 << 20  # of the SSD: some 70 blocks


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture
def settings(s3: S3, tmp_path: Path) -> TierSettings:
    below = TierSettings(Path(), 0, 0, 100, url=f"s3://{s3.bucket()}/kv")
    return TierSettings(tmp_path / "ssd", CAPACITY, 0, 100, below=below, demote_uses=0)


@pytest.fixture
async def desk() -> AsyncIterator[Bench]:
    async with bench() as made:
        yield made


def lying(n: Node) -> dict[bytes, Tier]:
    """Where each block is found below DRAM."""
    assert n.blocks is not None
    places = {key: n.blocks.below("", key) for key in n.blocks.lower_keys()}
    return {key: place[0] for key, place in places.items() if place is not None}


async def pressed(n: Node, desk: Bench, keys: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """More blocks than DRAM and SSD have room for; DRAM is empty afterwards. Which lie on the SSD, which below it, each
    the youngest first: whatever is read from below is written to the SSD again, whose oldest go for that at any time.
    """
    assert n.blocks is not None
    for at in range(0, len(keys), 30):
        some = keys[at : at + 30]
        await n.fill(desk, some)
        await until(lambda some=some: set(some) <= set(n.blocks.lower_keys()))  # type: ignore[misc]
        await until(lambda: not n.store.usage.held)
        evict(n)
    await until(lambda: len(lying(n)) == len(keys))
    where = lying(n)
    ssd, objects = ([key for key in reversed(keys) if where[key] is tier] for tier in (Tier.SSD, Tier.OBJECT))
    assert len(ssd) >= 30 and len(objects) >= 60, (len(ssd), len(objects))
    return ssd, objects


async def test_the_ssd_hands_on_what_it_evicts_and_readers_find_it(desk: Bench, settings: TierSettings) -> None:
    keys = keys_of(*range(180))
    async with node("a", tiers=settings) as a, node("b") as b:
        ssd, objects = await pressed(a, desk, keys)
        mixed = [*ssd[:6], *objects[:6]]
        assert a.blocks is not None and a.blocks.lower is not None
        tiers = [(found.tier, found.blocks) for found in a.blocks.lower.ranges(mixed)]
        assert tiers[0] == (Tier.SSD, 6) and tiers[-1] == (Tier.OBJECT, 6)
        answer = await lease(a, [*objects[6:12], *ssd[6:12]])
        assert answer.held == b"\1" * 12 and answer.tiers == bytes([Tier.OBJECT] * 6 + [Tier.SSD] * 6)
        pulled = await a.ended(own_pull(a, mixed))
        assert pulled.arrived == pulled.lower == tuple(range(12)), pulled
        await a.check(desk, [*mixed, *objects[6:12], *ssd[6:12]])
        assert (await lease(a, mixed)).tiers == bytes([Tier.DRAM] * 12)
        got = await b.ended(b.pull(objects[12:40], [a.range_of(0, 28, Tier.OBJECT)]))
        assert got.arrived == tuple(range(28)), got
        await b.check(desk, objects[12:40])
        async with stub(a.address) as rpc:
            await eventually(lambda: below(rpc, keys))  # what was promoted is written below again, and others go on
            told = list((await rpc.GetStore(pb.GetNodeStoreRequest())).tiers)
            tier_keys = await listed(rpc)
            lower = [key for key in keys if not a.store.holds(key)]
            there = await rpc.Exists(pb.ExistsRequest(keys=b"".join(lower)))
        assert [int(each.tier) for each in told] == [Tier.SSD, Tier.OBJECT]
        assert [int(each.tier) for each in a.blocks.usage.tiers] == [Tier.SSD, Tier.OBJECT]
        assert told[1].blocks >= len(objects) and told[0].capacity_bytes == CAPACITY
        assert {Tier.SSD, Tier.OBJECT} <= set(there.tiers)  # and what is on its way
        assert len(tier_keys) == 3 and set(objects) <= tier_keys[Tier.OBJECT]
        assert tier_keys[Tier.SSD] | tier_keys[Tier.OBJECT] <= set(keys)
        assert tier_keys[Tier.DRAM] <= set(keys) and set(mixed) <= tier_keys[Tier.DRAM]


async def test_a_promoted_block_is_written_to_the_ssd_again(desk: Bench, settings: TierSettings) -> None:
    async with node("a", tiers=settings) as a:
        _, objects = await pressed(a, desk, keys_of(*range(150)))
        again = objects[:5]
        assert (await a.ended(own_pull(a, again))).arrived == tuple(range(5))
        assert a.blocks is not None
        a.blocks._tiering.tidy()  # type: ignore[union-attr]
        await until(lambda: all(lying(a)[key] is Tier.SSD for key in again))
        await until(lambda: not a.store.usage.held)
        evict(a)
        assert (await lease(a, again)).tiers == bytes([Tier.SSD] * 5)
        await a.check(desk, again)


async def test_removals_reach_both_and_both_outlive_a_kill(desk: Bench, settings: TierSettings) -> None:
    keys = keys_of(*range(180))
    async with master() as store:
        async with node("a", tiers=settings) as a:
            ssd, objects = await pressed(a, desk, keys)
            a.join(store.address)
            await eventually(lambda: holds(store, objects[0], {("a", Tier.OBJECT)}))
            await eventually(lambda: holds(store, ssd[0], {("a", Tier.SSD)}))
            gone = [*ssd[:5], *objects[:5]]
            assert a.blocks is not None
            async with stub(a.address) as rpc:
                answer = await rpc.Remove(pb.RemoveBlocksRequest(keys=b"".join(gone)))
            assert answer.removed == 10 and not set(gone) & set(a.blocks.lower_keys())
            for key in gone:
                await eventually(lambda key=key: holds(store, key, set()))  # type: ignore[misc]
            a.kill_rank()
            await until(lambda: a.lost)
            assert a.blocks.lower_keys() == []
        async with node("a", incarnation=8, tiers=settings) as a:
            assert a.blocks is not None
            left = set(keys) - set(gone)
            assert set(a.blocks.lower_keys()) == left, "also what lay in both"
            a.join(store.address)
            await eventually(lambda: holds(store, objects[9], {("a", Tier.OBJECT)}))
            some = [*ssd[5:15], *objects[5:15]]
            assert (await a.ended(own_pull(a, some))).arrived == tuple(range(20))
            await a.check(desk, some)
            async with stub(a.address) as rpc:
                prefix = objects[20][:1]
                await rpc.Remove(pb.RemoveBlocksRequest(prefix=prefix))
            staying = {key for key in left if not key.startswith(prefix)}
            assert set(a.blocks.lower_keys()) <= staying
            await until(lambda: set(a.blocks.lower_keys()) == staying)  # type: ignore[union-attr]


async def listed(rpc: pb_grpc.NodeStoreAsyncStub) -> dict[int, set[bytes]]:
    found: dict[int, set[bytes]] = {int(tier): set() for tier in Tier}
    async for part in rpc.ListBlocks(pb.ListBlocksRequest()):
        found[int(part.tier)].update(split(part.keys))
    return found


async def below(rpc: pb_grpc.NodeStoreAsyncStub, keys: Sequence[bytes]) -> bool:
    found = await listed(rpc)
    return set(keys) <= found[Tier.SSD] | found[Tier.OBJECT]


@pytest.mark.slow
async def test_a_client_is_told_that_object_storage_served(s3: S3, tmp_path: Path) -> None:
    tiers = {
        "ssd_path": str(tmp_path), "ssd_capacity_mb": 12, "ssd_offload_percent": 0, "ssd_staging_percent": 100,
        "object_url": f"s3://{s3.bucket()}/kv", "object_demote_uses": 0,
    }  # fmt: skip
    rng = random.Random(3)
    values = [rng.randbytes(rng.randrange(30_000, 60_000)) for _ in range(250)]
    async with stores("pool-0", memory_mb=4, **tiers) as made, made.client(timeout_ms=30_000) as client:
        keys: list[bytes] = []
        async with stub(made.nodes["pool-0"].address) as rpc:
            for at in range(0, len(values), 20):
                keys += (some := [put.key for put in await client.put_many(values[at : at + 20])])
                await eventually(lambda some=some: below(rpc, some))  # type: ignore[misc]
            await eventually(lambda: below(rpc, keys))
        served, untrue = Counter[int](), dict[bytes, int]()

        async def both_are_told() -> bool:
            """Each block is told to be where it lay before or lies after; what moves meanwhile is tried again."""
            async with stub(made.nodes["pool-0"].address) as rpc:
                before = await listed(rpc)
                dram, ssd, objects = (before[tier] for tier in (Tier.DRAM, Tier.SSD, Tier.OBJECT))
                only_objects = [key for key in reversed(keys) if key in objects - ssd - dram][:10]
                only_ssd = [key for key in reversed(keys) if key in ssd - objects - dram][:10]
                got = await client.get_many(asked := [*only_objects, *only_ssd])
                after = await listed(rpc)
            told = {key: one.tier for key, one in zip(asked, got, strict=True) if one.here}
            lower = {key: tier for key, tier in told.items() if tier != Tier.DRAM}
            untrue.update({key: tier for key, tier in lower.items() if key not in before[tier] | after[tier]})
            served.update(lower.values())
            return served[Tier.OBJECT] >= 10 and served[Tier.SSD] >= 1

        await eventually(both_are_told)
        assert not untrue
        left, wrong = dict(zip(keys, values, strict=True)), []

        async def all_served() -> bool:
            """What moves between the tiers at that moment is found the next time."""
            for at in range(0, len(asked := list(left)), 20):
                for key, one in zip(asked[at:], await client.get_many(asked[at : at + 20]), strict=False):
                    if one.here and one.data != left.pop(key):
                        wrong.append(key)
            return not left

        await eventually(all_served)
        assert not wrong
        removed = await client.remove(keys[0], keys[-1])
        assert removed.acknowledged == ("pool-0",) and not removed.pending
        assert await client.get(keys[0]) is None and await client.exists(keys[-1]) is None


async def test_a_rank_that_does_not_answer_is_passed_over_until_it_does(
    desk: Bench, settings: TierSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tier_reads, "GRACE_S", 0.05)
    monkeypatch.setattr(tier_reads, "PROBE_S", 0.01)
    caplog.set_level(logging.WARNING, "kvmesh")
    async with node("a", tiers=settings) as a:
        ssd, objects = await pressed(a, desk, keys_of(*range(150)))
        assert a.blocks is not None and a.blocks.lower is not None
        os.kill(a.rank.pid, signal.SIGSTOP)
        try:
            pulls = [a.pull(some, a.blocks.lower.ranges(some), 50) for some in (ssd[:4], ssd[4:8])]
            for job in pulls:
                ended = await a.ended(job)  # not when the disk answers, but soon after its deadline
                assert ended.arrived == () and "has not ended in" in ended.cause, ended
            assert a.store.stats.writing == 0 and a.store.usage.held == 8, "the disk may still write there"
            assert not a.blocks.lower.holds(ssd[0]) and a.blocks.lower.holds(objects[0])
            assert [found.tier for found in a.blocks.lower.ranges(ssd[:4])] == []
            assert a.blocks.below("", ssd[0]) is None
            assert "has not ended" in a.blocks.counters.tiers[0].why_not
        finally:
            os.kill(a.rank.pid, signal.SIGCONT)
        await until(lambda: a.blocks.lower.holds(ssd[0]))  # type: ignore[union-attr]
        await until(lambda: not a.store.usage.held)
        assert (await a.ended(own_pull(a, ssd[:8]))).arrived == tuple(range(8))
        await a.check(desk, ssd[:8])
        a.store.check_integrity()
    said = [record.getMessage() for record in caplog.records if "ssd_path=" in record.getMessage()]
    assert len(said) == 2 and "passed over" in said[0] and "answers again" in said[1], said


async def test_what_the_ssd_fails_to_give_the_object_store_gives(desk: Bench, settings: TierSettings) -> None:
    async with node("a", tiers=settings) as a:
        _, objects = await pressed(a, desk, keys_of(*range(150)))
        both = objects[:6]  # brought up and written to the SSD once more
        assert (await a.ended(own_pull(a, both))).arrived == tuple(range(6))
        await until(lambda: all(lying(a)[key] is Tier.SSD for key in both))
        await until(lambda: not a.store.usage.held)
    damaged = 0
    for bucket in (settings.path / "rank-0").glob("bucket-*.kv"):
        whole = bytearray(bucket.read_bytes())
        for key in both:
            at = whole.find(key)
            while at >= 0:
                if at % 4096 < 64:  # its record's header: the payload follows on the next page
                    whole[(at // 4096 + 1) * 4096 + 100] ^= 1
                    damaged += 1
                at = whole.find(key, at + 1)
        bucket.write_bytes(bytes(whole))
    assert damaged >= 6
    async with node("a", incarnation=8, tiers=settings) as a:
        there = [key for key in both if lying(a).get(key) is Tier.SSD]
        asked = both[:3]
        answer = await lease(a, asked)
        assert answer.held == b"\1" * 3 and set(answer.tiers) == {Tier.OBJECT}, (there, answer)
        assert (await a.ended(own_pull(a, both[3:]))).arrived == tuple(range(3))
        await a.check(desk, both)


def test_both_tiers_can_be_told_of(tmp_path: Path) -> None:
    config = PoolConfig(ssd_path=str(tmp_path), object_url="s3://b/x", ssd_capacity_mb=64, object_demote_uses=3)
    made = config.tiers(2)
    assert made is not None and [each.tier for each in made.chain] == [Tier.SSD, Tier.OBJECT]
    assert made.demote_uses == 3 and made.chain[1].url == "s3://b/x" and made.chain[1].layouts == 2
    alone = PoolConfig(object_url="s3://b/x").tiers(2)
    assert alone is not None and [each.tier for each in alone.chain] == [Tier.OBJECT]


def test_sources_are_asked_tier_by_tier_and_here_before_elsewhere() -> None:
    class Below:
        def holds(self, key: bytes) -> bool:
            return True

        def ranges(self, keys: Sequence[bytes]) -> tuple[PullRange, ...]:
            return tuple(PullRange("me", "h:1", 1, 0, len(keys), tier) for tier in (Tier.SSD, Tier.OBJECT))

        def note(self, keys: Sequence[bytes]) -> None:
            raise AssertionError

    hints = tuple(PullRange("other", "h:2", 1, 0, 2, tier) for tier in (Tier.OBJECT, Tier.SSD, Tier.DRAM))
    asked = [(source.instance_id, source.tier) for source in ranges_with(hints, Below(), keys_of(1, 2))]
    assert asked == [
        ("other", Tier.DRAM), ("me", Tier.SSD), ("other", Tier.SSD), ("me", Tier.OBJECT), ("other", Tier.OBJECT),
    ]  # fmt: skip


def test_a_pool_node_asks_for_all_tombstones_again_as_it_may_open_layouts_that_missed_some(tmp_path: Path) -> None:
    both = {"ssd_path": str(tmp_path), "object_url": "s3://b/x"}
    told = [PoolConfig(**words).tiers(layouts) for words, layouts in ((both, 2), (both, 0), ({"ssd_path": "/x"}, 2))]  # type: ignore[arg-type]
    assert [made is not None and made.opens_later for made in told] == [True, False, False]
