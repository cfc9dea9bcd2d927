"""A real master, real pool nodes and clients of them, in this process."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from kvmesh.pool import pool
from kvmesh.pool.config import PoolConfig
from kvmesh.rpc import channels
from kvmesh.rpc.pb import store_pb2, store_pb2_grpc
from kvmesh.services.store.config import StoreConfig
from kvmesh.services.store.main import run as run_store
from kvmesh.storeclient import ClientConfig, StoreClient
from tests.support.services import Running, running, until

MIB = 1 << 20


@dataclass
class Stores:
    """`nodes`: by name. They can be stopped before the end."""

    master: Running
    nodes: dict[str, Running] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return self.master.address

    @contextlib.asynccontextmanager
    async def client(self, **settings: Any) -> AsyncIterator[StoreClient]:
        words = {"staging_mb": 8, "timeout_ms": 15_000, "node_id": "far", "host": "127.0.0.1", **settings}
        async with StoreClient(ClientConfig(store=self.address, **words)) as client:
            yield client


@contextlib.asynccontextmanager
async def stores(*nodes: str, memory_mb: int = 32, **settings: Any) -> AsyncIterator[Stores]:
    """A master and these pool nodes, each on a machine of its own name."""
    config = StoreConfig(heartbeat_interval_ms=100, lease_ms=2_000)
    async with contextlib.AsyncExitStack() as stack:
        made = Stores(await stack.enter_async_context(running(run_store, config)))
        for name in nodes:
            node = PoolConfig(
                instance_id=name,
                node_id=f"machine-{name}",
                store=made.address,
                memory_mb=memory_mb,
                announce_ms=5,
                **settings,
            )
            made.nodes[name] = await stack.enter_async_context(running(pool.run, node))
        await until(lambda: _joined(made))
        yield made


async def _joined(made: Stores) -> bool:
    """Whether the master knows every node, and what each of them has: before, clients are told that there is none."""
    async with channels.connect(made.address) as channel:
        stub = store_pb2_grpc.StoreMasterStub(channel)
        told = await stub.GetStatus(store_pb2.GetStoreStatusRequest(), timeout=5, wait_for_ready=True)
    return {store.member.store_id for store in told.stores if store.usage.capacity_bytes} == set(made.nodes)


def values(seed: int, *sizes: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(size) for size in sizes]
