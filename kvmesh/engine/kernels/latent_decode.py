"""Latent attention of one query token a row over its pages, absorbed: heads share rows whose first columns are the
values as well.

A program takes one share of a row's context, as the host's list has it (`kernels.decode.shares_of`), and a tile of
heads, which are the rows of its products. A tile of latents is read once: it is the keys of the first product and the
values of the second, from the same bytes of shared memory. What the shares of a row found is joined by
`kernels.decode`. The sizes of programs follow the GPU (`variant_for`): at 512 + 64 columns none may spill.

Rows of queries and tables may differ: `owners` names the row of the table that each query reads, so that the tokens of
one chunk share one. With QUERIES above 1 a share is of a request, as in `kernels.decode`: the heads of all its rows lie
below each other, and a program takes a tile of these.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvmesh.engine.kernels.decode import join_shares
from kvmesh.engine.kernels.prefill import pages_of_tile
from kvmesh.engine.kernels.softmax import LOG2_E, weigh
from kvmesh.engine.kernels.tiles import MIN_TILE, power_of_two

JOINED_AT_ONCE = 16
SMALL_SHARED, LARGE_SHARED = 99 << 10, 227 << 10  # bytes that a program may take on the smallest GPUs, and on Hopper


class LatentVariant(NamedTuple):
    """How programs are cut. `heads` and `keys`, powers of two, are a program's heads and the tokens of its tile, which
    may span several pages; `stages`: tiles held at a time; `resident`: programs that a processor holds."""

    heads: int
    keys: int
    warps: int
    stages: int
    resident: int


# What the check of a GPU measures beside `variant_for`, of 64 heads and more in two bytes.
CANDIDATES = (
    LatentVariant(64, 32, 8, 3, 1),
    LatentVariant(32, 32, 8, 4, 1),
    LatentVariant(16, 32, 4, 3, 2),
    LatentVariant(16, 64, 4, 3, 1),
)


def variant_for(heads: int, latent: int, itemsize: int, capability: tuple[int, int]) -> LatentVariant:
    """Returns the variant that serves so many heads of a rank.

    Hopper multiplies 64 heads at a time, whose sums fill 128 registers of 256 threads each, and 16 by the older
    instruction: such batches wait for memory, and padded heads would not. An H200 reads 16 heads' rows faster in tiles
    of 64 tokens than of 32, 68% of a copy's rate and not 59, and computes 32 of 128 heads more slowly at a time than
    16. Blackwell's products take more shared memory than two tiles of 64 heads leave, so it has 32; GPUs of less
    shared memory have 16. float32, which nobody serves, has no tensor cores at full precision: small tiles."""
    padded = power_of_two(latent)
    if itemsize > 2:
        return LatentVariant(16, MIN_TILE, 8, 2, 1)
    major, minor = capability
    if (major, minor) == (9, 0):
        return LatentVariant(16, 64, 4, 3, 1) if heads <= 32 else LatentVariant(64, 32, 8, 4, 1)
    if major < 9 or (major, minor) >= (12, 0) or heads <= 16:  # of 12.x, too, a processor has 100 KiB
        return LatentVariant(16, 32, 4, 3, 2 if padded > 256 else 3)
    return LatentVariant(32, 32, 8, 3, 1)


@triton.jit(do_not_specialize=["table_row"])
def _attend(
    absorbed,
    rotated,
    pages,
    table,
    owners,
    lengths,
    requests,
    work,
    partial,
    weights,
    out,
    absorbed_token,
    absorbed_head,
    rotated_token,
    rotated_head,
    page_stride,
    token_stride,
    table_row,
    out_row,
    scale,
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    LATENT: tl.constexpr,
    PADDED: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    OWNED: tl.constexpr,
    QUERIES: tl.constexpr,
):
    # Programs of one share follow each other: what the first reads the others find in the cache.
    head = tl.program_id(0) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    work += tl.program_id(1) * 4
    row, begin, end, slot = tl.load(work), tl.load(work + 1), tl.load(work + 2), tl.load(work + 3)
    if QUERIES > 1:  # a tile may be of rows that the request does not have
        first, rows = tl.load(requests + row * 2), tl.load(requests + row * 2 + 1)
        end = tl.where(tl.program_id(0) * HEAD_TILE < rows * HEADS, end, begin)
    if begin < end:
        if QUERIES == 1:
            length = tl.load(lengths + row)
            highest = length
            member, own, asked = head, head < HEADS, row
        else:  # what belongs to each row of the request is a column
            nth, member = head // HEADS, head % HEADS
            own = nth < rows
            asked = (first + nth)[:, None]
            length = tl.load(lengths + asked, mask=own[:, None], other=0)
            highest = tl.max(length)
        owner = row
        if OWNED:
            owner = tl.load(owners + row)
        far = asked.to(tl.int64)
        at = tl.arange(0, PADDED)
        turned = tl.arange(0, PADDED_ROPE)
        mine = own[:, None] & (at < LATENT)[None, :]
        also = own[:, None] & (turned < ROPE)[None, :]
        of_row, turned_of_row = absorbed + far * absorbed_token, rotated + far * rotated_token
        query = tl.load(of_row + member[:, None] * absorbed_head + at[None, :], mask=mine, other=0.0)
        rope = tl.load(turned_of_row + member[:, None] * rotated_head + turned[None, :], mask=also, other=0.0)
        best = tl.full([HEAD_TILE], float("-inf"), tl.float32)
        total = tl.zeros([HEAD_TILE], tl.float32)
        found = tl.zeros([HEAD_TILE, PADDED], tl.float32)
        table += owner * table_row
        # Looked up one tile ahead: loads whose address was itself loaded in the same turn are not pipelined.
        page = pages_of_tile(table, begin, end, highest, BLOCK_TOKENS, TILE)
        for tile in range(begin, end):
            following = pages_of_tile(table, tile + 1, end, highest, BLOCK_TOKENS, TILE)
            token = tile * TILE + tl.arange(0, TILE)
            known = token < highest
            line = pages + page.to(tl.int64) * page_stride + token % BLOCK_TOKENS * token_stride
            there = known[:, None] & (at < LATENT)[None, :]
            latents = tl.load(line[:, None] + at[None, :], mask=there, other=0.0)
            there = known[:, None] & (turned < ROPE)[None, :]
            shared = tl.load(line[:, None] + LATENT + turned[None, :], mask=there, other=0.0)
            scores = tl.dot(query, tl.trans(latents), input_precision="ieee")
            scores = tl.dot(rope, tl.trans(shared), scores, input_precision="ieee")
            seen = known[None, :] if QUERIES == 1 else token[None, :] < length
            scores = tl.where(seen, scores * (scale * LOG2_E), float("-inf"))
            best, fade, part = weigh(scores, best, QUERIES == 1)  # a row sees its share's first token
            found = tl.dot(part.to(latents.dtype), latents, found * fade[:, None], input_precision="ieee")
            total = total * fade + tl.sum(part, 1)
            page = following
        if QUERIES > 1:  # of a row that sees nothing of the share, which weighs 2 ** -inf
            total = tl.where(total > 0, total, 1.0)
        if slot < 0:
            answer = (found / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + far * out_row + member[:, None] * LATENT + at[None, :], answer, mask=mine)
        else:
            place = slot.to(tl.int64) * HEADS + head  # the slots of a request's rows follow each other as `head` does
            tl.store(partial + place[:, None] * LATENT + at[None, :], found / total[:, None], mask=mine)
            tl.store(weights + place, best + tl.log2(total), mask=own)


def head_tiles(heads: int, variant: LatentVariant) -> int:
    """Returns how many programs a share has, of so many heads of all rows that it is of."""
    return -(-heads // variant.heads)


def latent_decode(
    absorbed: torch.Tensor,
    rotated: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    owners: torch.Tensor | None,
    lengths: torch.Tensor,
    work: torch.Tensor,
    joins: torch.Tensor | None,
    scale: float,
    scratch: torch.Tensor,
    out: torch.Tensor,
    variant: LatentVariant,
    lse: torch.Tensor | None = None,
    requests: torch.Tensor | None = None,
    queries: int = 1,
) -> None:
    """Fills `out [T, H, latent]`, contiguous, with means of latents; a row of length 0 with zeros; `lse` as of
    `kernels.decode.paged_decode`.

    `absorbed [T, H, latent]` and `rotated [T, H, rope]` are the two parts of the absorbed queries, dense along their
    last axes; `pages [num_pages, block_tokens, latent + rope]`; `table` int32 `[>= rows, width]`: the pages of each row
    of `owners`, int32 `[T]`, or of each query where that is None; `lengths` int32 `[>= T]`: tokens that each query
    attends to. `work`, `joins` and `scratch` are those of `kernels.decode.paged_decode`, for tiles of `variant.keys`
    and answers of `latent` columns, as are `requests` and `queries`: with these `owners` are the requests', and
    `variant` is that of so many times the heads."""
    tokens, heads, latent = absorbed.shape
    rope, block_tokens = rotated.shape[-1], pages.shape[1]
    if not len(work) or not heads:
        return
    weights = scratch[len(scratch) // (latent + 1) * latent :]
    _attend[(head_tiles(heads * queries, variant), len(work))](
        absorbed,
        rotated,
        pages,
        table,
        owners,
        lengths,
        requests,
        work,
        scratch,
        weights,
        out,
        *absorbed.stride()[:2],
        *rotated.stride()[:2],
        *pages.stride()[:2],
        table.stride(0),
        out.stride(0),
        scale,
        HEADS=heads,
        HEAD_TILE=variant.heads,
        LATENT=latent,
        PADDED=power_of_two(latent),
        ROPE=rope,
        PADDED_ROPE=power_of_two(rope),
        BLOCK_TOKENS=block_tokens,
        TILE=variant.keys,
        OWNED=owners is not None,
        QUERIES=queries,
        num_warps=variant.warps,
        num_stages=variant.stages,
    )
    if joins is not None:
        join_shares(scratch, weights, joins, None, out.view(tokens, heads * latent), latent, JOINED_AT_ONCE, lse)
