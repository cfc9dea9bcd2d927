"""Turns a gateway's StartRequest into the brain's Spec. Everything is checked here, so that the brain gets no invalid
value."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from typing import Any

from kvmesh.clock import NEVER
from kvmesh.errors import ContextTooLong, InvalidRequest, Unavailable
from kvmesh.instance.sampling import needs_history, sampling_of
from kvmesh.instance.served_weights import ServedWeights
from kvmesh.kvcache import keys
from kvmesh.kvcache.sources import PullRange
from kvmesh.kvcache.tiers import Tier, tier_of
from kvmesh.rpc.pb import common_pb2, decode_pb2
from kvmesh.services.decode.events import Spec
from kvmesh.services.decode.limits import NS_PER_MS

MAX_PULL_RANGES = 1024


@dataclass(frozen=True, slots=True)
class ServingInstance:
    """Has the properties of the instance that requests are checked against."""

    ref: common_pb2.InstanceRef
    weights: ServedWeights
    block_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    context_limit: int
    drafts: bool = False  # whether it verifies drafts


def check_start(start: decode_pb2.StartRequest, instance: ServingInstance, now: int, carry: Any) -> Spec:
    """Returns the Spec of `start`, which arrived at `now` (monotonic ns). Raises InvalidRequest or ContextTooLong
    naming field and value, ModelNotFound for other weights, and Unavailable for a placement that names another
    incarnation of this instance."""
    _check_address(start, instance)
    tokens = len(start.token_ids) // 4
    if not tokens or len(start.token_ids) % 4:
        raise InvalidRequest.of("token_ids", len(start.token_ids), "bytes; must be one or more u32")
    if tokens + 1 > instance.context_limit:
        why = f"prompt and answer together have {instance.context_limit} tokens here"
        raise ContextTooLong.of("prompt_tokens", tokens, why)
    if (highest := _highest(start.token_ids)) >= instance.vocab_size:
        raise InvalidRequest.of("token_ids", highest, f"not below the vocabulary's {instance.vocab_size}")
    blocks = tokens // instance.block_tokens
    if len(start.block_keys) != keys.KEY_BYTES * blocks:
        why = f"bytes; {tokens} tokens have {keys.KEY_BYTES * blocks}"
        raise InvalidRequest.of("block_keys", len(start.block_keys), why)
    if len(start.chain_digest) not in (0, keys.DIGEST_BYTES):
        raise InvalidRequest.of("chain_digest", len(start.chain_digest), f"bytes; {keys.DIGEST_BYTES}, or none")
    if not start.deadline_ms:
        raise InvalidRequest.of("deadline_ms", 0, "every request has a deadline")
    sampling = start.sampling
    if sampling.max_tokens < 1:
        raise InvalidRequest.of("max_tokens", sampling.max_tokens, "at least 1")
    told = sampling_of(sampling, tokens, instance.vocab_size)
    life = start.placement.life
    stops = set(sampling.stop_token_ids)
    if sampling.grammar or not sampling.ignore_eos:  # a grammar's answer ends with an end token in any case
        stops.update(instance.eos_token_ids)
    return Spec(
        request_id=start.request_id,
        prompt_tokens=tokens,
        max_tokens=min(sampling.max_tokens, instance.context_limit - tokens),
        deadline_ns=now + start.deadline_ms * NS_PER_MS,
        min_tokens=0 if sampling.grammar else sampling.min_tokens,  # a grammar alone says when its answer may end
        stop_token_ids=tuple(sorted(stops)),
        sampling=told,
        said=start.token_ids if needs_history(told) or instance.drafts else b"",
        drafts=instance.drafts,
        priority=start.priority,
        credit_tokens=start.credit_tokens,
        block_keys=tuple(keys.split(start.block_keys)),
        chain_digest=start.chain_digest,
        tail=start.token_ids[blocks * instance.block_tokens * keys.TOKEN_BYTES :],
        pulls=_pulls(start, blocks, instance),
        load_until=start.placement.decode_load_until if start.placement.HasField("decode_load_until") else None,
        joins_ns=now + life.first_token_ms * NS_PER_MS,
        leaves_ns=now + life.end_ms * NS_PER_MS if life.end_ms else NEVER,
        tbt_slo_ns=start.placement.tbt_slo_ms * NS_PER_MS,
        held_tbt_ns=start.placement.held_tbt_ms * NS_PER_MS,
        carry=carry,
    )


def _check_address(start: decode_pb2.StartRequest, instance: ServingInstance) -> None:
    instance.weights.check(start.model_fingerprint, start.weights_epoch)
    decode = start.placement.decode
    ours = (instance.ref.instance_id, instance.ref.incarnation)
    if decode.instance_id and (decode.instance_id, decode.incarnation) != ours:
        raise Unavailable(
            f"the placement names {decode.instance_id}@{decode.incarnation:x}, this is {ours[0]}@{ours[1]:x}"
        )
    if not start.placement.prefill.address:
        raise InvalidRequest.of("placement.prefill.address", "", "no prefill instance")


def _pulls(start: decode_pb2.StartRequest, blocks: int, instance: ServingInstance) -> tuple[PullRange, ...]:
    """Returns the ranges of blocks that decode is to fetch. A range that names this node's own DRAM is left out: what
    it names is in the store, or is gone. Raises InvalidRequest for a range that is malformed."""
    field, found = "placement.decode_pulls", []
    if len(start.placement.decode_pulls) > MAX_PULL_RANGES:
        why = f"ranges; at most {MAX_PULL_RANGES}"
        raise InvalidRequest.of(field, len(start.placement.decode_pulls), why)
    for r in start.placement.decode_pulls:
        if not r.blocks or r.first_block + r.blocks > blocks:
            why = f"the prompt has {blocks} full blocks"
            raise InvalidRequest.of(f"{field}.blocks", f"{r.first_block}+{r.blocks}", why)
        holder = r.holder
        if not holder.address:
            raise InvalidRequest.of(f"{field}.holder.address", "", "where its blocks lie")
        if not holder.incarnation:
            raise InvalidRequest.of(f"{field}.holder.incarnation", 0, "which life of it holds them")
        tier = tier_of(r.tier)
        if tier is None:
            raise InvalidRequest.of(f"{field}.tier", r.tier, "no such tier")
        if holder.instance_id != instance.ref.instance_id or tier is not Tier.DRAM:
            where = (holder.instance_id, holder.address, holder.incarnation)
            found.append(PullRange(*where, r.first_block, r.blocks, tier))
    return tuple(found)


def _highest(token_ids: bytes) -> int:
    ids = array("I")
    ids.frombytes(token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return max(ids)
