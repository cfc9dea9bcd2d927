"""Which instances are worth weighing one by one, where there are many. Pure.

Each has a bound that its score is not below (bounds.py). They are weighed in the order of their bounds until the score
of one is as good as the least bound of all that are left: these cannot be better than a tie. Of those whose bounds are
tied the least crowded are weighed, a few of them by chance: so ten thousand idle instances cost no more than ten,
nothing piles up at one of them, and what is chosen is what would be chosen if all were weighed, up to ties.

Where instance after instance may not get the request (by a forecast that only weighing tells), DEEP of them are asked;
then only those that may have it whatever the forecast says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from kvmesh.services.conductor.candidates import compiled
from kvmesh.services.conductor.candidates.bounds import PromptBounds
from kvmesh.services.conductor.candidates.compiled import held
from kvmesh.services.conductor.candidates.fields import FEW, ColumnField, Floats, Mask
from kvmesh.services.conductor.candidates.selection import Selection
from kvmesh.services.conductor.domain import Lane, Schedule
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.placing.nearness import NearInstances
from kvmesh.services.conductor.placing.scoring_context import ScoringContext
from kvmesh.services.conductor.placing.ties import as_good
from kvmesh.services.conductor.prefixes.fetch_plan import FetchPlanner
from kvmesh.services.conductor.score import answer_s
from kvmesh.services.conductor.settings import Mode

AT_ONCE = 2  # weighed at first, then twice as many
DEEP = 32
NEAREST = 4  # weighed for a refusal's words

C = TypeVar("C")


@dataclass
class Weighing(Generic[C]):
    """The instances that were `weighed` one by one. No other instance has a score below `floor`; infinity means that
    there is no other."""

    weighed: Sequence[C]
    floor: float


@dataclass
class _Found(Weighing[C]):
    """A weighing with the `scores` of those weighed."""

    scores: Sequence[float]

    @property
    def any(self) -> bool:
        """Whether one of them may get the request."""
        return min(self.scores, default=np.inf) < np.inf


class Screen:
    """One request, and the many instances that may get it. Each method's `among` says which of them it concerns."""

    def __init__(self, request: Schedule, among: Selection, planner: FetchPlanner, scoring: ScoringContext) -> None:
        self._request, self._planner, self._scoring = request, planner, scoring
        self._view, self._columns = among.view, among.view.columns
        self._weights = compiled.weights(request, planner, scoring, held(self._view, planner.survey), among)

    def decodes(
        self, among: Selection, weigh: Callable[[Instance], C], score: Callable[[C], float], short: Callable[[C], bool]
    ) -> Weighing[C]:
        """Weighs decode instances. `score` is infinite for one that may not get the request. Those that lack pages for
        the whole answer are weighed last."""
        answers, near = self._weights.answers(), self._scoring.near
        far_s = self._far((near.session_decode, near.origin))
        bound, crowd = answers.score + far_s, self._columns[ColumnField.REQUESTS]
        sure = lambda: self._sure(answers.tbt)  # noqa: E731
        lacking = among.mask & answers.short
        roomy = self._search(np.where(among.mask ^ lacking, bound, np.inf), crowd, sure, weigh, score)
        if any(s < np.inf and not short(c) for c, s in zip(roomy.weighed, roomy.scores, strict=True)):
            return roomy
        cramped = self._search(np.where(lacking, bound, np.inf), crowd, sure, weigh, score)
        return Weighing((*roomy.weighed, *cramped.weighed), min(roomy.floor, cramped.floor))

    def prefills(
        self,
        among: Selection,
        at_decode: int,
        arriving: int,
        landing_s: float,
        weigh: Callable[[Instance], C],
        score: Callable[[C], float],
    ) -> Weighing[C]:
        """Weighs prefill instances. `score` is infinite for one without an option that passes. If none has one, those
        that come nearest are weighed."""
        self._weights.arriving = arriving
        prompts = self._weights.prompts(among.mask, at_decode, landing_s)
        bound = np.where(among.mask, prompts.cost + self._far((self._scoring.near.session_prefill,)), np.inf)
        found = self._search(bound, self._columns[ColumnField.WORKS], lambda: among.mask, weigh, score)
        if found.any:
            return found
        return Weighing((*found.weighed, *map(weigh, self._nearest(prompts, among))), np.inf)

    def alone(
        self, among: Selection, weigh: Callable[[Instance], C], score: Callable[[C], float], first: Sequence[C]
    ) -> Weighing[C]:
        """Weighs instances for the whole request. `first` are other options that were weighed already."""
        columns, request = self._columns, self._request
        among = Selection(self._view, among.mask & self._may_be_alone())
        answers = self._weights.answers(alone=True)
        prompts = self._weights.prompts(among.mask, 0, answers.landing, alone=True)
        near = self._scoring.near
        cost = prompts.cost + answers.landing + answer_s(answers.slot, answers.tbt, request.max_tokens)
        cost += self._far((near.session_prefill, near.session_decode, near.origin))
        bound = np.where(among.mask, cost, np.inf)
        crowd = columns[ColumnField.WORKS] + columns[ColumnField.REQUESTS]
        found = self._search(bound, crowd, lambda: self._sure(answers.tbt), weigh, score, first)
        if found.any:
            return found
        return Weighing((*found.weighed, *map(weigh, self._nearest(prompts, among))), np.inf)

    def _may_be_alone(self) -> Mask:
        held_blocks = np.minimum(self._weights.held.sealed, self._weights.usable_blocks)
        uncached = self._request.prompt_tokens - held_blocks * self._weights.block
        alone: Floats = self._columns[ColumnField.ALONE]
        return (alone > 0) & (uncached <= alone)

    def _nearest(self, prompts: PromptBounds, among: Selection) -> Iterator[Instance]:
        """Yields the instances that come nearest to the SLO, and those that will meet it first when queues drain."""
        rows: dict[int, None] = {}
        for least in (prompts.draining, prompts.least):
            left = np.where(among.mask, least, np.inf)
            for row in np.argsort(left, kind="stable")[:NEAREST].tolist():
                if left[row] < np.inf:
                    rows[row] = None
        return (self._columns.instances[row] for row in rows)

    def _sure(self, tbt: Floats) -> Mask:
        """Returns which instances may have the request by what is known without a forecast (see `Judge.decode`)."""
        judge = self._scoring.judge
        if judge.mode in (Mode.OFF, Mode.BASELINE) or judge.request.lane is Lane.BATCH:
            return np.ones(len(tbt), dtype=np.bool_)
        bound = np.minimum(judge.slo.tbt_s, np.maximum(self._columns[ColumnField.TIGHTEST], judge.default_tbt_s))
        return tbt <= bound

    def _far(self, worths: Collection[NearInstances]) -> Floats | float:
        """Returns what it costs at each instance not to be near."""
        if not any(worth.most_s for worth in worths):
            return 0.0
        found = np.full(len(self._columns), sum(worth.most_s for worth in worths))
        for name in {name for worth in worths for name in worth.near}:
            row = self._columns.row(name)
            if row >= 0:
                found[row] = sum(worth.far_s(name) for worth in worths)
        return found

    def _search(
        self,
        bound: Floats,
        crowd: Floats,
        sure: Callable[[], Mask],
        weigh: Callable[[Instance], C],
        score: Callable[[C], float],
        first: Sequence[C] = (),
    ) -> _Found[C]:
        weighed = list(first)
        scores = list(map(score, weighed))
        best = min(scores, default=np.inf)
        failed, size = 0, AT_ONCE
        following = following_of(bound, crowd)
        while True:
            low, rows = following(best)
            if rows is None:
                break
            for row in some(rows, size, self._scoring.rng):
                bound[row] = np.inf
                one = weigh(self._columns.instances[row])
                weighed.append(one)
                found = score(one)
                scores.append(found)
                best = min(best, found)
                failed += found == np.inf
            if failed >= DEEP and best == np.inf:
                bound[~sure()] = np.inf
            size *= 2
        return _Found(weighed, low, scores)


def screen_of(
    request: Schedule, among: Sequence[Instance], planner: FetchPlanner, scoring: ScoringContext
) -> Screen | None:
    """Returns a screen, or None where instances are so few that all are weighed."""
    if not isinstance(among, Selection) or len(among.view.columns) <= FEW or not len(among):
        return None
    among.view.columns.settle()
    return Screen(request, among, planner, scoring)


def following_of(bound: Floats, crowd: Floats) -> Callable[[float], tuple[float, Sequence[int] | None]]:
    """Returns a function of the best score so far. It returns the least bound, and among the rows whose bound is as
    good those with the least crowd; None in place of rows when no bound is better than that score. `bound` may change
    between calls."""
    native = compiled.functions()
    if native is not None:
        return compiled.NextToWeigh(native, bound, crowd).tied

    return lambda best: tied(bound, crowd, best)


def tied(bound: Floats, crowd: Floats, best: float) -> tuple[float, Sequence[int] | None]:
    """Does what `following_of` describes, with numpy."""
    low = float(bound.min(initial=np.inf))
    if not (low < np.inf and best > as_good(low)):
        return low, None
    rows = np.flatnonzero(bound <= as_good(low))
    least = crowd[rows]
    found: list[int] = rows[least == least.min()].tolist()
    return low, found


def some(rows: Sequence[int], size: int, rng: random.Random) -> Sequence[int]:
    """Returns at most `size` of the rows, chosen by chance."""
    return [rows[at] for at in rng.sample(range(len(rows)), size)] if len(rows) > size else rows
