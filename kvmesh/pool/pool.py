"""A pool node as a service: memory that keeps other nodes' blocks. It joins the store master, never the conductor.

One process for its front (this one), one rank without an engine for the memory and its transfers. It computes nothing
and asks for nothing: instances ask it to pull (NodeStore.Pull), readers lease.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from kvmesh.blockservice.blocks import BlockService
from kvmesh.blockservice.peer_segments import PeerSegments
from kvmesh.blockservice.tiers.config import checked_id, make_ssd_folder
from kvmesh.blockservice.warm.memory import WarmMemory
from kvmesh.errors import ConfigError, InternalError
from kvmesh.kvcache.sources import Pulled
from kvmesh.membership.evacuation import evacuate_node
from kvmesh.membership.registrar import Registrar
from kvmesh.pool.config import PoolConfig
from kvmesh.pool.partitions import PoolPartitions
from kvmesh.pool.shared_index import NodeIndex, index_of
from kvmesh.pool.warm import WarmPool
from kvmesh.ranks import protocol as m
from kvmesh.ranks.client import RankClient
from kvmesh.ranks.worker.warm_segment import POOL_SLOT_BYTES
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.runner import observed
from kvmesh.rpc.server import Server
from kvmesh.tiers.ssd.disk import medium_failed

log = logging.getLogger(__name__)

ALLOCATE_TIMEOUT_S = 120.0
PING_INTERVAL_S = 0.5
GOODBYE_S = 1.5


async def run(config: PoolConfig, stop: asyncio.Event, started: Callable[[dict[str, object]], None]) -> None:
    """Serve until `stop`; `started` hears the addresses once calls are accepted.

    Raises ConfigError at start (a port in use, memory that is not there), InternalError when the rank ends."""
    node = PoolNode(config)
    async with observed("pool", node.instance_id, config) as metrics:
        await node.run(stop, lambda found: started({**found, "metrics": metrics}))


class PoolNode:
    """One life of one pool node in this process."""

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.instance_id = checked_id(config.instance_id, config.node_id, "pool")
        self.incarnation = time.time_ns() & ~0xFFFF | secrets.randbits(16)
        self.address = ""
        self._rank = RankClient(0, self._said, self._rank_lost)
        self._blocks: BlockService | None = None
        self._warm: WarmMemory | None = None
        self._index: NodeIndex | None = None
        self._lost = asyncio.Event()
        self._cause = ""
        self._stop = asyncio.Event()
        self._retired = False

    @property
    def ref(self) -> pb.InstanceRef:
        return pb.InstanceRef(instance_id=self.instance_id, address=self.address, incarnation=self.incarnation)

    async def run(self, stop: asyncio.Event, started: Callable[[dict[str, object]], None]) -> None:
        """Allocate, serve, end in order."""
        config = self.config
        tasks: list[asyncio.Task[None]] = []
        server: Server | None = None
        if config.ssd_path:
            try:
                make_ssd_folder(config.ssd_path)
            except ConfigError as error:
                if not medium_failed(error):
                    raise  # else the tier is left out, which says so
        self._rank.spawn(1, streaming=True)
        try:
            await self._rank.configure(self._configure(), ALLOCATE_TIMEOUT_S)
            blocks = self._blocks = self._attach()
            await blocks.open_tiers()
            if self._index is not None:
                blocks.fast_paths.index_path = self._index.open(blocks.fast_paths.tickets)
            listening = Server(config.host, config.port)
            blocks.add_to(listening)
            port = await listening.start()
            server = listening
            self.address = f"{config.advertise_host or config.host}:{port}"
            await blocks.fast_paths.open(config.host, config.door_port)
            registrar = Registrar.pool_node(
                self.ref, config.node_id, config.store, lambda: blocks.usage, blocks.terms, blocks
            )
            blocks.start(registrar)
            tasks = [
                asyncio.create_task(registrar.run(self._stop), name="registrar"),
                asyncio.create_task(self._watch(server), name="ping rank"),
            ]
            server.set_ready(True)
            started({"address": self.address, "instance_id": self.instance_id})
            await self._until(stop)
            self._retired = True
            server.set_ready(False, "shutting down")
            if config.evacuate_ms and not self._cause:
                await evacuate_node(self.ref, config.store, config.evacuate_ms / 1000)
            self._stop.set()
            await asyncio.wait(tasks[:1], timeout=GOODBYE_S)
        finally:
            for task in tasks:
                task.cancel()
            if self._index is not None:
                self._index.close()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._blocks is not None:
                await self._blocks.close()
            if server is not None:
                await server.stop(0.5)
            if self._warm is not None:
                self._warm.close()
            await self._rank.close()
        if self._cause:
            raise InternalError(f"pool node {self.instance_id} lost its memory: {self._cause}")

    async def _until(self, stop: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(self._lost.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    async def _watch(self, server: Server) -> None:
        """A rank that is silent serves no reads over tcp and ends no pull: health says so."""
        while True:
            self._rank.ping()
            await asyncio.sleep(PING_INTERVAL_S)
            silent_ms = self._rank.silent_s(time.monotonic()) * 1000
            if not self._retired:
                why = f"the rank has been silent for {silent_ms / 1000:.1f} s"
                server.set_ready(silent_ms <= self.config.rank_silence_ms, why)

    def _configure(self) -> m.Configure:
        c = self.config
        return m.Configure(
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            rank=0,
            world_size=1,
            model_path="",
            dtype="",
            device="cpu",
            block_tokens=0,
            num_pages=0,
            num_extents=0,
            memory_bytes=c.memory_mb << 20,
            threads=1,
            max_context_tokens=0,
            transports=c.transport_list,
            nics=c.nic_list,
            topology=c.topology,
            rdma=c.rdma_settings,
            fault=c.fault,
            host=c.host,
            advertise_host=c.advertise_host,
            leave_host=c.leave_host,
            tls=c.transfer_tls,
            ssd_path=str(Path(c.ssd_path).absolute()) if c.ssd_path else "",
            warm_segment=c.warm_segment,
            warm_lease_ms=c.store_lease_ms,
        )

    def _attach(self) -> BlockService:
        ready, c = self._rank.ready, self.config
        partitions = PoolPartitions(
            ready.extent_base_offset,
            ready.host_bytes,
            high_percent=c.store_high_percent,
            low_percent=c.store_low_percent,
            lease_seed=self.incarnation,
            eviction=c.store_eviction,
        )
        # Before the memory of an earlier life comes back: it is found like any other.
        self._index = index_of(c.transport_list, self.instance_id, self.incarnation, ready, partitions)
        if c.warm_segment:
            self._warm = WarmMemory(c.warm_segment, [self._rank], ready.host_bytes // POOL_SLOT_BYTES, self.incarnation)
            WarmPool(self._warm, partitions, ready.extent_base_offset)
        return BlockService(
            lambda: self.ref,
            [self._rank],
            PeerSegments([self._rank]),
            partitions,
            _nobody_asked,
            transports=c.transport_list,
            lease_ms=c.store_lease_ms,
            announce_ms=c.announce_ms,
            tiers=c.tiers(c.ssd_layouts),
            returning=self._warm.candidates if self._warm is not None else None,
        )

    def _said(self, rank: int, message: m.ToFront) -> None:
        if self._warm is not None and self._warm.rank_said(message):
            return
        if self._blocks is None or not self._blocks.rank_said(rank, message):
            log.error("the rank said %s", type(message).__name__)

    def _rank_lost(self, _: int, cause: str) -> None:
        self._cause = cause
        self._lost.set()
        log.error("%s", cause)
        if self._index is not None:
            self._index.close()  # before the next life may have the memory
        if self._warm is not None:
            self._warm.close()  # the memory is still there, for the next life
        if self._blocks is not None:
            self._blocks.ranks_lost(cause)


def _nobody_asked(pulled: Pulled) -> None:
    """A pool node has no role that pulls."""
    log.error("a pull ended that nobody asked for: %s", pulled)
