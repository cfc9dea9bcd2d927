"""Leases on blocks: which extents may still be read, and until when. Bookkeeping; `NodeStore` holds the references.

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
    """What a reader got: `extents[i]` of the key it asked for at i, None where nothing is sealed; monotonic ns until
    which these extents stay as they are. `lease_id` 0: nothing is held, `until_ns` means nothing."""

    lease_id: int
    extents: tuple[int | None, ...]
    until_ns: int


class Deadlines(Generic[K]):
    """Until when something lasts. Every operation O(log entries), amortised; ends only move to later."""

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
        """Its end, monotonic ns; None: it has none."""
        end = self._ends.get(key)
        return None if end is None else end[0]

    def extend(self, key: K, until_ns: int) -> int:
        """It lasts until then, or until the end that it has, if that is later; returns which. Of equal ends the one
        that was given first is due first."""
        end = self._ends.get(key)
        if end is None:
            self._serial += 1
            end = self._ends[key] = (until_ns, self._serial)
            heapq.heappush(self._heap, (*end, key))
        elif until_ns > end[0]:
            end = self._ends[key] = (until_ns, end[1])
        return end[0]

    def drop(self, key: K) -> bool:
        """It has no end any more. False: it had none."""
        if self._ends.pop(key, None) is None:
            return False
        if len(self._heap) > 2 * len(self._ends) + 64:
            self._heap = [(*end, known) for known, end in self._ends.items()]
            heapq.heapify(self._heap)
        return True

    @property
    def next(self) -> int | None:
        """The earliest end; None: there is none."""
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
        """Those whose end has come, in the order of their ends, at most so many: they have none any more."""
        over: list[K] = []
        while (most is None or len(over) < most) and (end := self.next) is not None and end <= now:
            key = heapq.heappop(self._heap)[2]
            del self._ends[key]
            over.append(key)
        return over

    def check_integrity(self) -> None:
        """AssertionError unless everything that has an end will come to it. O(entries)."""
        entries = {(serial, key): until_ns for until_ns, serial, key in self._heap}
        assert len(entries) == len(self._heap), "two entries for one end"
        for key, (until_ns, serial) in self._ends.items():
            assert entries.get((serial, key), until_ns + 1) <= until_ns, "an end that nobody will notice"


class Coverage:
    """How many leases and hard pins there are on each extent."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        """Extents with one at least."""
        return len(self._counts)

    def count(self, extent: int) -> int:
        """On this one."""
        return self._counts.get(extent, 0)

    def add(self, extents: Iterable[int]) -> None:
        """One more on each."""
        for extent in extents:
            self._counts[extent] = self._counts.get(extent, 0) + 1

    def drop(self, extents: Iterable[int]) -> None:
        """One less on each. KeyError: there is none."""
        for extent in extents:
            if self._counts[extent] == 1:
                del self._counts[extent]
            else:
                self._counts[extent] -= 1

    def check(self, counts: Counter[int]) -> None:
        """AssertionError unless these are the counts."""
        assert self._counts == counts, "leases and pins are counted wrong"


class _Open:
    __slots__ = ("extents", "final")

    def __init__(self, extents: tuple[int, ...]) -> None:
        self.extents = extents
        self.final = False  # runs to its end, but cannot be renewed


class LeaseBook:
    """Open leases by id and by end. Every operation O(log leases + extents of the lease), amortised. `seed`: new at
    every process start. `coverage`: where they are counted."""

    def __init__(self, seed: int, coverage: Coverage | None = None) -> None:
        self._coverage = Coverage() if coverage is None else coverage
        self._seed = seed
        self._given = 0
        self._open: dict[int, _Open] = {}
        self._ends: Deadlines[int] = Deadlines()

    def __len__(self) -> int:
        """Leases that are not over."""
        return len(self._open)

    @property
    def next_expiry(self) -> int | None:
        """When the next lease ends, monotonic ns; None: there is none."""
        return self._ends.next

    def open(self, extents: tuple[int, ...], until_ns: int) -> int:
        """A new lease; returns its id, never 0."""
        lease_id = self._next_id()
        self._open[lease_id] = _Open(extents)
        self._ends.extend(lease_id, until_ns)
        self._coverage.add(extents)
        return lease_id

    def renew(self, lease_id: int, until_ns: int, now: int) -> int | None:
        """Its new end, never earlier than the one already promised; None: it is over, unknown, or final."""
        lease, end = self._open.get(lease_id), self._ends.get(lease_id)
        if lease is None or end is None or lease.final or end <= now:
            return None
        return self._ends.extend(lease_id, until_ns)

    def is_final(self, lease_id: int) -> bool:
        """Whether it is open and cannot be renewed any more."""
        lease = self._open.get(lease_id)
        return lease is not None and lease.final

    def close(self, lease_id: int) -> tuple[int, ...]:
        """End it; returns its extents, () when it is unknown."""
        self._ends.drop(lease_id)
        return self._closed(lease_id)

    def expire(self, now: int, most: int | None = None) -> list[tuple[int, ...]]:
        """End those whose time is over at `now`, at most so many, and no more once they have STEP_EXTENTS extents
        together; returns the extents of each, in order of their ends. `most` none: all."""
        if most is None:
            return [self._closed(lease_id) for lease_id in self._ends.due(now)]
        over: list[tuple[int, ...]] = []
        extents = 0
        while len(over) < most and extents < STEP_EXTENTS and (due := self._ends.due(now, 1)):
            over.append(self._closed(due[0]))
            extents += len(over[-1])
        return over

    def finalize(self) -> None:
        """No lease that is open now can be renewed any more."""
        for lease in self._open.values():
            lease.final = True

    def check_integrity(self) -> None:
        """AssertionError unless every open lease will end. O(leases)."""
        self._ends.check_integrity()
        assert len(self._ends) == len(self._open) and all(lease_id in self._ends for lease_id in self._open)

    def held(self) -> list[int]:
        """Every extent under lease, once for each lease."""
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
    """A permutation of the 64-bit numbers (the finalizer of SplitMix64): ids do not repeat before the count does."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _U64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _U64
    return x ^ x >> 31


# ── pins ────────────────────────────────────────────────────────────────────────────────────────────

# Which blocks are to stay: soft pins, for a time and while there is anything else to evict, and hard pins, until
# somebody ends them. Bookkeeping; `NodeStore` holds the references of hard pins and spares what is pinned softly.

PINNED_PERCENT = 50


class PinBook:
    """Pins by key. Every operation O(log pins) a key, amortised. `percent`: of all extents may be pinned hard."""

    def __init__(self, percent: int = PINNED_PERCENT) -> None:
        if not 0 <= percent <= 100:
            raise ValueError(f"pinned_percent={percent}: must be in 0..100")
        self._percent = percent
        self.soft: Deadlines[bytes] = Deadlines()
        self.hard: dict[bytes, int] = {}  # key → its extent

    def limit(self, total: int) -> int:
        """Blocks that may be pinned hard, of so many extents."""
        return total * self._percent // 100

    def check(self, new: Sequence[bytes], total: int) -> None:
        """PinLimit, which names figures, unless so many more may be pinned hard."""
        limit = self.limit(total)
        if len(self.hard) + len(new) > limit:
            raise PinLimit(
                f"hard_pins={len(new)}: {len(self.hard)} of {total} blocks are pinned, at most {limit} may be",
                field="hard_pins",
            )
