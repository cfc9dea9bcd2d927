"""What a parser of answers tells: pieces of content, of reasoning and of tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a tool call. `index` counts the calls of the answer; `id` and `name` are set in a call's first piece;
    `arguments` is more of the JSON text of its arguments."""

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
    """Splits the text of one answer as it grows. What it tells in total does not depend on how the text was cut."""

    markers: ClassVar[frozenset[str]]
    """Texts of special tokens that the parser must see: the detokenizer shows these as text and hides the others."""
    reasoning: bool
    """Whether the next text would be reasoning."""

    def feed(self, text: str) -> Parsed:
        """Takes more of the answer's text and returns what is certain now."""
        ...

    def finish(self) -> Parsed:
        """The answer has ended: returns what was held back, as what it is. A call of which neither name nor arguments
        are known is content; one whose arguments have begun stays a call, with its arguments as far as they came."""
        ...


class ParsedBuilder:
    """Collects what one piece of text adds; each text is joined once, so that a piece costs its length."""

    __slots__ = ("_arguments", "_calls", "_content", "_first", "_index", "_reasoning", "said_content", "said_reasoning")

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[CallDelta] = []
        self._arguments: list[str] = []
        self._first: tuple[str, str] | None = None  # id and name of a call that has not been told yet
        self._index = -1
        self.said_content = False
        self.said_reasoning = False

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        return self._index + 1

    def content(self, text: str) -> None:
        if text:
            self.said_content = True
            self._content.append(text)

    def reasoning(self, text: str) -> None:
        if text:
            self.said_reasoning = True
            self._reasoning.append(text)

    def call(self, call_id: str, name: str) -> None:
        """Begins the next call."""
        self._end_piece()
        self._index += 1
        self._first = (call_id, name)

    def arguments(self, text: str) -> None:
        """Adds to the arguments of the call that began last."""
        if text:
            self._arguments.append(text)

    def take(self) -> Parsed:
        """Returns what has been added since `take` was called before."""
        self._end_piece()
        parsed = Parsed("".join(self._content), "".join(self._reasoning), self._calls)
        self._content, self._reasoning, self._calls = [], [], []
        return parsed

    def _end_piece(self) -> None:
        if self._first is None and not self._arguments:
            return
        call_id, name = self._first or ("", "")
        self._calls.append(CallDelta(self._index, call_id, name, "".join(self._arguments)))
        self._first, self._arguments = None, []
