"""READs under a lease: what came too late does not count, and nothing lands afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from kvmesh.blockservice.peers import Peer
from kvmesh.blockservice.reader_lease import ReaderLease
from kvmesh.clock import lease_clock_ns
from kvmesh.storeclient.reading.leased import read_under
from kvmesh.transfer import EngineConfig, Opcode, Region, TransferEngine, TransferRequest

NOBODY = cast(Peer, None)  # these leases have no time left in which to ask anybody
NBYTES = 1 << 20


class Pair:
    def __init__(self, holder: TransferEngine, reader: TransferEngine) -> None:
        self.reader = reader
        self.there, self.here = holder.allocate(NBYTES), reader.allocate(NBYTES)
        view(self.there)[:] = b"x" * NBYTES
        self.segment = reader.open_segment(holder.local_descriptor())

    def lease(self, left_ms: float) -> ReaderLease:
        until = lease_clock_ns() + int(left_ms * 1e6)
        return ReaderLease(NOBODY, 1, until, segments=(self.segment,))

    @property
    def request(self) -> TransferRequest:
        return TransferRequest(Opcode.READ, self.here.address, self.segment, self.there.base_offset, NBYTES)


def view(region: Region) -> Any:
    return region.memory


@pytest.fixture(params=["shm", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    config = EngineConfig(transports=(request.param,))
    with TransferEngine("holder", config) as holder, TransferEngine("reader", config) as reader:
        yield Pair(holder, reader)


async def test_in_time_it_counts(pair: Pair) -> None:
    assert await read_under(pair.reader, pair.lease(60_000), [pair.request], time.monotonic() + 30, 1000) == [""]
    assert bytes(view(pair.here)) == b"x" * NBYTES


@pytest.mark.parametrize("left_ms", [-1, 0.01])
async def test_past_its_lease_it_does_not(pair: Pair, left_ms: float) -> None:
    """Whether the bytes were there already or not."""
    (wrong,) = await read_under(pair.reader, pair.lease(left_ms), [pair.request], time.monotonic() + 30, 1000)
    assert wrong
    over = pair.lease(60_000)
    over.over = True
    assert await read_under(pair.reader, over, [pair.request], time.monotonic() + 30, 1000) == [
        "the lease ran out before the last byte was here"
    ]
    assert await read_under(pair.reader, pair.lease(60_000), [pair.request], time.monotonic() - 1, 1000) == [
        "not in time"
    ]
