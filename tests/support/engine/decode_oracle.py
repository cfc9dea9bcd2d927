"""What `decode` must do, in plain torch and float64, row by row."""

from __future__ import annotations

import torch

from kvmesh.engine.config import AttentionSpec
from tests.support.engine.prefill_oracle import attend, context


def paged_decode(
    qkv: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    spec: AttentionSpec,
) -> torch.Tensor:
    """`[rows, H * D]`; arguments as of `kvmesh.engine.kernels.decode.paged_decode`."""
    rows, kv_heads = qkv.shape[0], pages.shape[2]
    heads = qkv.shape[1] - 2 * kv_heads
    out = torch.zeros(rows, heads, qkv.shape[2], dtype=torch.float64, device=qkv.device)
    for row, length in enumerate(lengths[:rows].tolist()):
        if length:
            keys, values = context(pages, table[row], length)
            out[row] = attend(qkv[row : row + 1, :heads], keys, values, length - 1, spec)[0]
    return out.flatten(1)
