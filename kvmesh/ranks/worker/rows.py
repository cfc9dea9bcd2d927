"""The running batch of a rank is kept as columns: Python runs for the rows that join, grow, stall or end in a step, not
for those that merely go on. What a step reads is ready before it begins: the next step's inputs come from advancing the
columns by one.

Rows with room for their next token come first (`live`), stalled ones after them. A row that leaves is replaced by the
last one, so a change moves at most two rows; the order is the same at every rank that gets the same commands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvmesh.engine.batch import Chosen, Column, DecodeBatch, SampledToken, SampleParams
from kvmesh.ranks import protocol as m
from kvmesh.ranks.protocol import Logprobs, Token

# Columns: the token whose KV is not computed yet; tokens whose KV lies in pages; index of the next token, counted from
# the first attempt of the request; tokens of the answer so far; tokens that its pages hold; most tokens of the answer;
# least tokens before a stop token ends it. A step adds one to the columns of ADVANCING.
TOKEN, POSITION, INDEX, LENGTH, ROOM, MOST, LEAST = range(7)
ADVANCING = slice(POSITION, ROOM)
GOES_ON, STOPPED, FULL = range(3)  # m.Token.finish


class RunningRows:
    """Keeps the rows of the batch. Handles are the front's; row numbers change with every call."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.live = 0
        self._at: dict[int, int] = {}  # by handle
        self._handles: list[int] = []
        self._pages: list[tuple[int, ...]] = []
        self._params: list[SampleParams] = []
        self._stop: list[frozenset[int]] = []
        self._columns = np.zeros((7, 8), np.int64)
        self._stops: Counter[int] = Counter()  # the stop tokens of all rows

    def __len__(self) -> int:
        return len(self._handles)

    def handle(self, row: int) -> int:
        return self._handles[row]

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────

    def join(self, j: m.Join, params: SampleParams) -> None:
        """Adds a row to the batch, as if it had room for its next token: `stall` checks that."""
        row = len(self._handles)
        if row == self._columns.shape[1]:
            self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)), axis=1)
        room = len(j.pages) * self._block_tokens
        length = j.token_index + 1
        index = params.answered + length
        self._columns[:, row] = (j.next_token, j.context_tokens, index, length, room, j.max_tokens, j.min_tokens)
        self._at[j.handle] = row
        self._handles.append(j.handle)
        self._pages.append(j.pages)
        self._params.append(params)
        self._stop.append(frozenset(j.stop_token_ids))
        self._stops.update(self._stop[row])
        self._swap(row, self.live)
        self.live += 1

    def grant(self, handle: int, pages: tuple[int, ...]) -> None:
        """Gives a row more pages; does nothing when the row has left."""
        row = self._at.get(handle)
        if row is None:
            return
        self._pages[row] = (*self._pages[row], *pages)
        self._columns[ROOM, row] += len(pages) * self._block_tokens
        if row >= self.live:
            self._swap(row, self.live)
            self.live += 1

    def leave(self, handle: int) -> None:
        """Takes a row out of the batch, if it is there."""
        row = self._at.get(handle)
        if row is None:
            return
        if row < self.live:
            self.live -= 1
            self._swap(row, self.live)
            row = self.live
        self._swap(row, len(self._handles) - 1)
        del self._at[self._handles.pop()]
        self._pages.pop()
        self._params.pop()
        gone = self._stop.pop()
        self._stops.subtract(gone)
        for token in gone:
            if not self._stops[token]:
                del self._stops[token]

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        self._columns[:, [a, b]] = self._columns[:, [b, a]]
        lists: tuple[list[Any], ...] = (self._handles, self._pages, self._params, self._stop)
        for column in lists:
            column[a], column[b] = column[b], column[a]
        self._at[self._handles[a]], self._at[self._handles[b]] = a, b

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def stall(self) -> list[int]:
        """Returns the handles of live rows that have no room for their next token; they are not live any more."""
        columns = self._columns
        full = np.flatnonzero(columns[POSITION, : self.live] >= columns[ROOM, : self.live]).tolist()
        handles = [self._handles[row] for row in full]
        for row in reversed(full):
            self.live -= 1
            self._swap(row, self.live)
        return handles

    def batch(self) -> DecodeBatch:
        """Returns a copy of the inputs of the live rows' next step."""
        tokens, positions, indices = self._columns[: INDEX + 1, : self.live].copy()
        return DecodeBatch(tokens, positions, indices, self._pages[: self.live], self._params[: self.live])

    def advance(self, chosen: Chosen) -> tuple[Token, ...]:
        """Records the tokens that the live rows have made, takes rows that end out of the batch, and returns the
        tokens."""
        live = self._columns[:, : self.live]
        indices: list[int] = live[LENGTH].tolist()
        live[TOKEN] = chosen.token_ids
        live[ADVANCING] += 1
        finish: Column = np.where(live[LENGTH] >= live[MOST], FULL, GOES_ON)
        token_ids: list[int] = chosen.token_ids.tolist()
        if not self._stops.keys().isdisjoint(token_ids):
            for row, token in enumerate(token_ids):
                if token in self._stop[row] and live[LENGTH, row] >= live[LEAST, row]:
                    finish[row] = STOPPED
        handles, scores = self._handles[: self.live], self._scores(chosen)
        tokens = tuple(map(Token, handles, token_ids, indices, finish.tolist(), scores))
        for row in reversed(np.flatnonzero(finish).tolist()):
            self.leave(self._handles[row])
        return tokens

    def _scores(self, chosen: Chosen) -> Sequence[Logprobs | None]:
        scores: list[Logprobs | None] = [None] * self.live
        for row, token in chosen.scored.items():
            scores[row] = logprobs(token)
        return scores


def logprobs(token: SampledToken) -> Logprobs | None:
    """Returns log probabilities in the form in which the front gets them."""
    return None if token.logprob is None else Logprobs(token.logprob, tuple(token.top))
