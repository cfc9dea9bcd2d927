"""Numbers that nobody else ever gets, for keys of the public client that are not content-derived."""

from __future__ import annotations

MAX_COUNT = 65_536  # in one range


class Grants:
    """Numbers of one leader's term. A term is given to one leader only, where Redis gives it; where terms may come
    again (no Redis, and no node that remembers), numbers that begin at the wall clock's nanoseconds keep two lives
    apart, as nobody asks for 10⁹ of them in a second."""

    def __init__(self, wall_ns: int) -> None:
        self._next = wall_ns

    def take(self, count: int) -> int:
        """The first of `count` numbers (1..MAX_COUNT)."""
        first = self._next
        self._next += count
        return first
