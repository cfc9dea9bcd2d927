"""The conductor's brain: `step(event, now) -> actions`. All of it is soft state, rebuilt from registrations, heartbeats
and the store master's stream of members and blocks, which says who is dead and which node store holds what.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.tiers import Tier, split_name
from kvmesh.rpc.errors import InvalidRequest, KvmeshError, UnknownInstance
from services.conductor import explain, kinds, routes
from services.conductor.domain import (
    Action,
    Blocks,
    Heartbeat,
    InstanceView,
    Life,
    Member,
    MemberGone,
    MemberJoined,
    MembersReset,
    ModelCard,
    OutOfStep,
    Placed,
    Refuse,
    Register,
    Schedule,
    Settings,
    StoreLost,
    Tick,
    TierView,
)
from services.conductor.domain import Event as Event
from services.conductor.explain import Decision, Explanations
from services.conductor.fleet import Fleet
from services.conductor.index import Index, Place, Survey, bits
from services.conductor.instance import Instance
from services.conductor.kinds import Found
from services.conductor.ledger import Ledger
from services.conductor.members import Members
from services.conductor.placement import Choice, Terms
from services.conductor.refusals import refuse_unplaceable
from services.conductor.routes import Mesh
from services.conductor.tiers import TierLoads


class ConductorState:
    """`rng` breaks ties; `now` is seconds on one monotonic clock, never decreasing."""

    def __init__(self, settings: Settings, rng: random.Random, now: float) -> None:
        self._settings = settings
        self._rng = rng
        self._started_at = now
        self._stepped_at = now
        self._fleet = Fleet()
        self._members = Members(settings.member_grace_s)
        self._index = Index()
        self._tiers = TierLoads()
        self._ledger = Ledger(settings, self._index, self._tiers)
        self._explanations = Explanations(settings.max_explained)

    # ── what the outside may ask ──────────────────────────────────────────────────────────────────

    def models(self, now: float) -> list[ModelCard]:
        """One card per model name: of the KV identity that Schedule would place on."""
        return self._fleet.models(lambda i: self.why_not(i, now))

    def views(self, now: float) -> list[InstanceView]:
        """All known instances, in the order in which they came."""
        return [self._view(i, now) for i in self._fleet]

    @property
    def indexed_blocks(self) -> int:
        """Distinct blocks that node stores have announced."""
        return len(self._index.truth)

    def explain(self, request_id: str) -> Decision | None:
        """The last decision on that request; None: unknown or forgotten."""
        return self._explanations.get(request_id)

    def stranded(self, instance_id: str) -> str:
        """Why nobody of its model can work with that instance (see `Fleet.stranded`); "" for an unknown one."""
        instance = self._fleet.named(instance_id)
        return self._fleet.stranded(instance) if instance is not None else ""

    def _view(self, i: Instance, now: float) -> InstanceView:
        why = self.why_not(i, now) or self._fleet.stranded(i)
        return InstanceView(
            i.ref,
            i.role,
            i.model.name,
            ready=why == "",
            not_ready_reason=why,
            load=i.load,
            silent_s=max(0.0, now - i.last_seen),
            capacity_blocks=i.capacity_blocks,
            queue_s=i.queue.wait_s(now),
            pending=len(i.queue.works) + len(i.batch.works),
            indexed_blocks=self._index.count(i.ref.life),
            tiers=self._tier_views(i, now),
        )

    def _tier_views(self, i: Instance, now: float) -> tuple[TierView, ...]:
        indexed, block_bytes = self._index.counts(i.ref.life), i.model.block_tokens * i.model.kv_bytes_per_token
        return tuple(
            TierView(use, indexed.get(use.tier, 0), self._tiers.seconds(i.ref.life, use.tier, block_bytes, now))
            for use in i.tiers
        )

    def why_not(self, instance: Instance, now: float) -> str:
        """Why an instance may get no work now; "" when it may."""
        verdict = self._members.verdict(instance.ref.life)
        silent_s = now - instance.last_seen
        if verdict:
            return f"the store master says it {verdict}"
        if silent_s > self._settings.lease_s:
            return f"silent for {silent_s * 1000:.0f} ms"
        if not instance.ready:
            return instance.not_ready_reason or "says it is not ready"
        return ""

    # ── events ────────────────────────────────────────────────────────────────────────────────────

    def step(self, event: Event, now: float) -> Sequence[Action]:
        """Apply one event. At most one Placed or Refuse is among the actions: the answer to this event.
        ValueError: an announced key has not 16 bytes."""
        self._forgive_own_stall(now)
        match event:
            case Schedule():
                return [self._schedule(event, now)]
            case Heartbeat():
                return self._heartbeat(event, now)
            case Blocks(announcement):
                return [] if self._hear(announcement) else [OutOfStep(announcement.store_id)]
            case Register():
                error = self._register(event, now)
                return [Refuse(error)] if error else []
            case MembersReset(incarnation, members):
                self._lose(self._members.reset(incarnation, members, now))
                self._drop_strangers()
            case MemberJoined(member):
                self._lose(self._members.joined(member))
            case MemberGone(life, how):
                self._members.gone(life, how)
                self._lose([life])
            case StoreLost():
                self._members.lost()
            case Tick():
                self._expire(now)
        return []

    def _forgive_own_stall(self, now: float) -> None:
        """While this process stood still it heard nobody: that time counts against no lease."""
        gap, self._stepped_at = now - self._stepped_at, now
        if gap > self._settings.stall_s:
            for instance in self._fleet:
                instance.last_seen += gap

    def _register(self, event: Register, now: float) -> KvmeshError | None:
        if error := self._fleet.check(event):
            return error
        old = self._fleet.named(event.ref.instance_id)
        if old is not None and self._fleet.is_same(event):
            old.become(event)
            old.last_seen = now
            return None
        if old is not None:
            self._forget(old, replaced=old.ref.incarnation != event.ref.incarnation)
        self._fleet.add(event, self._index.pending.open(event.capacity_blocks), now)
        return None

    def _heartbeat(self, beat: Heartbeat, now: float) -> list[Action]:
        instance = self._fleet.of(beat.ref.life)
        if instance is None:
            who = f"instance {beat.ref.instance_id!r} incarnation {beat.ref.incarnation}"
            return [Refuse(UnknownInstance(f"{who} is not registered here: register again"))]
        instance.last_seen = now
        measured = self._ledger.learn(instance, beat, now)
        for sample in beat.prefill_samples:
            self._explanations.report(instance.ref, sample)
        for request_id in beat.finished_request_ids:
            self._ledger.finished(instance, request_id, now)
        if beat.seq >= instance.last_seq:  # a call that was overtaken tells an older load
            instance.last_seq = beat.seq
            instance.ready = beat.ready
            instance.not_ready_reason = beat.not_ready_reason
            instance.load = beat.load
            instance.tiers = beat.tiers
            self._tiers.hear(instance.ref.life, beat.tiers, now)
            instance.queue.report(beat.load.queued_tokens, instance.seconds_per_token(), now)
            instance.batch.report(beat.load, now, instance.queue.works)
        return list(measured)

    def _hear(self, announcement: Announcement) -> bool:
        instance = self._fleet.of((split_name(announcement.store_id)[0], announcement.incarnation))
        life, slot = (None, None) if instance is None else (instance.ref.life, instance.slot)
        return self._index.hear(announcement, life, slot, ended=self._members.ended)

    # ── placing ───────────────────────────────────────────────────────────────────────────────────

    def _schedule(self, request: Schedule, now: float) -> Placed | Refuse:
        self._ledger.outgoing.expire(now)
        serving = (
            self._fleet.serving(request.model, lambda i: self.why_not(i, now)) if request.prompt_tokens > 0 else []
        )
        why = {i.ref.instance_id: self.why_not(i, now) for i in serving}
        terms = Terms(
            request.ttft_slo_s or self._settings.slo_ttft_s,
            request.tbt_slo_s or self._settings.slo_tbt_s,
            self._settings.balancing_threshold,
            now,
            self._rng,
            self._settings.fetch,
        )
        mesh, found = None, None
        answer: Placed | Refuse | None = self._refused(request, serving, why, now)
        if answer is None:
            self._ledger.withdraw(request.request_id, now)
            mesh = self._mesh(self._index.survey(request.keys), request, now)
            found = self._weigh(request, serving, why, mesh, terms)
            answer = self._answer(request, found.answer, now)
        self._explanations.keep(
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
        return kinds.choose(request, prefills, decodes, self._places((*prefills, *decodes)), mesh, terms)

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

        return Mesh(survey, holders, slots[Tier.DRAM], self._ledger.outgoing, lower, tier_load)

    def _holder(self, store_name: str, now: float) -> Member | None:
        """That store's owner, when the life that announced its blocks is a member, and ready if it is an instance."""
        store_id = split_name(store_name)[0]
        member, instance = self._members.member(store_id), self._fleet.named(store_id)
        if member is None or self._index.truth.incarnation(store_name) != member.ref.incarnation:
            return None
        if instance is not None and (instance.ref.life != member.ref.life or self.why_not(instance, now)):
            return None
        return member

    def _answer(self, request: Schedule, choice: Choice | Refuse, now: float) -> Placed | Refuse:
        if isinstance(choice, Refuse):
            return choice
        self._ledger.commit(request, choice, now)
        p, d = choice.prefill, choice.decode
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
        )

    # ── forgetting ────────────────────────────────────────────────────────────────────────────────

    def _lose(self, lives: Iterable[Life]) -> None:
        """Dead: its blocks, its queue and what it expected are gone. The record stays for the status, and in case it
        comes back."""
        for life in lives:
            self._index.drop(life)
            self._tiers.drop(life)
            instance = self._fleet.of(life)
            if instance is not None:
                self._ledger.lost(instance)
                instance.slot = self._index.pending.open(instance.capacity_blocks)

    def _drop_strangers(self) -> None:
        """Blocks of stores that are no members, or of another life than the member: whoever announced them is gone."""
        for name in self._index.truth.stores():
            store_id, life = split_name(name)[0], self._index.truth.incarnation(name)
            member = self._members.member(store_id)
            if member is None or member.ref.incarnation != life:
                self._index.drop((store_id, life))

    def _forget(self, instance: Instance, *, replaced: bool = False) -> None:
        self._ledger.lost(instance)
        self._tiers.drop(instance.ref.life)
        self._fleet.remove(instance, replaced=replaced)

    def _expire(self, now: float) -> None:
        self._ledger.outgoing.expire(now)
        for life in self._members.expire(now):
            self._index.drop(life)
            self._tiers.drop(life)
        # While the master is not heard nothing could take the place of what was promised.
        self._index.expire(now, promises=self._members.connected)
        for instance in self._fleet:
            self._ledger.expire(instance, now)
            if now - instance.last_seen > self._settings.forget_s:
                self._forget(instance)


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
