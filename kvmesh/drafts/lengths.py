"""How long drafts are: as long as a token more is worth what it costs.

A step of R rows that computes no drafts takes the time 1 and makes R tokens. With drafts it takes 1 + FIXED + s·D, D
being the drafts' tokens and s the *share* that one more token adds, and makes R + q₁ + ... + q_D tokens, q being the
chance that a token is kept. Taken by falling chance, drafts are made longer while that makes more tokens a second. A
batch that is bound by its computing has s ≈ 1 / R, and gets none.

The chance that the j-th token of a draft is kept is aʲ; a is learned from drafts of the same strength, of the row
itself and of all rows. Where none are computed, some are still made and compared with what comes (`Speculator`).

A drafter that computes is asked before its drafts' strength is known: a is then that of ANY strength, and s has what a
drafted token takes of the drafter's own time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvmesh.drafts.drafter import MOST_STRENGTH

FIXED = 0.02  # what a step with drafts costs beside its tokens
LEAST_GAIN = 1.08  # of tokens a second, below which a draft is not worth its trouble: both sides are estimates
PRIOR_TRIES = 4.0  # how many tries of its own the others' chance counts for, with a row
FORGETS = 0.97  # how much of the earlier tries each new one leaves
ANY = MOST_STRENGTH + 1  # stands for a draft of whatever strength
MOST_CHANCE = 0.98


class AcceptedShare:
    """Learns how many of a draft's tokens are kept: a decayed count of tries and of tokens kept, by strength, and of
    ANY strength."""

    __slots__ = ("_kept", "_tried")

    def __init__(self, tried: float = 0.0, kept: float = 0.0) -> None:
        self._tried = [tried] * (ANY + 1)
        self._kept = [kept] * (ANY + 1)

    def add(self, strength: int, drafted: int, kept: int) -> None:
        """Notes a draft: its first `kept` tokens were right, and the one after them, if any, was not."""
        for which in (strength, ANY):
            self._tried[which] = self._tried[which] * FORGETS + kept + (kept < drafted)
            self._kept[which] = self._kept[which] * FORGETS + kept

    def chance(self, strength: int, others: AcceptedShare | None = None) -> float:
        """Returns the chance that a token is kept whose predecessors were."""
        tried, kept = self._tried[strength], self._kept[strength]
        if others is not None:
            tried, kept = tried + PRIOR_TRIES, kept + PRIOR_TRIES * others.chance(strength)
        return min(MOST_CHANCE, kept / tried) if tried else 0.0


def hopeful() -> AcceptedShare:
    """Returns what is believed of drafts before any was tried: half of the tokens are kept."""
    return AcceptedShare(2.0, 1.0)


def gain(chance: float, most: int, each: float) -> float:
    """Returns how many tokens more a draft of at most `most` tokens makes than its time would without it, each of its
    tokens being kept with `chance` and taking the time in which `each` tokens are made."""
    gained, kept = 0.0, chance
    for _ in range(most):
        if kept <= each:
            break
        gained, kept = gained + kept - each, kept * chance
    return gained


def choose_lengths(chances: Sequence[float], most: Sequence[int], share: float, again: bool = False) -> list[int]:
    """Returns how many tokens of each row's draft are computed, at most `most[i]`, its tokens being kept with
    `chances[i]` each. One row more may be there without a draft: its chance is 0. `again`: a draft that is not kept
    whole costs another step, in which the tokens that were kept are computed once more."""
    rows, lengths = len(chances), [0] * len(chances)
    made, took = float(rows), 1.0 + FIXED
    open_rows = [(-chances[row], row) for row in range(rows) if most[row] > 0 and chances[row] > 0]
    heapq.heapify(open_rows)
    while open_rows:
        falling, row = heapq.heappop(open_rows)
        chance = -falling
        # The other step is made if any draft is cut; each token that may be wrong adds to that chance.
        cost = share + ((chance / chances[row]) * (1 - chances[row]) if again else 0.0)
        if chance * took <= cost * made:
            break
        made, took, lengths[row] = made + chance, took + cost, lengths[row] + 1
        if lengths[row] < most[row]:
            heapq.heappush(open_rows, (-chance * chances[row], row))
    if made < LEAST_GAIN * rows * took:
        return [0] * rows
    return lengths
