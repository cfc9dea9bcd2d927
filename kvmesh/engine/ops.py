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
from kvmesh.engine.rope import Rotation, rotate

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


def add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, inner: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of `residual` and `x`, `[rows, n]` both, and the sum normed by `weight [n]`. With `inner [n]`, x
    is first normed by that. The sum lies in `residual` or in a tensor of its own or of `x`: nobody reads these
    afterwards. It is rounded to x's dtype before it is normed, as is x after its own norm."""
    if fused := kernels_for(x.device.type, "fused"):
        return residual, cast(torch.Tensor, fused.add_rms_norm(residual, x, weight, eps, inner))
    total = (x if inner is None else rms_norm(x, inner, eps)).add_(residual)
    return total, rms_norm(total, weight, eps)


def rotate_heads(qkv: torch.Tensor, rotation: Rotation) -> None:
    """Changes the rotated heads of `qkv [T, all heads, D]` in place: normed as `rms_norm` does where the rotation has
    a weight, then rotated. A GPU's kernels do this as they write K and V (`TritonPlan.rotate_and_write`)."""
    heads, cos, sin, weight, eps = rotation
    if on_native(qkv):
        torch.ops.kvmesh.rotate_heads.default(qkv, heads, cos, sin, weight, eps)
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


def clamped_swiglu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Computes `[rows, 2 n]`, gate and up side by side → (up + 1) * gate * sigmoid(alpha * gate) `[rows, n]`, of a gate
    that is at most `limit` and an up within ±limit. Between its roundings to x's dtype it is float32."""
    gate, up = x.float().chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * (alpha * gate).sigmoid()).to(x.dtype)
