"""Thousands of leases end at one moment at a real node: each turn of its loop gives back a bounded number of extents,
and calls are answered in between."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest

from kvmesh.blockservice import blocks as node_blocks
from kvmesh.kvcache import leases
from kvmesh.rpc.pb import blocks_pb2 as pb
from tests.support.nodes import keys_of, node, stub


@pytest.mark.parametrize(("given", "each"), [(32_000, 1), (3_200, 20)], ids=["many", "large"])
async def test_calls_are_answered_while_leases_end(given: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "STEP_EXTENTS", 200)
    async with node("a") as a, stub(a.address) as asked:
        keys = keys_of(*range(each))
        a.store.begin(keys)
        for key in keys:
            a.store.seal(key)
        until = time.monotonic_ns() + 10**9
        for _ in range(given):
            assert a.store.lease(keys, 10**9, until - 10**9).lease_id
        steps: list[int] = []
        turns: list[int] = []  # others had had so many when a step began
        turn = 0

        async def others() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        real = a.store.expire

        def expire(now: int, most: int | None = None) -> int:
            turns.append(turn)
            steps.append(real(now, most))
            return steps[-1]

        monkeypatch.setattr(a.store, "expire", expire)
        assert a.blocks is not None
        a.blocks.leases_changed()
        left: list[int] = []
        beside = asyncio.create_task(others())
        while a.store.stats.leases:
            await asked.Exists(pb.ExistsRequest(keys=b"".join(keys)), timeout=10)
            left.append(a.store.stats.leases)
        assert sum(steps) == given
        assert max(steps) * each <= max(200, each) and max(steps) <= node_blocks.MAX_EXPIRED
        beside.cancel()
        assert len(steps) >= 160 and all(before < after for before, after in itertools.pairwise(turns))
        assert any(0 < count < given for count in left), "answered only before and after"
        a.store.check_integrity()
        assert a.store.free == a.store.total
