"""Tokens drawn from logits, filtered or not: the definition of `kvmesh.engine.sampler`, without a sorted vocabulary.

A weight is exp((logit - best) / temperature) in float64, computed from the logits whenever it is needed. The filters'
cut is the key of a logit (its float32 bits, in the order of the numbers): top_k's is the largest key that k logits
reach, top_p's the largest that enough weight reaches. Both are found digit by digit, eight passes over a row of 16
candidates each. The draw sums weights by chunks, then looks for its token in one of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvmesh.engine.sampling.filters import Limits

BLOCK = 2048  # logits of a chunk
CUT_BLOCK, CUT_WARPS = 1024, 16
LOWEST = tl.constexpr(-(2**31))
DIGITS, DIGIT_BITS = tl.constexpr(8), tl.constexpr(4)


@triton.jit
def _weight(x, best, temperature):
    return tl.exp((x.to(tl.float64) - best) / temperature)


@triton.jit
def _key(x):
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0 and 0 are equals
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit(do_not_specialize=["vocab"])
def _cut(
    logits,
    rows,
    best,
    temperature,
    min_p,
    top_k,
    top_p,
    cuts,
    row_stride,
    vocab,
    SIZE: tl.constexpr,
    LIMITED: tl.constexpr,
    NUCLEUS: tl.constexpr,
):
    at = tl.program_id(0)
    row = tl.load(rows + at)
    base = logits + row * row_stride
    high = tl.load(best + row).to(tl.float64)
    heat, least = tl.load(temperature + at), tl.load(min_p + at)
    digit = tl.arange(0, 16)
    cut = tl.full([], LOWEST, tl.int64)
    if LIMITED:
        wanted = tl.load(top_k + at)
        for place in range(DIGITS):
            shift = (DIGITS - 1 - place) * DIGIT_BITS
            bounds = cut + (digit.to(tl.int64) << shift)
            counts = tl.zeros([16], tl.int32)
            for start in range(0, vocab, SIZE):
                i = start + tl.arange(0, SIZE)
                x = tl.load(base + i, mask=i < vocab, other=float("-inf"))
                reach = (_key(x)[None, :] >= bounds[:, None]) & (i < vocab)[None, :]
                counts += tl.sum(reach.to(tl.int32), 1)
            reached = (counts >= wanted) & (digit > 0)
            cut += tl.sum(reached.to(tl.int64), 0) << shift
    if NUCLEUS:
        total = tl.zeros([SIZE], tl.float64)
        for start in range(0, vocab, SIZE):
            i = start + tl.arange(0, SIZE)
            x = tl.load(base + i, mask=i < vocab, other=float("-inf"))
            weight = _weight(x, high, heat)
            total += tl.where((weight >= least) & (_key(x) >= cut) & (i < vocab), weight, 0.0)
        share = tl.load(top_p + at)
        goal = tl.sum(total, 0) * share
        floor = cut
        cut = tl.full([], LOWEST, tl.int64)
        for place in range(DIGITS):
            shift = (DIGITS - 1 - place) * DIGIT_BITS
            bounds = cut + (digit.to(tl.int64) << shift)
            sums = tl.zeros([16], tl.float64)
            for start in range(0, vocab, SIZE):
                i = start + tl.arange(0, SIZE)
                x = tl.load(base + i, mask=i < vocab, other=float("-inf"))
                key, weight = _key(x), _weight(x, high, heat)
                weight = tl.where((weight >= least) & (key >= floor) & (i < vocab), weight, 0.0)
                sums += tl.sum(tl.where(key[None, :] >= bounds[:, None], weight[None, :], 0.0), 1)
            reached = (sums >= goal) & (digit > 0)
            cut += tl.sum(reached.to(tl.int64), 0) << shift
        cut = tl.maximum(floor, tl.where(share < 1.0, cut, floor))
    tl.store(cuts + at, cut)


@triton.jit
def _kept(x, i, vocab, high, heat, least, cut, FILTERED: tl.constexpr):
    """The weights that the filters leave."""
    weight = tl.where(i < vocab, _weight(x, high, heat), 0.0)
    if FILTERED:
        weight = tl.where((weight >= least) & (_key(x) >= cut), weight, 0.0)
    return weight


@triton.jit(do_not_specialize=["vocab"])
def _sum(
    logits, rows, best, temperature, min_p, cuts, sums, row_stride, vocab, SIZE: tl.constexpr, FILTERED: tl.constexpr
):
    at, chunk = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + at)
    i = chunk * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits + row * row_stride + i, mask=i < vocab, other=float("-inf"))
    least, cut = 0.0, 0
    if FILTERED:
        least, cut = tl.load(min_p + at), tl.load(cuts + at)
    high, heat = tl.load(best + row).to(tl.float64), tl.load(temperature + at)
    weight = _kept(x, i, vocab, high, heat, least, cut, FILTERED)
    tl.store(sums + at * tl.num_programs(1) + chunk, tl.sum(weight, 0))


@triton.jit(do_not_specialize=["vocab", "chunks"])
def _pick(
    logits,
    rows,
    best,
    temperature,
    min_p,
    cuts,
    sums,
    noise,
    tokens,
    row_stride,
    vocab,
    chunks,
    SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    FILTERED: tl.constexpr,
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
    least, cut = 0.0, 0
    if FILTERED:
        least, cut = tl.load(min_p + at), tl.load(cuts + at)
    high, heat = tl.load(best + row).to(tl.float64), tl.load(temperature + at)
    weight = _kept(x, i, vocab, high, heat, least, cut, FILTERED)
    hit = tl.sum((before + tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
    # Sums in another order may fall short by a rounding: the last token that has a weight, then.
    last = tl.max(tl.where(weight > 0.0, place, 0), 0)
    tl.store(tokens + at, (which * SIZE + tl.minimum(hit, last)).to(tl.int64))


def draw(
    logits: torch.Tensor,
    rows: torch.Tensor,
    best: torch.Tensor,
    temperature: torch.Tensor,
    noise: torch.Tensor,
    limits: Limits | None,
) -> torch.Tensor:
    """int64 `[len(rows)]`: a token of each of the `rows` (int64) of `logits` float32 `[all rows, vocab]`, whose
    greatest are `best [all rows]`; `temperature` and `noise` float64 `[len(rows)]`. Rows whose best logit is not
    finite get some token."""
    count, vocab = len(rows), logits.shape[-1]
    chunks = -(-vocab // BLOCK)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    sums = torch.empty(count, chunks, dtype=torch.float64, device=logits.device)
    cuts = None
    if limits is not None:
        cuts = torch.empty(count, dtype=torch.int64, device=logits.device)
        _cut[(count,)](
            logits, rows, best, temperature, *limits[:3], cuts, logits.stride(0), vocab,
            SIZE=CUT_BLOCK, LIMITED=limits.limited, NUCLEUS=limits.nucleus, num_warps=CUT_WARPS,
        )  # fmt: skip
    given = (logits, rows, best, temperature, None if limits is None else limits.min_p, cuts, sums)
    filtered = limits is not None
    _sum[(count, chunks)](*given, logits.stride(0), vocab, SIZE=BLOCK, FILTERED=filtered, num_warps=4)
    _pick[(count,)](
        *given, noise, tokens, logits.stride(0), vocab, chunks,
        SIZE=BLOCK, CHUNKS=triton.next_power_of_2(chunks), FILTERED=filtered, num_warps=4,
    )  # fmt: skip
    return tokens
