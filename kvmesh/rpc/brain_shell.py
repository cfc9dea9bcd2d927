"""The shell around a pure machine: it feeds events one after another, carries actions out, and has a timer.

A machine is two functions: `step(event, now_ns) -> actions`, and `next_due() -> now_ns`, when it wants a Tick at the
latest. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from kvmesh.clock import NEVER, Tick

MIN_WAIT_NS = 1_000_000  # a machine that stays due is looked at this often, and not in a circle


EventT = TypeVar("EventT")
ActionT = TypeVar("ActionT")


class BrainShell(Generic[EventT, ActionT]):
    """The one owner of a machine. It belongs to one event loop, and `feed` never waits.

    `do` carries one action out; its `now` is the time that the machine was given. `fed` is called whenever no event is
    left.
    """

    def __init__(
        self,
        step: Callable[[EventT | Tick, int], Iterable[ActionT]],
        next_due: Callable[[], int],
        do: Callable[[ActionT, int], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.fed: Callable[[], None] = lambda: None
        self._step = step
        self._next_due = next_due
        self._do = do
        self._clock_ns = clock_ns
        self._events: deque[EventT | Tick] = deque()
        self._feeding = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = NEVER
        self._closed = False

    def feed(self, event: EventT | Tick) -> None:
        """Gives the machine one event and carries its actions out. An event that occurs meanwhile (a rank is found dead
        when it is written to) is queued. Exceptions of the machine or an action are raised here; queued events are
        taken with the next one."""
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                now = self._clock_ns()
                for action in self._step(self._events.popleft(), now):
                    self._do(action, now)
        finally:
            self._feeding = False
            self._arm()
        self.fed()

    def _arm(self) -> None:
        due = self._next_due()
        if due == self._timer_ns or self._closed:
            return
        self._timer_ns = due
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due < NEVER:
            delay_ns = max(MIN_WAIT_NS, due - self._clock_ns())
            self._timer = asyncio.get_running_loop().call_later(delay_ns * 1e-9, self._tick)

    def _tick(self) -> None:
        self._timer, self._timer_ns = None, NEVER
        self.feed(Tick())

    def close(self) -> None:
        """Stops the timer. Events are still taken, so that what ends later is still handled."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
