"""When those who were refused for want of room may come again. Pure: the time is an argument.

Room comes back at the rate at which calls end, so only so many of the refused can be taken in a second. Each of them is
told a time of its own: no two are closer to each other than two calls that end.
"""

from __future__ import annotations

FIRST_GUESS_S = 0.01  # between two calls that end, before any has ended
NEW_SHARE = 0.05  # of a new interval in what is thought usual
MOST_INTERVAL_S = 2.0
MOST_S = 30.0  # a time is at most so much later than room is expected; who would be told more shares an earlier one
LEAST_S = 0.05


class ReturnTimes:
    """Of one place that holds a bounded number of calls. `ended` and `wait_s` take seconds of one monotonic clock."""

    def __init__(self) -> None:
        self.interval_s = FIRST_GUESS_S  # between two calls that end while there is no room
        self._known = False
        self._ended_at: float | None = None  # the last one that ended while there was no room
        self._last_at = 0.0  # the latest time that somebody was told

    def ended(self, now: float, *, full: bool) -> None:
        """A call has left. `full`: somebody had been refused since the one before it: else the time between the two
        tells how many came, not how fast they are served."""
        if full and self._ended_at is not None:
            gap_s = min(MOST_INTERVAL_S, now - self._ended_at)
            self.interval_s += (NEW_SHARE if self._known else 1.0) * (gap_s - self.interval_s)
            self._known = True
        self._ended_at = now

    def wait_s(self, now: float, ahead: int = 0) -> float:
        """Seconds after which one that is refused now finds room, if those who were told earlier times took theirs.
        `ahead`: calls that end before there is any."""
        soonest = now + max(LEAST_S, (ahead + 1) * self.interval_s)
        self._last_at = max(soonest, self._last_at + self.interval_s)
        return soonest - now + (self._last_at - soonest) % MOST_S
