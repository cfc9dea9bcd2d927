"""How often keys were used lately, estimated in a few bytes a key. Pure.

A count-min sketch with conservative update (only the smallest of a key's counters grow) whose counters are halved after
so many uses: the admission filter of TinyLFU (Einziger, Friedman, Manes, ACM ToS 2017). An estimate is never below
the true count since the last halving, up to the cap, and above it only where keys collide in every row.
"""

from __future__ import annotations

import numpy as np
import xxhash

ROWS = 4
CAP = 15
_MASK = (1 << 32) - 1


class FrequencySketch:
    """Counts for about `capacity` keys, halved every `10 * capacity` uses. It takes 4 to 8 bytes a key of capacity."""

    def __init__(self, capacity: int, *, seed: int = 0) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity}: must be at least 1")
        self._width = 1 << (capacity - 1).bit_length()
        self._counts = bytearray(ROWS * self._width)
        self._period = 10 * capacity
        self._used = 0
        self._seed = seed

    def add(self, key: bytes) -> None:
        """Notes a use of `key`. O(1), except for the halving, which is one pass over the counters."""
        cells, counts = self._cells(key), self._counts
        least = min(counts[cell] for cell in cells)
        if least < CAP:
            for cell in cells:
                if counts[cell] == least:
                    counts[cell] = least + 1
        self._used += 1
        if self._used >= self._period:
            self._halve()

    def at_least(self, key: bytes, uses: int) -> None:
        """Raises the estimate of `key` to `uses`, which were counted elsewhere. It is no use by itself."""
        for cell in self._cells(key):
            self._counts[cell] = max(self._counts[cell], min(uses, CAP))

    def estimate(self, key: bytes) -> int:
        """Returns about how often `key` was used lately, 0..15."""
        counts = self._counts
        return min(counts[cell] for cell in self._cells(key))

    def prefers(self, candidate: bytes, victim: bytes) -> bool:
        """Says whether `candidate` is used more often than `victim`, which would be evicted for it. A tie keeps the
        victim."""
        return self.estimate(candidate) > self.estimate(victim)

    def _cells(self, key: bytes) -> tuple[int, ...]:
        bits, mask, width = xxhash.xxh3_128_intdigest(key, self._seed), self._width - 1, self._width
        return tuple(row * width + (bits >> 32 * row & _MASK & mask) for row in range(ROWS))

    def _halve(self) -> None:
        counts = np.frombuffer(self._counts, np.uint8)
        np.right_shift(counts, 1, out=counts)
        self._used //= 2
