"""Converts SamplingParams of a request into the form that ranks get, with the tokens that penalties and
grammars need. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvmesh.errors import InvalidRequest
from kvmesh.kvcache.keys import pack_tokens
from kvmesh.ranks.protocol import Sampling, TokenHistory
from kvmesh.rpc.pb import common_pb2
from kvmesh.rpc.protocol import (
    MAX_BIAS,
    MAX_BIASED_TOKENS,
    MAX_GRAMMAR_BYTES,
    MAX_PENALTY,
    MAX_PROMPT_LOGPROBS,
    MAX_REPETITION_PENALTY,
    MAX_TOP_LOGPROBS,
)


def sampling_of(wanted: common_pb2.SamplingParams, prompt_tokens: int, vocab_size: int) -> Sampling:
    """Returns the sampling of such a prompt for the ranks of a model with that vocabulary. Raises InvalidRequest naming
    field and value."""
    if not (math.isfinite(wanted.temperature) and wanted.temperature >= 0):
        raise InvalidRequest.of("temperature", wanted.temperature, "a finite number, not negative")
    if not 0 < wanted.top_p <= 1:
        raise InvalidRequest.of("top_p", wanted.top_p, "over 0, at most 1")
    if wanted.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidRequest.of("top_logprobs", wanted.top_logprobs, f"at most {MAX_TOP_LOGPROBS}")
    if wanted.HasField("prompt_logprobs"):
        _check_prompt_logprobs(wanted.prompt_logprobs, prompt_tokens)
    if not 0 <= wanted.min_p <= 1:
        raise InvalidRequest.of("min_p", wanted.min_p, "between 0 and 1")
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(wanted, name)
        if not -MAX_PENALTY <= value <= MAX_PENALTY:
            raise InvalidRequest.of(name, value, f"between -{MAX_PENALTY:g} and {MAX_PENALTY:g}")
    if not 0 <= wanted.repetition_penalty <= MAX_REPETITION_PENALTY:
        why = f"over 0, at most {MAX_REPETITION_PENALTY:g}"
        raise InvalidRequest.of("repetition_penalty", wanted.repetition_penalty, why)
    if wanted.answered_tokens and wanted.answered_tokens >= prompt_tokens:
        why = f"fewer than the prompt's {prompt_tokens} tokens"
        raise InvalidRequest.of("answered_tokens", wanted.answered_tokens, why)
    if len(wanted.grammar) > MAX_GRAMMAR_BYTES or len(wanted.grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest.of("grammar", wanted.grammar, f"at most {MAX_GRAMMAR_BYTES} bytes")
    return Sampling(
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        seed=wanted.seed,
        logprobs=wanted.top_logprobs if wanted.logprobs else -1,
        min_p=wanted.min_p,
        presence_penalty=wanted.presence_penalty,
        frequency_penalty=wanted.frequency_penalty,
        repetition_penalty=wanted.repetition_penalty or 1.0,
        logit_bias=_biases(wanted.logit_bias, vocab_size),
        answered=wanted.answered_tokens,
        grammar=wanted.grammar,
        may_end=not wanted.ignore_eos,
        prompt_logprobs=wanted.prompt_logprobs if wanted.HasField("prompt_logprobs") else -1,
    )


def _check_prompt_logprobs(top: int, prompt_tokens: int) -> None:
    if top > MAX_TOP_LOGPROBS:
        raise InvalidRequest.of("prompt_logprobs", top, f"at most {MAX_TOP_LOGPROBS}")
    if prompt_tokens * (1 + top) > MAX_PROMPT_LOGPROBS:
        why = f"{prompt_tokens} tokens x {1 + top}; an instance tells at most {MAX_PROMPT_LOGPROBS} of a prompt"
        raise InvalidRequest.of("prompt_logprobs", top, why)


def _biases(wanted: Sequence[common_pb2.LogitBias], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if len(wanted) > MAX_BIASED_TOKENS:
        raise InvalidRequest.of("logit_bias", f"{len(wanted)} tokens", f"at most {MAX_BIASED_TOKENS}")
    found: dict[int, float] = {}
    for one in wanted:
        if one.token_id >= vocab_size:
            raise InvalidRequest.of("logit_bias", one.token_id, f"the vocabulary has {vocab_size} tokens")
        if one.token_id in found:
            raise InvalidRequest.of("logit_bias", one.token_id, "this token is named twice")
        if not -MAX_BIAS <= one.bias <= MAX_BIAS:
            raise InvalidRequest.of("logit_bias", one.bias, f"between -{MAX_BIAS:g} and {MAX_BIAS:g}")
        found[one.token_id] = one.bias
    return tuple(found.items())


def needs_history(sampling: Sampling) -> bool:
    """Whether a penalty or a grammar needs the tokens so far."""
    penalties = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
    return bool(penalties or sampling.grammar)


def history_of(sampling: Sampling, prompt: Sequence[int], answer: Sequence[int] = ()) -> TokenHistory | None:
    """Returns the tokens of a prompt and of the answer after it for a rank; None if nothing needs them. Only
    repetition_penalty needs tokens that are not of the answer."""
    if not needs_history(sampling):
        return None
    said = len(prompt) - sampling.answered
    before = pack_tokens(prompt[:said]) if sampling.repetition_penalty != 1 else b""
    return TokenHistory(before, pack_tokens(prompt[said:]) + pack_tokens(answer))
