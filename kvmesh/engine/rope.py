"""Rotary position embedding: inverse frequencies for each scaling, and cos/sin for a step's positions.

The arithmetic follows transformers step by step in float32, so that angles agree to the last bit.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from kvmesh.engine.config_rope import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Returns float32 `[rotary_dim / 2]`, on the CPU."""
    rotary = rope.rotary_dim(head_dim)
    exponents = torch.arange(0, rotary, 2, dtype=torch.float32) / rotary
    if rope.rope_type == "longrope":
        return 1.0 / (torch.tensor(rope.factors) * rope.theta**exponents)
    plain = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, plain)
    if rope.rope_type == "yarn":
        return _yarn(rope, rope.theta**exponents, head_dim)
    return plain


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Stretches long waves by `factor`, keeps short ones, and blends those between."""
    original = rope.original_max_position_embeddings
    longest, shortest = original / rope.low_freq_factor, original / rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > longest, plain / rope.factor, plain)
    blend = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * scaled / rope.factor + blend * scaled
    between = ~(wavelength < shortest) & ~(wavelength > longest)
    return torch.where(between, blended, scaled)


def _yarn(rope: RopeConfig, powers: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Keeps the frequency of dimensions below `low`, stretches those above `high`, with a ramp between (YaRN, arXiv
    2309.00071)."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return (head_dim * math.log(turns)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


class Rotation(NamedTuple):
    """What a layer's queries and keys go through between their product and attention: the norm of each head where the
    layer has one, then the rotation by the positions of the step's T tokens."""

    heads: int  # that are rotated: H query heads and the K key heads behind them
    cos: torch.Tensor  # `[T, 1, rotary dim]`, as sin from `RotaryEmbedding`, contiguous
    sin: torch.Tensor
    norm_weight: torch.Tensor | None  # `[heads, head_dim]`; of latent attention `[latent]`, of the rows' latents
    eps: float


class RotaryEmbedding:
    """Computes cos and sin for positions. The sign of the half rotation is folded into sin: with `turned = roll(x,
    half)`, the rotated x is `x * cos + turned * sin`. Only the first `rotary_dim` elements of a head rotate."""

    def __init__(self, rope: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        half = inverse_frequencies(rope, head_dim)
        self.frequencies = torch.cat((half, half)).to(device)
        sign = torch.ones(2 * len(half))
        sign[: len(half)] = -1.0
        self.scale = rope.attention_factor
        self.signed_scale = (sign * self.scale).to(device)
        self.dtype = dtype

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes cos and sin `[T, 1, rotary_dim]` in the model's dtype of `positions` int64 `[T]`."""
        angles = (positions[:, None].float() * self.frequencies)[:, None]
        cos = angles.cos()
        if self.scale != 1.0:
            cos = cos * self.scale
        return cos.to(self.dtype), (angles.sin() * self.signed_scale).to(self.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Rotates `x [T, heads, head_dim]` into `out`, which may be `x` itself; cos and sin are `RotaryEmbedding`'s."""
    whole, rotary = out, cos.shape[-1]
    if rotary < x.shape[-1]:
        if out is not x:
            out[..., rotary:] = x[..., rotary:]
        x, out = x[..., :rotary], out[..., :rotary]
    turned = x.roll(x.shape[-1] // 2, -1)
    torch.mul(x, cos, out=out).addcmul_(turned, sin)
    return whole
