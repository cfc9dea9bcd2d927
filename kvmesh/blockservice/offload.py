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
from kvmesh.kvcache.whole_blocks import WholeBlocks
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
    """Offloads blocks of an instance, one request at a time. `partitions` is its only one, or one for each cache group
    of its model: then it is objects that go, each group's coldest. `pools` are the live pool nodes of the master's last
    answer."""

    def __init__(
        self,
        partitions: Sequence[Partition],
        percent: int,
        peers: PeerPool,
        ref: Callable[[], pb_common.InstanceRef],
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.blocks = 0
        self.pools: Sequence[pb_store.PoolNode] = ()
        self._partitions = partitions
        self._percent = percent
        self._peers = peers
        self._ref = ref
        self._rng = rng
        self._clock = clock
        self._done: OrderedDict[tuple[bytes, int], float] = OrderedDict()  # by key and group
        self._copied: list[list[bytes]] = [[] for _ in partitions]

    async def run(self) -> None:
        """Offloads until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            # By now the pool node has given back the lease under which it read them, which made them look used.
            for partition, copied in zip(self._partitions, self._copied, strict=True):
                partition.store.evict_first(copied)
            self._copied = [[] for _ in self._partitions]
            if not self.pools:
                continue
            chosen = self.choose()
            if chosen and not await self._ask(self._pick(), chosen):
                await asyncio.sleep(FAILED_S)

    def choose(self) -> dict[bytes, int]:
        """Returns the coldest blocks above the threshold that were not copied lately: of each, the mask of its objects
        that are to go (1 where a block is one object)."""
        now = self._clock()
        while self._done and (len(self._done) > MAX_REMEMBERED or next(iter(self._done.values())) + AGAIN_S < now):
            self._done.popitem(last=False)
        chosen: dict[bytes, int] = {}
        share = len(self._partitions)
        for number, partition in enumerate(self._partitions):
            store: NodeStore = partition.store
            excess = store.total - unused(partition) - store.total * self._percent // 100
            nbytes = partition.whole.nbytes if partition.whole is not None else partition.shard_bytes
            most = max(1, min(MAX_BLOCKS, MAX_BYTES // nbytes) // share)
            for key in [key for key in store.coldest(excess) if (key, number) not in self._done][:most]:
                chosen[key] = chosen.get(key, 0) | 1 << number
        return chosen

    def _pick(self) -> pb_store.PoolNode:
        """Returns a pool node: of two drawn at random the one with more free bytes."""
        two = self._rng.sample(list(self.pools), min(2, len(self.pools)))
        return max(two, key=lambda pool: pool.free_bytes)

    async def _ask(self, pool: pb_store.PoolNode, chosen: dict[bytes, int]) -> bool:
        """Asks a pool node to pull these. Returns whether it answered."""
        first = self._partitions[0]
        kept = first.whole or WholeBlocks(first.layout, first.shard_bytes)
        request = pb.PullBlocksRequest(
            keys=b"".join(chosen),
            holders=[self._ref()],
            layout=first.family or kept.layout,
            shard_bytes=0 if first.family else kept.nbytes,
            timeout_ms=TIMEOUT_MS,
            background=True,
            groups=bytes(chosen.values()) if first.family else b"",
        )
        now = self._clock()
        async with self._peers.use(pool.instance.address) as peer:
            try:
                answer = await peer.calls.over_grpc("Pull", request, TIMEOUT_MS / 1000 + 1)
            except KvmeshError as error:
                log.info("offload to %s: %s", pool.instance.instance_id, error.message)
                self._peers.forget(peer)
                return False
        masks = answer.held_groups if first.family else answer.held
        for key, here in zip(chosen, masks, strict=False):
            for number, copied in enumerate(self._copied):
                if chosen[key] & here & 1 << number:
                    copied.append(key)
        self._done.update(
            ((key, number), now)
            for key, mask in chosen.items()
            for number in range(len(self._partitions))
            if mask >> number & 1
        )
        went = len(set().union(*self._copied))
        self.blocks += went
        names.NODE_OFFLOADED.inc(went)
        return True
