"""Conversion of protos to the conductor's domain, and back. Fields with one name and one meaning on both sides are
copied by name; only fields that are checked, converted or named differently are listed here."""

from __future__ import annotations

import math
from dataclasses import fields
from operator import attrgetter
from typing import Any

from kvmesh.blockservice.group_wire import groups_from_wire, groups_to_wire
from kvmesh.errors import InvalidRequest
from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.keys import KEY_BYTES, Keys, split
from kvmesh.kvcache.sources import PullRange
from kvmesh.kvcache.tiers import Tier, TierUse, store_name, tier_of
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import conductor_pb2 as pb
from kvmesh.rpc.pb import store_pb2 as pb_store
from kvmesh.services.conductor.balance.rounds import Hint
from kvmesh.services.conductor.costs.accuracy import PredictionError, Spread
from kvmesh.services.conductor.domain import (
    BlockKnowledge,
    Blocks,
    CordonState,
    DecodeSample,
    Heartbeat,
    InstanceAxes,
    Lane,
    Load,
    Member,
    MemberGone,
    MemberJoined,
    ModelCard,
    Outcome,
    Placed,
    PrefillSample,
    Ref,
    Register,
    RequestOutcome,
    RequestReleased,
    RequestsHeld,
    Role,
    Schedule,
)
from kvmesh.services.conductor.fleet.roster import MAX_TEXT
from kvmesh.services.conductor.placing.ties import Crowd
from kvmesh.services.conductor.records.explain import Candidate, Decision, WeighedKind
from kvmesh.services.conductor.views import InstanceView, TierView

MAX_UINT32 = 0xFFFFFFFF
MAX_BLOCKS = 1 << 18  # of one prompt
MAX_HELD = 64  # models of which one gateway holds requests
MAX_REQUEST_ID = 512
MAX_REASON = 500
MAX_BELONGING = 512  # characters of a session, an origin, a tenant, an endpoint

_LOAD, _CARD, _TIER, _ERROR = (
    tuple(one.name for one in fields(kind)) for kind in (Load, ModelCard, TierUse, PredictionError)
)
_load_values, _card_values = attrgetter(*_LOAD), attrgetter(*_CARD)

_ROLES = {
    pb_common.ROLE_PREFILL: Role.PREFILL,
    pb_common.ROLE_DECODE: Role.DECODE,
    pb_common.ROLE_BOTH: Role.BOTH,
}
_OUTCOMES = {
    pb.OUTCOME_DONE: Outcome.DONE,
    pb.OUTCOME_CANCELLED: Outcome.CANCELLED,
    pb.OUTCOME_FAILED: Outcome.FAILED,
    pb.OUTCOME_REFUSED: Outcome.REFUSED,
}
OUTCOMES_OUT = {outcome: number for number, outcome in _OUTCOMES.items()}
CORDONS = {
    pb.CORDON_STATE_UNSPECIFIED: CordonState.OPEN,
    pb.CORDON_STATE_CORDONED: CordonState.CORDONED,
    pb.CORDON_STATE_DRAINING: CordonState.DRAINING,
}
CORDONS_OUT = {state: number for number, state in CORDONS.items()}
_KNOWLEDGE = {
    pb.BLOCK_KNOWLEDGE_UNSPECIFIED: BlockKnowledge.ANNOUNCED,
    pb.BLOCK_KNOWLEDGE_FALLBACK: BlockKnowledge.FALLBACK,
    pb.BLOCK_KNOWLEDGE_EXACT: BlockKnowledge.EXACT,
}
KNOWLEDGE_OUT = {knowledge: number for number, knowledge in _KNOWLEDGE.items()}
ROLES_OUT = {role: number for number, role in _ROLES.items()}


def ref_in(ref: pb_common.InstanceRef) -> Ref:
    return Ref(ref.instance_id, ref.address, ref.incarnation)


def ref_out(ref: Ref) -> pb_common.InstanceRef:
    return pb_common.InstanceRef(instance_id=ref.instance_id, address=ref.address, incarnation=ref.incarnation)


def card_in(card: pb_common.ModelCard) -> ModelCard:
    values = dict(zip(_CARD, _card_values(card), strict=True))
    groups = groups_from_wire(card.cache_groups, "model.cache_groups")
    return ModelCard(**(values | {"eos_token_ids": tuple(card.eos_token_ids), "cache_groups": groups}))


def card_out(card: ModelCard) -> pb_common.ModelCard:
    groups, nbytes = [group for group, _ in card.cache_groups], [nbytes for _, nbytes in card.cache_groups]
    told = {"cache_groups": groups_to_wire(groups, nbytes) if groups else ()}
    return pb_common.ModelCard(**(dict(zip(_CARD, _card_values(card), strict=True)) | told))


MOST_RANKS = 1024  # of one instance, as kvmesh.engine.axes has it
_SIZES = ("dp", "pp", "cp", "tp", "dcp")
_EXPERT_AXES = ("dp", "cp", "tp")


def axes_in(axes: pb.InstanceAxes) -> InstanceAxes:
    """Raises InvalidRequest for more ranks than an instance can have, and for axes that have no experts."""
    sizes = {name: getattr(axes, name) or 1 for name in _SIZES}
    for name, size in sizes.items():
        if size > MOST_RANKS:
            raise InvalidRequest.of(f"axes.{name}", size, f"must be at most {MOST_RANKS}")
    if len(axes.ep) > len(_EXPERT_AXES) or not set(axes.ep) <= set(_EXPERT_AXES):
        raise InvalidRequest.of("axes.ep", len(axes.ep), f"axes, must be some of {', '.join(_EXPERT_AXES)}")
    return InstanceAxes(**sizes, ep=tuple(axes.ep))


def axes_out(axes: InstanceAxes) -> pb.InstanceAxes | None:
    """Returns None for one rank."""
    return pb.InstanceAxes(**axes._asdict()) if axes != InstanceAxes() else None


def register_in(request: pb.RegisterInstanceRequest) -> Register:
    """Raises InvalidRequest for an unknown role, a size weight that is no finite number of at least 0, or axes that
    cannot be, or knowledge that is none."""
    role = _ROLES.get(request.role)
    if role is None:
        raise InvalidRequest.of("role", request.role, "must be prefill, decode or both")
    if not 0 <= request.prefill_size_weight < math.inf:
        raise InvalidRequest.of("prefill_size_weight", request.prefill_size_weight, "must be a number, at least 0")
    if request.knowledge not in _KNOWLEDGE:
        raise InvalidRequest.of("knowledge", request.knowledge, "must be none (0), fallback or exact")
    return Register(
        ref=ref_in(request.instance),
        role=role,
        node_id=request.node_id,
        model=card_in(request.model),
        capacity_blocks=request.capacity_blocks,
        max_running=request.max_running_requests,
        local_prefill_tokens=request.local_prefill_tokens,
        chunk_tokens=request.prefill_chunk_tokens,
        switchable=request.switchable,
        size_weight=request.prefill_size_weight,
        tenant_fairness=request.prefill_tenant_fairness,
        axes=axes_in(request.axes),
        http_url=request.http_url,
        knowledge=_KNOWLEDGE[request.knowledge],
    )


def heartbeat_in(request: pb.HeartbeatRequest, *, by_door: bool = False) -> Heartbeat:
    """Converts a heartbeat; microseconds become seconds."""
    return Heartbeat(
        ref=ref_in(request.instance),
        seq=request.seq,
        pace=request.pace,
        by_door=by_door,
        ready=request.ready,
        not_ready_reason=request.not_ready_reason[:MAX_REASON],
        load=load_in(request.load),
        prefill_samples=tuple(
            PrefillSample(
                s.request_id,
                s.computed_tokens,
                s.cached_tokens,
                s.duration_us / 1e6,
                s.transfer_bytes,
                s.transfer_us / 1e6,
                s.pulled_tokens,
                s.pull_bytes,
                s.pull_us / 1e6,
                max(1, s.steps),
                s.beside_tokens,
                s.beside_pairs,
                max(1, s.chunks),
            )
            for s in request.prefill_samples
        ),
        decode_samples=tuple(
            DecodeSample(s.batch, s.context_tokens, s.duration_us / 1e6) for s in request.decode_samples
        ),
        finished_request_ids=tuple(request.finished_request_ids),
        tiers=tuple(
            TierUse(tier, t.capacity_bytes, t.used_bytes, t.blocks, t.read_ns, t.bytes_per_s)
            for t in request.tiers[: len(Tier)]
            if (tier := tier_of(t.tier)) not in (None, Tier.DRAM)
        ),
        outcomes=tuple(outcome_in(o) for o in request.outcomes if o.outcome in _OUTCOMES),
    )


def released_in(told: pb.ReleasedRequest) -> RequestReleased:
    """Converts one request of a Release. Raises InvalidRequest."""
    if not told.request_id:
        raise InvalidRequest.of("requests.request_id", told.request_id, "must not be empty")
    if told.outcome not in _OUTCOMES:
        raise InvalidRequest.of("requests.outcome", told.outcome, "must be done, cancelled, failed or refused")
    return RequestReleased(told.request_id, told.served_by, _OUTCOMES[told.outcome])


def outcome_in(told: pb.RequestOutcome) -> RequestOutcome:
    return RequestOutcome(
        told.request_id,
        told.attempt,
        _OUTCOMES[told.outcome],
        told.output_tokens,
        told.ttft_us / 1e6,
        told.tbt_us / 1e6,
        told.mean_tbt_us / 1e6,
        told.duration_us / 1e6,
        told.error,
        told.blamed,
    )


def load_in(load: pb.Load) -> Load:
    return Load(*_load_values(load))


def load_out(load: Load) -> pb.Load:
    return pb.Load(**dict(zip(_LOAD, _load_values(load), strict=True)))


def held_in(request: pb.ListModelsRequest) -> RequestsHeld:
    """Raises InvalidRequest for more models than a gateway may name, or a name that none can have."""
    if len(request.held) > MAX_HELD:
        raise InvalidRequest.of("held", len(request.held), f"at most {MAX_HELD} models")
    for one in request.held:
        if not 0 < len(one.model) <= MAX_TEXT:
            raise InvalidRequest.of("held.model", one.model[:MAX_TEXT], f"must have 1 to {MAX_TEXT} characters")
    return RequestsHeld(tuple((one.model, one.requests) for one in request.held))


def schedule_in(request: pb.ScheduleRequest) -> Schedule:
    """Raises InvalidRequest when the keys are not whole or too many, or the request has no id or one that is
    too long."""
    packed = request.block_keys
    if len(packed) % KEY_BYTES:
        raise InvalidRequest.of("block_keys", len(packed), f"its length must be a multiple of {KEY_BYTES} bytes")
    if len(packed) > MAX_BLOCKS * KEY_BYTES:
        raise InvalidRequest.of("block_keys", len(packed) // KEY_BYTES, f"a prompt has at most {MAX_BLOCKS} blocks")
    if not request.request_id:
        raise InvalidRequest.of("request_id", request.request_id, "must not be empty")
    if len(request.request_id) > MAX_REQUEST_ID:
        raise InvalidRequest.of("request_id", request.request_id, f"is longer than {MAX_REQUEST_ID} characters")
    if request.lane not in pb.Lane.values():
        raise InvalidRequest.of("lane", request.lane, f"must be one of {', '.join(pb.Lane.keys())}")
    for name in ("session", "origin", "tenant", "endpoint", "sibling_prefill_id"):
        if len(getattr(request, name)) > MAX_BELONGING:
            raise InvalidRequest.of(name, getattr(request, name), f"is longer than {MAX_BELONGING} characters")
    if not 0 <= request.tenant_weight < math.inf:
        raise InvalidRequest.of("tenant_weight", request.tenant_weight, "must be a number, at least 0")
    if request.answered_tokens and request.answered_tokens >= request.prompt_tokens:
        why = f"must be fewer than the prompt's {request.prompt_tokens} tokens"
        raise InvalidRequest.of("answered_tokens", request.answered_tokens, why)
    return Schedule(
        request_id=request.request_id,
        attempt=request.attempt,
        model=request.model,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        keys=Keys(packed),
        ttft_slo_s=request.ttft_slo_ms / 1000,
        tbt_slo_s=request.tbt_slo_ms / 1000,
        avoid=frozenset(request.avoid_instance_ids),
        priority=request.priority,
        lane=Lane.BATCH if request.lane == pb.LANE_BATCH else Lane.INTERACTIVE,
        session=request.session,
        origin=request.origin,
        tenant=request.tenant,
        tenant_weight=request.tenant_weight or 1.0,
        endpoint=request.endpoint,
        expected_output_tokens=request.expected_output_tokens,
        answered_tokens=request.answered_tokens,
        sibling_prefill=request.sibling_prefill_id,
    )


def member_in(member: pb_store.Member) -> Member:
    return Member(ref_in(member.instance), member.node_id)


def member_event_in(event: pb_store.MemberEvent) -> MemberJoined | MemberGone:
    member = member_in(event.member)
    if event.change == pb_store.MEMBER_CHANGE_JOINED:
        return MemberJoined(member)
    return MemberGone(member.ref.life, "left" if event.change == pb_store.MEMBER_CHANGE_LEFT else "died")


def external_blocks_in(request: pb.HeartbeatRequest) -> Blocks | None:
    """Converts what an external instance says of its engine's blocks, in its own name whatever it says; None when it
    says nothing. Raises InvalidRequest as `blocks_in` does."""
    if not request.HasField("blocks"):
        return None
    ref, told = request.instance, pb_store.Announcement()
    told.CopyFrom(request.blocks)
    told.store_id, told.incarnation, told.tier = ref.instance_id, ref.incarnation, pb_common.TIER_DRAM
    told.groups = b""
    return blocks_in(told)


def blocks_in(told: pb_store.Announcement) -> Blocks | None:
    """Converts a relayed announcement; None for one of a tier that is unknown here. Raises InvalidRequest when its keys
    are not whole."""
    tier = tier_of(told.tier)
    if tier is None:
        return None
    for field, packed in (("sealed", told.sealed), ("removed", told.removed)):
        if len(packed) % KEY_BYTES:
            why = f"its length must be a multiple of {KEY_BYTES} bytes"
            raise InvalidRequest.of(f"blocks.{field}", len(packed), why)
    if told.groups and len(told.groups) * KEY_BYTES != len(told.sealed):
        raise InvalidRequest.of("blocks.groups", len(told.groups), "must have one mask for each sealed key, or none")
    return Blocks(
        Announcement(
            store_name(told.store_id, tier),
            told.incarnation,
            told.seq,
            tuple(split(told.sealed)),
            tuple(split(told.removed)),
            told.snapshot,
            told.part,
            told.more,
            told.groups,
        )
    )


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


def placement_out(placed: Placed) -> pb.Placement:
    """Converts a placement, which the gateway passes on to decode, and decode to prefill."""
    return pb.Placement(
        prefill=ref_out(placed.prefill),
        decode=ref_out(placed.decode),
        predicted_ttft_ms=_ms(placed.expected_ttft_s),
        predicted_tbt_ms=_ms(placed.expected_tbt_s),
        predicted_cached_tokens=placed.cached_tokens,
        sources=placed.sources,
        pulls=[range_out(r) for r in placed.pulls],
        decode_pulls=[range_out(r) for r in placed.decode_pulls],
        load_until=placed.load_until,
        decode_load_until=placed.decode_load_until,
        pull_after_ms=_ms(placed.pull_after_s),
        prefill_us=min(MAX_UINT32, round(placed.life.prefill_s * 1e6)),
        tbt_slo_ms=_ms(placed.tbt_slo_s),
        held_tbt_ms=_ms(placed.held_tbt_s),
        life=pb.PredictedLife(
            pull_start_ms=_ms(placed.life.pull_start_s),
            fetched_ms=_ms(placed.life.fetched_s),
            prefill_start_ms=_ms(placed.life.prefill_start_s),
            prefill_end_ms=_ms(placed.life.prefill_end_s),
            first_token_ms=_ms(placed.life.first_token_s),
            end_ms=_ms(placed.life.end_s),
            # A guess of up to 2^32 - 1 tokens comes on top of what was answered before.
            output_tokens=min(MAX_UINT32, placed.life.output_tokens),
        ),
    )


def range_out(r: PullRange) -> pb_common.PullRange:
    holder = pb_common.InstanceRef(instance_id=r.instance_id, address=r.address, incarnation=r.incarnation)
    tier: Any = r.tier.value
    return pb_common.PullRange(holder=holder, first_block=r.first_block, blocks=r.blocks, tier=tier, groups=r.groups)


def decision_out(decision: Decision, now: float) -> pb.ExplainResponse:
    """Converts an explanation to the answer of Explain."""
    answer = pb.ExplainResponse(
        request_id=decision.request_id,
        attempt=decision.attempt,
        model=decision.model,
        outcome=decision.outcome,
        message=decision.message,
        prompt_tokens=max(0, decision.prompt_tokens),
        prompt_blocks=decision.prompt_blocks,
        best_prefix_blocks=decision.best_prefix_blocks,
        short_groups=decision.short,
        candidates=[_candidate_out(decision, c) for c in decision.candidates],
        age_ms=_ms(max(0.0, now - decision.at)),
        kinds=[_kind_out(decision, kind) for kind in decision.kinds],
        screened=decision.screened,
    )
    if decision.placed is not None:
        answer.placement.CopyFrom(placement_out(decision.placed))
    if decision.sample is not None:
        answer.cached_tokens = decision.sample.cached_tokens
        answer.prefill_ms = _ms(decision.sample.duration_s)
        answer.reported = True
    if decision.ended is not None:
        answer.ended.CopyFrom(outcome_out(decision.ended))
    if (expected := decision.expected) is not None:
        answer.ttft.CopyFrom(_range_out(expected.ttft_s, expected.ttft))
        answer.tbt.CopyFrom(_range_out(expected.tbt_s, expected.tbt))
    return answer


def _range_out(seconds: float, spread: Spread) -> pb.PredictedRange:
    low, middle, high = (1000 * found for found in spread.of(seconds))
    return pb.PredictedRange(expected_ms=middle, low_ms=low, high_ms=high, samples=spread.samples)


def outcome_out(outcome: RequestOutcome) -> pb.RequestOutcome:
    return pb.RequestOutcome(
        request_id=outcome.request_id,
        attempt=outcome.attempt,
        outcome=OUTCOMES_OUT[outcome.outcome],
        error=outcome.error,
        blamed=outcome.blamed,
        output_tokens=outcome.output_tokens,
        ttft_us=round(outcome.ttft_s * 1e6),
        tbt_us=round(outcome.tbt_s * 1e6),
        mean_tbt_us=round(outcome.mean_tbt_s * 1e6),
        duration_us=round(outcome.duration_s * 1e6),
    )


def error_out(error: PredictionError) -> pb.PredictionError:
    told: dict[str, Any] = {name: getattr(error, name) for name in _ERROR}
    return pb.PredictionError(**(told | {"what": error.what.value}))


def _kind_out(decision: Decision, kind: WeighedKind) -> pb.WeighedKind:
    return pb.WeighedKind(
        kind=kind.kind.value,
        prefill=ref_out(kind.prefill),
        decode=ref_out(kind.decode),
        chosen=decision.is_chosen_kind(kind),
        verdict=decision.kind_verdict(kind),
        cost_ms=kind.cost_s * 1000,
        terms=[pb.Term(name=name, value=value) for name, value in kind.named_terms().items()],
        crowd=_crowd_out(kind.crowd),
    )


def _crowd_out(crowd: Crowd | None) -> tuple[float, ...]:
    return crowd if isinstance(crowd, tuple) else () if crowd is None else (crowd,)


def _candidate_out(decision: Decision, candidate: Candidate) -> pb.Candidate:
    return pb.Candidate(
        instance=ref_out(candidate.ref),
        role=ROLES_OUT[candidate.role],
        chosen=decision.is_chosen(candidate),
        verdict=decision.verdict(candidate),
        score_ms=candidate.score_s * 1000,
        terms=[pb.Term(name=name, value=value) for name, value in candidate.named_terms().items()],
        local_blocks=candidate.local_blocks,
        pulled_blocks=candidate.pulled_blocks,
        loaded_blocks=candidate.loaded_blocks,
        tier=candidate.tier.value if candidate.tier is not Tier.DRAM else 0,  # type: ignore[arg-type]
        crowd=_crowd_out(candidate.crowd),
        axes=axes_out(candidate.axes),
    )


def hint_out(hint: Hint) -> pb.ScaleHint:
    return pb.ScaleHint(
        model=hint.model,
        role=ROLES_OUT[hint.role],
        instances=hint.instances,
        change=hint.change,
        load=hint.load,
        reason=hint.reason,
    )


def view_out(view: InstanceView) -> pb.InstanceStatus:
    return pb.InstanceStatus(
        instance=ref_out(view.ref),
        role=ROLES_OUT[view.role],
        model=view.model,
        ready=view.ready,
        not_ready_reason=view.not_ready_reason,
        load=load_out(view.load),
        silent_ms=_ms(view.silent_s),
        capacity_blocks=view.capacity_blocks,
        indexed_blocks=view.indexed_blocks,
        tiers=[_tier_out(tier) for tier in view.tiers],
        cordon=CORDONS_OUT[view.cordon],
        cordon_reason=view.cordon_reason,
        breaker=view.breaker,
        queue_ms=view.queue_s * 1000,
        tbt_ms=view.tbt_s * 1000,
        node_id=view.node_id,
        card=card_out(view.card),
        pending_requests=view.pending,
        axes=axes_out(view.axes),
        http_url=view.http_url,
        knowledge=KNOWLEDGE_OUT[view.knowledge],
    )


def _tier_out(view: TierView) -> pb.IndexedTier:
    told: dict[str, Any] = {name: getattr(view.use, name) for name in _TIER}
    usage = pb_store.TierUsage(**(told | {"tier": view.use.tier.value}))
    return pb.IndexedTier(usage=usage, indexed_blocks=view.indexed_blocks, expected_ms=view.block_s * 1000)


def _ms(seconds: float) -> int:
    """Returns milliseconds, rounded up, because a prediction of 0 ms would read as none."""
    return min(MAX_UINT32, -int(-seconds * 1000 // 1))
