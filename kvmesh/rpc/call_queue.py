"""A queue that runs long calls in short slices of the event loop, so that more urgent messages are read between them.

An event loop reads a socket and carries out all that was read before it looks at the next socket. A thousand calls that
came at once would therefore be carried out before a heartbeat that came with them is seen. Here at most SLICE_S of them
are carried out in one turn of the loop; the others wait, a bounded number of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kvmesh.errors import Overloaded

SLICE_S = 0.002

T = TypeVar("T")


class QueuedCall:
    """One waiting call. `drop` it when nobody waits for its answer any more."""

    __slots__ = ("nbytes", "since", "work")

    def __init__(self, work: Callable[[], object], since: float, nbytes: int) -> None:
        self.work: Callable[[], object] | None = work
        self.since = since
        self.nbytes = nbytes

    def drop(self) -> None:
        self.work = None


class CallQueue:
    """Queues at most `most` calls; `name` is the configuration field that sets this. `on_wait` is called with the
    seconds that each call waited. It lives on one event loop."""

    def __init__(
        self,
        most: int,
        name: str,
        on_wait: Callable[[float], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._name = name
        self._on_wait = on_wait
        self._clock = clock
        self._waiting: deque[QueuedCall] = deque()
        self._spent_s = 0.0  # on calls, in this turn of the loop
        self._armed = False
        self._refused = False  # a caller was refused since the last call ended
        self._returning = ReturnTimes()
        self._turn_at = -1.0  # when this turn of the loop began
        self.turned_at = -1.0  # while it is busy: when the one before it began. What is read now came after that

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, work: Callable[[], object], nbytes: int = 0) -> QueuedCall | None:
        """Runs `work` now if this turn of the loop has time left (and returns None), else later. `work` must not raise.
        `nbytes` is what the call holds while it waits. Raises Overloaded when too many calls wait."""
        now = self._clock()
        if not self._waiting and self._spent_s < SLICE_S:
            self._arm()
            self._carry_out(work, now, now)
            return None
        if len(self._waiting) >= self._most:
            self._refused = True
            wait_s = self._returning.wait_s(now)
            text = f"{len(self._waiting)} calls wait here: {self._name}={self._most}"
            raise Overloaded(text, retry_after_ms=max(1, round(wait_s * 1000)))
        queued = QueuedCall(work, now, nbytes)
        self._waiting.append(queued)
        self._arm()
        return queued

    async def call(self, work: Callable[[], T]) -> T:
        """Runs `work` when its turn comes, and returns its result or raises its exception. Raises Overloaded when too
        many calls wait."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def carry_out() -> None:
            if done.done():
                return
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        queued = self.submit(carry_out)
        try:
            return await done
        finally:
            if queued is not None:
                queued.drop()

    def _carry_out(self, work: Callable[[], object], since: float, began: float) -> float:
        """Runs one call; returns the time at which it ended."""
        if self._on_wait is not None:
            self._on_wait(began - since)
        work()
        ended = self._clock()
        self._spent_s += ended - began
        if self._waiting or self._refused:
            self._returning.ended(ended, full=self._refused)
            self._refused = False
        return ended

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            if self._turn_at < 0:
                self._turn_at = self._clock()
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Runs waiting calls; it is scheduled once in each turn of the loop in which calls wait, and in the one
        after."""
        self._armed = False
        self._spent_s = 0.0
        if not self._waiting:
            self.turned_at = self._turn_at = -1.0
            return
        now = self._clock()
        self.turned_at, self._turn_at = self._turn_at, now
        self._arm()
        while self._waiting and self._spent_s < SLICE_S:
            queued = self._waiting.popleft()
            if queued.work is not None:
                now = self._carry_out(queued.work, queued.since, now)


# ── when the refused may come again ─────────────────────────────────────────────────────────────────
#
# Room comes back at the rate at which calls end, so only so many of the refused can be taken in a second. Each of them
# is told a time of its own: no two are closer to each other than two calls that end.

FIRST_GUESS_S = 0.01  # between two calls that end, before any has ended
NEW_SHARE = 0.05  # of a new interval in what is thought usual
MOST_INTERVAL_S = 2.0
MOST_S = 30.0  # a time is at most so much later than room is expected; who would be told more shares an earlier one
LEAST_S = 0.05


class ReturnTimes:
    """The times at which callers that a full queue refused may come again. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.interval_s = FIRST_GUESS_S  # between two calls that end while there is no room
        self._known = False
        self._ended_at: float | None = None  # the last one that ended while there was no room
        self._last_at = 0.0  # the latest time given to a caller

    def ended(self, now: float, *, full: bool) -> None:
        """Notes that a call has left. `full` says that a caller was refused since the call before. Only then does the
        time between the two tell how fast calls are served; else it tells how many came."""
        if full and self._ended_at is not None:
            gap_s = min(MOST_INTERVAL_S, now - self._ended_at)
            self.interval_s += (NEW_SHARE if self._known else 1.0) * (gap_s - self.interval_s)
            self._known = True
        self._ended_at = now

    def wait_s(self, now: float, ahead: int = 0) -> float:
        """Returns the seconds after which a caller refused now finds room, if those refused before come at their times.
        `ahead` calls must end before there is any."""
        soonest = now + max(LEAST_S, (ahead + 1) * self.interval_s)
        self._last_at = max(soonest, self._last_at + self.interval_s)
        return soonest - now + (self._last_at - soonest) % MOST_S


# ── up to when all has been heard ───────────────────────────────────────────────────────────────────
#
# A heartbeat that waits in a socket is no silence. Whoever judges silence therefore goes by the last time of which it
# is known that nothing of before it waits: a turn of the event loop has read every socket since, and no call came over
# gRPC meanwhile (gRPC hands calls over one after another, so while some come others may wait).

PAUSE_S = 0.005  # some turns of the loop; time for gRPC's own threads


async def caught_up(calls: Callable[[], int], clock: Callable[[], float]) -> float:
    """Returns a time of `clock` up to which all calls have been received. `calls` counts the calls taken over gRPC so
    far."""
    while True:
        began, before = clock(), calls()
        await asyncio.sleep(PAUSE_S)
        if calls() == before:
            return began
