"""Things to do later, for the fault transport."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from itertools import count


class Clockwork:
    """Does things later, on a thread of its own that starts with the first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def after(self, wait_s: float, act: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + wait_s, next(self._order), act))
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="kvmesh-fault", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """What is not due yet is not done any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._closed:
                    return
                _, _, act = heapq.heappop(self._due)
            act()
