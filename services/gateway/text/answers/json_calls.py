"""Families that write a call's arguments as JSON inside markup: Hermes and Qwen, Llama 3, Mistral, DeepSeek, Kimi.

Arguments are passed on as the model wrote them. Brackets and strings are followed to find their end, so markup inside a
string is part of it; whether the rest is valid JSON is not checked, as clients of this interface must anyway.
"""

from __future__ import annotations

import re
from typing import ClassVar

from kvmesh.services.gateway.text.answers.markup import MarkupParser
from kvmesh.services.gateway.text.answers.reader import NAME_LIMIT, Markers, Steps, any_of

_NO_MARKERS = any_of()
_BRACE = any_of("{")
_QUOTE_OR_END = any_of('"', "}")
_COLON = any_of(":")
_COMMA_OR_END = any_of(",", "}")
_ITEM_OR_END = any_of(",", "]")
_ARGUMENTS = ("arguments", "parameters")
_CALL_KEYS = frozenset(("name", "type", "id", *_ARGUMENTS))


class JsonCallParser(MarkupParser):
    """What these families share: the arguments, and calls written as an object of name and arguments."""

    def read_object(self, ends: Markers, *, opened: bool = False, only_call_keys: bool = False) -> Steps[bool]:
        """Reads `{"name": ..., "arguments": {...}}`, keys in any order, and tells the call. Returns whether a call was
        told. `opened`: the brace has been read; `only_call_keys`: an object with another key is no call; `ends`:
        markers that end arguments which were not closed."""
        reader = self.reader
        if not opened and not (yield from reader.match(_BRACE)):
            return False
        name = call_id = ""
        early: list[str] = []  # arguments that came before the name
        told = False
        while True:
            yield from reader.space()
            if (yield from reader.looks_at(_QUOTE_OR_END)) != '"':
                if not (yield from reader.match(_QUOTE_OR_END)):
                    return told
                break
            key = yield from reader.json_string(NAME_LIMIT)
            if key is None or (only_call_keys and key not in _CALL_KEYS):
                return told
            yield from reader.space()
            if not (yield from reader.match(_COLON)):
                return told
            yield from reader.space()
            if key in _ARGUMENTS and not told and not early:
                if name and (yield from reader.looks_at(_BRACE)):
                    self.begin_call(name, call_id)
                    told = True
                    closed = yield from reader.json_span(self.told.arguments, ends)
                else:
                    closed = yield from self._read_early(early, ends)
                    if closed and name:
                        self.begin_call(name, call_id)
                        told = True
                        self.told.arguments("".join(early))
                if not closed:
                    return told
            elif key in ("name", "id"):
                text = yield from reader.json_string(NAME_LIMIT)
                if text is None:
                    return told
                name, call_id = (text, call_id) if key == "name" else (name, text)
            elif not (yield from reader.json_other(ends)):
                return told
            yield from reader.space()
            found = yield from reader.match(_COMMA_OR_END)
            if not found:
                return told
            if found == "}":
                break
        if name and not told:
            self.begin_call(name, call_id)
            self.told.arguments("".join(early) or "{}")
            told = True
        return told

    def _read_early(self, early: list[str], ends: Markers) -> Steps[bool]:
        """Reads arguments that cannot be told yet: before the name, as a string that holds JSON, or null for none."""
        reader = self.reader
        char = yield from reader.peek()
        if char == "{":
            return (yield from reader.json_span(early.append, ends))
        if char == '"':
            text = yield from reader.json_string()
            if text is None or not text.strip().startswith("{"):
                return False
            early.append(text)
            return True
        if (yield from reader.match(any_of("null"))):
            early.append("{}")
            return True
        return False

    def read_arguments(self, name: str, call_id: str, ends: Markers) -> Steps[bool]:
        """Tells the call `name` if an object comes next: its arguments. Returns whether it did."""
        if not name or not (yield from self.reader.looks_at(_BRACE)):
            return False
        self.begin_call(name, call_id)
        yield from self.reader.json_span(self.told.arguments, ends)
        return True


class HermesParser(JsonCallParser):
    """Hermes 2 and 3, Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one or several."""

    markers = frozenset(("<tool_call>", "</tool_call>", "<think>", "</think>"))
    openers = ("<tool_call>",)
    _end: ClassVar[Markers] = any_of("</tool_call>")

    def read_call(self, opener: str) -> Steps[None]:
        yield from self.reader.space()
        if (yield from self.read_object(self._end)):
            yield from self.reader.space_or_brace()  # models write a brace too many
            yield from self.reader.match(self._end)


class LlamaParser(JsonCallParser):
    """Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}` where the answer begins or after `<|python_tag|>`, several
    separated by `;`. Calls of built-in tools in Python's notation are content."""

    markers = frozenset(("<|python_tag|>", "<think>", "</think>"))
    openers = ("<|python_tag|>",)

    def read_bare_opener(self) -> Steps[str]:
        reader = self.reader
        before = yield from reader.space(NAME_LIMIT)
        if self.told.calls:
            before += yield from reader.match(_SEMICOLON)
            before += yield from reader.space(NAME_LIMIT)
            if (yield from reader.looks_at(_TAG)):
                return ""  # what separated it from the call before is dropped
        if (yield from reader.match(_BRACE)):
            return before + "{"
        self.content.push(before)
        return ""

    def read_call(self, opener: str) -> Steps[None]:
        if opener.endswith("{"):
            yield from self.read_object(_NO_MARKERS, opened=True, only_call_keys=True)
        else:
            yield from self.reader.space()
            yield from self.read_object(_NO_MARKERS)


_SEMICOLON = any_of(";")
_TAG = any_of("<|python_tag|>")


class MistralParser(JsonCallParser):
    """Mistral: `[TOOL_CALLS]` before a list of objects (tokenizers up to v7) or before each `name[ARGS]{...}`, with
    `[CALL_ID]` between where the model gives one. Reasoning stands between `[THINK]` and `[/THINK]`."""

    markers = frozenset(("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"))
    think = ("[THINK]", "[/THINK]")
    openers = ("[TOOL_CALLS]",)
    calls_end_reasoning = True
    _name: ClassVar[re.Pattern[str]] = re.compile(r"[^\[\]{}\"\s]*")
    _after_name: ClassVar[Markers] = any_of("[ARGS]", "[CALL_ID]")

    def read_call(self, opener: str) -> Steps[None]:
        reader = self.reader
        yield from reader.space()
        if (yield from reader.match(any_of("["))):
            while True:
                yield from reader.space()
                if not (yield from self.read_object(_NO_MARKERS)):
                    return
                yield from reader.space()
                if (yield from reader.match(_ITEM_OR_END)) != ",":
                    return
                reader.record(",")
        if (yield from reader.looks_at(_BRACE)):
            yield from self.read_object(_NO_MARKERS)
            return
        name = yield from reader.word(self._name)
        call_id = ""
        yield from reader.space()
        found = yield from reader.match(self._after_name)
        if found == "[CALL_ID]":
            call_id = yield from reader.word(self._name)
            yield from reader.match(self._after_name)
        yield from reader.space()
        yield from self.read_arguments(name, call_id, _NO_MARKERS)


class DeepSeekParser(JsonCallParser):
    """DeepSeek V3 and R1 (`function<|sep|>name`, then the arguments in a fence of Markdown) and V3.1
    (`name<|sep|>{...}`), told apart by what the model wrote."""

    markers = frozenset(
        (
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            "<think>",
            "</think>",
        )
    )
    openers = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    calls_end_reasoning = True
    _begin: ClassVar[Markers] = any_of("<｜tool▁call▁begin｜>")
    _separator: ClassVar[Markers] = any_of("<｜tool▁sep｜>")
    _ends: ClassVar[Markers] = any_of("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    _next: ClassVar[Markers] = any_of("<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>")
    _head: ClassVar[re.Pattern[str]] = re.compile(r"[^<\n]*")
    _name: ClassVar[re.Pattern[str]] = re.compile(r"[^<\n{`]*")
    _fence: ClassVar[Markers] = any_of("```json")
    _fence_end: ClassVar[Markers] = any_of("```")
    _call_end: ClassVar[Markers] = any_of("<｜tool▁call▁end｜>")

    def read_call(self, opener: str) -> Steps[None]:
        reader = self.reader
        if opener == self.openers[0]:
            yield from reader.space()
            if not (yield from reader.match(self._begin)):
                return
        while True:
            name = yield from reader.word(self._head)
            if not (yield from reader.match(self._separator)):
                return
            yield from reader.space()
            if name.strip() == "function" and not (yield from reader.looks_at(_BRACE)):
                name = yield from reader.word(self._name)
                yield from reader.space()
            fenced = yield from reader.match(self._fence)
            yield from reader.space()
            if not (yield from self.read_arguments(name.strip(), "", self._ends)):
                return
            yield from reader.space()
            if fenced:
                yield from reader.match(self._fence_end)
                yield from reader.space()
            yield from reader.match(self._call_end)
            yield from reader.space()
            if (yield from reader.match(self._next)) != self.openers[1]:
                return
            reader.record(self.openers[1])


class KimiParser(JsonCallParser):
    """Kimi K2: `functions.name:0<|tool_call_argument_begin|>{...}` for each call of a section. The id is kept, since
    the template writes it back."""

    markers = frozenset(
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<think>",
            "</think>",
        )
    )
    openers = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    calls_end_reasoning = True
    _begin: ClassVar[Markers] = any_of("<|tool_call_begin|>")
    _arguments: ClassVar[Markers] = any_of("<|tool_call_argument_begin|>")
    _ends: ClassVar[Markers] = any_of("<|tool_call_end|>", "<|tool_calls_section_end|>")
    _call_end: ClassVar[Markers] = any_of("<|tool_call_end|>")
    _next: ClassVar[Markers] = any_of("<|tool_call_begin|>", "<|tool_calls_section_end|>")
    _word: ClassVar[re.Pattern[str]] = re.compile(r"[^<\s]*")
    _numbered: ClassVar[re.Pattern[str]] = re.compile(r"(?:functions\.)?(.+):[0-9]+")

    def read_call(self, opener: str) -> Steps[None]:
        reader = self.reader
        if opener == self.openers[0]:
            yield from reader.space()
            if not (yield from reader.match(self._begin)):
                return
        while True:
            yield from reader.space()
            given = yield from reader.word(self._word)
            yield from reader.space()
            if not (yield from reader.match(self._arguments)):
                return
            yield from reader.space()
            numbered = self._numbered.fullmatch(given)
            name = numbered[1] if numbered else given.removeprefix("functions.")
            if not (yield from self.read_arguments(name, given if numbered else "", self._ends)):
                return
            yield from reader.space()
            yield from reader.match(self._call_end)
            yield from reader.space()
            if (yield from reader.match(self._next)) != self.openers[1]:
                return
            reader.record(self.openers[1])
