"""Between a layer's projections and its latent attention, in one launch: the norm of latents, the rotation of queries
and of the key part that all heads share, and the write of rows into their pages. Arithmetic is float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvmesh.engine.kernels.fused import norm_row
from kvmesh.engine.kernels.tiles import power_of_two
from kvmesh.engine.rope import Rotation

HEADS_AT_ONCE = 16


@triton.jit
def _rotate_and_write(
    qkv,
    pages,
    slots,
    cos,
    sin,
    weight,
    qkv_token,
    page_stride,
    token_stride,
    heads,
    block_tokens,
    eps,
    NOPE: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    LATENT: tl.constexpr,
    PADDED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
):
    token, part = tl.program_id(0), tl.program_id(1)
    source = qkv + token.to(tl.int64) * qkv_token
    dtype = qkv.dtype.element_ty
    half = tl.arange(0, PADDED_HALF)
    inside = half < HALF
    # A pair's elements: side by side where they come from, half a width apart where they go.
    first_at = 2 * half if INTERLEAVED else half
    second_at = 2 * half + 1 if INTERLEAVED else HALF + half
    if TURNED:
        angle = token * 2 * HALF + half
        cos_low = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        cos_high = tl.load(cos + HALF + angle, mask=inside, other=0.0).to(tl.float32)
        sin_low = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        sin_high = tl.load(sin + HALF + angle, mask=inside, other=0.0).to(tl.float32)
    if part == 0:
        slot = tl.load(slots + token).to(tl.int64)
        kept = slot >= 0
        target = pages + slot // block_tokens * page_stride + slot % block_tokens * token_stride
        source += heads * (NOPE + 2 * HALF)
        at = tl.arange(0, PADDED)
        latents = tl.load(source + at, mask=at < LATENT, other=0.0)
        if NORMED:
            latents = norm_row(latents.to(tl.float32), weight, at, eps, dtype, LATENT, ROUND_FIRST)
        tl.store(target + at, latents, mask=(at < LATENT) & kept)
        rope = source + LATENT
        if TURNED:
            low = tl.load(rope + first_at, mask=inside, other=0.0).to(tl.float32)
            high = tl.load(rope + second_at, mask=inside, other=0.0).to(tl.float32)
            tl.store(target + LATENT + half, (low * cos_low + high * sin_low).to(dtype), mask=inside & kept)
            tl.store(target + LATENT + HALF + half, (high * cos_high + low * sin_high).to(dtype), mask=inside & kept)
        else:  # rows are written as they are
            tl.store(target + LATENT + half, tl.load(rope + half, mask=inside), mask=inside & kept)
            other = tl.load(rope + HALF + half, mask=inside)
            tl.store(target + LATENT + HALF + half, other, mask=inside & kept)
    elif TURNED:
        head = (part - 1) * AT_ONCE + tl.arange(0, AT_ONCE)
        place = (source + head * (NOPE + 2 * HALF) + NOPE)[:, None]
        there = (head < heads)[:, None] & inside[None, :]
        lows = tl.load(place + first_at[None, :], mask=there, other=0.0).to(tl.float32)
        highs = tl.load(place + second_at[None, :], mask=there, other=0.0).to(tl.float32)
        turned_lows = lows * cos_low[None, :] + highs * sin_low[None, :]
        turned_highs = highs * cos_high[None, :] + lows * sin_high[None, :]
        tl.debug_barrier()  # in place: a thread writes where another has read
        tl.store(place + half[None, :], turned_lows.to(dtype), mask=there)
        tl.store(place + HALF + half[None, :], turned_highs.to(dtype), mask=there)


def rotate_and_write_latents(
    qkv: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    heads: int,
    nope: int,
    latent: int,
    rotation: Rotation | None,
    interleaved: bool,
) -> None:
    """Rotates the parts with position of the queries of `qkv [T, H * (nope + rope) + latent + rope]` in place, and
    writes the rows behind them, their latents normed where the rotation has a weight `[latent]`, their key parts
    rotated, into `pages [num_pages, block_tokens, latent + rope]`. In `qkv` rows stay as they are. `interleaved`: pairs
    lie side by side, and come to lie half a width apart. Without a rotation rows are written as they are. `slots` as of
    `kernels.write.write_kv`."""
    tokens, block_tokens, width = qkv.shape[0], *pages.shape[1:]
    half = (width - latent) // 2
    weight = None if rotation is None else rotation.norm_weight
    if not tokens:
        return
    parts = -(-heads // HEADS_AT_ONCE) if rotation is not None and half else 0
    _rotate_and_write[(tokens, 1 + parts)](
        qkv,
        pages,
        slots,
        None if rotation is None else rotation.cos,
        None if rotation is None else rotation.sin,
        weight,
        qkv.stride(0),
        *pages.stride()[:2],
        heads,
        block_tokens,
        0.0 if rotation is None else rotation.eps,
        NOPE=nope,
        HALF=half,
        PADDED_HALF=power_of_two(half),
        LATENT=latent,
        PADDED=power_of_two(latent),
        AT_ONCE=HEADS_AT_ONCE,
        TURNED=rotation is not None and half > 0,
        INTERLEAVED=interleaved,
        NORMED=weight is not None,
        ROUND_FIRST=weight is not None and weight.dtype == qkv.dtype,
        num_warps=4,
    )
