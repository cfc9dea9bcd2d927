"""A choice among candidates that keeps what decided it, so that `explain` tells the very numbers. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from services.conductor.placing.ties import Crowd, as_good, pick

C = TypeVar("C")


class ComparedNumbers(NamedTuple):
    """What a choice went by, in the order of its candidates."""

    scores: list[float]  # seconds
    crowds: list[Crowd | None]  # None: it was not asked for, since it decides between scores that are as good alone
    near_s: float  # a score up to this was as good as the least one
    at: int  # of the chosen one


@dataclass(slots=True)
class Comparison(Generic[C]):
    """A choice that was made. Scores are those of the candidates as they were weighed, so they are made again when
    somebody asks; crowds change with the placement itself, so they are kept."""

    choices: Sequence[C]
    chosen: C
    _score: Callable[[C], float]
    _crowds: dict[int, Crowd]  # by `id` of a choice
    _floor: float

    def numbers(self) -> ComparedNumbers:
        """What decided."""
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
    """Picks one of `choices` as `ties.pick` does, and draws as much chance."""
    crowds: dict[int, Crowd] = {}

    def crowd_of(choice: C) -> Crowd:
        found = crowds[id(choice)] = crowd(choice)
        return found

    return Comparison(choices, pick(choices, score, crowd_of, rng, floor), score, crowds, floor)
