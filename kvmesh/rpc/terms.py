"""Terms of leaders: which of them are credible, and which one this process follows.

A term numbers one leader: the next one has a higher number, and what is said or ordered under a lower one is void. A
mesh's terms begin at the seconds of a wall clock (so that a new life of it begins above the last one) and grow by one
with each leader, so no honest mesh is far above the clock, and none ever reaches MAX_TERM. Who says otherwise is not
believed: a number that only grows must not be driven to its end by one lie.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvmesh.errors import InvalidRequest, StaleTerm

log = logging.getLogger(__name__)

MAX_TERM = (1 << 31) - 1  # no leader has it: terms fill the upper half of other numbers
EPOCH_S = 1_577_836_800  # 2020-01-01, where the clock of terms begins
EARLIEST = 189_388_800  # 2026-01-01: a clock before that is wrong
LATEST = 1 << 30  # 2054-01-10: likewise behind it; half of all terms are left
MAX_JUMP = 1 << 25  # above the clock what a member says is still believed: clocks may differ by 388 days
FORGIVE_S = 10.0  # a lower term is believed that masters have answered under for so long, and at least
FORGIVE_TIMES = 3  # so often, while none has answered under the higher one


def wall_clock() -> float:
    """Returns seconds since 1970 by this machine's clock."""
    return time.time()


def first_term(now: float | None = None) -> int:
    """Returns the term to begin with when nobody names an earlier one, in EARLIEST..LATEST. If the wall clock is right
    it is above the terms of earlier lives of the mesh, so that watchers, which know of those and cannot say so, follow
    it."""
    seconds = (wall_clock() if now is None else now) - EPOCH_S
    return int(min(max(seconds, EARLIEST), LATEST))


def clock_is_off(now: float | None = None) -> bool:
    """Says whether the wall clock shows a time at which this program did not exist, or will not."""
    return not EARLIEST <= (wall_clock() if now is None else now) - EPOCH_S <= LATEST


def most_credible(now: float | None = None) -> int:
    """Returns the highest term that is believed when a member reports it."""
    return first_term(now) + MAX_JUMP


class LeaderTerms:
    """The highest term that this process has heard in answers of masters. A process has one such object.

    Only answers to calls of this process count, so a master that answers has led meanwhile. When masters go on
    answering under a lower term and none under the higher one, the higher one was a lie, or a Redis or a clock was set
    back; the lower one is believed after FORGIVE_S. A single answer, however late, cannot cause that.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.highest = 0
        self._clock = clock
        self._lower_since: float | None = None  # when the first answer under a lower term came after the last good one
        self._lower_times = 0

    def hear(self, term: int) -> None:
        """Takes the term of a master's answer. Raises StaleTerm, which makes the answer void, when a later master has
        answered or no master can have this term."""
        if not 0 <= term < MAX_TERM:
            raise StaleTerm(f"term={term}: no master has led under it, so this answer is void", field="term")
        if term < self.highest and not self._forgiven():
            raise self._stale(term)
        if term < self.highest:
            log.warning("term %d is forgotten: for %.0f s masters have led under %d", self.highest, FORGIVE_S, term)
        self.highest = term
        self._lower_since, self._lower_times = None, 0

    def check(self, term: int) -> None:
        """Compares the term of an order with the highest heard, without learning from it, because whoever gives orders
        need not be a master. Raises StaleTerm when it is lower, InvalidRequest when no master can have it."""
        if not 0 <= term < MAX_TERM:
            raise InvalidRequest.of("term", term, f"must be in 0..{MAX_TERM - 1}")
        if term < self.highest:
            raise self._stale(term)

    def _forgiven(self) -> bool:
        """Counts one more answer under a lower term; returns whether there have been enough."""
        now = self._clock()
        if self._lower_since is None:
            self._lower_since = now
        self._lower_times += 1
        return self._lower_times >= FORGIVE_TIMES and now - self._lower_since >= FORGIVE_S

    def _stale(self, term: int) -> StaleTerm:
        return StaleTerm(f"term={term}: a master of term {self.highest} has been heard", field="term")
