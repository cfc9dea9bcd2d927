"""Virtual time: what happens next, and when. Calls of the same moment are made in the order in which they were asked
for, so that a run is the same every time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf


class ScheduledCall:
    """One call to come."""

    __slots__ = ("at_s", "call")

    def __init__(self, at_s: float, call: Callable[[], None]) -> None:
        self.at_s = at_s
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Makes sure that the call is not made any more. Does nothing where it was made."""
        self.call = None


class Loop:
    """Events in virtual seconds, from 0 on."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, ScheduledCall]] = []
        self._number = 0

    def __len__(self) -> int:
        """Calls to come, cancelled ones included."""
        return len(self._heap)

    def at(self, when_s: float, call: Callable[[], None]) -> ScheduledCall:
        """Call then, or now if that is past."""
        timer = ScheduledCall(when_s if when_s > self.now else self.now, call)
        self._number += 1
        heapq.heappush(self._heap, (timer.at_s, self._number, timer))
        return timer

    def after(self, delay_s: float, call: Callable[[], None]) -> ScheduledCall:
        """Call in so many seconds."""
        when_s = self.now + delay_s if delay_s > 0 else self.now
        timer = ScheduledCall(when_s, call)
        self._number += 1
        heapq.heappush(self._heap, (when_s, self._number, timer))
        return timer

    def run(self, until: Callable[[], bool] = lambda: False, deadline_s: float = inf) -> None:
        """Make calls until `until` holds, none is left, or the next one lies behind `deadline_s`."""
        heap, pop = self._heap, heapq.heappop
        while heap and not until():
            if heap[0][0] > deadline_s:
                return
            when, _, timer = pop(heap)
            call = timer.call
            if call is not None:
                self.now = when
                timer.call = None
                call()
