"""Reads a text that arrives in pieces. Its methods are generators: each yields while it needs more text, and returns
what it found; what they find does not depend on the pieces.

Every character is read once. Between two pieces the reader keeps no more than the beginning of a marker, and, while it
records, what it has read since `record`: the text of markup that may still turn out to be none.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a parser: yields when it needs more text, returns a T."""

Tell = Callable[[str], None]

SPACES = " \t\r\n"
NAME_LIMIT = 256
"""Characters of the longest name of a tool or parameter, and of a call's id."""
SPACE_LIMIT = 1024
"""Characters of whitespace that are held back until it is known what follows them."""

_SPACE = re.compile(r"[ \t\r\n]*")
_SPACE_OR_BRACE = re.compile(r"[ \t\r\n}]*")
_IN_STRING = re.compile(r'[^"\\]*')
_OUTSIDE = re.compile(r'[^"{}\[\]<]*')
_SCALAR = re.compile(r"[^,{}\[\]\s\"]*")


class Markers:
    """Texts that are looked for at once; none is the beginning of another."""

    __slots__ = ("_partial", "longest", "pattern", "prefixes")

    def __init__(self, texts: Sequence[str]) -> None:
        ordered = sorted(texts, key=len, reverse=True)
        self.longest = len(ordered[0]) if ordered else 0
        self.pattern = re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")
        self.prefixes = frozenset(text[:size] for text in ordered for size in range(1, len(text)))
        longest_first = sorted(self.prefixes, key=len, reverse=True)
        self._partial = re.compile(
            "(?:" + "|".join(map(re.escape, longest_first)) + r")\Z" if longest_first else r"(?!)"
        )

    def held(self, text: str, at: int) -> int:
        """Returns how many characters at the end of `text` (from `at` on) may be the beginning of a marker."""
        found = self._partial.search(text, max(at, len(text) - self.longest + 1))
        return len(text) - found.start() if found else 0


@functools.cache
def any_of(*texts: str) -> Markers:
    """Returns the `Markers` of constant texts: compiled once and kept."""
    return Markers(texts)


class TextReader:
    """A position in a text of which more may come."""

    __slots__ = ("_at", "_ended", "_record", "_recorded", "_text", "scanned")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._record: list[str] | None = None
        self._recorded = 0  # characters of it
        self.scanned = 0
        """Characters that were looked at; tests count the cost by it."""

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0
        self.scanned += len(self._text)

    def end(self) -> None:
        """No more text will come."""
        self._ended = True

    @property
    def ended(self) -> bool:
        """Whether everything was read and no more will come."""
        return self._ended and self._at == len(self._text)

    @property
    def held(self) -> int:
        """Characters kept in memory."""
        return len(self._text) - self._at + self._recorded

    def record(self, first: str = "") -> None:
        """Keeps what is read from now on, after `first`, until `forget`."""
        self._record, self._recorded = [first], len(first)

    def forget(self) -> str:
        """Ends `record`; returns what was read since."""
        found = "".join(self._record or ())
        self._record, self._recorded = None, 0
        return found

    @property
    def recording(self) -> bool:
        return self._record is not None

    def until(self, markers: Markers, tell: Tell) -> Steps[str]:
        """Tells the text before the first of `markers` as soon as it is certain. Reads and returns the marker; "" when
        the text ended without one."""
        while True:
            text = self._text
            found = markers.pattern.search(text, self._at)
            if found is not None:
                self._pass(found.start(), tell)
                self._skip(found.end())
                return found[0]
            if self._ended:
                self._pass(len(text), tell)
                return ""
            self._pass(len(text) - markers.held(text, self._at), tell)
            yield

    def looks_at(self, markers: Markers) -> Steps[str]:
        """Returns the one of `markers` that comes next, without reading it; "" when none does."""
        while True:
            found = markers.pattern.match(self._text, self._at)
            if found is not None:
                return found[0]
            rest = self._text[self._at : self._at + markers.longest]
            if self._ended or (rest and rest not in markers.prefixes):
                return ""
            yield

    def match(self, markers: Markers) -> Steps[str]:
        """Reads and returns the one of `markers` that comes next; "" when none does, and then nothing was read."""
        found = yield from self.looks_at(markers)
        self._skip(self._at + len(found))
        return found

    def peek(self) -> Steps[str]:
        """Returns the next character, "" at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def space(self, limit: int | None = None) -> Steps[str]:
        """Reads and returns whitespace, at most `limit` characters."""
        return (yield from self._run(_SPACE, limit))

    def space_or_brace(self) -> Steps[str]:
        """Reads and returns whitespace and closing braces."""
        return (yield from self._run(_SPACE_OR_BRACE, None))

    def word(self, pattern: re.Pattern[str], limit: int = NAME_LIMIT) -> Steps[str]:
        """Reads and returns the characters that `pattern`, a repeated class of characters, matches; at most `limit`."""
        return (yield from self._run(pattern, limit))

    def json_string(self, limit: int | None = None) -> Steps[str | None]:
        """Reads a JSON string and returns its value. None: no string comes next, it is not valid, or it is longer than
        `limit` characters."""
        if (yield from self.peek()) != '"':
            return None
        self._skip(self._at + 1)
        parts = ['"']
        size = 0
        while True:
            part = yield from self._run(_IN_STRING, None if limit is None else limit + 1 - size)
            parts.append(part)
            size += len(part)
            if limit is not None and size > limit:
                return None
            char = yield from self.peek()
            if not char:
                return None
            self._skip(self._at + 1)
            parts.append(char)
            if char == '"':
                break
            escaped = yield from self.peek()
            self._skip(self._at + len(escaped))
            parts.append(escaped)
            size += 2
        try:
            value = json.loads("".join(parts), strict=False)
        except ValueError:
            return None
        return value if isinstance(value, str) and value.isascii() else _without_halves(value)

    def json_span(self, tell: Tell, ends: Markers) -> Steps[bool]:
        """Reads the JSON object or array that comes next and tells its text. Brackets and strings are followed, nothing
        else is checked. Returns whether it was closed: one of `ends` (each begins with `<`) outside a string ends it,
        too, and is not read."""
        depth = 0
        state = _PLAIN
        while True:
            text, size = self._text, len(self._text)
            at = self._at
            waits = False
            while at < size:
                if state == _STRING:
                    at = _end(_IN_STRING, text, at)
                    if at < size:
                        state = _PLAIN if text[at] == '"' else _ESCAPE
                        at += 1
                    continue
                if state == _ESCAPE:
                    state = _STRING
                    at += 1
                    continue
                at = _end(_OUTSIDE, text, at)
                if at == size:
                    break
                char = text[at]
                if char == "<":
                    if ends.pattern.match(text, at):
                        self._pass(at, tell)
                        return False
                    if not self._ended and text[at : at + ends.longest] in ends.prefixes:
                        waits = True
                        break
                elif char == '"':
                    state = _STRING
                elif char in "{[":
                    depth += 1
                else:
                    depth -= 1
                at += 1
                if depth == 0:
                    self._pass(at, tell)
                    return True
            self._pass(at, tell)
            if self._ended and not waits:
                return False
            yield

    def json_other(self, ends: Markers) -> Steps[bool]:
        """Reads any JSON value, which nobody wants. Returns whether there was one."""
        char = yield from self.peek()
        if char in ("{", "["):
            return (yield from self.json_span(_ignore, ends))
        if char == '"':
            return (yield from self.json_string()) is not None
        return bool((yield from self._run(_SCALAR, NAME_LIMIT)))

    def _run(self, pattern: re.Pattern[str], limit: int | None) -> Steps[str]:
        parts: list[str] = []
        size = 0
        while True:
            end = len(self._text) if limit is None else min(len(self._text), self._at + limit - size)
            found = pattern.match(self._text, self._at, end)
            part = found[0] if found else ""
            parts.append(part)
            size += len(part)
            self._skip(self._at + len(part))
            if self._at < len(self._text) or self._ended or size == limit:
                return "".join(parts)
            yield

    def _skip(self, end: int) -> None:
        if self._record is not None and end > self._at:
            self._record.append(self._text[self._at : end])
            self._recorded += end - self._at
        self._at = end

    def _pass(self, end: int, tell: Tell) -> None:
        if end > self._at:
            part = self._text[self._at : end]
            self._skip(end)
            tell(part)


_PLAIN, _STRING, _ESCAPE = range(3)  # where a scan of JSON is


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _ignore(_text: str) -> None:
    pass


def _without_halves(value: str) -> str:
    """Halves of a surrogate pair that stand alone cannot be written as UTF-8: each becomes U+FFFD."""
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
