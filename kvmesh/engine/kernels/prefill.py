"""Causal attention of chunks of prompts over their pages, prefix included.

A program takes up to `Variant.queries` tokens of one span and one query head, and walks over the tiles of keys that
any of them sees. K and V of the chunk itself are in the pages already (`write` comes first), so there is one source.
Tiles that every query sees whole, all but those at the diagonal and at a window's end, are walked without masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvmesh.engine.config import AttentionSpec
from kvmesh.engine.kernels.softmax import LOG2_E, fold, load_tile, scores_of
from kvmesh.engine.kernels.tiles import power_of_two, tiles_for


class Variant(NamedTuple):
    """How programs are cut. `keys`, a power of two, are the tokens of a K or V tile, which may span several pages;
    `stages` is how many tiles are held at a time; `folded`: scores are scaled in the exponent."""

    queries: int
    keys: int
    warps: int
    stages: int
    folded: bool = False


# What the check of a GPU measures beside what serves, for heads of 128 in two bytes and pages of 64 tokens. Two groups
# of four warps share 128 queries, so that one's products overlap the other's exponents; more stages hide longer loads.
# The last three need more shared memory than the smallest GPUs have.
CANDIDATES = (
    Variant(64, 64, 4, 2, folded=True),
    Variant(128, 64, 8, 2),
    Variant(128, 64, 8, 2, folded=True),
    Variant(128, 32, 8, 4, folded=True),
    Variant(64, 64, 4, 3, folded=True),
    Variant(128, 64, 8, 3, folded=True),
    Variant(128, 128, 8, 2),  # folded it spills
)


def usual(head_dim: int, itemsize: int, block_tokens: int) -> Variant:
    """Returns the variant that serves. float32 has no tensor cores at full precision: few queries."""
    return Variant(16 if itemsize > 2 else 64, tiles_for(head_dim, itemsize, block_tokens).keys, 4, 2)


LONG_CONTEXT = 8192  # tokens: with fewer, 128 queries a program leave processors without work


def for_long_contexts(head_dim: int, itemsize: int, block_tokens: int, capability: tuple[int, int]) -> Variant:
    """Returns the variant for spans that end behind LONG_CONTEXT tokens: on Hopper, whose shared memory holds three
    tiles, the fastest that an H200 was found to have, by 4 to 11% (docs/reports/cuda.md)."""
    if (head_dim, itemsize, capability) == (128, 2, (9, 0)) and block_tokens >= 64:
        return Variant(128, 64, 8, 3, folded=True)
    return usual(head_dim, itemsize, block_tokens)


@triton.jit
def pages_of_tile(table, tile, end, length, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr):
    """Returns the page of a tile, or of each token of a tile that is longer than a page; from tile `end` on any."""
    if TILE > BLOCK_TOKENS:
        token = tile * TILE + tl.arange(0, TILE)
        return tl.load(table + token // BLOCK_TOKENS, mask=token < length, other=0)
    else:
        return tl.load(table + tile * TILE // BLOCK_TOKENS, mask=tile < end, other=0)


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
    FOLDED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Walks tiles [begin, end) of the span whose pages `table` names, of the head at which `pages` begins. Without
    MASKED every query sees all of them."""
    at = tl.arange(0, PADDED)
    whole: tl.constexpr = (not MASKED) and (DIM == PADDED)
    # Looked up one tile ahead: loads whose address was itself loaded in the same turn are not pipelined.
    page = pages_of_tile(table, begin, end, length, BLOCK_TOKENS, TILE)
    for tile in range(begin, end):
        following = pages_of_tile(table, tile + 1, end, length, BLOCK_TOKENS, TILE)
        token = tile * TILE + tl.arange(0, TILE)
        there = token < length
        block = pages + page.to(tl.int64) * page_stride
        inside = token % BLOCK_TOKENS * token_stride
        keys = (block + inside)[None, :] + at[:, None] if TILE > BLOCK_TOKENS else block + inside[None, :] + at[:, None]
        mask = there[None, :] & (at < DIM)[:, None]
        if FOLDED:
            scores = tl.dot(query, load_tile(keys, mask, whole), input_precision="ieee")
        else:
            scores = scores_of(query, keys, mask, scale, softcap, CAPPED, whole)
        if MASKED:  # with a window, a query may see none of a tile that others see
            seen = (token[None, :] <= where[:, None]) & (token[None, :] >= oldest[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        if TILE > BLOCK_TOKENS:
            values = (block + kv_stride + inside)[:, None] + at[None, :]
        else:
            values = block + kv_stride + inside[:, None] + at[None, :]
        mask = there[:, None] & (at < DIM)[None, :]
        best, total, found = fold(scores, values, mask, best, total, found, whole, scale * LOG2_E, FOLDED)
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
    FOLDED: tl.constexpr,
    SINKS: tl.constexpr,
    CHUNKED: tl.constexpr,
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
    if CHUNKED:  # `window` is the chunk
        oldest = where // window * window

    best = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    found = tl.zeros([QUERIES, PADDED], tl.float32)
    # `mixed` is the first tile that some query sees in part.
    if CHUNKED:
        start = position // window * window
        begin = start // TILE
        alike = (start % TILE == 0) & (end - start <= window)  # all queries see the same from a tile's first token on
        mixed = tl.where(alike, (position + 1) // TILE, begin)
    else:
        begin = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0) // TILE
        mixed = tl.where(window > 0, begin, (position + 1) // TILE)
    pages += head // GROUP * head_stride
    table += span * table_row
    best, total, found = _walk(
        query, pages, table, begin, mixed, where, oldest, end, best, total, found, page_stride, kv_stride,
        token_stride, scale, softcap, DIM, PADDED, BLOCK_TOKENS, TILE, CAPPED, FOLDED, MASKED=False,
    )  # fmt: skip
    best, total, found = _walk(
        query, pages, table, mixed, tl.cdiv(end, TILE), where, oldest, end, best, total, found, page_stride,
        kv_stride, token_stride, scale, softcap, DIM, PADDED, BLOCK_TOKENS, TILE, CAPPED, FOLDED, MASKED=True,
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
    variant: Variant,
) -> None:
    """Fills `out [T, H * D]`: each row of a span attends to the tokens of its span's pages up to its own.

    `qkv [T, H + 2K, D]`, of which only the queries are read; `pages [num_pages, 2, K, block_tokens, D]`; `table` int32
    `[spans, width]`: the pages of each span; `work` as of `work_of(..., variant.queries)`, on the device."""
    sinks = spec.sinks
    _, _, kv_heads, block_tokens, dim = pages.shape
    heads = qkv.shape[1] - 2 * kv_heads
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
        spec.window or spec.chunk,
        GROUP=heads // kv_heads,
        DIM=dim,
        PADDED=power_of_two(dim),
        BLOCK_TOKENS=block_tokens,
        QUERIES=variant.queries,
        TILE=variant.keys,
        CAPPED=spec.softcap > 0,
        FOLDED=variant.folded and not spec.softcap,
        SINKS=sinks is not None,
        CHUNKED=spec.chunk > 0,
        num_warps=variant.warps,
        num_stages=variant.stages,
    )
