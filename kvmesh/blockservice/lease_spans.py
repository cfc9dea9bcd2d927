"""What a holder does for readers whose traces are kept, as spans: the lease, how long its blocks were held, and the
READs that its ranks served."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.context import Context

from kvmesh.blockservice.peer_segments import SegmentRank
from kvmesh.kvcache.tiers import Tier
from kvmesh.ranks import protocol as m
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.telemetry import names, spans

log = logging.getLogger(__name__)

MOST = 256  # leases traced at once: beyond that, the oldest is no longer followed
MAX_WATCHED = 16_384  # blocks of a lease whose READs are counted: of a larger one none are
RANK_S = 2.0  # within which a rank says what it has served

Ranges = list[tuple[tuple[int, ...], tuple[int, ...]]]
"""Of each rank the offsets in its segment, and the bytes at each, that a lease is on."""


@dataclass(eq=False)
class _Traced:
    """A lease that is open, or whose ranks have yet to say what they served."""

    parent: Context
    attributes: dict[str, spans.Value]
    ticket: int
    given_ns: int
    until_ns: int
    ended_ns: int = 0
    end: str = ""
    waiting: int = 0  # ranks
    served: list[m.ReadsServed] | None = None


class LeaseSpans:
    """Follows the leases of one process that belong to kept traces. It belongs to the event loop. Leases of other
    traces cost one look at an empty table."""

    def __init__(self, ranks: Sequence[SegmentRank]) -> None:
        self._ranks = ranks
        self._tickets = itertools.count(1)
        self._open: OrderedDict[int, _Traced] = OrderedDict()  # by lease id, the oldest first
        self._asked: OrderedDict[int, _Traced] = OrderedDict()  # by ticket

    def given(
        self, request: pb.LeaseRequest, answer: pb.LeaseResponse, start_ns: int, ranges: Ranges, path: str
    ) -> None:
        """Records that a lease was asked for at `start_ns`, by `path`, and is answered now; follows it if there is
        one."""
        now = time.monotonic_ns()
        parent = spans.context_from(request.traceparent)
        tiers = Counter(Tier(tier).name.lower() for tier in answer.tiers if tier)
        attributes: dict[str, spans.Value] = {
            names.READER: request.reader[:64],
            names.CALL_PATH: path,
            names.WANTED_BLOCKS: len(answer.held),
            names.LEASED_BLOCKS: sum(map(bool, answer.held)),
            names.LEASED_BYTES: sum(sum(sizes) for _, sizes in ranges),
            names.LEASED_TIERS: " ".join(f"{tier}={count}" for tier, count in sorted(tiers.items())),
        }
        spans.record(names.SPAN_LEASE, parent, start_ns, now, attributes)
        if not answer.lease_id:
            return
        traced = _Traced(parent, attributes, next(self._tickets), now, now + answer.lease_ms * 1_000_000)
        if 0 < sum(len(offsets) for offsets, _ in ranges) <= MAX_WATCHED:
            for rank, (offsets, sizes) in enumerate(ranges):
                self._ranks[rank].send(m.WatchReads(traced.ticket, offsets, sizes))
                traced.waiting += 1
        self._open[answer.lease_id] = traced
        while len(self._open) > MOST:
            _, oldest = self._open.popitem(last=False)
            self._end(oldest, "not followed any more", now)

    def failed(self, request: pb.LeaseRequest, start_ns: int, error: str) -> None:
        """Records a lease that was refused."""
        parent = spans.context_from(request.traceparent)
        attributes: dict[str, spans.Value] = {names.READER: request.reader[:64]}
        spans.record(names.SPAN_LEASE, parent, start_ns, time.monotonic_ns(), attributes, error=error)

    def renewed(self, lease_id: int, lease_ms: int) -> None:
        """Notes that a lease lasts so long from now on."""
        if self._open and (traced := self._open.get(lease_id)) is not None:
            traced.until_ns = time.monotonic_ns() + lease_ms * 1_000_000

    def released(self, lease_id: int, *, held: bool) -> None:
        """Notes that a lease was given back; `held` says that it was open until now."""
        if self._open and (traced := self._open.pop(lease_id, None)) is not None:
            self._end(traced, "given back" if held else "ran out", time.monotonic_ns())

    def tidy(self) -> None:
        """Ends what has run out, and what ranks have not answered for. It is called about once a second."""
        now = time.monotonic_ns()
        for lease_id in [one for one, traced in self._open.items() if traced.until_ns <= now]:
            traced = self._open.pop(lease_id)
            self._end(traced, "ran out", traced.until_ns)
        for traced in [one for one in self._asked.values() if one.ended_ns + RANK_S * 1e9 <= now]:
            self._finish(traced)

    def rank_said(self, message: m.ReadsServed) -> None:
        """Takes what a rank has served of a lease that is over."""
        if (traced := self._asked.get(message.ticket)) is None:
            return
        traced.served = [*(traced.served or ()), message]
        traced.waiting -= 1
        if not traced.waiting:
            self._finish(traced)

    def _end(self, traced: _Traced, end: str, now: int) -> None:
        traced.end, traced.ended_ns = end, now
        if not traced.waiting:
            self._finish(traced)
            return
        self._asked[traced.ticket] = traced
        for rank in self._ranks[: traced.waiting]:
            rank.send(m.UnwatchReads(traced.ticket))

    def _finish(self, traced: _Traced) -> None:
        self._asked.pop(traced.ticket, None)
        served = [one for one in traced.served or () if one.reads]
        attributes = traced.attributes | {names.LEASE_END: traced.end, names.READS_SEEN: bool(served)}
        own = spans.record(
            names.SPAN_SERVE,
            traced.parent,
            traced.given_ns,
            traced.ended_ns,
            attributes,
            error="" if traced.end == "given back" else traced.end,
        )
        for one in served:
            read: dict[str, spans.Value] = {names.READS: one.reads, names.READ_BYTES: one.nbytes}
            spans.record(names.SPAN_READ, own, one.start_ns, one.end_ns, read)
