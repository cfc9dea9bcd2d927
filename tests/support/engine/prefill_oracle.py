"""What `prefill` must do, in plain torch and float64, span by span."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvmesh.engine.config import AttentionSpec


def context(pages: torch.Tensor, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[length, K, D]` of the first `length` tokens of the pages that `table` names."""
    count = -(-length // pages.shape[3])
    kv = pages[table[:count].long()].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
    return kv[0], kv[1]


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """float64 `[M, H, D]`: `queries [M, H, D]` at positions from `first` on over `keys`, `values` `[N, K, D]`. `sinks
    [H]`: a logit of each head for which there is no value."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("mhd,nhd->hmn", queries.double(), keys) * spec.scale
    if spec.softcap:
        scores = spec.softcap * (scores / spec.softcap).tanh()
    where = torch.arange(first, first + len(queries), device=queries.device)[:, None]
    token = torch.arange(len(keys), device=queries.device)[None, :]
    seen = token <= where
    if spec.window:
        seen &= token > where - spec.window
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(queries), 1)), -1)
    return torch.einsum("hmn,nhd->mhd", scores.softmax(-1)[..., : len(keys)], values)


def paged_prefill(
    qkv: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    spans: Sequence[tuple[int, int]],
    spec: AttentionSpec,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`[T, H * D]`; `spans`: (start, length) of each, the rest as of `kvmesh.engine.kernels.prefill.paged_prefill`."""
    heads = qkv.shape[1] - 2 * pages.shape[2]
    out = torch.zeros(len(qkv), heads, qkv.shape[2], dtype=torch.float64, device=qkv.device)
    row = 0
    for span, (start, length) in enumerate(spans):
        keys, values = context(pages, table[span], start + length)
        out[row : row + length] = attend(qkv[row : row + length, :heads], keys, values, start, spec, sinks)
        row += length
    return out.flatten(1)
