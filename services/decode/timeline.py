"""This module has the times at which a request passed each stage, in CLOCK_MONOTONIC nanoseconds (0: not yet), and the
durations between."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

# `TbtHistogram` keeps the times between the tokens of one answer in bounded memory, however long the answer is. Pure.
#
# The last of them are kept as they are; when there are more than RECENT they are counted in buckets a little wider than
# 9%, each with its sum. So the mean is exact, and the mean of the slowest tenth is off by the width of one bucket at
# most: the one in which the tenth begins. An answer of 100,000 tokens takes 16 KB.

SLOWEST = 0.1  # of the intervals of a request: their mean is its TBT (Mooncake, FAST'25)
RECENT = 1024
_PER_OCTAVE = 8
_LEAST_BITS = 10  # 1 us and below
_BUCKETS = 30 * _PER_OCTAVE  # up to 18 minutes and above

_Floats = npt.NDArray[np.float64]


class TbtHistogram:
    """Counts the times between the tokens of one answer, in ns. The path of every token only appends to `recent`;
    whoever appends calls `fold` every few hundred tokens."""

    __slots__ = ("_counts", "_sums", "recent")

    def __init__(self) -> None:
        self.recent = array("q")
        self._counts: _Floats | None = None
        self._sums: _Floats | None = None

    def fold(self) -> None:
        """Counts the recent times in buckets, once there are RECENT of them."""
        if len(self.recent) >= RECENT:
            self._count()

    def _count(self) -> None:
        found = np.maximum(np.frombuffer(self.recent, dtype=np.int64), 0).astype(np.float64)
        where = (np.log2(np.maximum(found, 1.0)) - _LEAST_BITS) * _PER_OCTAVE
        which = np.clip(where, 0, _BUCKETS - 1).astype(np.int64)
        counts = np.bincount(which, minlength=_BUCKETS).astype(np.float64)
        sums = np.bincount(which, weights=found, minlength=_BUCKETS).astype(np.float64)
        self._counts = counts if self._counts is None else self._counts + counts
        self._sums = sums if self._sums is None else self._sums + sums
        self.recent = array("q")

    def __len__(self) -> int:
        return len(self.recent) + (int(self._counts.sum()) if self._counts is not None else 0)

    @property
    def mean_ns(self) -> float:
        """The mean of all times; 0 when there is none."""
        known = float(self._sums.sum()) if self._sums is not None else 0.0
        return (known + sum(max(0, gap) for gap in self.recent)) / max(1, len(self))

    @property
    def slowest_ns(self) -> float:
        """The mean of the slowest tenth of the times, and of at least one; 0 when there is none."""
        wanted = math.ceil(len(self) * SLOWEST)
        if not wanted:
            return 0.0
        if self._counts is None:
            slowest = sorted(self.recent, reverse=True)[:wanted]
            return max(0.0, sum(slowest) / wanted)
        if self.recent:
            self._count()
        return self._slowest_counted(wanted)

    def _slowest_counted(self, wanted: int) -> float:
        assert self._counts is not None and self._sums is not None
        left, total = float(wanted), 0.0
        for count, seconds in zip(self._counts[::-1], self._sums[::-1], strict=True):
            if count:
                taken = min(left, float(count))
                total += float(seconds) * taken / float(count)
                left -= taken
            if left <= 0:
                break
        return total / wanted


@dataclass(slots=True)
class Timeline:
    """Has the times and figures of one request. Each time is taken where the thing happens: copies and steps at the
    rank, messages where they arrive."""

    received: int = 0  # Start arrived
    asked: int = 0  # StartPrefill was handed to the stream
    begin_fill: int = 0  # BeginFill arrived
    landing: int = 0  # Landing was sent
    first: int = 0  # first token arrived
    filled: int = 0  # last end mark arrived
    load_start: int = 0  # extents → pages, first time only
    load_end: int = 0
    joined: int = 0  # into the batch, first time only
    second: int = 0  # the step that made the second token ended
    ended: int = 0  # the client was told the end
    writer_lost: int = 0  # prefill, or the connection to it, failed before the request ended
    queue_us: int = 0  # this and the following as reported by prefill
    prefill_us: int = 0
    transfer_us: int = 0
    transfer_bytes: int = 0
    cached_tokens: int = 0
    pull_us: int = 0
    pull_bytes: int = 0
    pulled_tokens: int = 0
    host_tokens: int = 0
    at_decode_tokens: int = 0  # tokens of the prompt whose KV this node had when the request landed
    pulled_blocks: int = 0  # blocks that decode fetched from other nodes for this request
    preemptions: int = 0
    gaps: TbtHistogram = field(default_factory=TbtHistogram)  # between tokens

    @property
    def admit_us(self) -> int:
        return _us(self.received, self.asked)

    @property
    def reserve_us(self) -> int:
        return _us(self.begin_fill, self.landing)

    @property
    def load_us(self) -> int:
        return _us(self.load_start, self.load_end)

    @property
    def first_decode_us(self) -> int:
        return _us(self.joined, self.second)

    @property
    def exposed_transfer_us(self) -> int:
        """The time from the first token's arrival until the KV was complete here; 0 when the KV was complete first."""
        return _us(self.first, self.filled)


def _us(start: int, end: int) -> int:
    return max(0, end - start) // 1000 if start and end else 0
