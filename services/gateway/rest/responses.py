"""POST /v1/responses: OpenAI's responses. A conversation is items (response_items.py), tools are response_tools.py's,
answers are written by response_events.py and remembered by response_store.py."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

import orjson
from pydantic import Field, PlainValidator, PrivateAttr, ValidationError, ValidationInfo, WithJsonSchema

from kvmesh.errors import DeadlinePassed, InvalidRequest, KvmeshError
from kvmesh.rpc.protocol import MAX_PENALTY, MAX_REPETITION_PENALTY, MAX_TOP_LOGPROBS, MIN_REPETITION_PENALTY
from kvmesh.services.gateway.api_keys import Tenant
from kvmesh.services.gateway.config import GatewayLimits
from kvmesh.services.gateway.core import GatewayCore
from kvmesh.services.gateway.generation import (
    MAX_SEED,
    MAX_TEMPERATURE,
    MAX_TOKENS,
    Generation,
    between,
    refused,
)
from kvmesh.services.gateway.request_memory import WORK_TIMEOUT_S
from kvmesh.services.gateway.requests import Request
from kvmesh.services.gateway.rest.chat import EFFORTS, effort_args
from kvmesh.services.gateway.rest.interface import AnswerWriter, InterfaceBody
from kvmesh.services.gateway.rest.openai import (
    ServiceFields,
    drop_unsupported,
    first_error,
    limits_of,
    refuse_unknown,
    told,
    wrong,
)
from kvmesh.services.gateway.rest.response_events import ResponseWriter
from kvmesh.services.gateway.rest.response_items import (
    INPUT_SCHEMA,
    Json,
    read_input,
    response_of,
    to_messages,
    with_ids,
)
from kvmesh.services.gateway.rest.response_store import PreviousResponseNotFound, StoredResponse, UnknownResponse
from kvmesh.services.gateway.rest.response_tools import (
    CHOICE_SCHEMA,
    TOOLS_SCHEMA,
    ToolChoice,
    ToolSet,
    read_choice,
    read_tools,
    tools_for,
)
from kvmesh.services.gateway.text.chat import Chat
from kvmesh.services.gateway.text.grammars.asked import AskedForm

RESOLVE_TIMEOUT_S = 10.0
MAX_REFERENCED = 64  # responses whose items one body may refer to
_PARSED_FACTOR = 8  # of stored items, once they are objects
_MAX_NAME = 256  # characters of previous_response_id, user, safety_identifier
_MAX_METADATA, _MAX_METADATA_KEY, _MAX_METADATA_VALUE = 16, 64, 512

# Field → values that ask for nothing; null always does.
UNSUPPORTED_IN_RESPONSES: dict[str, tuple[Any, ...]] = {
    "background": (False,), "conversation": (), "truncation": ("disabled",), "context_management": ([],),
    "prompt": (), "moderation": (), "image": (), "background_options": (),
}  # fmt: skip
# Told to us and of no effect here; the last is what coding agents send.
IGNORED_IN_RESPONSES = ("access_programs", "prompt_cache_options", "prompt_cache_retention", "client_metadata")

LOGPROBS, SEALED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
# The others belong to tools that kvmesh does not serve: no answer has what they would add.
INCLUDABLE = (
    LOGPROBS, SEALED_REASONING, "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)  # fmt: skip


def response_form(text_format: Mapping[str, Any]) -> AskedForm | None:
    """Returns the form that a `text.format` asks for; None: any text."""
    if text_format["type"] == "json_schema":
        strict = text_format.get("strict") is True
        return AskedForm("json_schema", text_format["schema"], "text.format.schema", strict)
    return AskedForm("json_object", None, "text.format") if text_format["type"] == "json_object" else None


def _check_input(value: Any, info: ValidationInfo) -> list[Json]:
    return [] if value is None else read_input(value, limits_of(info).max_messages)


def _check_include(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > len(INCLUDABLE):
        raise wrong(f"must be a list of at most {len(INCLUDABLE)} names")
    for name in value:
        if name not in INCLUDABLE:
            raise refused("include", name, f"must be one of {', '.join(INCLUDABLE)}")
    return tuple(value)


def _object(field: str, value: Any, known: Mapping[str, tuple[str, ...] | type]) -> Json:
    """An object whose fields are null, or one of some words, or of a type."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong("must be an object")
    for name, one in value.items():
        if name not in known:
            raise refused(f"{field}.{name}", one, "unknown field")
        allowed = known[name]
        if one is None:
            continue
        if isinstance(allowed, tuple):
            if one not in allowed:
                raise refused(f"{field}.{name}", one, f"must be one of {', '.join(allowed)}")
        elif not isinstance(one, allowed):
            raise refused(f"{field}.{name}", one, f"must be {'an object' if allowed is dict else 'true or false'}")
    return value


_SUMMARIES = ("auto", "concise", "detailed")
_REASONING = {
    "effort": EFFORTS,
    "summary": (*_SUMMARIES, "none"),
    "generate_summary": _SUMMARIES,
    "context": ("auto", "current_turn", "all_turns"),
    "mode": ("standard",),
}
_VERBOSITIES = ("low", "medium", "high")
_FORMATS = ("text", "json_object", "json_schema")


def _check_reasoning(value: Any) -> Json:
    return _object("reasoning", value, _REASONING)


def _check_text(value: Any) -> Json:
    found = _object("text", value, {"format": dict, "verbosity": _VERBOSITIES})
    form = found.get("format")
    if form is not None and form.get("type") not in _FORMATS:
        raise refused("text.format.type", form.get("type"), f"must be one of {', '.join(_FORMATS)}")
    if form is not None and form["type"] == "json_schema":
        for name, kind, what in (("name", str, "a string"), ("schema", dict, "a JSON Schema, an object")):
            if not isinstance(form.get(name), kind):
                raise refused(f"text.format.{name}", form.get(name), f"must be {what}")
    return found


def _check_stream_options(value: Any) -> Json:
    words = ("sequential_cutoff", "default")
    return _object("stream_options", value, {"include_obfuscation": bool, "reasoning_summary_delivery": words})


def _check_metadata(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > _MAX_METADATA:
        raise wrong(f"must be an object of at most {_MAX_METADATA} texts")
    for name, text in value.items():
        if not isinstance(text, str) or len(text) > _MAX_METADATA_VALUE or len(name) > _MAX_METADATA_KEY:
            why = f"names have at most {_MAX_METADATA_KEY} characters, texts at most {_MAX_METADATA_VALUE}"
            raise refused(f"metadata.{name}", text, why)
    return value


def _choices(*words: str) -> Json:
    return {"anyOf": [{"enum": [*words]}, {"type": "null"}]}


def _optional_object(properties: Json) -> Json:
    shown = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"anyOf": [shown, {"type": "null"}]}


_FORMAT_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object"]}},
            "required": ["type"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "name": {"type": "string"},
                "schema": {"type": "object"},
                "description": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            },
            "required": ["type", "name", "schema"],
            "additionalProperties": False,
        },
        {"type": "null"},
    ]
}
_TEXT_SCHEMA = _optional_object({"format": _FORMAT_SCHEMA, "verbosity": _choices(*_VERBOSITIES)})
_METADATA_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "additionalProperties": {"type": "string", "maxLength": _MAX_METADATA_VALUE},
            "maxProperties": _MAX_METADATA,
        },
        {"type": "null"},
    ]
}


class ResponseRequest(ServiceFields, InterfaceBody):
    """Body of POST /v1/responses. The parameters of sampling that OpenAI has for chats alone are taken here, too, and
    kvmesh's own as in chats."""

    model: str
    input: Annotated[list[Json], PlainValidator(_check_input), WithJsonSchema(INPUT_SCHEMA)] = Field(
        default_factory=list
    )
    instructions: Annotated[str | None, Field(description="The first message, of the role system")] = None
    tools: Annotated[ToolSet, PlainValidator(read_tools), WithJsonSchema(TOOLS_SCHEMA)] = ToolSet()
    tool_choice: Annotated[ToolChoice, PlainValidator(read_choice), WithJsonSchema(CHOICE_SCHEMA)] = ToolChoice()
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: Annotated[int | None, Field(description="Of calls of built-in tools; there are none")] = None
    temperature: Annotated[float | None, told("0: always the likeliest token. Default 1", 0, MAX_TEMPERATURE)] = None
    top_p: Annotated[float | None, told("As in chats. Default 1", 0, 1)] = None
    top_k: Annotated[int | None, told("As in chats. Default 0", 0, 2**31 - 1)] = None
    min_p: Annotated[float | None, told("As in chats. Default 0", 0, 1)] = None
    presence_penalty: Annotated[float | None, told("As in chats. Default 0", -MAX_PENALTY, MAX_PENALTY)] = None
    frequency_penalty: Annotated[float | None, told("As in chats. Default 0", -MAX_PENALTY, MAX_PENALTY)] = None
    repetition_penalty: Annotated[
        float | None, told("As in chats. Default 1", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    ] = None
    seed: Annotated[int | None, told("As in chats. Default: by x-request-id, or chosen anew", 0, MAX_SEED)] = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    top_logprobs: Annotated[int | None, told("With include: message.output_text.logprobs", 0, MAX_TOP_LOGPROBS)] = None
    include: Annotated[
        tuple[str, ...],
        PlainValidator(_check_include),
        WithJsonSchema(
            {"anyOf": [{"type": "array", "items": {"enum": [*INCLUDABLE]}, "maxItems": 8}, {"type": "null"}]}
        ),
    ] = ()
    reasoning: Annotated[
        Json,
        PlainValidator(_check_reasoning),
        WithJsonSchema(_optional_object({"effort": _choices(*EFFORTS), "summary": _choices(*_SUMMARIES)})),
    ] = Field(default_factory=dict, description="effort none leaves reasoning out where the model's template can")
    text: Annotated[Json, PlainValidator(_check_text), WithJsonSchema(_TEXT_SCHEMA)] = Field(default_factory=dict)
    metadata: Annotated[dict[str, str], PlainValidator(_check_metadata), WithJsonSchema(_METADATA_SCHEMA)] = Field(
        default_factory=dict
    )
    store: Annotated[bool | None, Field(description="false: the response is not kept. Default true")] = None
    previous_response_id: Annotated[
        str | None, Field(description="Goes on from a stored response; its instructions are not carried over")
    ] = None
    stream: bool | None = None
    stream_options: Annotated[
        Json,
        PlainValidator(_check_stream_options),
        WithJsonSchema(_optional_object({"include_obfuscation": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}})),
    ] = Field(default_factory=dict)
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Field(description="Variables of the model's chat template, such as enable_thinking")
    ] = None
    user: str | None = None
    safety_identifier: str | None = None
    access_programs: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    client_metadata: Any = None

    route: ClassVar[str] = "responses"

    _history: list[Json] = PrivateAttr(default_factory=list)
    _earlier: StoredResponse | None = PrivateAttr(default=None)

    @classmethod
    def read(cls, body: Any, limits: GatewayLimits) -> Self:
        """See InterfaceBody."""
        if not isinstance(body, dict):
            raise InvalidRequest("body: must be a JSON object", field="body")
        drop_unsupported(body, UNSUPPORTED_IN_RESPONSES)
        refuse_unknown(body, cls)
        try:
            return cls.model_validate(body, context={"limits": limits})
        except ValidationError as err:
            raise first_error(err) from None

    @property
    def streams(self) -> bool:
        """See InterfaceBody."""
        return bool(self.stream)

    # ── what came before ──────────────────────────────────────────────────────────────────────────

    @property
    def refers_to_stored(self) -> bool:
        """See InterfaceBody."""
        return self.previous_response_id is not None or any(item["type"] == "item_reference" for item in self.input)

    async def resolve(self, core: GatewayCore, tenant: Tenant) -> None:
        """Fetches earlier responses and the items that the input refers to. Raises InvalidRequest for what is not
        stored or too much, and ResponseStoreUnavailable."""
        for name in ("previous_response_id", "user", "safety_identifier"):
            value = getattr(self, name)
            if value is not None and len(value) > _MAX_NAME:
                raise refused(name, value, f"must have at most {_MAX_NAME} characters")
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                await self._fetch_references(core, tenant)
                await self._fetch_history(core, tenant)
        except TimeoutError:
            raise DeadlinePassed(f"response_store: earlier items did not come within {RESOLVE_TIMEOUT_S:g} s") from None

    async def _fetch_history(self, core: GatewayCore, tenant: Tenant) -> None:
        if self.previous_response_id is None:
            return
        try:
            earlier = await core.responses.get(tenant.name, self.previous_response_id)
            items, size = earlier.chain_items + len(self.input), earlier.chain_bytes
            if items > core.config.limits.max_messages:
                why = f"{items} items with those before; at most {core.config.limits.max_messages} are allowed"
                raise refused("previous_response_id", self.previous_response_id, why)
            if size > core.config.max_body_bytes:
                why = f"what was said before has {size} bytes; at most {core.config.max_body_bytes} are allowed"
                raise refused("previous_response_id", self.previous_response_id, why)
            cost = min(_PARSED_FACTOR * size, core.memory.work_limit)
            async with core.memory.work(cost, WORK_TIMEOUT_S):
                self._history = await core.responses.history(tenant.name, earlier) + earlier.output
        except UnknownResponse as err:
            where = f"previous_response_id={self.previous_response_id[:80]!r}"
            raise PreviousResponseNotFound(f"{where}: {err.message}", field="previous_response_id") from None
        self._earlier = earlier

    async def _fetch_references(self, core: GatewayCore, tenant: Tenant) -> None:
        """Puts stored items in the place of references to them."""
        wanted = {item["id"]: response_of(item["id"]) for item in self.input if item["type"] == "item_reference"}
        sources = {source for source in wanted.values() if source}
        if len(sources) > MAX_REFERENCED:
            raise refused("input", [*sources], f"refers to items of {len(sources)} responses; at most {MAX_REFERENCED}")
        found: dict[str, Json] = {}
        for source in sorted(sources):
            try:
                stored = await core.responses.get(tenant.name, source)
            except UnknownResponse:
                continue
            found |= {item["id"]: item for item in (*stored.input, *stored.output)}
        for index, item in enumerate(self.input):
            if item["type"] == "item_reference":
                if item["id"] not in found:
                    raise refused(f"input.{index}.id", item["id"], "no such item is stored")
                self.input[index] = found[item["id"]]

    # ── the request in the gateway's terms ────────────────────────────────────────────────────────

    def generation(self, limits: GatewayLimits) -> Generation:
        """See InterfaceBody."""
        between("max_output_tokens", self.max_output_tokens, 1, MAX_TOKENS)
        between("max_tool_calls", self.max_tool_calls, 0, MAX_TOKENS)
        between("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        items = self._history + self.input
        if not items:
            raise refused("input", self.input, "must not be empty")
        effort = self.reasoning.get("effort")
        chat = Chat(
            to_messages(self.instructions or "", items, self.tools.name_of),
            tools_for(self.tools, self.tool_choice),
            self.tool_choice.choice,
            self._model_name_of(self.tool_choice.named),
            self.parallel_tool_calls is not False,
            {**effort_args(effort), **(self.chat_template_kwargs or {})},
        )
        names = (
            "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
        )  # fmt: skip
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        return Generation(
            model=self.model,
            prompts=(chat,),
            parsed=True,
            max_tokens=self.max_output_tokens,
            seed=self.seed,
            ignore_eos=bool(self.ignore_eos),
            cache_salt=self.cache_salt or "",
            logprobs=self._logprobs,
            form=response_form(self.text.get("format") or {"type": "text"}),
            **self.service(),
            **{name: value for name, value in given.items() if value is not None},
        ).check(limits)

    def _model_name_of(self, named: str) -> str:
        return self.tools.name_of("", named) if named else ""

    @property
    def _logprobs(self) -> int:
        if LOGPROBS in self.include or self.top_logprobs:
            return self.top_logprobs or 0
        return -1

    # ── answers ───────────────────────────────────────────────────────────────────────────────────

    def writer(self, request: Request, *, timings: bool) -> AnswerWriter:
        """See InterfaceBody."""
        sealed = SEALED_REASONING in self.include
        writer = ResponseWriter(request, self._head(), self.tools, sealed=sealed, timings=timings)
        request.core.responses.underway[request.tenant.name, writer.response_id] = writer
        return writer

    def _head(self) -> Json:
        """What the response says of the request."""
        return {
            "model": self.model,
            "previous_response_id": self.previous_response_id,
            "instructions": self.instructions,
            "tools": [*self.tools.told],
            "tool_choice": self.tool_choice.told,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "temperature": _given(self.temperature, 1.0),
            "top_p": _given(self.top_p, 1.0),
            "presence_penalty": _given(self.presence_penalty, 0.0),
            "frequency_penalty": _given(self.frequency_penalty, 0.0),
            "top_logprobs": self.top_logprobs or 0,
            "reasoning": {"effort": self.reasoning.get("effort"), "summary": self.reasoning.get("summary")},
            "text": {
                "format": self.text.get("format") or {"type": "text"},
                "verbosity": self.text.get("verbosity") or "medium",
            },
            "truncation": "disabled",
            "background": False,
            "store": self.store is not False,
            "service_tier": "flex" if self.service_tier == "flex" else "default",
            "metadata": self.metadata,
            "user": self.user,
            "safety_identifier": self.safety_identifier,
            "prompt_cache_key": self.prompt_cache_key,
        }

    async def ended(self, request: Request, writer: AnswerWriter, err: KvmeshError | None) -> None:
        """Has the response stored, as far as it came."""
        assert isinstance(writer, ResponseWriter), "made by writer()"
        if err is not None and writer.begun:
            writer.fail(err)
        if writer.response is None or self.store is False:
            return
        given = with_ids(self.input, request.request_id)
        await request.core.responses.put(
            request.tenant.name, StoredResponse.after(self._earlier, writer.response, given)
        )

    def last_words(self, writer: AnswerWriter, err: KvmeshError, *, begun: bool) -> bytes | None:
        """See InterfaceBody: a stream ends with the failed response; one that was cancelled is told with what had
        come."""
        assert isinstance(writer, ResponseWriter), "made by writer()"
        if begun:
            writer.fail(err)
            return writer.end()
        return None if writer.response is None or self.streams else orjson.dumps(writer.response)


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
