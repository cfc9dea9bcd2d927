"""A pool node as it is served, and callers with memory of their own."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest
import xxhash

from kvmesh.errors import KvmeshError
from kvmesh.pool import pool
from kvmesh.pool.config import PoolConfig
from kvmesh.rpc import status
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import blocks_pb2_grpc as pb_grpc
from kvmesh.transfer import EngineConfig, Opcode, TransferEngine, TransferRequest, TransferState
from tests.support.nodes import stub
from tests.support.services import running, until

NAMES = itertools.count()
RNG = random.Random(11)


@dataclass
class Caller:
    """One transfer engine with memory that it puts from and gets into."""

    rpc: pb_grpc.NodeStoreAsyncStub
    incarnation: int
    engine: TransferEngine
    nbytes: int = 8 << 20
    blocks: dict[bytes, bytes] = field(default_factory=dict)  # what was put

    def __post_init__(self) -> None:
        self.region = self.engine.allocate(self.nbytes, "cpu:0")
        assert self.region.memory is not None
        self.memory = self.region.memory

    def request(self, keys: Sequence[bytes], sizes: Sequence[int], **more: object) -> pb.PutBlocksRequest:
        """A Put of random bytes."""
        at, offsets = 64, []
        for key, size in zip(keys, sizes, strict=True):
            self.blocks[key] = RNG.randbytes(size)
            self.memory[at : at + size] = self.blocks[key]
            offsets.append(self.region.base_offset + at)
            at += size
        good: dict[str, object] = {
            "keys": b"".join(keys),
            "layout": "bytes",
            "segment": self.engine.name,
            "segment_descriptor": self.engine.local_descriptor().encode(),
            "offset": offsets,
            "nbytes": sizes,
            "read_within_ms": 10_000,
        }
        return pb.PutBlocksRequest(**(good | more))  # type: ignore[arg-type]

    async def put(self, keys: Sequence[bytes], sizes: Sequence[int], **more: object) -> pb.PutBlocksResponse:
        return await self.rpc.Put(self.request(keys, sizes, **more), timeout=30)

    async def lease(self, keys: Sequence[bytes], **more: object) -> pb.LeaseResponse:
        good: dict[str, object] = {
            "reader": "r",
            "holder_incarnation": self.incarnation,
            "keys": b"".join(keys),
            "lease_ms": 20_000,
            "layout": "bytes",
            "want_descriptors": True,
        }
        return await self.rpc.Lease(pb.LeaseRequest(**(good | more)), timeout=20)  # type: ignore[arg-type]

    async def release(self, lease: pb.LeaseResponse) -> None:
        await self.rpc.ReleaseLease(pb.ReleaseBlocksRequest(lease_id=lease.lease_id))

    async def read(self, keys: Sequence[bytes], lease: pb.LeaseResponse) -> None:
        """The bytes under a lease are those that were put."""
        rank = lease.ranks[0]
        name = self.engine.open_segment(rank.segment_descriptor)
        held = [key for key, here in zip(keys, lease.held, strict=True) if here]
        for key, offset, size in zip(held, rank.offset, lease.nbytes, strict=True):
            assert size == len(self.blocks[key])
            batch = self.engine.allocate_batch(1)
            self.engine.submit(batch, [TransferRequest(Opcode.READ, self.region.address, name, offset, size)])
            await self.engine.wait(batch)
            assert self.engine.status(batch, 0).state is TransferState.COMPLETED
            self.engine.free_batch(batch)
            assert bytes(self.memory[:size]) == self.blocks[key], f"wrong bytes under {key.hex()}"
        for at, sum_ in enumerate(rank.checksum):
            assert sum_ == xxhash.xxh3_64_intdigest(self.blocks[held[at]])

    async def check(self, keys: Sequence[bytes]) -> None:
        """All of them are held, with the right bytes and sums."""
        lease = await self.lease(keys, want_checksums=True)
        assert lease.held == b"\1" * len(keys) and len(lease.ranks[0].checksum) == len(keys)
        await self.read(keys, lease)
        await self.release(lease)

    async def counts(self) -> pb.GetNodeStoreResponse:
        return await self.rpc.GetStore(pb.GetNodeStoreRequest())

    async def idle(self) -> None:
        """Nothing is written or leased any more."""

        async def quiet() -> bool:
            told = await self.counts()
            return (told.pools.store_writing, told.pools.store_leases) == (0, 0)

        await until(quiet)


def config(**changes: object) -> PoolConfig:
    good: dict[str, object] = {"instance_id": "pool-0", "store": "127.0.0.1:1", "memory_mb": 4, "announce_ms": 10}
    return PoolConfig(**(good | changes))  # type: ignore[arg-type]


@asynccontextmanager
async def pool_and_caller(transport: str = "shm", **changes: object) -> AsyncIterator[Caller]:
    """One pool node, one caller in this process."""
    async with running(pool.run, config(transports=transport, **changes)) as service, stub(service.address) as rpc:
        told = await rpc.GetStore(pb.GetNodeStoreRequest())
        name = f"caller-{next(NAMES)}@{os.getpid():x}"
        engine = TransferEngine(name, EngineConfig(transports=(transport,)))
        try:
            yield Caller(rpc, told.instance.incarnation, engine)
        finally:
            await asyncio.to_thread(engine.close)


async def refused(call: Awaitable[Any]) -> KvmeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return status.from_rpc_error(caught.value)


async def held(caller: Caller, keys: list[bytes]) -> bytes:
    return bytes(map(bool, (await caller.rpc.Exists(pb.ExistsRequest(keys=b"".join(keys)))).tiers))
