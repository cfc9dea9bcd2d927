"""POST /v1/chat/completions: OpenAI's chats, as bodies and as bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import Field, PlainValidator, WithJsonSchema

from kvmesh.errors import InvalidRequest
from kvmesh.rpc.protocol import MAX_TOP_LOGPROBS
from kvmesh.services.gateway.config import GatewayLimits
from kvmesh.services.gateway.generation import Generation, between, refused
from kvmesh.services.gateway.requests import Request
from kvmesh.services.gateway.rest.frames import FrameOptions, Frames, Piece
from kvmesh.services.gateway.rest.interface import AnswerWriter
from kvmesh.services.gateway.rest.openai import OpenAIFields, Strict, drop_unsupported, refuse_unknown, wrong
from kvmesh.services.gateway.text.answers.parsed import CallDelta
from kvmesh.services.gateway.text.chat import AUTO, NONE, REQUIRED, Chat, TemplateMessage, Tool, ToolCall
from kvmesh.services.gateway.text.completion import STOP, Delta, TokenLogprob
from kvmesh.services.gateway.text.prompt_logprobs import number

ROLES = ("system", "developer", "user", "assistant", "tool")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
MAX_TOOLS = 256
_MAX_DEPTH = 64
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
# What templates are given anyway; a client must not replace it.
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now", "raise_exception")

# Field → values that ask for nothing; null always does.
UNSUPPORTED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "function_call": (), "audio": (), "refusal": ("",), "annotations": ([],),
}  # fmt: skip


def _check_content(value: Any) -> str | None:
    """A string, text parts that are joined, or nothing."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong("must be a string or a list of text parts")
    texts = []
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise wrong('a part must be an object {"type": "text", "text": ...}')
        if part["type"] not in ("text", "refusal"):
            raise refused("messages.content.type", part["type"], "not supported by kvmesh; only text parts are")
        text = part.get(part["type"])
        if part.keys() - {"cache_control"} != {"type", part["type"]} or not isinstance(text, str):
            raise wrong('a text part must be {"type": "text", "text": string}')
        texts.append(text)
    return "".join(texts)


def _check_role(value: Any) -> str:
    if value == "function":
        raise wrong("not supported by kvmesh; tool is")
    if value not in ROLES:
        raise wrong(f"must be one of {', '.join(ROLES)}")
    return str(value)


def check_depth(field: str, value: Any) -> None:
    """Raises InvalidRequest for a JSON value nested so deeply that templates could not walk it."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [part for one in level for part in _parts(one)]
        if not level:
            return
    raise InvalidRequest(f"{field}: nested deeper than {_MAX_DEPTH} levels", field=field)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def read_arguments(field: str, text: Any) -> str:
    """Returns a call's arguments, a JSON object as text; "" and null are an empty one. Raises InvalidRequest."""
    if text in ("", None):
        return "{}"
    if isinstance(text, dict):
        check_depth(field, text)
        return orjson.dumps(text).decode()
    try:
        found = orjson.loads(text) if isinstance(text, str) else None
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise refused(field, text, "must be a JSON object as text")
    check_depth(field, found)
    return str(text)


def read_tool(field: str, function: Mapping[str, Any]) -> Tool:
    """Returns a tool of {name, description, parameters, strict}. Raises InvalidRequest naming what is wrong."""
    name, parameters = function.get("name"), function.get("parameters")
    check_tool_name(f"{field}.name", name)
    if parameters is not None and not isinstance(parameters, dict):
        raise refused(f"{field}.parameters", parameters, "must be a JSON Schema, an object")
    check_depth(f"{field}.parameters", parameters)
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise refused(f"{field}.description", description, "must be a string")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise refused(f"{field}.strict", strict, "must be true or false")
    return Tool(str(name), description or "", parameters or {"type": "object", "properties": {}}, bool(strict))


def check_tool_name(field: str, name: Any) -> None:
    """Raises InvalidRequest unless `name` may name a tool."""
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise refused(field, name, "must be 1 to 128 of A-Z a-z 0-9 _ . : / -")


def check_tools(field: str, tools: Sequence[Tool], named: str) -> None:
    """Raises InvalidRequest for too many tools, two of one name, or a choice that is none of them."""
    if len(tools) > MAX_TOOLS:
        raise refused(field, [*tools], f"at most {MAX_TOOLS} tools are allowed")
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise refused(field, name, "two tools have this name")
    if named and named not in names:
        raise refused("tool_choice", named, f"no tool has this name; there are {', '.join(names) or 'none'}")


def effort_args(effort: str | None) -> dict[str, Any]:
    """Returns what templates are given for an effort. Those of models that can leave reasoning out ask for
    `enable_thinking` (Qwen3, GLM) or `thinking` (DeepSeek, Kimi); gpt-oss reads `reasoning_effort`."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise refused("reasoning_effort", effort, f"must be one of {', '.join(EFFORTS)}")
    if effort == "none":
        return {"enable_thinking": False, "thinking": False}
    return {"reasoning_effort": effort}


def _function(field: str, value: Any, known: Sequence[str]) -> dict[str, Any]:
    """The function of {"type": "function", "function": {...}}."""
    if not isinstance(value, dict) or value.get("type", "function") != "function":
        raise refused(field, value, 'must be {"type": "function", "function": ...}; other tools are not supported')
    function = value.get("function")
    if not isinstance(function, dict):
        raise refused(f"{field}.function", function, "must be an object")
    for name in function:
        if name not in known:
            raise refused(f"{field}.function.{name}", function[name], "unknown field")
    return function


def tool_list(value: Any) -> list[Any]:
    """Returns the tools of a body, not looked at yet; their count is bounded. For validators of pydantic."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong("must be a list of tools")
    if len(value) > MAX_TOOLS:
        raise wrong(f"{len(value)} tools; at most {MAX_TOOLS} are allowed")
    return value


def _check_tools(value: Any) -> tuple[Tool, ...]:
    known = ("name", "description", "parameters", "strict")
    tools = []
    for index, one in enumerate(tool_list(value)):
        field = f"tools.{index}"
        tools.append(read_tool(f"{field}.function", _function(field, one, known)))
    return tuple(tools)


def _check_choice(value: Any) -> tuple[str, str]:
    """(AUTO, NONE or REQUIRED, name of the tool that must be called or "")."""
    if value is None:
        return AUTO, ""
    if value in (AUTO, NONE, REQUIRED):
        return value, ""
    if isinstance(value, str):
        raise wrong(f"must be {AUTO}, {NONE}, {REQUIRED} or the function that must be called")
    function = _function("tool_choice", value, ("name",))
    check_tool_name("tool_choice.function.name", function.get("name"))
    return REQUIRED, function["name"]


def _check_calls(value: Any) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong("must be a list of calls")
    calls = []
    for index, one in enumerate(value):
        field = f"tool_calls.{index}"
        function = _function(field, one, ("name", "arguments"))
        if not isinstance(one.get("id"), str):
            raise refused(f"{field}.id", one.get("id"), "must be a string")
        check_tool_name(f"{field}.function.name", function.get("name"))
        arguments = read_arguments(f"{field}.function.arguments", function.get("arguments"))
        calls.append(ToolCall(one["id"], function["name"], arguments))
    return tuple(calls)


def _check_variables(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong("must be an object")
    for name in value:
        if name in OWN_VARIABLES or name.endswith("_token"):
            raise refused(f"chat_template_kwargs.{name}", value[name], "is not for clients to set")
    check_depth("chat_template_kwargs", value)
    return value


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_FUNCTION_NAME = {"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"}


def _functional(function: dict[str, Any], *required: str) -> dict[str, Any]:
    """The schema of {"type": "function", "function": ...}."""
    inner = {"type": "object", "properties": function, "required": list(required), "additionalProperties": False}
    outer = {"type": {"enum": ["function"]}, "function": inner}
    return {"type": "object", "properties": outer, "required": ["function"]}


_TOOL = _functional(
    {
        "name": _FUNCTION_NAME,
        "description": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "parameters": {"anyOf": [{"type": "object"}, {"type": "null"}]},
        "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "name",
)
Tools = Annotated[
    tuple[Tool, ...],
    PlainValidator(_check_tools),
    WithJsonSchema({"anyOf": [{"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS}, {"type": "null"}]}),
]
TemplateVariables = Annotated[
    dict[str, Any], PlainValidator(_check_variables), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})
]
_CHOICE = {"anyOf": [{"enum": [AUTO, NONE, REQUIRED]}, _functional({"name": _FUNCTION_NAME}, "name"), {"type": "null"}]}
_CALL = _functional({"name": _FUNCTION_NAME, "arguments": {"type": "string"}}, "name")
_CALL = {**_CALL, "properties": {**_CALL["properties"], "id": {"type": "string"}}, "required": ["id", "function"]}


class ChatMessage(Strict):
    """One turn of a chat. `reasoning_content` and `tool_calls` are an assistant's; `tool_call_id` tells whose result a
    message of the role tool is."""

    role: Annotated[str, PlainValidator(_check_role), WithJsonSchema({"enum": list(ROLES)})]
    content: Annotated[
        str | None,
        PlainValidator(_check_content),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]}),
    ] = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[
        tuple[ToolCall, ...],
        PlainValidator(_check_calls),
        WithJsonSchema({"anyOf": [{"type": "array", "items": _CALL}, {"type": "null"}]}),
    ] = ()
    tool_call_id: str | None = None

    def turn(self, field: str) -> TemplateMessage:
        """Returns the message as templates are given it. Raises InvalidRequest for what does not go together."""
        for name, value, role in (
            ("tool_calls", self.tool_calls, "assistant"),
            ("reasoning_content", self.reasoning_content, "assistant"),
            ("tool_call_id", self.tool_call_id, "tool"),
        ):
            if value and self.role != role:
                raise refused(f"{field}.{name}", value, f"only a message of the role {role} has it")
        if self.content is None and self.role != "assistant":
            raise refused(f"{field}.content", None, "must be a string or a list of text parts")
        if self.role == "tool" and not self.tool_call_id:
            raise InvalidRequest(f"{field}.tool_call_id: required and missing", field=f"{field}.tool_call_id")
        return TemplateMessage(
            self.role,
            self.content or "",
            self.name or "",
            self.reasoning_content or "",
            self.tool_calls,
            self.tool_call_id or "",
        )


class ChatRequest(OpenAIFields):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Tools = ()
    tool_choice: Annotated[tuple[str, str], PlainValidator(_check_choice), WithJsonSchema(_CHOICE)] = (AUTO, "")
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[
        str | None, Field(description="none leaves reasoning out where the model's template can", examples=[*EFFORTS])
    ] = None
    include_reasoning: Annotated[
        bool | None, Field(description="false: reasoning is computed and not told. Default true")
    ] = None
    chat_template_kwargs: TemplateVariables = Field(
        default_factory=dict, description="Variables of the model's chat template, such as enable_thinking"
    )

    route: ClassVar[str] = "chat"

    @classmethod
    def look_at(cls, body: dict[str, Any], limits: GatewayLimits) -> None:
        """See OpenAIFields; messages too, whose count is looked at first."""
        super().look_at(body, limits)
        look_at_messages(body, limits)

    def generation(self, limits: GatewayLimits) -> Generation:
        """The request in the gateway's own terms. InvalidRequest: a value is out of range."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != limit:
            raise refused("max_tokens", self.max_tokens, f"differs from max_completion_tokens={limit}")
        between("max_completion_tokens", self.max_completion_tokens, 1, 2**31 - 1)
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs", self.top_logprobs, "only allowed with logprobs=true")
        between("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        chosen, named = self.tool_choice
        check_tools("tools", self.tools, named)
        if chosen == REQUIRED and not self.tools:
            raise refused("tool_choice", chosen, "there are no tools")
        chat = Chat(
            tuple(message.turn(f"messages.{index}") for index, message in enumerate(self.messages)),
            self.tools,
            chosen,
            named,
            self.parallel_tool_calls is not False,
            {**effort_args(self.reasoning_effort), **self.chat_template_kwargs},
        )
        return self._generation(
            prompts=(chat,),
            parsed=True,
            max_tokens=limit,
            logprobs=(self.top_logprobs or 0) if self.logprobs else -1,
            prompt_logprobs=self.asked_of_prompt,
        ).check(limits)

    def writer(self, request: Request, *, timings: bool) -> AnswerWriter:
        """See InterfaceBody."""
        reasoning = self.include_reasoning is not False
        return ChatWriter(request, self.frame_options(timings), reasoning=reasoning)


def look_at_messages(body: dict[str, Any], limits: GatewayLimits) -> None:
    """Takes out of the messages of a body what asks for nothing. Raises InvalidRequest for too many, and for what is
    not served."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return
    if len(messages) > limits.max_messages:
        raise refused("messages", messages, f"at most {limits.max_messages} messages are allowed")
    for index, message in enumerate(messages):
        if isinstance(message, dict):
            drop_unsupported(message, UNSUPPORTED_IN_MESSAGES, f"messages.{index}.")
            refuse_unknown(message, ChatMessage, f"messages.{index}.")


class ChatWriter(Frames):
    """Writes chats. `reasoning`: the client wants to read it."""

    prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    text_key, text_end = b',"delta":{"content":', b"}"

    def __init__(self, request: Request, options: FrameOptions, *, reasoning: bool = True) -> None:
        super().__init__(request, options)
        self._reasoning = reasoning
        self._called: set[int] = set()
        self._opened = False  # some choice has begun

    def opening(self, index: int) -> bytes:
        """See Frames."""
        scored = self.options.prompt_logprobs >= 0
        if self.options.token_ids or self.options.continuous_usage or scored:
            once = {} if self._opened else self._of_prompt(index)
            self._opened = True
            return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None, "", once)
        delta = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return self._open + b"%d" % index + delta + self._usage_null + b"}\n\n"

    def step(self, index: int, delta: Delta) -> bytes:
        """See Frames."""
        if delta.calls:
            self._called.add(index)
        if not self._reasoning:
            delta.reasoning = ""
            if not delta.shows and not self.options.token_ids:
                return b""
        return super().step(index, delta)

    def gained(self, delta: Delta) -> dict[str, Any]:
        """See Frames."""
        told: dict[str, Any] = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
        if delta.text:
            told["content"] = delta.text
        if delta.calls:
            told["tool_calls"] = [_gained_call(call) for call in delta.calls]
        return {"delta": told}

    def said(self, index: int) -> dict[str, Any]:
        """See Frames."""
        whole = self.request.choices[index].whole
        message: dict[str, Any] = {"role": "assistant", "content": whole.text, "refusal": None}
        if self._reasoning and whole.reasoning:
            message["reasoning_content"] = whole.reasoning
        if calls := whole.calls:
            self._called.add(index)
            message["content"] = whole.text or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return {"message": message}

    def head(self) -> dict[str, Any]:
        """See Frames."""
        return self._of_prompt(0)

    def _of_prompt(self, index: int) -> dict[str, Any]:
        """Returns what is told of the prompt, which all choices have in common."""
        ids = {"prompt_token_ids": self.prompt_ids(index)} if self.options.token_ids else {}
        return ids | self.prompt_logprobs(index)

    def finish(self, index: int, reason: str) -> str:
        """See Frames."""
        return "tool_calls" if reason == STOP and index in self._called else reason

    def logprobs(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """See Frames."""
        return chat_logprobs(entries, self.piece)


def chat_logprobs(entries: Sequence[TokenLogprob], piece: Piece) -> dict[str, Any]:
    """Returns the logprobs object of a chat."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        token, raw = piece(token_id)
        return {"token": token, "logprob": number(logprob), "bytes": raw}

    content = [
        one(e.token_id, e.logprob) | {"top_logprobs": [one(token, logprob) for token, logprob in e.top]}
        for e in entries
    ]
    return {"content": content, "refusal": None}


def _gained_call(call: CallDelta) -> dict[str, Any]:
    """A piece of a call, as chunks tell it: id, type and name stand in the first one."""
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
