"""When two scores are equal, and who gets the request then. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

# Scores this close are equal: the models know no better. Then the fewest requests win, then chance: it spreads
# what arrives between two heartbeats, also over conductors that do not know of each other.
TIE_SHARE, TIE_FLOOR_S, TIE_CAP_S = 0.005, 20e-6, 1e-3

C = TypeVar("C")


def as_good(best_s: float) -> float:
    """Up to where a score is as good as the best one."""
    return best_s + min(TIE_CAP_S, max(TIE_FLOOR_S, TIE_SHARE * best_s))


def pick(
    choices: Sequence[C],
    score: Callable[[C], float],
    crowd: Callable[[C], int],
    rng: random.Random,
    floor: float = float("inf"),
) -> C:
    """The least score; of those that are as good the least crowd, then chance. `floor`: no one else's score is below
    it."""
    scores = list(map(score, choices))
    near = as_good(min(floor, *scores))
    tied = [c for c, found in zip(choices, scores, strict=True) if found <= near]
    if len(tied) > 1:
        fewest_there = min(map(crowd, tied))
        tied = [c for c in tied if crowd(c) == fewest_there]
    return rng.choice(tied)
