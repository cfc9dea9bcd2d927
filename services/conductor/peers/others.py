"""An estimate of what other conductors have placed since the last reports. Pure.

Conductors that do not exchange placements see the same queues between two heartbeats, and all choose the shortest one.
So each conductor expects the others' work where it would go.

How much: instances report the prompts that they have computed, and some of these were placed by other conductors.
Where: it is spread over the shortest queues up to one level, as water would be. Queues below that level then count as
equal, ties are broken by chance, and all conductors together fill them evenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvmesh.services.conductor.loads.queues import PrefillQueue

FADE_S = 5.0  # of the rate at which others place
PERIOD_S, PER_QUEUE_S = 0.02, 2e-5  # how often it is spread again at most: that costs time for each queue
LITTLE_S = 1e-3  # of work in all: not worth it
# Predicted seconds of work a second that a queue is thought to get from others: it computes one, and what several
# prompts share in a step counts for each of them.
MAX_RATE = 4.0


class OtherConductors:
    """The others' part of one model's prompts."""

    def __init__(self, now: float) -> None:
        self._seconds = 0.0  # of work, fading
        self._as_of = now
        self._due = now

    @property
    def rate(self) -> float:
        """The predicted seconds of work that they place in one second."""
        return self._seconds / FADE_S

    def computed(self, seconds: float, now: float) -> None:
        """Notes that an instance has computed a prompt of theirs, of so many predicted seconds."""
        self._fade(now)
        self._seconds += seconds

    def _fade(self, now: float) -> None:
        self._seconds *= math.exp(-max(0.0, now - self._as_of) / FADE_S)
        self._as_of = now

    def due(self, now: float) -> bool:
        """Says whether `spread` would do something."""
        if now < self._due or not self._seconds:
            return False
        self._fade(now)
        self._seconds = self._seconds if self._seconds > LITTLE_S else 0.0
        return self._seconds > 0

    def spread(self, queues: Sequence[PrefillQueue], now: float) -> list[int]:
        """Adds the work that others have placed since the queues' reports where it would go. Returns the indices of the
        queues that have changed."""
        self._fade(now)
        self._seconds = min(self._seconds, MAX_RATE * FADE_S * len(queues))
        self._due = now + max(PERIOD_S, PER_QUEUE_S * len(queues))
        told = [queue.told_s(now) for queue in queues]
        ages = sum(min(queue.silent_s(now), FADE_S) for queue in queues) / max(1, len(queues))
        level = water(told, self.rate * ages)
        return [at for at, queue in enumerate(queues) if queue.expect(max(0.0, level - told[at]), now)]


def water(heights: Iterable[float], volume: float) -> float:
    """Returns the level up to which `volume` fills vessels of width 1 whose floors are at these heights."""
    sum_s, level = 0.0, 0.0
    for count, height in enumerate(sorted(heights)):
        if count and (volume + sum_s) / count <= height:
            break
        sum_s += height
        level = (volume + sum_s) / (count + 1)
    return level
