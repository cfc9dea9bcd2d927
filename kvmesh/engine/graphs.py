"""Decode steps as CUDA graphs: the launches of a whole step, captured once for each batch size, replayed as one.

A step of n rows is replayed by the graph of the smallest bucket that holds n; rows beyond n stand for nobody (they
write no KV and attend to nothing). The graphs read their inputs from tables of the backend and leave logits in one
buffer.
Sampling is not in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvmesh.engine.attention.backend import AttentionBackend, StepPlan
from kvmesh.engine.attention.grouped import GroupedAttention
from kvmesh.engine.batch import Integers
from kvmesh.engine.capture import Capture, Launches, bucket_for, capture_sizes
from kvmesh.engine.parallel import Group
from kvmesh.errors import InternalError

MAX_ROWS = 256  # larger batches are computed launch by launch: the GPU has enough to do

Compute = Callable[[torch.Tensor, StepPlan], torch.Tensor]


def buckets(max_rows: int) -> tuple[int, ...]:
    """Returns the row counts that graphs are captured for, ascending: 1, 2, 4, 8, then in steps of 8, from 64 on of 32,
    and `max_rows`. A step pays for its bucket's rows: powers of two would double what 129 rows cost."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, max_rows, 32), max_rows}
    return tuple(sorted(size for size in sizes if size <= max_rows))


class DecodeGraphs:
    """Captures decode steps and replays them. `compute(token_ids [n], plan)` returns logits `[n, vocab]` by launches
    alone: no wait, no look at values. `width` is the pages of the longest request; `max_rows` are the rows that may
    run, of which at most MAX_ROWS are captured. The constructor captures, which takes seconds. `sizes` are the row
    counts captured, `failed` is why some were not."""

    def __init__(
        self,
        compute: Compute,
        backend: AttentionBackend | GroupedAttention,
        width: int,
        capture: Capture,
        group: Group,
        max_rows: int = MAX_ROWS,
    ) -> None:
        max_rows = min(max_rows, MAX_ROWS)
        self._compute = compute
        self._backend = backend
        self._tables = backend.step_tables(max_rows, width)
        self._logits = torch.empty(0)
        wanted = buckets(max_rows)
        if wanted[-1] != max_rows:
            raise InternalError(f"graphs of {list(wanted)} rows do not hold the {max_rows} rows that may run")
        self._graphs, self.failed = capture_sizes("the decode step of {} rows", wanted, self._works, capture, group)
        self.sizes = tuple(sorted(self._graphs))

    def _works(self, rows: int) -> list[Launches]:
        self._tables.fill((), (), padded_rows=rows)
        plan = self._backend.replayed(self._tables, rows)
        token_ids = self._tables.token_ids[:rows]

        def work() -> None:
            logits = self._compute(token_ids, plan)
            if rows > len(self._logits):  # while the largest is warmed up
                self._logits = logits.new_empty(rows, logits.shape[1])
            self._logits[:rows].copy_(logits)

        return [work]

    def holds(self, pages: Sequence[Any]) -> bool:
        """Returns whether rows with these pages can be replayed."""
        return self._tables.holds(pages)

    def replay_for_nobody(self, size: int) -> None:
        """Replays the graph of this size with no row at all: what other ranks exchange in it waits for this one."""
        self._tables.fill((), (), padded_rows=size)
        [replay] = self._graphs[size]
        replay()

    def logits(
        self,
        token_ids: Integers,
        pages: Sequence[Any],
        positions: Integers,
        on_device: torch.Tensor | None = None,
        size: int | None = None,
    ) -> torch.Tensor | None:
        """Returns `[rows, vocab]` of one decode step, valid until the next; None when no graph is large enough. `pages`
        are as the backend's plans take them. Ids that are `on_device` stand for `token_ids`. `size` names the graph
        where other ranks replay the same, and 0 none; None is the smallest one that holds the rows. Raises as
        `DecodeTables` does."""
        size = bucket_for(len(token_ids), self.sizes) if size is None else size
        if not size or not self.holds(pages):
            return None
        self._tables.fill(pages, positions, token_ids, size)
        if on_device is not None:
            self._tables.token_ids[: len(on_device)].copy_(on_device)
        [replay] = self._graphs[size]
        replay()
        return self._logits[: len(token_ids)]
