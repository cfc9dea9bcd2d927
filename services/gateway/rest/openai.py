"""OpenAI's request bodies: strict models, one error that names the first offending field and its value.

Unknown fields are refused by name. Fields that OpenAI knows and kvmesh does not serve are refused too, unless
they hold the value that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from kvmesh.errors import InvalidRequest
from kvmesh.rpc.protocol import (
    MAX_BIAS,
    MAX_BIASED_TOKENS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION_PENALTY,
)
from kvmesh.services.gateway.config import GatewayLimits
from kvmesh.services.gateway.generation import (
    BATCH,
    MAX_SEED,
    MAX_SLO_MS,
    MAX_TEMPERATURE,
    MAX_TOKENS,
    MAX_VOCABULARY,
    Generation,
    Prompt,
    between,
    check_stops,
    refused,
)
from kvmesh.services.gateway.text.chat import TemplateMessage

# Fields of OpenAI's bodies that say how a request is to be served, not what: its SLO, its lane, what it belongs to.

# OpenAI's `service_tier` and the lane it asks for.
TIERS = {"auto": None, "default": None, "flex": BATCH}


def told(description: str, low: float, high: float) -> Any:
    """A number's description and bounds for the documentation; `Generation.check` enforces them."""
    return Field(description=description, json_schema_extra={"minimum": low, "maximum": high})


class Strict(BaseModel):
    """No coercion, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid")


class ServiceFields(Strict):
    """kvmesh's own but for service_tier and prompt_cache_key, which are OpenAI's; headers may tell the same (see
    serving_headers.py)."""

    priority: Annotated[int | None, Field(description="A smaller one goes first. Default 0")] = None
    ttft_slo_ms: Annotated[
        int | None, told("Refused (429) if the first token would take longer. Default: the model's", 1, MAX_SLO_MS)
    ] = None
    tbt_slo_ms: Annotated[
        int | None, told("Refused (429) if tokens would come further apart. Default: the model's", 1, MAX_SLO_MS)
    ] = None
    lane: Annotated[
        str | None,
        Field(description="batch: waits, up to its timeout, for what nobody else wants; as service_tier=flex"),
    ] = None
    service_tier: str | None = None
    session: Annotated[str | None, Field(description="Name of the conversation: its requests may be kept together")] = (
        None
    )
    origin: Annotated[
        str | None, Field(description="Of requests that share much of their prompts; default: prompt_cache_key")
    ] = None
    prompt_cache_key: str | None = None
    expected_tokens: Annotated[int | None, told("A guess at the length of the answer", 1, MAX_TOKENS)] = None

    def service(self) -> dict[str, Any]:
        """Fields of a Generation. InvalidRequest: OpenAI's field and ours say different things."""
        return {
            "priority": self.priority,
            "ttft_slo_ms": self.ttft_slo_ms,
            "tbt_slo_ms": self.tbt_slo_ms,
            "lane": self._lane(),
            "session": self.session or None,
            "origin": self._origin(),
            "expected_tokens": self.expected_tokens,
        }

    def _lane(self) -> str | None:
        if self.service_tier is None:
            return self.lane
        if self.service_tier not in TIERS:
            raise refused("service_tier", self.service_tier, f"not supported by kvmesh; {', '.join(TIERS)} are")
        lane = TIERS[self.service_tier]
        if None not in (lane, self.lane) and lane != self.lane:
            raise refused("service_tier", self.service_tier, f"differs from lane={self.lane!r}")
        return lane or self.lane

    def _origin(self) -> str | None:
        """OpenAI's prompt_cache_key gathers requests with a common prefix: what an origin is."""
        if self.origin and self.prompt_cache_key and self.origin != self.prompt_cache_key:
            raise refused("prompt_cache_key", self.prompt_cache_key, f"differs from origin={self.origin!r}")
        return self.origin or self.prompt_cache_key or None


ROLES = ("system", "developer", "user", "assistant")
DEFAULT_COMPLETION_TOKENS = 16

# Field → values that ask for nothing; null always does.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False), "functions": ([],),
    "function_call": ("none", "auto"), "response_format": ({"type": "text"},), "best_of": (1,), "suffix": ("",),
    "audio": (), "modalities": (["text"],), "prediction": (), "reasoning_effort": (), "verbosity": (),
    "web_search_options": (), "moderation": (),
}  # fmt: skip
UNSUPPORTED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([],), "tool_call_id": (), "function_call": (), "audio": (), "refusal": ("",), "annotations": ([],),
}  # fmt: skip
# Told to us and of no effect here.
IGNORED = ("user", "metadata", "store", "safety_identifier", "prompt_cache_retention")


def _drop_unsupported(body: dict[str, Any], table: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    for name in [name for name in body if name in table]:
        value = body.pop(name)
        if value is not None and not any(type(value) is type(n) and value == n for n in table[name]):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and any(value == n for n in table[name] if not isinstance(n, bool))):
                raise refused(prefix + name, value, "not supported by kvmesh")


def _unknown(body: dict[str, Any], model: type[BaseModel], prefix: str = "") -> None:
    for name in body:
        if name not in model.model_fields:
            raise refused(prefix + name, body[name], "unknown field")


def _wrong(why: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{why}", {"why": why})


def _limits(info: ValidationInfo) -> GatewayLimits:
    return GatewayLimits() if info.context is None else info.context["limits"]


def _check_prompt(value: Any, info: ValidationInfo) -> tuple[Prompt, ...]:
    """string | [string] | [id] | [[id]] to a tuple of prompts."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise _wrong("must be a string, a list of strings, a list of token ids or a list of lists of them")
    if not value:
        raise _wrong("must not be empty")
    if isinstance(value[0], str | list):
        limit = _limits(info).max_choices
        if len(value) > limit:
            raise _wrong(f"{len(value)} prompts; at most {limit} are allowed")
        for one in value:
            if type(one) is not type(value[0]):
                raise _wrong("its prompts must all be strings or all be lists of token ids")
            if isinstance(one, list):
                check_ids("prompt", one)
        return tuple(value)
    check_ids("prompt", value)
    return (value,)


def check_ids(field: str, ids: list[Any]) -> None:
    """InvalidRequest unless all `ids` are integers that a vocabulary could hold."""
    if not set(map(type, ids)) <= {int}:
        raise refused(field, next(i for i in ids if type(i) is not int), "token ids must be integers")
    if ids and not (min(ids) >= 0 and max(ids) <= MAX_VOCABULARY):
        bad = next(i for i in ids if not 0 <= i <= MAX_VOCABULARY)
        raise refused(field, bad, "token ids must not be negative nor over 32 bits")


def _check_stop(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise _wrong("must be a string or a list of strings")
    check_stops(stops, _limits(info))
    return tuple(stops)


def _check_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """{"token id": bias} to pairs; their bounds are looked at with the others'."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise _wrong("must be an object of token ids and biases")
    if len(value) > MAX_BIASED_TOKENS:
        raise _wrong(f"{len(value)} tokens; at most {MAX_BIASED_TOKENS} are allowed")
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key):
            raise refused(f"logit_bias.{key}", bias, "the key must be a token id")
        if not isinstance(bias, int | float) or isinstance(bias, bool):
            raise refused(f"logit_bias.{key}", bias, "must be a number")
    return tuple((int(key), bias) for key, bias in value.items())


def _check_content(value: Any) -> str:
    """A string, or text parts that are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong("must be a string or a list of text parts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise _wrong('a part must be an object {"type": "text", "text": ...}')
        if part["type"] != "text":
            raise refused("messages.content.type", part["type"], "not supported by kvmesh; only text parts are")
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise _wrong('a text part must be {"type": "text", "text": string}')
        texts.append(part["text"])
    return "".join(texts)


def _check_role(value: Any) -> str:
    if value in ("tool", "function"):
        raise _wrong("not supported by kvmesh")
    if value not in ROLES:
        raise _wrong(f"must be one of {', '.join(ROLES)}")
    return str(value)


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}


_BIASES = {
    "type": "object",
    "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
    "maxProperties": MAX_BIASED_TOKENS,
}


class ChatMessage(Strict):
    """One turn of a chat."""

    role: Annotated[str, PlainValidator(_check_role), WithJsonSchema({"enum": list(ROLES)})]
    content: Annotated[
        str,
        PlainValidator(_check_content),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]}),
    ]
    name: str | None = None


class StreamOptions(Strict):
    """`include_usage`: a last chunk tells the usage. `include_obfuscation` is OpenAI's and has no effect."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Request(ServiceFields):
    """What chats and completions have in common. OpenAI's fields; min_p, top_k and repetition_penalty as vLLM has them;
    ignore_eos and cache_salt (keeps the KV cache from others) are kvmesh's own."""

    model: str
    max_tokens: int | None = None
    temperature: Annotated[float | None, told("0: always the likeliest token. Default 1", 0, MAX_TEMPERATURE)] = None
    top_p: Annotated[
        float | None, told("Of the likeliest tokens, those that hold this share of what is left. Default 1", 0, 1)
    ] = None
    top_k: Annotated[int | None, told("Only so many of the likeliest tokens; 0: all. Default 0", 0, 2**31 - 1)] = None
    min_p: Annotated[
        float | None, told("Only tokens at least this share as likely as the likeliest. Default 0", 0, 1)
    ] = None
    presence_penalty: Annotated[
        float | None,
        told("Taken once from the logit of what the answer has already. Default 0", -MAX_PENALTY, MAX_PENALTY),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        told("Taken from a token's logit as often as the answer has it. Default 0", -MAX_PENALTY, MAX_PENALTY),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        told(
            "Divides positive logits of what prompt or answer have already, multiplies negative ones. Default 1",
            MIN_REPETITION_PENALTY,
            MAX_REPETITION_PENALTY,
        ),
    ] = None
    logit_bias: Annotated[
        tuple[tuple[int, float], ...],
        PlainValidator(_check_bias),
        WithJsonSchema({"anyOf": [_BIASES, {"type": "null"}]}),
        Field(description="Token id to what is added to its logit: -100 forbids it, 100 all but forces it"),
    ] = ()
    seed: Annotated[
        int | None, told("The same seed and request give the same answer. Default: chosen anew", 0, MAX_SEED)
    ] = None
    stop: Annotated[
        tuple[str, ...],
        PlainValidator(_check_stop),
        WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS, {"type": "null"}]}),
    ] = ()
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    safety_identifier: Any = None
    prompt_cache_retention: Any = None

    route: ClassVar[str]

    @classmethod
    def read(cls, body: Any, limits: GatewayLimits) -> Self:
        """Validate a parsed JSON body (which it may change). InvalidRequest names the first wrong field."""
        if not isinstance(body, dict):
            raise InvalidRequest("body: must be a JSON object", field="body")
        _drop_unsupported(body, UNSUPPORTED)
        _unknown(body, cls)
        messages = body.get("messages")
        if isinstance(messages, list):
            if len(messages) > limits.max_messages:
                raise refused("messages", messages, f"at most {limits.max_messages} messages are allowed")
            for index, message in enumerate(messages):
                if isinstance(message, dict):
                    _drop_unsupported(message, UNSUPPORTED_IN_MESSAGES, f"messages.{index}.")
                    _unknown(message, ChatMessage, f"messages.{index}.")
        try:
            found = cls.model_validate(body, context={"limits": limits})
        except ValidationError as err:
            raise _first(err) from None
        if found.stream_options is not None and not found.stream:
            raise refused("stream_options", body["stream_options"], "only allowed with stream=true")
        return found

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def _generation(self, **more: Any) -> Generation:
        names = (
            "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
            "n",
        )  # fmt: skip
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        return Generation(
            model=self.model,
            seed=self.seed,
            stops=self.stop,
            logit_bias=self.logit_bias,
            ignore_eos=bool(self.ignore_eos),
            cache_salt=self.cache_salt or "",
            **self.service(),
            **{name: value for name, value in given.items() if value is not None},
            **more,
        )


class ChatRequest(_Request):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    route: ClassVar[str] = "chat"

    def generation(self, limits: GatewayLimits) -> Generation:
        """The request in the gateway's own terms. InvalidRequest: a value is out of range."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != limit:
            raise refused("max_tokens", self.max_tokens, f"differs from max_completion_tokens={limit}")
        between("max_completion_tokens", self.max_completion_tokens, 1, 2**31 - 1)
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs", self.top_logprobs, "only allowed with logprobs=true")
        between("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if not self.messages:
            raise refused("messages", [], "must not be empty")
        turns = tuple(TemplateMessage(m.role, m.content, m.name or "") for m in self.messages)
        return self._generation(
            prompts=(turns,), max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else -1
        ).check(limits)


class CompletionRequest(_Request):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        tuple[Any, ...],
        PlainValidator(_check_prompt),
        WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS}]}),
    ]
    echo: bool | None = None
    logprobs: int | None = None

    route: ClassVar[str] = "completions"

    def generation(self, limits: GatewayLimits) -> Generation:
        """The request in the gateway's own terms. InvalidRequest: a value is out of range."""
        between("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.echo and self.logprobs is not None:
            raise refused("logprobs", self.logprobs, "not supported together with echo: prompts have no logprobs")
        return self._generation(
            prompts=self.prompt,
            max_tokens=DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens,
            logprobs=-1 if self.logprobs is None else self.logprobs,
            echo=bool(self.echo),
        ).check(limits)


def _first(err: ValidationError) -> InvalidRequest:
    """The first complaint; the others, and pydantic's links, help nobody."""
    found = err.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in found["loc"]) or "body"
    if found["type"] == "missing":
        return InvalidRequest(f"{field}: required and missing", field=field)
    if found["type"] == "model_type":
        return refused(field, found["input"], "must be an object")
    why = found["msg"].removeprefix("Input should be ")
    return refused(field, found["input"], why if found["type"] == "wrong" else f"must be {why}")
