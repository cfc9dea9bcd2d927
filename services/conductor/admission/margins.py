"""How far predictions are to be trusted when work is refused by them. Pure.

A prediction is a best guess: under overload, where queues are held just below what the SLO allows, half of all requests
would miss it. So admission judges by a multiple of it, which follows from measured / predicted of the last requests.
With the factor m, work is taken up to SLO / m: the room that is used falls with m, the share F(m) of requests that keep
the SLO grows. m is the one that leaves most, the greatest F(m) / m, never less than 1. It covers what models leave
out, too: a step's mean time is predicted, the mean of the slowest tenth is what a request is held to; other processes
take their share of the cores.

Requests count in F by what was predicted for them: a moment's delay is nothing to one that is near its SLO, and a
multiple of the prediction for one that is far from it.

Only requests that met others teach it (a queue, rows beside them), and only those are judged by it: who would be alone
is never refused for others' lateness, so that there is always something to learn from.
"""

from __future__ import annotations

import math
from collections import deque

KEPT = 64  # last requests
ENOUGH = 8
MOST = 8.0  # times the prediction: what is worse is no matter of trust


class Margin:
    """The margin of one kind of prediction at one instance."""

    def __init__(self, confidence: float) -> None:
        """`confidence` is the share of requests within their SLO beyond which no room is given up; 0 takes predictions
        at their word."""
        self._confidence = confidence
        self._seen: deque[tuple[float, float]] = deque(maxlen=KEPT)  # measured / predicted, predicted
        self.factor = 1.0  # of a prediction, by which work is refused

    def add(self, predicted_s: float, measured_s: float) -> None:
        """Adds one prediction with its measurement; values that are not positive and finite are ignored."""
        if not self._confidence or not 0 < predicted_s < math.inf or not 0 < measured_s < math.inf:
            return
        self._seen.append((measured_s / predicted_s, predicted_s))
        if len(self._seen) >= ENOUGH:
            self.factor = self._best()

    def _best(self) -> float:
        total = sum(weight for _, weight in self._seen)
        share = most = 0.0
        best = 1.0
        for ratio, weight in sorted(self._seen):
            share, factor = share + weight / total, min(MOST, max(1.0, ratio))
            if share / factor > most:
                most, best = share / factor, factor
            if share >= self._confidence:
                break
        return best

    def of(self, seconds: float, others: float) -> float:
        """Returns what is judged where `seconds` are predicted. `others` is 0 for work alone on the instance, 1 and
        above among others."""
        if self.factor == 1.0:
            return seconds
        return seconds * (1 + (self.factor - 1) * min(1.0, max(0.0, others)))


class Margins:
    """The margins of one instance's TTFT and TBT predictions."""

    def __init__(self, confidence: float = 0.0) -> None:
        self.ttft, self.tbt = Margin(confidence), Margin(confidence)
