"""Leases on blocks: which extents may still be read, and until when. `NodeStore` holds the references.

Ids are never used again within one life of the node, and those of two lives (two seeds) do not meet but by a chance of
about one in 2^40: a reader who renews after its holder restarted must not meet somebody else's lease.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvmesh.errors import PinLimit

K = TypeVar("K", bound=Hashable)

STEP_EXTENTS = 4096  # given back by one `expire`, or few more: some milliseconds
_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Lease:
    """The answer to a reader: `extents[i]` is the extent of the i-th key, None where it is not sealed. The extents do
    not change before `until_ns` (monotonic). `lease_id` 0 means that nothing is leased and `until_ns` has no meaning.
    """

    lease_id: int
    extents: tuple[int | None, ...]
    until_ns: int


class Deadlines(Generic[K]):
    """The time until which each key's property lasts. A time can only be moved to later. Operations cost O(log
    entries), amortised."""

    def __init__(self) -> None:
        self._ends: dict[K, tuple[int, int]] = {}  # key → (until_ns, serial)
        # (until_ns, serial, key): one entry for every end, perhaps with an earlier time than it has now (it moves on
        # when it surfaces), and some of dropped ends.
        self._heap: list[tuple[int, int, K]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, key: K) -> bool:
        return key in self._ends

    def get(self, key: K) -> int | None:
        """Returns the key's end in monotonic ns, or None."""
        end = self._ends.get(key)
        return None if end is None else end[0]

    def extend(self, key: K, until_ns: int) -> int:
        """Extends the key's end to `until_ns`, unless it is later already, and returns the end. Among equal ends the
        one that was set first is due first."""
        end = self._ends.get(key)
        if end is None:
            self._serial += 1
            end = self._ends[key] = (until_ns, self._serial)
            heapq.heappush(self._heap, (*end, key))
        elif until_ns > end[0]:
            end = self._ends[key] = (until_ns, end[1])
        return end[0]

    def drop(self, key: K) -> bool:
        """Removes the key's end. Returns False when it had none."""
        if self._ends.pop(key, None) is None:
            return False
        if len(self._heap) > 2 * len(self._ends) + 64:
            self._heap = [(*end, known) for known, end in self._ends.items()]
            heapq.heapify(self._heap)
        return True

    @property
    def next(self) -> int | None:
        """The earliest end, or None."""
        while self._heap:
            until_ns, serial, key = self._heap[0]
            end = self._ends.get(key)
            if end == (until_ns, serial):
                return until_ns
            if end is not None and end[1] == serial:
                heapq.heapreplace(self._heap, (*end, key))
            else:
                heapq.heappop(self._heap)
        return None

    def due(self, now: int, most: int | None = None) -> list[K]:
        """Removes and returns at most `most` keys whose end has come, in the order of their ends."""
        over: list[K] = []
        while (most is None or len(over) < most) and (end := self.next) is not None and end <= now:
            key = heapq.heappop(self._heap)[2]
            del self._ends[key]
            over.append(key)
        return over

    def check_integrity(self) -> None:
        """Raises AssertionError unless every end will be noticed. O(entries)."""
        entries = {(serial, key): until_ns for until_ns, serial, key in self._heap}
        assert len(entries) == len(self._heap), "two entries for one end"
        for key, (until_ns, serial) in self._ends.items():
            assert entries.get((serial, key), until_ns + 1) <= until_ns, "an end that nobody will notice"


class Coverage:
    """The number of leases and hard pins on each extent."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        """Returns how many extents have at least one."""
        return len(self._counts)

    def count(self, extent: int) -> int:
        return self._counts.get(extent, 0)

    def add(self, extents: Iterable[int]) -> None:
        """Counts one more on each extent."""
        for extent in extents:
            self._counts[extent] = self._counts.get(extent, 0) + 1

    def drop(self, extents: Iterable[int]) -> None:
        """Counts one less on each extent. Raises KeyError when an extent has none."""
        for extent in extents:
            if self._counts[extent] == 1:
                del self._counts[extent]
            else:
                self._counts[extent] -= 1

    def check(self, counts: Counter[int]) -> None:
        """Raises AssertionError unless these are the counts."""
        assert self._counts == counts, "leases and pins are counted wrong"


class _Open:
    __slots__ = ("extents", "final")

    def __init__(self, extents: tuple[int, ...]) -> None:
        self.extents = extents
        self.final = False  # runs to its end, but cannot be renewed


class LeaseBook:
    """The open leases, by id and by end. Operations cost O(log leases + extents of the lease), amortised. `seed` must
    be new at every process start; `coverage` counts the leases of each extent."""

    def __init__(self, seed: int, coverage: Coverage | None = None) -> None:
        self._coverage = Coverage() if coverage is None else coverage
        self._seed = seed
        self._given = 0
        self._open: dict[int, _Open] = {}
        self._ends: Deadlines[int] = Deadlines()

    def __len__(self) -> int:
        """Returns how many leases are open."""
        return len(self._open)

    @property
    def next_expiry(self) -> int | None:
        """When the next lease ends, in monotonic ns; None when none is open."""
        return self._ends.next

    def open(self, extents: tuple[int, ...], until_ns: int) -> int:
        """Opens a lease and returns its id, which is never 0."""
        lease_id = self._next_id()
        self._open[lease_id] = _Open(extents)
        self._ends.extend(lease_id, until_ns)
        self._coverage.add(extents)
        return lease_id

    def renew(self, lease_id: int, until_ns: int, now: int) -> int | None:
        """Returns the new end, never earlier than the one already promised; None when the lease is over, unknown, or
        final."""
        lease, end = self._open.get(lease_id), self._ends.get(lease_id)
        if lease is None or end is None or lease.final or end <= now:
            return None
        return self._ends.extend(lease_id, until_ns)

    def is_final(self, lease_id: int) -> bool:
        """Says whether the lease is open and cannot be renewed any more."""
        lease = self._open.get(lease_id)
        return lease is not None and lease.final

    def close(self, lease_id: int) -> tuple[int, ...]:
        """Ends a lease and returns its extents; () when it is unknown."""
        self._ends.drop(lease_id)
        return self._closed(lease_id)

    def expire(self, now: int, most: int | None = None) -> list[tuple[int, ...]]:
        """Ends leases whose time is over at `now`, and returns the extents of each, in the order of their ends. It ends
        at most `most` of them (None: all), and stops when they have STEP_EXTENTS extents together."""
        if most is None:
            return [self._closed(lease_id) for lease_id in self._ends.due(now)]
        over: list[tuple[int, ...]] = []
        extents = 0
        while len(over) < most and extents < STEP_EXTENTS and (due := self._ends.due(now, 1)):
            over.append(self._closed(due[0]))
            extents += len(over[-1])
        return over

    def finalize(self) -> None:
        """Makes all leases that are open now final, so that none can be renewed."""
        for lease in self._open.values():
            lease.final = True

    def check_integrity(self) -> None:
        """Raises AssertionError unless every open lease will end. O(leases)."""
        self._ends.check_integrity()
        assert len(self._ends) == len(self._open) and all(lease_id in self._ends for lease_id in self._open)

    def held(self) -> list[int]:
        """Returns every extent under lease, once for each lease."""
        return [extent for lease in self._open.values() for extent in lease.extents]

    def _closed(self, lease_id: int) -> tuple[int, ...]:
        lease = self._open.pop(lease_id, None)
        if lease is None:
            return ()
        self._coverage.drop(lease.extents)
        return lease.extents

    def _next_id(self) -> int:
        lease_id = 0
        while lease_id == 0:
            self._given += 1
            lease_id = _mix(_mix(self._seed & _U64) + self._given & _U64)
        return lease_id


def _mix(x: int) -> int:
    """Permutes the 64-bit numbers (the finalizer of SplitMix64), so that ids repeat only when the counter does."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _U64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _U64
    return x ^ x >> 31


# ── pins ────────────────────────────────────────────────────────────────────────────────────────────

# Which blocks are to stay: soft pins, for a time and while there is anything else to evict, and hard pins, until
# somebody ends them. Bookkeeping; `NodeStore` holds the references of hard pins and spares what is pinned softly.

PINNED_PERCENT = 50


class PinBook:
    """The pins, by key. Operations cost O(log pins) a key, amortised. `percent` of all extents may be pinned hard."""

    def __init__(self, percent: int = PINNED_PERCENT) -> None:
        if not 0 <= percent <= 100:
            raise ValueError(f"pinned_percent={percent}: must be in 0..100")
        self._percent = percent
        self.soft: Deadlines[bytes] = Deadlines()
        self.hard: dict[bytes, int] = {}  # key → its extent

    def limit(self, total: int) -> int:
        """Returns how many of `total` extents may be pinned hard."""
        return total * self._percent // 100

    def check(self, new: Sequence[bytes], total: int) -> None:
        """Raises PinLimit, with figures, when the `new` keys would exceed the limit of hard pins."""
        limit = self.limit(total)
        if len(self.hard) + len(new) > limit:
            raise PinLimit(
                f"hard_pins={len(new)}: {len(self.hard)} of {total} blocks are pinned, at most {limit} may be",
                field="hard_pins",
            )
