"""When the stages of a pipeline computed the chunks of prompts, and when they stood still. Pure.

A stage stands still while the pipeline has steps and the stage has nothing to compute yet (the first chunk is still on
its way to it, or the stage before it is slower), or nothing more (the last chunk is at later stages): the bubble. Time
in which the instance has no step at all is no bubble.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvmesh.services.prefill.planner import Chunk

MOST_TIMES = 512  # chunks times stages of one prompt that are kept one by one; later chunks are only summed


class StageTime(NamedTuple):
    """Says when a stage computed a step, and how long it had stood still before; and afterwards, where no further step
    followed."""

    from_ns: int
    until_ns: int
    idle_ns: int
    after_ns: int = 0

    @property
    def busy_ns(self) -> int:
        return self.until_ns - self.from_ns


class PipelineTimes:
    """Adds up how long the stages of one instance computed and stood still. `stages` says of each rank that speaks for
    a stage which one that is; none: there is one stage, and nothing is counted."""

    def __init__(self, stages: Mapping[int, int]) -> None:
        self.stages = stages
        count = max(stages.values(), default=-1) + 1
        self.busy_ns, self.idle_ns = [0] * count, [0] * count
        self._until = [0] * count  # when each stage ended its last step
        self._since = 0  # when the first of the steps began that have followed one another since

    def step_ended(self, told: Mapping[int, tuple[int, int]], more: bool) -> tuple[StageTime, ...]:
        """Takes from when to when each stage computed a step; `more` says that further steps are at the ranks. Returns
        the times by stage; none where not every stage has told its own."""
        if not self.busy_ns or len(told) < len(self.busy_ns):
            return ()
        self._since = self._since or told[0][0]
        last_ns = max(until for _, until in told.values())
        found = []
        for stage in range(len(self.busy_ns)):
            begun, until = told[stage]
            idle, after = max(0, begun - max(self._until[stage], self._since)), 0 if more else last_ns - until
            found.append(StageTime(begun, until, idle, after))
            self.busy_ns[stage] += until - begun
            self.idle_ns[stage] += idle + after
            self._until[stage] = until
        if not more:
            self._since = 0
        return tuple(found)


class ChunkTimes(NamedTuple):
    """The times of one chunk of a prompt by stage. Others' chunks may have been computed in the same step."""

    start: int
    end: int
    stages: tuple[StageTime, ...]


@dataclass(slots=True)
class PromptTimes:
    """Keeps when the chunks of one prompt were computed: the first ones one by one, all of them summed by stage."""

    chunks: list[ChunkTimes] = field(default_factory=list)
    left_out: int = 0  # chunks behind those
    first_ns: list[int] = field(default_factory=list)  # when each stage began the first chunk
    last_ns: list[int] = field(default_factory=list)  # and ended the last one
    busy_ns: list[int] = field(default_factory=list)
    idle_ns: list[int] = field(default_factory=list)

    def add(self, chunk: Chunk, times: Sequence[StageTime]) -> None:
        """Adds the times of the next chunk; none of them: it was computed by one stage."""
        if not times:
            return
        if not self.busy_ns:
            self.busy_ns, self.idle_ns = [0] * len(times), [0] * len(times)
            self.first_ns = [time.from_ns for time in times]
        self.last_ns = [time.until_ns for time in times]
        for stage, time in enumerate(times):
            self.busy_ns[stage] += time.busy_ns
            self.idle_ns[stage] += time.idle_ns + time.after_ns
        if (len(self.chunks) + 1) * len(times) <= MOST_TIMES:
            self.chunks.append(ChunkTimes(chunk.start, chunk.end, tuple(times)))
        else:
            self.left_out += 1

    @property
    def bubble(self) -> float:
        """The share of the stages' time in which they stood still."""
        busy, idle = sum(self.busy_ns), sum(self.idle_ns)
        return idle / max(1, busy + idle)
