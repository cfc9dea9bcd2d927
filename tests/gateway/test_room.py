"""A place that comes free while somebody gives up waiting for it goes to the next one, and fails nobody."""

from __future__ import annotations

import asyncio

import pytest

from kvmesh.services.gateway.concurrency import PlacementRoom


async def test_a_place_that_comes_free_as_a_waiter_is_cancelled_passes_it_over() -> None:
    room = PlacementRoom(1, 60.0)
    entered: list[str] = []

    async def place(name: str) -> None:
        async with room:
            entered.append(name)

    async with room:
        first, second = (asyncio.ensure_future(place(name)) for name in ("first", "second"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()  # its future is cancelled at once; it hears of it after the place has come free
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.wait_for(second, 5)
    assert entered == ["second"]
    await asyncio.wait_for(place("third"), 5)
