"""A gateway's StartRequest as the brain's Spec: everything checked here, so that nothing odd gets further."""

from __future__ import annotations

import math
import sys
from array import array
from dataclasses import dataclass
from typing import Any

from kvmesh.node.messages import Sampling
from kvmesh.rpc.errors import ContextTooLong, InvalidRequest, ModelNotFound, Unavailable
from kvmesh.rpc.pb import common_pb2, decode_pb2
from services.decode.events import Spec
from services.decode.limits import NS_PER_MS

KEY_BYTES = 16
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Instance:
    """What requests are checked against."""

    ref: common_pb2.InstanceRef
    fingerprint: str
    block_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    context_limit: int


def check_start(start: decode_pb2.StartRequest, instance: Instance, now: int, carry: Any) -> Spec:
    """The Spec of `start`. Raises InvalidRequest or ContextTooLong naming field and value, ModelNotFound for other
    weights, Unavailable for a placement of another life of this instance."""
    _check_address(start, instance)
    tokens = len(start.token_ids) // 4
    if not tokens or len(start.token_ids) % 4:
        raise InvalidRequest.of("token_ids", len(start.token_ids), "bytes; must be one or more u32")
    if tokens + 1 > instance.context_limit:
        why = f"prompt and answer together have {instance.context_limit} tokens here"
        raise ContextTooLong.of("prompt_tokens", tokens, why)
    if (highest := _highest(start.token_ids)) >= instance.vocab_size:
        raise InvalidRequest.of("token_ids", highest, f"not below the vocabulary's {instance.vocab_size}")
    keys = KEY_BYTES * (tokens // instance.block_tokens)
    if len(start.block_keys) != keys:
        raise InvalidRequest.of("block_keys", len(start.block_keys), f"bytes; {tokens} tokens have {keys}")
    if not start.deadline_ms:
        raise InvalidRequest.of("deadline_ms", 0, "every request has a deadline")
    sampling = start.sampling
    _check_sampling(sampling)
    stops = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stops.update(instance.eos_token_ids)
    return Spec(
        request_id=start.request_id,
        prompt_tokens=tokens,
        max_tokens=min(sampling.max_tokens, instance.context_limit - tokens),
        deadline_ns=now + start.deadline_ms * NS_PER_MS,
        min_tokens=sampling.min_tokens,
        stop_token_ids=tuple(sorted(stops)),
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            logprobs=sampling.top_logprobs if sampling.logprobs else -1,
        ),
        priority=start.priority,
        credit_tokens=start.credit_tokens,
        carry=carry,
    )


def _check_address(start: decode_pb2.StartRequest, instance: Instance) -> None:
    if start.model_fingerprint != instance.fingerprint:
        have, want = instance.fingerprint[:12], start.model_fingerprint[:12]
        raise ModelNotFound(f"model_fingerprint={want!r}: this instance serves {have!r}", field="model_fingerprint")
    decode = start.placement.decode
    ours = (instance.ref.instance_id, instance.ref.incarnation)
    if decode.instance_id and (decode.instance_id, decode.incarnation) != ours:
        raise Unavailable(
            f"the placement names {decode.instance_id}@{decode.incarnation:x}, this is {ours[0]}@{ours[1]:x}"
        )
    if not start.placement.prefill.address:
        raise InvalidRequest.of("placement.prefill.address", "", "no prefill instance")


def _highest(token_ids: bytes) -> int:
    ids = array("I")
    ids.frombytes(token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return max(ids)


def _check_sampling(sampling: common_pb2.SamplingParams) -> None:
    if sampling.max_tokens < 1:
        raise InvalidRequest.of("max_tokens", sampling.max_tokens, "at least 1")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidRequest.of("temperature", sampling.temperature, "a finite number, not negative")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest.of("top_p", sampling.top_p, "over 0, at most 1")
    if sampling.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidRequest.of("top_logprobs", sampling.top_logprobs, f"at most {MAX_TOP_LOGPROBS}")
