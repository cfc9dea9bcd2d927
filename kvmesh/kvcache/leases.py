"""Leases on blocks: which extents may still be read, and until when. Bookkeeping; `NodeStore` holds the references.

Ids are never used again within one life of the node, and those of two lives (two seeds) do not meet but by a chance of
about one in 2^40: a reader who renews after its holder restarted must not meet somebody else's lease.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Lease:
    """What a reader got: `extents[i]` of the key it asked for at i, None where nothing is sealed; monotonic ns until
    which these extents stay as they are. `lease_id` 0: nothing is held, `until_ns` means nothing."""

    lease_id: int
    extents: tuple[int | None, ...]
    until_ns: int


class _Open:
    __slots__ = ("extents", "final", "until_ns")

    def __init__(self, extents: tuple[int, ...], until_ns: int) -> None:
        self.extents = extents
        self.until_ns = until_ns
        self.final = False  # runs to its end, but cannot be renewed


class LeaseBook:
    """Open leases by id and by end. Every operation O(log leases), amortised. `seed`: new at every process start."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._given = 0
        self._open: dict[int, _Open] = {}
        self._ends: list[tuple[int, int]] = []  # (until_ns, id); entries that no longer tell the truth are passed over

    def __len__(self) -> int:
        """Leases that are not over."""
        return len(self._open)

    @property
    def extents(self) -> int:
        """Extents under lease, counted once for each lease. O(leases)."""
        return sum(len(lease.extents) for lease in self._open.values())

    @property
    def next_expiry(self) -> int | None:
        """When the next lease ends, monotonic ns; None: there is none."""
        while self._ends:
            until_ns, lease_id = self._ends[0]
            lease = self._open.get(lease_id)
            if lease is not None and lease.until_ns == until_ns:
                return until_ns
            heapq.heappop(self._ends)
        return None

    def open(self, extents: tuple[int, ...], until_ns: int) -> int:
        """A new lease; returns its id, never 0."""
        lease_id = self._next_id()
        self._open[lease_id] = _Open(extents, until_ns)
        self._push(until_ns, lease_id)
        return lease_id

    def renew(self, lease_id: int, until_ns: int, now: int) -> int | None:
        """Its new end, never earlier than the one already promised; None: it is over, unknown, or final."""
        lease = self._open.get(lease_id)
        if lease is None or lease.final or lease.until_ns <= now:
            return None
        if until_ns > lease.until_ns:
            lease.until_ns = until_ns
            self._push(until_ns, lease_id)
        return lease.until_ns

    def close(self, lease_id: int) -> tuple[int, ...]:
        """End it; returns its extents, () when it is unknown."""
        lease = self._open.pop(lease_id, None)
        return () if lease is None else lease.extents

    def expire(self, now: int) -> list[tuple[int, ...]]:
        """End all whose time is over at `now`; returns the extents of each, in order of their ends."""
        over = []
        while (end := self.next_expiry) is not None and end <= now:
            _, lease_id = heapq.heappop(self._ends)
            over.append(self._open.pop(lease_id).extents)
        return over

    def finalize(self) -> None:
        """No lease that is open now can be renewed any more."""
        for lease in self._open.values():
            lease.final = True

    def check_integrity(self) -> None:
        """AssertionError unless every open lease will end. O(leases)."""
        assert {(lease.until_ns, lease_id) for lease_id, lease in self._open.items()} <= set(self._ends)

    def held(self) -> list[int]:
        """Every extent under lease, once for each lease."""
        return [extent for lease in self._open.values() for extent in lease.extents]

    def _push(self, until_ns: int, lease_id: int) -> None:
        if len(self._ends) > 2 * len(self._open) + 64:  # renewals and early ends leave entries behind
            self._ends = [(lease.until_ns, known) for known, lease in self._open.items() if known != lease_id]
            heapq.heapify(self._ends)
        heapq.heappush(self._ends, (until_ns, lease_id))

    def _next_id(self) -> int:
        lease_id = 0
        while lease_id == 0:
            self._given += 1
            lease_id = _mix(_mix(self._seed & _U64) + self._given & _U64)
        return lease_id


def _mix(x: int) -> int:
    """A permutation of the 64-bit numbers (the finalizer of SplitMix64): ids do not repeat before the count does."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _U64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _U64
    return x ^ x >> 31
