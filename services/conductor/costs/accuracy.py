"""What predictions were worth: each is kept beside what happened, before the models learn of it. Pure.

The last WINDOW of each kind count. Relative to the prediction: an error of 1 is a time twice as long as foretold.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

WINDOW = 1024
LEAST = 1e-9  # nothing is predicted to take less


class What(Enum):
    """Kinds of predictions."""

    PREFILL = "prefill"  # a prompt, from its first step to the end of its last one
    DECODE_STEP = "decode_step"
    PULL = "pull"  # blocks from other nodes' memory
    TRANSFER = "transfer"  # KV from prefill to decode, first byte to last
    TIER_LOAD = "tier_load"  # blocks out of a lower tier
    TTFT = "ttft"  # of placements, seen from decode
    TBT = "tbt"
    OUTPUT_TOKENS = "output_tokens"


@dataclass(frozen=True)
class PredictionError:
    """Of one kind."""

    what: What
    samples: int
    bias: float  # median of (measured - predicted) / predicted
    p50: float  # of |measured - predicted| / predicted
    p90: float
    p99: float


class Accuracy:
    """Of one conductor, since its start."""

    def __init__(self, window: int = WINDOW) -> None:
        self._errors: dict[What, deque[float]] = {what: deque(maxlen=window) for what in What}

    def add(self, what: What, predicted: float, measured: float) -> None:
        """One of each; where there was no prediction, or nothing was measured, nothing is learnt."""
        if LEAST <= predicted < math.inf and 0 < measured < math.inf:
            self._errors[what].append((measured - predicted) / predicted)

    def errors(self) -> Sequence[PredictionError]:
        """Of all kinds that were measured."""
        return [_summary(what, errors) for what, errors in self._errors.items() if errors]


def _summary(what: What, errors: deque[float]) -> PredictionError:
    sizes = sorted(map(abs, errors))
    p50, p90, p99 = (_percentile(sizes, share) for share in (0.5, 0.9, 0.99))
    return PredictionError(what, len(errors), _percentile(sorted(errors), 0.5), p50, p90, p99)


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Between two of them in proportion."""
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
