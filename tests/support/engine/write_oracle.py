"""What `write` must do, in plain torch."""

from __future__ import annotations

import torch


def write_kv(qkv: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """As `kvmesh.engine.kernels.write.write_kv`."""
    _, _, kv_heads, block_tokens, dim = pages.shape
    kept = slots >= 0
    kv = qkv[kept, qkv.shape[1] - 2 * kv_heads :].view(-1, 2, kv_heads, dim)
    pages[slots[kept] // block_tokens, :, :, slots[kept] % block_tokens] = kv
