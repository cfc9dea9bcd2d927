"""What lies between a model's matrix products, each in one pass over its rows: norm, with the addition before it; norm
and rotation of heads, with the write of K and V into their pages; gated activation. Arithmetic is float32; results are
rounded to the tensors' dtype where transformers rounds, or less often.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvmesh.engine.kernels.tiles import power_of_two
from kvmesh.engine.rope import Rotation

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
def norm_row(values, weight, at, eps, dtype: tl.constexpr, SIZE: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """Returns a row's float32 values normed over its SIZE elements, zeros behind them, and multiplied by `weight`."""
    scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    return _scaled(values, tl.load(weight + at, mask=at < SIZE, other=0.0), scale, dtype, ROUND_FIRST)


@triton.jit
def _rms_norm(x, weight, out, x_row, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, ROUND_FIRST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    values = tl.load(x + row * x_row + at, mask=at < SIZE, other=0.0).to(tl.float32)
    answer = norm_row(values, weight, at, eps, out.dtype.element_ty, SIZE, ROUND_FIRST)
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
            enable_fp_fusion=False,  # a product is rounded before it is added, as if it had been stored
        )
    return out


@triton.jit
def _add_rms_norm(
    residual,
    x,
    inner,
    weight,
    out,
    residual_row,
    x_row,
    eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    INNER: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    dtype = out.dtype.element_ty
    values = tl.load(x + row * x_row + at, mask=at < SIZE, other=0.0).to(tl.float32)
    if INNER:
        values = norm_row(values, inner, at, eps, dtype, SIZE, ROUND_FIRST).to(tl.float32)
    place = residual + row * residual_row + at
    total = (tl.load(place, mask=at < SIZE, other=0.0).to(tl.float32) + values).to(dtype)
    tl.store(place, total, mask=at < SIZE)
    # What is normed is the sum as the next addition will find it: rounded.
    answer = norm_row(total.to(tl.float32), weight, at, eps, dtype, SIZE, ROUND_FIRST)
    tl.store(out + row * SIZE + at, answer, mask=at < SIZE)


def add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, inner: torch.Tensor | None = None
) -> torch.Tensor:
    """Adds `x [rows, n]` to `residual [rows, n]` in place and returns what `rms_norm` makes of the sum. With `inner
    [n]`, of the weight's dtype, it adds what `rms_norm` makes of x by that instead. Every step is rounded to x's dtype
    as if it were a launch of its own."""
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows:
        _add_rms_norm[(rows,)](
            residual,
            x,
            inner,
            weight,
            out,
            residual.stride(0),
            x.stride(0),
            eps,
            SIZE=size,
            PADDED=power_of_two(size),
            INNER=inner is not None,
            ROUND_FIRST=weight.dtype == x.dtype,
            num_warps=4 if size <= WIDE else 8,
            enable_fp_fusion=False,  # a product is rounded before it is added, as if it had been stored
        )
    return out


@triton.jit
def _rotate_and_write(
    qkv,
    pages,
    slots,
    cos,
    sin,
    weight,
    qkv_token,
    qkv_head,
    page_stride,
    kv_stride,
    head_stride,
    token_stride,
    heads,
    kv_heads,
    block_tokens,
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
    dtype = qkv.dtype.element_ty
    slot = tl.load(slots + token).to(tl.int64)
    turned = (head < heads + kv_heads)[:, None]  # queries and keys
    query = (head < heads)[:, None]
    kept = (head >= heads) & (head < heads + 2 * kv_heads) & (slot >= 0)
    kept = kept[:, None]
    plane = (head >= heads + kv_heads).to(tl.int32)  # of a page: 0 keys, 1 values
    page = pages + slot // block_tokens * page_stride + slot % block_tokens * token_stride
    target = (page + plane * kv_stride + (head - heads - plane * kv_heads) * head_stride)[:, None]
    source = (qkv + token.to(tl.int64) * qkv_token + head * qkv_head)[:, None]

    # An element and its partner, HALF further, are one thread's: it has read both before it writes either.
    inside = (at < HALF)[None, :]
    there = (head < heads + 2 * kv_heads)[:, None] & inside
    first = tl.load(source + at[None, :], mask=there, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + at[None, :], mask=there, other=0.0).to(tl.float32)
    low, high = first, second
    beyond = 2 * HALF + tl.arange(0, PADDED_REST)[None, :]
    unturned = beyond < DIM
    if REST > 0:
        there = (head < heads + 2 * kv_heads)[:, None] & unturned
        rest = tl.load(source + beyond, mask=there, other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        own = weight + head[:, None] * DIM
        there = turned & inside
        low = _scaled(low, tl.load(own + at[None, :], mask=there, other=0.0), scale, dtype, ROUND_FIRST)
        high = _scaled(high, tl.load(own + HALF + at[None, :], mask=there, other=0.0), scale, dtype, ROUND_FIRST)
        low, high = low.to(tl.float32), high.to(tl.float32)
        if REST > 0:
            factor = tl.load(own + beyond, mask=turned & unturned, other=0.0)
            normed = _scaled(rest, factor, scale, dtype, ROUND_FIRST).to(tl.float32)
            rest = tl.where(turned, normed, rest)
            tl.store(source + beyond, rest.to(dtype), mask=query & unturned)
    if REST > 0:
        tl.store(target + beyond, rest.to(dtype), mask=kept & unturned)
    angle = token * 2 * HALF + at
    cos_low = tl.load(cos + angle, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + HALF + angle, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + angle, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + HALF + angle, mask=at < HALF, other=0.0).to(tl.float32)[None, :]
    new_low = tl.where(turned, low * cos_low + high * sin_low, first).to(dtype)
    new_high = tl.where(turned, high * cos_high + low * sin_high, second).to(dtype)
    tl.store(source + at[None, :], new_low, mask=query & inside)
    tl.store(source + HALF + at[None, :], new_high, mask=query & inside)
    tl.store(target + at[None, :], new_low, mask=kept & inside)
    tl.store(target + HALF + at[None, :], new_high, mask=kept & inside)


def rotate_and_write(qkv: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, rotation: Rotation) -> None:
    """Does to the queries of `qkv [T, H + 2K, D]` what `kvmesh.engine.ops.rotate_heads` does, in place, and writes the
    keys, rotated likewise, and the values into `pages [num_pages, 2, K, block_tokens, D]`. In `qkv` keys and values
    stay as they are. `slots` as of `kvmesh.engine.kernels.write.write_kv`."""
    tokens, all_heads, dim = qkv.shape
    _, _, kv_heads, block_tokens, _ = pages.shape
    weight = rotation.norm_weight
    half = rotation.cos.shape[-1] // 2
    rest = dim - 2 * half
    if not tokens:
        return
    # Even the smallest tile has as many elements as there are threads: a thread that held a copy of another's would
    # read what that has written.
    _rotate_and_write[(tokens, -(-all_heads // HEADS_AT_ONCE))](
        qkv,
        pages,
        slots,
        rotation.cos,
        rotation.sin,
        weight,
        *qkv.stride()[:2],
        *pages.stride()[:4],
        all_heads - 2 * kv_heads,
        kv_heads,
        block_tokens,
        rotation.eps,
        DIM=dim,
        HALF=half,
        PADDED_HALF=power_of_two(half),
        REST=rest,
        PADDED_REST=power_of_two(max(rest, 1)),
        AT_ONCE=HEADS_AT_ONCE,
        NORMED=weight is not None,
        ROUND_FIRST=weight is not None and weight.dtype == qkv.dtype,
        num_warps=4,
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
