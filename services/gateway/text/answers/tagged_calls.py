"""Families that write a call's arguments as tags with values in plain text: Qwen3-Coder, MiniMax M2, GLM 4.5 and later.

Values carry no types: the tool's schema tells how each is written as JSON. A string is told as it arrives; any other
value when its tag is closed. A closing tag counts only where the next tag of the call follows it, so a value may hold
the text of one.
"""

from __future__ import annotations

import json
import re
from typing import ClassVar

from kvmesh.services.gateway.text.answers.markup import MarkupParser
from kvmesh.services.gateway.text.answers.reader import SPACE_LIMIT, Markers, Steps, Tell, any_of
from kvmesh.services.gateway.text.answers.tools import ToolSpec, property_schema, value_json, value_types

_STRING = frozenset(("string",))


class ValueText:
    """Passes a value's text on, without one newline at each end where the family's template adds these."""

    __slots__ = ("_begun", "_held", "_tell", "_trims")

    def __init__(self, tell: Tell, *, trims: bool) -> None:
        self._tell = tell
        self._trims = trims
        self._begun = False
        self._held = ""

    def push(self, text: str) -> None:
        if not self._trims:
            self._tell(text)
            return
        if not self._begun and text:
            self._begun = True
            text = text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._tell(text.removesuffix("\n"))

    def cut(self) -> None:
        """The answer ended inside the value: a newline held back is part of it."""
        self._tell(self._held)


class TaggedCallParser(MarkupParser):
    """What these families share: the arguments' object, made of keys and values."""

    trims_values: ClassVar[bool] = False

    def begin_tagged(self, name: str) -> ToolSpec | None:
        """Tells that the call `name` begins; returns its tool if the request has it."""
        self.begin_call(name)
        self.told.arguments("{")
        self._arguments = 0
        return self.tools.get(name)

    _arguments = 0  # of the call that is read

    def end_tagged(self) -> None:
        self.told.arguments("}")

    def read_value(self, tool: ToolSpec | None, key: str, close: Markers, follow: Markers) -> Steps[bool]:
        """Reads a value up to `close`, where one of `follow` or the end of the answer comes after it, and tells key and
        value. Returns False when the answer ended inside the value."""
        reader = self.reader
        types = value_types(property_schema(tool, key), tool.parameters if tool is not None else {})
        self.told.arguments(", " if self._arguments else "")
        self.told.arguments(json.dumps(key, ensure_ascii=False) + ": ")
        self._arguments += 1
        is_string = types == _STRING
        parts: list[str] = []
        text = ValueText(self._tell_string if is_string else parts.append, trims=self.trims_values)
        if is_string:
            self.told.arguments('"')
        while True:
            found = yield from reader.until(close, text.push)
            if not found:
                text.cut()
                self.told.arguments("".join(parts).strip())
                return False
            space = yield from reader.space(SPACE_LIMIT)
            if (yield from reader.looks_at(follow)) or reader.ended:
                break
            text.push(found + space)
        self.told.arguments('"' if is_string else value_json("".join(parts), types))
        return True

    def _tell_string(self, text: str) -> None:
        self.told.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


class XmlParser(TaggedCallParser):
    """Sections of calls, each with named parameters; a subclass names the tags."""

    section: ClassVar[tuple[str, str]]
    call: ClassVar[tuple[str, str, str]]
    """What begins a call's name, what ends the name, what ends the call."""
    parameter: ClassVar[tuple[str, str, str]]
    _name: ClassVar[re.Pattern[str]] = re.compile(r"[^\"<>\n{}]*")

    def read_call(self, opener: str) -> Steps[None]:
        reader = self.reader
        begin, named, end = self.call
        begins = any_of(begin)
        if opener == self.section[0]:
            yield from reader.space()
            if not (yield from reader.match(begins)):
                return
        while True:
            name = yield from reader.word(self._name)
            if not name.strip() or not (yield from reader.match(any_of(named))):
                return
            tool = self.begin_tagged(name.strip())
            whole = yield from self._read_parameters(tool)
            if not whole:
                return
            self.end_tagged()
            yield from reader.match(any_of(end))
            yield from reader.space()
            if (yield from reader.match(any_of(begin, self.section[1]))) != begin:
                return
            reader.record(begin)

    def _read_parameters(self, tool: ToolSpec | None) -> Steps[bool]:
        """Reads parameters up to anything that is none. Returns False when the answer ended inside one."""
        reader = self.reader
        begin, named, close = self.parameter
        begins, names, closes = any_of(begin), any_of(named), any_of(close)
        follow = any_of(begin, self.call[2])
        while True:
            yield from reader.space()
            if not (yield from reader.match(begins)):
                return True
            key = yield from reader.word(self._name)
            if not (yield from reader.match(names)):
                return True
            if not (yield from self.read_value(tool, key.strip(), closes, follow)):
                return False


class Qwen3CoderParser(XmlParser):
    """Qwen3-Coder and Qwen3.5: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.
    Models leave the outer tag out at times, so `<function=` begins a call, too."""

    markers = frozenset(("<tool_call>", "</tool_call>", "<think>", "</think>"))
    openers = ("<tool_call>", "<function=")
    section = ("<tool_call>", "</tool_call>")
    call = ("<function=", ">", "</function>")
    parameter = ("<parameter=", ">", "</parameter>")
    trims_values = True


class MiniMaxParser(XmlParser):
    """MiniMax M2: `<invoke name="...">` with `<parameter name="...">`, several in one `<minimax:tool_call>`."""

    markers = frozenset(("<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"))
    openers = ("<minimax:tool_call>",)
    section = ("<minimax:tool_call>", "</minimax:tool_call>")
    call = ('<invoke name="', '">', "</invoke>")
    parameter = ('<parameter name="', '">', "</parameter>")


class GlmParser(TaggedCallParser):
    """GLM 4.5 to 4.7: the tool's name, then pairs of `<arg_key>` and `<arg_value>`, in one `<tool_call>` a call."""

    markers = frozenset(
        (
            "<tool_call>",
            "</tool_call>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "<think>",
            "</think>",
        )
    )
    openers = ("<tool_call>",)
    _name: ClassVar[re.Pattern[str]] = re.compile(r"[^<>\n{}\"]*")
    _key: ClassVar[re.Pattern[str]] = re.compile(r"[^<>\n]*")
    _key_end: ClassVar[Markers] = any_of("</arg_key>")
    _value: ClassVar[Markers] = any_of("<arg_value>")
    _value_end: ClassVar[Markers] = any_of("</arg_value>")
    _next: ClassVar[Markers] = any_of("<arg_key>", "</tool_call>")

    def read_call(self, opener: str) -> Steps[None]:
        reader = self.reader
        yield from reader.space()
        name = (yield from reader.word(self._name)).strip()
        yield from reader.space()
        if not name or not (yield from reader.looks_at(self._next)):
            return
        tool = self.begin_tagged(name)
        while (yield from reader.match(self._next)) == "<arg_key>":
            key = yield from reader.word(self._key)
            if not (yield from reader.match(self._key_end)):
                break
            yield from reader.space()
            if not (yield from reader.match(self._value)):
                break
            if not (yield from self.read_value(tool, key.strip(), self._value_end, self._next)):
                return
            yield from reader.space()
        self.end_tagged()
