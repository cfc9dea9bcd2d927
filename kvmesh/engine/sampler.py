"""From logits to tokens: greedy, temperature, top-k, top-p, with counter-based noise.

Each sampled row draws one uniform number from (seed, token_index) and looks it up in the cumulative distribution of
what the filters leave, in token-id order and float64. No generator has state, so a row's token depends
neither on the other rows of the batch nor on where the request ran before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvmesh.engine.batch import SampledToken, SampleParams
from kvmesh.rpc.errors import NonFiniteLogits

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
CANDIDATES = 128  # how many of the best tokens top-p looks at first
WIDE = 16  # how many times as many it looks at next, before it sorts the whole vocabulary


def _mix(x: int) -> int:
    """The finalizer of splitmix64: a bijection of 64 bits in which every input bit moves every output bit."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, token_index: int) -> float:
    """The noise of one token: a multiple of 2**-53 in [0, 1). Any Python integer is a seed (its low 64 bits count)."""
    key = _mix((seed + _GOLDEN) & _MASK)
    return (_mix((key + (token_index + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53


def sample(logits: torch.Tensor, params: Sequence[SampleParams]) -> list[SampledToken]:
    """One token a row of `logits [rows, vocab]` (any float dtype). Raises NonFiniteLogits naming the rows."""
    best, greedy = logits.max(-1)
    tokens: list[int] = greedy.tolist()
    _check(best, logits)
    drawn = [i for i, p in enumerate(params) if p.temperature > 0]
    if drawn:
        rows = logits if len(drawn) == len(params) else logits[drawn]
        for i, token in zip(drawn, draw(rows, [params[i] for i in drawn]).tolist(), strict=True):
            tokens[i] = token
    if any(p.logprobs is not None for p in params):
        return _with_logprobs(logits, params, tokens)
    return [SampledToken(token) for token in tokens]


def _check(best: torch.Tensor, logits: torch.Tensor) -> None:
    """max() passes NaN on, so one look at the best logit of each row finds NaN, +inf and rows of -inf."""
    if not bool(best.isfinite().all()):
        rows = tuple((~best.isfinite()).nonzero().flatten().tolist())
        raise NonFiniteLogits(f"logits of batch rows {list(rows)[:16]} are not finite", rows=rows)


def draw(logits: torch.Tensor, params: Sequence[SampleParams]) -> torch.Tensor:
    """int64 `[rows]`: one draw for each row; every temperature must be positive."""
    device = logits.device
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device)
    weights = logits.double().div_(temperature[:, None])
    weights.sub_(weights.amax(-1, keepdim=True)).exp_()
    filtered = [i for i, p in enumerate(params) if 0 < p.top_k < logits.shape[-1] or p.top_p < 1]
    if len(filtered) == len(params):
        weights.masked_fill_(weights < _cut(weights, params)[:, None], 0.0)
    elif filtered:
        some = torch.tensor(filtered, device=device)
        kept = weights[some]
        cut = _cut(kept, [params[i] for i in filtered])
        weights[some] = kept.masked_fill_(kept < cut[:, None], 0.0)
    cumulative = weights.cumsum_(-1)
    noise = [uniform(p.seed, p.token_index) for p in params]
    total = cumulative[:, -1]
    target = torch.tensor(noise, dtype=torch.float64, device=device) * total
    # Rounding must not reach the end: the last token whose weight is not zero is where `total` is first attained.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


def _cut(weights: torch.Tensor, params: Sequence[SampleParams]) -> torch.Tensor:
    """float64 `[rows]`: the smallest weight that top-k, then top-p of what is left, keep. Ties stay together."""
    vocab, device = weights.shape[-1], weights.device
    limits = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    widest = max((limit for limit in limits if limit < vocab), default=0)
    count = min(vocab, max(CANDIDATES, widest))
    best = weights.topk(count).values
    kth = torch.tensor([min(limit, count) - 1 for limit in limits], device=device)
    unlimited = torch.tensor([limit == vocab for limit in limits], device=device)
    cut = best.gather(1, kth[:, None])[:, 0].masked_fill_(unlimited, 0.0)
    nucleus = [i for i, p in enumerate(params) if p.top_p < 1]
    if nucleus:
        some = torch.tensor(nucleus, device=device)
        top_p = torch.tensor([params[i].top_p for i in nucleus], dtype=torch.float64, device=device)
        kept = weights[some]
        goal = top_p * kept.masked_fill(kept < cut[some][:, None], 0.0).sum(-1)
        cut[some] = torch.maximum(_nucleus(kept, best[some], goal), cut[some])
    return cut


def _nucleus(weights: torch.Tensor, best: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """The weight of the last token that is needed to hold `goal`, the greatest first; `best` are the first of them.
    Rows for which these do not suffice look at more, so the answer does not depend on how many there were."""
    mass = best.cumsum(-1)
    last = (mass < goal[:, None]).sum(-1, keepdim=True)
    width, vocab = best.shape[-1], weights.shape[-1]
    cut = best.gather(1, last.clamp(max=width - 1))[:, 0]
    if width < vocab:
        short = (last[:, 0] == width).nonzero()[:, 0]
        if len(short):
            more = weights[short]
            wider = more.topk(WIDE * width).values if WIDE * width < vocab // 8 else _sorted(more)
            cut[short] = _nucleus(more, wider, goal[short])
    return cut


def _sorted(weights: torch.Tensor) -> torch.Tensor:
    """Descending; numpy's sort is several times faster than torch's on a CPU."""
    if weights.device.type == "cpu":
        return torch.from_numpy(np.sort(weights.numpy(), -1)).flip(-1)
    return weights.sort(-1, descending=True).values


def _with_logprobs(logits: torch.Tensor, params: Sequence[SampleParams], tokens: Sequence[int]) -> list[SampledToken]:
    """Adds log-probabilities to the rows that ask for them."""
    asking = [(i, p.logprobs) for i, p in enumerate(params) if p.logprobs is not None]
    rows = [i for i, _ in asking]
    raw = logits[rows].float().log_softmax(-1)
    chosen = raw.gather(1, torch.tensor([tokens[i] for i in rows], device=raw.device)[:, None])[:, 0].tolist()
    width = min(max(n for _, n in asking), raw.shape[-1])
    top = raw.topk(width)
    values, ids = top.values.tolist(), top.indices.tolist()
    sampled = [SampledToken(token) for token in tokens]
    for at, (i, n) in enumerate(asking):
        sampled[i] = SampledToken(tokens[i], chosen[at], tuple(zip(ids[at][:n], values[at][:n], strict=True)))
    return sampled
