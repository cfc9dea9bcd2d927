"""min_p, top_k and top_p as one number a row: the smallest weight that is kept. Ties stay together.

Exact whatever the distribution: a few of the best tokens are looked at first, and rows that need more are counted in
full (a histogram over the weights' leading bits on a CPU, a sort elsewhere).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from kvmesh.engine.batch import SampleParams

CANDIDATES = 128  # how many of the best tokens are looked at first
BUCKET_BITS = 15  # of a float32's 32 that a bucket leaves out: 256 buckets for each power of two
BUCKETS = (0x3F800000 >> BUCKET_BITS) + 1  # weights lie in [0, 1]


class Filters:
    """Holds the filters of the rows of one block: `top_k` is int64 `[rows]`, the vocabulary where a row has none;
    `top_p` and `min_p` are float64, 1 and 0 where it has none."""

    def __init__(self, params: Sequence[SampleParams], vocab: int) -> None:
        limits = [p.top_k if 0 < p.top_k < vocab else vocab for p in params]
        self.limited = any(limit < vocab for limit in limits)
        self._far = max((limit for limit in limits if limit < vocab), default=0) > CANDIDATES
        self.nucleus = any(p.top_p < 1 for p in params)
        self._floored = self.limited or any(p.min_p > 0 for p in params)
        self.arrays = [
            np.array(limits, np.int64),
            np.array([p.top_p for p in params], np.float64),
            np.array([p.min_p for p in params], np.float64),
        ]

    def receive(self, sent: Iterator[torch.Tensor]) -> None:
        """Takes `arrays` as they are on the device."""
        self.top_k, self.top_p, self.min_p = (next(sent) for _ in range(3))

    @property
    def ordered(self) -> bool:
        """Whether some row's cut is found by an order of its weights: top_k or top_p, not min_p alone."""
        return self.limited or self.nucleus

    def cut(self, weights: torch.Tensor) -> torch.Tensor:
        """Returns float64 `[rows]`: the smallest kept of `weights [rows, vocab]`, float64 of which a row's greatest is
        1. min_p goes first, then top_k, then top_p of what is left."""
        low = self.min_p
        if not self.ordered:
            return low
        vocab = weights.shape[-1]
        width = min(vocab, CANDIDATES)
        best = weights.topk(width).values
        if self.limited:
            last = (self.top_k - 1)[:, None]
            kth = best.gather(1, last.clamp(max=width - 1))[:, 0]
            if self._far:
                far = (self.top_k > width).nonzero()[:, 0]
                kth[far] = _reach(weights[far], self.top_k[far].double(), counts=True)
            low = torch.where(self.top_k < vocab, torch.maximum(low, kth), low)
        if self.nucleus:
            low = torch.where(self.top_p < 1, torch.maximum(low, self._nuclei(weights, best, low)), low)
        return low

    def _nuclei(self, weights: torch.Tensor, best: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """Returns the weight of the last token that is needed, the greatest first, to hold top_p of what `low`
        keeps."""
        kept = weights.masked_fill(weights < low[:, None], 0.0) if self._floored else weights
        goal = self.top_p * kept.sum(-1)
        width = best.shape[-1]
        needed = (best.masked_fill(best < low[:, None], 0.0).cumsum(-1) < goal[:, None]).sum(-1)
        cut = best.gather(1, needed.clamp(max=width - 1)[:, None])[:, 0]
        if width < weights.shape[-1]:
            short = ((needed == width) & (self.top_p < 1)).nonzero()[:, 0]
            if len(short):
                cut[short] = _reach(kept[short], goal[short], counts=False)
        return cut


def _reach(weights: torch.Tensor, goal: torch.Tensor, *, counts: bool) -> torch.Tensor:
    """Returns float64 `[rows]`: the weight at which the greatest of `weights [rows, vocab]`, each counted as one
    (`counts`) or as itself, first amount to `goal [rows]`."""
    find = _by_histogram if weights.device.type == "cpu" else _by_sort
    return find(weights, goal, counts=counts)


def _by_sort(weights: torch.Tensor, goal: torch.Tensor, *, counts: bool) -> torch.Tensor:
    return _first_at(weights.sort(-1, descending=True).values, goal, weights.shape[-1], counts=counts)


def _by_histogram(weights: torch.Tensor, goal: torch.Tensor, *, counts: bool) -> torch.Tensor:
    bucket = weights.float().view(torch.int32) >> BUCKET_BITS  # in the order of the weights themselves
    held = weights.new_zeros(len(weights), BUCKETS)
    held.scatter_add_(1, bucket.long(), torch.ones_like(weights) if counts else weights)
    above = held.flip(-1).cumsum(-1)  # of each bucket and those of greater weights, the greatest first
    crossing = (above < goal[:, None]).sum(-1, keepdim=True).clamp_(max=BUCKETS - 1)
    before = above.gather(1, (crossing - 1).clamp_(min=0)).masked_fill_(crossing == 0, 0.0)[:, 0]
    inside = bucket == (BUCKETS - 1 - crossing)
    sizes = inside.sum(-1)
    row = inside.nonzero()[:, 0]
    members = weights.new_zeros(len(weights), int(sizes.max()))
    members[row, torch.arange(len(row)) - (sizes.cumsum(-1) - sizes)[row]] = weights[inside]
    return _first_at(members.sort(-1, descending=True).values, goal - before, sizes, counts=counts)


def _first_at(ordered: torch.Tensor, goal: torch.Tensor, sizes: torch.Tensor | int, *, counts: bool) -> torch.Tensor:
    """Returns the first of `ordered [rows, n]`, descending, with which the sum reaches `goal`; the last of its row's
    `sizes` at the latest, since sums in another order may fall short by a rounding."""
    needed = goal.long() - 1 if counts else (ordered.cumsum(-1) < goal[:, None]).sum(-1)
    needed = needed.clamp(min=0)
    needed = needed.minimum(sizes - 1) if isinstance(sizes, torch.Tensor) else needed.clamp(max=sizes - 1)
    return ordered.gather(1, needed[:, None])[:, 0]
