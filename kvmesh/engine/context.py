"""Which tokens of a context lie at which of the ranks that share it; arithmetic, without torch.

Ranks take turns: of D ranks, rank r keeps the tokens at positions p with p // I % D == r, for an interleave of I
tokens. A rank packs what it keeps: its n-th token of a request lies in slot n % block of page n // block of the
request's table, so the table, which is the same at every rank, has a D-th of the pages, and the token budget is D
times one rank's. With I of one block, a rank's page is one block of the prompt, block `page * D + r`, and can be
stored and moved as such (`ShardLayout.turn`). With another I, a page holds pieces of several blocks and is of use to
this instance alone: the engine takes any I, stores and transfers take one block only. Within the instance requests can
share the pages of a prefix of whole rounds, `D * block` tokens, where I divides the block.

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
    def of(cls, axes: Axes, rank: int, block_tokens: int) -> ContextShare:
        """Returns what this rank of a mesh has: the ranks of `cp`, and within them those of `dcp`, take turns."""
        place = axes.place(rank)
        turn = place.cp * axes.dcp + place.tp % axes.dcp
        return cls(turn, axes.cp * axes.dcp, axes.interleave or block_tokens)

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


def pages_of(tokens: int, block_tokens: int, turns: int, interleave: int = 0) -> int:
    """Returns how many pages the table of a request of so many tokens has at each of `turns` ranks: what the first
    rank, which has most, needs."""
    return -(-ContextShare(0, turns, interleave or block_tokens).local_len(tokens) // block_tokens)


def zigzag(length: int, ranks: int) -> tuple[tuple[range, range], ...]:
    """Returns the two runs of a chunk's tokens that each of `ranks` ranks computes: the chunk is cut into 2 `ranks`
    parts, as even as they go, and rank r gets part r and the r-th from behind, so that all have about as many pairs of
    query and key. A run may be empty."""
    cuts = [length * part // (2 * ranks) for part in range(2 * ranks + 1)]
    parts = [range(first, end) for first, end in pairwise(cuts)]
    return tuple((parts[rank], parts[2 * ranks - 1 - rank]) for rank in range(ranks))
