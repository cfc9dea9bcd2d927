"""What the worker's threads count, until somebody takes it."""

from __future__ import annotations

import threading
from collections import Counter


class WorkerCounts:
    """Sums by name. All methods are thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, **more: int) -> None:
        """Adds to sums."""
        with self._lock:
            self._counts.update(more)

    def take(self) -> dict[str, int]:
        """Returns what was counted since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)
