"""What an external engine is asked over HTTP, and what it answers. Pure: requests to bodies, bytes to events.

Two interfaces take and give token ids. `/inference/v1/generate` is preferred: its answers have no text.
`/v1/completions` takes a list of ids as its prompt and tells ids with `return_token_ids`. Both stream server-sent
events.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import orjson

from kvmesh.errors import (
    BodyTooLarge,
    InternalError,
    InvalidRequest,
    KvmeshError,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from kvmesh.kvcache.keys import unpack_tokens
from kvmesh.rpc.pb import common_pb2, decode_pb2

MAX_EVENT_BYTES = 4 << 20  # of one event of a stream
MAX_TOKEN_ID = 2**32 - 1
MAX_SHOWN = 300  # characters of what an engine says, in an error
RETRY_AFTER_MS = 1_000
_TOKEN_NAME = re.compile(r"token_id:([0-9]{1,10})\Z")


class EngineInterface(Enum):
    """The interface by which an engine takes token ids; the value is its path."""

    GENERATE = "/inference/v1/generate"
    COMPLETIONS = "/v1/completions"


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────


def body_of(start: decode_pb2.StartRequest, interface: EngineInterface, model: str) -> dict[str, Any]:
    """Returns the body of a streamed request. `model` is the engine's name for what it serves. Raises InvalidRequest
    for what no engine is asked for here."""
    asked = start.sampling
    if asked.grammar:
        raise InvalidRequest("grammar: an external engine does not take kvmesh's grammars", field="grammar")
    if asked.HasField("prompt_logprobs"):
        raise InvalidRequest("prompt_logprobs: an external engine is not asked for them", field="prompt_logprobs")
    ids = unpack_tokens(start.token_ids)
    options = {"include_usage": True}
    if interface is EngineInterface.GENERATE:
        params = _sampling(asked) | ({"logprobs": asked.top_logprobs} if asked.logprobs else {})
        # An engine that detokenizes does so for nobody: the gateway does.
        body: dict[str, Any] = {"token_ids": ids, "sampling_params": params | {"detokenize": False}}
    else:
        body = {"prompt": ids, "return_token_ids": True, **_sampling(asked)}
        if asked.logprobs:
            body |= {"logprobs": asked.top_logprobs, "return_tokens_as_token_ids": True}
    if start.cache_salt:
        body["cache_salt"] = start.cache_salt
    return {"model": model, **body, "stream": True, "stream_options": options}


def _sampling(asked: common_pb2.SamplingParams) -> dict[str, Any]:
    """Returns the parameters that are not the interfaces' own defaults; engines refuse some that they do not know."""
    # The noise of an answer that goes on must not be that of its beginning once more.
    told: dict[str, Any] = {
        "max_tokens": asked.max_tokens,
        "temperature": _told(asked.temperature),
        "seed": (asked.seed + asked.answered_tokens) & (2**63 - 1),
    }
    optional: dict[str, tuple[Any, Any]] = {
        "top_p": (_told(asked.top_p), 1.0),
        "top_k": (asked.top_k, 0),
        "min_p": (_told(asked.min_p), 0.0),
        "presence_penalty": (_told(asked.presence_penalty), 0.0),
        "frequency_penalty": (_told(asked.frequency_penalty), 0.0),
        "repetition_penalty": (_told(asked.repetition_penalty) or 1.0, 1.0),
        "ignore_eos": (asked.ignore_eos, False),
        "min_tokens": (asked.min_tokens, 0),
        "stop_token_ids": (list(asked.stop_token_ids), []),
        "logit_bias": ({str(one.token_id): _told(one.bias) for one in asked.logit_bias}, {}),
    }
    return told | {name: value for name, (value, usual) in optional.items() if value != usual}


def _told(value: float) -> float:
    """Returns a float32 as its shortest decimal form, as it was told: 0.7 and not 0.699999988."""
    return float(f"{value:.7g}")


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class TokenScore:
    """The log-probability of a token, and those of the best ones at its place, the best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class EngineChunk:
    """One event of an answer. `scores` has one entry a token where they were asked for; `finish` is "" while it goes
    on; `cached_tokens` of the prompt, -1 where the engine does not say."""

    token_ids: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    finish: str = ""
    cached_tokens: int = -1
    done: bool = False  # the stream's own mark of its end


class EventLines:
    """Cuts the bytes of a stream of server-sent events into the data of each. What is not cut yet is bounded."""

    def __init__(self, most: int = MAX_EVENT_BYTES) -> None:
        self._most = most
        self._rest = bytearray()
        self._seen = 0  # of it, in which no line ends

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the data of every event line that is complete now. Raises BodyTooLarge for a longer one."""
        self._rest += data
        first = 0
        while (end := self._rest.find(b"\n", max(first, self._seen))) >= 0:
            line = bytes(self._rest[first:end]).rstrip(b"\r")
            first = end + 1
            if line.startswith(b"data:"):
                yield line[5:].strip()
        del self._rest[:first]
        self._seen = len(self._rest)
        if len(self._rest) > self._most:
            raise BodyTooLarge(f"the engine sent an event of more than {self._most} bytes")


def chunk_of(data: bytes, top_logprobs: int = -1) -> EngineChunk:
    """Reads one event. `top_logprobs` is how many alternatives to each token were asked for; -1: no scores at all.
    Raises InternalError naming what is wrong with the event, or the error that the engine tells in it."""
    if data == b"[DONE]":
        return EngineChunk(done=True)
    try:
        told = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise InternalError(f"the engine sent an event that is not JSON: {shown(data)}") from None
    if not isinstance(told, dict):
        raise InternalError(f"the engine sent an event that is no object: {shown(data)}")
    if told.get("error") is not None:
        raise error_told(told["error"])
    chunk = EngineChunk(cached_tokens=_cached(told.get("usage")))
    choices = told.get("choices", [])
    if not isinstance(choices, list) or len(choices) > 1 or not all(isinstance(one, dict) for one in choices):
        raise InternalError(f"choices: the engine must send one at most: {shown(data)}")
    for choice in choices:
        ids = choice.get("token_ids") or []
        if not isinstance(ids, list) or not all(type(one) is int and 0 <= one <= MAX_TOKEN_ID for one in ids):
            raise InternalError(f"token_ids: the engine sent something else than token ids: {shown(data)}")
        finish = choice.get("finish_reason")
        if finish is not None and not isinstance(finish, str):
            raise InternalError(f"finish_reason: the engine sent no text: {shown(data)}")
        if not ids and choice.get("text"):
            raise InternalError("token_ids: the engine sent text without them; it must know return_token_ids")
        chunk.token_ids, chunk.finish = ids, finish or ""
        if top_logprobs >= 0 and ids:
            chunk.scores = _scores(choice.get("logprobs"), len(ids), top_logprobs)
    return chunk


def _cached(usage: Any) -> int:
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if type(cached) is int and cached >= 0 else -1


def _scores(told: Any, tokens: int, top: int) -> list[TokenScore]:
    found = None
    if isinstance(told, dict):
        found = _chat_scores(told["content"], top) if "content" in told else _completion_scores(told, top)
    if found is None or len(found) != tokens:
        raise InternalError("logprobs: the engine did not send one entry for each token")
    return found


def _chat_scores(content: Any, top: int) -> list[TokenScore] | None:
    """Reads what `/inference/v1/generate` tells: entries whose tokens are ids, or are named by them."""
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        return None
    return [TokenScore(_number(entry.get("logprob")), _best(entry.get("top_logprobs"), top)) for entry in content]


def _best(listed: Any, top: int) -> tuple[tuple[int, float], ...]:
    # An engine may list the sampled token before the best ones.
    found: dict[int, float] = {}
    for one in listed if isinstance(listed, list) else ():
        if isinstance(one, dict):
            found[_token(one.get("token_id", one.get("token")))] = _number(one.get("logprob"))
    return tuple(sorted(found.items(), key=lambda one: -one[1])[:top])


def _completion_scores(told: Mapping[str, Any], top: int) -> list[TokenScore] | None:
    """Reads the parallel lists of `/v1/completions`."""
    own, tops = told.get("token_logprobs"), told.get("top_logprobs") or []
    if not isinstance(own, list) or not isinstance(tops, list):
        return None
    found = []
    for at, logprob in enumerate(own):
        others = tops[at] if at < len(tops) and isinstance(tops[at], dict) else {}
        listed = [{"token": token, "logprob": value} for token, value in others.items()]
        found.append(TokenScore(_number(logprob), _best(listed, top)))
    return found


def _token(told: Any) -> int:
    if type(told) is int and 0 <= told <= MAX_TOKEN_ID:
        return told
    named = _TOKEN_NAME.fullmatch(told) if isinstance(told, str) else None
    if named is None or int(named[1]) > MAX_TOKEN_ID:
        raise InternalError(f"logprobs: the engine names a token by {shown(told)} in place of its id")
    return int(named[1])


def _number(told: Any) -> float:
    if isinstance(told, int | float) and not isinstance(told, bool) and not math.isnan(told):
        return float(told)
    raise InternalError(f"logprobs: the engine sent {shown(told)} in place of a number")


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────────

_BY_STATUS: dict[int, type[KvmeshError]] = {
    400: InvalidRequest, 413: InvalidRequest, 422: InvalidRequest, 404: ModelNotFound, 429: Overloaded,
}  # fmt: skip


def error_of(status: int, body: bytes) -> KvmeshError:
    """Returns the named error of an answer that is not 200. What is the request's own fault is not tried elsewhere; a
    failing engine, or one that knows no key of ours, may be."""
    why = body.decode("utf-8", "replace")
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError:
        told = None
    if isinstance(told, dict):
        inner = told.get("error", told)
        why = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    return _named(status, shown(why, quoted=False))


def error_told(told: Any) -> KvmeshError:
    """Returns the named error that an engine tells within a stream, once it has begun."""
    code = told.get("code") if isinstance(told, dict) else None
    why = told.get("message", told) if isinstance(told, dict) else told
    return _named(code if type(code) is int else 500, shown(str(why), quoted=False))


def _named(status: int, why: str) -> KvmeshError:
    kind = _BY_STATUS.get(status, Unavailable)
    text = f"the engine answers {status}: {why}"
    if kind is Overloaded or kind is Unavailable:
        return kind(text, retry_after_ms=RETRY_AFTER_MS)
    if kind is ModelNotFound:  # the mesh has placed it here: the engine is another one than was registered
        return Unavailable(text, retry_after_ms=RETRY_AFTER_MS)
    return kind(text)


def shown(told: Any, *, quoted: bool = True) -> str:
    """Returns at most MAX_SHOWN characters of what an engine has said, in one line."""
    if isinstance(told, bytes):
        told = told[: 2 * MAX_SHOWN].decode("utf-8", "replace")
    text = repr(told) if quoted else " ".join(str(told)[: 2 * MAX_SHOWN].split())
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


# ── metrics and facts ────────────────────────────────────────────────────────────────────────────────────────────

_SAMPLE = re.compile(r"(vllm:[a-z_]+)(?:\{(.*)\})?\s+(\S+)(?:\s+\S+)?\Z")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine says of itself in /metrics. `block_tokens` and `blocks` are 0 where it does not say;
    `keeps_prefixes` is False where it says that it does not."""

    waiting: int = 0
    running: int = 0
    used_share: float = 0.0  # of its KV cache
    block_tokens: int = 0
    blocks: int = 0
    keeps_prefixes: bool = True


def load_of(text: str, model: str) -> EngineLoad:
    """Reads Prometheus' text for one model, by the names that vLLM gave them. Several engines of one server (data
    parallel) are added up; their used share is the mean. Raises InternalError when none of them is there."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    block_tokens = blocks = 0
    keeps_prefixes = True
    for line in text.splitlines():
        if not line.startswith("vllm:"):
            continue
        if (sample := _SAMPLE.match(line)) is None:
            continue
        name, labels = sample[1], dict(_LABEL.findall(sample[2] or ""))
        if labels.get("model_name", model) != model:
            continue
        if name == "vllm:cache_config_info":
            block_tokens = max(block_tokens, _count(labels.get("block_size", "")))
            blocks += _count(labels.get("num_gpu_blocks", ""))
            keeps_prefixes = keeps_prefixes and labels.get("enable_prefix_caching") != "False"
        elif name in _GAUGES:
            try:
                value = float(sample[3])
            except ValueError:
                continue
            if math.isfinite(value):
                sums[name] = sums.get(name, 0.0) + max(0.0, value)
                counts[name] = counts.get(name, 0) + 1
    if "vllm:num_requests_running" not in sums:
        raise InternalError("the engine's /metrics have no vllm:num_requests_running of this model")
    used = sums.get("vllm:kv_cache_usage_perc", 0.0) / max(1, counts.get("vllm:kv_cache_usage_perc", 1))
    return EngineLoad(
        min(MAX_COUNT, int(sums.get("vllm:num_requests_waiting", 0))),
        min(MAX_COUNT, int(sums["vllm:num_requests_running"])),
        min(1.0, used),
        min(MAX_COUNT, block_tokens),
        min(MAX_COUNT, blocks),
        keeps_prefixes,
    )


MAX_COUNT = 1 << 24
_GAUGES = frozenset(("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"))


def _count(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else 0


@dataclass(frozen=True, slots=True)
class EngineModel:
    """The model that an engine serves: its own name for it, and the longest context; 0: it does not say."""

    name: str
    max_context_tokens: int


def model_of(body: bytes, wanted: str) -> EngineModel:
    """Reads the answer of GET /v1/models. `wanted` names one of several; "": the first. Raises ModelNotFound naming
    what there is, or InternalError for an answer that is none."""
    try:
        listed = orjson.loads(body)["data"]
        models = {str(one["id"]): one for one in listed}
    except (orjson.JSONDecodeError, KeyError, TypeError):
        raise InternalError(f"the engine's /v1/models is no list of models: {shown(body)}") from None
    if not models or (wanted and wanted not in models):
        there = ", ".join(list(models)[:20]) or "none"
        raise ModelNotFound(
            f"engine_model={wanted!r}: the engine has no such model; it has {there}", field="engine_model"
        )
    name = wanted or next(iter(models))
    longest = models[name].get("max_model_len")
    return EngineModel(name, longest if type(longest) is int and 0 < longest <= MAX_COUNT else 0)
