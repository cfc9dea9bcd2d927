"""What lies between a model's matrix products, each in one pass over its rows: norm, norm and rotation of heads, gated
activation. Arithmetic is float32; results are rounded to the tensors' dtype where transformers rounds, or less often.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvmesh.engine.kernels.tiles import power_of_two

GATED_BLOCK = 1024
HEADS_AT_ONCE = 8
WIDE = 2048  # elements of a row from which on more warps share it


@triton.jit
def _scaled(values, weight, scale, dtype: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """Returns values * scale * weight; with ROUND_FIRST the product with the scale is rounded to `dtype` before it is
    multiplied by the weight."""
    normed = values * scale
    if ROUND_FIRST:
        normed = normed.to(dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(dtype)


@triton.jit
def _rms_norm(x, weight, out, x_row, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, ROUND_FIRST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    values = tl.load(x + row * x_row + at, mask=at < SIZE, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    answer = _scaled(values, tl.load(weight + at, mask=at < SIZE, other=0.0), scale, out.dtype.element_ty, ROUND_FIRST)
    tl.store(out + row * SIZE + at, answer, mask=at < SIZE)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norms `x [rows, n]` over n, rounds that to x's dtype unless the weight is float32, and multiplies by `weight
    [n]`."""
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows:
        _rms_norm[(rows,)](
            x,
            weight,
            out,
            x.stride(0),
            eps,
            SIZE=size,
            PADDED=power_of_two(size),
            ROUND_FIRST=weight.dtype == x.dtype,
            num_warps=4 if size <= WIDE else 8,
        )
    return out


@triton.jit
def _rotate(
    qkv,
    cos,
    sin,
    weight,
    token_stride,
    head_stride,
    heads,
    eps,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    REST: tl.constexpr,
    PADDED_REST: tl.constexpr,
    AT_ONCE: tl.constexpr,
    NORMED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    at = tl.arange(0, PADDED_HALF)
    mine = (head < heads)[:, None] & (at < HALF)[None, :]
    dtype = qkv.dtype.element_ty
    # An element and its partner, HALF further, are one thread's: it has read both before it writes either.
    low = qkv + token.to(tl.int64) * token_stride + head[:, None] * head_stride + at[None, :]
    first = tl.load(low, mask=mine, other=0.0).to(tl.float32)
    second = tl.load(low + HALF, mask=mine, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        beyond = tl.arange(0, PADDED_REST)
        there = (head < heads)[:, None] & (beyond < REST)[None, :]
        place = qkv + token.to(tl.int64) * token_stride + head[:, None] * head_stride + 2 * HALF + beyond[None, :]
        if REST > 0:
            rest = tl.load(place, mask=there, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        own = weight + head[:, None] * DIM
        first = _scaled(first, tl.load(own + at[None, :], mask=mine, other=0.0), scale, dtype, ROUND_FIRST)
        second = _scaled(second, tl.load(own + HALF + at[None, :], mask=mine, other=0.0), scale, dtype, ROUND_FIRST)
        first, second = first.to(tl.float32), second.to(tl.float32)
        if REST > 0:
            factor = tl.load(own + 2 * HALF + beyond[None, :], mask=there, other=0.0)
            tl.store(place, _scaled(rest, factor, scale, dtype, ROUND_FIRST), mask=there)
    angle = token * 2 * HALF + at
    cos_low = tl.load(cos + angle, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + HALF + angle, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + angle, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + HALF + angle, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
    tl.store(low, (first * cos_low + second * sin_low).to(dtype), mask=mine)
    tl.store(low + HALF, (second * cos_high + first * sin_high).to(dtype), mask=mine)


def rotate_heads(
    qkv: torch.Tensor, heads: int, cos: torch.Tensor, sin: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> None:
    """Does what `kvmesh.engine.ops.rotate_heads` does: norms and rotates the first `heads` of `qkv [T, all heads, D]`
    in place. `cos` and `sin` `[T, 1, rotary dim]` are contiguous, and sin has the sign of the half rotation."""
    tokens, _, dim = qkv.shape
    half = cos.shape[-1] // 2
    rest = dim - 2 * half
    if not tokens:
        return
    padded = max(16, 1 << (half - 1).bit_length())
    _rotate[(tokens, -(-heads // HEADS_AT_ONCE))](
        qkv,
        cos,
        sin,
        weight,
        *qkv.stride()[:2],
        heads,
        eps,
        DIM=dim,
        HALF=half,
        PADDED_HALF=padded,
        REST=rest,
        PADDED_REST=power_of_two(max(rest, 1)),
        AT_ONCE=HEADS_AT_ONCE,
        NORMED=weight is not None,
        ROUND_FIRST=weight is not None and weight.dtype == qkv.dtype,
        # No more threads than elements: a thread that holds a copy of another's would read what that has written.
        num_warps=4 if HEADS_AT_ONCE * padded >= 128 else 1,
    )


@triton.jit
def _gated(x, out, x_row, SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * x_row + at, mask=at < SIZE, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    inner = gate
    if GELU:  # x * (1 + tanh(y)) / 2 is x * sigmoid(2 y)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    small = tl.exp(-tl.abs(inner))  # overflows for nobody
    sigmoid = tl.where(inner < 0, small, 1.0) / (1.0 + small)
    active = (gate * sigmoid).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + at, (active * up).to(out.dtype.element_ty), mask=at < SIZE)


def gated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """Does what `kvmesh.engine.ops.gated` does: `[rows, 2 n]` → activation(gate) * up `[rows, n]`."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows:
        block = min(GATED_BLOCK, power_of_two(size))
        _gated[(rows, -(-size // block))](
            x,
            out,
            x.stride(0),
            SIZE=size,
            BLOCK=block,
            GELU=activation == "gelu_tanh",
            num_warps=4 if block > 128 else 1,
        )
    return out
