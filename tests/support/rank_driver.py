"""Plays the front of real rank processes, message by message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from kvmesh.engine.axes import Axes
from kvmesh.instance.front import spawn_ranks
from kvmesh.ranks import protocol as m
from kvmesh.ranks.client import RankClient
from kvmesh.ranks.devices import STAGED_CPU
from kvmesh.ranks.lockstep import SPEAKERS

BLOCK = 16
GREEDY = m.Sampling(0.0, 1.0, 0, 1, -1)
M = TypeVar("M", bound=m.Message)


def staged_configure(checkpoint: Path) -> m.Configure:
    """Returns the configuration of a rank of one whose device copies late (`StagedCpuMemory`), over shm."""
    return m.Configure(
        instance_id="w",
        incarnation=1,
        rank=0,
        world_size=1,
        model_path=str(checkpoint),
        dtype="float32",
        device=STAGED_CPU,
        block_tokens=16,
        num_pages=8,
        num_extents=8,
        memory_bytes=0,
        threads=1,
        max_context_tokens=0,
        transports=("shm",),
    )


class Driver:
    """One rank and an inbox of what it said."""

    def __init__(self, rank: int = 0) -> None:
        self.inbox: list[m.ToFront] = []
        self.lost = ""
        self._news = asyncio.Event()
        self.on_message: Callable[[m.ToFront], bool] = lambda _: False  # whether it was for somebody else
        self.client = RankClient(rank, self._on_message, self._on_lost)

    def _on_message(self, _: int, message: m.ToFront) -> None:
        if self.on_message(message):
            return
        self.inbox.append(message)
        self._news.set()

    def _on_lost(self, _: int, cause: str) -> None:
        self.lost = cause
        self._news.set()

    @property
    def name(self) -> str:
        return self.client.ready.engine_name

    def page_offset(self, page: int) -> int:
        ready = self.client.ready
        return ready.page_base_offset + page * ready.shard_bytes

    @property
    def readies(self) -> list[m.Ready]:
        return [self.client.ready]

    def send_to(self, _: int, message: m.ToRank) -> None:
        self.client.send(message)

    async def take(self, kind: type[M] | tuple[type[M], ...], timeout_s: float = 60.0) -> M:
        """The oldest message of that kind; those of other kinds stay in the inbox."""
        async with asyncio.timeout(timeout_s):
            while True:
                for i, message in enumerate(self.inbox):
                    if isinstance(message, kind):
                        del self.inbox[i]
                        return message
                self._news.clear()
                await self._news.wait()

    async def until_lost(self, timeout_s: float = 60.0) -> str:
        async with asyncio.timeout(timeout_s):
            while not self.lost:
                self._news.clear()
                await self._news.wait()
        return self.lost


@asynccontextmanager
async def rank(
    name: str,
    checkpoint: Path | None,
    transports: tuple[str, ...] = ("shm",),
    pages: int = 24,
    device: str = "cpu",
    **settings: Any,
) -> AsyncIterator[Driver]:
    """A configured rank process (None: without an engine), told `settings` as well; on leaving, it is gone."""
    driver = Driver()
    driver.client.spawn(threads=1)
    try:
        configure = m.Configure(
            instance_id=name,
            incarnation=17,
            rank=0,
            world_size=1,
            model_path=str(checkpoint or ""),
            dtype="float32",
            device=device,
            block_tokens=BLOCK,
            num_pages=pages,
            num_extents=pages,
            memory_bytes=0 if checkpoint else 1 << 20,
            threads=1,
            max_context_tokens=0,
            transports=transports,
        )
        await driver.client.configure(msgspec.structs.replace(configure, **settings), timeout_s=60)
        yield driver
    finally:
        await driver.client.close()
    assert not psutil.pid_exists(driver.client.pid)


class AllRanks:
    """The ranks of one instance, driven as one: each gets every message, and what each says is taken from all."""

    def __init__(self, drivers: list[Driver], speaker: int = 0) -> None:
        self.drivers, self.speaker = drivers, speaker
        self.client: Any = self

    @property
    def ready(self) -> m.Ready:
        return self.drivers[0].client.ready

    @property
    def readies(self) -> list[m.Ready]:
        return [driver.client.ready for driver in self.drivers]

    @property
    def inbox(self) -> list[m.ToFront]:
        return self.drivers[self.speaker].inbox

    def send(self, message: m.ToRank) -> None:
        for driver in self.drivers:
            driver.client.send(message)

    def send_to(self, rank: int, message: m.ToRank) -> None:
        self.drivers[rank].client.send(message)

    async def take(self, kind: type[M] | tuple[type[M], ...], timeout_s: float = 30.0) -> M:
        """What the one that speaks for all said, once the others have said it, too, if they do."""
        found = await self.drivers[self.speaker].take(kind, timeout_s)
        if not isinstance(found, SPEAKERS):
            for driver in self.drivers:
                if driver is not self.drivers[self.speaker]:
                    await driver.take(kind, timeout_s)
        return found


AnyDriver = Driver | AllRanks


@asynccontextmanager
async def ranks(name: str, checkpoint: Path, count: int, folder: Path, **settings: Any) -> AsyncIterator[AllRanks]:
    """As `rank`, of an instance of `count` ranks that meet in `folder`."""
    drivers = [Driver(number) for number in range(count)]
    spawn_ranks([driver.client for driver in drivers], 1)
    settings = {
        "pages": 24,
        "group_file": str(folder / f"{name}-ranks"),
        "group_timeout_ms": 60_000,
        "mesh": f"tp={count}",
    } | settings
    pages = settings.pop("pages")
    try:
        known = msgspec.structs.replace(
            staged_configure(checkpoint), instance_id=name, device="cpu", num_pages=pages, num_extents=pages
        )
        configures = [
            msgspec.structs.replace(known, rank=number, world_size=count, **settings) for number in range(count)
        ]
        await asyncio.gather(*(d.client.configure(c, 120) for d, c in zip(drivers, configures, strict=True)))
        yield AllRanks(drivers, Axes.parse(configures[0].mesh).speaker)
    finally:
        for driver in drivers:
            await driver.client.close()
