"""How far predictions are to be trusted when work is refused by them. Pure.

A prediction is a best guess: under overload, where queues are held just below what the SLO allows, half of all requests
would miss it. So admission judges by what is not exceeded in a given share of cases: a quantile of measured / predicted
over the last requests, never less than 1. Where the room that is left unused costs throughput (a batch could have more
rows; a queue need not be longer) it is that quantile which leaves most: share within the SLO / factor is greatest. It
covers what models leave out, too: a step's mean time is predicted, the mean of the slowest tenth is what a request is
held to; other processes take their share of the cores.

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
    """Of one kind of prediction at one instance."""

    def __init__(self, confidence: float, *, costs: bool = False) -> None:
        """`confidence`: of all requests that are taken, the share that shall be within their SLO; 0: predictions are
        taken at their word. `costs`: it costs throughput."""
        self._confidence, self._costs = confidence, costs
        self._ratios: deque[float] = deque(maxlen=KEPT)
        self.factor = 1.0  # of a prediction, by which work is refused

    def add(self, predicted_s: float, measured_s: float) -> None:
        """One of each; nonsense (not positive, not finite) is ignored."""
        if not self._confidence or not 0 < predicted_s < math.inf or not 0 < measured_s < math.inf:
            return
        self._ratios.append(measured_s / predicted_s)
        if len(self._ratios) >= ENOUGH:
            ranked = sorted(self._ratios)
            most = min(len(ranked) - 1, int(self._confidence * len(ranked)))
            if self._costs:
                most = max(range(most + 1), key=lambda n: (n + 1) / max(1.0, ranked[n]))
            self.factor = min(MOST, max(1.0, ranked[most]))

    def of(self, seconds: float, others: float) -> float:
        """What is judged where `seconds` are predicted. `others`: 0: alone, 1 and above: among others."""
        return seconds * (1 + (self.factor - 1) * min(1.0, max(0.0, others)))


class Margins:
    """Of one instance: of what its prefill foretells, and its decode."""

    def __init__(self, confidence: float = 0.0) -> None:
        self.ttft, self.tbt = Margin(confidence), Margin(confidence, costs=True)
