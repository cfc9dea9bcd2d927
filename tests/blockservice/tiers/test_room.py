"""How long a copy waits for the tier to take what it would evict: a Tiering over a rank whose answers are scripted."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvmesh.blockservice.partitions import OnePartition, Partition
from kvmesh.blockservice.tiers.parts import TierSettings
from kvmesh.blockservice.tiers.tiering import Tiering
from kvmesh.kvcache.keys import split
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.ranks import protocol as m
from kvmesh.rpc.pb import common_pb2 as pb
from tests.support.nodes import LAYOUT, SHARD, keys_of

TOTAL = 64


class Rank:
    """Keeps the writes that it is asked for until it is told to say that they are done."""

    def __init__(self) -> None:
        self.puts: list[m.TierPut] = []
        self.tiering: Tiering | None = None

    def send(self, message: m.ToRank) -> None:
        assert self.tiering is not None
        match message:
            case m.TierOpen():
                self.tiering.rank_said(0, m.TierOpened(message.tier, message.part))
            case m.TierPut():
                self.puts.append(message)

    def write(self) -> None:
        """The oldest write has ended, and all of it is in the tier."""
        assert self.tiering is not None
        put = self.puts.pop(0)
        self.tiering.rank_said(0, m.TierChanged(put.tier, put.part, put.keys, b""))
        done = tuple(range(len(split(put.keys))))
        self.tiering.rank_said(0, m.TierDone(put.ticket, done, put.sizes, 0, 0))


async def turns() -> None:
    """Lets everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_blocks_that_the_tier_is_reading_are_waited_for(tmp_path: Path) -> None:
    """60 of 64 extents hold blocks, 3 of which are being written when room for 40 more is asked for. When those 3 are
    done, all others are with the tier: nothing would be lost then, but there would be room for 7."""
    rank, store = Rank(), NodeStore(TOTAL)
    partition = Partition(LAYOUT, SHARD, store, (0,))
    settings = TierSettings(path=tmp_path, capacity_bytes=16 << 20, offload_percent=90, staging_percent=25)
    tiering = rank.tiering = Tiering(settings, pb.InstanceRef, [rank], OnePartition(partition))  # type: ignore[list-item]
    await tiering.open()
    old = keys_of(*range(60))
    store.begin(old)
    for key in old:
        store.seal(key)
    await turns()
    assert [len(split(put.keys)) for put in rank.puts] == [3]
    waiting = asyncio.create_task(tiering.room(partition, 40, 30.0))
    await turns()
    rank.write()
    await turns()
    assert len(rank.puts) == 2 and store.free == 7 and not waiting.done()
    while rank.puts:
        rank.write()
        await turns()
    await waiting
    assert None not in store.begin(keys_of(*range(100, 140)))
    assert set(old) <= {*store.keys(), *tiering.keys()}
    await tiering.close()
