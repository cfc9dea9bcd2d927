"""The running batch of a rank is kept as columns: Python runs for the rows that join, grow, stall or end in a step, not
for those that merely go on. What a step reads is ready before it begins: the next step's inputs come from advancing the
columns by one.

Rows with room for their next token come first (`live`), stalled ones after them. A row that leaves is replaced by the
last one, so a change moves at most two rows; the order is the same at every rank that gets the same commands.

A step that is not waited for is told of twice. Once it is `launched` the rows have gone on by one token, whatever that
will be: a row that ends by length is out of the batch, the others can be in the next step. What the step has made is
`collected` later, when the next step has been launched, too; a row that stopped is then in one step too many, and its
token there is thrown away. A row with a grammar `rest`s meanwhile, since what it may say next follows from that token.
`PageHolds` says when the pages of a row that is out of the batch are free of every step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvmesh.engine.batch import Chosen, Column, DecodeBatch, SampledToken, SampleParams
from kvmesh.engine.cache_memory import is_state
from kvmesh.errors import InternalError
from kvmesh.kvcache.cache_groups import CacheGroup, GroupPages
from kvmesh.ranks import protocol as m
from kvmesh.ranks.protocol import Logprobs, Token
from kvmesh.ranks.worker.tables import tables_of

# Columns: the token whose KV is not computed yet; tokens whose KV lies in pages; index of the next token, counted from
# the first attempt of the request; tokens of the answer so far; tokens that its pages hold; most tokens of the answer;
# least tokens before a stop token ends it; which row it was of the step that was launched last, and of the one before
# (-1: none). A step adds one to the columns of ADVANCING.
TOKEN, POSITION, INDEX, LENGTH, ROOM, MOST, LEAST, NEWEST, OLDER = range(9)
ADVANCING = slice(POSITION, ROOM)
GOES_ON, STOPPED, FULL = range(3)  # m.Token.finish
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class LaunchedRows:
    """Keeps what is to be known of a step's rows when its tokens are here, wherever the rows are by then."""

    handles: list[int]
    indices: list[int]  # of the step's tokens in their answers
    finish: Column  # FULL where the step's token is the last one that there may be
    may_stop: npt.NDArray[np.bool_]
    stop: list[frozenset[int]]
    stops: frozenset[int]  # all of them
    vain: set[int] = field(default_factory=set)  # handles that had ended in the step before


class Collected(NamedTuple):
    """Says what a step has made. `ended` are the handles among `tokens` that are out of the batch now, `bad` those that
    are so because their logits were not finite."""

    tokens: tuple[Token, ...]
    ended: tuple[int, ...]
    bad: tuple[int, ...]


class PageHolds(Generic[T]):
    """Decides when the pages of a row that is out of the batch may be given back: when no step that was launched and is
    not over has the row. Steps end in the order in which they were launched. `T` is what is then to be said."""

    def __init__(self) -> None:
        self._steps: deque[Sequence[int]] = deque()  # the handles of each step in flight
        self._begun = 0
        self._held: deque[tuple[int, T]] = deque()  # the number of the step that has the row last

    def launched(self, handles: Sequence[int]) -> None:
        """A step with these rows is launched."""
        self._steps.append(handles)
        self._begun += 1

    def over(self) -> list[T]:
        """The oldest step is over. Returns what is to be said now, in the order of `out`."""
        self._steps.popleft()
        over = self._begun - len(self._steps)
        free = [what for last, what in self._held if last <= over]
        self._held = deque((last, what) for last, what in self._held if last > over)
        return free

    def out(self, handle: int, what: T) -> bool:
        """The row is out of the batch. Returns whether its pages are free now; else `over` returns `what` once they
        are."""
        for back, handles in enumerate(reversed(self._steps)):
            if handle in handles:
                self._held.append((self._begun - back, what))
                return False
        return True


class RunningRows:
    """Keeps the rows of the batch. Handles are the front's; row numbers change with every call. With `groups`, the
    model's cache groups, a row has a table for each."""

    def __init__(self, block_tokens: int, groups: Sequence[CacheGroup] = ()) -> None:
        self._block_tokens = block_tokens
        self._groups = tuple(groups)
        self._tables: list[list[tuple[int, ...]]] = [[] for _ in groups]  # of each group, each row's
        self._roles: list[tuple[tuple[int, ...], ...]] = []  # of each row, with `groups`: the slots of its states
        self.live = 0
        self._at: dict[int, int] = {}  # by handle
        self._handles: list[int] = []
        self._pages: list[tuple[int, ...]] = []
        self._params: list[SampleParams] = []
        self._stop: list[frozenset[int]] = []
        self._columns = np.zeros((9, 8), np.int64)
        self._stops: Counter[int] = Counter()  # the stop tokens of all rows
        self._stops_now: frozenset[int] | None = frozenset()  # None: they have changed

    def __len__(self) -> int:
        return len(self._handles)

    def __contains__(self, handle: int) -> bool:
        return handle in self._at

    def handle(self, row: int) -> int:
        return self._handles[row]

    # ── rows ─────────────────────────────────────────────────────────────────────────────────────

    def join(self, j: m.Join, params: SampleParams) -> None:
        """Adds a row to the batch, as if it had room for its next token: `stall` checks that."""
        row = len(self._handles)
        if row == self._columns.shape[1]:
            self._columns = np.concatenate((self._columns, np.zeros_like(self._columns)), axis=1)
        named = tables_of(self._groups, j.groups) if self._groups else None
        room = len(j.pages) * self._block_tokens if named is None else self._room(named.tables)
        length = j.token_index + 1
        index = params.answered + length
        most, least = j.max_tokens, j.min_tokens
        self._columns[:, row] = (j.next_token, j.context_tokens, index, length, room, most, least, -1, -1)
        self._at[j.handle] = row
        self._handles.append(j.handle)
        self._pages.append(j.pages)
        if named is not None:
            self._roles.append(named.roles)
            for column, table in zip(self._tables, named.tables, strict=True):
                column.append(table)
        self._params.append(params)
        self._stop.append(frozenset(j.stop_token_ids))
        self._stops.update(self._stop[row])
        self._stops_now = None
        self._swap(row, self.live)
        self.live += 1

    def grant(self, handle: int, pages: tuple[int, ...], groups: Sequence[GroupPages] = ()) -> None:
        """Gives a row more pages, behind those that it has of each group; does nothing when the row has left."""
        row = self._at.get(handle)
        if row is None:
            return
        if self._groups:
            for more in groups:
                self._tables[more.group][row] += more.ids
            self._columns[ROOM, row] = self._room([column[row] for column in self._tables])
        else:
            self._pages[row] = (*self._pages[row], *pages)
            self._columns[ROOM, row] += len(pages) * self._block_tokens
        if row >= self.live:
            self._swap(row, self.live)
            self.live += 1

    def stalled(self, handle: int) -> bool:
        """Whether the row is there and has no room for its next token, as `stall` found."""
        return self._at.get(handle, -1) >= self.live

    def drop(self, handle: int, group: int, first: int) -> None:
        """Makes holes of a row's blocks before `first` in one group; does nothing when the row has left. Raises
        InternalError for a state."""
        row = self._at.get(handle)
        if row is None:
            return
        if is_state(self._groups[group]):
            raise InternalError(f"cache group {self._groups[group].name}: a state has no blocks to give back")
        table = self._tables[group][row]
        self._tables[group][row] = (-1,) * min(first, len(table)) + table[first:]

    def _room(self, tables: Sequence[Sequence[int]]) -> int:
        """Returns how many tokens there is room for in every group that keeps tokens."""
        tokens = (len(table) for group, table in zip(self._groups, tables, strict=True) if not is_state(group))
        return min(tokens) * self._block_tokens

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
        for tables in self._tables:
            tables.pop()
        if self._groups:
            self._roles.pop()
        self._params.pop()
        gone = self._stop.pop()
        self._stops.subtract(gone)
        self._stops_now = None
        for token in gone:
            if not self._stops[token]:
                del self._stops[token]

    def _swap(self, a: int, b: int) -> None:
        if a == b:
            return
        self._columns[:, [a, b]] = self._columns[:, [b, a]]
        lists: tuple[list[Any], ...] = (self._handles, self._pages, self._params, self._stop, *self._tables)
        if self._groups:
            lists += (self._roles,)
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

    def rest(self) -> list[int]:
        """Takes rows with a grammar that are in the step in flight out of the next one; returns their handles, for
        `wake`. Rows without one keep their places."""
        in_flight = self._columns[NEWEST, : self.live]
        resting = [row for row in np.flatnonzero(in_flight >= 0).tolist() if self._params[row].grammar is not None]
        handles = [self._handles[row] for row in resting]
        for row in reversed(resting):
            self.live -= 1
            self._swap(row, self.live)
        return handles

    def wake(self, handles: Sequence[int]) -> None:
        """Puts rows that rested back, those that are still here."""
        for handle in handles:
            row = self._at.get(handle)
            if row is not None:
                self._swap(row, self.live)
                self.live += 1

    def batch(self) -> DecodeBatch:
        """Returns a copy of the inputs of the live rows' next step."""
        tokens, positions, indices = self._columns[: INDEX + 1, : self.live].copy()
        groups = [column[: self.live] for column in self._tables]
        return DecodeBatch(tokens, positions, indices, self._pages[: self.live], self._params[: self.live], groups)

    def live_roles(self) -> list[tuple[tuple[int, ...], ...]]:
        """Returns the slots of the states of the rows that `batch` has; () without cache groups."""
        return self._roles[: self.live]

    def advance(self, chosen: Chosen) -> tuple[Token, ...]:
        """Records the tokens that the live rows have made, takes rows that end out of the batch, and returns the
        tokens: what `launched` and `collected` do, in one for a step that was waited for."""
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

    def handles(self) -> list[int]:
        """Returns the handles of the live rows."""
        return self._handles[: self.live]

    def stops(self, row: int) -> frozenset[int]:
        """Returns the tokens that may end a row's answer."""
        return self._stop[row]

    def room_for_drafts(self, whole_blocks: bool) -> list[int]:
        """Returns how many tokens behind its next one each live row has pages for, and may still make. With
        `whole_blocks` the step may end at a block's end and not pass it: the states there are kept."""
        live = self._columns[:, : self.live]
        room = np.minimum(live[ROOM] - live[POSITION], live[MOST] - live[LENGTH]) - 1
        if whole_blocks:
            room = np.minimum(room, -(live[POSITION] + 1) % self._block_tokens)
        found: list[int] = np.maximum(room, 0).tolist()
        return found

    def advance_by(
        self, made: Sequence[Sequence[int]], scores: Sequence[Sequence[Logprobs | None]]
    ) -> tuple[Collected, list[int]]:
        """Records tokens of a step that was waited for, several of each live row: `made[row]`, each with its `scores`.
        An answer ends at the first token that ends it, whatever comes behind. A row without any is bad. Returns what
        was made, and how many tokens of each row count."""
        live = self._columns[:, : self.live]
        tokens: list[Token] = []
        counts, ended, bad = [0] * self.live, [], []
        for row, (own, handle) in enumerate(zip(made, self._handles[: self.live], strict=True)):
            length, most, least = (int(live[column, row]) for column in (LENGTH, MOST, LEAST))
            finish = GOES_ON
            for at, token in enumerate(own):
                if token in self._stop[row] and length + 1 >= least:
                    finish = STOPPED
                elif length + 1 >= most:
                    finish = FULL
                tokens.append(Token(handle, token, length, finish, scores[row][at]))
                length += 1
                if finish:
                    break
            counts[row] = length - int(live[LENGTH, row])
            if not own:
                bad.append(handle)
            elif finish:
                ended.append(handle)
            else:
                live[TOKEN, row] = own[counts[row] - 1]
        live[ADVANCING] += np.array(counts, np.int64)
        for handle in (*ended, *bad):
            self.leave(handle)
        return Collected(tuple(tokens), tuple(ended), tuple(bad)), counts

    def source(self) -> Column:
        """Returns which row each live one was of the step that was launched last; -1 for none."""
        return self._columns[NEWEST, : self.live].copy()

    def launched(self) -> LaunchedRows:
        """The live rows' next step is launched: they go on by one token, and those that end by length leave."""
        live = self._columns[:, : self.live]
        indices: list[int] = live[LENGTH].tolist()
        live[ADVANCING] += 1
        self._columns[OLDER] = self._columns[NEWEST]
        self._columns[NEWEST] = -1
        live[NEWEST] = np.arange(self.live)
        full = live[LENGTH] >= live[MOST]
        if self._stops_now is None:
            self._stops_now = frozenset(self._stops)
        step = LaunchedRows(
            self._handles[: self.live],
            indices,
            np.where(full, FULL, GOES_ON),
            live[LENGTH] >= live[LEAST],
            self._stop[: self.live],
            self._stops_now,
        )
        for row in reversed(np.flatnonzero(full).tolist()):
            self.leave(self._handles[row])
        return step

    def collected(self, step: LaunchedRows, chosen: Chosen, next_step: LaunchedRows | None = None) -> Collected:
        """Takes the tokens of the oldest step in flight; -1 stands for a row whose logits were not finite. The step
        after it may have been launched: that is `next_step`, and for rows that end here it was in vain."""
        found, finish = chosen.token_ids, step.finish
        token_ids: list[int] = found.tolist()
        if not step.stops.isdisjoint(token_ids):
            for row, token in enumerate(token_ids):
                if token in step.stop[row] and step.may_stop[row]:
                    finish[row] = STOPPED
        where = self._columns[NEWEST if next_step is None else OLDER, : len(self._handles)]
        at = np.flatnonzero(where >= 0)
        self._columns[TOKEN, at] = found[where[at]]
        tokens = tuple(map(Token, step.handles, token_ids, step.indices, finish.tolist(), self._scores(chosen)))
        bad: tuple[int, ...] = ()
        if step.vain or found.min() < 0:
            tokens = tuple(token for token in tokens if token.handle not in step.vain)
            bad = tuple(token.handle for token in tokens if token.token_id < 0)
            tokens = tuple(token for token in tokens if token.token_id >= 0)
            ended = tuple(token.handle for token in tokens if token.finish)
        else:
            ended = tuple(step.handles[row] for row in np.flatnonzero(finish).tolist())
        for handle in (*ended, *bad):
            self.leave(handle)
        if next_step is not None:
            next_step.vain.update(ended, bad)
        return Collected(tokens, ended, bad)

    def _scores(self, chosen: Chosen) -> Sequence[Logprobs | None]:
        scores: list[Logprobs | None] = [None] * len(chosen.token_ids)
        for row, token in chosen.scored.items():
            scores[row] = logprobs(token)
        return scores


def logprobs(token: SampledToken) -> Logprobs | None:
    """Returns log probabilities in the form in which the front gets them."""
    return None if token.logprob is None else Logprobs(token.logprob, tuple(token.top))
