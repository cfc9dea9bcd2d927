"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's messages, as bodies and as bytes.

Clients of this interface send much that asks for nothing here (caching marks, beta headers, fields of features that
only Anthropic's servers have), and more with each of their versions. So what is known to leave the answer as it is, and
what nobody knows, is passed over; what would change the answer and is not served is refused by name.
"""

from __future__ import annotations

import datetime
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, PrivateAttr, ValidationError, WithJsonSchema

from kvmesh.errors import (
    BodyTooLarge,
    ContextTooLong,
    DeadlinePassed,
    InvalidRequest,
    KvmeshError,
    ModelNotFound,
    Overloaded,
    Unauthorized,
    Unavailable,
)
from kvmesh.services.gateway.api_keys import Tenant
from kvmesh.services.gateway.config import GatewayLimits
from kvmesh.services.gateway.core import GatewayCore
from kvmesh.services.gateway.generation import MAX_TOKENS, Generation, between, brief, check_stops, refused
from kvmesh.services.gateway.quotas import QuotaStanding
from kvmesh.services.gateway.request_memory import prompts_bytes
from kvmesh.services.gateway.requests import Request
from kvmesh.services.gateway.rest import quota_headers
from kvmesh.services.gateway.rest.bounded_call import Caller, QueryCall
from kvmesh.services.gateway.rest.chat import (
    MAX_TOOLS,
    check_depth,
    check_tool_name,
    check_tools,
    effort_args,
    read_tool,
    tool_list,
)
from kvmesh.services.gateway.rest.interface import AnswerWriter, ErrorStyle, InterfaceBody
from kvmesh.services.gateway.rest.openai import first_error, told, wrong
from kvmesh.services.gateway.rest.system_text import VolatileLines
from kvmesh.services.gateway.text.answers.parsed import CallDelta
from kvmesh.services.gateway.text.chat import AUTO, NONE, REQUIRED, Chat, TemplateMessage, Tool, ToolCall
from kvmesh.services.gateway.text.completion import LENGTH, Delta
from kvmesh.services.gateway.text.grammars.asked import AskedForm

ROLES = ("user", "assistant", "system")
EFFORTS = ("low", "medium", "high", "xhigh", "max")
CHOICES = {"auto": AUTO, "any": REQUIRED, "none": NONE, "tool": REQUIRED}
THINKING = ("enabled", "disabled", "adaptive", "between_tools")
DISPLAYS = ("summarized", "omitted")

# Known, and without effect on the answer here: what is cached, how it is paid for, hints about what could be forgotten.
IGNORED = frozenset((
    "cache_control", "context_management", "diagnostics", "metadata", "speed", "fallbacks", "fallback_credit_token",
    "billing_policy", "user_profile_id", "workspace_id", "betas", "anthropic_beta", "anthropic_version",
))  # fmt: skip
# Field → values that ask for nothing; null always does.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "container": (), "mcp_servers": ([],), "compaction": (), "thread": (), "inference_geo": ("global",),
}  # fmt: skip
_MAX_UNKNOWN = 32

# ── bodies ────────────────────────────────────────────────────────────────────────────────────────


def _object(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refused(field, value, "must be an object")
    return value


def _string(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise refused(field, value, "must be a string")
    return value


def _one_of(field: str, value: Any, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise refused(field, value, f"must be one of {', '.join(allowed)}")
    return str(value)


def _blocks(field: str, content: Any) -> Iterable[tuple[str, dict[str, Any]]]:
    """The blocks of a content, which may be a string, each with its field."""
    if isinstance(content, str):
        yield field, {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        raise refused(field, content, "must be a string or a list of blocks")
    for index, block in enumerate(content):
        here = f"{field}.{index}"
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise refused(here, block, 'must be an object with a "type"')
        yield here, block


def _texts(field: str, content: Any) -> list[str]:
    """The texts of a content of nothing but text blocks."""
    texts = []
    for here, block in _blocks(field, content):
        texts.append(_text(here, block))
    return texts


def _text(field: str, block: dict[str, Any]) -> str:
    """The text of a block that must be one of text."""
    if block["type"] != "text":
        raise refused(f"{field}.type", block["type"], "not supported by kvmesh; only text is")
    return _string(f"{field}.text", block.get("text"))


def _result(field: str, block: dict[str, Any]) -> TemplateMessage:
    """The message of a tool's result."""
    call = _string(f"{field}.tool_use_id", block.get("tool_use_id"))
    content = block.get("content")
    texts = []
    for here, part in _blocks(f"{field}.content", content) if content is not None else ():
        if part["type"] == "tool_reference":  # a tool that was found; all tools are loaded here anyway
            texts.append(_string(f"{here}.tool_name", part.get("tool_name")))
        else:
            texts.append(_text(here, part))
    text = "".join(texts)
    failed = block.get("is_error")
    if failed is not None and not isinstance(failed, bool):
        raise refused(f"{field}.is_error", failed, "must be true or false")
    if failed and not text.lower().startswith("error"):  # templates know no failed results
        text = f"Error: {text}"
    return TemplateMessage("tool", text, tool_call_id=call)


def _user(field: str, content: Any) -> Iterable[TemplateMessage]:
    """A user's turn: each tool result is a message of its own, texts between them are joined."""
    texts: list[str] = []
    told_any = False
    for here, block in _blocks(field, content):
        if block["type"] == "tool_result":
            if texts:
                yield TemplateMessage("user", "".join(texts))
                texts = []
            yield _result(here, block)
            told_any = True
        elif block["type"] == "text":
            texts.append(_string(f"{here}.text", block.get("text")))
        else:
            raise refused(f"{here}.type", block["type"], "not supported by kvmesh; text and tool_result are")
    if texts or not told_any:
        yield TemplateMessage("user", "".join(texts))


def _assistant(field: str, content: Any) -> TemplateMessage:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for here, block in _blocks(field, content):
        kind = block["type"]
        if kind == "text":
            texts.append(_string(f"{here}.text", block.get("text")))
        elif kind == "thinking":
            thoughts.append(_string(f"{here}.thinking", block.get("thinking")))
        elif kind == "tool_use":
            check_tool_name(f"{here}.name", block.get("name"))
            given = _object(f"{here}.input", block.get("input", {}))
            check_depth(f"{here}.input", given)
            arguments = orjson.dumps(given).decode()
            calls.append(ToolCall(_string(f"{here}.id", block.get("id")), block["name"], arguments))
        elif kind != "redacted_thinking":  # of another server: nobody here can read it
            raise refused(f"{here}.type", kind, "not supported by kvmesh; text, thinking and tool_use are")
    return TemplateMessage("assistant", "".join(texts), reasoning="".join(thoughts), tool_calls=tuple(calls))


def _read_messages(value: Any) -> tuple[TemplateMessage, ...]:
    if not isinstance(value, list):
        raise wrong("must be a list of messages")
    found: list[TemplateMessage] = []
    for index, message in enumerate(value):
        field = f"messages.{index}"
        role = _one_of(f"{field}.role", _object(field, message).get("role"), ROLES)
        content = message.get("content")
        if role == "user":
            found += _user(f"{field}.content", content)
        elif role == "assistant":
            found.append(_assistant(f"{field}.content", content))
        else:
            found.append(TemplateMessage("system", "".join(_texts(f"{field}.content", content))))
    return tuple(found)


def _read_system(value: Any) -> tuple[str, ...]:
    return () if value is None else tuple(_texts("system", value))


def _read_tools(value: Any) -> tuple[Tool, ...]:
    tools = []
    for index, one in enumerate(tool_list(value)):
        field = f"tools.{index}"
        kind = _object(field, one).get("type")
        if kind not in (None, "custom"):
            raise refused(f"{field}.type", kind, "not supported by kvmesh, which runs no tools; custom ones are")
        if not isinstance(one.get("input_schema"), dict):
            raise refused(f"{field}.input_schema", one.get("input_schema"), "must be a JSON Schema, an object")
        check_depth(f"{field}.input_schema", one["input_schema"])
        function = {name: one.get(name) for name in ("name", "description", "strict")}
        tools.append(read_tool(field, {**function, "parameters": one["input_schema"]}))
    return tuple(tools)


def _read_choice(value: Any) -> tuple[str, str, bool]:
    """(AUTO, NONE or REQUIRED, name of the tool that must be called or "", whether several may be)."""
    if value is None:
        return AUTO, "", True
    kind = _one_of("tool_choice.type", _object("tool_choice", value).get("type"), tuple(CHOICES))
    single = value.get("disable_parallel_tool_use")
    if single is not None and not isinstance(single, bool):
        raise refused("tool_choice.disable_parallel_tool_use", single, "must be true or false")
    if kind == "tool":
        check_tool_name("tool_choice.name", value.get("name"))
    return CHOICES[kind], value["name"] if kind == "tool" else "", not single


def _read_thinking(value: Any) -> tuple[str, bool]:
    """(type or "", whether the client wants to read it)."""
    if value is None:
        return "", True
    kind = _one_of("thinking.type", _object("thinking", value).get("type"), THINKING)
    budget = value.get("budget_tokens")
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
        raise refused("thinking.budget_tokens", budget, "must be a whole number over 0")
    if kind == "enabled" and budget is None:
        raise InvalidRequest("thinking.budget_tokens: required and missing", field="thinking.budget_tokens")
    display = value.get("display")
    if display is not None:
        _one_of("thinking.display", display, DISPLAYS)
    return kind, display != "omitted"


def _read_output(value: Any) -> tuple[str, AskedForm | None]:
    """(effort or "", form of the answer or None)."""
    if value is None:
        return "", None
    effort = _object("output_config", value).get("effort")
    if effort is not None:
        _one_of("output_config.effort", effort, EFFORTS)
    return effort or "", read_format("output_config.format", value.get("format"))


def _read_tier(value: Any) -> str | None:
    return None if value is None else _one_of("service_tier", value, ("auto", "standard_only"))


def _read_format(value: Any) -> AskedForm | None:
    return read_format("output_format", value)


def read_format(field: str, value: Any) -> AskedForm | None:
    """Returns the form that the answer must have, None for any text. Raises InvalidRequest."""
    if value is None:
        return None
    _one_of(f"{field}.type", _object(field, value).get("type"), ("json_schema",))
    if value.get("schema") is None:
        raise InvalidRequest(f"{field}.schema: required and missing", field=f"{field}.schema")
    _object(f"{field}.schema", value["schema"])
    return AskedForm("json_schema", value["schema"], f"{field}.schema", True)


def _thinking_args(kind: str) -> dict[str, Any]:
    """What templates are told: those that know the matter ask for one of two names (see chat.effort_args)."""
    if kind in ("", "adaptive", "between_tools"):
        return {}
    return {"enable_thinking": kind == "enabled", "thinking": kind == "enabled"}


def _open(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*required]}


def _maybe(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


_FORMAT = _maybe(
    {
        "type": "object",
        "properties": {"type": {"enum": ["json_schema"]}, "schema": {"type": "object"}},
        "required": ["type", "schema"],
    }
)


def _is(value: str) -> dict[str, Any]:
    return {"enum": [value]}  # OpenAPI 3.0 has no const


def _block(kind: str, **properties: Any) -> dict[str, Any]:
    return _open(["type", *properties], type=_is(kind), **properties)


_STRING = {"type": "string"}
_NAME = {"type": "string", "pattern": r"^[A-Za-z0-9_.:/-]{1,128}$"}
_TEXT = _block("text", text=_STRING)
_TEXT_CONTENT = {"anyOf": [_STRING, {"type": "array", "items": _TEXT}]}
_RESULT = _block("tool_result", tool_use_id=_STRING)
_RESULT["properties"] |= {"content": _maybe(_TEXT_CONTENT), "is_error": _maybe({"type": "boolean"})}
_USER_BLOCKS = {"anyOf": [_TEXT, _RESULT]}
_CALL = _block("tool_use", id=_STRING, name=_NAME)
_CALL["properties"] |= {"input": {"type": "object"}}
_ASSISTANT_BLOCKS = {
    "anyOf": [
        _TEXT,
        _block("thinking", thinking=_STRING),
        _block("redacted_thinking"),
        _CALL,
    ]
}


def _turn(role: str, content: dict[str, Any]) -> dict[str, Any]:
    return _open(["role", "content"], role=_is(role), content=content)


_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            _turn("user", {"anyOf": [_STRING, {"type": "array", "items": _USER_BLOCKS}]}),
            _turn("assistant", {"anyOf": [_STRING, {"type": "array", "items": _ASSISTANT_BLOCKS}]}),
            _turn("system", _TEXT_CONTENT),
        ]
    },
}
_TOOL = _open(
    ["name", "input_schema"],
    type=_maybe(_is("custom")),
    name=_NAME,
    description=_maybe(_STRING),
    input_schema={"type": "object"},
    strict=_maybe({"type": "boolean"}),
)
_SINGLE = {"disable_parallel_tool_use": _maybe({"type": "boolean"})}
_CHOICE = {
    "anyOf": [
        _open(["type"], type={"enum": ["auto", "any", "none"]}, **_SINGLE),
        _open(["type", "name"], type=_is("tool"), name=_NAME, **_SINGLE),
    ]
}
_STOPS = {"type": "array", "items": {"type": "string", "minLength": 1}}
_BUDGET = {"type": "integer", "minimum": 1}
_DISPLAY = _maybe({"enum": [*DISPLAYS]})
_THINKING = {
    "anyOf": [
        _open(["type", "budget_tokens"], type=_is("enabled"), budget_tokens=_BUDGET, display=_DISPLAY),
        _open(["type"], type={"enum": [*THINKING[1:]]}, budget_tokens=_maybe(_BUDGET), display=_DISPLAY),
    ]
}


class AnthropicErrors(ErrorStyle):
    """Errors as Anthropic's clients read them."""

    id_headers = (b"request-id", b"x-request-id")

    @classmethod
    def status(cls, err: KvmeshError) -> int:
        """See ErrorStyle. 529 says that the service, not the caller's share of it, is at its end."""
        return 529 if isinstance(err, Unavailable) else err.http_status

    @classmethod
    def quota_headers(cls, standing: QuotaStanding) -> list[tuple[bytes, bytes]]:
        """See ErrorStyle."""
        return quota_headers.anthropic(standing, datetime.datetime.now(datetime.UTC))

    @classmethod
    def error_body(cls, err: KvmeshError, request_id: str) -> bytes:
        """See ErrorStyle."""
        message = err.message
        if isinstance(err, ContextTooLong):  # agents look for these words, and shorten the conversation
            message = f"prompt is too long: {message}"
        error = {"type": error_type(err), "message": message}
        return orjson.dumps({"type": "error", "error": error, "request_id": request_id or None})

    @classmethod
    def error_event(cls, err: KvmeshError, request_id: str) -> bytes:
        """See ErrorStyle."""
        return b"event: error\ndata: " + cls.error_body(err, request_id) + b"\n\n"


_ERROR_TYPES: Sequence[tuple[type[KvmeshError], str]] = (
    (BodyTooLarge, "request_too_large"),
    (InvalidRequest, "invalid_request_error"),
    (Unauthorized, "authentication_error"),
    (ModelNotFound, "not_found_error"),
    (Overloaded, "rate_limit_error"),
    (Unavailable, "overloaded_error"),
    (DeadlinePassed, "timeout_error"),
)


def error_type(err: KvmeshError) -> str:
    """Returns Anthropic's name for the kind of an error."""
    return next((name for kind, name in _ERROR_TYPES if isinstance(err, kind)), "api_error")


class PromptFields(BaseModel):
    """What bodies of messages and of their counts have in common."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str
    messages: Annotated[tuple[TemplateMessage, ...], PlainValidator(_read_messages), WithJsonSchema(_MESSAGES)]
    system: Annotated[tuple[str, ...], PlainValidator(_read_system), WithJsonSchema(_maybe(_TEXT_CONTENT))] = ()
    tools: Annotated[
        tuple[Tool, ...],
        PlainValidator(_read_tools),
        WithJsonSchema(_maybe({"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS})),
    ] = ()
    tool_choice: Annotated[tuple[str, str, bool], PlainValidator(_read_choice), WithJsonSchema(_maybe(_CHOICE))] = (
        AUTO,
        "",
        True,
    )
    thinking: Annotated[
        tuple[str, bool],
        PlainValidator(_read_thinking),
        WithJsonSchema(_maybe(_THINKING)),
        Field(description="enabled and disabled are told to templates that know the matter; else the model's default"),
    ] = ("", True)
    output_config: Annotated[
        tuple[str, AskedForm | None],
        PlainValidator(_read_output),
        WithJsonSchema(_maybe(_open([], effort=_maybe({"enum": [*EFFORTS]}), format=_FORMAT))),
    ] = ("", None)
    output_format: Annotated[AskedForm | None, PlainValidator(_read_format), WithJsonSchema(_FORMAT)] = None

    _volatile: VolatileLines = PrivateAttr(default_factory=VolatileLines)

    @classmethod
    def read(cls, body: Any, limits: GatewayLimits) -> Self:
        """Validates a parsed JSON body (which it may change). Raises InvalidRequest naming the first wrong field."""
        if not isinstance(body, dict):
            raise InvalidRequest("body: must be a JSON object", field="body")
        _look_at(body, cls)
        messages = body.get("messages")
        if isinstance(messages, list) and len(messages) > limits.max_messages:
            raise refused("messages", messages, f"at most {limits.max_messages} messages are allowed")
        try:
            return cls.model_validate(body, context={"limits": limits})
        except ValidationError as err:
            raise first_error(err) from None

    async def resolve(self, core: GatewayCore, tenant: Tenant) -> None:
        """See InterfaceBody."""
        self._volatile = core.config.volatile_lines

    def chat(self) -> Chat:
        """Returns the prompt. Raises InvalidRequest for what does not go together."""
        chosen, named, parallel = self.tool_choice
        check_tools("tools", self.tools, named)
        if chosen == REQUIRED and not self.tools:
            raise refused("tool_choice.type", "tool" if named else "any", "there are no tools")
        if not self.messages:
            raise refused("messages", [], "must not be empty")
        effort = self.output_config[0]
        system = self._volatile.apply(self.system)
        head = (TemplateMessage("system", system),) if system else ()
        return Chat(
            head + tuple(self._steady()),
            self.tools,
            chosen,
            named,
            parallel,
            {**effort_args({"max": "xhigh"}.get(effort, effort) or None), **_thinking_args(self.thinking[0])},
        )

    def _steady(self) -> Iterable[TemplateMessage]:
        """The messages without volatile lines in those of the system."""
        for message in self.messages:
            if message.role != "system":
                yield message
            elif text := self._volatile.apply((message.content,)):
                yield TemplateMessage("system", text)


def _look_at(body: dict[str, Any], kind: type[BaseModel]) -> None:
    """Passes over what nobody knows, unless it is a known name misspelt. Raises InvalidRequest for that, and for what
    is not served."""
    known = kind.model_fields
    strange = [name for name in body if name not in known and name not in IGNORED]
    if len(strange) > _MAX_UNKNOWN:
        raise refused(strange[0], body[strange[0]], f"unknown field, as {len(strange) - 1} others are")
    for name in strange:
        if name in UNSUPPORTED:
            if body[name] is not None and body[name] not in UNSUPPORTED[name]:
                raise refused(name, body[name], "not supported by kvmesh")
        elif meant := difflib.get_close_matches(brief(name), known, 1, 0.8):
            raise refused(name, body[name], f"unknown field; is {meant[0]} meant?")


class MessagesRequest(PromptFields, InterfaceBody, AnthropicErrors):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, told("Longest answer; what the context leaves bounds it, too", 1, MAX_TOKENS)]
    stop_sequences: Annotated[list[str] | None, WithJsonSchema(_maybe(_STOPS))] = None
    stream: bool | None = None
    temperature: Annotated[float | None, told("0: always the likeliest token. Default 1", 0, 2)] = None
    top_p: Annotated[float | None, told("Only the likeliest tokens that hold this share. Default 1", 0, 1)] = None
    top_k: Annotated[int | None, told("Only so many of the likeliest tokens; 0: all. Default 0", 0, MAX_TOKENS)] = None
    service_tier: Annotated[
        str | None, PlainValidator(_read_tier), WithJsonSchema(_maybe({"enum": ["auto", "standard_only"]}))
    ] = None

    route: ClassVar[str] = "messages"

    @property
    def streams(self) -> bool:
        """See InterfaceBody."""
        return bool(self.stream)

    def generation(self, limits: GatewayLimits) -> Generation:
        """See InterfaceBody."""
        between("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        stops = tuple(self.stop_sequences or ())
        check_stops(stops, limits, "stop_sequences")
        if self.messages and self.messages[-1].role == "assistant":
            raise InvalidRequest(
                "messages: the last one is the assistant's; kvmesh does not continue answers (no prefill)",
                field="messages",
            )
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        return Generation(
            model=self.model,
            prompts=(self.chat(),),
            parsed=True,
            max_tokens=self.max_tokens,
            stops=stops,
            form=self.output_config[1] or self.output_format,
            **{name: value for name, value in given.items() if value is not None},
        ).check(limits)

    def writer(self, request: Request, *, timings: bool) -> AnswerWriter:
        """See InterfaceBody."""
        return MessageWriter(request, timings=timings, thinking=self.thinking[1])


class CountTokensRequest(PromptFields, AnthropicErrors):
    """Body of POST /v1/messages/count_tokens. Fields of /v1/messages that do not change the prompt are passed over."""


class CountTokens(QueryCall[tuple[CountTokensRequest, Generation]]):
    """Counts the tokens of a prompt, as /v1/messages would read it."""

    route = "messages_count_tokens"
    body_model = CountTokensRequest
    errors = AnthropicErrors

    async def read(self, body: Any, caller: Caller) -> tuple[CountTokensRequest, Generation]:
        """See BoundedCall."""
        asked = CountTokensRequest.read(body, self.core.config.limits)
        await asked.resolve(self.core, caller.tenant)
        return asked, Generation(model=asked.model, prompts=(asked.chat(),))

    def kept_bytes(self, read: tuple[CountTokensRequest, Generation]) -> int:
        """See BoundedCall."""
        return prompts_bytes(read[1].prompts)

    async def compute(self, read: tuple[CountTokensRequest, Generation], caller: Caller) -> bytes:
        """See QueryCall."""
        model = self.core.models.find(read[1].model, caller.tenant)
        prepared = await self.core.prepare(read[1], model, model.require(), caller.tenant)
        return orjson.dumps({"input_tokens": prepared[0].tokens})


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


class MessageWriter:
    """Writes one message (AnswerWriter). `thinking`: the client wants to read it; else its blocks are empty.

    Of a stream one block is open at a time. Pieces of one call come together, so a block is never opened twice."""

    def __init__(self, request: Request, *, timings: bool, thinking: bool = True) -> None:
        self._request = request
        self._timings = timings
        self._thinking = thinking
        self._begun = False
        self._kind = ""  # of the open block
        self._call = -1  # index of the open call
        self._blocks = 0  # opened so far
        self._held = ""  # white space that no text has followed yet
        self._called = False
        self._stop_reason: str | None = None

    # ── AnswerWriter ──────────────────────────────────────────────────────────────────────────────

    def step(self, index: int, delta: Delta) -> bytes:
        """See AnswerWriter."""
        events = [] if self._begun else [self._start(), _event("ping")]
        self._begun = True
        calls = list(delta.calls)
        while calls and not calls[0].name and calls[0].index == self._call:  # the rest of the open call comes first
            events += self._piece(calls.pop(0))
        if delta.reasoning:
            events += self._reasoning(delta.reasoning)
        if delta.text:
            events += self._text(delta.text)
        for call in calls:
            events += self._piece(call)
        if delta.finish:
            events += self._finish(delta.finish)
        return b"".join(events)

    def end(self) -> bytes:
        """See AnswerWriter."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence()}
        return _event("message_delta", delta=delta, usage=self._usage(), **self._tail()) + _event("message_stop")

    def whole(self) -> bytes:
        """See AnswerWriter."""
        choice = self._request.choices[0]
        whole = choice.whole
        text, content = whole.text, list[dict[str, Any]]()
        if whole.reasoning:
            thinking = whole.reasoning if self._thinking else ""
            content.append({"type": "thinking", "thinking": thinking, "signature": ""})
        if text.strip() or (text and not content and not whole.calls):
            content.append({"type": "text", "text": text})
        for call in whole.calls:
            self._called = True
            content.append(
                {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)},
            )
        return orjson.dumps(self._message(content, self._reason(choice.answer.finish)) | self._tail())

    # ── blocks ────────────────────────────────────────────────────────────────────────────────────

    def _start(self) -> bytes:
        return _event("message_start", message=self._message([], None))

    def _open(self, kind: str, **fields: Any) -> list[bytes]:
        """Opens a block, after the one that is open."""
        closed = self._close()
        self._kind = kind
        self._blocks += 1
        block = {"type": kind, **fields}
        return [*closed, _event("content_block_start", index=self._blocks - 1, content_block=block)]

    def _gain(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _close(self) -> list[bytes]:
        kind, self._kind, self._call = self._kind, "", -1
        if not kind:
            return []
        signed = [self._gain(type="signature_delta", signature="")] if kind == "thinking" else []
        return [*signed, _event("content_block_stop", index=self._blocks - 1)]

    def _reasoning(self, text: str) -> list[bytes]:
        opening = [] if self._kind == "thinking" else self._open("thinking", thinking="", signature="")
        return [*opening, self._gain(type="thinking_delta", thinking=text)] if self._thinking else opening

    def _text(self, text: str) -> list[bytes]:
        if self._kind == "text":
            return [self._gain(type="text_delta", text=text)]
        text = self._held + text
        if not text.strip():  # what stands between reasoning and calls; clients may not send back such a block
            self._held = text
            return []
        self._held = ""
        return [*self._open("text", text=""), self._gain(type="text_delta", text=text)]

    def _piece(self, call: CallDelta) -> list[bytes]:
        self._called = True
        opening: list[bytes] = []
        if call.index != self._call:
            self._held = ""
            opening = self._open("tool_use", id=call.id, name=call.name, input={})
            self._call = call.index
        return [*opening, self._gain(type="input_json_delta", partial_json=call.arguments)]

    def _finish(self, finish: str) -> list[bytes]:
        """Closes what is open; of an answer of nothing but white space that is told."""
        self._stop_reason = self._reason(finish)
        only = []
        if self._held and not self._blocks:
            only = [*self._open("text", text=""), self._gain(type="text_delta", text=self._held)]
        return only + self._close()

    # ── the message ───────────────────────────────────────────────────────────────────────────────

    def _message(self, content: list[dict[str, Any]], stop_reason: str | None) -> dict[str, Any]:
        return {
            "id": f"msg_{self._request.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._request.generation.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": self._stop_sequence() if stop_reason else None,
            "usage": self._usage(),
        }

    def _reason(self, finish: str) -> str:
        request = self._request
        answer = request.choices[0].answer
        if finish == LENGTH:
            asked = request.generation.max_tokens
            return "max_tokens" if asked is None or answer.count >= asked else "model_context_window_exceeded"
        if answer.stop_string:
            return "stop_sequence"
        return "tool_use" if self._called else "end_turn"

    def _stop_sequence(self) -> str | None:
        return self._request.choices[0].answer.stop_string or None

    def _usage(self) -> dict[str, Any]:
        usage = self._request.account.usage(self._request.choices)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        }

    def _tail(self) -> dict[str, Any]:
        return {"kvmesh": self._request.account.stages(self._request.choices)} if self._timings else {}


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments; of one that was cut before its end, or is no object, nothing can be told."""
    try:
        found = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
