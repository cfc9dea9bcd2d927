"""Pieces of memory that lie apart, into one contiguous range and back, by the processors of the GPU.

A copy engine takes microseconds a piece, however short it is; a kernel moves thousands in one launch. One side may be
pinned host memory: the processors then write over the bus themselves. `programs` bounds how many of them a move takes,
so that a step beside it keeps the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048  # words of 4 bytes that a program moves at a time
PROGRAMS = 64


@triton.jit
def _move(apart, index, together, piece, count, PIECE_BLOCK: tl.constexpr, GATHER: tl.constexpr):
    blocks = tl.cdiv(piece, PIECE_BLOCK)
    for work in range(tl.program_id(0), count * blocks, tl.num_programs(0)):
        at = work % blocks * PIECE_BLOCK + tl.arange(0, PIECE_BLOCK)
        one = apart + tl.load(index + work // blocks).to(tl.int64) * piece + at
        other = together + (work // blocks).to(tl.int64) * piece + at
        if GATHER:
            tl.store(other, tl.load(one, mask=at < piece), mask=at < piece)
        else:
            tl.store(one, tl.load(other, mask=at < piece), mask=at < piece)


def _launch(apart: torch.Tensor, index: torch.Tensor, together: torch.Tensor, programs: int, gather: bool) -> None:
    if not len(index):
        return
    words = apart.view(torch.int32)
    piece = words.shape[1]
    block = min(BLOCK, triton.next_power_of_2(piece))
    _move[(programs,)](
        words, index, together.view(torch.int32), piece, len(index), PIECE_BLOCK=block, GATHER=gather, num_warps=4
    )


def gather(source: torch.Tensor, index: torch.Tensor, target: torch.Tensor, programs: int = PROGRAMS) -> None:
    """Copies `source[index[i]]` to `target[i]`: uint8 `[pieces, bytes]` and `[len(index), bytes]`, contiguous, bytes a
    multiple of 4; `index` is int32 or int64 on the device. `source` and `target` lie on the device or in pinned
    memory."""
    _launch(source, index, target, programs, gather=True)


def scatter(source: torch.Tensor, index: torch.Tensor, target: torch.Tensor, programs: int = PROGRAMS) -> None:
    """Copies `source[i]` to `target[index[i]]`; shapes are those of `gather`."""
    _launch(target, index, source, programs, gather=False)
