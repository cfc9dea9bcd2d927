"""How a request is served: by a pair (one instance computes the prompt, another decodes), or by one instance that does
both. Pure: instances are only read here.

A pair is chosen half by half: the decode instance with the least predicted TBT, then the prefill instance with the
least predicted TTFT (Algorithm 1 of the Mooncake paper; prefills.py). Every coupled instance, and every decode instance
that may compute so much, is weighed beside the best pair, and the least cost wins:

    cost = TTFT + stall + others + answer + handoff + far            score.py has the formulas

    TTFT     predicted: max(queue, fetch) + prompt + the part of the transfer that is not hidden + the wait for room.
             Where rows run on the instance that computes, the prompt is slower by their share of the mixed steps
             (interference.py).
    stall    row-seconds that those rows stand still meanwhile: rows x prompt (STALL_WEIGHT each)
    others   what others in the prefill instance's queue lose by it (shortest_first.py)
    answer   the next COUNTED_TOKENS of the answer at the predicted TBT, and the wait for a place in the batch. Prompts
             queued at the instance make its TBT longer.
    handoff  of a pair: the time of its messages
    far      what it costs not to be where the request's session and origin are (affinity.py)

An option is excluded when its TTFT, its TBT or, while the prompt is computed, the TBT of the rows beside it would
exceed the SLO. The request is refused when all options are excluded, and is told when to come back. Where instances are
many, most of them are not weighed (candidates/select.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from kvmesh.errors import Overloaded
from kvmesh.services.conductor import score
from kvmesh.services.conductor.admission.judge import Judge
from kvmesh.services.conductor.candidates.fields import FEW, ColumnField
from kvmesh.services.conductor.candidates.select import Screen, Weighing, screen_of
from kvmesh.services.conductor.candidates.selection import Selection
from kvmesh.services.conductor.costs.fit import ENOUGH_SAMPLES
from kvmesh.services.conductor.domain import Refuse, Role, Schedule
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.placing import decodes as decoding
from kvmesh.services.conductor.placing import prefills as prefilling
from kvmesh.services.conductor.placing.decodes import DecodeChoice, decode_load
from kvmesh.services.conductor.placing.nearness import NOWHERE, Nearness
from kvmesh.services.conductor.placing.prefills import PrefillCandidate, PrefillChoice
from kvmesh.services.conductor.placing.scoring_context import ScoringContext as ScoringContext
from kvmesh.services.conductor.placing.ties import Comparison, RoomCandidate, TieCandidate, compare, even_out, use_room
from kvmesh.services.conductor.prefixes.fetch_plan import FetchPlanner, FetchSegment
from kvmesh.services.conductor.prefixes.index import PrefixPlace, PrefixSurvey

# Two streams, the landing and its lease, the first token's way through decode: at one request at a time about a
# millisecond of `admit` and `stream` in benchmarks/results/mesh-closed.json.
HANDOFF_S = 0.001
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
        """The predicted TTFT, until decode can go on from the first token; placements and admission use it."""
        return self.prefill.ttft_s + self.decode.landing_wait_s


@dataclass(slots=True)
class PlacementAndWeighed:
    """The answer for a pair, and all candidates that were weighed for it."""

    answer: PlacementChoice | Refuse
    prefills: Sequence[PrefillCandidate]
    decodes: Sequence[DecodeChoice]
    decode: DecodeChoice | None  # with which prefills were weighed
    near: Nearness = NOWHERE  # what was added to their scores
    # What each half was chosen by; None: nobody passed, or nobody was weighed.
    decode_by: Comparison[DecodeChoice] | None = None
    prefill_by: Comparison[PrefillChoice] | None = None


@dataclass(slots=True)
class SingleInstance:
    """One instance weighed for the whole request. `choice` is its best option, or where `refused` says that none
    passes, the one that came nearest."""

    choice: PlacementChoice
    refused: Refuse | None


class ServingMode(Enum):
    PAIR = "pair"
    COUPLED = "coupled"
    DECODE = "decode"


@dataclass(slots=True)
class Option:
    """One serving mode on certain instances. `choice` is None when it was not weighed, for the reason `why_not`."""

    kind: ServingMode
    prefill: Instance
    decode: Instance
    choice: PlacementChoice | None = None
    refused: Refuse | None = None
    why_not: str = ""
    cost_s: float = 0.0
    far_s: float = 0.0  # of that

    @property
    def names(self) -> frozenset[str]:
        """The ids of its instances."""
        return frozenset((self.prefill.ref.instance_id, self.decode.ref.instance_id))

    @property
    def passes(self) -> bool:
        """Whether the request may be served this way."""
        return self.choice is not None and self.refused is None


@dataclass(slots=True)
class WeighedModes:
    """The answer, and all options that were weighed for it. `pair` is None when no two instances could form one."""

    answer: PlacementChoice | Refuse
    options: Sequence[Option]
    pair: PlacementAndWeighed | None
    by: Comparison[Option] | None = None  # what the kind was chosen by; None: nothing passed, or a policy picked it
    picked_by: str = ""  # the policy that picked the instances; "": all that could have the request were weighed


def kind_of(choice: PlacementChoice) -> ServingMode:
    """Returns the serving mode of a choice, which follows from its instances."""
    if choice.prefill.instance is not choice.decode.instance:
        return ServingMode.PAIR
    return ServingMode.COUPLED if choice.decode.instance.role is Role.BOTH else ServingMode.DECODE


def cost_s(choice: PlacementChoice, max_tokens: int) -> float:
    """Returns the cost of a choice in seconds, as the module's docstring defines it. `max_tokens` is that of the
    answer, 0 when the request has no limit."""
    handoff_s = HANDOFF_S if kind_of(choice) is ServingMode.PAIR else 0.0
    answer, prefill = score.answer_s(choice.decode.slot_wait_s, choice.decode.tbt_s, max_tokens), choice.prefill
    cost: float = score.placement_cost_s(choice.ttft_s, prefill.shared.stall_s, prefill.others_s, answer, handoff_s)
    return cost


# ── the decision ─────────────────────────────────────────────────────────────────────────────────


def choose(
    request: Schedule,
    prefills: Sequence[Instance],
    decodes: Sequence[Instance],
    places: Mapping[str, PrefixPlace],
    planner: FetchPlanner,
    scoring: ScoringContext,
) -> WeighedModes:
    """Weighs pairs and single instances, and returns the answer. `prefills` and `decodes` may get this request and have
    KV that fits together; at least one option is possible (see `possible`). `places` has each instance's place in the
    survey, by id."""
    pair, options = None, []
    if pairable(prefills, decodes):
        pair = choose_pair(request, prefills, decodes, places, planner, scoring)
        options.append(_of_pair(request, pair, prefills, decodes, scoring))
    some = _alones(request, decodes, places, planner, scoring, options)
    options = list(some.weighed)
    passing = [o for o in options if o.passes]
    if passing:
        clean = [o for o in passing if not o.names & request.avoid] if request.avoid else passing
        weighed = clean or passing
        score: Callable[[Option], float] = lambda o: o.cost_s  # noqa: E731
        if some.floor == _INF and 1 < len(weighed) <= FEW and all(o.decode.external for o in weighed):
            rooms = [_room(request, o) for o in weighed]
            score = _handicapped(weighed, score, use_room(rooms))
        by = compare(weighed, score, lambda o: _crowd(o, scoring.now), scoring.rng, some.floor)
        choice = by.chosen.choice
        assert choice is not None, "an option that passes has a choice"
        return WeighedModes(choice, options, pair, by)
    refusals = [o.refused for o in options if o.refused is not None]
    return WeighedModes(min(refusals, key=_hopeless), options, pair)


def _room(request: Schedule, option: Option) -> RoomCandidate:
    """Returns how an engine's cache, which nothing is fetched from and nothing but itself keeps, would take the
    prompt."""
    assert option.choice is not None, "an option that passes has a choice"
    engine, prompt = option.decode, option.choice.prefill
    kept, most = engine.load.store_blocks, engine.load.store_capacity or engine.capacity_blocks
    drops = kept + engine.blocks_for(engine.queue.coming_tokens + prompt.computed_tokens) - most
    return RoomCandidate(option.cost_s, (round(prompt.queue_s, 3), engine.batch.requests), drops)


def _crowd(option: Option, now: float) -> tuple[float, float, float]:
    (prompts, prompt_s), (rows, tokens) = option.prefill.queue.crowd(now), option.decode.batch.crowd(now)
    return prompts + rows, prompt_s, tokens


def _hopeless(refused: Refuse) -> tuple[float, float]:
    """Orders refusals: those that waiting would help come first, then those with the least wait."""
    retry_ms = refused.error.retry_after_ms if isinstance(refused.error, Overloaded) else float("inf")
    return refused.least_s, retry_ms


# ── a pair: decode, then prefill ─────────────────────────────────────────────────────────────────


def choose_pair(
    request: Schedule,
    prefills: Sequence[Instance],
    decodes: Sequence[Instance],
    places: Mapping[str, PrefixPlace],
    planner: FetchPlanner,
    scoring: ScoringContext,
) -> PlacementAndWeighed:
    """Returns the best pair, or why there is none. Both lists hold instances that may get this request and whose KV
    fits together; at least two of these are different. `places` has each instance's place in the survey, by id."""
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
    """Returns what decode fetches from holders itself, and the block where that ends. Decode fetches blocks that
    prefill would have to fetch too, because a chain of two transfers would bring them later. It does so only directly
    behind the blocks that it has, so that prefill pushes one piece, and only from memory; what lies in others' lower
    tiers, prefill fetches and pushes."""
    if not prefill.segments or not prefill.local_blocks <= decode.at_decode < prefill.fetched_to:
        return (), 0
    own = PrefixPlace(place.sealed)
    end = prefill.fetched_to
    return planner.plan(own, decode.instance.node_id, decode.at_decode, end, planner.memory, to_decode=True)


# ── one instance ─────────────────────────────────────────────────────────────────────────────────


def pairable(prefills: Sequence[Instance], decodes: Sequence[Instance]) -> bool:
    """Says whether the lists contain two different instances that can hand KV over. External ones cannot; their KV fits
    none but external ones', so the first tells for all."""
    if not (prefills and decodes) or prefills[0].external:
        return False
    return not (len(prefills) == len(decodes) == 1 and prefills[0] is decodes[0])


def possible(
    request: Schedule,
    prefills: Sequence[Instance],
    decodes: Sequence[Instance],
    places: Mapping[str, PrefixPlace],
    planner: FetchPlanner,
) -> bool:
    """Says whether there is any option to weigh."""
    if prefills and decodes:  # two of them, or one that does both
        return True
    return any(i.alone_tokens and not too_much(request, i, places[i.ref.instance_id], planner.survey) for i in decodes)


def _alones(
    request: Schedule,
    decodes: Sequence[Instance],
    places: Mapping[str, PrefixPlace],
    planner: FetchPlanner,
    scoring: ScoringContext,
    pair: Sequence[Option],
) -> Weighing[Option]:
    """Returns `pair` and the instances that could serve the whole request alone. Where these are many, only those worth
    weighing, first those that need not be avoided."""

    def weigh(instance: Instance) -> Option:
        return _alone(request, instance, places[instance.ref.instance_id], planner, scoring)

    among = able_alone(decodes)
    if not among:
        return Weighing(pair, float("inf"))
    if not isinstance(among, Selection) or (screen := screen_of(request, among, planner, scoring)) is None:
        return Weighing([*pair, *map(weigh, among)], float("inf"))
    wanted = among.without(request.avoid)
    some = screen.alone(wanted, weigh, _score, [o for o in pair if not o.names & request.avoid])
    if any(o.passes for o in some.weighed):
        return some
    others = screen.alone(among.only(request.avoid), weigh, _score, [o for o in pair if o.names & request.avoid])
    return Weighing((*some.weighed, *others.weighed), others.floor)


def _score(option: Option) -> float:
    return option.cost_s if option.passes else float("inf")


def _alone(
    request: Schedule, instance: Instance, place: PrefixPlace, planner: FetchPlanner, scoring: ScoringContext
) -> Option:
    kind = ServingMode.COUPLED if instance.role is Role.BOTH else ServingMode.DECODE
    if why := too_much(request, instance, place, planner.survey):
        return Option(kind, instance, instance, why_not=why)
    found = weigh_alone(request, instance, place, planner, scoring)
    far_s = scoring.near.of(instance, instance)
    cost = cost_s(found.choice, request.max_tokens) + far_s
    return Option(kind, instance, instance, found.choice, found.refused, cost_s=cost, far_s=far_s)


def _of_pair(
    request: Schedule,
    pair: PlacementAndWeighed,
    prefills: Sequence[Instance],
    decodes: Sequence[Instance],
    scoring: ScoringContext,
) -> Option:
    if isinstance(pair.answer, PlacementChoice):
        prefill, decode = pair.answer.prefill.instance, pair.answer.decode.instance
        far_s = scoring.near.of(prefill, decode)
        cost = cost_s(pair.answer, request.max_tokens) + far_s
        return Option(ServingMode.PAIR, prefill, decode, pair.answer, cost_s=cost, far_s=far_s)
    decode = pair.decode.instance if pair.decode is not None else decodes[0]
    prefill = next((p for p in prefills if p is not decode), prefills[0])
    return Option(ServingMode.PAIR, prefill, decode, refused=pair.answer)


def able_alone(decodes: Sequence[Instance]) -> Sequence[Instance]:
    """Returns the instances that may compute prompts for their own batch."""
    if isinstance(decodes, Selection):
        return Selection(decodes.view, decodes.mask & decodes.view.columns.mask(ColumnField.ALONE))
    return [i for i in decodes if i.alone_tokens]


def uncached_tokens(request: Schedule, instance: Instance, place: PrefixPlace, survey: PrefixSurvey) -> int:
    """Returns how many tokens of the prompt the instance would have to compute after what is sealed in its memory."""
    usable = (request.prompt_tokens - 1) // instance.model.block_tokens
    held = min(survey.depth(PrefixPlace(place.sealed)), usable)
    return request.prompt_tokens - held * instance.model.block_tokens


def too_much(request: Schedule, instance: Instance, place: PrefixPlace, survey: PrefixSurvey) -> str:
    """Returns why the instance may not serve the request alone, or ""."""
    if instance.alone_tokens == float("inf"):
        return ""
    uncached = uncached_tokens(request, instance, place, survey)
    if uncached <= instance.alone_tokens:
        return ""
    return f"computes at most {instance.alone_tokens:,} uncached tokens itself, of {uncached:,}"


def weigh_alone(
    request: Schedule, instance: Instance, place: PrefixPlace, planner: FetchPlanner, scoring: ScoringContext
) -> SingleInstance:
    """Weighs one instance for the whole request. `place` is where its blocks show in the survey."""
    decode = decoding.choice(request, instance, place, planner.survey, scoring.now, alone=True)
    candidate = prefilling.candidate(
        request,
        instance,
        place,
        planner,
        prefilling.ALL_BLOCKS,
        scoring.threshold,
        scoring.now,
        scoring.fetch,
        overtaking=scoring.overtaking,
    )
    slo_s = scoring.ttft_slo_s - decode.landing_wait_s
    found, refused = candidate.best(slo_s, scoring.tbt_slo_s), None
    if found is None or not scoring.judge.decode(decode).passes:
        fits = pick_decode(request, [decode], scoring)
        best = pick_prefill([candidate], decode.landing_wait_s, scoring)
        refused = fits if isinstance(fits, Refuse) else best if isinstance(best, Refuse) else None
        if isinstance(best, Refuse):
            best = min(candidate.options, key=lambda o: o.admission_ttft_s)
        found = best
    until = candidate.load_until(found, slo_s)
    return SingleInstance(PlacementChoice(found, decode, load_until=until), refused)


# ── comparing what was weighed; refusing where nothing passes ────────────────────────────────────


def pick_prefill(
    candidates: Sequence[PrefillCandidate], landing_wait_s: float, scoring: ScoringContext, floor: float = _INF
) -> PrefillChoice | Refuse:
    """Returns the best option of all candidates. `landing_wait_s` is added to their TTFT. `floor` is explained at
    `ties.pick`."""
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
    """Returns the passing choice with the least score, preferably one with room for the whole answer. `floor` is
    explained at `ties.pick`."""
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
    """Returns the least TBT of any choice if everything were idle, where that is known to exceed the SLO; else 0.
    `prefills.least_s` does the same for the TTFT."""
    alone_s = [judge.alone_s(c.instance) for c in choices]
    known = all(len(c.instance.fits.decode(c.instance.axes).fit) >= ENOUGH_SAMPLES for c in choices)
    return min(alone_s) if known and min(alone_s) > judge.slo.tbt_s else 0.0


def _evened(
    choices: Sequence[C], score: Callable[[C], float], candidates: Sequence[TieCandidate]
) -> Callable[[C], float]:
    """Returns a score function that adds the handicaps of `ties.even_out`."""
    return _handicapped(choices, score, even_out(candidates))


def _handicapped(choices: Sequence[C], score: Callable[[C], float], handicaps: Sequence[float]) -> Callable[[C], float]:
    """Returns a score function that adds each choice's handicap."""
    if not any(handicaps):
        return score
    by_choice = {id(c): handicap for c, handicap in zip(choices, handicaps, strict=True)}
    return lambda c: score(c) + by_choice[id(c)]


def _overloaded_rows(best: PrefillChoice, scoring: ScoringContext) -> Refuse:
    """Returns the refusal of a prompt that would hold up the rows beside it; it can come when these are gone."""
    batch = best.instance.batch
    drain_s = batch.drain_s(batch.requests)
    return overloaded("TBT", best.shared.rows_tbt_s, scoring.tbt_slo_s, drain_s, drain_s)


def without(instances: Sequence[Instance], names: Collection[str]) -> Sequence[Instance]:
    """Returns the instances except those of these names."""
    if isinstance(instances, Selection):
        return instances.without(names)
    return [i for i in instances if i.ref.instance_id not in names]


def overloaded(
    what: str, predicted_s: float, slo_s: float, drain_s: float, wanted_s: float, least_s: float = 0.0
) -> Refuse:
    """Returns a refusal for load. The retry time is `wanted_s`, the seconds of waiting that would help; if no wait
    would (infinity) it is `drain_s`, the time until the queue is empty. `least_s` is explained at `Refuse`."""
    retry_s = wanted_s if wanted_s < float("inf") else max(HOPELESS_RETRY_S, drain_s)
    retry_ms = math.ceil(1000 * min(MAX_RETRY_S, max(MIN_RETRY_S, retry_s)))
    text = f"predicted {what} {predicted_s * 1000:.0f} ms is over the SLO of {slo_s * 1000:.0f} ms at every instance"
    return Refuse(Overloaded(text, retry_after_ms=retry_ms), what.lower(), least_s)
