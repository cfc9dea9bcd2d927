"""The front's side of checksums asks a rank and waits for the answer."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

from kvmesh.blockservice.peer_segments import SegmentRank
from kvmesh.errors import TransferError, Unavailable
from kvmesh.ranks import protocol as m


class ChecksumClient:
    """Asks all ranks of one front for checksums. It belongs to the front's event loop."""

    def __init__(self, ranks: Sequence[SegmentRank]) -> None:
        self._ranks = ranks
        self._tickets = itertools.count(1)
        self._waiting: dict[tuple[int, int], asyncio.Future[m.Summed]] = {}
        self._lost = ""

    async def sums(self, rank: int, spans: Sequence[tuple[int, int]], timeout_s: float) -> tuple[int, ...]:
        """Returns xxh3_64 of each (offset in the rank's segment, bytes). Raises Unavailable when the rank does not
        answer in that time or is gone, and TransferError when it cannot read the span."""
        if self._lost:
            raise Unavailable(self._lost)
        ticket = next(self._tickets)
        done: asyncio.Future[m.Summed] = asyncio.get_running_loop().create_future()
        self._waiting[rank, ticket] = done
        offsets, sizes = tuple(offset for offset, _ in spans), tuple(size for _, size in spans)
        self._ranks[rank].send(m.Sum(ticket, offsets, sizes, time.monotonic_ns() + int(timeout_s * 1e9)))
        try:
            said = await asyncio.wait_for(done, timeout_s)
        except TimeoutError:
            raise Unavailable(f"checksums of {sum(sizes)} bytes took more than {timeout_s:.1f} s") from None
        finally:
            self._waiting.pop((rank, ticket), None)
        if said.cause:
            raise TransferError(said.cause)
        return said.sums

    def rank_said(self, rank: int, message: m.Summed) -> None:
        """Takes a rank's answer."""
        waiting = self._waiting.get((rank, message.ticket))
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def ranks_lost(self, cause: str) -> None:
        """Fails all requests, now and later, because the ranks are gone."""
        self._lost = self._lost or cause
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Unavailable(cause))
