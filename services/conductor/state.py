"""The conductor's brain: `step(event, now) -> actions`. All of it is soft state, rebuilt from registrations and
heartbeats; the store master's member stream says who is dead.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvmesh.rpc.errors import InvalidRequest, KvmeshError, UnknownInstance
from services.conductor.domain import (
    Action,
    Heartbeat,
    InstanceView,
    Life,
    Measured,
    MemberGone,
    MemberJoined,
    MembersReset,
    ModelCard,
    Placed,
    Refuse,
    Register,
    Schedule,
    Settings,
    StoreLost,
    Tick,
)
from services.conductor.domain import Event as Event
from services.conductor.instance import Instance, ModelFits
from services.conductor.load import DecodeWork, PrefillWork
from services.conductor.members import Members
from services.conductor.placement import Choice, choose
from services.conductor.prefix import PrefixIndex
from services.conductor.refusals import refuse_unplaceable

MAX_REPLACED = 4096
MAX_PREDICTED_TOKENS = 4096


class ConductorState:
    """`rng` breaks ties; `now` is seconds on one monotonic clock, never decreasing."""

    def __init__(self, settings: Settings, rng: random.Random, now: float) -> None:
        self._settings = settings
        self._rng = rng
        self._started_at = now
        self._stepped_at = now
        self._instances: dict[str, Instance] = {}
        self._members = Members()
        self._index = PrefixIndex()
        self._fits: dict[tuple[str, tuple[object, ...]], ModelFits] = {}
        self._placed: dict[str, tuple[Instance, Instance]] = {}
        self._replaced: OrderedDict[Life, None] = OrderedDict()
        self._known_models: dict[str, None] = {}

    # ── what the outside may ask ──────────────────────────────────────────────────────────────────

    def models(self, now: float) -> list[ModelCard]:
        """One card per model name: of the KV identity that Schedule would place on."""
        names = dict.fromkeys(i.model.name for i in self._instances.values())
        return [max((i.model for i in self._serving(name, now)), key=lambda m: m.max_context_tokens) for name in names]

    def views(self, now: float) -> list[InstanceView]:
        """All known instances, in the order in which they came."""
        return [
            InstanceView(
                i.ref,
                i.role,
                i.model.name,
                ready=self.why_not(i, now) == "",
                not_ready_reason=self.why_not(i, now),
                load=i.load,
                silent_s=max(0.0, now - i.last_seen),
                capacity_blocks=i.capacity_blocks,
                queue_s=i.queue.wait_s(now),
                pending=len(i.queue.works) + len(i.batch.works),
            )
            for i in self._instances.values()
        ]

    def why_not(self, instance: Instance, now: float) -> str:
        """Why an instance may get no work now; "" when it may."""
        verdict = self._members.verdict((instance.ref.instance_id, instance.ref.incarnation))
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
        """Apply one event. At most one Placed or Refuse is among the actions: the answer to this event."""
        self._forgive_own_stall(now)
        match event:
            case Schedule():
                return [self._schedule(event, now)]
            case Heartbeat():
                return self._heartbeat(event, now)
            case Register():
                error = self._register(event, now)
                return [Refuse(error)] if error else []
            case MembersReset(incarnation, members):
                self._lose(self._members.reset(incarnation, members))
            case MemberJoined(life):
                self._members.joined(life)
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
            for instance in self._instances.values():
                instance.last_seen += gap

    def _register(self, event: Register, now: float) -> KvmeshError | None:
        ref = event.ref
        error = _invalid(event)
        if error is None and (ref.instance_id, ref.incarnation) in self._replaced:
            error = InvalidRequest.of(
                "instance.incarnation", ref.incarnation, f"a later incarnation has taken the name {ref.instance_id!r}"
            )
        if error is not None:
            return error
        old = self._instances.get(ref.instance_id)
        if old is not None and old.ref.incarnation == ref.incarnation:
            if (old.ref, old.role, old.model, old.capacity_blocks) == (
                ref,
                event.role,
                event.model,
                event.capacity_blocks,
            ):
                old.last_seen = now
                return None
        elif old is not None:
            self._replaced[(old.ref.instance_id, old.ref.incarnation)] = None
            if len(self._replaced) > MAX_REPLACED:
                self._replaced.popitem(last=False)
        if old is not None:
            self._forget(old)
        slot = self._index.open(event.capacity_blocks)
        self._instances[ref.instance_id] = Instance(event, slot, self._fits_of(event.model), now)
        self._known_models[event.model.name] = None
        return None

    def _fits_of(self, model: ModelCard) -> ModelFits:
        return self._fits.setdefault((model.name, model.kv_identity), ModelFits())

    def _heartbeat(self, beat: Heartbeat, now: float) -> list[Action]:
        instance = self._instances.get(beat.ref.instance_id)
        if instance is None or instance.ref.incarnation != beat.ref.incarnation:
            who = f"instance {beat.ref.instance_id!r} incarnation {beat.ref.incarnation}"
            return [Refuse(UnknownInstance(f"{who} is not registered here: register again"))]
        instance.last_seen = now
        measured = self._learn(instance, beat, now)
        for request_id in beat.finished_request_ids:
            self._finished(instance, request_id, now)
        if beat.seq >= instance.last_seq:  # a call that was overtaken tells an older load
            instance.last_seq = beat.seq
            instance.ready = beat.ready
            instance.not_ready_reason = beat.not_ready_reason
            instance.load = beat.load
            instance.queue.report(beat.load.queued_tokens, instance.seconds_per_token(), now)
            instance.batch.report(beat.load, now)
        return measured

    def _learn(self, instance: Instance, beat: Heartbeat, now: float) -> list[Action]:
        fits = self._fits_of(instance.model)
        measured: list[Action] = []
        for s in beat.prefill_samples:
            if not instance.first_sample_of(s.request_id):
                continue
            predicted_s = instance.prefill.predict(s.computed_tokens, s.cached_tokens)
            measured.append(Measured(s.request_id, predicted_s, s.duration_s))
            for fit in (instance.prefill, fits.prefill):
                fit.add(s.computed_tokens, s.cached_tokens, s.duration_s, now)
            for transfer in (instance.transfer, fits.transfer):
                transfer.add(s.transfer_bytes, s.transfer_s)
            work = instance.queue.finish(s.request_id, done=True)
            if work is not None:
                self._index.confirm(instance.slot, work.keys)
        for d in beat.decode_samples:
            for step in (instance.decode, fits.decode):
                step.add(d.batch, d.context_tokens, d.duration_s, now)
        return measured

    def _finished(self, instance: Instance, request_id: str, now: float) -> None:
        work = instance.queue.finish(request_id, done=False)
        if work is not None:
            self._index.withdraw(instance.slot, work.keys, request_id)
        instance.batch.finish(request_id, now)
        placed = self._placed.get(request_id)
        if placed is not None and placed[1] is instance:
            del self._placed[request_id]

    # ── placing ───────────────────────────────────────────────────────────────────────────────────

    def _schedule(self, request: Schedule, now: float) -> Placed | Refuse:
        serving = self._serving(request.model, now) if request.prompt_tokens > 0 else []
        why = {i.ref.instance_id: self.why_not(i, now) for i in serving}
        usable = [i for i in serving if not why[i.ref.instance_id]]
        prefills = [i for i in usable if i.role.prefills and i.can_prefill(request.prompt_tokens)]
        decodes = [i for i in usable if i.role.decodes and i.can_decode(request.prompt_tokens)]
        refused = _bad_keys(request, serving)
        if refused is None and not (prefills and decodes):
            known = request.model in self._known_models
            fresh = now - self._started_at < self._settings.warm_up_s or not self._instances
            refused = refuse_unplaceable(request, serving, why, known or fresh, self._known_models)
        if refused is not None:
            return refused
        self._withdraw(request.request_id, now)
        choice = choose(
            request,
            prefills,
            decodes,
            self._index,
            ttft_slo_s=request.ttft_slo_s or self._settings.slo_ttft_s,
            tbt_slo_s=request.tbt_slo_s or self._settings.slo_tbt_s,
            now=now,
            rng=self._rng,
        )
        return choice if isinstance(choice, Refuse) else self._commit(request, choice, now)

    def _commit(self, request: Schedule, choice: Choice, now: float) -> Placed:
        """The chosen instances carry the work from this moment on."""
        p, d = choice.prefill, choice.decode
        ttft_s = choice.ttft_s
        patience_s = self._settings.pending_timeout_s
        work = PrefillWork(
            request.request_id, p.computed_tokens, p.prefill_s, request.keys, now, now + 2 * ttft_s + patience_s
        )
        p.instance.queue.add(work)
        self._index.place(p.instance.slot, request.keys, request.request_id)
        answer_s = min(request.max_tokens or MAX_PREDICTED_TOKENS, MAX_PREDICTED_TOKENS) * d.tbt_s
        stay_s = 2 * (ttft_s + d.slot_wait_s + answer_s) + patience_s
        blocks = d.instance.blocks_for(request.prompt_tokens + 1)
        d.instance.batch.add(DecodeWork(request.request_id, request.prompt_tokens, blocks, now, now + stay_s))
        self._placed[request.request_id] = (p.instance, d.instance)
        terms = {
            "queue_ms": p.queue_s * 1000,
            "prefill_ms": p.prefill_s * 1000,
            "transfer_tail_ms": p.tail_s * 1000,
            "landing_wait_ms": d.landing_wait_s * 1000,
        }
        return Placed(p.instance.ref, d.instance.ref, ttft_s, d.tbt_s, p.cached_tokens, terms)

    def _serving(self, model: str, now: float) -> list[Instance]:
        """Registered instances of a model whose KV fits together. Where one name stands for several (an update
        is rolling through), those that can serve now come first, then the more numerous."""
        groups: dict[tuple[object, ...], list[Instance]] = {}
        for instance in self._instances.values():
            if instance.model.name == model:
                groups.setdefault(instance.model.kv_identity, []).append(instance)
        if len(groups) <= 1:
            return next(iter(groups.values()), [])

        def worth(group: list[Instance]) -> tuple[bool, int, str]:
            live = [i for i in group if not self.why_not(i, now)]
            complete = any(i.role.prefills for i in live) and any(i.role.decodes for i in live)
            return complete, len(live), group[0].model.fingerprint

        return max(groups.values(), key=worth)

    # ── forgetting ────────────────────────────────────────────────────────────────────────────────

    def _withdraw(self, request_id: str, now: float) -> None:
        """An earlier attempt of the same request is not coming any more."""
        prefill, decode = self._placed.pop(request_id, (None, None))
        if prefill is not None and decode is not None:
            work = prefill.queue.withdraw(request_id, now)
            if work is not None:
                self._index.withdraw(prefill.slot, work.keys, request_id)
            decode.batch.drop(request_id)

    def _lose(self, lives: Iterable[Life]) -> None:
        """Dead: its queue and its cache are gone. The record stays for the status, and in case it comes back."""
        for instance_id, incarnation in lives:
            instance = self._instances.get(instance_id)
            if instance is not None and instance.ref.incarnation == incarnation:
                self._drain(instance)
                instance.slot = self._index.open(instance.capacity_blocks)

    def _drain(self, instance: Instance) -> None:
        """Nothing placed there counts any more, and its slot is free."""
        instance.queue.clear()
        instance.batch.clear()
        self._index.close(instance.slot)

    def _forget(self, instance: Instance) -> None:
        self._drain(instance)
        del self._instances[instance.ref.instance_id]

    def _expire(self, now: float) -> None:
        for instance in list(self._instances.values()):
            for request_id in instance.queue.expired(now):
                work = instance.queue.withdraw(request_id, now)
                assert work is not None, "an expired placement is in the queue"
                self._index.withdraw(instance.slot, work.keys, request_id)
            for request_id in instance.batch.expired(now):
                instance.batch.drop(request_id)
                self._placed.pop(request_id, None)
            if now - instance.last_seen > self._settings.forget_s:
                self._forget(instance)


def _bad_keys(request: Schedule, serving: Sequence[Instance]) -> Refuse | None:
    if request.prompt_tokens < 1:
        return Refuse(InvalidRequest.of("prompt_tokens", request.prompt_tokens, "must be at least 1"), "invalid")
    if serving and len(request.keys) > request.prompt_tokens // serving[0].model.block_tokens:
        full = request.prompt_tokens // serving[0].model.block_tokens
        why = f"{request.prompt_tokens} prompt tokens have {full} full blocks"
        return Refuse(InvalidRequest.of("block_keys", len(request.keys), why), "invalid")
    return None


def _invalid(event: Register) -> InvalidRequest | None:
    ref, model = event.ref, event.model
    wrong: list[tuple[str, object, str, bool]] = [
        ("instance.instance_id", ref.instance_id, "must not be empty", not ref.instance_id),
        ("instance.address", ref.address, "must be host:port", not ref.address),
        ("instance.incarnation", ref.incarnation, "must be new at every process start, never 0", not ref.incarnation),
        ("model.name", model.name, "must not be empty", not model.name),
        ("model.fingerprint", model.fingerprint, "must not be empty", not model.fingerprint),
        ("model.block_tokens", model.block_tokens, "must be at least 1", model.block_tokens < 1),
        ("capacity_blocks", event.capacity_blocks, "must be at least 1", event.capacity_blocks < 1),
    ]
    return next((InvalidRequest.of(name, value, why) for name, value, why, bad in wrong if bad), None)
