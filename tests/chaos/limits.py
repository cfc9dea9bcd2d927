"""A tenant whose quota changes while it puts more than it may."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque

from kvmesh.errors import KvmeshError
from tests.chaos.drivers import ClientDriver
from tests.chaos.history import History
from tests.chaos.workload import get, put

LIMITS = (0, 12, 30, 60)
LAST = 25
SIZES = (1_000, 4_096, 9_000)
PAUSE_S = (0.0, 0.06)
CHANGE_S = (2.0, 6.0)
OP_S = 8.0
SETTLE_S = 25.0
REMEMBERED = 40


class LimitWork:
    """Puts and reads, until `stop`; nothing is pinned."""

    def __init__(self, history: History, driver: ClientDriver, seed: int, stop: asyncio.Event) -> None:
        self._history = history
        self._driver = driver
        self._random = random.Random(f"limits {seed}")
        self._stop = stop
        self._put: deque[str] = deque(maxlen=REMEMBERED)

    @property
    def tag(self) -> str:
        return self._driver.client.tag.hex()

    async def run(self) -> None:
        rng, change = self._random, 0.0
        while not self._stop.is_set():
            if time.monotonic() >= change:
                await self.limit(rng.choice(LIMITS))
                change = time.monotonic() + rng.uniform(*CHANGE_S)
            await self.put()
            if rng.random() < 0.3:
                await get(self._history, self._driver, "limited", [rng.choice(self._put)], OP_S)
            await asyncio.sleep(rng.uniform(*PAUSE_S))

    async def put(self) -> None:
        data = self._random.randbytes(self._random.choice(SIZES))
        key = self._driver.content_key(data)
        await put(self._history, self._driver, "limited", key, data, False, OP_S)
        self._put.append(key)

    async def limit(self, blocks: int) -> bool:
        op = self._history.begin("limited", "limit", self.tag, OP_S, digest=str(blocks))
        try:
            await self._driver.client.set_quota(
                self._driver.client.config.namespace, blocks, timeout_ms=int(OP_S * 1000)
            )
        except KvmeshError as error:
            self._history.end(op, "error", error=f"{error.code}: {error.message}")
            return False
        self._history.end(op, "ok")
        return True

    async def settle(self, blocks: int) -> None:
        """AssertionError: nobody takes that limit."""
        deadline = time.monotonic() + SETTLE_S
        while not await self.limit(blocks):
            assert time.monotonic() < deadline, f"a limit of {blocks} was not taken in {SETTLE_S} s"

    async def told(self) -> int:
        """The limit, as the master tells it; 0: none."""
        for one in await self._driver.client.quotas():
            if one.tag.hex() == self.tag:
                return one.blocks
        return 0
