"""One timer for the deadlines of many calls."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

MIN_S = 0.001  # what is due a moment from now is not looked for in every turn


class Sweep:
    """Armed for the earliest deadline that it was told of: calls that end in time cost it nothing. `due(now)` ends what
    is over and returns the next deadline, inf: none. Monotonic seconds."""

    def __init__(self, due: Callable[[float], float]) -> None:
        self._due = due
        self._at = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def by(self, deadline: float) -> None:
        if deadline >= self._at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._at = deadline
        delay_s = max(deadline - time.monotonic(), MIN_S)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)

    def _fire(self) -> None:
        self._at, self._timer = math.inf, None
        self.by(self._due(time.monotonic()))

    def close(self) -> None:
        self._at = -math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
