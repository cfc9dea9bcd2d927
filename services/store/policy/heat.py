"""Estimates how often blocks were looked up lately, from a decayed sample of the look-ups. Its size is fixed, and it
costs O(1) a look-up."""

from __future__ import annotations

import random
from collections.abc import Sequence

STRIDE = 16  # one in so many look-ups is counted
MAX_KEYS = 65_536


class KeyHeat:
    """Counts look-ups by key. Counts are halved every `window_s`, and a key whose count is 0 is forgotten. A full table
    takes no new keys until then."""

    def __init__(self, *, window_s: float, stride: int = STRIDE, max_keys: int = MAX_KEYS) -> None:
        self._window_s = window_s
        self._stride = stride
        self._max_keys = max_keys
        self._counts: dict[bytes, int] = {}
        self._rng = random.Random(0)  # with a fixed first index, calls of equal length would never count some positions
        self._decays_at = float("-inf")

    def __len__(self) -> int:
        return len(self._counts)

    def note(self, keys: Sequence[bytes]) -> list[bytes]:
        """Counts a look-up of these keys. Returns those of them that were in the sample."""
        counted = list(keys[self._rng.randrange(self._stride) :: self._stride])
        counts = self._counts
        for key in counted:
            if key in counts:
                counts[key] += 1
            elif len(counts) < self._max_keys:
                counts[key] = 1
        return counted

    def of(self, key: bytes) -> int:
        """Returns about how often `key` was looked up in the last window or two."""
        return self._counts.get(key, 0) * self._stride

    def decay(self, now: float) -> None:
        """Halves the counts when a window is over; to be called regularly. Its cost is O(keys) once in a window."""
        if now < self._decays_at:
            return
        self._decays_at = now + self._window_s
        self._counts = {key: count // 2 for key, count in self._counts.items() if count > 1}
