"""Latent attention of chunks of prompts over K and V that were written out for some heads and some of the context.

The context of a step's spans is gathered and multiplied out piece by piece into a workspace of fixed size
(`attention.triton_latent`); a program takes some tokens of one span and one head and walks over what it sees of the
piece. What it has found so far stands beside the workspace in float32, with the log of the sum of its exponentials:
the next piece goes on from there, so that memory is bound however long a context is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvmesh.engine.kernels.softmax import LOG2_E, load_tile, weigh
from kvmesh.engine.kernels.tiles import power_of_two

# Of an entry of the list of work: first query of the batch, its position, how many queries; the workspace's line of the
# piece's first token, which token that is, the end of what the queries see; what there was before, and what comes.
QUERY, POSITION, COUNT, LINE, BEGIN, END, GOES_ON, IS_LAST = range(8)
ENTRY = 8


class ExpandedVariant(NamedTuple):
    """How programs are cut: `queries` and `keys` are powers of two, `stages` the tiles held at a time."""

    queries: int
    keys: int
    warps: int
    stages: int


# What the check of a GPU measures beside `expanded_variant`, in two bytes.
CANDIDATES = (
    ExpandedVariant(64, 64, 4, 2),
    ExpandedVariant(128, 64, 8, 2),
    ExpandedVariant(128, 32, 8, 3),
)


def expanded_variant(itemsize: int, capability: tuple[int, int]) -> ExpandedVariant:
    """Returns the variant that serves. On an H200 64 queries a program were faster than 128, by 3 to 11%. One stage in
    two bytes: with more, tiles are copied beside the products, and an H200 answered wrongly from the second tile of 16
    tokens on and once read an address that was not there, which the same kernel without such copies does not
    (docs/reports/cuda.md; `tests/gpu/test_latent_chunks.py` asks each GPU again)."""
    if itemsize > 2:
        return ExpandedVariant(16, 16, 4, 2)
    if (9, 0) <= capability < (12, 0):
        return ExpandedVariant(64, 64, 4, 1)
    return ExpandedVariant(64, 32, 4, 1)


@triton.jit
def _walk(
    query,
    rope,
    lines,
    expanded,
    begin,
    end,
    where,
    first,
    last,
    best,
    total,
    found,
    row_stride,
    expanded_row,
    scale,
    NOPE: tl.constexpr,
    PADDED_NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Walks tiles [begin, end) of the piece whose first token is `first` and whose tokens behind `last` are others'.
    Without MASKED every query sees all of them."""
    at, turned, column = tl.arange(0, PADDED_NOPE), tl.arange(0, PADDED_ROPE), tl.arange(0, PADDED_VALUE)
    for tile in range(begin, end):
        inside = tile * TILE + tl.arange(0, TILE)
        token = first + inside
        seen = token < last
        keys = load_tile(
            expanded + inside[None, :] * expanded_row + at[:, None],
            seen[None, :] & (at < NOPE)[:, None],
            not MASKED and NOPE == PADDED_NOPE,
        )
        scores = tl.dot(query, keys, input_precision="ieee")
        shared = load_tile(
            lines + inside[None, :] * row_stride + turned[:, None],
            seen[None, :] & (turned < ROPE)[:, None],
            not MASKED and ROPE == PADDED_ROPE,
        )
        scores = tl.dot(rope, shared, scores, input_precision="ieee") * (scale * LOG2_E)
        if MASKED:
            scores = tl.where(seen[None, :] & (token[None, :] <= where[:, None]), scores, float("-inf"))
        best, fade, part = weigh(scores, best)
        values = load_tile(
            expanded + inside[:, None] * expanded_row + NOPE + column[None, :],
            seen[:, None] & (column < VALUE)[None, :],
            not MASKED and VALUE == PADDED_VALUE,
        )
        found = tl.dot(part.to(values.dtype), values, found * fade[:, None], input_precision="ieee")
        total = total * fade + tl.sum(part, 1)
    return best, total, found


@triton.jit
def _attend(
    qkv,
    lines,
    expanded,
    work,
    partial,
    weights,
    out,
    qkv_token,
    qkv_head,
    row_stride,
    expanded_row,
    out_row,
    heads,
    scale,
    NOPE: tl.constexpr,
    PADDED_NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    LATENT: tl.constexpr,
    VALUE: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
):
    work += tl.program_id(0) * 8
    head = tl.program_id(1)
    first_row, position, count, line = tl.load(work), tl.load(work + 1), tl.load(work + 2), tl.load(work + 3)
    first, last, goes_on, is_last = tl.load(work + 4), tl.load(work + 5), tl.load(work + 6), tl.load(work + 7)
    member = tl.arange(0, QUERIES)
    at, turned, column = tl.arange(0, PADDED_NOPE), tl.arange(0, PADDED_ROPE), tl.arange(0, PADDED_VALUE)
    row = (first_row + member).to(tl.int64)
    source = qkv + row[:, None] * qkv_token + head * qkv_head
    real = (member < count)[:, None]
    query = tl.load(source + at[None, :], mask=real & (at < NOPE)[None, :], other=0.0)
    rope = tl.load(source + NOPE + turned[None, :], mask=real & (turned < ROPE)[None, :], other=0.0)
    # Queries that fill up the tile see what the last one sees.
    where = position + tl.minimum(member, count - 1)
    place = row * heads + head
    kept = partial + place[:, None] * VALUE + column[None, :]
    mine = real & (column < VALUE)[None, :]
    before = goes_on != 0
    best = tl.load(weights + place, mask=(member < count) & before, other=float("-inf"))
    total = tl.where(best > float("-inf"), 1.0, 0.0)
    found = tl.load(kept, mask=mine & before, other=0.0)
    lines += line.to(tl.int64) * row_stride + LATENT
    expanded += line.to(tl.int64) * expanded_row + head * (NOPE + VALUE)
    mixed = tl.maximum(0, tl.minimum(last, position + 1) - first) // TILE  # the first tile that some query sees in part
    best, total, found = _walk(
        query, rope, lines, expanded, 0, mixed, where, first, last, best, total, found, row_stride, expanded_row,
        scale, NOPE, PADDED_NOPE, ROPE, PADDED_ROPE, VALUE, PADDED_VALUE, TILE, MASKED=False,
    )  # fmt: skip
    best, total, found = _walk(
        query, rope, lines, expanded, mixed, tl.cdiv(last - first, TILE), where, first, last, best, total, found,
        row_stride, expanded_row, scale, NOPE, PADDED_NOPE, ROPE, PADDED_ROPE, VALUE, PADDED_VALUE, TILE, MASKED=True,
    )  # fmt: skip
    # A query may have seen nothing so far: of a piece that begins behind it there is no entry, but others of its tile
    # may see the piece.
    answer = found / tl.where(total > 0, total, 1.0)[:, None]
    after = is_last == 0
    target = out + row[:, None] * out_row + head * VALUE + column[None, :]
    tl.store(target, answer.to(out.dtype.element_ty), mask=mine & (is_last != 0))
    tl.store(kept, answer, mask=mine & after)
    tl.store(weights + place, best + tl.log2(tl.where(total > 0, total, 1.0)), mask=(member < count) & after)


def latent_prefill(
    q: torch.Tensor,
    lines: torch.Tensor,
    expanded: torch.Tensor,
    work: torch.Tensor,
    state: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    sizes: tuple[int, int, int, int],
    variant: ExpandedVariant,
) -> None:
    """Goes on with the attention of some heads over one filling of the workspace.

    `q [T, H, nope + rope]` are all queries of these heads; `lines [n, latent + rope]` the gathered rows and `expanded
    [n, H * (nope + V)]` what the up-projection made of their latents, for each head keys before values; `work` int32
    `[programs, 8]` as the head of this file has it, no two entries of one query; `state` float32, `state_elements`;
    `out [T, H * V]`, rows of any stride, gets the answers of the entries that are a query's last. `sizes`: nope, rope,
    latent, V."""
    nope, rope, latent, value = sizes
    heads = q.shape[1]
    if not len(work) or not heads:
        return
    _attend[(len(work), heads)](
        q,
        lines,
        expanded,
        work,
        state,
        state[len(state) // (value + 1) * value :],
        out,
        *q.stride()[:2],
        lines.stride(0),
        expanded.stride(0),
        out.stride(0),
        heads,
        scale,
        NOPE=nope,
        PADDED_NOPE=power_of_two(nope),
        ROPE=rope,
        PADDED_ROPE=power_of_two(rope),
        LATENT=latent,
        VALUE=value,
        PADDED_VALUE=power_of_two(value),
        QUERIES=variant.queries,
        TILE=variant.keys,
        num_warps=variant.warps,
        num_stages=variant.stages,
    )


def state_elements(tokens: int, heads: int, value: int) -> int:
    """Returns how many float32 stand between two pieces, of so many queries of so many heads."""
    return tokens * heads * (value + 1)
