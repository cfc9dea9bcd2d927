"""Predicts which prompt an instance whose queue goes by size computes now. Pure.

What has begun is not overtaken: a short prompt waits for the step that runs, whatever its size. Between two heartbeats
the conductor follows the instance's own rule (services/prefill/planner.py): when a step ends, the prompt of the least
rank is next; of a long prompt a step is one chunk. Prompts that are packed into one step are taken one after the other
here, which is as long.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Protocol

UNKNOWN_SHARE = 0.5  # the part of a step that is left, on the average, when a report finds it running


class QueuedWork(Protocol):
    """A placement as the forecast needs it. `seconds` is what computing it takes alone, in `chunks` steps."""

    @property
    def request_id(self) -> str: ...

    @property
    def seconds(self) -> float: ...

    @property
    def chunks(self) -> int: ...


class TurnForecast:
    """Follows the queue of one instance from report to report. `now` must not decrease from call to call."""

    def __init__(self, works: Mapping[str, QueuedWork], now: float) -> None:
        """`works` maps requests to the placements that no report has called finished; its owner changes it."""
        self._works = works
        self._speedup = 1.0  # predicted seconds of work that are done in one second, as of the last report
        # A heap of (rank, arrival, work). Works that are not in `_works` any more are skipped when they come up.
        self._waiting: list[tuple[float, int, QueuedWork]] = []
        self._arrivals = 0
        self._steps: dict[str, int] = {}  # steps that each work has had, by prediction
        self._computed: list[tuple[float, QueuedWork]] = []  # (rank, work): computed by prediction, by no report yet
        self._begun: tuple[float, QueuedWork] | None = None
        self._until = now  # when the step of `_begun` ends, or the last one ended

    def add(self, work: QueuedWork, rank: float, now: float) -> None:
        """Adds a placement that came now; one of the same request is forgotten."""
        self.advance(now)
        self._steps.pop(work.request_id, None)
        self._push(rank, work)
        self.advance(now)

    def advance(self, now: float) -> tuple[QueuedWork | None, float]:
        """Returns the work whose step runs at `now` (None: nothing is there) and the seconds until that step ends.
        Whoever removes a work calls it before and after: the forecast must not depend on who asked in between."""
        if self._begun is not None and self._works.get(self._begun[1].request_id) is not self._begun[1]:
            self._begun, self._until = None, now
        while self._begun is None or self._until <= now:
            if self._begun is not None:
                self._end_step(*self._begun)
            self._begun = self._least()
            if self._begun is None:
                self._until = now
                return None, 0.0
            self._until += self._step_s(self._begun[1])
        return self._begun[1], self._until - now

    def correct(self, speedup: float, now: float) -> None:
        """Corrects the forecast by a report: what it calls finished is out of `works`, and what is still there is not
        computed yet. `speedup` holds for steps that begin from now on."""
        self.advance(now)
        self._speedup = speedup
        late = [one for one in self._computed if self._works.get(one[1].request_id) is one[1]]
        self._computed.clear()
        self._steps = {name: steps for name, steps in self._steps.items() if name in self._works}
        if late:
            if self._begun is not None:
                self._push(*self._begun)
            self._steps |= {work.request_id: work.chunks - 1 for _, work in late}
            self._begun, *others = late
            for rank, work in others:
                self._push(rank, work)
            self._until = now + UNKNOWN_SHARE * self._step_s(self._begun[1])
        if len(self._waiting) > 2 * len(self._works) + 64:
            self._waiting = [one for one in self._waiting if self._works.get(one[2].request_id) is one[2]]
            heapq.heapify(self._waiting)

    def _end_step(self, rank: float, work: QueuedWork) -> None:
        taken = self._steps[work.request_id] = self._steps.get(work.request_id, 0) + 1
        if taken < work.chunks:
            self._push(rank, work)
        else:
            self._computed.append((rank, work))

    def _push(self, rank: float, work: QueuedWork) -> None:
        self._arrivals += 1
        heapq.heappush(self._waiting, (rank, self._arrivals, work))

    def _least(self) -> tuple[float, QueuedWork] | None:
        while self._waiting:
            rank, _, work = heapq.heappop(self._waiting)
            if self._works.get(work.request_id) is work:
                return rank, work
        return None

    def _step_s(self, work: QueuedWork) -> float:
        return work.seconds / work.chunks / self._speedup
