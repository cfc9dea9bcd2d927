"""Writers, readers and removers, each operation of which is written into the history. What is put is made of the seed.

Blocks under content keys come from a small set, so that puts, gets and removals of one key meet; blocks under granted
keys are new each time, larger, and press on the memory: nodes must evict, and move to SSD where they have one. Some
values stand: pinned hard, removed by nobody, read all the time; no miss of them is ever right while a holder lives.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.errors import KvmeshError
from tests.chaos.history import History, digest_of

SHARED_VALUES = 40
STANDING_VALUES = 16
SMALL = (1_000, 4_096, 20_000, 65_536, 200_000)
LARGE = (300_000, 500_000, 700_000)
PAUSE_S = (0.0, 0.04)
READER_PAUSE_S = (0.0, 0.03)
OP_S = 8.0
BATCH = 4
REMEMBERED = 200  # granted keys that readers ask for


@dataclass(frozen=True)
class Got:
    """`data` None: a miss."""

    data: bytes | memoryview | None
    holder: str = ""
    tier: str = ""


class Driver(Protocol):
    """A client of the store. Methods raise KvmeshError."""

    async def put(self, key: str, data: bytes, *, pinned: bool, timeout_s: float) -> str:
        """Under this key; returns who sealed it."""

    def content_key(self, data: bytes) -> str: ...

    async def grant(self, timeout_s: float) -> str:
        """A key that nobody else gets."""

    async def get(self, keys: Sequence[str], timeout_s: float) -> list[Got | KvmeshError]:
        """Each, in one call."""

    async def remove(self, key: str, timeout_s: float) -> tuple[Sequence[str], Sequence[str]]:
        """(who acknowledged, who could not be asked)."""

    async def replicate(self, key: str, replicas: int, timeout_s: float) -> None: ...


class Workload:
    """Some workers over some drivers, until `stop`. Anything but a KvmeshError ends the storm: it is a bug."""

    def __init__(self, history: History, drivers: Sequence[Driver], seed: int, workers: int = 10) -> None:
        self._history = history
        self._drivers = drivers
        self._workers = workers
        self._seed = seed
        rng = random.Random(f"values {seed}")
        values = [rng.randbytes(rng.choice(SMALL)) for _ in range(SHARED_VALUES + STANDING_VALUES)]
        self._values = {drivers[0].content_key(value): value for value in values}
        self._shared, self._standing = list(self._values)[:SHARED_VALUES], list(self._values)[SHARED_VALUES:]
        self._granted: deque[str] = deque(maxlen=REMEMBERED)
        self.stop = asyncio.Event()

    @property
    def keys(self) -> list[str]:
        """Of what is put and removed, then of what stands."""
        return [*self._shared, *self._standing]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for i in range(self._workers):
                group.create_task(self._work(i))

    async def read(self, driver: Driver, number: int) -> None:
        """One more, who only reads, many at once: what is there now, and what goes while it is read."""
        rng = random.Random(f"reader {self._seed} {number}")
        while not self.stop.is_set():
            keys = [self._pick(rng) for _ in range(2 * BATCH)] + rng.sample(self._standing, 2)
            await get(self._history, driver, f"reader-{number}", list(dict.fromkeys(keys)), OP_S)
            await asyncio.sleep(rng.uniform(*READER_PAUSE_S))

    async def _work(self, number: int) -> None:
        rng = random.Random(f"worker {self._seed} {number}")
        driver = self._drivers[number % len(self._drivers)]
        client = f"worker-{number}"
        for key in self._standing[number :: self._workers]:
            await put(self._history, driver, client, key, self._values[key], True, OP_S)
        while not self.stop.is_set():
            dice = rng.random()
            if dice < 0.24:
                key = rng.choice(self._shared)
                await put(self._history, driver, client, key, self._values[key], rng.random() < 0.35, OP_S)
            elif dice < 0.27:
                key = rng.choice(self._standing)
                await put(self._history, driver, client, key, self._values[key], True, OP_S)
            elif dice < 0.34:
                await self._put_granted(driver, client, rng)
            elif dice < 0.60:
                await get(self._history, driver, client, [rng.choice(self._standing)], OP_S)
            elif dice < 0.84:
                await get(self._history, driver, client, [self._pick(rng)], OP_S)
            elif dice < 0.90:
                keys = [*rng.sample(self._standing, BATCH), *(self._pick(rng) for _ in range(BATCH))]
                await get(self._history, driver, client, list(dict.fromkeys(keys)), OP_S)
            elif dice < 0.97:
                await self._remove(driver, client, self._pick(rng))
            else:
                await self._replicate(driver, client, self._pick(rng), rng.choice([2, 3]))
            await asyncio.sleep(rng.uniform(*PAUSE_S))

    def _pick(self, rng: random.Random) -> str:
        if self._granted and rng.random() < 0.2:
            return rng.choice(self._granted)
        return rng.choice(self._shared)

    # ── operations ────────────────────────────────────────────────────────────────────────────────

    async def _put_granted(self, driver: Driver, client: str, rng: random.Random) -> None:
        try:
            key = await driver.grant(OP_S)
        except KvmeshError:
            return  # nothing was promised
        self._history.end(self._history.begin(client, "grant", key, OP_S), "ok")
        data = rng.randbytes(rng.choice(LARGE))
        await put(self._history, driver, client, key, data, rng.random() < 0.05, OP_S)
        self._granted.append(key)

    async def _remove(self, driver: Driver, client: str, key: str) -> None:
        op = self._history.begin(client, "remove", key, OP_S)
        try:
            acknowledged, pending = await driver.remove(key, OP_S)
        except KvmeshError as error:
            self._history.end(op, "error", error=_named(error))
        else:
            self._history.end(op, "ok", acknowledged=acknowledged, pending=pending)

    async def _replicate(self, driver: Driver, client: str, key: str, replicas: int) -> None:
        op = self._history.begin(client, "copy", key, OP_S)
        try:
            await driver.replicate(key, replicas, OP_S)
        except KvmeshError as error:
            self._history.end(op, "error", error=_named(error))
        else:
            self._history.end(op, "ok")


async def put(
    history: History, driver: Driver, client: str, key: str, data: bytes, pinned: bool, timeout_s: float
) -> None:
    """One block, and what became of it into the history."""
    op = history.begin(client, "put", key, timeout_s, digest=digest_of(data), pinned=pinned)
    try:
        holder = await driver.put(key, data, pinned=pinned, timeout_s=timeout_s)
    except KvmeshError as error:
        history.end(op, "error", error=_named(error))
    else:
        history.end(op, "ok", holder=holder)


async def get(history: History, driver: Driver, client: str, keys: Sequence[str], timeout_s: float) -> None:
    """Some blocks in one call, each of which is an operation of its own in the history."""
    ops = [history.begin(client, "get", key, timeout_s) for key in keys]
    try:
        found = await driver.get(keys, timeout_s)
    except KvmeshError as error:
        found = [error] * len(keys)
    for op, got in zip(ops, found, strict=True):
        if isinstance(got, KvmeshError):
            history.end(op, "error", error=_named(got))
        elif got.data is None:
            history.end(op, "miss")
        else:
            history.end(op, "ok", digest=digest_of(got.data), holder=got.holder, tier=got.tier)


def _named(error: KvmeshError) -> str:
    return f"{error.code}: {error.message}"
