"""The SSD tier of a node: real rank processes, real folders, and what front and readers make of them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc.aio
import pytest

from kvmesh.kvcache.tiers import Tier
from kvmesh.node.tier_parts import TierSettings
from kvmesh.rpc import status
from kvmesh.rpc.errors import ConfigError
from kvmesh.rpc.pb import blocks_pb2 as pb
from tests.node.stores import LAYOUT, SHARD, Bench, Node, bench, keys_of, node, stub, until

CAPACITY = 16 << 20


def settings(path: Path, **changes: int) -> TierSettings:
    return TierSettings(
        path=path, **{"capacity_bytes": CAPACITY, "offload_percent": 0, "staging_percent": 25, **changes}
    )


@pytest.fixture
async def desk() -> AsyncIterator[Bench]:
    async with bench() as made:
        yield made


async def below(n: Node, keys: Sequence[bytes]) -> None:
    """All of them have reached the tier."""
    assert n.blocks is not None
    await until(lambda: set(keys) <= set(n.blocks.lower_keys()))  # type: ignore[union-attr]


def evict(n: Node) -> None:
    """Everything idle goes."""
    extents = n.store.allocate(n.store.free)
    n.store.release(extents)


async def counters(n: Node) -> pb.TierCounters:
    async with stub(n.address) as rpc:
        return (await rpc.GetStore(pb.GetNodeStoreRequest())).tiers[0]


def own_pull(n: Node, keys: Sequence[bytes]) -> object:
    assert n.blocks is not None and n.blocks.lower is not None
    return n.pull(keys, n.blocks.lower.ranges(keys))


async def test_written_behind_evicted_and_read_back(desk: Bench, tmp_path: Path) -> None:
    keys, never = keys_of(*range(20)), keys_of("never")
    async with node("a", tiers=settings(tmp_path)) as a, node("b") as b:
        await a.fill(desk, keys)
        await below(a, keys)
        evict(a)
        assert a.store.keys() == []
        pulled = await a.ended(own_pull(a, keys[:8]))  # type: ignore[arg-type]
        assert pulled.arrived == pulled.lower == tuple(range(8)) and pulled.bytes_done == 0, pulled
        await a.check(desk, keys[:8])
        # Others lease what lies below like anything else.
        got = await b.ended(b.pull([*keys[4:12], *never], [a.range_of(0, 9)]))
        assert got.arrived == tuple(range(8)) and not got.lower, got
        await b.check(desk, keys[4:12])
        await until_counted(a, hits=12, blocks=20)


async def until_counted(n: Node, **wanted: int) -> pb.TierCounters:
    """What the rank counted has reached the front (with its next pong)."""
    async with asyncio.timeout(20):
        while True:
            n.rank.ping()
            told = await counters(n)
            if all(getattr(told, name) == value for name, value in wanted.items()):
                return told
            await asyncio.sleep(0.01)
