"""A pool node's memory outlives it: slabs of many layouts come back, whenever a life ends."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest
import xxhash
from msgspec import structs

from kvmesh.blockservice.warm.memory import WarmMemory
from kvmesh.errors import InternalError, Overloaded
from kvmesh.kvcache.size_classes import BYTES
from kvmesh.pool import pool
from kvmesh.pool.config import PoolConfig
from kvmesh.pool.partitions import PoolPartitions
from kvmesh.pool.slabs import SlabPartition
from kvmesh.pool.warm import WarmPool
from kvmesh.ranks import protocol as m
from kvmesh.ranks.warm_table import SumTable
from kvmesh.rpc.pb import blocks_pb2 as pb
from tests.pool.test_pool import Master, ask, master, of_pool, pool_config
from tests.support.nodes import bench, keys_of, node, stub
from tests.support.services import running
from tests.support.services import until as eventually
from tests.support.warm_processes import children

BASE, REGION = 4096, 4 << 20
SLOTS = REGION // 4096
KINDS = (("small", 2048), ("a", 8192), ("b", 24_576), ("odd", 50_001), ("large", 600_000), (BYTES, 9_000))

READY = m.Ready("", b"", "", "", 0, (), 0, 0, 0, 0, 0, 0, 0, False, 0)


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(f"/dev/shm/kvmesh-test-{uuid.uuid4().hex}")
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@dataclass
class World:
    """What outlives lives."""

    data: bytearray = field(default_factory=lambda: bytearray(REGION))
    read: list[tuple[int, int]] = field(default_factory=list)  # that readers of the last life may read: (from, to)
    removed: set[bytes] = field(default_factory=set)


class Life:
    """One pool node's front, and the part of its rank (`send`) that takes and compares sums, when it comes to it."""

    def __init__(self, folder: Path, world: World, rng: random.Random, number: int) -> None:
        self.world, self.rng = world, rng
        self.sums = SumTable(f"{folder}/rank-0.sums", bytes(32), SLOTS, 1)
        until = time.monotonic_ns() + 20_000_000 if self.sums.kept else 0
        self.ready = structs.replace(READY, warm_segment=self.sums.segment, warm_until_ns=until)
        self.rows: list[m.WarmRow] = []
        self.asked: list[m.WarmRow] = []
        self.partitions = PoolPartitions(BASE, REGION, high_percent=95, low_percent=80, lease_seed=number << 20)
        self.warm = WarmMemory(str(folder), [self], SLOTS, number)
        WarmPool(self.warm, self.partitions, BASE)

    def send(self, message: m.ToRank) -> None:
        match message:
            case m.WarmSum(rows):
                self.rows += rows
            case m.WarmVerify(rows):
                self.asked += rows

    def _sum(self, row: m.WarmRow) -> int:
        return xxhash.xxh3_64_intdigest(self.world.data[row.offset : row.offset + row.nbytes])

    def take_sums(self, most: int) -> None:
        for _ in range(min(most, len(self.rows))):
            row = self.rows.pop(self.rng.randrange(len(self.rows)))
            self.sums.put(row.slot, row.life, row.serial, self._sum(row))

    def verify(self, most: int) -> None:
        rows, self.asked = self.asked[:most], self.asked[most:]
        good = [row.slot for row in rows if self.sums.get(row.slot, row.life, row.serial) == self._sum(row)]
        self.warm.rank_said(m.WarmVerified(tuple(row.slot for row in rows), tuple(good)))

    def span(self, partition: SlabPartition, extent: int) -> tuple[int, int]:
        at = partition.offset(0, extent) - BASE
        return at, at + partition.shard_bytes

    def write(self, key: bytes) -> None:
        layout, size = KINDS[key[0] % len(KINDS)]
        try:
            partition = self.partitions.room(layout, size, 1)
        except Overloaded:
            return
        assert isinstance(partition, SlabPartition)
        (extent,) = partition.store.begin([key])
        if extent is not None:
            start, end = self.span(partition, extent)
            assert not any(start < b and a < end for a, b in self.world.read), "a reader's memory is written"
            self.world.data[start : start + 512] = self.rng.randbytes(512)
            if self.rng.randrange(8):
                nbytes = size if layout == BYTES else partition.shard_bytes
                self.world.data[start : start + nbytes] = content(key, nbytes)
                partition.store.seal(key, nbytes)
                self.world.removed.discard(key)
            elif self.rng.randrange(2):
                partition.store.abandon(key)
        self.partitions.settle()

    def step(self) -> None:
        rng, everyone = self.rng, [p for p in self.partitions.all() if p.store.keys()]
        match rng.randrange(8):
            case 0 | 1 | 2 | 3:
                self.write(rng.randbytes(16))
            case 4:
                self.take_sums(rng.randrange(12))
            case 5 if everyone:
                partition = rng.choice(everyone)
                assert isinstance(partition, SlabPartition)
                keys = rng.sample(partition.store.keys(), 1)
                leased = partition.store.lease(keys, 1 << 50, 0).extents[0]
                assert leased is not None
                self.world.read.append(self.span(partition, leased))
            case 6:
                here = [*self.partitions.keys(), *self.warm.candidates()]
                gone = rng.sample(here, min(2, len(here)))
                for partition in self.partitions.all():
                    partition.store.remove(gone)
                self.partitions.settle()
                self.world.removed.update(gone)
            case 7:
                self.verify(rng.randrange(4))

    def check(self) -> int:
        """Everything found has its bytes, and nobody removed it; how many there are."""
        count = 0
        for partition in self.partitions.all():
            assert isinstance(partition, SlabPartition)
            keys = partition.store.keys()
            for key in keys:
                (extent,), (nbytes,) = partition.store.borrow([key]), partition.store.sizes([key])
                start, _ = self.span(partition, extent)
                assert nbytes and self.world.data[start : start + nbytes] == content(key, nbytes)
                assert key not in self.world.removed
                partition.store.release((extent,))
                count += 1
            partition.store.check_integrity()
        return count

    def kill(self) -> None:
        """As the kernel does: nothing is written, files are let go."""
        for store in list(self.warm._stores):
            store.close()
        self.warm.table.close()
        self.sums.close()
        self.warm._closed = True
        for handle in (self.warm._flushing, self.warm._letting_go):
            if handle is not None:
                handle.cancel()


def content(key: bytes, nbytes: int) -> bytes:
    return (key * (nbytes // 16 + 1))[:nbytes]


@pytest.mark.parametrize("seed", range(12))
async def test_only_what_was_sealed_comes_back_and_readers_keep_what_they_read(folder: Path, seed: int) -> None:
    rng, world, back = random.Random(seed), World(), 0
    for number in range(1, 6):
        life = Life(folder, world, rng, number)
        while life.asked and rng.randrange(4):
            life.step()
        life.verify(len(life.asked))
        back += life.check()
        for _ in range(rng.randrange(6)):
            life.step()
        last, world.read = world.read, []
        await asyncio.wait_for(life.warm.settled.wait(), 20)
        assert last or not world.read
        life.check()
        for _ in range(rng.randrange(20, 120)):
            life.step()
            if rng.randrange(4) == 0:
                await asyncio.sleep(0)
        life.check()
        life.kill()
    assert back > 10


@pytest.mark.slow
async def test_a_pool_node_has_its_blocks_again(folder: Path) -> None:
    """After a clean end, and after its memory's process was killed; over RPCs, with what was removed meanwhile."""
    ours, theirs = keys_of(*range(8)), keys_of(*range(20, 26))
    async with bench() as desk, master() as store:
        config = replace(pool_config(store.address), warm_segment=str(folder / "pool-0"), store_lease_ms=300)
        async with (
            node("a") as a,
            node("c", layout="another model", shard=24_576) as c,
            running(pool.run, config) as service,
        ):
            await a.fill(desk, ours)
            assert await ask(service.address, a, ours) == b"\1" * 8
            await c.fill(desk, theirs)
            assert await ask(service.address, c, theirs, "another model", 24_576) == b"\1" * 6
        with pytest.raises(InternalError, match="lost its memory"):
            await second_life(store, config, ours, theirs)
        async with (
            running(pool.run, config) as service,
            node("b") as b,
            node("d", layout="another model", shard=24_576) as d,
        ):
            await here_again(store, [*ours[2:], *theirs])
            source = await of_pool(service, 8)
            assert (await b.ended(b.pull(ours, [source]))).arrived == tuple(range(2, 8))
            await b.check(desk, ours[2:])
            assert len((await d.ended(d.pull(theirs, [source]))).arrived) == 6
            await d.check(desk, theirs)


async def second_life(store: Master, config: PoolConfig, ours: list[bytes], theirs: list[bytes]) -> None:
    """Has all blocks, is told to remove two, and its rank is killed."""
    async with running(pool.run, config) as service:
        await here_again(store, [*ours, *theirs])
        async with stub(service.address) as rpc:
            await rpc.Remove(pb.RemoveBlocksRequest(keys=b"".join(ours[:2])))
        ranks = children()
        for rank in ranks:
            os.kill(rank.pid, signal.SIGKILL)
        psutil.wait_procs(ranks, timeout=10)
        await asyncio.wait({service._task}, timeout=20)


async def here_again(store: Master, keys: list[bytes]) -> None:
    for key in keys:

        async def known(key: bytes = key) -> bool:
            return await store.holders(key) == ["pool-0"]

        await eventually(known)
