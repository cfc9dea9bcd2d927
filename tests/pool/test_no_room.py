"""Many callers whose puts find no room: each ends in time with one clear error, and waiting costs next to nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvmesh.errors import Overloaded
from kvmesh.pool.partitions import PoolPartitions
from kvmesh.rpc import status
from tests.support.nodes import keys_of
from tests.support.putting import pool_and_caller
from tests.support.services import until

CALLERS = 60  # a node takes 64 puts at once


async def test_puts_without_room_wait_bounded_and_do_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    room = PoolPartitions.room

    def counted(self: PoolPartitions, *args: Any) -> Any:
        nonlocal looks
        looks += 1
        return room(self, *args)

    monkeypatch.setattr(PoolPartitions, "room", counted)
    async with pool_and_caller(store_lease_ms=120_000) as caller:
        full = keys_of(*range(3))
        await caller.put(full, [1 << 20] * 3)
        lease = await caller.lease(full, lease_ms=120_000)  # a busy machine may take long for so many puts
        assert lease.held == b"\1\1\1"
        looks = 0
        ends = await asyncio.gather(
            *(caller.put(keys_of(("new", i)), [2 << 20], read_within_ms=2_000) for i in range(CALLERS)),
            return_exceptions=True,
        )
        for end in ends:
            error = status.from_rpc_error(end)  # type: ignore[arg-type]
            assert isinstance(error, Overloaded) and error.retry_after_ms > 0, error
            assert "2097152 bytes" in error.message
        assert looks <= 30 * CALLERS, "ten a second"
        await caller.release(lease)

        async def fits() -> bool:
            return (await caller.put(keys_of("last"), [2 << 20])).held == b"\1"

        await until(fits)
        assert (await caller.counts()).pools.store_writing == 0
