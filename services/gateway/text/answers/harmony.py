"""gpt-oss answers in the harmony format: messages with a channel, some addressed to tools.

`<|channel|>analysis<|message|>...<|end|>` is reasoning, `<|channel|>final` and `<|channel|>commentary` without a
recipient are content, `<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>` is a call.
The markers are read here and not by the library openai-harmony, whose encoding is a file that it downloads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import ClassVar

from kvmesh.services.gateway.text.answers.reader import Steps, any_of
from kvmesh.services.gateway.text.answers.stepwise import StepwiseParser
from kvmesh.services.gateway.text.answers.tools import ToolSpec

_TAIL = re.compile(r"<\|start\|>assistant((?:[^<]|<\|channel\|>|<\|constrain\|>)*)(<\|message\|>)?\Z")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_HEADER_TEXT = re.compile(r"[^<]*")
_HEADER = any_of("<|message|>", "<|channel|>", "<|constrain|>")
_ENDS = any_of("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
_BEGINS = any_of("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
_START = any_of(" to=", "to=", "<|start|>", "<|channel|>")
_OPENS_HEADER = ("<|start|>", "<|channel|>", " to=", "to=")
_BRACE = any_of("{")
_BETWEEN = "\n\n"


class HarmonyParser(StepwiseParser):
    """Texts of several messages are joined by an empty line. Without tools a message to a tool is content as it was
    written; with `reasoning` False analysis is content without its markers."""

    markers: ClassVar[frozenset[str]] = frozenset(
        (
            "<|start|>",
            "<|end|>",
            "<|message|>",
            "<|channel|>",
            "<|constrain|>",
            "<|return|>",
            "<|call|>",
        )
    )

    def __init__(
        self, *, tools: Sequence[ToolSpec], prompt_tail: str, reasoning: bool, new_id: Callable[[int], str]
    ) -> None:
        super().__init__()
        self.reasoning = False
        self._shows_reasoning = reasoning
        self._tools = bool(tools)
        self._new_id = new_id
        opened = _TAIL.search(prompt_tail)
        self._header = opened[1] if opened else ""
        self._in_message = bool(opened and opened[2])
        self.reasoning = self._in_message and self._is_reasoning(self._header)
        self._steps = self._read()

    def _read(self) -> Steps[None]:
        reader = self.reader
        header = self._header
        if self._in_message:
            found = yield from self._read_body(header)
        elif header:
            reader.record()
            found = yield from self._read_message(header)
        else:
            found = yield from reader.match(_START)
        while True:
            if found in _OPENS_HEADER:
                reader.record(found)
                found = yield from self._read_message(found)
                continue
            if reader.ended:
                return
            # Text outside of messages, or the end of one: what comes next may be anything.
            found = yield from reader.until(_BEGINS, self.told.content)
            if found == "<|message|>":
                found = yield from self._read_body("")

    def _read_message(self, header: str) -> Steps[str]:
        """Reads the rest of a header that was recorded, and the message. Returns the marker after it, "" where the
        header was none and has become content."""
        reader = self.reader
        found = ""
        parts = [header]
        for _ in range(6):
            parts.append((yield from reader.word(_HEADER_TEXT)))
            found = yield from reader.match(_HEADER)
            parts.append(found)
            if found == "<|message|>":
                return (yield from self._read_body("".join(parts)))
            if not found:
                break
        self.told.content(reader.forget())
        return ""

    def _read_body(self, header: str) -> Steps[str]:
        """Reads a message up to the marker that ends it, and returns the marker."""
        reader = self.reader
        raw = reader.forget()
        recipient = _RECIPIENT.search(header)
        if self._is_reasoning(header):
            self.reasoning = True
            separator = _BETWEEN if self.told.said_reasoning else ""
            found = yield from reader.until(_ENDS, _after(separator, self.told.reasoning))
            self.reasoning = False
            return found
        if recipient is not None and self._tools:
            yield from reader.space()
            if (yield from reader.looks_at(_BRACE)):
                self._begin_call(recipient[1])
                yield from reader.json_span(self.told.arguments, _ENDS)
                yield from reader.space()
                return (yield from reader.match(_ENDS))
            if reader.ended or (yield from reader.looks_at(_ENDS)):
                self._begin_call(recipient[1])
                self.told.arguments("{}")
                return (yield from reader.match(_ENDS))
        separator = _BETWEEN if self.told.said_content else ""
        if recipient is not None:
            separator += raw
        found = yield from reader.until(_ENDS, _after(separator, self.told.content))
        if recipient is not None and found in ("<|call|>", "<|end|>", "<|return|>"):
            self.told.content(found)
        return found

    def _begin_call(self, name: str) -> None:
        self.told.call(self._new_id(self.told.calls), name)

    def _is_reasoning(self, header: str) -> bool:
        channel = _CHANNEL.search(header)
        return self._shows_reasoning and channel is not None and channel[1] == "analysis" and "to=" not in header


def _after(separator: str, tell: Callable[[str], None]) -> Callable[[str], None]:
    """Returns a function that tells `separator` before the first text."""
    waiting = [separator]

    def told(text: str) -> None:
        tell((waiting.pop() if waiting else "") + text)

    return told
