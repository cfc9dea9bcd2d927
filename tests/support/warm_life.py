"""A process with a real rank whose memory outlives it: seals, evicts, removes, as fast as it can, until it is killed.

    python -m tests.support.warm_life FOLDER SEED

Writes one line for each thing the world may rely on: "seal KEY" before a key may be found, "gone KEY" once it may be
found no more, "sealed N" now and then.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from kvmesh.blockservice.warm.memory import WarmMemory
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.ranks import protocol as m
from kvmesh.transfer import EngineConfig, TransferEngine
from tests.support.rank_driver import Driver

EXTENTS = 24
SHARD = 256 << 10
LEASE_MS = 10


def content(key: bytes) -> bytes:
    """Of a block, by its key: random bytes."""
    return np.random.default_rng(int.from_bytes(key, "little")).bytes(SHARD)


class Life:
    """A rank, its node store, and an engine whose memory the rank pulls from."""

    def __init__(self, driver: Driver, engine: TransferEngine, folder: str, incarnation: int) -> None:
        self.driver, self.engine = driver, engine
        self.store = NodeStore(EXTENTS, high_percent=90, low_percent=60)
        self.region = engine.allocate(SHARD)
        self.warm = WarmMemory(folder, [driver.client], EXTENTS, incarnation)
        self.warm.keep(self.store, SHARD)
        self.tickets = 0

    def offset(self, extent: int) -> int:
        return self.driver.client.ready.extent_base_offset + extent * SHARD

    async def write(self, key: bytes) -> bool:
        """Begins, fills and seals it; false: no room."""
        (extent,) = self.store.begin([key])
        if extent is None:
            return False
        assert self.region.memory is not None
        self.region.memory[:] = content(key)
        self.tickets += 1
        far = time.monotonic_ns() + 20_000_000_000
        source, landing = (self.region.base_offset,), (self.offset(extent),)
        self.driver.client.send(m.PullOpen(self.tickets, self.engine.name, source, landing, SHARD, far))
        ended = await self.driver.take(m.PullEnded)
        assert not ended.cause
        self.store.seal(key)
        return True


@asynccontextmanager
async def life(folder: str, incarnation: int) -> AsyncIterator[Life]:
    """On leaving, all of it has ended in order."""
    driver = Driver()
    driver.client.spawn(threads=1)
    engine = TransferEngine(f"source@{incarnation:x}", EngineConfig(transports=("shm",)))
    found: Life | None = None
    try:
        await driver.client.configure(configure(folder, incarnation), timeout_s=30)
        found = Life(driver, engine, folder, incarnation)
        driver.on_message = found.warm.rank_said
        driver.client.send(m.OpenSegment(engine.local_descriptor().encode()))
        yield found
    finally:
        if found is not None:
            found.warm.close()
        await driver.client.close()
        engine.close()


def configure(folder: str, incarnation: int, nbytes: int = EXTENTS * SHARD) -> m.Configure:
    return m.Configure(
        instance_id="warm",
        incarnation=incarnation,
        rank=0,
        world_size=1,
        model_path="",
        dtype="",
        device="cpu",
        block_tokens=0,
        num_pages=0,
        num_extents=0,
        memory_bytes=nbytes,
        threads=1,
        max_context_tokens=0,
        transports=("shm",),
        warm_segment=folder,
        warm_lease_ms=LEASE_MS,
    )


async def work(folder: str, seed: int) -> None:
    rng = random.Random(seed)

    def say(*words: object) -> None:
        sys.stdout.write(" ".join(str(word) for word in words) + "\n")
        sys.stdout.flush()

    async with life(folder, time.time_ns()) as one:
        for number in range(1_000_000):
            key = rng.randbytes(16)
            say("seal", key.hex())
            if not await one.write(key):
                await one.warm.settled.wait()  # room comes with the end of the last life's leases
                assert await one.write(key)
            keys = one.store.keys()
            if rng.randrange(8) == 0:
                gone = [rng.choice(keys), *rng.sample(one.warm.candidates(), min(1, len(one.warm.candidates())))]
                one.store.remove(gone)
                for each in gone:
                    say("gone", each.hex())
            say("sealed", number)


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], int(sys.argv[2])))
