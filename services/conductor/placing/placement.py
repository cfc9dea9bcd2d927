"""The best pair for one request: the prefill instance with the least predicted TTFT, the decode instance with the least
predicted TBT, or a refusal that says when to come back. Pure: instances are only read here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kvmesh.errors import Overloaded
from services.conductor.admission.judge import Judge
from services.conductor.candidates.fields import FEW
from services.conductor.candidates.select import Screen, Weighing, screen_of
from services.conductor.candidates.selection import Selection
from services.conductor.costs.fit import ENOUGH_SAMPLES
from services.conductor.domain import Refuse, Schedule
from services.conductor.fleet.instance import Instance
from services.conductor.placing import decodes as decoding
from services.conductor.placing import prefills as prefilling
from services.conductor.placing.comparison import Comparison, compare
from services.conductor.placing.decode_loads import decode_load
from services.conductor.placing.decodes import DecodeChoice
from services.conductor.placing.nearness import NOWHERE, Nearness
from services.conductor.placing.prefills import PrefillCandidate, PrefillChoice
from services.conductor.placing.scoring_context import ScoringContext as ScoringContext
from services.conductor.placing.ties import TieCandidate, even_out
from services.conductor.prefixes.fetch_plan import FetchPlanner, FetchSegment
from services.conductor.prefixes.index import PrefixPlace

MIN_RETRY_S, HOPELESS_RETRY_S, MAX_RETRY_S = 0.1, 1.0, 60.0
DECODE_EVEN = 0.1  # of its score, that a decode instance may be handicapped by
_INF = float("inf")
C = TypeVar("C")


@dataclass(slots=True)
class PlacementChoice:
    prefill: PrefillChoice
    decode: DecodeChoice
    decode_segments: tuple[FetchSegment, ...] = ()  # what decode fetches itself
    decode_fetched_to: int = 0
    load_until: int | None = None  # see `Placement` in conductor.proto
    decode_load_until: int | None = None
    decode_load_s: float = 0.0  # what decode reads out of its own lower tiers

    @property
    def ttft_s(self) -> float:
        """Predicted, until decode can go on from the first token: what placements and admission go by."""
        return self.prefill.ttft_s + self.decode.landing_wait_s


@dataclass(slots=True)
class PlacementAndWeighed:
    """The answer, and everybody who was weighed for it."""

    answer: PlacementChoice | Refuse
    prefills: Sequence[PrefillCandidate]
    decodes: Sequence[DecodeChoice]
    decode: DecodeChoice | None  # with which prefills were weighed
    near: Nearness = NOWHERE  # what was added to their scores
    # What each half was chosen by; None: nobody passed, or nobody was weighed.
    decode_by: Comparison[DecodeChoice] | None = None
    prefill_by: Comparison[PrefillChoice] | None = None


def choose(
    request: Schedule,
    prefills: Sequence[Instance],
    decodes: Sequence[Instance],
    places: Mapping[str, PrefixPlace],
    planner: FetchPlanner,
    scoring: ScoringContext,
) -> PlacementAndWeighed:
    """Both lists hold instances that may get this request and whose KV fits together, some two of them different ones.
    `places`: of each of them, by instance id. Where they are many, most of them are left out (candidates/select.py).
    """
    if len(prefills) == 1:  # which is then not its own decode instance: that would be no pair
        decodes = without(decodes, {prefills[0].ref.instance_id})
    screen = screen_of(request, decodes, planner, scoring)
    some = _weigh_decodes(request, without(decodes, request.avoid) or decodes, places, planner, scoring, screen)
    weighed_decodes = some.weighed
    decode_by = _compare_decodes(weighed_decodes, scoring, some.floor)
    if isinstance(decode_by, Refuse):
        return PlacementAndWeighed(decode_by, (), weighed_decodes, None, scoring.near)
    decode = decode_by.chosen
    others = without(prefills, {decode.instance.ref.instance_id})
    few = _weigh_prefills(request, without(others, request.avoid) or others, decode, places, planner, scoring, screen)
    weighed_prefills = few.weighed
    prefill_by = _compare_prefills(weighed_prefills, decode.landing_wait_s, scoring, few.floor)
    if isinstance(prefill_by, Refuse):
        return PlacementAndWeighed(prefill_by, weighed_prefills, weighed_decodes, decode, scoring.near, decode_by)
    prefill = prefill_by.chosen
    place, slo_s = places[decode.instance.ref.instance_id], scoring.ttft_slo_s - decode.landing_wait_s
    segments, end = _decode_pulls(prefill, decode, place, planner)
    of = next(c for c in weighed_prefills if c.instance is prefill.instance)
    until = of.load_until(prefill, slo_s)
    load = decode_load(request, prefill, decode, place, planner, max(end, decode.at_decode), slo_s)
    chosen = PlacementChoice(
        prefill if load.tail_s == prefill.tail_s else replace(prefill, tail_s=load.tail_s),
        decode,
        (*segments, *load.segments),
        max(end, load.until),
        until,
        load.limit,
        load.load_s,
    )
    return PlacementAndWeighed(chosen, weighed_prefills, weighed_decodes, decode, scoring.near, decode_by, prefill_by)


def _weigh_decodes(
    request: Schedule,
    among: Sequence[Instance],
    places: Mapping[str, PrefixPlace],
    planner: FetchPlanner,
    scoring: ScoringContext,
    screen: Screen | None,
) -> Weighing[DecodeChoice]:
    def weigh(instance: Instance) -> DecodeChoice:
        place, arriving = places[instance.ref.instance_id], planner.arriving(instance.ref.life)
        return decoding.choice(request, instance, place, planner.survey, scoring.now, arriving=arriving)

    def score(c: DecodeChoice) -> float:
        return c.score_s + scoring.near.decode_s(c.instance.ref.instance_id) if scoring.judge.decode(c).passes else _INF

    if screen is None or not isinstance(among, Selection):
        return Weighing([weigh(i) for i in among], _INF)
    return screen.decodes(among, weigh, score, lambda c: c.short)


def _weigh_prefills(
    request: Schedule,
    among: Sequence[Instance],
    decode: DecodeChoice,
    places: Mapping[str, PrefixPlace],
    planner: FetchPlanner,
    scoring: ScoringContext,
    screen: Screen | None,
) -> Weighing[PrefillCandidate]:
    slo_s = scoring.ttft_slo_s - decode.landing_wait_s

    def weigh(i: Instance) -> PrefillCandidate:
        place = places[i.ref.instance_id]
        return prefilling.candidate(
            request,
            i,
            place,
            planner,
            decode.at_decode,
            scoring.threshold,
            scoring.now,
            scoring.fetch,
            decode.arriving,
            scoring.overtaking,
        )

    def score(c: PrefillCandidate) -> float:
        best = c.best(slo_s, scoring.tbt_slo_s)
        return _INF if best is None else best.cost_s + scoring.near.prefill_s(c.instance.ref.instance_id)

    if screen is None or not isinstance(among, Selection):
        return Weighing([weigh(i) for i in among], _INF)
    return screen.prefills(among, decode.at_decode, decode.arriving, decode.landing_wait_s, weigh, score)


def _decode_pulls(
    prefill: PrefillChoice, decode: DecodeChoice, place: PrefixPlace, planner: FetchPlanner
) -> tuple[tuple[FetchSegment, ...], int]:
    """Blocks that prefill has to fetch, decode fetches from the holder too if it lacks them: a chain of two transfers
    would bring them later. Only directly behind what decode has, so that prefill pushes one piece, and only out of
    memory: what lies below at others, prefill fetches first and pushes."""
    if not prefill.segments or not prefill.local_blocks <= decode.at_decode < prefill.fetched_to:
        return (), 0
    own = PrefixPlace(place.sealed)
    return planner.plan(own, decode.instance.node_id, decode.at_decode, prefill.fetched_to, planner.memory)


def pick_prefill(
    candidates: Sequence[PrefillCandidate], landing_wait_s: float, scoring: ScoringContext, floor: float = _INF
) -> PrefillChoice | Refuse:
    """The best way of them all. `landing_wait_s`: what else is in the TTFT. `floor`: see `ties.pick`."""
    found = _compare_prefills(candidates, landing_wait_s, scoring, floor)
    return found if isinstance(found, Refuse) else found.chosen


def _compare_prefills(
    candidates: Sequence[PrefillCandidate], landing_wait_s: float, scoring: ScoringContext, floor: float
) -> Comparison[PrefillChoice] | Refuse:
    slo_s = scoring.ttft_slo_s - landing_wait_s
    passing = [best for c in candidates if (best := c.best(slo_s, scoring.tbt_slo_s)) is not None]
    if passing:
        near = scoring.near.prefill_s
        score: Callable[[PrefillChoice], float] = lambda c: c.cost_s + near(c.instance.ref.instance_id)  # noqa: E731
        if floor == _INF and 1 < len(passing) <= FEW:
            score = _evened(
                passing,
                score,
                [
                    TieCandidate(score(c), round(c.queue_s, 3), c.prefill_s, c.instance.queue.crowd(scoring.now)[1])
                    for c in passing
                ],
            )
        return compare(passing, score, lambda c: c.instance.queue.crowd(scoring.now), scoring.rng, floor)
    if in_time := [best for c in candidates if (best := c.best(slo_s)) is not None]:
        return _overloaded_rows(min(in_time, key=lambda c: c.shared.rows_tbt_s), scoring)
    best, wanted_s, drain_s = prefilling.soonest(candidates, slo_s)
    if wanted_s == float("inf"):
        excess_s = best.admission_ttft_s - slo_s
        drain_s += landing_wait_s
        wanted_s = excess_s if excess_s <= drain_s else wanted_s
    least_s = prefilling.least_s(candidates, scoring.ttft_slo_s)
    return overloaded("TTFT", best.admission_ttft_s + landing_wait_s, scoring.ttft_slo_s, drain_s, wanted_s, least_s)


def pick_decode(
    request: Schedule, choices: Sequence[DecodeChoice], scoring: ScoringContext, floor: float = _INF
) -> DecodeChoice | Refuse:
    """The one with the least score, if it may be, with room for the whole answer. `floor`: see `ties.pick`."""
    found = _compare_decodes(choices, scoring, floor)
    return found if isinstance(found, Refuse) else found.chosen


def _compare_decodes(
    choices: Sequence[DecodeChoice], scoring: ScoringContext, floor: float
) -> Comparison[DecodeChoice] | Refuse:
    verdicts = [scoring.judge.decode(c) for c in choices]
    passing = [c for c, verdict in zip(choices, verdicts, strict=True) if verdict.passes]
    if passing:
        roomy = [c for c in passing if not c.short] or passing
        near = scoring.near.decode_s
        score: Callable[[DecodeChoice], float] = lambda c: c.score_s + near(c.instance.ref.instance_id)  # noqa: E731
        if floor == _INF and 1 < len(roomy) <= FEW:
            given = [c.instance.batch.crowd(scoring.now) for c in roomy]
            score = _evened(
                roomy,
                score,
                [
                    TieCandidate(score(c), rows, DECODE_EVEN * c.score_s, tokens * c.tbt_s)
                    for c, (rows, tokens) in zip(roomy, given, strict=True)
                ],
            )
        return compare(roomy, score, lambda c: c.instance.batch.crowd(scoring.now), scoring.rng, floor)
    best, verdict = min(zip(choices, verdicts, strict=True), key=lambda both: both[1].tbt_s / both[1].slo_s)
    batch = best.instance.batch
    wanted_s = scoring.judge.wait_s(best, verdict.slo_s)
    least_s = _least_tbt_s(choices, scoring.judge)
    return overloaded("TBT", verdict.tbt_s, verdict.slo_s, batch.drain_s(batch.requests), wanted_s, least_s)


def _least_tbt_s(choices: Sequence[DecodeChoice], judge: Judge) -> float:
    """As `prefills.least_s`, of the TBT."""
    alone_s = [judge.alone_s(c.instance) for c in choices]
    known = all(len(c.instance.fits.decode.fit) >= ENOUGH_SAMPLES for c in choices)
    return min(alone_s) if known and min(alone_s) > judge.slo.tbt_s else 0.0


def _evened(
    choices: Sequence[C], score: Callable[[C], float], candidates: Sequence[TieCandidate]
) -> Callable[[C], float]:
    """`score`, and what some are handicapped by (see ties.py)."""
    handicaps = even_out(candidates)
    if not any(handicaps):
        return score
    by_choice = {id(c): handicap for c, handicap in zip(choices, handicaps, strict=True)}
    return lambda c: score(c) + by_choice[id(c)]


def _overloaded_rows(best: PrefillChoice, scoring: ScoringContext) -> Refuse:
    """The prompt would hold up the rows beside it: it can come when they are gone."""
    batch = best.instance.batch
    drain_s = batch.drain_s(batch.requests)
    return overloaded("TBT", best.shared.rows_tbt_s, scoring.tbt_slo_s, drain_s, drain_s)


def without(instances: Sequence[Instance], names: Collection[str]) -> Sequence[Instance]:
    """But for these."""
    if isinstance(instances, Selection):
        return instances.without(names)
    return [i for i in instances if i.ref.instance_id not in names]


def overloaded(
    what: str, predicted_s: float, slo_s: float, drain_s: float, wanted_s: float, least_s: float = 0.0
) -> Refuse:
    """`wanted_s` of waiting would help if the queue drains for that long; `drain_s` is how long it can. `least_s`: see
    `Refuse`."""
    retry_s = wanted_s if wanted_s < float("inf") else max(HOPELESS_RETRY_S, drain_s)
    retry_ms = math.ceil(1000 * min(MAX_RETRY_S, max(MIN_RETRY_S, retry_s)))
    text = f"predicted {what} {predicted_s * 1000:.0f} ms is over the SLO of {slo_s * 1000:.0f} ms at every instance"
    return Refuse(Overloaded(text, retry_after_ms=retry_ms), what.lower(), least_s)
