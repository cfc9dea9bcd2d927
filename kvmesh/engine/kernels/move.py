"""Pieces of memory that lie apart go to places that lie apart, by the processors of the GPU.

A copy engine takes microseconds a piece, however short it is; a kernel moves thousands in one launch. One side may be
pinned host memory: the processors then go over the bus themselves. `programs` bounds how many of them a move takes, so
that a step beside it keeps the others.

The table of pieces goes to the device by a copy out of pinned memory, in the order of the stream: the host waits for
nothing, and torch gives neither buffer away before the stream has read it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from kvmesh.kvcache.layout import Run

BLOCK = 2048  # words of 4 bytes that a program moves at a time
WORD = 4
ALIGNED = 16  # bytes that one thread moves at a time


@triton.jit(do_not_specialize=["count", "longest"])
def _move(source, target, runs, count, longest, SIZE: tl.constexpr):
    blocks = tl.cdiv(longest, SIZE)
    for work in range(tl.program_id(0), count * blocks, tl.num_programs(0)):
        run = runs + work // blocks * 3
        at = work % blocks * SIZE + tl.arange(0, SIZE)
        length = tl.load(run + 2)
        inside = at < tl.multiple_of(length, 4)
        begin, end = tl.multiple_of(tl.load(run), 4), tl.multiple_of(tl.load(run + 1), 4)
        tl.store(target + end + at, tl.load(source + begin + at, mask=inside), mask=inside)


def as_table(source: torch.Tensor, target: torch.Tensor, runs: Sequence[Run]) -> np.ndarray | None:
    """Returns `runs` in words, int64 `[runs, 3]`, or None where one of them begins or ends off a boundary of 16
    bytes, so that the kernel must not move it."""
    table = np.array(runs, dtype=np.int64).reshape(-1, 3)
    odd = int(np.bitwise_or.reduce(table, axis=None)) | source.data_ptr() | target.data_ptr()
    return None if odd % ALIGNED else table // WORD


def move(source: torch.Tensor, target: torch.Tensor, table: np.ndarray, programs: int) -> None:
    """Copies pieces of `source` to places in `target`, both uint8 `[bytes]` on the device or in pinned memory. Places
    in `target` must not overlap. `table` is what `as_table` returned."""
    if not len(table):
        return
    device = target.device if source.device.type == "cpu" else source.device
    pieces = torch.from_numpy(table)
    if device.type == "cuda":
        pieces = pieces.pin_memory().to(device, non_blocking=True)
    words = source.view(torch.int32), target.view(torch.int32)
    _move[(programs,)](*words, pieces, len(table), int(table[:, 2].max()), SIZE=BLOCK, num_warps=4)
