"""When those who were refused may come again. Pure.

Each refusal knows after what time its request would pass if nobody else came: but all that are refused at one moment
know the same time, come back together, and all but one are refused again. So they are given turns: no two closer to
each other than requests are taken while the mesh refuses some. Who has a turn holds nothing: he may not come, and who
comes without a turn is judged like everybody else.
"""

from __future__ import annotations

MOST_S = 10.0  # a turn is at most so much later than needed: most of those before it may never come
MOST_INTERVAL_S = 1.0
NEW_SHARE = 0.1  # of a new interval between two taken requests in what is thought usual


class Turns:
    """Of one model's requests."""

    def __init__(self) -> None:
        self._interval_s = 0.0  # between two that were taken; 0: not known
        self._taken_at: float | None = None
        self._refused = False  # somebody, since the last one was taken: else pauses say nothing
        self._last_at = 0.0  # the last turn that was given

    def taken(self, now: float) -> None:
        """A request was."""
        if self._taken_at is not None and self._refused:
            gap_s = min(MOST_INTERVAL_S, now - self._taken_at)
            self._interval_s += (NEW_SHARE if self._interval_s else 1.0) * (gap_s - self._interval_s)
        self._taken_at, self._refused = now, False

    def wait_s(self, needed_s: float, now: float) -> float:
        """Seconds until the turn of one that was refused now. `needed_s`: until it would pass alone."""
        self._refused = True
        at = max(now + needed_s, self._last_at + self._interval_s)
        self._last_at = min(at, now + needed_s + MOST_S)
        return self._last_at - now
