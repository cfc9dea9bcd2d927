"""From logits to tokens: greedy, temperature, top-k, top-p, with counter-based noise.

Each sampled row draws one uniform number from (seed, token_index) and looks it up in the cumulative distribution of
what the filters leave, in token-id order and float64. No generator has state, so a row's token depends
neither on the other rows of the batch nor on where the request ran before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvmesh.engine.batch import SampledToken, SampleParams
from kvmesh.rpc.errors import NonFiniteLogits

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
CANDIDATES = 1024  # how many of the best tokens top-p looks at before it sorts the whole vocabulary


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
    scaled = logits.double() / temperature[:, None]
    scaled -= scaled.amax(-1, keepdim=True)
    weights = scaled.exp()
    filtered = [i for i, p in enumerate(params) if 0 < p.top_k < logits.shape[-1] or p.top_p < 1]
    if filtered:
        some = torch.tensor(filtered, device=device)
        cut = _threshold(scaled[some], [params[i] for i in filtered])
        weights[some] = weights[some].masked_fill_(scaled[some] < cut[:, None], 0.0)
    cumulative = weights.cumsum_(-1)
    noise = [uniform(p.seed, p.token_index) for p in params]
    total = cumulative[:, -1]
    target = torch.tensor(noise, dtype=torch.float64, device=device) * total
    # Rounding must not reach the end: the last token whose weight is not zero is where `total` is first attained.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


def _threshold(scaled: torch.Tensor, params: Sequence[SampleParams]) -> torch.Tensor:
    """float64 `[rows]`: the smallest scaled logit that top-k, then top-p of what is left, keep. Ties stay together."""
    vocab, device = scaled.shape[-1], scaled.device
    limits = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
    widest = max((limit for limit in limits if limit < vocab), default=0)
    count = min(vocab, max(CANDIDATES, widest))
    order = scaled.topk(count).values
    kth = torch.tensor([min(limit, count) - 1 for limit in limits], device=device)
    unlimited = torch.tensor([limit == vocab for limit in limits], device=device)
    cut = order.gather(1, kth[:, None])[:, 0].masked_fill_(unlimited, -torch.inf)
    nucleus = [i for i, p in enumerate(params) if p.top_p < 1]
    if not nucleus:
        return cut
    some = torch.tensor(nucleus, device=device)
    top_p = torch.tensor([params[i].top_p for i in nucleus], dtype=torch.float64, device=device)
    cut[some] = _nucleus(scaled[some], order[some], cut[some], top_p)
    return cut


def _nucleus(scaled: torch.Tensor, order: torch.Tensor, cut: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The last of the best tokens whose predecessors hold less than `top_p` of the mass above `cut`."""
    total = scaled.exp().masked_fill_(scaled < cut[:, None], 0.0).sum(-1)
    goal = (top_p * total)[:, None]
    mass = order.exp().masked_fill_(order < cut[:, None], 0.0).cumsum(-1)
    if order.shape[-1] < scaled.shape[-1] and bool((mass[:, -1:] < goal).any()):
        return _nucleus(scaled, scaled.sort(-1, descending=True).values, cut, top_p)
    last = (mass < goal).sum(-1, keepdim=True).clamp_(max=order.shape[-1] - 1)
    return torch.maximum(order.gather(1, last)[:, 0], cut)


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
