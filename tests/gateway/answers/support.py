"""Feeds parsers and joins what they tell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvmesh.services.gateway.text.answers.families import FAMILIES
from kvmesh.services.gateway.text.answers.parsed import AnswerParser, Parsed
from kvmesh.services.gateway.text.answers.tools import ToolSpec

TOOLS = (
    ToolSpec(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "metric": {"type": "boolean"},
                "where": {"$ref": "#/$defs/point"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["city"],
            "$defs": {"point": {"type": "object", "properties": {"lat": {"type": "number"}}}},
        },
    ),
    ToolSpec(
        "write_file",
        {
            "type": "object",
            "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "lines": {"type": "array"}},
            "required": ["path", "text"],
        },
    ),
)


@dataclass
class Answer:
    """All that a parser told of one answer; calls are (id, name, arguments)."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)


def parser(family: str, *, tail: str = "", reasoning: bool = True, tools: Iterable[ToolSpec] = TOOLS) -> AnswerParser:
    return FAMILIES[family].parser(
        tools=tuple(tools), prompt_tail=tail, reasoning=reasoning, new_id=lambda index: f"call-{index}"
    )


def add(answer: Answer, parsed: Parsed) -> None:
    answer.content += parsed.content
    answer.reasoning += parsed.reasoning
    for delta in parsed.calls:
        if delta.index == len(answer.calls):
            assert delta.id
            assert delta.name
            answer.calls.append((delta.id, delta.name, delta.arguments))
        else:
            assert delta.index == len(answer.calls) - 1, "a piece of an earlier call"
            assert not delta.id
            assert not delta.name
            call_id, name, arguments = answer.calls[-1]
            answer.calls[-1] = (call_id, name, arguments + delta.arguments)


def parse(family: str, pieces: Iterable[str], **options: Any) -> Answer:
    answer = Answer()
    parsing = parser(family, **options)
    for piece in pieces:
        add(answer, parsing.feed(piece))
    add(answer, parsing.finish())
    assert parsing.finish() == Parsed()
    return answer
