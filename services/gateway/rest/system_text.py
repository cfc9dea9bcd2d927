"""Lines of system prompts that differ from request to request, such as a client's attribution: at the head of a prompt
they spoil every prefix hit behind them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

KEEP, LAST, DROP = HANDLINGS = ("keep", "last", "drop")
ATTRIBUTION = "x-anthropic-billing-header:"
"""How Claude Code's attribution begins; it is for Anthropic's billing and tells a model nothing."""


@dataclass(frozen=True, slots=True)
class VolatileLines:
    """What becomes of lines of a system prompt that begin as one of `patterns` (regular expressions) has it: they are
    kept, moved to the end of the system prompt, or dropped."""

    handling: str = DROP
    patterns: Sequence[str] = (ATTRIBUTION,)
    _pattern: re.Pattern[str] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        joined = "|".join(f"(?:{pattern})" for pattern in self.patterns)
        found = re.compile(joined) if joined and self.handling != KEEP else None
        object.__setattr__(self, "_pattern", found)

    def apply(self, blocks: Sequence[str]) -> str:
        """Returns the text of a system prompt."""
        if self._pattern is None:
            return "".join(blocks)
        steady: list[str] = []
        volatile: list[str] = []
        for block in blocks:
            for line in block.splitlines(keepends=True):
                (volatile if self._pattern.match(line) else steady).append(line)
        text = "".join(steady)
        if not volatile or self.handling == DROP:
            return text
        return text + ("" if text.endswith("\n") or not text else "\n") + "".join(volatile)
