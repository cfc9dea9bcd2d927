"""Launches that are captured once and replayed: as CUDA graphs, for a ladder of sizes, by all ranks or by none.

What is captured reads and writes tensors that stay at their addresses, by launches alone: no wait, no look at values,
nothing of the host that changes from step to step. A step of n is replayed by what was captured for the smallest size
that holds n; what stands in the tensors beyond n reaches no result.
"""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from kvmesh.engine.parallel import Group

log = logging.getLogger(__name__)

Launches = Callable[[], None]


class Capture(Protocol):
    """Records launches. All records of one object share memory, so one is replayed at a time, and what outlives a
    replay lies in tensors that were there before."""

    def warm_up(self, work: Launches) -> None:
        """Runs `work` once as it is: kernels are compiled and libraries make their workspaces, which a record must not
        see."""

    def record(self, work: Launches) -> Launches:
        """Returns what replays `work`, which is not run by this. Raises RuntimeError."""

    def end(self) -> int:
        """Lets go of what only warming up took. Returns the bytes that the records hold."""


class CudaCapture:
    """Records CUDA graphs, in one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()  # an earlier graph that a cycle holds must not be destroyed in the middle of a record
        self._device = device
        self._before = torch.cuda.memory_reserved(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def warm_up(self, work: Launches) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                work()
        finally:
            current.wait_stream(self._stream)

    def record(self, work: Launches) -> Launches:
        # Not `torch.cuda.graph`, which gives the allocator's memory back first, and collects garbage in older versions:
        # that takes longer than a thousand records.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Other threads of this process may use CUDA meanwhile, NCCL's among them.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph.replay

    def end(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return max(0, torch.cuda.memory_reserved(self._device) - self._before)


def bucket_for(count: int, sizes: Sequence[int]) -> int | None:
    """Returns the smallest of the ascending `sizes` that holds `count`; None where none does."""
    at = bisect_left(sizes, count)
    return sizes[at] if at < len(sizes) else None


def capture_sizes(
    what: str, sizes: Sequence[int], works: Callable[[int], Sequence[Launches]], capture: Capture, group: Group
) -> tuple[Mapping[int, Sequence[Launches]], str]:
    """Captures `works(size)` for each of the ascending `sizes`, the largest first: the others find room in what it
    leaves of the pool. Returns what replays them, and why some were not captured: the smaller ones then are tried no
    more, since what a failed capture took of the pool is lost. `what` names a work, with {} for its size.

    All ranks of a group must call this with the same sizes, and end with the same: a size that one of them could not
    record is dropped by all. Warming up is a step like any other: when that fails in a group, the others wait in a sum,
    and it raises."""
    done: dict[int, Sequence[Launches]] = {}
    failed, started = "", time.monotonic()
    for size in reversed(sizes):
        log.info("capturing %s", what.format(size))
        pieces: Sequence[Launches] = ()
        why = ""
        try:
            pieces = works(size)
            for work in pieces:
                capture.warm_up(work)
        except RuntimeError as error:  # no memory
            if group.size > 1:
                raise
            why = first_line(error)
        recorded: list[Launches] = []
        if not why:
            try:
                recorded = [capture.record(work) for work in pieces]
            except RuntimeError as error:  # no memory, or something in the model that cannot be captured
                why = first_line(error)
        if not group.agree(not why):
            failed = f"{what.format(size)} could not be captured: {why or 'another rank failed'}"
            log.warning("no CUDA graphs of %s or smaller: %s", what.format(size), failed)
            recorded.clear()
            break
        done[size] = recorded
    held = capture.end()
    log.info("captured %s, %s: %.1f s, %d MiB", what.format("n"), sorted(done), time.monotonic() - started, held >> 20)
    return done, failed


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
