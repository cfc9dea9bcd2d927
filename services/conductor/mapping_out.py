"""What the conductor answers, as protos."""

from __future__ import annotations

from typing import Any, cast

from kvmesh.kvcache.sources import PullRange
from kvmesh.kvcache.tiers import Tier
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import conductor_pb2 as pb
from kvmesh.rpc.pb import store_pb2 as pb_store
from services.conductor.balance.rounds import Hint
from services.conductor.costs.accuracy import PredictionError, Spread
from services.conductor.domain import Placed, RequestOutcome
from services.conductor.mapping import CORDONS_OUT, OUTCOMES_OUT, ROLES_OUT, card_out, load_out, ref_out
from services.conductor.placing.ties import Crowd
from services.conductor.records.explain import Candidate, Decision, WeighedKind
from services.conductor.views import InstanceView, TierView

MAX_UINT32 = 0xFFFFFFFF


def placement_out(placed: Placed) -> pb.Placement:
    """As the gateway carries it to decode, and decode to prefill."""
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
    low, middle, high = (seconds * 1000 * share for share in spread[:3])
    return pb.PredictedRange(expected_ms=middle, low_ms=low, high_ms=high, samples=spread.samples)


def outcome_out(outcome: RequestOutcome) -> pb.RequestOutcome:
    """As mapping.outcome_in, back."""
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
    """One kind of predictions."""
    return pb.PredictionError(
        what=error.what.value,
        samples=error.samples,
        bias=error.bias,
        p50=error.p50,
        p90=error.p90,
        p99=error.p99,
        group=error.group,
        low=error.low,
        high=error.high,
    )


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
    )


def hint_out(hint: Hint) -> pb.ScaleHint:
    """What a pool wants."""
    return pb.ScaleHint(
        model=hint.model,
        role=ROLES_OUT[hint.role],
        instances=hint.instances,
        change=hint.change,
        load=hint.load,
        reason=hint.reason,
    )


def view_out(view: InstanceView) -> pb.InstanceStatus:
    """One line of GetStatus."""
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
