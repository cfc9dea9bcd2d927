"""Parsers that are written as one generator, which reads as far as the text goes and waits there for more."""

from __future__ import annotations

from kvmesh.services.gateway.text.answers.parsed import Parsed, ParsedBuilder
from kvmesh.services.gateway.text.answers.reader import Steps, TextReader


class StepwiseParser:
    """Feeds `_steps`, the generator of a subclass, which reads from `reader` and records in `told`."""

    _steps: Steps[None]

    def __init__(self) -> None:
        self.reader = TextReader()
        self.told = ParsedBuilder()

    def feed(self, text: str) -> Parsed:
        """See AnswerParser."""
        if text:
            self.reader.feed(text)
            next(self._steps, None)
        return self.told.take()

    def finish(self) -> Parsed:
        """See AnswerParser."""
        self.reader.end()
        next(self._steps, None)
        return self.told.take()
