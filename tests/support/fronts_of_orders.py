"""Instances that take a conductor's orders: real fronts behind real servers, whose ranks are pretended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from kvmesh.errors import KvmeshError
from kvmesh.instance.config import InstanceConfig
from kvmesh.instance.front import Front
from kvmesh.instance.served_weights import LiveWeights, NewWeights, WeightsTaken
from kvmesh.instance.servicer import Switchable, add_instance
from kvmesh.instance.sleeping import InstanceSleep, SleepLevel
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.server import Server
from kvmesh.services.conductor.fleet.instance import Instance
from tests.support.nodes import until


class NoRanks(LiveWeights):
    """Takes weights when `go` is set, or raises `error`. `updates` are the epochs that it has begun."""

    def __init__(self) -> None:
        super().__init__((), 0)
        self.updating, self.go = asyncio.Event(), asyncio.Event()
        self.go.set()
        self.error: KvmeshError | None = None
        self.updates: list[int] = []

    async def update(self, new: NewWeights, deadline_s: float) -> WeightsTaken:
        new.check(self._highest)
        self._waiting = asyncio.get_running_loop().create_future()
        self.updates.append(new.epoch)
        self.updating.set()
        try:
            await self.go.wait()
        finally:
            self._waiting = None
        if self.error is not None:
            raise self.error
        self._highest = self.epoch = new.epoch
        return WeightsTaken(len(self.updates), 0.0, 0.0)


class NoRanksAsleep(InstanceSleep):
    """Sleeps, or raises `error`."""

    def __init__(self) -> None:
        super().__init__(())
        self.error: KvmeshError | None = None

    async def fall_asleep(self, level: SleepLevel, until: float, moved: Callable[[], None]) -> tuple[int, int]:
        if self.error is not None:
            raise self.error
        self.level = level
        return 100, 10

    async def wake(self, until: float) -> None:
        self.level = SleepLevel.AWAKE


class OneHalf:
    """Is what is paused of such an instance. `refused` is the error of requests."""

    empty, copies = True, False

    def __init__(self) -> None:
        self.refused: KvmeshError | None = None
        self.ended = 0

    def refuse(self, error: KvmeshError | None) -> None:
        self.refused = error

    def end_all(self, error: KvmeshError) -> int:
        self.ended += 1
        return 1

    async def leave_pages(self) -> None: ...

    def pages_moved(self) -> None: ...


class OrderedFront:
    """Is one instance; `known` is what a conductor knows of it."""

    def __init__(self, name: str, folder: Path, *, decodes: bool = True) -> None:
        self.front = Front(
            InstanceConfig(instance_id=name, model=str(folder)), pb.ROLE_BOTH, lambda rank, message: None
        )
        self.live, self.half, self.sleep = NoRanks(), OneHalf(), NoRanksAsleep()
        front: Any = self.front
        front._live, front._sleep = self.live, self.sleep
        front.ranks = [SimpleNamespace(ready=SimpleNamespace(fingerprint="ff"))]
        self.front.can_pause(self.half, on_weights=lambda: None)
        self.decodes = decodes

    @property
    def known(self) -> Instance:
        model = SimpleNamespace(name="m", weights_epoch=self.live.epoch, fingerprint="ff")
        name, address = self.front.instance_id, self.front.address
        ref = SimpleNamespace(instance_id=name, address=address, incarnation=1, life=(name, 1))
        found: Any = SimpleNamespace(
            model=model,
            ref=ref,
            role=SimpleNamespace(decodes=self.decodes),
            not_ready_reason="",
            external=False,
        )
        return cast(Instance, found)

    @property
    def works(self) -> bool:
        """Whether it takes requests, once it has looked whether leases have ended."""
        self.front._follow_holds()
        return self.half.refused is None

    def lease_ends(self) -> None:
        """Lets the time of the order's lease pass, for which nobody has renewed it."""
        self.front._pause.holds._pass(time.monotonic() + 1000)

    async def until_it_works(self) -> None:
        await until(lambda: self.works, 20)


@asynccontextmanager
async def ordered_fronts(folder: Path, *names: str) -> AsyncIterator[Sequence[OrderedFront]]:
    """Serves instances of these names; one of a name that begins with "p" does not decode."""
    fronts = [OrderedFront(name, folder, decodes=not name.startswith("p")) for name in names]
    servers = [Server("127.0.0.1", 0) for _ in fronts]
    try:
        for one, server in zip(fronts, servers, strict=True):
            add_instance(cast(Switchable, one.front), server)
            one.front.address = f"127.0.0.1:{await server.start()}"
        yield fronts
    finally:
        await asyncio.gather(*(server.stop(0) for server in servers))
