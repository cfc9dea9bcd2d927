"""Copies the blocks that will be evicted next to pool nodes: this node asks a pool node to pull them."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvmesh.blockservice.partitions import Partition, unused
from kvmesh.blockservice.peers import PeerPool
from kvmesh.errors import KvmeshError
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import store_pb2 as pb_store
from kvmesh.telemetry import names

log = logging.getLogger(__name__)

INTERVAL_S = 0.25
FAILED_S = 2.0  # the pause after a failure: a pool node that is gone is in the list until the master has noticed
MAX_BLOCKS = 64  # blocks in one request
MAX_BYTES = 64 << 20
TIMEOUT_MS = 5_000
AGAIN_S = 60.0  # a block that was copied, or refused, is not offered again for so long
MAX_REMEMBERED = 65_536


class Offload:
    """Offloads blocks of one partition, one request at a time. `pools` are the live pool nodes of the master's last
    answer."""

    def __init__(
        self,
        partition: Partition,
        percent: int,
        peers: PeerPool,
        ref: Callable[[], pb_common.InstanceRef],
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.blocks = 0
        self.pools: Sequence[pb_store.PoolNode] = ()
        self._partition = partition
        self._percent = percent
        self._peers = peers
        self._ref = ref
        self._rng = rng
        self._clock = clock
        self._done: OrderedDict[bytes, float] = OrderedDict()
        self._copied: list[bytes] = []

    async def run(self) -> None:
        """Offloads until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            # By now the pool node has given back the lease under which it read them, which made them look used.
            self._partition.store.evict_first(self._copied)
            self._copied = []
            if not self.pools:
                continue
            keys = self.choose()
            if keys and not await self._ask(self._pick(), keys):
                await asyncio.sleep(FAILED_S)

    def choose(self) -> list[bytes]:
        """Returns the coldest blocks above the threshold that were not copied lately."""
        now = self._clock()
        while self._done and (len(self._done) > MAX_REMEMBERED or next(iter(self._done.values())) + AGAIN_S < now):
            self._done.popitem(last=False)
        store: NodeStore = self._partition.store
        excess = store.total - unused(self._partition) - store.total * self._percent // 100
        most = max(1, min(MAX_BLOCKS, MAX_BYTES // self._partition.shard_bytes))
        return [key for key in store.coldest(excess) if key not in self._done][:most]

    def _pick(self) -> pb_store.PoolNode:
        """Returns a pool node: of two drawn at random the one with more free bytes."""
        two = self._rng.sample(list(self.pools), min(2, len(self.pools)))
        return max(two, key=lambda pool: pool.free_bytes)

    async def _ask(self, pool: pb_store.PoolNode, keys: list[bytes]) -> bool:
        """Asks a pool node to pull these blocks. Returns whether it answered."""
        request = pb.PullBlocksRequest(
            keys=b"".join(keys),
            holders=[self._ref()],
            layout=self._partition.layout,
            shard_bytes=self._partition.shard_bytes,
            timeout_ms=TIMEOUT_MS,
            background=True,
        )
        now = self._clock()
        async with self._peers.use(pool.instance.address) as peer:
            try:
                answer = await peer.calls.over_grpc("Pull", request, TIMEOUT_MS / 1000 + 1)
            except KvmeshError as error:
                log.info("offload to %s: %s", pool.instance.instance_id, error.message)
                self._peers.forget(peer)
                return False
        self._copied = [key for key, here in zip(keys, answer.held, strict=False) if here]
        self._done.update((key, now) for key in keys)
        self.blocks += len(self._copied)
        names.NODE_OFFLOADED.inc(len(self._copied))
        return True
