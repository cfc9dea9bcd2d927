"""Causal attention of chunks of prompts over their pages, prefix included.

A program takes up to `Tiles.queries` tokens of one span and one query head, and walks over the tiles of keys that any
of them sees. K and V of the chunk itself are in the pages already (`write` comes first), so there is one source.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from kvmesh.engine.config import AttentionSpec
from kvmesh.engine.kernels.softmax import LOG2_E, fold, scores_of
from kvmesh.engine.kernels.tiles import tiles_for

STAGES = 2


@triton.jit
def _walk(
    query,
    pages,
    table,
    begin,
    end,
    where,
    oldest,
    length,
    best,
    total,
    found,
    page_stride,
    kv_stride,
    token_stride,
    scale,
    softcap,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Walks tiles [begin, end) of the span whose pages `table` names, of the head at which `pages` begins. Without
    MASKED every query sees all of them."""
    at = tl.arange(0, PADDED)
    whole: tl.constexpr = (not MASKED) and (DIM == PADDED)
    # Looked up one tile ahead: loads whose address was itself loaded in the same turn are not pipelined.
    page = tl.load(table + begin * TILE // BLOCK_TOKENS, mask=begin < end, other=0)
    for tile in range(begin, end):
        following = tl.load(table + (tile + 1) * TILE // BLOCK_TOKENS, mask=tile + 1 < end, other=0)
        token = tile * TILE + tl.arange(0, TILE)
        there = token < length
        block = pages + page.to(tl.int64) * page_stride
        inside = token % BLOCK_TOKENS * token_stride
        keys, mask = block + inside[None, :] + at[:, None], there[None, :] & (at < DIM)[:, None]
        scores = scores_of(query, keys, mask, scale, softcap, CAPPED, whole)
        if MASKED:  # with a window, a query may see none of a tile that others see
            seen = (token[None, :] <= where[:, None]) & (token[None, :] >= oldest[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        values, mask = block + kv_stride + inside[:, None] + at[None, :], there[:, None] & (at < DIM)[None, :]
        best, total, found = fold(scores, values, mask, best, total, found, whole)
        page = following
    return best, total, found


@triton.jit(do_not_specialize=["window", "table_row"])
def _attend(
    qkv,
    pages,
    table,
    work,
    sinks,
    out,
    qkv_token,
    qkv_head,
    page_stride,
    kv_stride,
    head_stride,
    token_stride,
    table_row,
    out_row,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):
    work += tl.program_id(0) * 4
    head = tl.program_id(1)
    first_row, position, count, span = tl.load(work), tl.load(work + 1), tl.load(work + 2), tl.load(work + 3)
    end = position + count

    member = tl.arange(0, QUERIES)
    at = tl.arange(0, PADDED)
    mine = (member < count)[:, None] & (at < DIM)[None, :]
    row = (first_row + member).to(tl.int64)
    query = tl.load(qkv + row[:, None] * qkv_token + head * qkv_head + at[None, :], mask=mine, other=0.0)
    where = position + member
    # Queries that fill up the tile see what the first one sees: a row that sees nothing would have no best score.
    where = tl.where(member < count, where, position)
    oldest = tl.where(window > 0, where - window + 1, 0)

    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    found = tl.zeros([QUERIES, PADDED], tl.float32)
    begin = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0) // TILE
    mixed = tl.where(window > 0, begin, (position + 1) // TILE)  # the first tile that some query sees in part
    pages += head // GROUP * head_stride
    table += span * table_row
    best, total, found = _walk(
        query, pages, table, begin, mixed, where, oldest, end, best, total, found, page_stride, kv_stride,
        token_stride, scale, softcap, DIM, PADDED, BLOCK_TOKENS, TILE, CAPPED, MASKED=False,
    )  # fmt: skip
    best, total, found = _walk(
        query, pages, table, mixed, tl.cdiv(end, TILE), where, oldest, end, best, total, found, page_stride,
        kv_stride, token_stride, scale, softcap, DIM, PADDED, BLOCK_TOKENS, TILE, CAPPED, MASKED=True,
    )  # fmt: skip
    if SINKS:
        total += tl.exp2(tl.load(sinks + head) * LOG2_E - best)
    answer = (found / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + row[:, None] * out_row + head * DIM + at[None, :], answer, mask=mine)


def work_of(spans: Sequence[tuple[int, int]], queries: int) -> np.ndarray:
    """Returns the list of work int32 `[programs, 4]`: first row of the batch, its position, how many rows, which span.
    `spans` are (start, length) of each, whose rows follow each other; a program has at most `queries` rows."""
    work = []
    row = 0
    for span, (start, length) in enumerate(spans):
        for at in range(0, length, queries):
            work.append((row + at, start + at, min(queries, length - at), span))
        row += length
    return np.array(work, dtype=np.int32).reshape(-1, 4)


def paged_prefill(
    qkv: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    work: torch.Tensor,
    spec: AttentionSpec,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """Fills `out [T, H * D]`: each row of a span attends to the tokens of its span's pages up to its own.

    `qkv [T, H + 2K, D]`, of which only the queries are read; `pages [num_pages, 2, K, block_tokens, D]`; `table` int32
    `[spans, width]`: the pages of each span; `work` as of `work_of(..., tiles_for(...).queries)`, on the device;
    `sinks` as for `paged_decode`."""
    _, _, kv_heads, block_tokens, dim = pages.shape
    heads = qkv.shape[1] - 2 * kv_heads
    tiles = tiles_for(dim, pages.element_size(), block_tokens)
    if not len(work):
        return
    _attend[(len(work), heads)](
        qkv,
        pages,
        table,
        work,
        sinks,
        out,
        *qkv.stride()[:2],
        *pages.stride()[:4],
        table.stride(0),
        out.stride(0),
        spec.scale,
        spec.softcap,
        spec.window,
        GROUP=heads // kv_heads,
        DIM=dim,
        PADDED=tiles.padded_dim,
        BLOCK_TOKENS=block_tokens,
        QUERIES=tiles.queries,
        TILE=tiles.keys,
        CAPPED=spec.softcap > 0,
        SINKS=sinks is not None,
        num_warps=tiles.warps,
        num_stages=STAGES,
    )
