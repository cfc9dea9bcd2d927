"""Items of the Responses API: read from bodies into the form in which they are stored and listed, and turned into the
messages of a chat.

Equal conversations must become equal prompts, whether they come as items, by previous_response_id or as the messages
of a chat: what one answer consists of (reasoning, text, calls) becomes one message of the assistant.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from kvmesh.services.gateway.generation import refused
from kvmesh.services.gateway.rest.chat import check_tool_name, read_arguments
from kvmesh.services.gateway.text.chat import TemplateMessage, ToolCall

Json = dict[str, Any]

ROLES_OF_ITEMS = ("user", "assistant", "system", "developer")
# The beginning of ids, by the type of an item.
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
ITEM_TYPES = (*PREFIXES, "item_reference")
# What answers and clients put into items and what says nothing to the model. Null is allowed for any field.
_IDLE = {"id", "type", "status", "phase", "created_by", "end_turn", "internal_chat_message_metadata_passthrough"}
_FIELDS: Mapping[str, set[str]] = {
    "message": {"role", "content"},
    "reasoning": {"summary", "content", "encrypted_content"},
    "function_call": {"call_id", "name", "arguments", "namespace"},
    "function_call_output": {"call_id", "output", "name", "namespace"},
    "custom_tool_call": {"call_id", "name", "input", "namespace"},
    "custom_tool_call_output": {"call_id", "output", "name", "namespace"},
    "item_reference": set(),
}
_PART_IDLE = {"annotations", "logprobs", "prompt_cache_breakpoint"}
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_OUTPUT_PARTS = {"input_text": "text", "output_text": "text", "text": "text"}
_SUMMARY_PARTS = {"summary_text": "text"}
_REASONING_PARTS = {"reasoning_text": "text", "text": "text"}
_SEALED = "kvmesh-reasoning-1."


def seal_reasoning(text: str) -> str:
    """Returns reasoning as `encrypted_content`, for clients that carry that from turn to turn and nothing else. It is
    encoded and no secret: the same text stands in the item's content."""
    return _SEALED + base64.urlsafe_b64encode(text.encode()).decode()


def _unsealed(sealed: str) -> str:
    """The reasoning in `encrypted_content`; "" for that of others."""
    try:
        return base64.urlsafe_b64decode(sealed.removeprefix(_SEALED)).decode() if sealed.startswith(_SEALED) else ""
    except (binascii.Error, ValueError):
        return ""


# ── from a body ───────────────────────────────────────────────────────────────────────────────────


def read_input(value: Any, most: int) -> list[Json]:
    """Returns the items of a body's `input`; text is a user's message. Raises InvalidRequest naming the first item that
    is wrong."""
    if isinstance(value, str):
        return [_message("user", [{"type": "input_text", "text": value}])]
    if not isinstance(value, list):
        raise refused("input", value, "must be a string or a list of items")
    if len(value) > most:
        raise refused("input", value, f"at most {most} items are allowed")
    return [_read_item(f"input.{index}", item) for index, item in enumerate(value)]


def _read_item(where: str, item: Any) -> Json:
    if not isinstance(item, dict):
        raise refused(where, item, "must be an object")
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    if kind not in ITEM_TYPES:
        raise refused(f"{where}.type", kind, f"not supported by kvmesh; {', '.join(ITEM_TYPES)} are")
    for name, value in item.items():
        if name not in _IDLE and name not in _FIELDS[kind] and value is not None:
            raise refused(f"{where}.{name}", value, "unknown field")
    found = _READERS[kind](where, item)
    if item.get("id") is not None:
        found["id"] = _text(f"{where}.id", item["id"])
    return found


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise refused(where, value, "must be a string")
    return value


def _parts(where: str, value: Any, kinds: Mapping[str, str]) -> list[tuple[str, str]]:
    """(type, text) of each of a list of parts."""
    if not isinstance(value, list):
        raise refused(where, value, "must be a list of text parts")
    found = []
    for index, part in enumerate(value):
        at = f"{where}.{index}"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str):
            raise refused(at, part, f"must be an object whose type is one of {', '.join(kinds)}")
        if kind not in kinds:
            raise refused(f"{at}.type", kind, f"not supported by kvmesh; {', '.join(kinds)} are")
        for name, told in part.items():
            if name not in ("type", kinds[kind]) and name not in _PART_IDLE and told is not None:
                raise refused(f"{at}.{name}", told, "unknown field")
        found.append((kind, _text(f"{at}.{kinds[kind]}", part.get(kinds[kind]))))
    return found


def _message(role: str, content: list[Json]) -> Json:
    return {"type": "message", "status": "completed", "role": role, "content": content}


def _read_message(where: str, item: Json) -> Json:
    role, content = item.get("role"), item.get("content")
    if role not in ROLES_OF_ITEMS:
        raise refused(f"{where}.role", role, f"must be one of {', '.join(ROLES_OF_ITEMS)}")
    given = [("text", content)] if isinstance(content, str) else _parts(f"{where}.content", content, _TEXT_PARTS)
    parts: list[Json] = []
    for kind, text in given:
        if kind == "refusal":
            parts.append({"type": "refusal", "refusal": text})
        elif role == "assistant":
            parts.append({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
        else:
            parts.append({"type": "input_text", "text": text})
    return _message(role, parts)


def _read_reasoning(where: str, item: Json) -> Json:
    summary = _parts(f"{where}.summary", item.get("summary") or [], _SUMMARY_PARTS)
    content = _parts(f"{where}.content", item.get("content") or [], _REASONING_PARTS)
    found: Json = {
        "type": "reasoning",
        "status": "completed",
        "summary": [{"type": "summary_text", "text": text} for _, text in summary],
        "content": [{"type": "reasoning_text", "text": text} for _, text in content],
    }
    if item.get("encrypted_content") is not None:
        found["encrypted_content"] = _text(f"{where}.encrypted_content", item["encrypted_content"])
    return found


def _named(where: str, item: Json, found: Json) -> Json:
    """`found` with the namespace of a call, where there is one."""
    if item.get("namespace") is not None:
        check_tool_name(f"{where}.namespace", item["namespace"])
        found["namespace"] = item["namespace"]
    return found


def _read_call(where: str, item: Json) -> Json:
    check_tool_name(f"{where}.name", item.get("name"))
    found = {
        "type": item["type"],
        "status": "completed",
        "call_id": _text(f"{where}.call_id", item.get("call_id")),
        "name": item["name"],
    }
    if item["type"] == "custom_tool_call":
        found["input"] = _text(f"{where}.input", item.get("input"))
    else:
        found["arguments"] = read_arguments(f"{where}.arguments", item.get("arguments"))
    return _named(where, item, found)


def _read_output(where: str, item: Json) -> Json:
    output = item.get("output")
    if not isinstance(output, str):
        parts = _parts(f"{where}.output", output, _OUTPUT_PARTS)
        output = [{"type": "input_text", "text": text} for _, text in parts]
    call_id = _text(f"{where}.call_id", item.get("call_id"))
    return {"type": item["type"], "status": "completed", "call_id": call_id, "output": output}


def _read_reference(where: str, item: Json) -> Json:
    return {"type": "item_reference", "id": _text(f"{where}.id", item.get("id"))}


_READERS: Mapping[str, Callable[[str, Json], Json]] = {
    "message": _read_message,
    "reasoning": _read_reasoning,
    "function_call": _read_call,
    "function_call_output": _read_output,
    "custom_tool_call": _read_call,
    "custom_tool_call_output": _read_output,
    "item_reference": _read_reference,
}


# ── ids ───────────────────────────────────────────────────────────────────────────────────────────


def item_id(kind: str, request_id: str, place: int | str) -> str:
    """Returns the id of an item of the response to `request_id`; `place` counts the items of its output."""
    return f"{PREFIXES[kind]}_{request_id}_{place}"


def with_ids(items: Sequence[Json], request_id: str) -> list[Json]:
    """Returns items of an input, of which those without an id have one."""
    found = []
    for index, item in enumerate(items):
        made = item.get("id") or item_id(item["type"], request_id, f"i{index}")
        found.append({"id": made, **item})
    return found


def response_of(item: str) -> str:
    """Returns the id of the response that an item's id names, or ""."""
    head, _, place = item.rpartition("_")
    prefix, _, request_id = head.partition("_")
    known = prefix in PREFIXES.values() and place.removeprefix("i").isdigit()
    return f"resp_{request_id}" if known and request_id else ""


def _answer_of(item: Json) -> str:
    """The response whose output an item is, as far as its id tells."""
    found = item.get("id") or ""
    return "" if found.rpartition("_")[2].startswith("i") else response_of(found)


# ── to messages ───────────────────────────────────────────────────────────────────────────────────

ToolNames = Callable[[str, str], str]
"""Namespace and name of a tool → its name in the prompt."""


@dataclass(slots=True)
class _AssistantTurn:
    """One answer, whose parts are items of their own; `answer` is the response that it came from, if that is known."""

    answer: str
    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    speaks: bool = False

    def message(self) -> TemplateMessage:
        return TemplateMessage(
            "assistant",
            "".join(self.texts),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(self.calls),
        )


def to_messages(instructions: str, items: Iterable[Json], names: ToolNames) -> tuple[TemplateMessage, ...]:
    """Returns a chat of items as `read_input` gives them. `instructions` come first, as the system's."""
    turns: list[TemplateMessage | _AssistantTurn] = [TemplateMessage("system", instructions)] if instructions else []
    last: _AssistantTurn | None = None  # the latest answer, whose calls may still come between their outputs
    for item in items:
        kind = item["type"]
        if kind in ("function_call_output", "custom_tool_call_output"):
            turns.append(TemplateMessage("tool", _joined(item["output"]), tool_call_id=item["call_id"]))
        elif kind == "message" and item["role"] != "assistant":
            turns.append(TemplateMessage(item["role"], _joined(item["content"])))
            last = None
        else:
            answer = _answer_of(item)
            if last is None or not _goes_on(last, turns[-1] is last, item, answer):
                last = _AssistantTurn(answer)
                turns.append(last)
            last.answer = last.answer or answer
            _add(last, item, names)
    return tuple(turn.message() if isinstance(turn, _AssistantTurn) else turn for turn in turns)


def _goes_on(turn: _AssistantTurn, newest: bool, item: Json, answer: str) -> bool:
    """Whether `item` is more of the answer `turn`. `newest`: nothing stands between."""
    same = bool(answer) and answer == turn.answer
    if not newest or (answer and turn.answer):
        return same
    return item["type"] != "message" or not turn.speaks


def _add(turn: _AssistantTurn, item: Json, names: ToolNames) -> None:
    kind = item["type"]
    if kind == "message":
        turn.speaks = True
        turn.texts.append(_joined(item["content"]))
    elif kind == "reasoning":
        turn.reasoning.append(_reasoning(item))
    else:
        arguments = item["arguments"] if kind == "function_call" else custom_arguments(item["input"])
        turn.calls.append(ToolCall(item["call_id"], names(item.get("namespace", ""), item["name"]), arguments))


def _joined(content: str | list[Json]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)


def _reasoning(item: Json) -> str:
    content = "".join(part["text"] for part in item["content"])
    sealed = item.get("encrypted_content") or ""
    return content or _unsealed(sealed) or "\n\n".join(part["text"] for part in item["summary"])


# Custom tools take a text. Models are trained to give JSON objects, so the text is a field of one.
CUSTOM_INPUT = "input"


def custom_arguments(text: str) -> str:
    """Returns the arguments of a call of a custom tool, as the model sees them."""
    return orjson.dumps({CUSTOM_INPUT: text}).decode()


def custom_input(arguments: str) -> str:
    """Returns the text that a custom tool was called with; arguments that are not of that form are that text."""
    try:
        found = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    told = found.get(CUSTOM_INPUT) if isinstance(found, dict) else None
    return told if isinstance(told, str) else arguments


# ── for the documentation ─────────────────────────────────────────────────────────────────────────

_STRING = {"type": "string"}
_TEXT_OR_NULL = {"anyOf": [_STRING, {"type": "null"}]}
_NAME = {"type": "string", "pattern": r"^[A-Za-z0-9_.:/-]{1,128}$"}


def _part(kinds: Iterable[str], name: str = "text") -> Json:
    properties = {"type": {"enum": [*kinds]}, name: _STRING}
    return {"type": "object", "properties": properties, "required": ["type", name], "additionalProperties": False}


def _schema(kind: str, properties: Json, *required: str, typed: bool = True) -> Json:
    """The schema of an item; `typed`: its type must be told."""
    told = {"type": {"const": kind}, "id": _TEXT_OR_NULL, "status": _TEXT_OR_NULL, **properties}
    must = [*(["type"] if typed else []), *required]
    return {"type": "object", "properties": told, "required": must, "additionalProperties": False}


def _or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


_CONTENT = {"anyOf": [_part(("input_text", "output_text", "text")), _part(("refusal",), "refusal")]}
_OUTPUT = {"anyOf": [_STRING, {"type": "array", "items": _part(_OUTPUT_PARTS)}]}
_OUTPUTS = {"call_id": _STRING, "output": _OUTPUT}
INPUT_SCHEMA: Json = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "items": {
                "anyOf": [
                    _schema(
                        "message",
                        {
                            "role": {"enum": [*ROLES_OF_ITEMS]},
                            "content": {"anyOf": [_STRING, {"type": "array", "items": _CONTENT}]},
                        },
                        "role",
                        "content",
                        typed=False,
                    ),
                    _schema(
                        "reasoning",
                        {
                            "summary": _or_null({"type": "array", "items": _part(_SUMMARY_PARTS)}),
                            "content": _or_null({"type": "array", "items": _part(_REASONING_PARTS)}),
                            "encrypted_content": _TEXT_OR_NULL,
                        },
                    ),
                    _schema(
                        "function_call",
                        {"call_id": _STRING, "name": _NAME, "arguments": _STRING},
                        "call_id",
                        "name",
                        "arguments",
                    ),
                    _schema("function_call_output", _OUTPUTS, "call_id", "output"),
                    _schema(
                        "custom_tool_call",
                        {"call_id": _STRING, "name": _NAME, "input": _STRING},
                        "call_id",
                        "name",
                        "input",
                    ),
                    _schema("custom_tool_call_output", _OUTPUTS, "call_id", "output"),
                    _schema("item_reference", {"id": _STRING}, "id"),
                ]
            },
        },
    ]
}
