"""K and V of a step's tokens into their pages, both in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvmesh.engine.kernels.tiles import power_of_two


@triton.jit
def _write(
    qkv,
    pages,
    slots,
    qkv_token,
    qkv_head,
    page_stride,
    kv_stride,
    head_stride,
    token_stride,
    heads,
    kv_heads,
    block_tokens,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    at = tl.arange(0, PADDED)
    wanted = (at < DIM) & (slot >= 0)
    source = qkv + token.to(tl.int64) * qkv_token + at
    target = pages + slot // block_tokens * page_stride + head * head_stride + slot % block_tokens * token_stride + at
    key = tl.load(source + (heads + head) * qkv_head, mask=wanted)
    value = tl.load(source + (heads + kv_heads + head) * qkv_head, mask=wanted)
    tl.store(target, key, mask=wanted)
    tl.store(target + kv_stride, value, mask=wanted)


def write_kv(qkv: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes K and V of `qkv [T, H + 2K, D]` into `pages [num_pages, 2, K, block_tokens, D]`. `slots` int32 or int64
    `[T]` are page * block_tokens + slot in it, or -1 for a token that is to leave no trace."""
    _, _, kv_heads, block_tokens, dim = pages.shape
    heads = qkv.shape[1] - 2 * kv_heads
    _write[(qkv.shape[0], kv_heads)](
        qkv,
        pages,
        slots,
        *qkv.stride()[:2],
        *pages.stride()[:4],
        heads,
        kv_heads,
        block_tokens,
        DIM=dim,
        PADDED=power_of_two(dim),
        num_warps=1,
    )
