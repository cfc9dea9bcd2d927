"""The gated delta rule in float64, token by token, as its formula is written; and inputs of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from kvmesh.engine.attention.delta import NORM_EPS, DeltaInputs

Run = tuple[int, int, int]  # first token, length, slot


def runs_of(lengths: Sequence[int], slots: Sequence[int]) -> list[Run]:
    ends = itertools.accumulate(lengths)
    return [(end - length, length, slot) for end, length, slot in zip(ends, lengths, slots, strict=True)]


class DeltaCase(NamedTuple):
    """Sizes of a layer."""

    key_heads: int = 2
    repeats: int = 2
    key_dim: int = 24
    value_dim: int = 40
    kernel: int = 4

    @property
    def value_heads(self) -> int:
        return self.key_heads * self.repeats

    @property
    def width(self) -> int:
        return 2 * self.key_dim + self.repeats * self.value_dim

    def inputs(self, tokens: int, seed: int, dtype: torch.dtype = torch.float32) -> DeltaInputs:
        """`x` is a part of a wider tensor, as a layer has it."""
        generator = torch.Generator().manual_seed(seed)
        wide = torch.randn(tokens, self.key_heads, self.width + 11, generator=generator).to(dtype)
        weight = torch.randn(self.kernel, self.key_heads, self.width, generator=generator)
        gates = torch.randn(2, tokens, self.value_heads, generator=generator)
        return DeltaInputs(wide[..., : self.width], weight, -gates[0].exp() * 0.2, gates[1].sigmoid(), self.key_dim)

    def states(self, slots: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        """States of the rule, and last inputs of the convolution."""
        generator = torch.Generator().manual_seed(seed + 1)
        state = torch.randn(slots, self.value_heads, self.key_dim, self.value_dim, generator=generator)
        known = torch.randn(slots, self.kernel - 1, self.key_heads, self.width, generator=generator)
        return state, known.to(dtype)


def convolved(x: torch.Tensor, weight: torch.Tensor, states: torch.Tensor, runs: Iterable[Run]) -> torch.Tensor:
    """What `delta.convolve` answers, of x's dtype; `states` is changed likewise."""
    out = torch.empty_like(x, dtype=torch.float64)
    for first, length, slot in runs:
        seen = [*states[slot]]
        for token in range(first, first + length):
            seen.append(x[token])
            sums = sum(part.double() * tap.double() for part, tap in zip(seen[-len(weight) :], weight, strict=True))
            assert isinstance(sums, torch.Tensor)
            out[token] = sums * sums.sigmoid()
        states[slot] = torch.stack(seen[1 - len(weight) :])
    return out.to(x.dtype)


def delta_by_token(
    case: DeltaCase,
    x: torch.Tensor,
    log_decay: torch.Tensor,
    rate: torch.Tensor,
    states: torch.Tensor,
    runs: Iterable[Run],
) -> torch.Tensor:
    """What `delta.delta_rule` answers, of x's dtype; `states` is changed likewise."""
    exact = x.double()
    q, k = exact[..., : case.key_dim], exact[..., case.key_dim : 2 * case.key_dim]
    q, k = (part / (part.square().sum(-1, keepdim=True) + NORM_EPS).sqrt() for part in (q, k))
    q, k = (part.repeat_interleave(case.repeats, 1) for part in (q, k))
    v = exact[..., 2 * case.key_dim :].reshape(len(x), case.value_heads, case.value_dim)
    decay, rate = log_decay.double().exp()[..., None, None], rate.double()[..., None]
    out = torch.empty_like(v)
    for first, length, slot in runs:
        state = states[slot].double()
        for token in range(first, first + length):
            state = state * decay[token]
            told = torch.einsum("hk,hkv->hv", k[token], state)
            state = state + torch.einsum("hk,hv->hkv", k[token], rate[token] * (v[token] - told))
            out[token] = torch.einsum("hk,hkv->hv", q[token], state) / case.key_dim**0.5
        states[slot] = state.float()
    return out.to(x.dtype)
