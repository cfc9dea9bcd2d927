"""One Schedule from its arrival to its answer: gates, survey, choice, commitment. Every question is answered by a part
of its own (admission, policies, threshold, affinity); this file says in which order. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvmesh.kvcache.tiers import Tier, split_name
from kvmesh.rpc.errors import InvalidRequest
from services.conductor import explain, kinds, routes
from services.conductor.admission import Admission
from services.conductor.affinity import Affinity
from services.conductor.balance import Balance
from services.conductor.domain import Life, Member, Placed, Refuse, RequestOutcome, Schedule
from services.conductor.explain import Explanations
from services.conductor.fleet import Fleet
from services.conductor.health import Breakers
from services.conductor.index import Index, Place, Survey, bits
from services.conductor.instance import Instance
from services.conductor.judge import Judge
from services.conductor.kinds import Found
from services.conductor.ledger import Ledger
from services.conductor.life import life, pull_after_s
from services.conductor.members import Members
from services.conductor.placement import Choice, Terms
from services.conductor.policies import Chooser
from services.conductor.refusals import refuse_unplaceable
from services.conductor.routes import Mesh
from services.conductor.settings import Settings
from services.conductor.threshold import Threshold
from services.conductor.tiers import TierLoads


@dataclass(frozen=True)
class Known:
    """What the brain's other half keeps up to date; read here, but for the ledger and the explanations."""

    fleet: Fleet
    members: Members
    index: Index
    tiers: TierLoads
    ledger: Ledger
    explanations: Explanations
    why_not: Callable[[Instance, float], str]
    breakers: Breakers


class Scheduling:
    """Answers requests."""

    def __init__(self, settings: Settings, rng: random.Random, known: Known, now: float) -> None:
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

    def ended(self, outcome: RequestOutcome) -> None:
        """How a request went."""
        self.admission.ended(outcome)

    def schedule(self, request: Schedule, now: float) -> Placed | Refuse:
        """Place it, or say why not."""
        self._ledger.outgoing.expire(now)
        serving = (
            self._fleet.serving(request.model, lambda i: self.why_not(i, now)) if request.prompt_tokens > 0 else []
        )
        why = {i.ref.instance_id: self.why_not(i, now) for i in serving}
        if serving:
            self.balance.asked(request, now)
        slo = self.admission.slo(request)
        bounds, judge = self.admission.bounds(request, slo), self.admission.judge(request, slo, now)
        threshold = self.threshold.value(now)
        near = self.affinity.near(request, now)
        terms = Terms(bounds.ttft_s, bounds.tbt_s, threshold, now, self._rng, judge, self._settings.fetch, near)
        mesh, found = None, None
        answer: Placed | Refuse | None = self._refused(request, serving, why, now)
        if answer is None:
            self._ledger.withdraw(request.request_id, now)
            mesh = self._mesh(self._index.survey(request.keys), request, now)
            found = self._weigh(request, serving, why, mesh, terms)
            self.balance.saw(request, mesh.survey, now)
            answer = self._answer(request, found.answer, judge, now)
        if isinstance(answer, Placed):
            self._ledger.promise(request, answer)
        self._known.explanations.keep(
            explain.decided(
                request,
                answer,
                explain.candidates_of(request, serving, why, found, terms.ttft_slo_s),
                kinds=explain.kinds_of(found, request.max_tokens),
                best_prefix=mesh.survey.reach(mesh.anywhere) if mesh is not None else 0,
                ttft_slo_s=terms.ttft_slo_s,
                tbt_slo_s=terms.tbt_slo_s,
                now=now,
            )
        )
        return answer

    def _refused(
        self, request: Schedule, serving: Sequence[Instance], why: dict[str, str], now: float
    ) -> Refuse | None:
        """Why this request can be weighed nowhere."""
        if refused := _bad_keys(request, serving):
            return refused
        prefills, decodes = _able(request, serving, why)
        if prefills and decodes:
            return None
        if any(i.alone_tokens for i in decodes):
            mesh = self._mesh(self._index.survey(request.keys), request, now)
            if kinds.possible(request, prefills, decodes, self._places(decodes), mesh):
                return None
        known = request.model in self._fleet.known_models
        fresh = now - self._started_at < self._settings.warm_up_s or not len(self._fleet)
        return refuse_unplaceable(request, serving, why, known or fresh, self._fleet.known_models)

    def _weigh(
        self, request: Schedule, serving: Sequence[Instance], why: dict[str, str], mesh: Mesh, terms: Terms
    ) -> Found:
        prefills, decodes = _able(request, serving, why)
        return self.chooser.choose(request, prefills, decodes, self._places((*prefills, *decodes)), mesh, terms)

    def _places(self, instances: Iterable[Instance]) -> dict[str, Place]:
        return {i.ref.instance_id: self._index.place_of(i.ref.life, i.slot) for i in instances}

    def _mesh(self, survey: Survey, request: Schedule, now: float) -> Mesh:
        """Who among the holders of these blocks may be asked for them."""
        holders, slots = {}, dict.fromkeys(Tier, 0)
        for slot in bits(survey.everyone):
            name = self._index.truth.store_of(slot)
            holder = self._holder(name, now)
            if holder is not None and holder.ref.instance_id not in request.avoid:
                holders[slot] = holder
                slots[split_name(name)[1]] |= 1 << slot
        lower = tuple((tier, found) for tier, found in slots.items() if found and tier is not Tier.DRAM)

        def tier_load(life: Life, tier: Tier, nbytes: int) -> float:
            return self._tiers.seconds(life, tier, nbytes, now)

        congestion = self.threshold.congestion
        return Mesh(survey, holders, slots[Tier.DRAM], self._ledger.outgoing, lower, tier_load, congestion)

    def _holder(self, store_name: str, now: float) -> Member | None:
        """That store's owner, when the life that announced its blocks is a member, and ready if it is an instance."""
        store_id = split_name(store_name)[0]
        member, instance = self._members.member(store_id), self._fleet.named(store_id)
        if member is None or self._index.truth.incarnation(store_name) != member.ref.incarnation:
            return None
        if instance is not None and (instance.ref.life != member.ref.life or self.why_not(instance, now)):
            return None
        return member

    def _answer(self, request: Schedule, choice: Choice | Refuse, judge: Judge, now: float) -> Placed | Refuse:
        if isinstance(choice, Choice):
            choice = self.admission.confirm(choice, judge)
        if isinstance(choice, Refuse):
            return choice
        self._ledger.commit(request, choice, now, judge.slo, judge.answer_tokens)
        self.admission.placed(choice, judge)
        self.balance.placed(request, choice, now)
        delay_s = pull_after_s(choice)
        self.threshold.placed(request.request_id, choice, delay_s, now)
        self.affinity.placed(request, choice, now)
        p, d = choice.prefill, choice.decode
        for instance in (p.instance, d.instance):
            self._known.breakers.placed(instance.ref.life, request.request_id, now)
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
            routes.sources(blocks, d.at_decode, choice.decode_fetched_to),
            tuple(leg.range for leg in p.legs),
            tuple(leg.range for leg in choice.decode_legs),
            choice.load_until,
            choice.decode_load_until,
            delay_s,
            life(choice, round(judge.answer_tokens), delay_s),
        )


def _able(request: Schedule, serving: Sequence[Instance], why: dict[str, str]) -> tuple[list[Instance], list[Instance]]:
    """Who could prefill it, who could decode it."""
    usable = [i for i in serving if not why[i.ref.instance_id]]
    return (
        [i for i in usable if i.role.prefills and i.can_prefill(request.prompt_tokens)],
        [i for i in usable if i.role.decodes and i.can_decode(request.prompt_tokens)],
    )


def _bad_keys(request: Schedule, serving: Sequence[Instance]) -> Refuse | None:
    if request.prompt_tokens < 1:
        return Refuse(InvalidRequest.of("prompt_tokens", request.prompt_tokens, "must be at least 1"), "invalid")
    if serving and len(request.keys) > request.prompt_tokens // serving[0].model.block_tokens:
        full = request.prompt_tokens // serving[0].model.block_tokens
        why = f"{request.prompt_tokens} prompt tokens have {full} full blocks"
        return Refuse(InvalidRequest.of("block_keys", len(request.keys), why), "invalid")
    return None
