"""Drafts from what others said: answers to the same prompt are searched together.

Samples of one prompt, and attempts of one request, tend to say the same in the same order. A row's draft goes on from
the longest of its last tokens that some answer has, along what came most often after them. Where a row's own text has a
longer match, it copies from that, as the n-gram drafter does.

The answers to a prompt are pinned by the rows that add to them. Those that nobody uses stay while there is room, the
last used ones. Like `TokenLog` they have no index: a token costs 12 bytes and next to no time where nothing repeats.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvmesh.drafts.drafter import NO_DRAFT, Draft
from kvmesh.drafts.ngram import LEAST_MATCH, MOST_MATCH, strength_of
from kvmesh.drafts.token_log import LOOKS_BACK, Ids32, TokenLog

if TYPE_CHECKING:
    import torch

MOST_TOKENS = 1 << 19  # of the answers to all prompts
MOST_PROMPTS = 4096  # whose answers are kept though no row has them: each takes 1 KB, however short they are
NONE = -1  # no place


class AnswersTold:
    """Keeps texts that grow beside each other, token by token in the order in which they came. A *place* is a token's
    index; it knows the places before and after it in its text."""

    def __init__(self) -> None:
        self._kept = np.empty((3, 64), np.int32)  # token, place before, place after
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, end: int, token: int) -> int:
        """Appends a token to the text that ends at a place, or begins one behind NONE. Returns its place."""
        place = self._count
        if place == self._kept.shape[1]:
            self._kept = np.concatenate((self._kept, np.empty_like(self._kept)), axis=1)
        self._kept[:, place] = token, end, NONE
        if end != NONE:
            self._kept[2, end] = place
        self._count += 1
        return place

    def continued(self, last: Ids32, count: int, least: int) -> tuple[list[int], int]:
        """Returns up to `count` tokens that come most often after the longest suffix of `last`, of `least` tokens at
        least, that one of the last LOOKS_BACK tokens ends and something comes after, and that suffix's length. Of
        equally frequent tokens the smaller id is taken."""
        ids, before, after = self._kept[:, : self._count]
        first = max(0, self._count - LOOKS_BACK)
        ends = np.flatnonzero((ids[first:] == last[-1]) & (after[first:] != NONE)) + first if len(last) else ids[:0]
        starts, length = ends, min(1, len(ends))
        while len(ends) and length < len(last):
            earlier = before[starts]
            longer = (earlier != NONE) & (ids[earlier] == last[-1 - length])
            if not longer.any():
                break
            ends, starts, length = ends[longer], earlier[longer], length + 1
        if length < least:
            return [], 0
        made: list[int] = []
        places = after[ends]
        while len(places) and len(made) < count:
            tokens, times = np.unique(ids[places], return_counts=True)
            made.append(int(tokens[np.argmax(times)]))
            places = after[places[ids[places] == made[-1]]]
            places = places[places != NONE]
        return made, length


class _Row:
    __slots__ = ("end", "key", "log")

    def __init__(self, key: bytes, log: TokenLog) -> None:
        self.key, self.log, self.end = key, log, NONE


class SuffixDrafter:
    """Drafts from all answers to a row's prompt, and from its own text."""

    name = "suffix"
    needs_hidden = False
    computes = False

    def __init__(self, most_tokens: int = MOST_TOKENS, most_prompts: int = MOST_PROMPTS) -> None:
        self._most_tokens, self._most_prompts = most_tokens, most_prompts
        self._rows: dict[int, _Row] = {}
        self._told: OrderedDict[bytes, AnswersTold] = OrderedDict()  # by prompt
        self._pins: dict[bytes, int] = {}
        self.tokens = 0  # of the answers to all prompts

    def begin(self, handle: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self.end(handle)
        key = hashlib.blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=16).digest()
        row = self._rows[handle] = _Row(key, TokenLog(prompt, answer))
        self._pins[key] = self._pins.get(key, 0) + 1
        if key in self._told:  # where this row may have been before
            self._told.move_to_end(key)
            return
        if len(self._told) >= self._most_prompts:
            self._drop(lambda: len(self._told) > self._most_prompts * 3 // 4)
        self._told[key] = AnswersTold()
        self._learn(row, [int(token) for token in answer])

    def extend(self, handle: int, tokens: Sequence[int], hidden: torch.Tensor | None = None) -> None:
        row = self._rows[handle]
        row.log.extend(tokens)
        self._learn(row, tokens)

    def propose(self, handles: Sequence[int], most: Sequence[int]) -> list[Draft]:
        return [self._proposed(self._rows[handle], count) for handle, count in zip(handles, most, strict=True)]

    def end(self, handle: int) -> None:
        row = self._rows.pop(handle, None)
        if row is None:
            return
        self._pins[row.key] -= 1
        if not self._pins[row.key]:
            del self._pins[row.key]

    def _learn(self, row: _Row, tokens: Iterable[int]) -> None:
        """Adds to the answers to the row's prompt; where there is no room, they stay as they are."""
        told = self._told[row.key]
        for token in tokens:
            if self.tokens >= self._most_tokens:
                self._drop(lambda: self.tokens > self._most_tokens * 3 // 4)
            if self.tokens >= self._most_tokens:
                row.end = NONE
                return
            row.end = told.add(row.end, token)
            self.tokens += 1

    def _drop(self, too_many: Callable[[], bool]) -> None:
        """Drops answers to prompts that no row has, the longest unused first, while there are `too_many`: more than
        must go, so that it is seldom called."""
        for key in [key for key in self._told if key not in self._pins]:
            if not too_many():
                return
            self.tokens -= len(self._told.pop(key))

    def _proposed(self, row: _Row, count: int) -> Draft:
        own = row.log.last_occurrence(LEAST_MATCH, MOST_MATCH)
        others, match = self._told[row.key].continued(row.log.ids[-MOST_MATCH:], count, LEAST_MATCH)
        if own.length > match or (own.length == match and len(others) < count):  # own text may go on repeating itself
            return Draft(row.log.continued(own, count), strength_of(own.length)) if own.length else NO_DRAFT
        return Draft(others, strength_of(match)) if others else NO_DRAFT
