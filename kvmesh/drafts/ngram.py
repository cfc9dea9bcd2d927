"""Drafts that copy: what came after the last occurrence of the text's end comes again.

The search is exact and keeps no index (`TokenLog`), so a row costs 4 bytes a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvmesh.drafts.drafter import MOST_STRENGTH, NO_DRAFT, Draft
from kvmesh.drafts.token_log import TokenLog

if TYPE_CHECKING:
    import torch

LEAST_MATCH, MOST_MATCH = 2, 24


def strength_of(match: int) -> int:
    """Returns how strong a draft is whose grounds are that so many last tokens occurred before, one to each of 1, 2,
    3, 4 to 5, 6 to 8, 9 to 15, more."""
    return min(MOST_STRENGTH, match if match <= 3 else 4 + (match > 5) + (match > 8) + (match > 15))


class NgramDrafter:
    """Copies from a row's own prompt and answer."""

    name = "ngram"
    needs_hidden = False
    computes = False

    def __init__(self, least: int = LEAST_MATCH, most: int = MOST_MATCH) -> None:
        self._least, self._most = least, most
        self._logs: dict[int, TokenLog] = {}

    def begin(self, handle: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self._logs[handle] = TokenLog(prompt, answer)

    def extend(self, handle: int, tokens: Sequence[int], hidden: torch.Tensor | None = None) -> None:
        self._logs[handle].extend(tokens)

    def propose(self, handles: Sequence[int], most: Sequence[int]) -> list[Draft]:
        return [self._proposed(self._logs[handle], count) for handle, count in zip(handles, most, strict=True)]

    def _proposed(self, log: TokenLog, count: int) -> Draft:
        found = log.last_occurrence(self._least, self._most)
        if not found.length:
            return NO_DRAFT
        return Draft(log.continued(found, count), strength_of(found.length))

    def end(self, handle: int) -> None:
        self._logs.pop(handle, None)
