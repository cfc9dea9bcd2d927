"""Allowances at a node: what is above goes over turns of the loop, at once, and others have theirs between."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from kvmesh.blockservice.blocks import QuotaEnforcer
from kvmesh.blockservice.partitions import OnePartition, Partition
from kvmesh.kvcache import quotas
from kvmesh.kvcache.node_store import NodeStore


async def test_an_excess_goes_in_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "LOOK", 100)
    store = NodeStore(1000, high_percent=100)
    keys = [b"tttt" + number.to_bytes(12, "big") for number in range(900)]
    store.begin(keys)
    for key in keys:
        store.seal(key)
    desk = QuotaEnforcer(
        OnePartition(Partition("l", 4096, store, (0,))), lambda work, name: asyncio.create_task(work, name=name)
    )
    left: list[int] = []
    desk.set_limits({keys[0][:4]: 200})
    desk.enforce()  # the second's tick comes meanwhile
    while store.quotas.count(keys[0][:4]) > 200:
        left.append(store.quotas.count(keys[0][:4]))
        await asyncio.sleep(0)
    assert left[:8] == [900] * 8, "all were put in order before any went, and not in one turn"
    assert max(a - b for a, b in itertools.pairwise(left)) <= quotas.STEP
    assert [store.holds(key) for key in keys] == [False] * 700 + [True] * 200
