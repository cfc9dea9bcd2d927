"""What bodies of OpenAI's chats and completions share: strict models, and one error that names the first offending
field and its value.

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
    between,
    check_stops,
    refused,
)
from kvmesh.services.gateway.rest.frames import FrameOptions
from kvmesh.services.gateway.rest.interface import InterfaceBody
from kvmesh.services.gateway.text.grammars.asked import AskedForm, asked_form

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


# Field → values that ask for nothing; null always does.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": ([],), "function_call": ("none", "auto"), "audio": (), "modalities": (["text"],), "prediction": (),
    "verbosity": (), "web_search_options": (), "moderation": (), "best_of": (1,), "suffix": ("",),
}  # fmt: skip
# Told to us and of no effect here.
IGNORED = ("user", "metadata", "store", "safety_identifier", "prompt_cache_retention")


def drop_unsupported(body: dict[str, Any], table: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    for name in [name for name in body if name in table]:
        value = body.pop(name)
        if value is not None and not any(type(value) is type(n) and value == n for n in table[name]):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and any(value == n for n in table[name] if not isinstance(n, bool))):
                raise refused(prefix + name, value, "not supported by kvmesh")


def refuse_unknown(body: dict[str, Any], model: type[BaseModel], prefix: str = "") -> None:
    for name in body:
        if name not in model.model_fields:
            raise refused(prefix + name, body[name], "unknown field")


def wrong(why: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{why}", {"why": why})


def limits_of(info: ValidationInfo) -> GatewayLimits:
    return GatewayLimits() if info.context is None else info.context["limits"]


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
        raise wrong("must be a string or a list of strings")
    check_stops(stops, limits_of(info))
    return tuple(stops)


def _check_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """{"token id": bias} to pairs; their bounds are looked at with the others'."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise wrong("must be an object of token ids and biases")
    if len(value) > MAX_BIASED_TOKENS:
        raise wrong(f"{len(value)} tokens; at most {MAX_BIASED_TOKENS} are allowed")
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key):
            raise refused(f"logit_bias.{key}", bias, "the key must be a token id")
        if not isinstance(bias, int | float) or isinstance(bias, bool):
            raise refused(f"logit_bias.{key}", bias, "must be a number")
    return tuple((int(key), bias) for key, bias in value.items())


TEXTS = {"type": "array", "items": {"type": "string"}}
_BIASES = {
    "type": "object",
    "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
    "maxProperties": MAX_BIASED_TOKENS,
}


_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "boolean"}]}
_FORM = {
    "description": "Text, any JSON object, or JSON of a schema (docs/reference/structured-output.md)",
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"enum": ["text"]}},
            "required": ["type"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"type": {"enum": ["json_object"]}},
            "required": ["type"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["json_schema"]},
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string"},
                        "description": {"type": "string"},
                        "schema": _SCHEMA,
                        "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                    },
                    "required": ["schema"],
                    "additionalProperties": False,
                },
            },
            "required": ["type", "json_schema"],
            "additionalProperties": False,
        },
        {"type": "null"},
    ],
}


class StreamOptions(Strict):
    """`include_usage`: a last chunk tells the usage. `continuous_usage_stats`, which is vLLM's: each chunk tells that
    of its choice so far. `include_obfuscation` is OpenAI's and has no effect."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(Strict):
    """How answers are sampled: OpenAI's fields; min_p, top_k, repetition_penalty and ignore_eos as vLLM has them."""

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
        int | None,
        told("The same seed and request give the same answer. Default: by x-request-id, or chosen anew", 0, MAX_SEED),
    ] = None
    stop: Annotated[
        tuple[str, ...],
        PlainValidator(_check_stop),
        WithJsonSchema({"anyOf": [{"type": "string"}, TEXTS, {"type": "null"}]}),
    ] = ()
    n: int | None = None
    ignore_eos: bool | None = None

    def sampling(self) -> dict[str, Any]:
        """Returns fields of a Generation."""
        names = (
            "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
            "n",
        )  # fmt: skip
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        fixed = {"seed": self.seed, "stops": self.stop, "logit_bias": self.logit_bias}
        return {**given, **fixed, "ignore_eos": bool(self.ignore_eos)}


class OpenAIFields(SamplingFields, ServiceFields, InterfaceBody):
    """What bodies of chats and completions have in common; cache_salt keeps the KV cache from others."""

    model: str
    response_format: Annotated[AskedForm | None, PlainValidator(lambda form: form), WithJsonSchema(_FORM)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    return_token_ids: Annotated[
        bool | None, Field(description="Answers tell their token ids, and prompt_token_ids those of the prompt")
    ] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, Field(description='Logprobs name tokens by their ids: "token_id:7"')
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        told("vLLM's: log-probabilities of the prompt's tokens and of so many others beside each", 0, MAX_TOP_LOGPROBS),
    ] = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    safety_identifier: Any = None
    prompt_cache_retention: Any = None

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED

    @classmethod
    def read(cls, body: Any, limits: GatewayLimits) -> Self:
        """Validate a parsed JSON body (which it may change). InvalidRequest names the first wrong field."""
        if not isinstance(body, dict):
            raise InvalidRequest("body: must be a JSON object", field="body")
        cls.look_at(body, limits)
        refuse_unknown(body, cls)
        try:
            found = cls.model_validate(body, context={"limits": limits})
        except ValidationError as err:
            raise first_error(err) from None
        if found.stream_options is not None and not found.stream:
            raise refused("stream_options", body["stream_options"], "only allowed with stream=true")
        return found

    @classmethod
    def look_at(cls, body: dict[str, Any], limits: GatewayLimits) -> None:
        """Takes out of a body what asks for nothing. Raises InvalidRequest for what is not served."""
        drop_unsupported(body, cls.unsupported)
        if (form := asked_form(body)) is not None:
            body["response_format"] = form

    @property
    def streams(self) -> bool:
        """See InterfaceBody."""
        return bool(self.stream)

    @property
    def tells_token_ids(self) -> bool:
        """See InterfaceBody."""
        return bool(self.return_token_ids)

    @property
    def asked_of_prompt(self) -> int:
        """How many others are told beside each token of the prompt; -1: nothing is."""
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs

    def frame_options(self, timings: bool) -> FrameOptions:
        """Returns what the client wants to be told besides the answer."""
        options = self.stream_options or StreamOptions()
        return FrameOptions(
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
            token_ids=self.tells_token_ids,
            tokens_as_ids=bool(self.return_tokens_as_token_ids),
            prompt_logprobs=self.asked_of_prompt,
            timings=timings,
        )

    def _generation(self, **more: Any) -> Generation:
        between("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        fields = {**self.sampling(), **self.service(), "form": self.response_format, **more}
        return Generation(model=self.model, cache_salt=self.cache_salt or "", **fields)


def first_error(err: ValidationError) -> InvalidRequest:
    """The first complaint; the others, and pydantic's links, help nobody."""
    found = err.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in found["loc"]) or "body"
    if found["type"] == "missing":
        return InvalidRequest(f"{field}: required and missing", field=field)
    if found["type"] == "model_type":
        return refused(field, found["input"], "must be an object")
    why = found["msg"].removeprefix("Input should be ")
    return refused(field, found["input"], why if found["type"] == "wrong" else f"must be {why}")
