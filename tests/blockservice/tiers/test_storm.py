"""Puts, leases, evictions, removals and a slow tier in any order: right bytes, nothing removed is back, no leaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvmesh.blockservice.leasing import Leasing
from kvmesh.blockservice.partitions import Partition, holder
from kvmesh.blockservice.removal_applier import RemovalApplier
from kvmesh.blockservice.tiers.parts import TierSettings
from kvmesh.blockservice.tiers.tiering import Tiering
from kvmesh.errors import Overloaded
from kvmesh.kvcache.size_classes import BYTES
from kvmesh.kvcache.tiers import Tier
from kvmesh.pool.partitions import PoolPartitions
from kvmesh.ranks import protocol as m
from kvmesh.rpc.pb import common_pb2 as pb_common
from tests.support.nodes import keys_of

REGION = 2 << 20
KEYS = [bytes([n % 3]) + key[1:] for n, key in enumerate(keys_of(*range(60)))]
LAYOUTS = (("one", 8192), ("two", 24_576), (BYTES, 5_000), (BYTES, 40_000), (BYTES, 3_000))


class Memory:
    """Who has written where: a page's worth of bytes stands for itself."""

    def __init__(self) -> None:
        self.pages = [b""] * (REGION // 1024)

    def write(self, offset: int, size: int, value: bytes) -> None:
        for page in range(offset // 1024, -(-(offset + size) // 1024)):
            self.pages[page] = value

    def read(self, offset: int, size: int) -> bytes:
        found = {self.pages[page] for page in range(offset // 1024, -(-(offset + size) // 1024))}
        return found.pop() if len(found) == 1 else b"mixed"


class SlowDisk:
    """A rank's tiers: does what it was told much later, in order for writes and removals, reads whenever. `chain`: what
    the first one evicts goes to the second one, much later."""

    def __init__(self, memory: Memory, rng: random.Random, chain: bool) -> None:
        self.memory, self.rng, self.chain = memory, rng, chain
        self.tiering: Tiering | None = None
        self.log: list[m.ToRank] = []
        self.reads: list[tuple[m.TierGet, list[tuple[int, bytes, int]]]] = []
        self.blocks: dict[tuple[int, int], dict[bytes, tuple[bytes, int]]] = {}  # (tier, part) → key → value, bytes
        self.moving: list[tuple[int, bytes, tuple[bytes, int]]] = []  # (part, key, block) on its way down
        self.demoted = 0
        self.unwanted: set[tuple[int, bytes]] = set()  # (ticket, key): removed before it was written

    def send(self, message: m.ToRank, /) -> None:
        if isinstance(message, m.TierGet):
            names = [message.keys[at : at + 16] for at in range(0, len(message.keys), 16)]
            here = self.blocks.get((message.tier, message.part), {})
            found = [(at, name, here[name][1]) for at, name in enumerate(names) if name in here]
            self.reads.append((message, found))
            return
        if isinstance(message, m.TierRemove):  # found no more at once; written down later
            for at in range(0, len(message.keys), 16):
                name = message.keys[at : at + 16]
                for waiting in self.log:
                    if isinstance(waiting, m.TierPut) and (waiting.tier, waiting.part) == (message.tier, message.part):
                        self.unwanted.add((waiting.ticket, name))
                if message.tier == Tier.OBJECT:
                    for move in [move for move in self.moving if move[:2] == (message.part, name)]:
                        self.moving.remove(move)
                        self.say(m.TierMoving(Tier.OBJECT, message.part, name, True))
                if self.blocks[message.tier, message.part].pop(name, None):
                    self.say(m.TierChanged(message.tier, message.part, b"", name))
        self.log.append(message)

    def say(self, message: m.ToFront) -> None:
        assert self.tiering is not None
        asyncio.get_running_loop().call_soon(self.tiering.rank_said, 0, message)

    def work(self) -> None:
        if self.moving and self.rng.random() < 0.2:
            self.arrive()
        elif self.chain and self.rng.random() < 0.2:
            self.evict()
        elif self.reads and self.rng.random() < 0.5:
            get, found = self.reads.pop(self.rng.randrange(len(self.reads)))
            done = []
            for at, name, size in found:
                block = self.blocks[get.tier, get.part].get(name)
                # A read that finds nothing leaves anything behind.
                self.memory.write(get.offsets[at], size, block[0] if block else b"rubbish")
                if block:
                    done.append((at, size))
            self.say(m.TierDone(get.ticket, tuple(at for at, _ in done), tuple(size for _, size in done), 0, 1))
        elif self.log:
            message = self.log.pop(0)
            match message:
                case m.TierOpen(tier, part):
                    self.blocks.setdefault((tier, part), {})
                    self.say(m.TierOpened(tier, part))
                case m.TierPut(ticket, tier, part, keys, offsets, sizes, _):
                    stored: list[int] = []
                    told: list[tuple[bytes, int]] = []
                    for at, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                        name = keys[at * 16 : at * 16 + 16]
                        if (ticket, name) in self.unwanted or self.rng.random() < 0.1:
                            continue
                        if name not in self.blocks[tier, part]:
                            self.blocks[tier, part][name] = (self.memory.read(offset, size), size)
                            told.append((name, size))
                        stored.append(at)
                    if told:
                        packed = b"".join(name for name, _ in told)
                        self.say(m.TierChanged(tier, part, packed, b"", tuple(size for _, size in told)))
                    self.say(m.TierDone(ticket, tuple(stored), tuple(sizes[at] for at in stored), 0, 1))
                case m.TierRemove(ticket, _, _, keys):
                    count = len(keys) // 16
                    self.say(m.TierDone(ticket, tuple(range(count)), (0,) * count, 0, 1))
        elif self.rng.random() < 0.2:
            self.evict()

    def arrive(self) -> None:
        """The end of one way down."""
        part, name, block = self.moving.pop(self.rng.randrange(len(self.moving)))
        if self.rng.random() < 0.8:  # else the store has failed
            self.demoted += 1
            self.blocks[Tier.OBJECT, part][name] = block
            self.say(m.TierChanged(Tier.OBJECT, part, name, b"", (block[1],)))
        self.say(m.TierMoving(Tier.OBJECT, part, name, True))

    def evict(self) -> None:
        """A tier's own."""
        here = [place for place, blocks in self.blocks.items() if blocks]
        if not here:
            return
        tier, part = self.rng.choice(here)
        name = self.rng.choice(list(self.blocks[tier, part]))
        block = self.blocks[tier, part].pop(name)
        if self.chain and tier == Tier.SSD and name not in self.blocks[Tier.OBJECT, part]:
            self.say(m.TierMoving(Tier.OBJECT, part, name))
            self.moving.append((part, name, block))
        self.say(m.TierChanged(tier, part, b"", name))


class Storm:
    def __init__(self, seed: int, path: Path, chain: bool) -> None:
        self.rng = random.Random(seed)
        self.memory = Memory()
        self.partitions = PoolPartitions(0, REGION, high_percent=95, low_percent=85, lease_seed=seed)
        self.disk = SlowDisk(self.memory, self.rng, chain)
        objects = TierSettings(Path(), 0, 20, 30, layouts=3, url="memory://x") if chain else None
        settings = TierSettings(path, 1 << 30, 20, 30, layouts=3, below=objects)
        ref = pb_common.InstanceRef(instance_id="a", address="h:1", incarnation=1)
        self.tiering = self.disk.tiering = Tiering(settings, lambda: ref, [self.disk], self.partitions)
        self.leasing = Leasing(self.partitions)
        self.desk = RemovalApplier(self.partitions, self.forget, self.tiering.named, None)
        self.version = dict.fromkeys(KEYS, 0)  # of the last removal that was asked for
        self.gone: dict[bytes, int] = {}  # acknowledged: nothing put before may be read
        self.now = 1
        self.tasks: set[asyncio.Task[None]] = set()
        self.read = 0

    def value(self, key: bytes, version: int) -> bytes:
        return key + version.to_bytes(4, "big")

    async def forget(self, keys: Sequence[bytes], /) -> int:
        for partition in self.partitions.all():
            partition.store.remove(keys)
        here = await self.tiering.forget(keys)
        self.partitions.settle()
        return len(here)

    async def pause(self) -> None:
        for _ in range(self.rng.randrange(6)):
            await asyncio.sleep(0)

    async def put(self) -> None:
        layout, size = self.rng.choice(LAYOUTS)
        keys = self.rng.sample(KEYS, self.rng.randrange(1, 6))
        keys = [key for key in keys if not any(p.store.writing(key) for p in self.partitions.all())]
        watch = self.desk.watch()
        versions = {key: self.version[key] for key in keys}
        begun: dict[bytes, tuple[Partition, int]] = {}
        try:
            partition = self.partitions.room(layout, size, len(keys))
            self.tiering.follow(partition)
            if self.rng.random() < 0.3:
                await self.tiering.room(partition, len(keys), 0.001)
                partition = self.partitions.room(layout, size, len(keys))
                self.tiering.follow(partition)
            family = self.partitions.family(layout)
            keys = [key for key in keys if not any(p.store.holds(key) or p.store.writing(key) for p in family)]
            for key, extent in zip(keys, partition.store.begin(keys), strict=True):
                if extent is not None:
                    begun[key] = (partition, extent)
            for key, (where, extent) in begun.items():
                await self.pause()
                self.memory.write(where.offset(0, extent), size, self.value(key, versions[key]))
        except Overloaded:
            pass
        finally:
            self.desk.unwatch(watch)
            for key, (where, _) in begun.items():
                (where.store.abandon if watch.gone(key) else where.store.seal)(
                    *((key,) if watch.gone(key) else (key, size))
                )
            self.partitions.settle()

    async def lease(self) -> None:
        layout = self.rng.choice([*{name for name, _ in LAYOUTS}, ""])
        keys = self.rng.sample(KEYS, self.rng.randrange(1, 10))
        since = {key: self.gone.get(key, 0) for key in keys}
        await self.tiering.stage(layout, keys, 0.01)
        since = {key: max(since[key], self.gone.get(key, 0)) for key in keys}
        lease = self.leasing.lease(layout, keys, 1 << 60, self.now)
        if not lease.lease_id:
            return
        held = [(key, *place) for key, place in zip(keys, lease.places, strict=True) if place is not None]
        spans = [(key, p.offset(0, e), p.store.sizes([key])[0] or p.shard_bytes) for key, p, e in held]
        for _ in range(3):
            for key, offset, size in spans:
                found = self.memory.read(offset, size)
                assert found[:16] == key, f"wrong bytes under {key.hex()}: {found!r}"
                assert int.from_bytes(found[16:], "big") >= since[key], "removed, acknowledged, and read"
                self.read += 1
            await self.pause()
        self.leasing.release(lease.lease_id)
        self.partitions.settle()

    async def remove(self) -> None:
        keys = self.rng.sample(KEYS, self.rng.randrange(1, 4))
        prefix = bytes([self.rng.randrange(3)]) if self.rng.random() < 0.1 else b""
        found = [key for key in KEYS if key.startswith(prefix)] if prefix else keys
        for key in found:
            self.version[key] += 1
        asked = {key: self.version[key] for key in found}
        await self.desk.remove([] if prefix else keys, prefix)
        for key, version in asked.items():
            self.gone[key] = max(self.gone.get(key, 0), version)

    async def quiet(self) -> None:
        while self.tasks or self.disk.log or self.disk.reads or self.tiering._tasks or self.disk.moving:
            self.disk.work()
            await asyncio.sleep(0)

    def check(self) -> None:
        for partition in self.partitions.all():
            store = partition.store
            store.check_integrity()
            usage = store.usage
            assert (usage.writing, usage.held, usage.leased, store.stats.leases) == (0, 0, 0, 0), usage
        assert self.tiering._staging._staged_bytes == 0
        for level in self.tiering.levels:
            for name, part in level.parts.items():
                assert not part.writing and not part.staging
                assert set(part.contents.keys()) == set(self.disk.blocks[part.tier, part.number]), name
                assert part.contents.named() == part.contents.keys(), "nothing moves any more"
        for key, version in self.gone.items():
            for blocks in self.disk.blocks.values():
                written = blocks[key][0] if key in blocks else self.value(key, version)
                assert int.from_bytes(written[16:], "big") >= version, "removed, and on the disk"
            where = holder(self.partitions, "", key)
            if where is not None:
                (extent,) = where.store.borrow([key])
                found = self.memory.read(where.offset(0, extent), 1)
                where.store.release([extent])
                assert int.from_bytes(found[16:], "big") >= version, "removed, and in memory"


@pytest.mark.parametrize(("seed", "chain"), [(0, False), (1, True), (2, False), (3, True)])
async def test_a_storm(seed: int, chain: bool, tmp_path: Path) -> None:
    storm = Storm(seed, tmp_path, chain)
    if chain:
        storm.tiering.remember(storm.desk.watch())
    errors: list[BaseException] = []

    def ended(task: asyncio.Task[None]) -> None:
        storm.tasks.discard(task)
        if task.exception() is not None:
            errors.append(task.exception())  # type: ignore[arg-type]

    for step in range(3000):
        storm.now += 1
        if len(storm.tasks) < 12:
            work = storm.rng.choices([storm.put, storm.lease, storm.remove], [5, 5, 1])[0]
            task = asyncio.ensure_future(work())
            storm.tasks.add(task)
            task.add_done_callback(ended)
        if storm.rng.random() < 0.5:
            storm.disk.work()
        if step % 100 == 99:
            storm.tiering.tidy()
        await asyncio.sleep(0)
        assert not errors, errors
    await storm.quiet()
    assert not errors, errors
    storm.check()
    assert storm.read > 1000 and storm.disk.blocks and (storm.disk.demoted > 20) == chain
    await storm.tiering.close()
