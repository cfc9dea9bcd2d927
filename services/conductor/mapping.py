"""Protos to the conductor's domain; and back, where both ways stand side by side (else mapping_out.py)."""

from __future__ import annotations

import math

from kvmesh.errors import InvalidRequest
from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.keys import KEY_BYTES, Keys, split
from kvmesh.kvcache.tiers import Tier, TierUse, store_name, tier_of
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import conductor_pb2 as pb
from kvmesh.rpc.pb import store_pb2 as pb_store
from services.conductor.domain import (
    Blocks,
    CordonState,
    DecodeSample,
    Heartbeat,
    Lane,
    Load,
    Member,
    MemberGone,
    MemberJoined,
    ModelCard,
    Outcome,
    PrefillSample,
    Ref,
    Register,
    RequestOutcome,
    Role,
    Schedule,
)

MAX_BLOCKS = 1 << 18  # of one prompt
MAX_REQUEST_ID = 512
MAX_REASON = 500
MAX_BELONGING = 512  # characters of a session, an origin, a tenant, an endpoint

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
ROLES_OUT = {role: number for number, role in _ROLES.items()}


def ref_in(ref: pb_common.InstanceRef) -> Ref:
    """One life of one instance."""
    return Ref(ref.instance_id, ref.address, ref.incarnation)


def ref_out(ref: Ref) -> pb_common.InstanceRef:
    """As `ref_in`, back."""
    return pb_common.InstanceRef(instance_id=ref.instance_id, address=ref.address, incarnation=ref.incarnation)


def card_in(card: pb_common.ModelCard) -> ModelCard:
    """A model as an instance serves it."""
    return ModelCard(
        name=card.name,
        fingerprint=card.fingerprint,
        block_tokens=card.block_tokens,
        kv_dtype=card.kv_dtype,
        max_context_tokens=card.max_context_tokens,
        vocab_size=card.vocab_size,
        eos_token_ids=tuple(card.eos_token_ids),
        kv_bytes_per_token=card.kv_bytes_per_token,
        weights_epoch=card.weights_epoch,
    )


def card_out(card: ModelCard) -> pb_common.ModelCard:
    """As `card_in`, back."""
    return pb_common.ModelCard(
        name=card.name,
        fingerprint=card.fingerprint,
        block_tokens=card.block_tokens,
        kv_dtype=card.kv_dtype,
        max_context_tokens=card.max_context_tokens,
        vocab_size=card.vocab_size,
        eos_token_ids=card.eos_token_ids,
        kv_bytes_per_token=card.kv_bytes_per_token,
        weights_epoch=card.weights_epoch,
    )


def register_in(request: pb.RegisterInstanceRequest) -> Register:
    """Raises InvalidRequest for an unknown role, a weight that is none."""
    role = _ROLES.get(request.role)
    if role is None:
        raise InvalidRequest.of("role", request.role, "must be prefill, decode or both")
    if not 0 <= request.prefill_size_weight < math.inf:
        raise InvalidRequest.of("prefill_size_weight", request.prefill_size_weight, "must be a number, at least 0")
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
    )


def heartbeat_in(request: pb.HeartbeatRequest, *, by_door: bool = False) -> Heartbeat:
    """Microseconds become seconds."""
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


def outcome_in(told: pb.RequestOutcome) -> RequestOutcome:
    """How a request ended."""
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
    """Field by field."""
    return Load(
        queued_requests=load.queued_requests,
        queued_tokens=load.queued_tokens,
        running_requests=load.running_requests,
        free_pages=load.free_pages,
        context_tokens=load.context_tokens,
        free_extents=load.free_extents,
        waiting_requests=load.waiting_requests,
        store_blocks=load.store_blocks,
        store_capacity=load.store_capacity,
        prompt_tokens=load.prompt_tokens,
        device_hit_tokens=load.device_hit_tokens,
        host_hit_tokens=load.host_hit_tokens,
        remote_hit_tokens=load.remote_hit_tokens,
        pulled_bytes=load.pulled_bytes,
    )


def load_out(load: Load) -> pb.Load:
    """As `load_in`, back."""
    return pb.Load(
        queued_requests=load.queued_requests,
        queued_tokens=load.queued_tokens,
        running_requests=load.running_requests,
        free_pages=load.free_pages,
        context_tokens=load.context_tokens,
        free_extents=load.free_extents,
        waiting_requests=load.waiting_requests,
        store_blocks=load.store_blocks,
        store_capacity=load.store_capacity,
        prompt_tokens=load.prompt_tokens,
        device_hit_tokens=load.device_hit_tokens,
        host_hit_tokens=load.host_hit_tokens,
        remote_hit_tokens=load.remote_hit_tokens,
        pulled_bytes=load.pulled_bytes,
    )


def schedule_in(request: pb.ScheduleRequest) -> Schedule:
    """Raises InvalidRequest when the keys are not whole or too many, or the request has no name or a very long one."""
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
    for name in ("session", "origin", "tenant", "endpoint"):
        if len(getattr(request, name)) > MAX_BELONGING:
            raise InvalidRequest.of(name, getattr(request, name), f"is longer than {MAX_BELONGING} characters")
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
        endpoint=request.endpoint,
        expected_output_tokens=request.expected_output_tokens,
        answered_tokens=request.answered_tokens,
    )


def member_in(member: pb_store.Member) -> Member:
    """A node store's owner."""
    return Member(ref_in(member.instance), member.node_id)


def member_event_in(event: pb_store.MemberEvent) -> MemberJoined | MemberGone:
    """Who came, left or died."""
    member = member_in(event.member)
    if event.change == pb_store.MEMBER_CHANGE_JOINED:
        return MemberJoined(member)
    return MemberGone(member.ref.life, "left" if event.change == pb_store.MEMBER_CHANGE_LEFT else "died")


def blocks_in(told: pb_store.Announcement) -> Blocks | None:
    """A relayed announcement; None: of a tier that is not known here. Raises InvalidRequest when its keys are not
    whole."""
    tier = tier_of(told.tier)
    if tier is None:
        return None
    for field, packed in (("sealed", told.sealed), ("removed", told.removed)):
        if len(packed) % KEY_BYTES:
            why = f"its length must be a multiple of {KEY_BYTES} bytes"
            raise InvalidRequest.of(f"blocks.{field}", len(packed), why)
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
        )
    )
