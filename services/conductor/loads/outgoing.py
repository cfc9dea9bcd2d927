"""What is on its way by this conductor's word, at both ends of the wires. Pure.

A holder that many pull from sends to one after the other: what it has still to send goes before (`Outgoing.ahead`).
Where two flows meet at a node, its link is shared fairly: one of n bytes beside others of m is as slow as one of
n + min(n, m) bytes alone (`score.shared_bytes`). A flow crosses two ends, and the slower one decides.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.services.conductor.domain import Life


@dataclass(slots=True)
class OutgoingLoad:
    """`nbytes` that somebody will read from `holder`."""

    holder: Life
    nbytes: int


class Outgoing:
    """Bytes by holder. A pull counts from its placement, or from when it is to begin, until it is reported, or its
    predicted time is over twice."""

    def __init__(self) -> None:
        self._bytes: dict[Life, int] = {}
        self.changed: dict[Life, None] = {}  # whose bytes are others than when somebody cleared this
        self._pulls: dict[str, tuple[int, list[OutgoingLoad]]] = {}  # those that count already
        # Heaps; entries of ended pulls are skipped by their number.
        self._later: list[tuple[float, int, str, Sequence[OutgoingLoad]]] = []
        self._ends: list[tuple[float, int, str]] = []
        self._number = 0

    def __len__(self) -> int:
        """Pulls under way, or to come."""
        return len(self._pulls)

    def ahead(self, holder: Life) -> int:
        """Bytes that it has still to send."""
        return self._bytes.get(holder, 0)

    def add(
        self,
        request_id: str,
        loads: Sequence[OutgoingLoad],
        until: float,
        later: Sequence[OutgoingLoad] = (),
        begins: float = 0.0,
    ) -> None:
        """A placement made `request_id` read these, and `later` when that `begins`; what it read before is over."""
        self.end(request_id)
        if not loads and not later:
            return
        self._number += 1
        self._pulls[request_id] = self._number, []
        self._count(request_id, loads)
        if later:
            heapq.heappush(self._later, (begins, self._number, request_id, later))
        heapq.heappush(self._ends, (until, self._number, request_id))

    def _count(self, request_id: str, loads: Sequence[OutgoingLoad]) -> None:
        self._pulls[request_id][1].extend(loads)
        for load in loads:
            self._bytes[load.holder] = self._bytes.get(load.holder, 0) + load.nbytes
            self.changed[load.holder] = None

    def end(self, request_id: str) -> None:
        """Its pulls are over; also right when there is none."""
        _, loads = self._pulls.pop(request_id, (0, ()))
        for load in loads:
            self.changed[load.holder] = None
            left = self._bytes.get(load.holder, 0) - load.nbytes
            if left > 0:
                self._bytes[load.holder] = left
            else:  # also of loads without a byte, of models that tell none
                self._bytes.pop(load.holder, None)

    def expire(self, now: float) -> None:
        """Time passes."""
        while self._later and self._later[0][0] <= now:
            _, number, request_id, loads = heapq.heappop(self._later)
            if self._pulls.get(request_id, (0, ()))[0] == number:
                self._count(request_id, loads)
        while self._ends and self._ends[0][0] <= now:
            _, number, request_id = heapq.heappop(self._ends)
            if self._pulls.get(request_id, (0, ()))[0] == number:
                self.end(request_id)


class Wires:
    """Pulls by who sends and by who receives, pushes by who receives. Each ends when its prompt is reported, or when
    its predicted time is over twice."""

    def __init__(self) -> None:
        self.outgoing = Outgoing()
        self._pulled = Outgoing()
        self._pushed = Outgoing()

    def pull(
        self, request_id: str, readers: Sequence[OutgoingLoad], until: float, later: Sequence[OutgoingLoad], at: float
    ) -> None:
        """Whoever reads for it (`holder`: the reader), at once and from `at` on."""
        self._pulled.add(request_id, readers, until, later, at)

    def push(self, request_id: str, to: Life, nbytes: int, begins: float, until: float) -> None:
        """Its prefill sends so much to its decode instance."""
        self._pushed.add(request_id, (), until, [OutgoingLoad(to, nbytes)] if nbytes else (), begins)

    def arriving(self, reader: Life) -> int:
        """Bytes that are on their way to it."""
        return self._pulled.ahead(reader) + self._pushed.ahead(reader)

    def changed(self) -> set[Life]:
        """Who has other bytes before it, or on their way to it, than when this was asked before."""
        found = set[Life]()
        for flows in (self.outgoing, self._pulled, self._pushed):
            found |= flows.changed.keys()
            flows.changed = {}
        return found

    def end(self, request_id: str) -> None:
        """All of it is where it should be, or will never come."""
        for flows in (self.outgoing, self._pulled, self._pushed):
            flows.end(request_id)

    def expire(self, now: float) -> None:
        """Time passes."""
        for flows in (self.outgoing, self._pulled, self._pushed):
            flows.expire(now)
