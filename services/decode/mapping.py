"""Converts the brain's events and outputs from and to protos. It decides nothing."""

from __future__ import annotations

from collections.abc import Iterator

from kvmesh.errors import HandoffLost
from kvmesh.kvcache.keys import TOKEN_BYTES
from kvmesh.ranks.protocol import Logprobs, PromptScores
from kvmesh.rpc.pb import common_pb2, decode_pb2, prefill_pb2
from kvmesh.rpc.status import from_detail, to_detail
from kvmesh.services.decode import events as e
from kvmesh.services.decode.outbox import Finish, OutgoingTokens
from kvmesh.services.decode.timeline import Timeline

EMPTY_LOGPROBS = common_pb2.TokenLogprobs()


def responses(parcel: OutgoingTokens) -> Iterator[decode_pb2.SessionResponse]:
    """Returns what a gateway is to be told now: one message, and before it one for each prompt whose own tokens are
    scored, as together they could be longer than a message may be."""
    for slot, times, scores in parcel.prefilled:
        if scores is not None:
            message = decode_pb2.SessionResponse()
            told = message.prefilled.add(slot=slot, cached_tokens=times.cached_tokens, timings=timings(times))
            told.prompt_logprobs.logprobs = scores.logprobs
            told.prompt_logprobs.ranks = scores.ranks
            told.prompt_logprobs.top_ids = scores.top_ids
            told.prompt_logprobs.SetInParent()  # of a prompt of one token there are none
            yield message
    message = decode_pb2.SessionResponse()
    for slot, times, scores in parcel.prefilled:
        if scores is None:
            message.prefilled.add(slot=slot, cached_tokens=times.cached_tokens, timings=timings(times))
    if parcel.slots:
        tokens = message.tokens
        tokens.slot.extend(parcel.slots)
        tokens.token_id.extend(parcel.token_ids)
        tokens.token_index.extend(parcel.indices)
        if parcel.logprobs:
            found = parcel.logprobs
            tokens.logprobs.extend(
                _logprobs(found[at]) if at in found else EMPTY_LOGPROBS for at in range(len(parcel.slots))
            )
    for slot, end in parcel.finished:
        _finished(message.finished.add(), slot, end)
    for slot, error in parcel.failed:
        message.failed.add(slot=slot, error=to_detail(error))
    yield message


def _finished(message: decode_pb2.Finished, slot: int, end: Finish) -> None:
    message.slot = slot
    message.reason = common_pb2.FINISH_REASON_STOP if end.reason is e.Reason.STOP else common_pb2.FINISH_REASON_LENGTH
    message.prompt_tokens = end.prompt_tokens
    message.completion_tokens = end.completion_tokens
    message.cached_tokens = end.times.cached_tokens
    message.timings.CopyFrom(timings(end.times))


def _logprobs(found: Logprobs) -> common_pb2.TokenLogprobs:
    message = common_pb2.TokenLogprobs(logprob=found.logprob)
    for token_id, logprob in found.top:
        message.top.add(token_id=token_id, logprob=logprob)
    return message


def timings(times: Timeline) -> common_pb2.StageTimings:
    """Returns the durations of a request's stages, as far as they are known."""
    return common_pb2.StageTimings(
        queue_us=times.queue_us,
        prefill_us=times.prefill_us,
        transfer_us=times.transfer_us,
        transfer_bytes=times.transfer_bytes,
        load_us=times.load_us,
        first_decode_us=times.first_decode_us,
        admit_us=times.admit_us,
        reserve_us=times.reserve_us,
        exposed_transfer_us=times.exposed_transfer_us,
        pull_us=times.pull_us,
        pull_bytes=times.pull_bytes,
        pulled_tokens=times.pulled_tokens,
        host_tokens=times.host_tokens,
        at_decode_tokens=times.at_decode_tokens,
    )


def start_prefill(
    handle: int, start: decode_pb2.StartRequest, max_tokens: int, deadline_ms: int, traceparent: str
) -> prefill_pb2.HandoffRequest:
    """Returns the gateway's request for a prefill instance. `deadline_ms` is what is left of the request's deadline."""
    message = prefill_pb2.HandoffRequest()
    ask = message.start
    ask.handle = handle
    ask.request_id = start.request_id
    ask.attempt = start.attempt
    ask.model_fingerprint = start.model_fingerprint
    ask.weights_epoch = start.weights_epoch
    ask.token_ids = start.token_ids
    ask.block_keys = start.block_keys
    ask.sampling.CopyFrom(start.sampling)
    ask.sampling.max_tokens = max_tokens
    ask.deadline_ms = deadline_ms
    ask.priority = start.priority
    ask.traceparent = traceparent
    ask.pulls.extend(start.placement.pulls)
    if start.placement.HasField("load_until"):
        ask.load_until = start.placement.load_until
    ask.pull_after_ms = start.placement.pull_after_ms
    ask.prefill_us = start.placement.prefill_us
    ask.tenant, ask.tenant_weight = start.tenant, start.tenant_weight
    tokens = len(start.token_ids) // TOKEN_BYTES
    ask.uncached_tokens = max(1, tokens - start.placement.predicted_cached_tokens)
    return message


def to_prefill(output: e.ToPrefill) -> prefill_pb2.HandoffRequest:
    """Returns the message for a writer."""
    message = prefill_pb2.HandoffRequest()
    match output:
        case e.TellLanding(_, handle, epoch, lease_ms, ranks, first_block):
            landing = message.landing
            landing.handle, landing.handoff_epoch, landing.lease_ms = handle, epoch, lease_ms
            for rank in ranks:
                if not rank.groups:
                    landing.ranks.add(
                        rank=rank.rank, segment=rank.segment, offset=rank.offsets, first_block=first_block
                    )
                    continue
                told = landing.ranks.add(rank=rank.rank, segment=rank.segment)
                for group, first, offsets in rank.groups:
                    told.groups.add(group=group, first_block=first, offset=offsets)
        case e.TellRenewed(_, handle, epoch, lease_ms):
            renewed = message.renewed
            renewed.handle, renewed.handoff_epoch, renewed.lease_ms = handle, epoch, lease_ms
        case e.TellCancel(_, handle, reason):
            message.cancel.handle, message.cancel.reason = handle, reason
    return message


def from_prefill(message: prefill_pb2.HandoffEvent) -> tuple[int, e.Event] | None:
    """Returns the handle and the event of a message; None if this build does not know the message's kind."""
    match message.WhichOneof("kind"):
        case "begin_fill":
            return message.begin_fill.handle, e.BeginFill(message.begin_fill.num_blocks, message.begin_fill.removed_seq)
        case "renew":
            renew = message.renew
            return renew.handle, e.RenewLease(renew.handoff_epoch, renew.progress_bytes)
        case "first_token":
            return message.first_token.handle, first_token(message.first_token)
        case "fill_done":
            done = message.fill_done
            figures = done.timings
            return done.handle, e.FillDone(done.handoff_epoch, figures.transfer_us, figures.transfer_bytes)
        case "drained":
            return message.drained.handle, e.Drained(message.drained.handoff_epoch)
        case "failed":
            failed = message.failed
            error = from_detail(failed.error) if failed.error.code else HandoffLost("prefill gave no reason")
            return failed.handle, e.HandoffFailed(error, failed.drained)
    return None


def first_token(message: prefill_pb2.FirstToken) -> e.FirstToken:
    """Returns the first token, with the figures that prefill reports of the prompt."""
    logprobs = None
    if message.HasField("logprobs"):
        top = tuple((t.token_id, t.logprob) for t in message.logprobs.top)
        logprobs = Logprobs(message.logprobs.logprob, top)
    figures = message.timings
    return e.FirstToken(
        message.token_id,
        logprobs,
        message.cached_tokens,
        queue_us=figures.queue_us,
        prefill_us=figures.prefill_us,
        pull_us=figures.pull_us,
        pull_bytes=figures.pull_bytes,
        pulled_tokens=figures.pulled_tokens,
        host_tokens=figures.host_tokens,
        prompt_scores=_prompt_scores(message),
    )


def _prompt_scores(message: prefill_pb2.FirstToken) -> PromptScores | None:
    if not message.HasField("prompt_logprobs"):
        return None
    found = message.prompt_logprobs
    return PromptScores(found.logprobs, found.ranks, found.top_ids)
