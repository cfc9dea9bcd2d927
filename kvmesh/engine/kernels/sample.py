"""Tokens drawn from logits at a temperature: the definition of `kvmesh.engine.sampler`, without a float64 copy of the
logits. A weight is exp((logit - best) / temperature) in float64, computed from the logits twice: weights are summed by
chunks, then the chunk that the noise falls into is looked through. min_p leaves weights out.

What top_k and top_p leave is found without a sort, as one number a row (`cut`): the weights, which lie in [0, 1], are
parted at 31 thresholds, and what reaches each is counted (top_k) or summed (top_p) by chunks; the same once more
between the two thresholds where the limit is crossed, a sixteenth of a power of two apart then. What lies between the
next two is gathered by one program a row and halved until one weight is left. Sums are taken in an order that does not
change: no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048  # logits of a chunk
SPREAD = 4096  # of a chunk while a cut is looked for, and
GATHER = 4096  # of those that one program goes through in turn
WAYS = tl.constexpr(32)  # parts that a range of weights is parted into
ONE = tl.constexpr(0x3FF0000000000000)  # 1.0, as integers of the same order as the float64 that are not negative
LEAST = tl.constexpr(0x3FF0000000000000 - (64 << 52))  # 2**-64: what is smaller is one part at first


@triton.jit
def _weights(x, i, vocab, best, temperature, min_p):
    weight = tl.where(i < vocab, tl.exp((x.to(tl.float64) - best) / temperature), 0.0)
    return tl.where(weight >= min_p, weight, 0.0)


@triton.jit(do_not_specialize=["vocab"])
def _sum(logits, rows, best, temperature, min_p, sums, row_stride, vocab, SIZE: tl.constexpr):
    at, chunk = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + at)
    i = chunk * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits + row * row_stride + i, mask=i < vocab, other=float("-inf"))
    high, heat, least = tl.load(best + row).to(tl.float64), tl.load(temperature + at), tl.load(min_p + at)
    weight = _weights(x, i, vocab, high, heat, least)
    tl.store(sums + at * tl.num_programs(1) + chunk, tl.sum(weight, 0))


@triton.jit(do_not_specialize=["vocab", "chunks"], do_not_specialize_on_alignment=["noise"])
def _pick(
    logits,
    rows,
    best,
    temperature,
    min_p,
    sums,
    noise,
    tokens,
    row_stride,
    vocab,
    chunks,
    SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    at = tl.program_id(0)
    row = tl.load(rows + at)
    chunk = tl.arange(0, CHUNKS)
    reached = tl.cumsum(tl.load(sums + at * chunks + chunk, mask=chunk < chunks, other=0.0), 0)
    # Noise is at most 1 - 2**-53, times which every number is rounded to a smaller one: some chunk is beyond it.
    target = tl.load(noise + at) * tl.max(reached, 0)
    which = tl.minimum(tl.sum((reached <= target).to(tl.int32), 0), chunks - 1)
    before = tl.max(tl.where(chunk < which, reached, 0.0), 0)
    place = tl.arange(0, SIZE)
    i = which * SIZE + place
    x = tl.load(logits + row * row_stride + i, mask=i < vocab, other=float("-inf"))
    high, heat, least = tl.load(best + row).to(tl.float64), tl.load(temperature + at), tl.load(min_p + at)
    weight = _weights(x, i, vocab, high, heat, least)
    hit = tl.sum((before + tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
    # Sums in another order may fall short by a rounding: the last token that has a weight, then.
    last = tl.max(tl.where(weight > 0.0, place, 0), 0)
    tl.store(tokens + at, (which * SIZE + tl.minimum(hit, last)).to(tl.int64))


def draw(
    logits: torch.Tensor,
    rows: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    noise: torch.Tensor,
) -> torch.Tensor:
    """Returns int64 `[len(rows)]`: a token of each of the `rows` (int64) of `logits` float32 `[all rows, vocab]`, whose
    greatest are `best [all rows]`; `temperature`, `min_p` and `noise` are float64 `[len(rows)]`. Rows whose best logit
    is not finite get some token."""
    count, vocab = len(rows), logits.shape[-1]
    chunks = -(-vocab // BLOCK)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    sums = torch.empty(count, chunks, dtype=torch.float64, device=logits.device)
    given = (logits, rows, best, temperature, min_p, sums)
    _sum[(count, chunks)](*given, logits.stride(0), vocab, SIZE=BLOCK, num_warps=4)
    size = triton.next_power_of_2(chunks)
    _pick[(count,)](*given, noise, tokens, logits.stride(0), vocab, chunks, SIZE=BLOCK, CHUNKS=size, num_warps=4)
    return tokens


@triton.jit
def _range(ranges, at, FIRST: tl.constexpr):
    """Returns a row's range of weights, as integers; `ranges` is not written yet the first time."""
    if FIRST:
        low, high = tl.full((), LEAST, tl.int64), tl.full((), ONE + 1, tl.int64)
    else:
        low, high = tl.load(ranges + 2 * at), tl.load(ranges + 2 * at + 1)
    return low, high


@triton.jit
def _edge(low, high, part, FIRST: tl.constexpr):
    """Returns the least weight, as an integer, of a part of [low, high); the first time, part 0 begins at 0."""
    edge = low + (high - low + WAYS - 1) // WAYS * part
    if FIRST:
        edge = tl.where(part == 0, 0, edge)
    return edge


@triton.jit
def _kept(logits, rows, best, temperature, least, at, i, row_stride, vocab):
    """Returns weights of one row; -1 for those below the row's `least`, and past the vocabulary."""
    row = tl.load(rows + at)
    x = tl.load(logits + row * row_stride + i, mask=i < vocab, other=float("-inf"))
    high, heat = tl.load(best + row).to(tl.float64), tl.load(temperature + at)
    weight = tl.exp((x.to(tl.float64) - high) / heat)
    return tl.where((i < vocab) & (weight >= tl.load(least + at)), weight, -1.0)


@triton.jit(do_not_specialize=["vocab"])
def _spread(
    logits,
    rows,
    best,
    temperature,
    least,
    ranges,
    sums,
    row_stride,
    vocab,
    COUNTS: tl.constexpr,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Counts or sums what reaches each part's edge, of one chunk of one row."""
    at, chunk = tl.program_id(0), tl.program_id(1)
    i = chunk * SIZE + tl.arange(0, SIZE)
    weight = _kept(logits, rows, best, temperature, least, at, i, row_stride, vocab)
    low, high = _range(ranges, at, FIRST)
    base = sums + (at * tl.num_programs(1) + chunk) * WAYS
    for part in range(WAYS):
        edge = _edge(low, high, part, FIRST).to(tl.float64, bitcast=True)
        held = 1.0 if COUNTS else weight
        tl.store(base + part, tl.sum(tl.where(weight >= edge, held, 0.0), 0))


@triton.jit(do_not_specialize=["vocab", "chunks"])
def _narrow(
    limits,
    ranges,
    sums,
    goals,
    befores,
    vocab,
    chunks,
    COUNTS: tl.constexpr,
    FIRST: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Replaces a row's range by the part in which the limit is crossed. `befores` is what reaches its end."""
    at = tl.program_id(0)
    chunk, part = tl.arange(0, CHUNKS), tl.arange(0, WAYS)
    places = (at * chunks + chunk[:, None]) * WAYS + part[None, :]
    reached = tl.sum(tl.load(sums + places, mask=chunk[:, None] < chunks, other=0.0), 0)
    if FIRST:
        limit = tl.load(limits + at)
        goal = limit.to(tl.float64) if COUNTS else limit * tl.max(reached, 0)
        tl.store(goals + at, goal)
        before = 0.0
    else:
        goal, before = tl.load(goals + at), tl.load(befores + at)
    found = tl.maximum(tl.sum((reached >= goal).to(tl.int32), 0) - 1, 0)
    low, high = _range(ranges, at, FIRST)
    last = found == WAYS - 1
    after = tl.max(tl.where(part > found, reached, 0.0), 0)
    tl.store(befores + at, tl.where(last, before, after))
    tl.store(ranges + 2 * at, _edge(low, high, found.to(tl.int64), FIRST))
    tl.store(ranges + 2 * at + 1, tl.where(last, high, _edge(low, high, found.to(tl.int64) + 1, FIRST)))


@triton.jit(do_not_specialize=["vocab"])
def _finish(
    logits,
    rows,
    best,
    temperature,
    least,
    limits,
    ranges,
    goals,
    befores,
    found,
    cuts,
    row_stride,
    vocab,
    COUNTS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Gathers a row's weights within its range, in their order, and halves the range down to one of them."""
    at = tl.program_id(0)
    limit, floor = tl.load(limits + at), tl.load(least + at)
    asked = limit < vocab if COUNTS else limit < 1.0
    if not asked:
        tl.store(cuts + at, floor)
        return
    low, high = _range(ranges, at, False)
    begin, end = low.to(tl.float64, bitcast=True), high.to(tl.float64, bitcast=True)
    mine = found + at.to(tl.int64) * vocab
    place = tl.arange(0, SIZE)
    count = 0
    smallest, greatest = end, begin
    for chunk in range(0, vocab, SIZE):
        i = chunk + place
        weight = _kept(logits, rows, best, temperature, least, at, i, row_stride, vocab)
        inside = (weight >= begin) & (weight < end)
        where = count + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(mine + where, weight, mask=inside)
        count += tl.sum(inside.to(tl.int32), 0)
        smallest = tl.minimum(smallest, tl.min(tl.where(inside, weight, end), 0))
        greatest = tl.maximum(greatest, tl.max(tl.where(inside, weight, begin), 0))
    tl.debug_barrier()  # other threads of the program have written what is read from here on
    goal, before = tl.load(goals + at), tl.load(befores + at)
    # The greatest weight of the range with which the limit is reached is at least `smallest`, at most `greatest`.
    while smallest < greatest:
        bottom, top = smallest.to(tl.int64, bitcast=True), greatest.to(tl.int64, bitcast=True)
        middle = (bottom + (top - bottom + 1) // 2).to(tl.float64, bitcast=True)
        held = before
        above, below = greatest, smallest  # the nearest weights that are not below `middle`, and that are
        for first in range(0, count, SIZE):
            weight = tl.load(mine + first + place, mask=first + place < count, other=-1.0)
            reaches = weight >= middle
            held += tl.sum(tl.where(reaches, 1.0 if COUNTS else weight, 0.0), 0)
            above = tl.minimum(above, tl.min(tl.where(reaches, weight, greatest), 0))
            below = tl.maximum(below, tl.max(tl.where(reaches, smallest, weight), 0))
        if held >= goal:
            smallest = above
        else:
            greatest = below
    tl.store(cuts + at, tl.maximum(floor, smallest))


def cut(
    logits: torch.Tensor,
    rows: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    least: torch.Tensor,
    limits: torch.Tensor,
    *,
    counts: bool,
) -> torch.Tensor:
    """Returns float64 `[len(rows)]`: the weight at which the greatest of a row's weights of at least `least` first
    amount to its limit. `counts`: `limits` are numbers of weights, int64, the vocabulary for none; else shares of
    their sum, float64, 1 for none. A row with no limit gets `least`. The rest is as for `draw`; logits may be
    float64."""
    count, vocab, device = len(rows), logits.shape[-1], logits.device
    chunks = -(-vocab // SPREAD)
    ranges = torch.empty(count, 2, dtype=torch.int64, device=device)
    sums = torch.empty(count, chunks, WAYS.value, dtype=torch.float64, device=device)
    # Each by itself: aligned alike whatever the count, so that kernels are compiled once.
    goals, befores, cuts = (torch.empty(count, dtype=torch.float64, device=device) for _ in range(3))
    found = torch.empty(count, vocab, dtype=torch.float64, device=device)
    given, stride, size = (logits, rows, best, temperature, least), logits.stride(0), triton.next_power_of_2(chunks)
    for first in (True, False):
        kind = {"COUNTS": counts, "FIRST": first}
        _spread[(count, chunks)](*given, ranges, sums, stride, vocab, **kind, SIZE=SPREAD, num_warps=8)
        _narrow[(count,)](limits, ranges, sums, goals, befores, vocab, chunks, **kind, CHUNKS=size, num_warps=4)
    made = (limits, ranges, goals, befores, found, cuts)
    _finish[(count,)](*given, *made, stride, vocab, COUNTS=counts, SIZE=GATHER, num_warps=16)
    return cuts
