"""Pages whose requests lie scattered over them, with NaN wherever no token was written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

SPARE = 3  # pages that belong to nobody


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    block: int
    dtype: torch.dtype = torch.float32

    @property
    def tolerance(self) -> float:
        return 2e-5 if self.dtype == torch.float32 else 2e-2


@dataclass
class Paged:
    """`pages` is one layer of `pool`: strides are not those of a dense tensor."""

    shape: Shape
    pool: torch.Tensor
    pages: torch.Tensor
    table: torch.Tensor

    def qkv(self, rows: int, seed: int = 1) -> torch.Tensor:
        made = torch.Generator().manual_seed(seed)
        size = (rows, self.shape.heads + 2 * self.shape.kv_heads, self.shape.dim)
        return torch.randn(size, generator=made).to(self.pages.device, self.shape.dtype)


def paged(shape: Shape, lengths: Sequence[int], device: torch.device, seed: int = 0) -> Paged:
    """The first `lengths[i]` tokens of request i are there. Its pages are in no order, and no table tells of more than
    it needs."""
    made = torch.Generator().manual_seed(seed)
    counts = [-(-length // shape.block) for length in lengths]
    order = (torch.randperm(sum(counts) + SPARE, generator=made)).tolist()
    size = (len(order), 2, 2, shape.kv_heads, shape.block, shape.dim)
    pool = torch.full(size, torch.nan, dtype=shape.dtype, device=device)
    table = torch.full((max(len(lengths), 1), max([1, *counts]) + 2), -7, dtype=torch.int32)
    taken = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[row, :count] = torch.tensor(order[taken : taken + count], dtype=torch.int32)
        taken += count
        for at in range(count):
            there = min(shape.block, length - at * shape.block)
            values = torch.randn((2, shape.kv_heads, there, shape.dim), generator=made)
            pool[int(table[row, at]), 1, :, :, :there] = values.to(device, shape.dtype)
    return Paged(shape, pool, pool[:, 1], table.to(device))


def supported(shape: Shape, device: torch.device) -> Shape:
    """Skips what only a GPU multiplies."""
    if shape.dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies bfloat16 as integers: on a GPU only")
    return shape
