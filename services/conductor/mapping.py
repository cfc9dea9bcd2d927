"""Protos to the conductor's domain and back."""

from __future__ import annotations

from typing import Any, cast

from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.keys import KEY_BYTES, split
from kvmesh.kvcache.sources import PullRange
from kvmesh.kvcache.tiers import Tier, TierUse, store_name, tier_of
from kvmesh.rpc.errors import InvalidRequest
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import conductor_pb2 as pb
from kvmesh.rpc.pb import store_pb2 as pb_store
from services.conductor.domain import (
    Blocks,
    DecodeSample,
    Heartbeat,
    InstanceView,
    Load,
    Member,
    MemberGone,
    MemberJoined,
    ModelCard,
    Placed,
    PrefillSample,
    Ref,
    Register,
    Role,
    Schedule,
    TierView,
)
from services.conductor.explain import Candidate, Decision, WeighedKind

MAX_UINT32 = 0xFFFFFFFF
MAX_BLOCKS = 1 << 18  # of one prompt
MAX_REQUEST_ID = 512
MAX_REASON = 500

_ROLES = {
    pb_common.ROLE_PREFILL: Role.PREFILL,
    pb_common.ROLE_DECODE: Role.DECODE,
    pb_common.ROLE_BOTH: Role.BOTH,
}
_ROLES_OUT = {role: number for number, role in _ROLES.items()}


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
    """Raises InvalidRequest for an unknown role."""
    role = _ROLES.get(request.role)
    if role is None:
        raise InvalidRequest.of("role", request.role, "must be prefill, decode or both")
    return Register(
        ref=ref_in(request.instance),
        role=role,
        node_id=request.node_id,
        model=card_in(request.model),
        capacity_blocks=request.capacity_blocks,
        max_running=request.max_running_requests,
        local_prefill_tokens=request.local_prefill_tokens,
        chunk_tokens=request.prefill_chunk_tokens,
    )


def heartbeat_in(request: pb.HeartbeatRequest) -> Heartbeat:
    """Microseconds become seconds."""
    return Heartbeat(
        ref=ref_in(request.instance),
        seq=request.seq,
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
    return Schedule(
        request_id=request.request_id,
        attempt=request.attempt,
        model=request.model,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        keys=tuple(split(packed)),
        ttft_slo_s=request.ttft_slo_ms / 1000,
        tbt_slo_s=request.tbt_slo_ms / 1000,
        avoid=frozenset(request.avoid_instance_ids),
    )


def placement_out(placed: Placed) -> pb.Placement:
    """As the gateway carries it to decode, and decode to prefill."""
    return pb.Placement(
        prefill=ref_out(placed.prefill),
        decode=ref_out(placed.decode),
        predicted_ttft_ms=_ms(placed.ttft_s),
        predicted_tbt_ms=_ms(placed.tbt_s),
        predicted_cached_tokens=placed.cached_tokens,
        sources=placed.sources,
        pulls=[range_out(r) for r in placed.pulls],
        decode_pulls=[range_out(r) for r in placed.decode_pulls],
        load_until=placed.load_until,
        decode_load_until=placed.decode_load_until,
    )


def range_out(r: PullRange) -> pb_common.PullRange:
    """Blocks and their holder."""
    holder = pb_common.InstanceRef(instance_id=r.instance_id, address=r.address, incarnation=r.incarnation)
    tier: Any = r.tier.value
    return pb_common.PullRange(holder=holder, first_block=r.first_block, blocks=r.blocks, tier=tier)


def decision_out(decision: Decision, now: float) -> pb.ExplainResponse:
    """What Explain answers."""
    answer = pb.ExplainResponse(
        request_id=decision.request_id,
        attempt=decision.attempt,
        model=decision.model,
        outcome=decision.outcome,
        message=decision.message,
        prompt_tokens=max(0, decision.prompt_tokens),
        prompt_blocks=decision.prompt_blocks,
        best_prefix_blocks=decision.best_prefix_blocks,
        candidates=[_candidate_out(decision, c) for c in decision.candidates],
        age_ms=_ms(max(0.0, now - decision.at)),
        kinds=[_kind_out(decision, kind) for kind in decision.kinds],
    )
    if decision.placed is not None:
        answer.placement.CopyFrom(placement_out(decision.placed))
    if decision.sample is not None:
        answer.cached_tokens = decision.sample.cached_tokens
        answer.prefill_ms = _ms(decision.sample.duration_s)
        answer.reported = True
    return answer


def _kind_out(decision: Decision, kind: WeighedKind) -> pb.WeighedKind:
    return pb.WeighedKind(
        kind=kind.kind.value,
        prefill=ref_out(kind.prefill),
        decode=ref_out(kind.decode),
        chosen=decision.is_chosen_kind(kind),
        verdict=decision.kind_verdict(kind),
        cost_ms=kind.cost_s * 1000,
        terms=[pb.Term(name=name, value=value) for name, value in kind.named_terms().items()],
    )


def _candidate_out(decision: Decision, candidate: Candidate) -> pb.Candidate:
    return pb.Candidate(
        instance=ref_out(candidate.ref),
        role=_ROLES_OUT[candidate.role],
        chosen=decision.is_chosen(candidate),
        verdict=decision.verdict(candidate),
        score_ms=candidate.score_s * 1000,
        terms=[pb.Term(name=name, value=value) for name, value in candidate.named_terms().items()],
        local_blocks=candidate.local_blocks,
        pulled_blocks=candidate.pulled_blocks,
        loaded_blocks=candidate.loaded_blocks,
        tier=candidate.tier.value if candidate.tier is not Tier.DRAM else 0,  # type: ignore[arg-type]
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


def view_out(view: InstanceView) -> pb.InstanceStatus:
    """One line of GetStatus."""
    return pb.InstanceStatus(
        instance=ref_out(view.ref),
        role=_ROLES_OUT[view.role],
        model=view.model,
        ready=view.ready,
        not_ready_reason=view.not_ready_reason,
        load=load_out(view.load),
        silent_ms=_ms(view.silent_s),
        capacity_blocks=view.capacity_blocks,
        indexed_blocks=view.indexed_blocks,
        tiers=[_tier_out(tier) for tier in view.tiers],
    )


def _tier_out(view: TierView) -> pb.IndexedTier:
    use, number = view.use, cast(Any, view.use.tier.value)
    usage = pb_store.TierUsage(
        tier=number,
        capacity_bytes=use.capacity_bytes,
        used_bytes=use.used_bytes,
        blocks=use.blocks,
        read_ns=use.read_ns,
        bytes_per_s=use.bytes_per_s,
    )
    return pb.IndexedTier(usage=usage, indexed_blocks=view.indexed_blocks, expected_ms=view.block_s * 1000)


def _ms(seconds: float) -> int:
    """Rounded up: a prediction of 0 ms would read as none."""
    return min(MAX_UINT32, -int(-seconds * 1000 // 1))
