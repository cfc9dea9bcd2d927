"""What `prefill` must do, in plain torch and float64, span by span."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvmesh.engine.config import AttentionSpec
from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, CacheLayout, first_seen


def oldest_seen(spec: AttentionSpec, where: torch.Tensor) -> torch.Tensor:
    """The first token that each of the tokens at `where` sees, as the cache groups have it."""
    kind, keep = CacheKind.ALL, 0
    if spec.window:
        kind, keep = CacheKind.WINDOW, spec.window
    if spec.chunk:
        kind, keep = CacheKind.CHUNK, spec.chunk
    group = CacheGroup("seen", (0,), CacheLayout(2, 1, 2), kind, keep)
    return torch.tensor([first_seen(group, position) for position in where.flatten().tolist()]).view_as(where)


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
) -> torch.Tensor:
    """float64 `[M, H, D]`: `queries [M, H, D]` at positions from `first` on over `keys`, `values` `[N, K, D]`."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("mhd,nhd->hmn", queries.double(), keys) * spec.scale
    if spec.softcap:
        scores = spec.softcap * (scores / spec.softcap).tanh()
    where = torch.arange(first, first + len(queries), device=queries.device)[:, None]
    token = torch.arange(len(keys), device=queries.device)[None, :]
    seen = (token <= where) & (token >= oldest_seen(spec, where).to(token.device))
    scores = scores.masked_fill(~seen, -torch.inf)
    if spec.sinks is not None:
        scores = torch.cat((scores, spec.sinks.double()[:, None, None].expand(-1, len(queries), 1)), -1)
    return torch.einsum("hmn,nhd->mhd", scores.softmax(-1)[..., : len(keys)], values)


def paged_prefill(
    qkv: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    spans: Sequence[tuple[int, int]],
    spec: AttentionSpec,
) -> torch.Tensor:
    """`[T, H * D]`; `spans`: (start, length) of each, the rest as of `kvmesh.engine.kernels.prefill.paged_prefill`."""
    heads = qkv.shape[1] - 2 * pages.shape[2]
    out = torch.zeros(len(qkv), heads, qkv.shape[2], dtype=torch.float64, device=qkv.device)
    row = 0
    for span, (start, length) in enumerate(spans):
        keys, values = context(pages, table[span], start + length)
        out[row : row + length] = attend(qkv[row : row + length, :heads], keys, values, start, spec)
        row += length
    return out.flatten(1)
