"""Who joins one decode instance's batch and who leaves it when: the forecast of its load. Pure.

What the instance tells of now is the truth (rows, context); what was placed there and is on its way, or will have left,
is added and taken away by the times that its placement predicted. Requests that should have left already, and those
of which nothing is known, leave at the usual rate: after `residence_s` one in e of them is still there (all of them,
while nobody has been seen to leave: inf).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True)
class DecodeWork:
    """One placement as the decode instance will meet it. Times in seconds on the brain's clock."""

    request_id: str
    prompt_tokens: int
    blocks: int
    placed_at: float
    expires_at: float
    joins_at: float = -math.inf  # predicted: its KV and its first token are there
    leaves_at: float = math.inf  # predicted: its last token is made
    tbt_slo_s: float = math.inf
    yields: bool = False  # of the batch lane: nobody is refused for it
    answer_tokens: float = 0.0  # predicted


class BatchAt(NamedTuple):
    """Of a batch at some moment. `context_tokens`: read by one step."""

    requests: float
    context_tokens: float


NO_ROWS = BatchAt(0.0, 0.0)
_Entry = tuple[float, int, DecodeWork]


class BatchForecast:
    """Placements at one decode instance, by when they join and leave."""

    def __init__(self) -> None:
        self._joins: list[_Entry] = []
        self._leaves: list[_Entry] = []
        self._numbers: dict[str, int] = {}  # entries of one moment are told apart by arrival
        self._yielding: dict[str, DecodeWork] = {}
        self._slos: dict[float, int] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def tightest_slo_s(self) -> float:
        """The least TBT SLO of all that are there or coming; inf when there is none."""
        return min(self._slos, default=math.inf)

    def add(self, work: DecodeWork) -> None:
        """It is not there yet."""
        number = self._numbers[work.request_id] = self._arrivals
        self._arrivals += 1
        insort(self._joins, (work.joins_at, number, work))
        insort(self._leaves, (work.leaves_at, number, work))
        if work.yields:
            self._yielding[work.request_id] = work
        else:
            self._slos[work.tbt_slo_s] = self._slos.get(work.tbt_slo_s, 0) + 1

    def drop(self, work: DecodeWork) -> None:
        """It is there."""
        number = self._numbers.pop(work.request_id)
        for entries, at in ((self._joins, work.joins_at), (self._leaves, work.leaves_at)):
            index = bisect_left(entries, (at, number))
            del entries[index]
        if self._yielding.pop(work.request_id, None) is None:
            self._slos[work.tbt_slo_s] -= 1
            if not self._slos[work.tbt_slo_s]:
                del self._slos[work.tbt_slo_s]

    def forecast(
        self, now: float, at: float, until: float, present: BatchAt, running: int, residence_s: float
    ) -> BatchAt:
        """The most rows, and the most context, at any moment from `at` to `until`. `present`: all that are there or on
        their way now, `running` of them in the batch, as the instance tells."""
        coming = self._joins[bisect_right(self._joins, (at, math.inf)) :]
        # Predictions are late when the instance says that more have joined.
        coming = coming[max(0, len(coming) - max(0, round(present.requests) - running)) :]
        overdue = bisect_right(self._leaves, (now, math.inf))
        left = self._leaves[overdue : bisect_right(self._leaves, (at, math.inf))]
        unknown = overdue + max(0.0, present.requests - len(self))
        gone = unknown * (1 - math.exp(-max(0.0, at - now) / max(residence_s, 1e-9)))
        mean = present.context_tokens / present.requests if present.requests else 0.0
        requests = present.requests - len(coming) - len(left) - gone
        tokens = present.context_tokens - _tokens(coming) - _tokens(left) - gone * mean
        most = BatchAt(max(0.0, requests), max(0.0, tokens))
        leaves = self._leaves[overdue + len(left) : bisect_right(self._leaves, (until, math.inf))]
        before = 0
        for joins_at, _, work in coming:
            if joins_at > until:
                break
            after = bisect_right(leaves, (joins_at, math.inf))
            requests += 1 - (after - before)
            tokens += work.prompt_tokens - _tokens(leaves[before:after])
            before = after
            most = BatchAt(max(most.requests, requests), max(most.context_tokens, tokens))
        return most

    def yielding(self, now: float, at: float) -> BatchAt:
        """Of those, what yields: it is there at `at`, or should have left by now and may have not."""
        there = [w for w in self._yielding.values() if w.joins_at <= at and (w.leaves_at > at or w.leaves_at <= now)]
        return BatchAt(len(there), sum(w.prompt_tokens for w in there))

    def longest_s(self, now: float) -> float:
        """Seconds until the last of those known should have left."""
        return max(0.0, self._leaves[-1][0] - now) if self._leaves and self._leaves[-1][0] < math.inf else 0.0


def _tokens(entries: list[_Entry]) -> int:
    return sum(work.prompt_tokens for _, _, work in entries)
