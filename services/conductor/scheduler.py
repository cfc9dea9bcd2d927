"""One request from its arrival to its answer: `Scheduling.schedule` is the decision, step by step. Each question has a
part of its own that answers it (admission, policies, placing, threshold, affinity); this file gives the order. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from kvmesh.errors import InvalidRequest
from kvmesh.kvcache.tiers import Tier
from kvmesh.services.conductor.admission.context import AdmissionContext
from kvmesh.services.conductor.admission.gate import Admission
from kvmesh.services.conductor.admission.judge import Judge
from kvmesh.services.conductor.admission.refusals import refuse_unplaceable
from kvmesh.services.conductor.balance.rounds import Balance
from kvmesh.services.conductor.candidates.columns import Columns, View
from kvmesh.services.conductor.candidates.fields import NO_GROUP
from kvmesh.services.conductor.candidates.selection import Selection
from kvmesh.services.conductor.costs.accuracy import PredictionKind, group_of
from kvmesh.services.conductor.domain import Life, Placed, Refuse, RequestOutcome, Schedule
from kvmesh.services.conductor.fleet.health import Breakers
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.fleet.members import Members
from kvmesh.services.conductor.fleet.roster import Fleet
from kvmesh.services.conductor.loads.ledger import Ledger
from kvmesh.services.conductor.loads.shortest_first import ShortestFirst
from kvmesh.services.conductor.placing import placement
from kvmesh.services.conductor.placing.affinity import Affinity
from kvmesh.services.conductor.placing.placement import PlacementChoice, WeighedModes
from kvmesh.services.conductor.placing.scoring_context import ScoringContext
from kvmesh.services.conductor.placing.threshold import Threshold
from kvmesh.services.conductor.placing.timeline import life, pull_after_s
from kvmesh.services.conductor.policies.chooser import Chooser
from kvmesh.services.conductor.prefixes import fetch_plan
from kvmesh.services.conductor.prefixes.fetch_plan import FetchPlanner
from kvmesh.services.conductor.prefixes.index import Index, PrefixPlace, PrefixSurvey
from kvmesh.services.conductor.prefixes.tier_times import TierLoads
from kvmesh.services.conductor.records import explain
from kvmesh.services.conductor.records.explain import Expected, Explanations
from kvmesh.services.conductor.settings import Settings

K = TypeVar("K")
V = TypeVar("V")

MAX_TOLD = 16  # instances that get no work, of many: in an explanation


class LazyMapping(dict[K, V]):
    """A mapping that computes a value when `[]` asks for it: of thousands of instances a decision asks for few."""

    def __init__(self, find: Callable[[K], V]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, key: K) -> V:
        value = self[key] = self._find(key)
        return value


@dataclass(frozen=True)
class SharedState:
    """What the rest of the brain keeps up to date; the scheduler only reads it, except for the ledger and the
    explanations."""

    fleet: Fleet
    members: Members
    index: Index
    tiers: TierLoads
    ledger: Ledger
    explanations: Explanations
    why_not: Callable[[Instance, float], str]
    breakers: Breakers
    columns: Columns


class Scheduling:
    """Decides where requests run."""

    def __init__(self, settings: Settings, rng: random.Random, known: SharedState, now: float) -> None:
        self._settings = settings
        self._rng = rng
        self._known = known
        self._started_at = now
        self._fleet, self._members, self._index = known.fleet, known.members, known.index
        self._tiers, self._ledger, self.why_not = known.tiers, known.ledger, known.why_not
        self.admission = Admission(settings)
        self.threshold = Threshold(settings, now)
        self.affinity = Affinity(settings.affinity)
        self.chooser = Chooser(settings.policy)
        self.balance = Balance(settings)
        self._lines = ShortestFirst(settings.sizes)

    def ended(self, outcome: RequestOutcome, now: float) -> None:
        """Notes how a request went, from which admission and length predictions learn."""
        self.admission.ended(outcome, now)

    def schedule(self, request: Schedule, now: float) -> Placed | Refuse:
        """Places a request, or says why it cannot be placed: Algorithm 1 of the Mooncake paper (FAST'25) with what was
        added to it. The order of the steps is in this method; what each step goes by is said where it is called."""
        self._ledger.wires.expire(now)
        if request.model in self._fleet.known_models:
            self.balance.wanted(request.model, now)
        # Candidates: the instances that serve this model, those of them that may get work, and for which half.
        view = self._known.columns.view(now, self.why_not, self._known.breakers.tripped)
        serving = view.serving(view.group(request.model) if request.prompt_tokens > 0 else NO_GROUP)
        usable = view.able_of(serving)
        prefills, decodes = view.prefills(usable, request.prompt_tokens), view.decodes(usable, request.prompt_tokens)
        # What they are weighed by, besides what is known of each: SLOs, the threshold for fetching, nearness.
        slo = self.admission.slo(request)
        bounds, judge = self.admission.bounds(request, slo), self.admission.judge(request, slo, now)
        threshold = self.threshold.value(now)
        sibling = self._fleet.named(request.sibling_prefill)
        near = self.affinity.near(request, now, sibling.prefill.predict(request.prompt_tokens, 0) if sibling else 0.0)
        overtaking = self._lines.of(request.model, len(prefills), lambda: self._ledger.others_rate(request.model), now)
        scoring = ScoringContext(
            bounds.ttft_s, bounds.tbt_s, threshold, now, self._rng, judge, self._settings.fetch, near, overtaking
        )
        refused = self._refused(request, serving, prefills, decodes, now)
        if refused is not None:
            if serving and refused.reason == "no_instance":
                self.balance.asked(request, now)
            return self._kept(request, refused, serving, scoring)
        self._ledger.withdraw(request.request_id, now)
        self._ledger.expect_others(request.model, prefills, now)
        self._known.columns.keep_up()
        # Match the prefix: who holds how many leading blocks of the prompt, and who of them may be asked for them.
        planner = self._planner(self._survey(request, serving), request, view)
        # The cost of each candidate, the prefill and the decode instance: by the policy (policies/), which as a rule
        # leaves that to the least cost (placing/placement.py: `choose`); an SLO that nobody meets is found there.
        found = self.chooser.choose(request, prefills, decodes, LazyMapping(self._place), planner, scoring)
        if _refused_for_others(found, request, prefills):
            # Where others' prompts fill the queue, its tenant has its turn before them: so much is not held against it.
            scoring = replace(scoring, overtaking=replace(overtaking, by_tenant=True))
            found = self.chooser.choose(request, prefills, decodes, LazyMapping(self._place), planner, scoring)
        self.balance.saw(request, planner.survey, now)
        # Admit it, or refuse it with a time to come again.
        among = AdmissionContext(found, serving, usable, prefills, decodes, self._ledger.others_rate(request.model))
        admitted = self._admitted(request, among, judge, now)
        if isinstance(admitted, Refuse):
            return self._kept(request, admitted, serving, scoring, found, planner)
        # It is there from now on, for every decision that follows; what it fetches, from whom and when.
        self._commit(request, admitted, judge, now)
        answer = _placed(request, admitted, judge.answer_tokens, self.admission.held_at_decode(request, judge))
        placed = self._ledger.promise(request, answer)
        return self._kept(request, placed, serving, scoring, found, planner)

    def _admitted(
        self, request: Schedule, among: AdmissionContext, judge: Judge, now: float
    ) -> PlacementChoice | Refuse:
        """Returns the choice if admission takes it, else the refusal, with a time for the next attempt."""
        choice = among.found.answer
        if isinstance(choice, PlacementChoice):
            choice = self.admission.confirm(choice, judge, among)
        refuse = None
        if isinstance(choice, Refuse):
            choice = refuse = self.admission.refused(request, choice, among, now)
        if refuse is None or not refuse.least_s:  # else nobody could do it, and more instances could not
            self.balance.asked(request, now)
        return choice

    def _commit(self, request: Schedule, choice: PlacementChoice, judge: Judge, now: float) -> None:
        """Tells ledger, admission, balancing and queues that the request was placed there."""
        self._ledger.commit(request, choice, now, judge.slo, judge.answer_tokens)
        self.admission.placed(choice, judge)
        self.balance.placed(request, choice, now)
        if choice.prefill.instance.queue.size_weight:
            self._lines.placed(request.model, choice.prefill.prefill_s, now)
        self.threshold.placed(request.request_id, choice)
        self.affinity.placed(request, choice, now)
        for instance in (choice.prefill.instance, choice.decode.instance):
            self._known.breakers.placed(instance.ref.life, request.request_id, now)

    def _kept(
        self,
        request: Schedule,
        answer: Placed | Refuse,
        serving: Selection,
        scoring: ScoringContext,
        found: WeighedModes | None = None,
        planner: FetchPlanner | None = None,
    ) -> Placed | Refuse:
        """Records why the answer was given, for `kvmesh explain`, and returns the answer. `found` and `planner` are
        None where no instance was weighed."""
        if self._settings.max_explained:
            best, short = 0, tuple[str, ...]()
            if planner is not None:
                best, short = planner.survey.reach(planner.anywhere), planner.survey.short(planner.anywhere)
            self._explain(request, answer, serving, found, best, short, scoring)
        return answer

    def _explain(
        self,
        request: Schedule,
        answer: Placed | Refuse,
        serving: Selection,
        found: WeighedModes | None,
        best: int,
        short: tuple[str, ...],
        scoring: ScoringContext,
    ) -> None:
        """Keeps the explanation of an answer. `best` is the number of leading blocks that are held anywhere, `short`
        the cache groups because of which it is no greater."""
        self._known.explanations.keep(
            explain.decided(
                request,
                answer,
                serving.some(MAX_TOLD),
                self._why(scoring.now),
                found,
                scoring=scoring,
                serving=len(serving),
                best_prefix=best,
                short=short,
                expected=self._expected(answer) if isinstance(answer, Placed) else None,
            )
        )

    def _expected(self, placed: Placed) -> Expected:
        """Returns what the placement is predicted to bring, and how far such predictions were off lately."""
        decode = self._fleet.of(placed.decode.life)
        assert decode is not None, "the request was placed there in this very step"
        group, crowd, known = group_of(decode.model.name, decode.role), len(self._ledger), self._ledger.calibration
        ttft, tbt = known.spread(PredictionKind.TTFT, group, crowd), known.spread(PredictionKind.TBT, group, crowd)
        return Expected(placed.life.prefill_end_s, ttft, placed.tbt_s, tbt)

    def _refused(
        self, request: Schedule, serving: Selection, prefills: Selection, decodes: Selection, now: float
    ) -> Refuse | None:
        """Returns the refusal of a request that no instance could take, or None."""
        if refused := _bad_keys(request, serving):
            return refused
        if prefills and decodes:
            return None
        if lonely := placement.able_alone(decodes):
            planner = self._planner(self._survey(request, serving), request, decodes.view)
            if placement.possible(request, prefills, lonely, LazyMapping(self._place), planner):
                return None
        known = request.model in self._fleet.known_models
        fresh = now - self._started_at < self._settings.warm_up_s or not len(self._fleet)
        return refuse_unplaceable(request, serving, self._why(now), known or fresh, self._fleet.known_models)

    def _why(self, now: float) -> LazyMapping[str, str]:
        """Returns a mapping from an instance's name to why it may get no work ("" when it may)."""

        def why_not(name: str) -> str:
            instance = self._fleet.named(name)
            return self.why_not(instance, now) if instance is not None else "gone"

        return LazyMapping(why_not)

    def _place(self, name: str) -> PrefixPlace:
        instance = self._fleet.named(name)
        assert instance is not None, f"{name} is weighed and not registered"
        return self._index.place_of(instance.ref.life, instance.slot)

    def _survey(self, request: Schedule, serving: Selection) -> PrefixSurvey:
        return self._index.survey(request.keys, serving.first.model.cost, request.prompt_tokens)

    def _planner(self, survey: PrefixSurvey, request: Schedule, view: View) -> FetchPlanner:
        """Returns a fetch planner over the holders of these blocks that may be asked for them."""
        found = view.columns.asked(survey.everyone, view.able, request.avoid)
        lower = tuple((tier, slots) for tier, slots in found.items() if slots and tier is not Tier.DRAM)

        def tier_load(life: Life, tier: Tier, nbytes: int) -> float:
            return self._tiers.seconds(life, tier, nbytes, view.now)

        memory, congestion = found.get(Tier.DRAM, 0), self.threshold.congestion
        holders = view.columns.slots.holders
        wires = self._ledger.wires
        return FetchPlanner(survey, holders, memory, wires.outgoing, lower, tier_load, wires.arriving, congestion)


def _refused_for_others(found: WeighedModes, request: Schedule, prefills: Selection) -> bool:
    """Returns whether a request was refused for its TTFT, and work of other tenants waits at some instance that is fair
    between tenants."""
    refused = isinstance(found.answer, Refuse) and found.answer.reason == "ttft" and not found.picked_by
    return refused and any(instance.queue.passes(request.tenant) for instance in prefills)


def _placed(request: Schedule, choice: PlacementChoice, answer_tokens: float, held: dict[str, float]) -> Placed:
    """Returns the answer: which instances serve the request, what they fetch from whom and when, what is predicted, and
    the bounds that decode is `held` to (`Admission.held_at_decode`)."""
    p, d = choice.prefill, choice.decode
    delay_s = pull_after_s(choice)
    terms = {
        "queue_ms": p.queue_s * 1000,
        "pull_ms": p.pull_s * 1000,
        "load_ms": p.load_s * 1000,
        "prefill_ms": p.prefill_s * 1000,
        "transfer_tail_ms": p.tail_s * 1000,
        "landing_wait_ms": d.landing_wait_s * 1000,
        "decode_load_ms": choice.decode_load_s * 1000,
        "stall_ms": p.shared.stall_s * 1000,
    }
    blocks = p.instance.blocks_for(request.prompt_tokens)
    return Placed(
        p.instance.ref,
        d.instance.ref,
        choice.ttft_s,
        d.tbt_s,
        p.cached_tokens,
        terms,
        fetch_plan.sources(blocks, d.at_decode, choice.decode_fetched_to),
        tuple(segment.range for segment in p.segments),
        tuple(segment.range for segment in choice.decode_segments),
        choice.load_until,
        choice.decode_load_until,
        delay_s,
        life(choice, round(answer_tokens), delay_s),
        **held,
    )


def _bad_keys(request: Schedule, serving: Selection) -> Refuse | None:
    if request.prompt_tokens < 1:
        return Refuse(InvalidRequest.of("prompt_tokens", request.prompt_tokens, "must be at least 1"), "invalid")
    if serving and len(request.keys) > (full := request.prompt_tokens // serving.first.model.block_tokens):
        why = f"{request.prompt_tokens} prompt tokens have {full} full blocks"
        return Refuse(InvalidRequest.of("block_keys", len(request.keys), why), "invalid")
    return None
