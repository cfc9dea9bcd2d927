"""Decode steps as CUDA graphs: the launches of a whole step, captured once for each batch size, replayed as one.

A step of n rows is replayed by the graph of the smallest bucket that holds n; rows beyond n stand for nobody (they
write no KV and attend to nothing). The graphs read their inputs from one `DecodeTables` and leave logits in one buffer,
and share one pool of memory, as one is replayed at a time. Sampling is not in them.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from kvmesh.engine.attention.backend import StepPlan
from kvmesh.engine.attention.triton_backend import DecodePlan, DecodeTables, TritonAttention
from kvmesh.engine.batch import Integers
from kvmesh.errors import InternalError

log = logging.getLogger(__name__)

MAX_ROWS = 256  # larger batches are computed launch by launch: the GPU has enough to do

Compute = Callable[[torch.Tensor, StepPlan], torch.Tensor]


def buckets(max_rows: int) -> tuple[int, ...]:
    """Returns the row counts that graphs are captured for, ascending: 1, 2, 4, 8, then in steps of 8, from 64 on of 32,
    and `max_rows`. A step pays for its bucket's rows: powers of two would double what 129 rows cost."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, max_rows, 32), max_rows}
    return tuple(sorted(size for size in sizes if size <= max_rows))


def bucket_for(rows: int, sizes: Sequence[int]) -> int | None:
    """Returns the smallest of the ascending `sizes` that holds `rows`; None where none does."""
    at = bisect_left(sizes, rows)
    return sizes[at] if at < len(sizes) else None


class DecodeGraphs:
    """Captures decode steps as CUDA graphs and replays them. `compute(token_ids [n], plan)` returns logits `[n, vocab]`
    by launches alone: no wait, no look at values. `width` is the pages of the longest request; `max_rows` are the rows
    that may run, of which at most MAX_ROWS are captured (0: so many). The constructor captures, which takes seconds.
    `sizes` are the row counts captured, `failed` is why some were not: the smaller ones then are tried no more, since
    what a failed capture took of the pool is lost."""

    def __init__(self, compute: Compute, backend: TritonAttention, width: int, max_rows: int = 0) -> None:
        max_rows = min(max_rows or MAX_ROWS, MAX_ROWS)
        self._compute = compute
        self._backend = backend
        self._tables = DecodeTables(backend, max_rows, width)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._logits = torch.empty(0)
        self.failed = ""
        wanted = buckets(max_rows)
        if wanted[-1] != max_rows:
            raise InternalError(f"graphs of {list(wanted)} rows do not hold the {max_rows} rows that may run")
        begun, before = time.monotonic(), torch.cuda.memory_reserved(backend.device)
        # The largest first: the others find room in what it leaves in the pool.
        for rows in reversed(wanted):
            try:
                self._capture(rows)
            except RuntimeError as error:  # no memory, or something in the model that cannot be captured
                self.failed = (
                    f"the decode step of {rows} rows could not be captured: {str(error).partition(chr(10))[0]}"
                )
                log.warning("no CUDA graphs of %d rows or fewer: %s", rows, self.failed)
                torch.cuda.empty_cache()
                break
        self.sizes = tuple(sorted(self._graphs))
        took, used = time.monotonic() - begun, torch.cuda.memory_reserved(backend.device) - before
        log.info("CUDA graphs for %s rows: %.1f s, %d MiB", list(self.sizes), took, used >> 20)

    def _capture(self, rows: int) -> None:
        log.info("capturing the decode step of %d rows", rows)
        self._tables.fill((), (), padded_rows=rows)
        plan = DecodePlan(self._backend, self._tables, rows, replayed=True)
        # Once without a graph: kernels are compiled and libraries make their workspaces, which capture must not see.
        side = torch.cuda.Stream(self._backend.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._backend.device))
        with torch.cuda.stream(side):
            logits = self._compute(plan.token_ids, plan)
            if rows > len(self._logits):
                self._logits = logits.new_empty(rows, logits.shape[1])
        torch.cuda.current_stream(self._backend.device).wait_stream(side)
        del logits
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may use CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._logits[:rows].copy_(self._compute(plan.token_ids, plan))
        self._graphs[rows] = graph

    def logits(
        self,
        token_ids: Integers,
        pages: Sequence[Sequence[int]],
        positions: Integers,
        on_device: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Returns `[rows, vocab]` of one decode step, valid until the next; None when no graph is large enough. Ids
        that are `on_device` stand for `token_ids`. Raises as `DecodeTables.fill` does."""
        size = bucket_for(len(token_ids), self.sizes)
        if size is None or max(len(row) for row in pages) > self._tables.width:
            return None
        self._tables.fill(pages, positions, token_ids, size)
        if on_device is not None:
            self._tables.token_ids[: len(on_device)].copy_(on_device)
        self._graphs[size].replay()
        return self._logits[: len(token_ids)]
