"""Node stores for tests: a real rank without an engine, a real gRPC server, `BlockService` between them."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc.aio
import psutil

from kvmesh.blockservice.blocks import BlockService
from kvmesh.blockservice.partitions import OnePartition, Partition
from kvmesh.blockservice.peer_segments import PeerSegments
from kvmesh.blockservice.tiers.parts import TierSettings
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.sources import Pulled, PullJob, PullRange
from kvmesh.kvcache.tiers import Tier
from kvmesh.membership.registrar import Registrar
from kvmesh.ranks import protocol as m
from kvmesh.ranks.client import RankClient
from kvmesh.rpc import channels
from kvmesh.rpc.pb import blocks_pb2_grpc as pb_grpc
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import conductor_pb2 as pb_conductor
from kvmesh.rpc.server import Server
from kvmesh.transfer import EngineConfig, Opcode, TransferEngine, TransferRequest, TransferState

SHARD = 8192
LAYOUT = "tests 2x2x1x16x32"
OWN_TICKETS = itertools.count(1 << 40)


def keys_of(*names: object) -> list[bytes]:
    """16 bytes for each name."""
    return [hashlib.sha256(str(name).encode()).digest()[:16] for name in names]


def content(key: bytes, nbytes: int = SHARD) -> bytes:
    """What the block of this key holds, wherever it lies."""
    return (hashlib.sha256(key).digest() * (nbytes // 32 + 1))[:nbytes]


class Bench:
    """The test's own transfer engine: writes blocks into nodes (they pull) and reads them back."""

    def __init__(self, transports: tuple[str, ...] = ("shm", "tcp")) -> None:
        self.engine = TransferEngine(f"bench@{time.monotonic_ns():x}", EngineConfig(transports=transports))
        self.region = self.engine.allocate(256 * SHARD, "cpu:0")
        assert self.region.memory is not None
        self.memory = self.region.memory

    async def read(self, rank: RankClient, offset: int, nbytes: int) -> bytes:
        """One-sided, past every lease."""
        name = self.engine.open_segment(rank.ready.descriptor)
        batch = self.engine.allocate_batch(1)
        self.engine.submit(batch, [TransferRequest(Opcode.READ, self.region.address, name, offset, nbytes)])
        await self.engine.wait(batch)
        assert self.engine.status(batch, 0).state is TransferState.COMPLETED
        self.engine.free_batch(batch)
        return bytes(self.memory[:nbytes])

    async def write(self, node: Node, blocks: Sequence[tuple[bytes, int]], nbytes: int) -> None:
        """Have a node's rank copy each key's content to the offset that stands beside it."""
        descriptor = self.engine.local_descriptor().encode()
        offsets = []
        for i, (key, _) in enumerate(blocks):
            self.memory[i * nbytes : (i + 1) * nbytes] = content(key, nbytes)
            offsets.append(self.region.base_offset + i * nbytes)
        landing = tuple(offset for _, offset in blocks)
        ended = await node.raw_pull(descriptor, tuple(offsets), landing, nbytes)
        assert not ended.cause, ended

    def close(self) -> None:
        self.engine.close()


class Node:
    """One node store, as an instance would have it, without a role."""

    def __init__(
        self,
        name: str,
        *,
        total: int,
        lease_ms: int,
        incarnation: int,
        offload_percent: int,
        layout: str,
        shard: int,
        tiers: TierSettings | None = None,
    ) -> None:
        self.tiers = tiers
        self.name = name
        self.incarnation = incarnation
        self.address = ""
        self.rank = RankClient(0, self._said, self._lost)
        self.segments = PeerSegments([self.rank])
        self.store = NodeStore(total, lease_seed=incarnation)
        self.pulled: dict[int, asyncio.Future[Pulled]] = {}
        self._raw: dict[int, asyncio.Future[m.PullEnded]] = {}
        self._lease_ms = lease_ms
        self.layout = layout
        self.shard = shard
        self._offload_percent = offload_percent
        self._tickets = itertools.count(1)
        self.server: Server | None = None
        self.blocks: BlockService | None = None
        self.lost = ""
        self._leaving = asyncio.Event()
        self._registering: asyncio.Task[None] | None = None

    async def start(self, transports: tuple[str, ...], fault: str) -> None:
        self.rank.spawn(1)
        await self.rank.configure(
            m.Configure(
                instance_id=self.name,
                incarnation=self.incarnation,
                rank=0,
                world_size=1,
                model_path="",
                dtype="",
                device="cpu",
                block_tokens=0,
                num_pages=0,
                num_extents=0,
                memory_bytes=self.store.total * self.shard,
                threads=1,
                max_context_tokens=0,
                transports=transports,
                fault=fault,
                ssd_path=str(self.tiers.path) if self.tiers is not None else "",
            ),
            30,
        )
        partition = Partition(self.layout, self.shard, self.store, (self.rank.ready.extent_base_offset,))
        self.partition = partition
        self.blocks = BlockService(
            lambda: self.ref,
            [self.rank],
            self.segments,
            OnePartition(partition),
            self._on_pulled,
            transports=transports,
            lease_ms=self._lease_ms,
            announce_ms=10,
            offload_percent=self._offload_percent,
            tiers=self.tiers,
        )
        await self.blocks.open_tiers()
        self.server = Server("127.0.0.1", 0)
        self.blocks.add_to(self.server)
        self.address = f"127.0.0.1:{await self.server.start()}"
        self.server.set_ready(True)

    @property
    def ref(self) -> pb.InstanceRef:
        return pb.InstanceRef(instance_id=self.name, address=self.address, incarnation=self.incarnation)

    def _said(self, rank: int, message: m.ToFront) -> None:
        if isinstance(message, m.PullEnded) and message.ticket in self._raw:
            self._raw.pop(message.ticket).set_result(message)
            return
        assert self.blocks is not None and self.blocks.rank_said(rank, message), message

    def _lost(self, rank: int, cause: str) -> None:
        self.lost = cause
        if self.blocks is not None:
            self.blocks.ranks_lost(cause)

    def _on_pulled(self, pulled: Pulled) -> None:
        assert not self.pulled[pulled.ticket].done(), "on_pulled twice"
        self.pulled[pulled.ticket].set_result(pulled)

    async def raw_pull(
        self, descriptor: bytes, offsets: tuple[int, ...], landing: tuple[int, ...], nbytes: int
    ) -> m.PullEnded:
        name = self.segments.open(descriptor)
        ticket = next(OWN_TICKETS)
        self._raw[ticket] = asyncio.get_running_loop().create_future()
        deadline = time.monotonic_ns() + 20_000_000_000
        self.rank.send(m.PullOpen(ticket, name, offsets, landing, nbytes, deadline))
        async with asyncio.timeout(20):
            ended = await self._raw[ticket] if ticket in self._raw else None
        assert ended is not None
        self.segments.release(name)
        return ended

    async def fill(self, bench: Bench, keys: Sequence[bytes]) -> None:
        """Seal these blocks here, each with its `content`."""
        extents = self.store.begin(keys)
        where = [(key, self.partition.offset(0, e)) for key, e in zip(keys, extents, strict=True) if e is not None]
        assert len(where) == len(keys), "no room"
        count = 256 * SHARD // self.shard
        for start in range(0, len(where), count):
            await bench.write(self, where[start : start + count], self.shard)
        for key in keys:
            self.store.seal(key)

    def pull(
        self, keys: Sequence[bytes], ranges: Sequence[PullRange], timeout_ms: int = 10_000, traceparent: str = ""
    ) -> PullJob:
        """Begin a pull of all keys; its end is in `self.pulled[ticket]`."""
        extents = self.store.begin(keys)
        assert None not in extents
        ticket = next(self._tickets)
        where = tuple(extent for extent in extents if extent is not None)
        blocks = tuple(range(len(keys)))
        job = PullJob(ticket, blocks, tuple(keys), where, tuple(ranges), timeout_ms, "req-1", traceparent)
        self.pulled[ticket] = asyncio.get_running_loop().create_future()
        assert self.blocks is not None
        self.blocks.pull(job)
        assert not self.pulled[ticket].done(), "never from inside pull"
        return job

    async def ended(self, job: PullJob) -> Pulled:
        """How it ended; what arrived is sealed, the rest abandoned, as a brain does."""
        async with asyncio.timeout(30):
            pulled = await self.pulled[job.ticket]
        for i, key in enumerate(job.keys):
            if i in pulled.arrived:
                self.store.seal(key)
            else:
                self.store.abandon(key)
        return pulled

    async def check(self, bench: Bench, keys: Sequence[bytes]) -> None:
        """The bytes of these sealed blocks are right."""
        for key in keys:
            (extent,) = self.store.hold([key])
            found = await bench.read(self.rank, self.partition.offset(0, extent), self.shard)
            self.store.release([extent])
            assert found == content(key, self.shard), f"wrong bytes under {key.hex()}"

    def range_of(self, first: int, blocks: int, tier: Tier = Tier.DRAM) -> PullRange:
        return PullRange(self.name, self.address, self.incarnation, first, blocks, tier)

    def kill_rank(self) -> None:
        os.kill(self.rank.pid, signal.SIGKILL)

    def join(self, store_address: str, role: pb.Role.ValueType = pb.ROLE_PREFILL) -> None:
        """Become a member of the master there; a conductor is not needed."""
        assert self.blocks is not None
        registrar = Registrar(
            self.ref,
            role,
            "machine",
            pb.ModelCard(),
            1,
            1,
            "127.0.0.1:1",
            store_address,
            pb_conductor.HeartbeatRequest,
            lambda: True,
            usage=lambda: self.blocks.usage,  # type: ignore[union-attr]
            on_pools=self.blocks.pools_changed,
            terms=self.blocks.terms,
            orders=self.blocks,
        )
        self.blocks.start(registrar)
        self._registering = asyncio.create_task(registrar.run(self._leaving))

    async def close(self) -> None:
        self._leaving.set()
        if self._registering is not None:
            await asyncio.wait({self._registering}, timeout=3)
        if self.blocks is not None:
            await self.blocks.close()
        if self.server is not None:
            await self.server.stop(0)
        await self.rank.close()
        assert not psutil.pid_exists(self.rank.pid)


@asynccontextmanager
async def node(
    name: str,
    *,
    total: int = 64,
    lease_ms: int = 60_000,  # so long that it must be given back
    transports: tuple[str, ...] = ("shm",),
    fault: str = "",
    incarnation: int = 7,
    offload_percent: int = 100,
    layout: str = LAYOUT,
    shard: int = SHARD,
    tiers: TierSettings | None = None,
) -> AsyncIterator[Node]:
    """Started; on leaving, nothing of it is left."""
    made = Node(
        name,
        total=total,
        lease_ms=lease_ms,
        incarnation=incarnation,
        offload_percent=offload_percent,
        layout=layout,
        shard=shard,
        tiers=tiers,
    )
    try:
        await made.start(transports, fault)
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    try:
        yield made
    finally:
        await asyncio.to_thread(made.close)


@asynccontextmanager
async def stub(address: str) -> AsyncIterator[pb_grpc.NodeStoreAsyncStub]:
    channel: grpc.aio.Channel = channels.connect(address)
    try:
        yield pb_grpc.NodeStoreStub(channel)
    finally:
        await channel.close()


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Poll; for states that have no event."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
