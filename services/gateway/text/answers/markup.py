"""The part of an answer's parser that all families with marked-up text share: reasoning first, then content with calls
in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from kvmesh.services.gateway.text.answers.parsed import Parsed
from kvmesh.services.gateway.text.answers.reader import SPACE_LIMIT, SPACES, Steps, Tell, any_of
from kvmesh.services.gateway.text.answers.stepwise import StepwiseParser
from kvmesh.services.gateway.text.answers.tools import ToolSpec


class EdgeTrim:
    """Passes text on without the whitespace beside markup.

    Whitespace is held back until it is known what follows. Before the first text and after the last one it is dropped
    where markup stands beside it; between two texts that markup separates it stays, so that words do not run together.
    A text without markup is told as it is. A run of more than `SPACE_LIMIT` characters of whitespace is told in parts
    of that size.
    """

    __slots__ = ("_holds", "_marked", "_pending", "_said", "_tell")

    def __init__(self, tell: Tell, *, marked: bool, holds: bool) -> None:
        """`marked`: markup stands before the text; `holds`: markup may still follow."""
        self._tell = tell
        self._marked = marked
        self._holds = holds
        self._said = False
        self._pending = ""

    def push(self, text: str) -> None:
        if self._marked and not self._said:
            text = text.lstrip(SPACES)
            if not text:
                return
        body = len(text.rstrip(SPACES)) if self._holds else len(text)
        if body:
            self._tell(self._pending + text[:body])
            self._said, self._marked = True, False
            self._pending = text[body:]
        else:
            self._pending += text
        if len(self._pending) > SPACE_LIMIT:
            ready = (len(self._pending) - 1) // SPACE_LIMIT * SPACE_LIMIT
            self._tell(self._pending[:ready])
            self._said, self._marked = True, False
            self._pending = self._pending[ready:]

    def mark(self) -> None:
        """Markup stands here."""
        self._marked = True
        if not self._said:
            self._pending = ""

    def finish(self) -> None:
        """The answer has ended: whitespace that no markup touches is text."""
        if not self._marked:
            self._tell(self._pending)
        self._pending = ""


class MarkupParser(StepwiseParser):
    """Parses reasoning between two marks at the beginning of an answer, then content in which `openers` begin calls.

    Whitespace around reasoning and around calls is dropped (`EdgeTrim`). Reasoning opens only at the beginning, or in
    the prompt's end; a mark elsewhere is content. A subclass reads one opened call or section of calls in
    `read_call`; what it has recorded when it returns was no call and becomes content.
    """

    markers: ClassVar[frozenset[str]] = frozenset()
    think: ClassVar[tuple[str, str]] = ("<think>", "</think>")
    openers: ClassVar[tuple[str, ...]] = ()
    calls_end_reasoning: ClassVar[bool] = False
    """Whether the opener of a call ends reasoning that was not closed: where openers are tokens that no text holds."""

    def __init__(
        self,
        *,
        tools: Sequence[ToolSpec],
        prompt_tail: str,
        reasoning: bool,
        new_id: Callable[[int], str],
        opens_reasoning: bool = False,
    ) -> None:
        """`opens_reasoning`: answers begin inside reasoning even if the prompt does not open it."""
        super().__init__()
        self.tools = {tool.name: tool for tool in tools}
        self._new_id = new_id
        tail = prompt_tail.rstrip()
        closed = tail.endswith(self.think[1])
        self.reasoning = reasoning and not closed and (opens_reasoning or tail.endswith(self.think[0]))
        self._may_reason = reasoning and not closed
        self._openers = any_of(*(self.openers if tools else ()))
        # Whether whitespace must wait for what follows it: a call may, or a mark after the answer's first spaces.
        self.content = EdgeTrim(self.told.content, marked=False, holds=bool(tools))
        self._steps = self._read()

    def read_call(self, opener: str) -> Steps[None]:
        """Reads what `opener` opened."""
        raise NotImplementedError

    def read_bare_opener(self) -> Steps[str]:
        """Reads and returns an opener that counts only where a call may begin without a mark: at the beginning of the
        content and after a call. "" when there is none."""
        yield from ()
        return ""

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Tells that a call begins; what was recorded was its markup."""
        self.content.mark()
        self.reader.forget()
        self.told.call(call_id or self._new_id(self.told.calls), name)

    def _read(self) -> Steps[None]:
        opener = ""
        if self._may_reason:
            opener = yield from self._read_reasoning()
        while True:
            opener = opener or (yield from self.read_bare_opener()) if self.tools else ""
            opener = opener or (yield from self.reader.until(self._openers, self.content.push))
            if not opener:
                break
            self.reader.record(opener)
            yield from self.read_call(opener)
            if self.reader.recording:
                self.content.push(self.reader.forget())
            opener = ""
        self.content.finish()

    def _read_reasoning(self) -> Steps[str]:
        """Returns the opener of a call that ended reasoning, if one did."""
        begin, end = self.think
        reader = self.reader
        space = yield from reader.space(SPACE_LIMIT)
        opened = yield from reader.match(any_of(begin))
        if not opened and not self.reasoning:
            self.content.push(space)
            return ""
        self.reasoning = True
        text = EdgeTrim(self.told.reasoning, marked=True, holds=True)
        ends = (end, *self.openers) if self.calls_end_reasoning and self.tools else (end,)
        found = yield from reader.until(any_of(*ends), text.push)
        if not found:
            text.finish()
        self.reasoning = False
        self.content.mark()
        return found if found != end else ""


class PlainParser:
    """Tells all text as content."""

    markers: ClassVar[frozenset[str]] = frozenset()

    def __init__(self) -> None:
        self.reasoning = False

    def feed(self, text: str) -> Parsed:
        return Parsed(text)

    def finish(self) -> Parsed:
        return Parsed()
