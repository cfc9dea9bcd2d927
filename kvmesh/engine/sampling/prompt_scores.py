"""Log-probabilities of the tokens of a prompt, as the model gives them after the tokens before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

# Logits of so many bytes are looked at at a time: a prompt's would be gigabytes (8,192 tokens x 152,064 x 4 bytes).
SLICE_BYTES = 32 << 20


class TokenScores(NamedTuple):
    """Holds, of each of some tokens, its log-probability and those of the `top` best, the best first, float32
    `[tokens, 1 + top]`; its rank, uint32 `[tokens]`, 1 for the best; and the ids of the best, uint32 `[tokens, top]`.
    They are of the raw log-softmax, as those of sampled tokens are."""

    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.uint32]
    top_ids: npt.NDArray[np.uint32]

    @property
    def finite(self) -> bool:
        """Whether all logits that they were made of are numbers."""
        return not np.isnan(self.logprobs).any()


def score_tokens(
    logits: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, targets: Sequence[int], top: int, vocab: int
) -> TokenScores:
    """Scores `targets[i]` as the token after the one whose `hidden [tokens, hidden_size]` is row i. `logits` makes
    `[rows, vocab]` of rows of it, a slice at a time; ranks of a group call this together."""
    wanted = torch.tensor(list(targets), dtype=torch.int64, device=hidden.device)
    rows, top = max(1, SLICE_BYTES // (4 * vocab)), min(top, vocab)
    parts = []
    for at in range(0, len(wanted), rows):
        own_ids = wanted[at : at + rows, None]
        raw = logits(hidden[at : at + len(own_ids)]).float().log_softmax(-1)
        own = raw.gather(1, own_ids)
        best = raw.topk(top)
        ranks = (raw > own).sum(-1, keepdim=True) + 1
        # float64 holds all of it.
        parts.append(torch.cat([part.double() for part in (own, best.values, ranks, best.indices)], 1))
    lines = torch.cat(parts).cpu().numpy()
    ids = lines[:, 1 + top :].astype(np.uint32)
    return TokenScores(lines[:, : 1 + top].astype(np.float32), ids[:, 0], ids[:, 1:])
