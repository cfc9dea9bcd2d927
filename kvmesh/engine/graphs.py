"""Decode steps as CUDA graphs: the launches of a whole step, captured once for each batch size, replayed as one.

A step of n rows is replayed by the graph of the smallest bucket that holds n; rows beyond n stand for nobody (they
write no KV and attend to nothing). The graphs read their inputs from tables of the backend and leave logits in one
buffer.
Sampling is not in them.

Where drafts are verified there is a second set of graphs, of steps in which requests have several rows: by the kernels
that read K and V once for all rows of a request. Rows follow each other densely, whatever each request has; the step is
padded to its bucket, and so are a request's rows within a program (`kernels.decode`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvmesh.engine.attention.backend import AttentionBackend, StepPlan, StepTables
from kvmesh.engine.attention.grouped import GroupedAttention
from kvmesh.engine.batch import Integers
from kvmesh.engine.capture import Capture, Launches, bucket_for, capture_sizes
from kvmesh.engine.parallel import Group
from kvmesh.errors import InternalError

MAX_ROWS = 256  # larger batches are computed launch by launch: the GPU has enough to do

Compute = Callable[[torch.Tensor, StepPlan], tuple[torch.Tensor, torch.Tensor]]


def buckets(max_rows: int) -> tuple[int, ...]:
    """Returns the row counts that graphs are captured for, ascending: 1, 2, 4, 8, then in steps of 8, from 64 on of 32,
    and `max_rows`. A step pays for its bucket's rows: powers of two would double what 129 rows cost."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, max_rows, 32), max_rows}
    return tuple(sorted(size for size in sizes if size <= max_rows))


def drafted_buckets(max_requests: int, max_drafts: int) -> tuple[int, ...]:
    """Returns the row counts that graphs of steps with drafts of up to so many tokens are captured for; none without
    drafts."""
    rows = min(MAX_ROWS, max_requests * (1 + max_drafts))
    return tuple(size for size in buckets(rows) if size > 1) if max_drafts else ()


class ReplayedSteps(NamedTuple):
    """Holds the graphs of one kind of decode steps by their rows, ascending, and the tables that they read."""

    tables: StepTables
    graphs: Mapping[int, Sequence[Launches]]
    sizes: tuple[int, ...]


class DecodeGraphs:
    """Captures decode steps and replays them. `compute(token_ids [n], plan)` returns what the last layer made, `[n,
    width]`, and logits `[n, vocab]`, by launches alone: no wait, no look at values. `width` is the pages of the longest
    request; `max_rows` are the requests that may run, of which at most MAX_ROWS are captured, and `max_drafts` the
    tokens of each one's draft. The constructor captures, which takes seconds. `sizes` are the row counts captured,
    `drafted_sizes` those of steps with drafts, `failed` is why some were not."""

    def __init__(
        self,
        compute: Compute,
        backend: AttentionBackend | GroupedAttention,
        width: int,
        capture: Capture,
        group: Group,
        max_rows: int = MAX_ROWS,
        max_drafts: int = 0,
    ) -> None:
        max_rows = min(max_rows, MAX_ROWS)
        self._compute, self._backend = compute, backend
        self._logits, self._hidden = torch.empty(0), torch.empty(0)
        wanted, drafted = buckets(max_rows), drafted_buckets(max_rows, max_drafts)
        if wanted[-1] != max_rows:
            raise InternalError(f"graphs of {list(wanted)} rows do not hold the {max_rows} rows that may run")
        # The larger ones first: they make the buffers that the others leave their answers in.
        self._drafted, why = None, ""
        if drafted:
            tables = backend.step_tables(drafted[-1], width, 1 + max_drafts)
            self._drafted, why = self._captured("the step of {} rows with drafts", drafted, tables, capture, group)
        tables = backend.step_tables(max_rows, width)
        self._plain, self.failed = self._captured("the decode step of {} rows", wanted, tables, capture, group)
        self.failed = self.failed or why
        self.sizes = self._plain.sizes
        self.drafted_sizes = () if self._drafted is None else self._drafted.sizes

    def _captured(
        self, what: str, wanted: Sequence[int], tables: StepTables, capture: Capture, group: Group
    ) -> tuple[ReplayedSteps, str]:
        def works(rows: int) -> list[Launches]:
            tables.fill((), (), padded_rows=rows)
            plan = self._backend.replayed(tables, rows)
            token_ids = tables.token_ids[:rows]

            def work() -> None:
                hidden, logits = self._compute(token_ids, plan)
                if rows > len(self._logits):  # while the largest is warmed up
                    self._logits = logits.new_empty(rows, logits.shape[1])
                    self._hidden = hidden.new_empty(rows, hidden.shape[1])
                self._logits[:rows].copy_(logits)
                self._hidden[:rows].copy_(hidden)

            return [work]

        graphs, failed = capture_sizes(what, wanted, works, capture, group)
        return ReplayedSteps(tables, graphs, tuple(sorted(graphs))), failed

    def holds(self, pages: Sequence[Any]) -> bool:
        """Returns whether rows with these pages can be replayed."""
        return self._plain.tables.holds(pages)

    def replay_for_nobody(self, size: int) -> None:
        """Replays the graph of this size with no row at all: what other ranks exchange in it waits for this one."""
        self._plain.tables.fill((), (), padded_rows=size)
        [replay] = self._plain.graphs[size]
        replay()

    def hidden(self, rows: int) -> torch.Tensor:
        """Returns what the last layer made of so many rows of the step that was replayed last, valid until the next."""
        return self._hidden[:rows]

    def logits(
        self,
        token_ids: Integers,
        pages: Sequence[Any],
        positions: Integers,
        on_device: torch.Tensor | None = None,
        size: int | None = None,
        lengths: Integers | None = None,
    ) -> torch.Tensor | None:
        """Returns `[rows, vocab]` of one decode step, valid until the next; None when no graph is large enough. `pages`
        are as the backend's plans take them. Ids that are `on_device` stand for `token_ids`. `size` names the graph
        where other ranks replay the same, and 0 none; None is the smallest one that holds the rows. `lengths` are the
        rows of each request, as of `DecodeBatch`. Raises as `DecodeTables` does."""
        steps = self._plain
        if self._drafted is not None and lengths is not None and len(lengths) < len(token_ids):
            held = bucket_for(len(token_ids), self._drafted.sizes) if size is None else size
            steps = self._drafted if held in self._drafted.graphs else steps
        size = bucket_for(len(token_ids), steps.sizes) if size is None else size
        if not size or not self.holds(pages):
            return None
        steps.tables.fill(pages, positions, token_ids, size, lengths)
        if on_device is not None:
            steps.tables.token_ids[: len(on_device)].copy_(on_device)
        [replay] = steps.graphs[size]
        replay()
        return self._logits[: len(token_ids)]
