"""Tokens drawn from logits at a temperature: the definition of `kvmesh.engine.sampler`, without a float64 copy of the
logits. A weight is exp((logit - best) / temperature) in float64, computed from the logits twice: weights are summed by
chunks, then the chunk that the noise falls into is looked through. min_p leaves weights out; top_k and top_p, which
need an order, are not here (docs/reports/negative-results.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048  # logits of a chunk


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


@triton.jit(do_not_specialize=["vocab", "chunks"])
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
