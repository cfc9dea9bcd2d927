"""Attention of one query token a row over its pages, or of the few rows of each request, cut by a list of work.

A program takes one KV head with all query heads that share it, and one share: some tiles of one row's context. The
host makes the list of shares anew for each step (`shares_of`), no longer than what lets the launch end early
(`longest_share`): one row of 64k tokens among many of 1k occupies the whole GPU, not one processor. A row of one share
is answered at once; what the shares of a longer row found is joined by a second kernel, weighted by the log of the sum
of its exponentials (flash-decoding). The list is data, of a length that depends on the number of rows alone, so that a
launch can be replayed from a CUDA graph.

With QUERIES above 1 a share is of a request, whose rows, up to QUERIES of them, follow each other and have their pages
in common. Their queries lie below each other in one product, so K and V are read once for all of them; each sees as
many tokens as its own length says. A request may have fewer rows: what is missing is padded within the program alone.
Its shares have a slot for each of its rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from kvmesh.engine.config import AttentionSpec
from kvmesh.engine.kernels.softmax import LOG2_E, fold, scores_of
from kvmesh.engine.kernels.tiles import power_of_two, tiles_for

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
# What a launch's time is made of, in tiles that a processor reads at its share of the bandwidth: fitted to an H200,
# where the choice was then within 8% of the best of ten lengths for each of 13 batches (docs/reports/cuda.md).
RESIDENT = 3  # programs that a processor holds at a time: what their tiles take of its shared memory
BUSY = 2.0  # programs a processor that draw all of its bandwidth
START, JOIN = 1.0, 8.0  # what a wave of programs takes to begin; the launch that joins
CROWDS = (1, 2, 3, 4, 5, 6)  # programs a processor that are considered; more cost more than they balance
ROW, BEGIN, END, SLOT = range(4)  # of an entry of the list: tiles [BEGIN, END) of ROW; SLOT -1: the row's only share
# Of a row: its first slot, how many shares it has and, of requests of several rows, how far its slots lie apart.
FIRST, COUNT, APART = range(3)
STAGES = 3
JOINED_AT_ONCE = 64
MOST_QUERIES = 8  # rows of a request that a program takes
MOST_PRODUCT_ROWS = 128  # queries of all heads that a program takes: what they find is kept in registers


@triton.jit(do_not_specialize=["window", "table_row"])
def _attend(
    qkv,
    pages,
    table,
    lengths,
    requests,
    work,
    sinks,
    partial,
    weights,
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
    PADDED_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    CHUNKED: tl.constexpr,
    QUERIES: tl.constexpr,
):
    work += tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    row, begin, end, slot = tl.load(work), tl.load(work + 1), tl.load(work + 2), tl.load(work + 3)
    if begin < end:
        member = tl.arange(0, PADDED_GROUP)
        at = tl.arange(0, PADDED)
        if QUERIES == 1:
            line, length, own = row, tl.load(lengths + row), member < GROUP
        else:  # `row` is a request; what belongs to each of its rows is a column, a row of the product for each head
            nth, member = member // GROUP, member % GROUP
            own = nth < tl.load(requests + row * 2 + 1)
            line = (tl.load(requests + row * 2) + nth)[:, None]
            length = tl.load(lengths + line, mask=own[:, None], other=0)
        first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
        if CHUNKED:  # `window` is the chunk
            first = (length - 1) // window * window
        if QUERIES > 1:
            lowest, highest = tl.min(tl.where(own[:, None], first, 2**30)), tl.max(length)
        head = kv_head * GROUP + member
        mine = own[:, None] & (at < DIM)[None, :]
        query = tl.load(qkv + line * qkv_token + head[:, None] * qkv_head + at[None, :], mask=mine, other=0.0)
        best = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
        total = tl.zeros([PADDED_GROUP], tl.float32)
        found = tl.zeros([PADDED_GROUP, PADDED], tl.float32)
        table += row * table_row
        # Looked up one tile ahead: loads whose address was itself loaded in the same turn are not pipelined.
        page = tl.load(table + begin * TILE // BLOCK_TOKENS)
        for tile in range(begin, end):
            following = tl.load(table + (tile + 1) * TILE // BLOCK_TOKENS, mask=tile + 1 < end, other=0)
            token = tile * TILE + tl.arange(0, TILE)
            if QUERIES == 1:
                known = (token >= first) & (token < length)
                seen = known[None, :]
            else:
                known = (token >= lowest) & (token < highest)  # by any of the rows
                seen = (token[None, :] >= first) & (token[None, :] < length)
            block = pages + page.to(tl.int64) * page_stride + kv_head * head_stride
            inside = token % BLOCK_TOKENS * token_stride
            there = known[None, :] & (at < DIM)[:, None]
            scores = scores_of(query, block + inside[None, :] + at[:, None], there, scale, softcap, CAPPED)
            scores = tl.where(seen, scores, float("-inf"))
            values, there = block + kv_stride + inside[:, None] + at[None, :], known[:, None] & (at < DIM)[None, :]
            best, total, found = fold(scores, values, there, best, total, found)
            page = following
        if QUERIES > 1:  # of a row that sees nothing of the share, which weighs 2 ** -inf
            total = tl.where(total > 0, total, 1.0)
        if slot < 0:
            if SINKS:
                sink = tl.load(sinks + head, mask=own, other=0.0) * LOG2_E
                total += tl.exp2(sink - best)
            answer = (found / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + line * out_row + head[:, None] * DIM + at[None, :], answer, mask=mine)
        else:
            if QUERIES == 1:
                place = slot * tl.num_programs(1) * GROUP + head
            else:
                place = (slot + nth) * tl.num_programs(1) * GROUP + head
            tl.store(partial + place[:, None] * DIM + at[None, :], found / total[:, None], mask=mine)
            tl.store(weights + place, best + tl.log2(total), mask=own)


@triton.jit
def _join(
    partial,
    weights,
    joins,
    sinks,
    out,
    lse,
    out_row,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SINKS: tl.constexpr,
    PARTS: tl.constexpr,
    SEVERAL: tl.constexpr,
):
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    if SEVERAL:  # a request has several rows
        joins += row * 3
        apart = tl.load(joins + 2)
    else:
        joins += row * 2
        apart = 1
    first, count = tl.load(joins), tl.load(joins + 1)
    if PARTS or count != 1:
        at = tl.arange(0, PADDED)
        best = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        found = tl.zeros([PADDED], tl.float32)
        for start in range(0, count, AT_ONCE):
            share = start + tl.arange(0, AT_ONCE)
            place = (first + share * apart) * heads + head
            weight = tl.load(weights + place, mask=share < count, other=float("-inf"))
            there = (share < count)[:, None] & (at < DIM)[None, :]
            values = tl.load(partial + place[:, None] * DIM + at[None, :], mask=there, other=0.0)
            higher = tl.maximum(best, tl.max(weight, 0))
            base = tl.where(higher == float("-inf"), 0.0, higher) if SEVERAL else higher  # shares may weigh nothing
            fade, part = tl.exp2(best - base), tl.exp2(weight - base)
            total = total * fade + tl.sum(part, 0)
            found = found * fade + tl.sum(values * part[:, None], 0)
            best = higher
        if PARTS:  # of no tokens: minus infinity
            tl.store(lse + row * heads + head + tl.arange(0, 1), (best + tl.log2(total)) / LOG2_E)
        if SINKS:
            total += tl.where(count > 0, tl.exp2(tl.load(sinks + head) * LOG2_E - best), 0.0)
        # A row without shares stands for nobody: zeros.
        answer = tl.where(count > 0, found / tl.where(total > 0, total, 1.0), 0.0)
        tl.store(out + row * out_row + head * DIM + at, answer.to(out.dtype.element_ty), mask=at < DIM)


def tiles_of(lengths: Longs, window: int, tile: int, chunk: int = 0) -> tuple[Longs, Longs]:
    """Returns, for rows that attend to `lengths` tokens of which they see the last `window` (0: all), or those since
    the last multiple of `chunk` (0: all), the first tile of `tile` tokens that each sees, and how many tiles it
    sees."""
    first = np.maximum(lengths - window, 0) // tile if window else np.zeros_like(lengths)
    if chunk:
        first = np.maximum(lengths - 1, 0) // chunk * chunk // tile
    return first, -(-lengths // tile) - first


def longest_share(tiles: Longs, kv_heads: int, processors: int, resident: int = RESIDENT) -> int:
    """Returns how many tiles the longest share should have so that the launch ends first, among a few candidates.
    `kv_heads` are the programs of a share.

    Programs run in waves of `resident` a processor; while a wave runs, each has an equal part of the bandwidth. So a
    last wave of few programs, and a share that is longer than the others, run on after the bandwidth was full."""
    busy = min(BUSY, resident)
    total, most = int(tiles.sum()), int(tiles.max(initial=1))
    times = {}
    for wanted in {most, *(-(-total * kv_heads // (processors * crowd)) for crowd in CROWDS)}:
        longest = min(most, max(1, wanted))
        counts = -(-tiles // longest)
        programs = max(1, int(counts.sum())) * kv_heads / processors
        mean = total * kv_heads / processors / programs
        waves = int(programs / resident)
        rest = programs - waves * resident
        time = mean * (waves * resident + (max(rest, busy) if rest else 0))
        time += busy * max(0.0, longest - time / min(programs, resident))
        time += START * (waves + (rest > 0)) + (JOIN if longest < most else 0.0)
        times[longest] = time
    return min(times, key=lambda longest: (times[longest], -longest))


def most_shares(rows: int, kv_heads: int, processors: int) -> int:
    """Returns how many entries the list of so many rows has at most."""
    return -(-processors * CROWDS[-1] // kv_heads) + rows


def request_tiles_of(lengths: Longs, counts: Longs, window: int, tile: int, chunk: int = 0) -> tuple[Longs, Longs]:
    """Returns what `tiles_of` does for requests: request i has the next `counts[i]` of the rows, whose lengths do not
    fall."""
    ends = np.cumsum(counts)
    first, _ = tiles_of(lengths[ends - counts], window, tile, chunk)
    return first, -(-lengths[ends - 1] // tile) - first


def requests_of(counts: Longs, most: int) -> Longs:
    """Returns how many rows the requests of a list of work have, no more than `most`: one of more rows is several
    requests over the same pages."""
    parts = -(-counts // most)
    split = np.full(int(parts.sum()), most, dtype=np.int64)
    ends = np.cumsum(parts)
    split[ends - 1] = counts - (parts - 1) * most
    return split


def shares_of(
    lengths: Longs,
    window: int,
    tile: int,
    longest: int,
    chunk: int = 0,
    all_joined: bool = False,
    requests: Longs | None = None,
) -> tuple[Ints, Ints]:
    """Returns the list of work int32 `[shares, 4]`, the longest first, and FIRST and COUNT of each row, int32 `[rows,
    2]`. No share is longer than `longest` tiles; with `all_joined` a row's only share has a slot as well; the other
    arguments are those of `tiles_of`. With `requests`, the rows of each, the work is that of requests, and rows have
    APART as well."""
    if requests is None:
        apart: Longs | int = 1
        first, tiles = tiles_of(lengths, window, tile, chunk)
    else:
        apart = requests
        first, tiles = request_tiles_of(lengths, requests, window, tile, chunk)
    counts = -(-tiles // longest)
    ends = np.cumsum(counts * apart)
    slots = ends - counts * apart
    rows = np.repeat(np.arange(len(tiles)), counts)
    nth = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    begin, end = (first[rows] + tiles[rows] * n // counts[rows] for n in (nth, nth + 1))
    own = slots[rows] + nth * (1 if requests is None else requests[rows])
    work = np.stack((rows, begin, end, np.where((counts[rows] > 1) | all_joined, own, -1)), 1)
    order = np.argsort(begin - end, kind="stable")
    if requests is None:
        joins = np.stack((slots, counts), 1)
    else:
        of = np.repeat(np.arange(len(requests)), requests)
        offset = np.arange(len(of)) - (np.cumsum(requests) - requests)[of]
        joins = np.stack((slots[of] + offset, counts[of], requests[of]), 1)
    return work[order].astype(np.int32), joins.astype(np.int32)


def queries_for(rows: int, group: int) -> int:
    """Returns how many rows of a request a program takes, a power of two, where requests have up to so many and `group`
    query heads share a KV head."""
    most = max(1, min(MOST_QUERIES, MOST_PRODUCT_ROWS // group))
    return min(1 << (rows - 1).bit_length(), 1 << (most.bit_length() - 1))


def warps_for(padded_group: int) -> int:
    """Returns the warps of a program of so many rows of a product."""
    return 4 if padded_group <= 64 else 8


def paged_decode(
    qkv: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    work: torch.Tensor,
    joins: torch.Tensor | None,
    spec: AttentionSpec,
    scratch: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    requests: torch.Tensor | None = None,
    queries: int = 1,
) -> None:
    """Fills `out [rows, H * D]`; a row of length 0 with zeros. Where it is given, `lse`, float32 `[rows, H]`, gets the
    log of the sum of each row's weights: then every share has a slot (`shares_of`), and there are no sinks.

    `qkv [rows, H + 2K, D]`, of which only the queries are read and may be there alone; `pages [num_pages, 2, K,
    block_tokens, D]`; `table` int32 `[>= rows, width]`: the pages of each row; `lengths` int32 `[>= rows]`: tokens that
    each row attends to, the last one its own. `work [entries, 4]` and `joins [>= rows, 2]` are `shares_of` for these
    lengths, tiles of `tiles_for(...).keys` and the spec's window or chunk; entries that begin where they end are none.
    `joins` None: no row has other than one share. `scratch`: float32, `scratch_elements` of the slots.

    With `queries` above 1, `requests`, int32 `[requests, 2]`, has the first row of each request and how many it has, at
    most so many; `table` has a row for each of these, and the list of work is theirs."""
    sinks = spec.sinks
    _, _, kv_heads, block_tokens, dim = pages.shape
    heads = out.shape[1] // dim
    tiles = tiles_for(dim, pages.element_size(), block_tokens)
    weights = scratch[len(scratch) // (dim + 1) * dim :]
    padded = power_of_two(heads // kv_heads * queries)
    _attend[(len(work), kv_heads)](
        qkv,
        pages,
        table,
        lengths,
        requests,
        work,
        sinks,
        scratch,
        weights,
        out,
        *qkv.stride()[:2],
        *pages.stride()[:4],
        table.stride(0),
        out.stride(0),
        spec.scale,
        spec.softcap,
        spec.window or spec.chunk,
        GROUP=heads // kv_heads,
        PADDED_GROUP=padded,
        DIM=dim,
        PADDED=tiles.padded_dim,
        BLOCK_TOKENS=block_tokens,
        TILE=tiles.keys,
        CAPPED=spec.softcap > 0,
        SINKS=sinks is not None,
        CHUNKED=spec.chunk > 0,
        QUERIES=queries,
        num_warps=warps_for(padded),
        num_stages=STAGES,
    )
    if joins is not None:
        join_shares(scratch, weights, joins, sinks, out, dim, lse=lse)


def join_shares(
    partial: torch.Tensor,
    weights: torch.Tensor,
    joins: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    dim: int,
    at_once: int = JOINED_AT_ONCE,
    lse: torch.Tensor | None = None,
) -> None:
    """Fills those rows of `out [rows, H * dim]` that have other than one share (with `lse`: all rows), `at_once` shares
    at a time; the other arguments are those of `paged_decode`."""
    rows, heads = len(out), out.shape[1] // dim
    _join[(rows, heads)](
        partial,
        weights,
        joins,
        sinks,
        out,
        lse,
        out.stride(0),
        DIM=dim,
        PADDED=power_of_two(dim),
        AT_ONCE=at_once,
        SINKS=sinks is not None,
        PARTS=lse is not None,
        SEVERAL=joins.shape[1] > 2,
        num_warps=4,
    )


def scratch_elements(slots: int, heads: int, dim: int) -> int:
    """Returns how many float32 `paged_decode` writes beside its answer: what each share found, and its weight."""
    return slots * heads * (dim + 1)
