"""When two scores count as equal, and which instance then gets the request. Pure.

Equal instances have equal predictions (costs/equals.py), so scores differ only by load and by what is cached, and ties
are common: of two idle instances neither is better. Among equal scores the instance with the fewest requests gets it,
then the one that was given the least work lately. So equal instances share all load evenly, and chance decides only
between those that are alike in every respect.

A prefix that many prompts begin with (a system prompt) would undo that: the instance that computed it first is a little
better for all of them for ever, and the others never get it. So an instance that is only a little better, and was given
more work lately, is handicapped by its advantage (`even_out`). The request then computes the prefix at another instance
once, after which they are alike. This costs the request at most as much again as it would take, and never a longer
queue.

Engines of others keep what they have computed for themselves alone, so there is a second reason to spread: room that
nobody uses (`use_room`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

# Scores this close are equal: the models know no better. Chance, last, spreads what arrives between two heartbeats over
# conductors that do not know of each other.
TIE_SHARE, TIE_FLOOR_S, TIE_CAP_S = 0.005, 20e-6, 1e-3

# Of the difference in what two were given lately, that it may cost to even it out.
EVEN_WEIGHT = 0.1

C = TypeVar("C")
# Requests that are there, work that was given to it lately; the least goes first.
Crowd = float | tuple[float, ...]


def as_good(best_s: float) -> float:
    """Returns the greatest score that counts as equal to `best_s`."""
    return best_s + min(TIE_CAP_S, max(TIE_FLOOR_S, TIE_SHARE * best_s))


def pick(
    choices: Sequence[C],
    score: Callable[[C], float],
    crowd: Callable[[C], Crowd],
    rng: random.Random,
    floor: float = float("inf"),
) -> C:
    """Returns the choice with the least score, in seconds; among scores as good as that, the one with the least crowd,
    then one by chance. (In another unit, whole numbers tie only when they are equal.) `floor` is a lower limit of the
    scores of candidates that are not listed."""
    scores = list(map(score, choices))
    near = as_good(min(floor, *scores))
    tied = [c for c, found in zip(choices, scores, strict=True) if found <= near]
    if len(tied) > 1:
        crowds = list(map(crowd, tied))
        least = min(crowds)
        tied = [c for c, found in zip(tied, crowds, strict=True) if found == least]
    return rng.choice(tied)


class TieCandidate(NamedTuple):
    """One of a few candidates, as `even_out` sees it. All but `wait` are in seconds."""

    score_s: float
    wait: float  # its queue, or its rows
    most_s: float  # that it may be handicapped by
    given_s: float  # work, lately


def even_out(candidates: Sequence[TieCandidate]) -> list[float]:
    """Returns each candidate's handicap in seconds. The best candidate is handicapped by its advantage over another one
    that waits no longer, if the advantage is small and the best one was given more work lately; so is the candidate
    that is best then, and so on."""
    handicaps = [0.0] * len(candidates)
    for _ in range(len(candidates) - 1):
        at = min(range(len(candidates)), key=lambda i: candidates[i].score_s + handicaps[i])
        best = candidates[at]
        if handicaps[at]:
            break
        most_s = [min(best.most_s, EVEN_WEIGHT * (best.given_s - other.given_s)) for other in candidates]
        better_s = [
            other.score_s - best.score_s
            for other, most in zip(candidates, most_s, strict=True)
            if other is not best and other.wait <= best.wait and 0 < other.score_s - best.score_s <= most
        ]
        if not better_s:
            break
        handicaps[at] = min(better_s)
    return handicaps


class RoomCandidate(NamedTuple):
    """One of a few engines, as `use_room` sees it."""

    score_s: float
    waits: tuple[float, int]  # seconds of its queue, and its rows
    drops: float  # blocks that it would drop to keep this prompt: more than none where its cache is full


def use_room(candidates: Sequence[RoomCandidate]) -> list[float]:
    """Returns each engine's handicap in seconds. One that would have to drop what it keeps loses its advantage over the
    best of those that have room for the whole prompt and wait no longer.

    A prefix that many sessions share would else have them all at the engine that computed it first, as long as they
    come so slowly that it is never busy: it would drop one session's blocks for the next one's, while others keep
    nothing. The shared prefix is computed once more at each engine, and room is filled but once: when every cache is
    full this handicaps nobody."""
    handicaps = [0.0] * len(candidates)
    for at, one in enumerate(candidates):
        if one.drops <= 0:
            continue
        better_s = [
            other.score_s - one.score_s
            for other in candidates
            if other.drops <= 0 and all(a <= b for a, b in zip(other.waits, one.waits, strict=True))
        ]
        if better_s and (advantage_s := min(better_s)) > -TIE_CAP_S:
            handicaps[at] = advantage_s + 2 * TIE_CAP_S
    return handicaps


class ComparedNumbers(NamedTuple):
    """The numbers that decided a choice, in the order of its candidates."""

    scores: list[float]  # seconds
    crowds: list[Crowd | None]  # None: it was not asked for, since it decides between scores that are as good alone
    near_s: float  # a score up to this was as good as the least one
    at: int  # of the chosen one


@dataclass(slots=True)
class Comparison(Generic[C]):
    """A choice that was made. Scores are computed again when asked for, since candidates do not change; crowds are
    kept, since they change with the placement itself."""

    choices: Sequence[C]
    chosen: C
    _score: Callable[[C], float]
    _crowds: dict[int, Crowd]  # by `id` of a choice
    _floor: float

    def numbers(self) -> ComparedNumbers:
        """Returns the numbers that decided."""
        scores, at, known = list(map(self._score, self.choices)), 0, self._crowds
        while self.choices[at] is not self.chosen:
            at += 1
        crowds = [known.get(id(c)) for c in self.choices]
        return ComparedNumbers(scores, crowds, as_good(min(self._floor, *scores)), at)


def compare(
    choices: Sequence[C],
    score: Callable[[C], float],
    crowd: Callable[[C], Crowd],
    rng: random.Random,
    floor: float = float("inf"),
) -> Comparison[C]:
    """Picks one of `choices` as `pick` does, with the same random draws, and keeps what decided, so that `explain`
    shows exactly these numbers."""
    crowds: dict[int, Crowd] = {}

    def crowd_of(choice: C) -> Crowd:
        found = crowds[id(choice)] = crowd(choice)
        return found

    return Comparison(choices, pick(choices, score, crowd_of, rng, floor), score, crowds, floor)
