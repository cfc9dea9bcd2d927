"""Node stores of a model with several cache groups, over real ranks without an engine, in any cut (ADR 0037)."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress

import numpy as np
import psutil

from kvmesh.blockservice.blocks import BlockService
from kvmesh.blockservice.object_family import ObjectFamily
from kvmesh.blockservice.partitions import GroupedPartitions, Partition
from kvmesh.blockservice.peer_segments import PeerSegments
from kvmesh.blockservice.tiers.parts import TierSettings
from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, CacheLayout, GroupPages, rank_shard
from kvmesh.kvcache.grouped_store import GroupedStore
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.quotas import NoTagQuotas
from kvmesh.kvcache.sources import Pulled, PullJob, PullRange
from kvmesh.kvcache.tiers import Tier
from kvmesh.membership.registrar import Registrar
from kvmesh.ranks import protocol as m
from kvmesh.ranks.client import RankClient
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import conductor_pb2 as pb_conductor
from kvmesh.rpc.server import Server
from kvmesh.transfer import EngineConfig, Opcode, TransferEngine, TransferRequest, TransferState

BLOCK, ITEM = 16, 4
GROUPS = (
    CacheGroup("all", (0, 3), CacheLayout(planes=2, heads=4, dim=8)),
    CacheGroup("window40", (1, 2, 4), CacheLayout(planes=2, heads=4, dim=8), CacheKind.WINDOW, 40),
    CacheGroup("state", (5,), CacheLayout(planes=2, heads=4, dim=64), CacheKind.STATE, 2),
)
ALL = (1 << len(GROUPS)) - 1
FAMILY = ObjectFamily("0123456789abcdef float32", BLOCK, GROUPS, (ITEM,) * len(GROUPS))
BENCH_BYTES = 4 << 20


def object_of(key: bytes, group: int) -> bytes:
    """What the whole object of this key and group holds, wherever it lies."""
    nbytes = FAMILY.object(group).shard_bytes
    return hashlib.shake_256(key + bytes([group])).digest(nbytes)


def cuts(ranks: int, group: int) -> tuple[ShardLayout, ...]:
    """As tensor parallel does; ranks beyond the heads are replicas."""
    heads = GROUPS[group].layout.heads
    width = max(heads // ranks, 1)
    found = []
    for rank in range(ranks):
        first = heads * rank // ranks
        found.append(rank_shard(GROUPS[group], range(6), range(first, first + width), BLOCK, ITEM, group))
    return tuple(cut for cut in found if cut is not None)


def piece(key: bytes, cut: ShardLayout) -> bytes:
    """The bytes of the object `[layers, planes, heads, tokens, dim]` that are this cut."""
    whole = FAMILY.object(cut.group)
    values = np.frombuffer(object_of(key, cut.group), dtype=np.uint8).reshape(*whole.shape[:3], -1)
    layers = slice(cut.first_layer, cut.first_layer + cut.layers)
    return values[layers, :, cut.first_head : cut.first_head + cut.kv_heads].tobytes()


class Desk:
    """The test's own transfer engine: writes pieces into ranks, which pull them, and reads them back."""

    def __init__(self) -> None:
        self.engine = TransferEngine(f"desk@{time.monotonic_ns():x}", EngineConfig(transports=("shm",)))
        self.region = self.engine.allocate(BENCH_BYTES, "cpu:0")
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


@asynccontextmanager
async def desk() -> AsyncIterator[Desk]:
    made = Desk()
    try:
        yield made
    finally:
        await asyncio.to_thread(made.engine.close)


class GroupNode:
    """One instance's node store, without a role."""

    def __init__(
        self,
        name: str,
        ranks: int,
        *,
        total: int = 24,
        lease_ms: int = 60_000,
        incarnation: int = 7,
        offload_percent: int = 100,
        tiers: TierSettings | None = None,
        folder: str = "",
    ) -> None:
        self.name, self.incarnation, self.address = name, incarnation, ""
        self.ranks = [RankClient(rank, self._said, self._lost) for rank in range(ranks)]
        self.segments = PeerSegments(self.ranks)
        self.lease_ms, self.offload_percent, self.tiers, self.folder = lease_ms, offload_percent, tiers, folder
        self.cuts = [cuts(ranks, group) for group in range(len(GROUPS))]
        stores = [
            NodeStore(
                total,
                high_percent=100,
                low_percent=100,
                block_tokens=BLOCK,
                block_bytes=mine[0].shard_bytes,
                lease_seed=incarnation + group,
                quotas=NoTagQuotas() if group else None,
            )
            for group, mine in enumerate(self.cuts)
        ]
        self.store = GroupedStore(GROUPS, stores, BLOCK)
        self.pulled: dict[int, asyncio.Future[Pulled]] = {}
        self._raw: dict[tuple[int, int], asyncio.Future[m.PullEnded]] = {}
        self._tickets = itertools.count(1)
        self._own = itertools.count(1 << 40)
        self.lost = ""
        self.server: Server | None = None
        self._blocks: BlockService | None = None
        self._leaving = asyncio.Event()
        self._registering: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the ranks, and serves."""
        sizes = [mine[0].shard_bytes for mine in self.cuts]
        memory = sum(store.total * size for store, size in zip(self.store.stores, sizes, strict=True))
        for rank in self.ranks:
            rank.spawn(1)
        await asyncio.gather(*(rank.configure(self._configure(rank.rank, memory), 60) for rank in self.ranks))
        self.parts = self._parts()
        self.partitions = GroupedPartitions(self.store, self.parts)
        self._blocks = BlockService(
            lambda: self.ref,
            self.ranks,
            self.segments,
            self.partitions,
            self._on_pulled,
            transports=("shm",),
            lease_ms=self.lease_ms,
            announce_ms=10,
            offload_percent=self.offload_percent,
            tiers=self.tiers,
        )
        await self.blocks.open_tiers()
        self.server = Server("127.0.0.1", 0)
        self.blocks.add_to(self.server)
        self.address = f"127.0.0.1:{await self.server.start()}"
        self.server.set_ready(True)

    def _configure(self, rank: int, memory: int) -> m.Configure:
        return m.Configure(
            instance_id=f"{self.name}-{rank}",
            incarnation=self.incarnation,
            rank=0,
            world_size=1,
            model_path="",
            dtype="",
            device="cpu",
            block_tokens=0,
            num_pages=0,
            num_extents=0,
            memory_bytes=memory,
            threads=1,
            max_context_tokens=0,
            transports=("shm",),
            ssd_path=str(self.tiers.path) if self.tiers is not None else "",
        )

    def _parts(self) -> list[Partition]:
        parts, start = [], 0
        for group, (store, mine) in enumerate(zip(self.store.stores, self.cuts, strict=True)):
            bases = tuple(rank.ready.extent_base_offset + start for rank in self.ranks)
            size = mine[0].shard_bytes
            layout = FAMILY.part(group, mine)
            parts.append(Partition(layout, size, store, bases, mine, FAMILY.text, group, self.store))
            start += store.total * size
        return parts

    @property
    def blocks(self) -> BlockService:
        assert self._blocks is not None
        return self._blocks

    @property
    def ref(self) -> pb.InstanceRef:
        return pb.InstanceRef(instance_id=self.name, address=self.address, incarnation=self.incarnation)

    def range_of(self, blocks: int, tier: Tier = Tier.DRAM, groups: int = 0) -> PullRange:
        """A source of the first blocks of a prompt."""
        return PullRange(self.name, self.address, self.incarnation, 0, blocks, tier, groups)

    def _said(self, rank: int, message: m.ToFront) -> None:
        if isinstance(message, m.PullEnded) and (rank, message.ticket) in self._raw:
            self._raw.pop((rank, message.ticket)).set_result(message)
            return
        assert self.blocks.rank_said(rank, message), message

    def _lost(self, rank: int, cause: str) -> None:
        self.lost = cause
        if self._blocks is not None:
            self._blocks.ranks_lost(cause)

    def _on_pulled(self, pulled: Pulled) -> None:
        self.pulled[pulled.ticket].set_result(pulled)

    # ── bytes ────────────────────────────────────────────────────────────────────────────────────

    async def fill(self, bench: Desk, keys: Sequence[bytes], masks: Sequence[int] = ()) -> None:
        """Seals these objects here, each with its bytes in the cut of every rank."""
        masks = masks or [ALL] * len(keys)
        for key, mask, extents in zip(keys, masks, self.store.begin(keys, masks), strict=True):
            for group, extent in enumerate(extents):
                assert (extent is not None) == bool(mask >> group & 1), "no room"
                if extent is not None:
                    await self._write(bench, key, group, extent)
            self.store.seal(key, mask)

    async def _write(self, bench: Desk, key: bytes, group: int, extent: int) -> None:
        for rank, client in enumerate(self.ranks):
            data = piece(key, self.cuts[group][rank])
            bench.memory[: len(data)] = data
            name = self.segments.open(bench.engine.local_descriptor().encode())
            ticket = next(self._own)
            done = self._raw[rank, ticket] = asyncio.get_running_loop().create_future()
            landing = (self.parts[group].offset(rank, extent),)
            deadline = time.monotonic_ns() + 20_000_000_000
            client.send(m.PullOpen(ticket, name, (bench.region.base_offset,), landing, len(data), deadline))
            async with asyncio.timeout(20):
                assert not (await done).cause
            self.segments.release(name)

    async def check(self, bench: Desk, keys: Sequence[bytes], masks: Sequence[int] = ()) -> None:
        """Exactly these objects of each key are sealed here, and every byte of every rank's cut of them is right."""
        masks = masks or [ALL] * len(keys)
        assert list(self.store.masks(keys)) == list(masks)
        for key, mask in zip(keys, masks, strict=True):
            for group in (g for g in range(len(GROUPS)) if mask >> g & 1):
                (extent,) = self.store.stores[group].hold([key])
                for rank, client in enumerate(self.ranks):
                    wanted = piece(key, self.cuts[group][rank])
                    found = await bench.read(client, self.parts[group].offset(rank, extent), len(wanted))
                    assert found == wanted, f"wrong bytes of group {group} at rank {rank}"
                self.store.stores[group].release([extent])

    def evict(self) -> None:
        """Everything idle goes."""
        for store in self.store.stores:
            store.release(store.allocate(store.free))
        assert not self.store.keys()

    # ── pulls ────────────────────────────────────────────────────────────────────────────────────

    def pull(
        self, keys: Sequence[bytes], ranges: Iterable[PullRange], masks: Sequence[int] = (), timeout_ms: int = 10_000
    ) -> PullJob:
        """Begins a pull of these objects; its end is in `self.pulled[ticket]`."""
        masks = masks or [ALL] * len(keys)
        begun = self.store.begin(keys, masks)
        places = tuple(
            GroupPages(group, 0, tuple(-1 if extents[group] is None else extents[group] for extents in begun))  # type: ignore[misc]
            for group in range(len(GROUPS))
        )
        ticket = next(self._tickets)
        blocks = tuple(range(len(keys)))
        job = PullJob(
            ticket, blocks, tuple(keys), (), tuple(ranges), timeout_ms, "req-1", groups=bytes(masks), places=places
        )
        self.pulled[ticket] = asyncio.get_running_loop().create_future()
        self.blocks.pull(job)
        return job

    async def ended(self, job: PullJob) -> Pulled:
        """How it ended; what arrived is sealed, the rest abandoned, as a brain does."""
        async with asyncio.timeout(30):
            pulled = await self.pulled[job.ticket]
        came = dict(zip(pulled.arrived, pulled.groups, strict=True))
        begun = [sum(1 << group for group, _, extents in job.places if extents[at] >= 0) for at in range(len(job.keys))]
        for at in reversed(range(len(job.keys))):
            good = came.get(at, 0)
            assert not good & ~begun[at]
            self.store.abandon(job.keys[at], begun[at] & ~good)
            self.store.seal(job.keys[at], good)
        return pulled

    def join(self, store_address: str) -> None:
        """Becomes a member of the master there."""
        registrar = Registrar(
            self.ref,
            pb.ROLE_PREFILL,
            "machine",
            pb.ModelCard(),
            1,
            1,
            "127.0.0.1:1",
            store_address,
            pb_conductor.HeartbeatRequest,
            lambda: True,
            usage=lambda: self.blocks.usage,
            on_pools=self.blocks.pools_changed,
            terms=self.blocks.terms,
            orders=self.blocks,
        )
        self.blocks.start(registrar)
        self._registering = asyncio.create_task(registrar.run(self._leaving))

    def settled(self) -> None:
        """Nothing is written or leased any more, and all stores are right."""
        self.store.check_integrity()
        for store in self.store.stores:
            assert not store.stats.writing and not store.stats.leases and not store.usage.held

    async def close(self) -> None:
        self._leaving.set()
        if self._registering is not None:
            await asyncio.wait({self._registering}, timeout=3)
        if self._blocks is not None:
            await self._blocks.close()
        if self.server is not None:
            await self.server.stop(0)
        for rank in self.ranks:
            with suppress(ProcessLookupError):
                await rank.close()
            assert not psutil.pid_exists(rank.pid)


@asynccontextmanager
async def group_node(name: str, ranks: int = 1, **settings: object) -> AsyncIterator[GroupNode]:
    """Started; on leaving, nothing of it is left."""
    made = GroupNode(name, ranks, **settings)  # type: ignore[arg-type]
    try:
        await made.start()
        yield made
    finally:
        await made.close()
