"""Ways to do one thing, timed in turns, and what their times say of each other.

Ratios are taken turn by turn: what the machine does beside the ways falls on all of one turn alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

CONFIDENCE = 0.95


def take_turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each way, round by round, after each has run once that is not timed."""
    for work in ways.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            began = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def over(above: Sequence[float], below: Sequence[float]) -> float:
    """Returns the median of the ratios, round by round, of the rounds that both have."""
    return statistics.median(ratios(above, below))


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=False)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns two of the values between which the median of what they were drawn from lies in at least 95 of 100 cases,
    whatever the distribution (by the sign test). Of fewer than six values: least and greatest, which promise less."""
    ordered, count = sorted(values), len(values)
    cut, outside = 0, 0.0  # the chance that the median lies below ordered[cut]
    for index in range((count + 1) // 2):
        outside += math.comb(count, index) / 2**count
        if 2 * outside > 1 - CONFIDENCE:
            break
        cut = index
    return ordered[cut], ordered[-1 - cut]


def in_words(seconds: Mapping[str, Sequence[float]], base: str) -> str:
    """Returns the base's median in milliseconds, and how many times as long each other way takes."""
    words = [f"{base} {1e3 * statistics.median(seconds[base]):.2f} ms"]
    words += [f"{name} x{over(taken, seconds[base]):.2f}" for name, taken in seconds.items() if name != base]
    return ", ".join(words)
