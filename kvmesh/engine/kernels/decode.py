"""Attention of one query token a row over its pages, split along the context.

A program takes one row, one KV head with all query heads that share it, and one share of the row's tiles; so a batch of
one keeps a whole GPU busy. What each share found is normed by itself and joined by a second kernel, weighted by how
much each had to say: the log of its sum of exponentials (flash-decoding). Shares depend on the row's length alone, so
a launch knows no lengths and can be replayed from a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvmesh.engine.config import AttentionSpec
from kvmesh.engine.kernels.softmax import fold, scores_of
from kvmesh.engine.kernels.tiles import power_of_two, tiles_for

MAX_SPLITS = 64
MIN_TILES = 2  # a share is worth no less: joining it costs as much as a tile


@triton.jit
def _shares(length, window, splits, TILE: tl.constexpr, MIN_TILES: tl.constexpr):
    """First token that is seen, first tile, tiles of a share, shares that have any."""
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    first_tile = first // TILE
    tiles = tl.cdiv(length, TILE) - first_tile
    share = tl.maximum(tl.cdiv(tiles, splits), MIN_TILES)
    return first, first_tile, share, tl.cdiv(tiles, share)


@triton.jit(do_not_specialize=["window", "splits", "table_row"])
def _attend(
    qkv,
    pages,
    table,
    lengths,
    partial,
    weights,
    qkv_token,
    qkv_head,
    page_stride,
    kv_stride,
    head_stride,
    token_stride,
    table_row,
    scale,
    softcap,
    window,
    splits,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    CAPPED: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    first, first_tile, share, _ = _shares(length, window, splits, TILE, MIN_TILES)
    begin = first_tile + split * share
    end = tl.minimum(begin + share, tl.cdiv(length, TILE))

    member = tl.arange(0, PADDED_GROUP)
    at = tl.arange(0, PADDED)
    head = kv_head * GROUP + member
    mine = (member < GROUP)[:, None] & (at < DIM)[None, :]
    query = tl.load(qkv + row.to(tl.int64) * qkv_token + head[:, None] * qkv_head + at[None, :], mask=mine, other=0.0)
    best = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    found = tl.zeros([PADDED_GROUP, PADDED], tl.float32)
    for tile in range(begin, end):
        token = tile * TILE + tl.arange(0, TILE)
        seen = (token >= first) & (token < length)
        page = tl.load(table + row * table_row + tile * TILE // BLOCK_TOKENS).to(tl.int64)
        block = pages + page * page_stride + kv_head * head_stride
        inside = token % BLOCK_TOKENS * token_stride
        there = seen[None, :] & (at < DIM)[:, None]
        scores = scores_of(query, block + inside[None, :] + at[:, None], there, scale, softcap, CAPPED)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        values, there = block + kv_stride + inside[:, None] + at[None, :], seen[:, None] & (at < DIM)[None, :]
        best, total, found = fold(scores, values, there, best, total, found)

    # A share without tiles leaves nothing: the join does not look at it.
    total = tl.where(begin < end, total, 1.0)
    slot = (row * tl.num_programs(1) * GROUP + head) * splits + split
    mine = mine & (begin < end)
    tl.store(partial + slot[:, None] * DIM + at[None, :], found / total[:, None], mask=mine)
    tl.store(weights + slot, best + tl.log2(total), mask=(member < GROUP) & (begin < end))


@triton.jit(do_not_specialize=["window", "splits"])
def _join(
    partial,
    weights,
    lengths,
    out,
    out_row,
    window,
    splits,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    _, _, _, used = _shares(length, window, splits, TILE, MIN_TILES)
    split = tl.arange(0, MAX_SPLITS)
    at = tl.arange(0, PADDED)
    slot = (row * tl.num_programs(1) + head) * splits + split
    weight = tl.load(weights + slot, mask=split < used, other=float("-inf"))
    best = tl.where(used > 0, tl.max(weight, 0), 0.0)
    weight = tl.exp2(weight - best)
    total = tl.where(used > 0, tl.sum(weight, 0), 1.0)
    found = tl.load(
        partial + slot[:, None] * DIM + at[None, :], mask=(split < used)[:, None] & (at < DIM)[None, :], other=0.0
    )
    answer = tl.sum(found * weight[:, None], 0) / total
    tl.store(out + row.to(tl.int64) * out_row + head * DIM + at, answer.to(out.dtype.element_ty), mask=at < DIM)


def paged_decode(
    qkv: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    spec: AttentionSpec,
    partial: torch.Tensor,
    splits: int,
    out: torch.Tensor,
) -> None:
    """Fills `out [rows, H * D]`; a row of length 0 with zeros.

    `qkv [rows, H + 2K, D]`, of which only the queries are read; `pages [num_pages, 2, K, block_tokens, D]`; `table`
    int32 `[>= rows, width]`: the pages of each row; `lengths` `[>= rows]`: tokens that each row attends to, the last
    one its own. `partial`: float32 scratch of at least `scratch_elements(rows, H, D, splits)`; `splits` shares a row,
    at most MAX_SPLITS."""
    _, _, kv_heads, block_tokens, dim = pages.shape
    rows, heads = qkv.shape[0], qkv.shape[1] - 2 * kv_heads
    tiles = tiles_for(dim, pages.element_size(), block_tokens)
    found = rows * heads * splits * dim
    weights = partial[found:]
    _attend[(rows, kv_heads, splits)](
        qkv,
        pages,
        table,
        lengths,
        partial,
        weights,
        *qkv.stride()[:2],
        *pages.stride()[:4],
        table.stride(0),
        spec.scale,
        spec.softcap,
        spec.window,
        splits,
        GROUP=heads // kv_heads,
        PADDED_GROUP=power_of_two(heads // kv_heads),
        DIM=dim,
        PADDED=tiles.padded_dim,
        BLOCK_TOKENS=block_tokens,
        TILE=tiles.keys,
        MIN_TILES=MIN_TILES,
        CAPPED=spec.softcap > 0,
        num_warps=4,
        num_stages=2,
    )
    _join[(rows, heads)](
        partial,
        weights,
        lengths,
        out,
        out.stride(0),
        spec.window,
        splits,
        DIM=dim,
        PADDED=tiles.padded_dim,
        TILE=tiles.keys,
        MIN_TILES=MIN_TILES,
        MAX_SPLITS=MAX_SPLITS,
        num_warps=4,
    )


def scratch_elements(rows: int, heads: int, dim: int, splits: int) -> int:
    """float32 that `paged_decode` writes beside its answer."""
    return rows * heads * splits * (dim + 1)


def splits_for(rows: int, kv_heads: int, processors: int) -> int:
    """Shares of a row such that a launch has about two programs for each of the GPU's `processors`: a power of two."""
    wanted = -(-2 * processors // max(1, rows * kv_heads))
    return min(MAX_SPLITS, 1 << (wanted - 1).bit_length())
