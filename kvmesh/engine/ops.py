"""What lies between the matrix products: norms, rotation, gated activations. In one pass each: C++ on CPUs that have
the operators (`kvmesh.engine.cpu`), Triton on GPUs (`kvmesh.engine.kernels.fused`); torch elsewhere. The C++ rounds to
the tensor's dtype where transformers rounds, torch at most as often: in float32 the two agree to a few units in the
last place, in bfloat16 to two steps of the largest intermediate result (2**-7 of its size).
"""

from __future__ import annotations

from typing import cast

import torch
from torch.nn import functional

from kvmesh.engine.cpu import native
from kvmesh.engine.kernels import kernels_for
from kvmesh.engine.rope import rotate

NATIVE_DTYPES = (torch.float32, torch.bfloat16)


def on_native(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in NATIVE_DTYPES and native.loaded()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norms `x [rows, n]` over n and multiplies by `weight [n]`: after the rounding to x's dtype, or with a float32
    weight and a narrower x before it (Gemma)."""
    if on_native(x):
        normed: torch.Tensor = torch.ops.kvmesh.rms_norm.default(x, weight, eps)
        return normed
    if fused := kernels_for(x.device.type, "fused"):
        return cast(torch.Tensor, fused.rms_norm(x, weight, eps))
    if weight.dtype == x.dtype:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def rotate_heads(
    qkv: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> None:
    """Changes the first `heads` of `qkv [T, all heads, D]` in place: normed as `rms_norm` by `weight [heads, D]` where
    there is one, then rotated by cos and sin `[T, 1, rotary dim]` (`RotaryEmbedding`)."""
    if on_native(qkv):
        torch.ops.kvmesh.rotate_heads.default(qkv, heads, cos, sin, weight, eps)
        return
    if fused := kernels_for(qkv.device.type, "fused"):
        fused.rotate_heads(qkv, heads, cos, sin, weight, eps)
        return
    turned = qkv[:, :heads]
    normed = turned
    if weight is not None:
        normed = functional.rms_norm(turned.to(weight.dtype), weight.shape[-1:], None, eps).mul_(weight).to(qkv.dtype)
    rotate(normed, cos, sin, out=turned)


def gated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Computes `[rows, 2 n]`, gate and up side by side → activation(gate) * up `[rows, n]`; the activation is "silu" or
    "gelu_tanh"."""
    gelu = activation == "gelu_tanh"
    if on_native(x):
        answer: torch.Tensor = torch.ops.kvmesh.gated.default(x, gelu)
        return answer
    if fused := kernels_for(x.device.type, "fused"):
        return cast(torch.Tensor, fused.gated(x, activation))
    gate, up = x.chunk(2, -1)
    return (functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)).mul_(up)
