"""What a parser makes of an answer's text: content, reasoning, and pieces of tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a tool call. `index` counts the calls of an answer; `id` and `name` are set in a call's first piece;
    `arguments` is more of its arguments' JSON text."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Parsed:
    """What a piece of text added to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class AnswerParser(Protocol):
    """Reads one answer. `markers` are the texts of special tokens that it must see, `reasoning` tells whether the next
    text would be reasoning."""

    markers: ClassVar[frozenset[str]]
    reasoning: bool

    def feed(self, text: str) -> Parsed:
        """Takes more of the answer."""
        ...

    def finish(self) -> Parsed:
        """The answer has ended: returns what was held back."""
        ...
