"""Converts the Handoff stream's messages to the brain's events, and its actions to messages. It decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.errors import InvalidRequest
from kvmesh.instance.sampling import sampling_of
from kvmesh.instance.served_weights import ServedWeights
from kvmesh.kvcache import keys
from kvmesh.kvcache.cache_groups import GroupPages
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.kvcache.sources import PullRange
from kvmesh.kvcache.tiers import Tier, tier_of
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import prefill_pb2 as pb
from kvmesh.rpc.status import to_detail
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.tenant_shares import MAX_WEIGHT, MIN_WEIGHT

NS_PER_US, NS_PER_MS = 1_000, 1_000_000
MAX_PULLS = 1024  # ranges of one request
MAX_TENANT_CHARS = 512
MAX_PULL_AFTER_MS = 600_000  # the latest begin of a pull that a request may ask for: no queue is so long


def start_in(
    request: pb.StartPrefill,
    handle: int,
    stream: int,
    weights: ServedWeights,
    own: str,
    now: int,
    traceparent: str,
    vocab_size: int,
) -> ev.Start:
    """Returns the event of a request. `own` is this instance's id, `traceparent` the span that pulls are recorded
    under. Raises ModelNotFound for a request made for other weights, and InvalidRequest for malformed bytes, sampling
    out of range and impossible hints."""
    weights.check(request.model_fingerprint, request.weights_epoch)
    try:
        token_ids = tuple(keys.unpack_tokens(request.token_ids))
    except ValueError as error:
        raise InvalidRequest(f"token_ids: {error}", field="token_ids") from None
    try:
        block_keys = tuple(keys.split(request.block_keys))
    except ValueError as error:
        raise InvalidRequest(f"block_keys: {error}", field="block_keys") from None
    return ev.Start(
        handle=handle,
        stream=stream,
        request_id=request.request_id,
        token_ids=token_ids,
        block_keys=block_keys,
        sampling=sampling_of(request.sampling, len(token_ids), vocab_size),
        deadline_ns=now + request.deadline_ms * NS_PER_MS if request.deadline_ms else 0,
        priority=request.priority,
        pulls=pulls_in(request.pulls, len(block_keys), own),
        load_until=request.load_until if request.HasField("load_until") else None,
        traceparent=traceparent,
        pull_at_ns=_pull_at(request, now),
        size_ns=request.prefill_us * NS_PER_US,
        tenant=_tenant(request.tenant),
        tenant_weight=_weight(request.tenant_weight),
        uncached_tokens=request.uncached_tokens or len(token_ids),
    )


def _tenant(name: str) -> str:
    if len(name) > MAX_TENANT_CHARS:
        raise InvalidRequest.of("tenant", name, f"may have at most {MAX_TENANT_CHARS} characters")
    return name


def _weight(weight: float) -> float:
    if not (weight == 0 or MIN_WEIGHT <= weight <= MAX_WEIGHT):
        raise InvalidRequest.of("tenant_weight", weight, f"must be {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
    return weight or 1.0


def _pull_at(request: pb.StartPrefill, now: int) -> int:
    return now + min(request.pull_after_ms, MAX_PULL_AFTER_MS) * NS_PER_MS if request.pull_after_ms else 0


def pulls_in(ranges: Sequence[pb_common.PullRange], blocks: int, own: str) -> tuple[PullRange, ...]:
    """Returns the hints for a prompt of `blocks` full blocks. Those that name this instance's own memory are left out,
    as its store is asked in any case. Raises InvalidRequest naming the field."""
    if len(ranges) > MAX_PULLS:
        raise InvalidRequest.of("pulls", f"{len(ranges)} ranges", f"at most {MAX_PULLS}")
    found = []
    for i, r in enumerate(ranges):
        at, holder = f"pulls[{i}]", r.holder
        if not holder.instance_id:
            raise InvalidRequest.of(f"{at}.holder.instance_id", "", "a range names its holder")
        host, _, port = holder.address.rpartition(":")
        if not host or not port.isdecimal():
            raise InvalidRequest.of(f"{at}.holder.address", holder.address, "host:port of the holder")
        if not holder.incarnation:
            raise InvalidRequest.of(f"{at}.holder.incarnation", 0, "the life of the holder that has the blocks")
        if not r.blocks:
            raise InvalidRequest.of(f"{at}.blocks", 0, "at least one")
        if r.first_block + r.blocks > blocks:
            end = r.first_block + r.blocks
            raise InvalidRequest.of(f"{at}.blocks", r.blocks, f"ends at block {end}, the prompt has {blocks} full ones")
        tier = tier_of(r.tier)
        if tier is None:
            raise InvalidRequest.of(f"{at}.tier", r.tier, "no such tier")
        if holder.instance_id != own or tier is not Tier.DRAM:
            where = holder.instance_id, holder.address, holder.incarnation
            found.append(PullRange(*where, r.first_block, r.blocks, tier, r.groups))
    return tuple(found)


def landing_in(landing: pb.Landing, handle: int, readers: tuple[ShardLayout, ...]) -> ev.Landing:
    """Returns the event of a landing, under its instance-wide handle; decode's ranks cut blocks as `readers` say."""
    ranks = tuple(
        ev.RankLanding(
            r.rank,
            r.segment,
            tuple(r.offset),
            r.first_block,
            tuple(GroupPages(one.group, one.first_block, tuple(one.offset)) for one in r.groups),
        )
        for r in landing.ranks
    )
    return ev.Landing(handle, landing.handoff_epoch, landing.lease_ms, ranks, readers)


def event_out(action: ev.Action, handle: int) -> pb.HandoffEvent | None:
    """Returns the message for decode, under the stream's own handle; None for an action that is not for decode."""
    match action:
        case ev.SendBeginFill(_, blocks, removed):
            return pb.HandoffEvent(begin_fill=pb.BeginFill(handle=handle, num_blocks=blocks, removed_seq=removed))
        case ev.SendRenew(_, epoch, done):
            return pb.HandoffEvent(renew=pb.RenewLease(handle=handle, handoff_epoch=epoch, progress_bytes=done))
        case ev.SendFirstToken():
            return pb.HandoffEvent(first_token=first_token(action, handle))
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


def first_token(action: ev.SendFirstToken, handle: int) -> pb.FirstToken:
    """Returns the first token with the figures of its prompt, under the stream's own handle."""
    prefix = action.found
    timings = pb_common.StageTimings(
        queue_us=action.queue_ns // 1000,
        prefill_us=action.prefill_ns // 1000,
        pull_us=prefix.pull_ns // 1000,
        pull_bytes=prefix.pull_bytes,
        pulled_tokens=prefix.pulled_tokens,
        host_tokens=prefix.host_tokens,
    )
    first = pb.FirstToken(
        handle=handle, token_id=action.sampled.token_id, cached_tokens=prefix.cached_tokens, timings=timings
    )
    logprobs = action.sampled.logprobs
    if logprobs is not None:
        first.logprobs.logprob = logprobs.logprob
        for token_id, logprob in logprobs.top:
            first.logprobs.top.add(token_id=token_id, logprob=logprob)
    if (scores := action.prompt_scores) is not None:
        first.prompt_logprobs.logprobs = scores.logprobs
        first.prompt_logprobs.ranks = scores.ranks
        first.prompt_logprobs.top_ids = scores.top_ids
        first.prompt_logprobs.SetInParent()  # of a prompt of one token there are none
    return first
