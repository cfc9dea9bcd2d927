"""The public client as storms use it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.storeclient.client import StoreClient
from kvmesh.storeclient.config import ClientConfig
from kvmesh.storeclient.memory import Buffer
from kvmesh.storeclient.reading.leased import Got as Read
from kvmesh.storeclient.reading.local import LocalReadPlan
from kvmesh.storeclient.writing import Pin, Put
from kvmesh.transfer import TransferEngine
from tests.chaos.workload import Got

NAMESPACE = "chaos"
LIMITED = "chaos-limited"
PLACEMENTS = ("random", "best2", "random")
LOCATIONS = (0, 0, 1000)  # remembers none: asks the master every time
SPAN = 1 << 20  # no value of a storm is larger
SPANS = 32
DAWDLES, DAWDLE_S = 0.3, 0.5
JUNK = b"\xa5" * SPAN


class ClientDriver:
    """Keys are hex. Everything is verified: READs are made to bring wrong bytes."""

    def __init__(self, store: str, host: str, number: int, namespace: str = NAMESPACE) -> None:
        self.client = StoreClient(
            ClientConfig(
                store=store,
                namespace=namespace,
                node_id=f"client-{number}",
                transports="tcp",
                host=host,
                placement=PLACEMENTS[number % len(PLACEMENTS)],
                verify=True,
                staging_mb=16,
                lease_ms=2000,
                read_within_ms=2000,
                locations=LOCATIONS[number % len(LOCATIONS)],
                fault="{}",
            )
        )

    @property
    def engine(self) -> TransferEngine:
        return self.client._engine

    def content_key(self, data: bytes) -> str:
        return self.client.content_key(data).hex()

    async def put(self, key: str, data: bytes, *, pinned: bool, timeout_s: float) -> str:
        (done,) = await self.client.put_many(
            [data],
            keys=[bytes.fromhex(key)],
            timeout_ms=int(timeout_s * 1000),
            pin=Pin.HARD if pinned else None,
        )
        return holder_of(done)

    async def grant(self, timeout_s: float) -> str:
        return (await self.client.grant(timeout_ms=int(timeout_s * 1000)))[0].hex()

    async def get(self, keys: Sequence[str], timeout_s: float) -> list[Got | KvmeshError]:
        found = await self.client.get_many(list(map(bytes.fromhex, keys)), timeout_ms=int(timeout_s * 1000))
        return [_got(one, one.data) for one in found]

    async def remove(self, key: str, timeout_s: float) -> tuple[Sequence[str], Sequence[str]]:
        done = await self.client.remove(bytes.fromhex(key), timeout_ms=int(timeout_s * 1000))
        return done.acknowledged, done.pending

    async def replicate(self, key: str, replicas: int, timeout_s: float) -> None:
        await self.client.change_replica([bytes.fromhex(key)], replicas, timeout_ms=int(timeout_s * 1000))

    async def bind(self, name: str, key: str, *, replace: bool, timeout_s: float) -> None:
        await self.client._keys.bind({name: bytes.fromhex(key)}, replace, time.monotonic() + timeout_s)

    async def resolve(self, name: str, *, unbind: bool, timeout_s: float) -> str:
        namespace = self.client.config.namespace
        ask = self.client.directory.unbind if unbind else self.client.directory.resolve
        (key,) = await ask(namespace, [name], timeout_s)
        return "" if key is None else key.hex()


class NearDriver(ClientDriver):
    """On the machine of some nodes: reads and writes in memory that both map, with no checksum to notice what is wrong.
    Memory is used again as soon as a call has returned, for other bytes."""

    def __init__(self, store: str, host: str, number: int, node_id: str) -> None:
        self.client = StoreClient(
            ClientConfig(
                store=store,
                namespace=NAMESPACE,
                node_id=node_id,
                transports="shm,tcp",
                host=host,
                placement=("local", "best2")[number % 2],
                staging_mb=16,
                lease_ms=2000,
                read_within_ms=2000,
            )
        )
        _dawdle(self.client, random.Random(f"near {number}"))
        self._free: asyncio.LifoQueue[Buffer] = asyncio.LifoQueue()
        for _ in range(SPANS):
            self._free.put_nowait(self.client.allocate(SPAN))
        self._own = number % 2 == 0  # memory that it reads into; else the client's

    async def put(self, key: str, data: bytes, *, pinned: bool, timeout_s: float) -> str:
        buffer = await self._free.get()
        try:
            buffer.view[: len(data)] = data
            (done,) = await self.client.put_many_from(
                [buffer.span(0, len(data))],
                keys=[bytes.fromhex(key)],
                timeout_ms=int(timeout_s * 1000),
                pin=Pin.HARD if pinned else None,
            )
        finally:
            buffer.view[:] = JUNK
            self._free.put_nowait(buffer)
        return holder_of(done)

    async def get(self, keys: Sequence[str], timeout_s: float) -> list[Got | KvmeshError]:
        if not self._own:
            return await super().get(keys, timeout_s)
        buffers = [await self._free.get() for _ in keys]
        try:
            for buffer in buffers:
                buffer.view[:] = JUNK
            found = await self.client.get_many_into(
                list(map(bytes.fromhex, keys)), [one.span() for one in buffers], timeout_ms=int(timeout_s * 1000)
            )
            return [_got(one, bytes(into.view[: one.nbytes])) for one, into in zip(found, buffers, strict=True)]
        finally:
            for buffer in buffers:
                self._free.put_nowait(buffer)


def _dawdle(client: StoreClient, rng: random.Random) -> None:
    """Sometimes it is interrupted between looking a block up and copying it, as a process may be at any time."""
    read = client._reader.local.read

    async def interrupted(plan: LocalReadPlan) -> list[Read | None]:
        if rng.random() < DAWDLES:
            await asyncio.sleep(rng.uniform(0, DAWDLE_S))
        return await read(plan)

    client._reader.local.read = interrupted  # type: ignore[method-assign]


def holder_of(done: Put) -> str:
    """Unavailable: nobody."""
    if not done.held:
        raise Unavailable(done.cause)
    return done.store_id


def _got(one: Read, data: bytes | None) -> Got | KvmeshError:
    if one.here:
        assert one.tier is not None
        return Got(data, one.store_id, one.tier.name)
    return Unavailable(one.cause) if one.cause else Got(None)


@asynccontextmanager
async def drivers(far: int, near: int, store: str, host: str, node_id: str) -> AsyncIterator[list[ClientDriver]]:
    """`far` ones, `near` ones, and one of the tenant that is limited."""
    made = [ClientDriver(store, host, i) for i in range(far)]
    made += [NearDriver(store, host, i, node_id) for i in range(near)]
    made.append(ClientDriver(store, host, far, LIMITED))
    try:
        yield made
    finally:
        for driver in made:
            await driver.client.close()
