"""Names bound, replaced, unbound and looked up by several clients at once, under whoever leads."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Protocol

from kvmesh.errors import InvalidRequest, KvmeshError
from tests.chaos.history import History

NAMES = 6
KEYS = 5
WORKERS = 2
PAUSE_S = (0.0, 0.08)
OP_S = 8.0


class Directory(Protocol):
    """A client of the store. Methods raise KvmeshError."""

    async def bind(self, name: str, key: str, *, replace: bool, timeout_s: float) -> None:
        """InvalidRequest: it stands for another block."""

    async def resolve(self, name: str, *, unbind: bool, timeout_s: float) -> str:
        """The key that it stands for, or stood for; "": none."""


class NameWork:
    """Some workers over some clients, until `stop`. `keys`: of blocks that others put and remove."""

    def __init__(
        self, history: History, clients: Sequence[Directory], keys: Sequence[str], seed: int, stop: asyncio.Event
    ) -> None:
        self._history = history
        self._clients = clients
        self._keys = keys
        self._seed = seed
        self._stop = stop

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for i in range(WORKERS):
                group.create_task(self._work(i))

    async def _work(self, number: int) -> None:
        rng = random.Random(f"names {self._seed} {number}")
        client, who = self._clients[number % len(self._clients)], f"namer-{number}"
        while not self._stop.is_set():
            name, dice = f"name-{rng.randrange(NAMES)}", rng.random()
            if dice < 0.25:
                await self._bind(client, who, name, rng.choice(self._keys), False)
            elif dice < 0.35:
                await self._bind(client, who, name, rng.choice(self._keys), True)
            else:
                await self._resolve(client, who, name, dice < 0.45)
            await asyncio.sleep(rng.uniform(*PAUSE_S))

    async def _bind(self, client: Directory, who: str, name: str, key: str, replace: bool) -> None:
        op = self._history.begin(who, "bind", name, OP_S, digest=key, replace=replace)
        try:
            await client.bind(name, key, replace=replace, timeout_s=OP_S)
        except InvalidRequest:
            self._history.end(op, "taken")
        except KvmeshError as error:
            self._history.end(op, "error", error=f"{error.code}: {error.message}")
        else:
            self._history.end(op, "ok")

    async def _resolve(self, client: Directory, who: str, name: str, unbind: bool) -> None:
        op = self._history.begin(who, "unbind" if unbind else "resolve", name, OP_S)
        try:
            key = await client.resolve(name, unbind=unbind, timeout_s=OP_S)
        except KvmeshError as error:
            self._history.end(op, "error", error=f"{error.code}: {error.message}")
        else:
            self._history.end(op, "ok", digest=key)
