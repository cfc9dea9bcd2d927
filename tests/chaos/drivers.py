"""The public client as storms use it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvmesh.kvcache.client.client import StoreClient
from kvmesh.kvcache.client.config import ClientConfig
from kvmesh.kvcache.client.writing import Pin
from kvmesh.rpc.errors import Unavailable
from kvmesh.transfer import TransferEngine
from tests.chaos.workload import Got

NAMESPACE = "chaos"
PLACEMENTS = ("random", "best2", "random")
LOCATIONS = (0, 0, 1000)  # remembers none: asks the master every time


class ClientDriver:
    """Keys are hex. Everything is verified: READs are made to bring wrong bytes."""

    def __init__(self, store: str, host: str, number: int) -> None:
        self.client = StoreClient(
            ClientConfig(
                store=store,
                namespace=NAMESPACE,
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
            **({"pin": Pin.HARD} if pinned else {}),
        )
        if not done.held:
            raise Unavailable(done.cause)
        return done.store_id

    async def grant(self, timeout_s: float) -> str:
        return (await self.client.grant(timeout_ms=int(timeout_s * 1000)))[0].hex()

    async def get(self, key: str, timeout_s: float) -> Got:
        (got,) = await self.client.get_many([bytes.fromhex(key)], timeout_ms=int(timeout_s * 1000))
        if got.here:
            assert got.tier is not None
            return Got(got.data, got.store_id, got.tier.name)
        if got.cause:
            raise Unavailable(got.cause)
        return Got(None)

    async def remove(self, key: str, timeout_s: float) -> tuple[Sequence[str], Sequence[str]]:
        done = await self.client.remove(bytes.fromhex(key), timeout_ms=int(timeout_s * 1000))
        return done.acknowledged, done.pending

    async def replicate(self, key: str, replicas: int, timeout_s: float) -> None:
        await self.client.change_replica([bytes.fromhex(key)], replicas, timeout_ms=int(timeout_s * 1000))


@asynccontextmanager
async def drivers(count: int, store: str, host: str) -> AsyncIterator[list[ClientDriver]]:
    made = [ClientDriver(store, host, i) for i in range(count)]
    try:
        yield made
    finally:
        for driver in made:
            await driver.client.close()
