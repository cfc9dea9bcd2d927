"""How often blocks were asked for lately: a sample of the questions, decayed. Fixed in size, O(1) a question."""

from __future__ import annotations

import random
from collections.abc import Sequence

STRIDE = 16  # one in so many questions is counted
MAX_KEYS = 65_536


class KeyHeat:
    """Counts questions by key. Counts are halved every `window_s`; what is at zero is forgotten. A full book takes no
    new keys until then."""

    def __init__(self, *, window_s: float, stride: int = STRIDE, max_keys: int = MAX_KEYS) -> None:
        self._window_s = window_s
        self._stride = stride
        self._max_keys = max_keys
        self._counts: dict[bytes, int] = {}
        self._rng = random.Random(0)  # a fixed step would pass over some places of calls that are alike
        self._decays_at = float("-inf")

    def __len__(self) -> int:
        return len(self._counts)

    def note(self, keys: Sequence[bytes]) -> list[bytes]:
        """Count that these were asked for; those of them that were in the sample."""
        counted = list(keys[self._rng.randrange(self._stride) :: self._stride])
        counts = self._counts
        for key in counted:
            if key in counts:
                counts[key] += 1
            elif len(counts) < self._max_keys:
                counts[key] = 1
        return counted

    def of(self, key: bytes) -> int:
        """About how often `key` was asked for in the last window or two."""
        return self._counts.get(key, 0) * self._stride

    def decay(self, now: float) -> None:
        """Halve the counts when a window is over; to be called now and then. O(keys) once in a window."""
        if now < self._decays_at:
            return
        self._decays_at = now + self._window_s
        self._counts = {key: count // 2 for key, count in self._counts.items() if count > 1}
