"""Visits all instances, some at a time. How many one tick may visit grows with the time since the last tick: frequent
ticks are short, and the simulator's rare ones still visit all. Pure: time is an argument."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.services.conductor.fleet.instance import Instance

MOST_S = 1.0  # a longer pause is made up for no further


@dataclass(frozen=True, slots=True)
class Pace:
    """A rate of work: `per_s` a second, and at least `least` a tick."""

    per_s: float
    least: int

    def count(self, passed_s: float) -> int:
        """Returns what may be done in a tick, `passed_s` seconds after the last one."""
        return max(self.least, math.ceil(self.per_s * min(MOST_S, passed_s)))


class Walk:
    """A walk over all instances of one moment. Those that come later are visited on the next walk; those that leave are
    visited all the same."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._all: Sequence[Instance] = ()
        self._met = 0

    @property
    def under_way(self) -> bool:
        """Whether some are still to be visited."""
        return self._met < len(self._all)

    def begin(self, everybody: Sequence[Instance]) -> None:
        """Starts with the first of these. The sequence must not change."""
        self._all, self._met = everybody, 0

    def next(self, passed_s: float) -> Sequence[Instance]:
        """Returns the instances that this tick may visit, `passed_s` seconds after the last one. A finished walk keeps
        no reference."""
        first, self._met = self._met, self._met + self._pace.count(passed_s)
        some = self._all[first : self._met]
        if not self.under_way:
            self._all, self._met = (), 0
        return some
