"""What `write` and the rotation before it must do, in plain torch."""

from __future__ import annotations

import torch

from kvmesh.engine.rope import Rotation


def write_kv(qkv: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    """As `kvmesh.engine.kernels.write.write_kv`."""
    _, _, kv_heads, block_tokens, dim = pages.shape
    kept = slots >= 0
    kv = qkv[kept, qkv.shape[1] - 2 * kv_heads :].view(-1, 2, kv_heads, dim)
    pages[slots[kept] // block_tokens, :, :, slots[kept] % block_tokens] = kv


def rotated(qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Returns the queries and keys of `qkv`, normed and rotated, in float64."""
    heads, cos, sin, weight, eps = rotation
    x = qkv[:, :heads].double()
    if weight is not None:
        x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    answer, rotary = x.clone(), cos.shape[-1]
    turned = x[..., :rotary].roll(rotary // 2, -1)
    answer[..., :rotary] = x[..., :rotary] * cos.double() + turned * sin.double()
    return answer


def rotate_and_write(
    qkv: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `kvmesh.engine.kernels.fused.rotate_and_write` makes of the queries, and of all pages, in
    float64."""
    whole = torch.cat((rotated(qkv, rotation), qkv[:, rotation.heads :].double()), 1)
    pages = pages.double()
    write_kv(whole, pages, slots)
    return whole[:, : qkv.shape[1] - 2 * pages.shape[2]], pages
