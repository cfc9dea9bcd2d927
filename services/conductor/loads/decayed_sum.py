"""A sum that is forgotten bit by bit: what happened lately counts, what is long ago does not. Pure."""

from __future__ import annotations

import math


class DecayedSum:
    """A sum of which half is forgotten in every half-life."""

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._sum = 0.0
        self._at = 0.0

    def add(self, amount: float, now: float) -> None:
        """It happened now."""
        self._sum, self._at = self.at(now) + amount, now

    def at(self, now: float) -> float:
        """What is left of it."""
        return self._sum * math.pow(0.5, max(0.0, now - self._at) / self._half_life_s)
