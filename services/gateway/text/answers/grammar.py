"""Grammars that force a family's own markup of tool calls, with arguments that satisfy the tools' schemas, as text in
llguidance's variant of Lark.

A grammar is made of rules; `answer` is what must come, `start` is that with reasoning before it where the family may
reason. Markers that are special tokens of the tokenizer are written by id, others as text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from kvmesh.errors import InvalidRequest
from kvmesh.services.gateway.text.answers.tools import ToolSpec, value_types
from kvmesh.services.gateway.text.grammars.build import JSON_OPTIONS

_TEXT = "/(?s:.*)/"
_NOTES = frozenset(
    ("type", "title", "description", "default", "examples", "deprecated")
)  # of a schema: restrict nothing
_OBJECT_KEYS = _NOTES | {
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
    "$schema",
    "$id",
    "strict",
}
_STRING = frozenset(("string",))
_SCALARS = frozenset(("string", "null", "number", "integer", "boolean"))
_REQUEST_FIELD = "tool_choice"


class GrammarBuilder:
    """Writes the rules of one grammar. `markers` are those of the family, `special` maps the texts of the tokenizer's
    special tokens to their ids."""

    def __init__(self, markers: Collection[str], special: Mapping[str, int]) -> None:
        self._ids = {text: special[text] for text in markers if text in special}
        self._rules: list[str] = []

    def mark(self, text: str) -> str:
        """Returns what matches a marker: its special token, or its text where the tokenizer has none."""
        return f"<[{self._ids[text]}]>" if text in self._ids else self.text(text)

    def text(self, text: str) -> str:
        """Returns what matches exactly `text`."""
        return json.dumps(text, ensure_ascii=False)

    def json(self, schema: Mapping[str, Any]) -> str:
        return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS}, ensure_ascii=False)}"

    def rule(self, name: str, body: str, *, options: str = "") -> str:
        """Adds a rule and returns its name."""
        self._rules.append(f"{name}{f'[{options}]' if options else ''}: {body}")
        return name

    def until(self, name: str, marker: str, text: str = _TEXT) -> str:
        """Adds a rule that matches any text that the expression `text` does up to and with the first `marker`."""
        if marker in self._ids:
            return self.rule(name, f"{text} {self.mark(marker)}")
        return self.rule(name, text, options=f"suffix={self.text(marker)}")

    def finish(self) -> str:
        return "\n".join(self._rules) + "\n"


CallWriter = Callable[[GrammarBuilder, ToolSpec, int], str]
"""Adds what a call of one tool needs and returns what matches the call; the number tells rules of tools apart."""


class CallLayout:
    """How calls stand in an answer: `begin`, then calls with `between` between them, then `end`; each part is a
    sequence of markers and texts. `each` is how one call is written."""

    def __init__(
        self,
        each: CallWriter,
        *,
        begin: Sequence[str] = (),
        between: Sequence[str] = (),
        end: Sequence[str] = (),
        text: Sequence[str] = (),
        several: bool = True,
    ) -> None:
        """`text`: what comes before an answer's free text where that is marked, too; `several`: whether one answer can
        hold several calls."""
        self.each = each
        self.begin = tuple(begin)
        self.between = tuple(between)
        self.end = tuple(end)
        self.text = tuple(text)
        self.several = several


def add_calls(
    builder: GrammarBuilder,
    layout: CallLayout,
    tools: Sequence[ToolSpec],
    *,
    named: str | None,
    parallel: bool,
    required: bool,
) -> None:
    """Adds the rule `answer`: calls of `tools`, of `named` only if it is given; one if not `parallel`; with free text
    before and between if not `required`.

    Raises InvalidRequest when there is no tool, none of that name, or one whose schema the family's format cannot hold.
    """
    chosen = [tool for tool in tools if named is None or tool.name == named]
    if not chosen:
        raise InvalidRequest.of(_REQUEST_FIELD, named or "required", "names no tool of the request")
    head, rest = layout.begin[:1], layout.begin[1:]
    calls = [builder.rule(f"call_{number}", layout.each(builder, tool, number)) for number, tool in enumerate(chosen)]
    call = builder.rule("call", " | ".join(calls))
    many = f"({_sequence(builder, layout.between)} {call})*" if parallel and layout.several else ""
    body = builder.rule("calls", f"{_sequence(builder, rest)} {call} {many} {_sequence(builder, layout.end)}")
    if required:
        builder.rule("answer", f"{_sequence(builder, head)} {body}")
    elif layout.text:
        builder.rule("answer", f"{_sequence(builder, head)} {body} | {_sequence(builder, layout.text)} {_TEXT}")
    elif head:
        before = builder.until("text_before", head[0])
        builder.rule("answer", f"({before} {body})? {_TEXT}")
    else:
        # Without a mark only the first character tells a call from text.
        builder.rule("answer", f"{body} | TEXT_NO_CALL")
        builder.rule("TEXT_NO_CALL", r"/[ \t\r\n]*([^{ \t\r\n](?s:.*))?/")


def add_start(
    builder: GrammarBuilder,
    think: tuple[Sequence[str], str, Sequence[str]] | None,
    *,
    opened: bool,
    may_open: bool,
) -> None:
    """Adds the rule `start`: `answer`, after reasoning where the prompt has opened it or the model may open it.
    `think`: what opens reasoning, the marker that ends it, and what comes after that."""
    if think is None or not (opened or may_open):
        builder.rule("start", "answer")
        return
    inside = f"{builder.until('reasoning', think[1])} {_sequence(builder, think[2])} AFTER_REASONING"
    builder.rule("AFTER_REASONING", r"/[ \t\r\n]{0,4}/")
    if opened:
        builder.rule("start", f"{inside} answer")
    else:
        builder.rule("start", f"({_sequence(builder, think[0])} {inside})? answer")


def _sequence(builder: GrammarBuilder, parts: Sequence[str]) -> str:
    return " ".join(builder.mark(part) for part in parts)


def arguments_schema(tool: ToolSpec) -> dict[str, Any]:
    """Returns the schema of a tool's arguments, which are an object whatever it says."""
    schema = {key: value for key, value in tool.parameters.items() if key != "x-guidance"}
    if schema.setdefault("type", "object") != "object":
        raise InvalidRequest.of("tools", tool.name, 'its parameters are not of type "object"')
    return schema


def json_call(before: str, after: str) -> CallWriter:
    """A call as JSON text: `before` with the tool's name as JSON for `NAME`, the arguments, `after`."""

    def write(builder: GrammarBuilder, tool: ToolSpec, _number: int) -> str:
        opened = before.replace("NAME", json.dumps(tool.name, ensure_ascii=False))
        arguments = builder.json(arguments_schema(tool))
        return f"{builder.text(opened)} {arguments} {builder.text(after)}"

    return write


def marked_call(before: Sequence[str], after: Sequence[str]) -> CallWriter:
    """A call as parts: `NAME` stands for the tool's name as it is, `INDEX` for a number."""

    def write(builder: GrammarBuilder, tool: ToolSpec, _number: int) -> str:
        parts = ["/[0-9]+/" if part == "INDEX" else builder.mark(part.replace("NAME", tool.name)) for part in before]
        return " ".join((*parts, builder.json(arguments_schema(tool)), _sequence(builder, after)))

    return write


def tagged_call(
    before: Sequence[str], key: Sequence[str], close: str, between: Sequence[str], after: Sequence[str]
) -> CallWriter:
    """A call as tags: `before` with `NAME`, for each argument `key` with `KEY`, its value, `close` and `between`, then
    `after`. Arguments come in the order of the schema."""

    def write(builder: GrammarBuilder, tool: ToolSpec, number: int) -> str:
        schema = arguments_schema(tool)
        for name in sorted(schema.keys() - _OBJECT_KEYS):
            raise _unsupported(tool, f"`{name}` of its parameters")
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        missing = sorted(set(required) - set(properties))
        if missing:
            raise _unsupported(tool, f"a required argument without a schema ({missing[0]!r})")
        parts = [builder.mark(part.replace("NAME", tool.name)) for part in before]
        for index, (name, value) in enumerate(properties.items()):
            if not name or set(name) & set('"<>{}\n'):
                raise _unsupported(tool, f"an argument of the name {name!r}")
            opened = " ".join(builder.mark(part.replace("KEY", name)) for part in key)
            rule = f"value_{number}_{index}"
            held = _value(builder, tool, name, value, schema, rule, close)
            given = builder.rule(f"argument_{number}_{index}", f"{opened} {held} {_sequence(builder, between)}")
            parts.append(given if name in required else f"{given}?")
        return " ".join((*parts, _sequence(builder, after)))

    return write


def _value(
    builder: GrammarBuilder, tool: ToolSpec, name: str, schema: Any, root: Mapping[str, Any], rule: str, end: str
) -> str:
    """Returns what matches a value and `end` after it."""
    types = value_types(schema, root)
    if "string" not in types:
        defs = {key: root[key] for key in ("$defs", "definitions") if key in root}
        own = schema if isinstance(schema, Mapping) else {}
        return f"{builder.json({**defs, **own})} {builder.mark(end)}"
    if types == _STRING and isinstance(schema, Mapping) and ("enum" in schema or "const" in schema):
        values = schema.get("enum", [schema.get("const")])
        wanted = " | ".join(builder.text(value) for value in values if isinstance(value, str))
        return f"{builder.rule(rule, wanted)} {builder.mark(end)}"
    size = _TEXT
    if types == _STRING and isinstance(schema, Mapping):
        for key in sorted(schema.keys() - _NOTES - {"minLength", "maxLength"}):
            raise _unsupported(tool, f"`{key}` of the string {name!r}")
        if "minLength" in schema or "maxLength" in schema:
            size = f"/(?s:.){{{int(schema.get('minLength', 0))},{schema.get('maxLength', '')}}}/"
    elif not _is_open(schema) or not types <= _SCALARS:
        raise _unsupported(tool, f"a string or something else for {name!r}")
    return builder.until(rule, end, size)


def _is_open(schema: Any) -> bool:
    """Whether a schema restricts types and nothing else."""
    if not isinstance(schema, Mapping):
        return True
    options = [option for key in ("anyOf", "oneOf") for option in schema.get(key, ())]
    return not schema.keys() - _NOTES - {"anyOf", "oneOf"} and all(map(_is_open, options))


def _unsupported(tool: ToolSpec, what: str) -> InvalidRequest:
    return InvalidRequest.of(
        "tools", tool.name, f"this model's format of calls cannot be forced to hold {what}; use tool_choice auto"
    )
