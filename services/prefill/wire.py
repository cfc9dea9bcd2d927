"""The Handoff stream's messages to the brain's events, and its actions back. Decides nothing."""

from __future__ import annotations

from kvmesh.kvcache import keys
from kvmesh.node import messages as m
from kvmesh.rpc.errors import InvalidRequest, ModelNotFound
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import prefill_pb2 as pb
from kvmesh.rpc.status import to_detail
from services.prefill import events as ev

NS_PER_MS = 1_000_000


def start_in(request: pb.StartPrefill, handle: int, stream: int, fingerprint: str, now: int) -> ev.Start:
    """Raises ModelNotFound for another model's request and InvalidRequest for bytes that are none."""
    if request.model_fingerprint != fingerprint:
        raise ModelNotFound(
            f"this prefill instance serves the model with fingerprint {fingerprint[:16]}, "
            f"the request is for {request.model_fingerprint[:16]}",
            field="model_fingerprint",
        )
    try:
        token_ids = tuple(keys.unpack_tokens(request.token_ids))
    except ValueError as error:
        raise InvalidRequest(f"token_ids: {error}", field="token_ids") from None
    try:
        block_keys = tuple(keys.split(request.block_keys))
    except ValueError as error:
        raise InvalidRequest(f"block_keys: {error}", field="block_keys") from None
    s = request.sampling
    return ev.Start(
        handle=handle,
        stream=stream,
        request_id=request.request_id,
        token_ids=token_ids,
        block_keys=block_keys,
        sampling=m.Sampling(s.temperature, s.top_p, s.top_k, s.seed, s.top_logprobs if s.logprobs else -1),
        deadline_ns=now + request.deadline_ms * NS_PER_MS if request.deadline_ms else 0,
        priority=request.priority,
    )


def landing_in(landing: pb.Landing, handle: int) -> ev.Landing:
    """A landing under its instance-wide handle."""
    ranks = tuple(ev.RankLanding(r.rank, r.segment, tuple(r.offset), r.first_block) for r in landing.ranks)
    return ev.Landing(handle, landing.handoff_epoch, landing.lease_ms, ranks)


def event_out(action: ev.Action, handle: int) -> pb.HandoffEvent | None:
    """What decode is told, under the stream's own handle; None for what is not for decode."""
    match action:
        case ev.SendBeginFill(_, blocks):
            return pb.HandoffEvent(begin_fill=pb.BeginFill(handle=handle, num_blocks=blocks))
        case ev.SendRenew(_, epoch, done):
            return pb.HandoffEvent(renew=pb.RenewLease(handle=handle, handoff_epoch=epoch, progress_bytes=done))
        case ev.SendFirstToken():
            return pb.HandoffEvent(first_token=_first_token(action, handle))
        case ev.SendFillDone():
            timings = pb_common.StageTimings(
                transfer_us=action.transfer_ns // 1000,
                transfer_bytes=action.transfer_bytes,
                exposed_transfer_us=action.exposed_ns // 1000,
            )
            filled = pb.FillDone(handle=handle, handoff_epoch=action.handoff_epoch, timings=timings)
            return pb.HandoffEvent(fill_done=filled)
        case ev.SendDrained(_, epoch):
            return pb.HandoffEvent(drained=pb.Drained(handle=handle, handoff_epoch=epoch))
        case ev.SendFailed(_, error, drained):
            failed = pb.HandoffFailed(handle=handle, error=to_detail(error), drained=drained)
            return pb.HandoffEvent(failed=failed)
        case _:
            return None


def _first_token(action: ev.SendFirstToken, handle: int) -> pb.FirstToken:
    timings = pb_common.StageTimings(queue_us=action.queue_ns // 1000, prefill_us=action.prefill_ns // 1000)
    first = pb.FirstToken(
        handle=handle, token_id=action.sampled.token_id, cached_tokens=action.cached_tokens, timings=timings
    )
    found = action.sampled.logprobs
    if found is not None:
        first.logprobs.logprob = found.logprob
        for token_id, logprob in found.top:
            first.logprobs.top.add(token_id=token_id, logprob=logprob)
    return first
