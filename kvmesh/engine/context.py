"""Which tokens of a context lie at which of the ranks that share it; arithmetic, without torch.

Ranks take turns: of D ranks, rank r keeps the tokens at positions p with p // I % D == r, for an interleave of I
tokens. A rank packs what it keeps: its pages have P tokens, and its n-th token of a request lies in slot n % P of page
n // P of the request's table, which is the same at every rank. I divides P, so page n of all ranks together has the
tokens of block n of the prompt, D * P of them: requests count, share and evict blocks as those of one rank do, and the
token budget is D times one rank's. With I = P, the default, what a rank has of a block is a part of its tokens in one
piece, and can be stored and moved (`ShardLayout.turn`). With another I it is of use to this instance alone: the engine
takes any, stores and transfers take I = P only.

    D = 2, I = 1   position  0 1 2 3 4 5 6 7      D = 2, I = 2   position  0 1 2 3 4 5 6 7
                   rank      0 1 0 1 0 1 0 1                     rank      0 0 1 1 0 0 1 1

A query at position p sees `local_len(p + 1)` of a rank's tokens, which may be none. A draft query j after a history of
H tokens is at H + j. When drafts are rejected the lengths follow anew from the global length, never from what they
were: a rank's slots behind its new length are written again by the next tokens whose turn it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvmesh.engine.axes import Axes
from kvmesh.errors import ConfigError

Positions = npt.NDArray[np.int64]


def context_turn(axes: Axes, rank: int) -> int:
    """Returns the turn of a rank among `axes.turns`: the ranks of `cp`, and within them those of `dcp`, take turns."""
    place = axes.place(rank)
    return place.cp * axes.dcp + place.tp % axes.dcp


@dataclass(frozen=True, slots=True)
class ContextShare:
    """Says what of every context lies at rank `turn` of `turns`, `interleave` tokens at a time."""

    turn: int
    turns: int
    interleave: int

    def __post_init__(self) -> None:
        if not 0 <= self.turn < self.turns or self.interleave < 1:
            raise ConfigError(
                f"context: turn {self.turn} of {self.turns} ranks, interleave={self.interleave}, cannot be",
                field="mesh",
            )

    @classmethod
    def of(cls, axes: Axes, rank: int, page_tokens: int) -> ContextShare:
        """Returns what this rank of a mesh has, whose pages have so many tokens. Raises ConfigError unless the
        interleave divides that."""
        interleave = axes.interleave or page_tokens
        if page_tokens % interleave:
            raise ConfigError(
                f"mesh: interleave={interleave} must divide the {page_tokens} tokens of a rank's page",
                field="interleave",
            )
        return cls(context_turn(axes, rank), axes.turns, interleave)

    def local_len(self, length: int) -> int:
        """Returns how many of the first `length` tokens lie here."""
        rounds, rest = divmod(length, self.turns * self.interleave)
        return rounds * self.interleave + min(max(rest - self.turn * self.interleave, 0), self.interleave)

    def local_lens(self, lengths: Positions) -> Positions:
        """Returns what `local_len` does of each length."""
        rounds, rest = np.divmod(lengths, self.turns * self.interleave)
        lens: Positions = rounds * self.interleave + np.clip(rest - self.turn * self.interleave, 0, self.interleave)
        return lens

    def here(self, positions: Positions) -> npt.NDArray[np.bool_]:
        """Says of each position whether its token lies here."""
        lies: npt.NDArray[np.bool_] = positions // self.interleave % self.turns == self.turn
        return lies

    def position(self, local: int) -> int:
        """Returns the position of this rank's token number `local`."""
        rounds, rest = divmod(local, self.interleave)
        return (rounds * self.turns + self.turn) * self.interleave + rest


def zigzag(length: int, ranks: int) -> tuple[tuple[range, range], ...]:
    """Returns the two runs of a chunk's tokens that each of `ranks` ranks computes: the chunk is cut into 2 `ranks`
    parts, as even as they go, and rank r gets part r and the r-th from behind, so that all have about as many pairs of
    query and key. A run may be empty."""
    cuts = [length * part // (2 * ranks) for part in range(2 * ranks + 1)]
    parts = [range(first, end) for first, end in pairwise(cuts)]
    return tuple((parts[rank], parts[2 * ranks - 1 - rank]) for rank in range(ranks))
