"""What a request becomes: a pair (one instance computes the prompt, another answers), or alone on one that does both.
Every coupled instance and every decode instance that may compute so much is weighed beside the best pair, and the least
cost wins:

    cost = TTFT + stall + line + answer + handoff + far

    TTFT     predicted: max(queue, fetching) + prompt + what of the transfer shows + waiting for room. Where rows run
             on the instance that computes, the prompt is slower by their share of the mixed steps (interference.py).
    stall    row-seconds that those rows stand still meanwhile: rows x prompt (STALL_WEIGHT each)
    line     what others in the prefill instance's line lose by it (shortest_first.py)
    answer   the next COUNTED_TOKENS of the answer at the predicted TBT, and waiting for a place in the batch. Prompts
             queued at the instance make its TBT longer.
    handoff  of a pair: its messages
    far      what it costs not to be where the request's session and origin are (affinity.py)

A kind is out when its TTFT, its TBT or, while the prompt is computed, the TBT of the rows beside it would pass the SLO;
the request is refused when all are. Pure: instances are only read here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from kvmesh.errors import Overloaded
from services.conductor import score
from services.conductor.candidates.select import Weighing, screen_of
from services.conductor.candidates.selection import Selection
from services.conductor.domain import Refuse, Role, Schedule
from services.conductor.fleet.instance import Instance
from services.conductor.placing import placement, single_instance
from services.conductor.placing.comparison import Comparison, compare
from services.conductor.placing.placement import PlacementAndWeighed, PlacementChoice
from services.conductor.placing.scoring_context import ScoringContext
from services.conductor.prefixes.fetch_plan import FetchPlanner
from services.conductor.prefixes.index import PrefixPlace

# Two streams, the landing and its lease, the first token's way through decode: at one request at a time about a
# millisecond of `admit` and `stream` in benchmarks/results/mesh-closed.json.
HANDOFF_S = 0.001


class ServingMode(Enum):
    PAIR = "pair"
    COUPLED = "coupled"
    DECODE = "decode"


@dataclass(slots=True)
class Option:
    """One kind on certain instances. `choice`: None for one that was not weighed; `why_not` it cannot be."""

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
        """Of its instances."""
        return frozenset((self.prefill.ref.instance_id, self.decode.ref.instance_id))

    @property
    def passes(self) -> bool:
        """Whether the request may become this."""
        return self.choice is not None and self.refused is None


@dataclass(slots=True)
class WeighedModes:
    """The answer, and all that was weighed for it; `pair`: None when no two instances could be one."""

    answer: PlacementChoice | Refuse
    options: Sequence[Option]
    pair: PlacementAndWeighed | None
    by: Comparison[Option] | None = None  # what the kind was chosen by; None: nothing passed, or a policy picked it
    picked_by: str = ""  # the policy that picked the instances; "": all that could have the request were weighed


def kind_of(choice: PlacementChoice) -> ServingMode:
    """By its instances."""
    if choice.prefill.instance is not choice.decode.instance:
        return ServingMode.PAIR
    return ServingMode.COUPLED if choice.decode.instance.role is Role.BOTH else ServingMode.DECODE


def cost_s(choice: PlacementChoice, max_tokens: int) -> float:
    """See above; seconds. `max_tokens`: of the answer, 0 when nobody told."""
    handoff_s = HANDOFF_S if kind_of(choice) is ServingMode.PAIR else 0.0
    answer, prefill = score.answer_s(choice.decode.slot_wait_s, choice.decode.tbt_s, max_tokens), choice.prefill
    cost: float = score.placement_cost_s(choice.ttft_s, prefill.shared.stall_s, prefill.others_s, answer, handoff_s)
    return cost


def choose(
    request: Schedule,
    prefills: Sequence[Instance],
    decodes: Sequence[Instance],
    places: Mapping[str, PrefixPlace],
    planner: FetchPlanner,
    scoring: ScoringContext,
) -> WeighedModes:
    """Instances that may get this request and whose KV fits together, by what they may do for it; some kind is possible
    (see `possible`). `places`: of each of them, by instance id."""
    pair, options = None, []
    if pairable(prefills, decodes):
        pair = placement.choose(request, prefills, decodes, places, planner, scoring)
        options.append(_of_pair(request, pair, prefills, decodes, scoring))
    some = _alones(request, decodes, places, planner, scoring, options)
    options = list(some.weighed)
    passing = [o for o in options if o.passes]
    if passing:
        clean = [o for o in passing if not o.names & request.avoid] if request.avoid else passing
        by = compare(clean or passing, lambda o: o.cost_s, lambda o: _crowd(o, scoring.now), scoring.rng, some.floor)
        choice = by.chosen.choice
        assert choice is not None, "an option that passes has a choice"
        return WeighedModes(choice, options, pair, by)
    refusals = [o.refused for o in options if o.refused is not None]
    return WeighedModes(min(refusals, key=_hopeless), options, pair)


def pairable(prefills: Sequence[Instance], decodes: Sequence[Instance]) -> bool:
    """Whether some two of them are two instances."""
    return bool(prefills and decodes) and not (len(prefills) == len(decodes) == 1 and prefills[0] is decodes[0])


def possible(
    request: Schedule,
    prefills: Sequence[Instance],
    decodes: Sequence[Instance],
    places: Mapping[str, PrefixPlace],
    planner: FetchPlanner,
) -> bool:
    """Whether there is any kind to weigh."""
    if prefills and decodes:  # two of them, or one that does both
        return True
    return any(
        i.alone_tokens and not single_instance.too_much(request, i, places[i.ref.instance_id], planner.survey)
        for i in decodes
    )


def _alones(
    request: Schedule,
    decodes: Sequence[Instance],
    places: Mapping[str, PrefixPlace],
    planner: FetchPlanner,
    scoring: ScoringContext,
    pair: Sequence[Option],
) -> Weighing[Option]:
    """`pair`, and whoever could have the request alone; where these are many those that are worth weighing, first those
    that are not to be avoided."""

    def weigh(instance: Instance) -> Option:
        return _alone(request, instance, places[instance.ref.instance_id], planner, scoring)

    among = single_instance.able(decodes)
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
    if why := single_instance.too_much(request, instance, place, planner.survey):
        return Option(kind, instance, instance, why_not=why)
    found = single_instance.weigh(request, instance, place, planner, scoring)
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


def _crowd(option: Option, now: float) -> tuple[float, float, float]:
    (prompts, prompt_s), (rows, tokens) = option.prefill.queue.crowd(now), option.decode.batch.crowd(now)
    return prompts + rows, prompt_s, tokens


def _hopeless(refused: Refuse) -> tuple[float, float]:
    """Who may be met by waiting comes first, and who waits least."""
    retry_ms = refused.error.retry_after_ms if isinstance(refused.error, Overloaded) else float("inf")
    return refused.least_s, retry_ms
