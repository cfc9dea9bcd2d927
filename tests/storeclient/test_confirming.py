"""Leases given back by readers who wait to hear whether they were open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvmesh.blockservice.peers import PeerPool
from kvmesh.blockservice.reader_lease import ReaderLease, Releases
from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.rpc.pb import blocks_pb2 as pb


class Holder:
    """Answers each call when `go` is set."""

    def __init__(self, answer: Any = None) -> None:
        self.calls: list[list[int]] = []
        self.go = asyncio.Event()
        self.answer = answer
        self.peer = SimpleNamespace(address="a", call=self._call)

    @asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[Any]:
        yield self.peer

    def forget(self, peer: Any) -> None:
        self.forgotten = True

    async def _call(self, method: str, request: pb.ReleaseBlocksRequest, timeout_s: float) -> Any:
        ids = [request.lease_id, *request.also]
        self.calls.append(ids)
        await self.go.wait()
        if isinstance(self.answer, KvmeshError):
            raise self.answer
        return pb.ReleaseBlocksResponse(held=bytes(each % 2 for each in ids)) if self.answer is None else self.answer

    def lease(self, lease_id: int) -> ReaderLease:
        return ReaderLease(cast(Any, self.peer), lease_id, 0)


async def test_those_who_wait_share_the_next_call_and_each_hears_its_own() -> None:
    holder = Holder()
    releases = Releases(cast(PeerPool, holder))
    waits = [asyncio.ensure_future(releases.confirm(holder.lease(number))) for number in range(1, 6)]
    await asyncio.sleep(0)
    holder.go.set()
    assert await asyncio.gather(*waits) == [True, False, True, False, True]
    assert holder.calls == [[1], [2, 3, 4, 5]]
    await releases.close()


@pytest.mark.parametrize(
    "answer", [pb.ReleaseBlocksResponse(), pb.ReleaseBlocksResponse(held=b"\1\1"), Unavailable("away")]
)
async def test_a_holder_that_does_not_say_so_has_not_confirmed(answer: Any) -> None:
    """An older one, one that says too much, one that is away."""
    holder = Holder(answer)
    holder.go.set()
    releases = Releases(cast(PeerPool, holder))
    lease = holder.lease(1)
    assert not await releases.confirm(lease)
    assert not await releases.confirm(lease), "it is given back once"
    assert len(holder.calls) == 1
    await releases.close()


async def test_whoever_waits_when_the_client_closes_is_told() -> None:
    holder = Holder()
    releases = Releases(cast(PeerPool, holder))
    waits = [asyncio.ensure_future(releases.confirm(holder.lease(number))) for number in (1, 3)]
    await asyncio.sleep(0)
    await releases.close()
    assert await asyncio.gather(*waits) == [False, False]
