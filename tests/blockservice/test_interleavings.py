"""What comes between: removals, copies and pins that meet something under way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import xxhash

from kvmesh.blockservice import removal_applier, removals
from kvmesh.blockservice import servicer as block_rpcs
from kvmesh.blockservice.partitions import Partition
from kvmesh.blockservice.removals import Watch
from kvmesh.blockservice.servicer import NodeStoreServicer
from kvmesh.blockservice.tiers.brain import Contents, WriteBehind
from kvmesh.blockservice.tiers.parts import TierSettings
from kvmesh.blockservice.tiers.tiering import Tiering
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.pool import pool
from kvmesh.pool.partitions import PoolPartitions
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker.checksums import Sums
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.transfer import EngineConfig, TransferEngine
from tests.blockservice.tiers.test_tiers import fill_below
from tests.support.nodes import bench, keys_of, node, stub
from tests.support.nodes import until as eventually
from tests.support.putting import Caller, config, pool_and_caller
from tests.support.services import running, until

SHARD = 8192


class Disk:
    """A rank's tiers as a table, which answers when it is told to."""

    def __init__(self) -> None:
        self.told: list[m.ToRank] = []
        self.say: Callable[[m.ToFront], None] = lambda message: None
        self.blocks: dict[int, dict[bytes, int]] = {}  # part → key → bytes
        self.found: dict[bytes, int] = {}  # in every part that is opened
        self.late = False

    def send(self, message: m.ToRank, /) -> None:
        self.told.append(message)
        if not self.late:
            self.work()

    def work(self) -> None:
        """Answer everything, in order."""
        told, self.told = self.told, []
        for message in told:
            match message:
                case m.TierOpen(tier, part):
                    here = self.blocks[part] = dict(self.found)
                    if here:
                        self.say(m.TierChanged(tier, part, b"".join(here), b"", tuple(here.values())))
                    self.say(m.TierOpened(tier, part))
                case m.TierPut(ticket, tier, part, keys, _, sizes):
                    names = [keys[at : at + 16] for at in range(0, len(keys), 16)]
                    self.blocks[part].update(zip(names, sizes, strict=True))
                    self.say(m.TierChanged(tier, part, keys, b"", sizes))
                    self.say(m.TierDone(ticket, tuple(range(len(names))), sizes, 0, 1))
                case m.TierGet():
                    names = [message.keys[at : at + 16] for at in range(0, len(message.keys), 16)]
                    here = self.blocks[message.part]
                    done = tuple(at for at, name in enumerate(names) if name in here)
                    self.say(m.TierDone(message.ticket, done, tuple(here[names[at]] for at in done), 0, 1))
                case m.TierProbe(ticket, _, part, key):
                    found = (0,) if key in self.blocks[part] else ()
                    self.say(m.TierDone(ticket, found, (SHARD,) * len(found), 0, 1))
                case m.TierRemove(ticket, tier, part, keys):
                    names = [keys[at : at + 16] for at in range(0, len(keys), 16)]
                    gone = [name for name in names if self.blocks[part].pop(name, None)]
                    self.say(m.TierChanged(tier, part, b"", b"".join(gone)))
                    self.say(m.TierDone(ticket, tuple(range(len(names))), (0,) * len(names), 0, 1))


class Below:
    """A pool node's partitions with a tier below, whose rank is a `Disk`."""

    def __init__(self, settings: TierSettings) -> None:
        self.disk = Disk()
        self.partitions = PoolPartitions(0, 4 << 20, high_percent=95, low_percent=90, lease_seed=1)
        ref = pb_common.InstanceRef(instance_id="a", address="h:1", incarnation=1)
        self.tiering = Tiering(settings, lambda: ref, [self.disk], self.partitions)
        self.disk.say = lambda message: self._said(message)

    def _said(self, message: m.ToFront) -> None:
        assert self.tiering.rank_said(0, message)

    def partition(self, layout: str) -> Partition:
        made = self.partitions.room(layout, SHARD, 4)
        self.tiering.follow(made)
        return made

    def stores(self) -> list[NodeStore]:
        return [partition.store for partition in self.partitions.all()]

    async def forget(self, keys: Sequence[bytes]) -> None:
        """As `Blocks.forget`."""
        for store in self.stores():
            store.remove(keys)
        await self.tiering.forget(keys)


@pytest.fixture
async def ssd(tmp_path: Path) -> AsyncIterator[Below]:
    settings = TierSettings(path=tmp_path, capacity_bytes=1 << 30, offload_percent=0, staging_percent=50, layouts=4)
    made = Below(settings)
    yield made
    await made.tiering.close()


async def turns(n: int = 10) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


def seal(store: NodeStore, *keys: bytes) -> None:
    assert None not in store.begin(keys)
    for key in keys:
        store.seal(key)


async def test_a_block_of_two_layouts_is_removed_from_both_before_anybody_can_stage_it(ssd: Below) -> None:
    (key,) = keys_of("both")
    for layout in ("one", "two"):
        seal(ssd.partition(layout).store, key)
    await turns()
    assert all(key in blocks for blocks in ssd.disk.blocks.values()) and len(ssd.disk.blocks) == 2
    for store in ssd.stores():
        store.evict_one(key, spared=True)
    ssd.disk.late = True
    removing = asyncio.ensure_future(ssd.forget([key]))
    await turns()
    reading = asyncio.ensure_future(ssd.tiering.stage("", [key], 5.0))
    while not removing.done() or not reading.done():
        ssd.disk.work()
        await turns(1)
    assert not any(store.holds(key) for store in ssd.stores()), "read from below while it was being removed there"


async def test_what_is_removed_before_its_write_begins_is_not_written(ssd: Below) -> None:
    key, other = keys_of("going", "staying")
    store = ssd.partition("one").store
    await turns()
    seal(store, key, other)
    ssd.tiering._pump(ssd.tiering._followed["one"])  # the write's task has not run yet
    store.remove([key])
    await turns()
    assert ssd.disk.blocks[0] == {other: SHARD}
    assert store.usage.held == 0


@pytest.mark.parametrize("when", ["before it is opened", "while it is opened"])
async def test_objects_of_a_layout_nobody_has_asked_for_yet_are_removed_too(when: str) -> None:
    settings = TierSettings(
        path=Path(), capacity_bytes=0, offload_percent=0, staging_percent=50, layouts=4, url="memory://x"
    )
    below = Below(settings)
    key, kept, tagged = keys_of("removed", "kept", "removed by its prefix")
    below.disk.found = {key: SHARD, kept: SHARD, tagged: SHARD}
    below.disk.late = True
    if when == "while it is opened":
        below.partition("one")
    watch = Watch()
    below.tiering.remember(watch)
    watch.note_removal([key], b"")
    watch.note_removal([], tagged[:4])
    forgetting = asyncio.ensure_future(below.forget([key]))
    await turns()
    below.partition("one")
    while not forgetting.done():
        below.disk.work()
        await turns(1)
    for _ in range(5):
        below.disk.work()
        await turns()
    found = [below.tiering.below("", name) is not None for name in (key, kept, tagged)]
    assert found == [False, True, False]
    assert set(below.disk.blocks[0]) == {kept}
    assert (await asyncio.gather(below.tiering.stage("", [key, tagged], 0.1)))[0] == {}
    await below.tiering.close()


async def test_a_copy_of_bytes_has_its_own_length_though_a_shards_is_named() -> None:
    sizes = [1, 5_000, 70_000]
    keys = keys_of(*range(3))
    async with pool_and_caller() as caller:
        await caller.put(keys, sizes)
        source = (await caller.counts()).instance
        async with (
            running(pool.run, config(instance_id="pool-1", transports="shm")) as second,
            stub(second.address) as rpc,
        ):
            pull = pb.PullBlocksRequest(
                keys=b"".join(keys), holders=[source], layout="bytes", shard_bytes=70_000, timeout_ms=5_000
            )
            assert (await rpc.Pull(pull, timeout=20)).held == b"\1" * 3
            there = await rpc.Exists(pb.ExistsRequest(keys=b"".join(keys)))
            assert list(there.nbytes) == sizes
            told = await rpc.GetStore(pb.GetNodeStoreRequest())
            await Caller(rpc, told.instance.incarnation, caller.engine, blocks=caller.blocks).check(keys)


async def test_a_pin_between_the_parts_of_a_great_removal_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_rpcs, "SLICE", 4)
    monkeypatch.setattr(removal_applier, "SLICE", 4)
    keys = keys_of(*range(12))
    async with bench() as desk, node("a") as a:
        await a.fill(desk, keys)
        assert a.blocks is not None
        servicer = NodeStoreServicer(a.blocks)
        request = pb.RemoveBlocksRequest(keys=b"".join(keys), spare_pinned=True)
        removing = asyncio.ensure_future(servicer.Remove(request, None))
        while a.store.holds(keys[0]):
            await turns(1)
        pin = pb.PinBlocksRequest(keys=keys[-1], kind=pb.PIN_KIND_HARD)
        assert (await servicer.Pin(pin, None)).done == b"\1", "told that it stays"
        gone = await removing
        assert (a.store.keys(), gone.removed, gone.spared) == ([keys[-1]], 11, bytes(11) + b"\1")


async def test_staging_takes_no_more_memory_than_its_budget_has_room_for(tmp_path: Path) -> None:
    settings = TierSettings(path=tmp_path, capacity_bytes=1 << 30, offload_percent=100, staging_percent=5, layouts=2)
    made = Below(settings)
    here, below = keys_of(*range(480)), keys_of(*range(1000, 1400))
    made.disk.found = dict.fromkeys(below, SHARD)
    made.partition("read")
    store = made.partitions.room("kept", SHARD, len(here)).store
    for at in range(0, len(here), 32):
        made.partitions.room("kept", SHARD, 32)
        seal(store, *here[at : at + 32])
    assert len(store.keys()) > 440, "the memory is full"
    before = len(store.keys())
    staged = await made.tiering.stage("read", below, 5.0)
    assert list(staged) == below[: len(staged)] and 20 <= len(staged) <= 25, "as much as the budget allows"
    assert before - len(store.keys()) <= 64, "a run of slabs or two, for what was read"
    await made.tiering.close()


def test_what_a_tier_refuses_is_not_asked_again_by_those_who_wait_for_room() -> None:
    store, there = NodeStore(8, high_percent=100, low_percent=100), Contents(1)
    keys = keys_of(*range(8))
    seal(store, *keys)
    behind = WriteBehind(100, 64)
    for _ in keys:
        behind.added()
    asked = behind.next(store, there, (), extra=4)
    assert len(asked) == 4
    behind.refused(asked)
    assert behind.next(store, there, (), extra=4) == [], "it would be asked again and again as long as one waits"
    behind.added()
    behind.hurry()
    assert behind.next(store, there, (), extra=4) == asked, "some time later"


async def test_a_reader_of_little_patience_hears_of_what_is_in_memory(tmp_path: Path) -> None:
    settings = TierSettings(path=tmp_path, capacity_bytes=16 << 20, offload_percent=0, staging_percent=50)
    low, high = keys_of(*range(4)), keys_of(*range(10, 14))
    async with bench() as desk, node("a", tiers=settings) as a, stub(a.address) as rpc:
        await fill_below(a, desk, low)
        await a.fill(desk, high)
        request = pb.LeaseRequest(
            reader="r", holder_incarnation=a.incarnation, keys=b"".join(high + low), lease_ms=30_000, layout=a.layout
        )
        os.kill(a.rank.pid, signal.SIGSTOP)
        try:
            answer = await rpc.Lease(request, timeout=0.95)  # less than it takes to give up the disk
        finally:
            os.kill(a.rank.pid, signal.SIGCONT)
        assert answer.held == b"\1" * 4 + b"\0" * 4


async def test_a_soft_pin_ends_though_its_putter_has_hung_up() -> None:
    (key,) = keys_of("pinned")
    slow = json.dumps({"rules": [{"kind": "delay", "op": "read", "delay_ms": 300}]})
    async with pool_and_caller(fault=slow) as caller:
        putting = caller.put([key], [300_000], pin=pb.PIN_KIND_SOFT, pin_ttl_ms=1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(putting, 0.15)

        async def sealed() -> bool:
            return bool((await caller.rpc.Exists(pb.ExistsRequest(keys=key))).tiers[0])

        async def unpinned() -> bool:
            return not (await caller.counts()).soft_pinned

        await until(sealed)
        await until(unpinned)


def test_a_watch_is_bounded_and_hears_of_a_clean_slate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removals, "MAX_WATCHED", 3)
    made = removals.Removals()
    few, many, slate = made.watch(), Watch(), made.watch()
    a, b = keys_of("a", "b")
    few.note_removal([a], b"")
    assert few.gone(a) and not few.gone(b)
    many.note_removal(keys_of(*range(4)), b"")
    assert many.gone(b), "who cannot remember says yes"
    made.everything(7)
    assert slate.gone(a) and few.gone(b), "a clean slate: also what nobody knows of"


async def test_a_put_of_many_lengths_waits_once_for_each_size_of_extents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[int] = []

    async def room(self: Tiering, partition: Partition, blocks: int, wait_s: float) -> None:
        asked.append(blocks)

    monkeypatch.setattr(Tiering, "room", room)
    keys, sizes = keys_of(*range(300)), list(range(1, 12_000, 40))
    async with pool_and_caller(memory_mb=16, ssd_path=str(tmp_path), ssd_capacity_mb=64) as caller:
        assert all((await caller.put(keys, sizes)).held)
        assert len(asked) == 3 and sum(asked) == 300
        await caller.check(keys)


async def test_sums_that_nobody_waits_for_any_more_are_not_taken() -> None:
    engine = TransferEngine("sums@1", EngineConfig(transports=("shm",)))
    said: list[m.ToFront] = []
    try:
        region = engine.allocate(8192, "cpu:0")
        sums = Sums(region, said.append)
        now = time.monotonic_ns()
        sums.add(m.Sum(1, (region.base_offset,), (4096,), now - 1))
        sums.add(m.Sum(2, (region.base_offset,), (4096,), now + 60_000_000_000))
        await eventually(lambda: len(said) == 2)
        sums.close()
        late, good = said
        assert isinstance(late, m.Summed) and isinstance(good, m.Summed)
        assert (late.ticket, late.sums, bool(late.cause)) == (1, (), True)
        assert good.sums == (xxhash.xxh3_64_intdigest(bytes(4096)),)
    finally:
        await asyncio.to_thread(engine.close)
