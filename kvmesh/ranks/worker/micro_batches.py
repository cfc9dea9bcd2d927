"""The rows of a rank, cut into as many micro-batches as the pipeline has stages, which take turns.

While micro-batch j is at the last stage, j + 1 is at the stage before it: each stage has something to compute, and the
tokens of a micro-batch are back at the first stage when its turn comes again. A rank that is no stage has one.

The last stage knows which rows have ended before the others do. So that all ranks still put a row into the same
micro-batch and give the same one its turn, whatever is decided follows from the rows as they are once a micro-batch is
*settled*: its last step's tokens are applied. A micro-batch is settled before its next step and before rows join or
leave it or go on after a stall, at every rank at the same place among steps and commands.
"""

from __future__ import annotations

from collections.abc import Callable

from kvmesh.ranks.worker.rows import RunningRows


class MicroBatches:
    """Has `count` micro-batches, each of the rows that `make` makes."""

    def __init__(self, count: int, make: Callable[[], RunningRows]) -> None:
        self.all = [make() for _ in range(count)]
        self._handles: list[set[int]] = [set() for _ in self.all]  # of the rows as they were when settled
        self._late: list[Callable[[], None] | None] = [None] * count
        self._next = 0
        self._ends = [0] * count  # when the last step of each ended, in ns, if its rows go on; 0 otherwise

    def __len__(self) -> int:
        """The number of rows, the same at all ranks."""
        return sum(map(len, self._handles)) if len(self.all) > 1 else len(self.all[0])

    @property
    def has_work(self) -> bool:
        """Whether some row can go on, or has gone on and nobody here knows with which token."""
        return any(rows.live for rows in self.all) or any(late is not None for late in self._late)

    def for_join(self, handle: int) -> RunningRows:
        """Returns the rows that a new one with this handle joins."""
        at = min(range(len(self.all)), key=lambda at: len(self._handles[at]))
        if len(self.all) > 1:
            self._settle(at)
            self._handles[at].add(handle)
        return self.all[at]

    def of(self, handle: int, leaves: bool = False) -> RunningRows:
        """Returns the rows that the one with this handle is among, if it is there: settled, where it leaves or has
        stalled."""
        if len(self.all) == 1:
            return self.all[0]
        at = next((at for at, handles in enumerate(self._handles) if handle in handles), 0)
        if leaves or self.all[at].stalled(handle):
            self._settle(at)
        return self.all[at]

    def take_turn(self) -> RunningRows:
        """Returns the rows of the next step: those of the first micro-batch in turn that has rows which can go on."""
        if len(self.all) == 1:
            return self.all[0]
        for _ in self.all:
            at, self._next = self._next, (self._next + 1) % len(self.all)
            self._settle(at)
            if self.all[at].live:
                return self.all[at]
        return self.all[0]

    def postpone(self, rows: RunningRows, late: Callable[[], None]) -> None:
        """Has `late` called when the micro-batch of `rows` is settled: it waits for tokens and applies them."""
        self._late[self.all.index(rows)] = late

    def step_ended(self, rows: RunningRows, start_ns: int, end_ns: int) -> tuple[int, int]:
        """Notes a step of this micro-batch, whose tokens are applied. Returns when the one before it ended, if its rows
        have waited since, or when this one began; and how many rows go on in the other micro-batches. Of the one that
        there is without a pipeline it returns 0 and 0."""
        if len(self.all) == 1:
            return 0, 0
        at = self.all.index(rows)
        before, self._ends[at] = self._ends[at] or start_ns, end_ns if rows.live else 0
        return before, sum(other.live for other in self.all) - rows.live

    def _settle(self, at: int) -> None:
        late, self._late[at] = self._late[at], None
        if late is not None:
            late()
        rows, handles = self.all[at], self._handles[at]
        if len(rows) != len(handles):
            handles.intersection_update([handle for handle in handles if handle in rows])
