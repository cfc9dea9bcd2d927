"""A request wholly on one instance, which computes its prompt in steps that it shares with its rows: coupled instances
take any, decode instances those of which little is to be computed. Pure: instances are only read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.conductor.candidates.fields import ColumnField
from services.conductor.candidates.selection import Selection
from services.conductor.domain import Refuse, Schedule
from services.conductor.fleet.instance import Instance
from services.conductor.placing import decodes as decoding
from services.conductor.placing import prefills as prefilling
from services.conductor.placing.placement import PlacementChoice, pick_decode, pick_prefill
from services.conductor.placing.scoring_context import ScoringContext
from services.conductor.prefixes.fetch_plan import FetchPlanner
from services.conductor.prefixes.index import PrefixPlace, PrefixSurvey

_ALL_BLOCKS = 1 << 40  # of any prompt: nothing is sent


@dataclass(slots=True)
class SingleInstance:
    """One instance weighed for the whole request. `choice`: its best way, or where `refused` says that none passes, the
    nearest one."""

    choice: PlacementChoice
    refused: Refuse | None


def able(decodes: Sequence[Instance]) -> Sequence[Instance]:
    """Those who may compute prompts for their own batch."""
    if isinstance(decodes, Selection):
        return Selection(decodes.view, decodes.mask & decodes.view.columns.mask(ColumnField.ALONE))
    return [i for i in decodes if i.alone_tokens]


def uncached_tokens(request: Schedule, instance: Instance, place: PrefixPlace, survey: PrefixSurvey) -> int:
    """What of the prompt it would have to compute, after what is sealed in its own memory."""
    usable = (request.prompt_tokens - 1) // instance.model.block_tokens
    held = min(survey.depth(PrefixPlace(place.sealed)), usable)
    return request.prompt_tokens - held * instance.model.block_tokens


def too_much(request: Schedule, instance: Instance, place: PrefixPlace, survey: PrefixSurvey) -> str:
    """Why the instance may not take it alone; "" when it may."""
    if instance.alone_tokens == float("inf"):
        return ""
    uncached = uncached_tokens(request, instance, place, survey)
    if uncached <= instance.alone_tokens:
        return ""
    return f"computes at most {instance.alone_tokens:,} uncached tokens itself, of {uncached:,}"


def weigh(
    request: Schedule, instance: Instance, place: PrefixPlace, planner: FetchPlanner, scoring: ScoringContext
) -> SingleInstance:
    """`place`: the instance's blocks in the survey."""
    decode = decoding.choice(request, instance, place, planner.survey, scoring.now, alone=True)
    candidate = prefilling.candidate(
        request,
        instance,
        place,
        planner,
        _ALL_BLOCKS,
        scoring.threshold,
        scoring.now,
        scoring.fetch,
        overtaking=scoring.overtaking,
    )
    fits = pick_decode(request, [decode], scoring)
    found = pick_prefill([candidate], decode.landing_wait_s, scoring)
    refused = fits if isinstance(fits, Refuse) else found if isinstance(found, Refuse) else None
    if isinstance(found, Refuse):
        found = min(candidate.options, key=lambda o: o.admission_ttft_s)
    until = candidate.load_until(found, scoring.ttft_slo_s - decode.landing_wait_s)
    return SingleInstance(PlacementChoice(found, decode, load_until=until), refused)
