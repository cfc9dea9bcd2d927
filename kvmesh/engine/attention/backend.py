"""Attention over paged KV: the seam between models and the memory that holds K and V.

A backend plans a step once (which rows go to which pages, what each row attends to) and the plan then serves every
layer: `rotate_and_write` puts the step's K and V into `pages`, `attend` reads back what each token may see. The torch
backend runs anywhere; which one a device gets is in `choice`.

Shapes: `pages [num_pages, layers, 2, K, block_tokens, D]`, `qkv [T, H + 2K, D]`: T tokens, H query heads, K KV heads.

Invariant: slots past a prompt's last token are zeroed, since pages are pushed whole, with nothing of other requests.
Backends for CPUs do so with pages that a decode step begins, too: torch's gathers and masks them, and 0 * NaN is NaN.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvmesh.engine import ops
from kvmesh.engine.batch import Integers
from kvmesh.engine.config import AttentionSpec
from kvmesh.engine.rope import Rotation
from kvmesh.errors import InternalError


class TokenSpan(NamedTuple):
    """Tokens [start, start + length) of one request, whose KV lies in `pages` from token 0 on."""

    start: int
    length: int
    pages: Sequence[int]


def seen_from(position: int, window: int, chunk: int) -> int:
    """The first token that the one at `position` sees in layers of this window or chunk (`AttentionSpec.sees`)."""
    return position - position % chunk if chunk else max(0, position - window + 1) if window else 0


class StepPlan(Protocol):
    """Attends for one step, layer by layer. `positions` is int64 `[T]` on the device. Where the ranks of cp share the
    step's tokens, `own` has the numbers of those that this rank computes, `counts` how many each rank has, and `back`
    where each token is among those of all ranks, one rank's behind the other's."""

    positions: torch.Tensor
    own: torch.Tensor | None = None
    back: torch.Tensor | None = None
    counts: Sequence[int] = ()

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        """Writes K and V of all tokens of the step, as they are in `qkv`, into the pages of `layer`."""

    def rotate_and_write(self, layer: int, qkv: torch.Tensor, rotation: Rotation) -> None:
        """Rotates the queries in place, and writes rotated K, and V, into the pages of `layer`. What the keys in `qkv`
        are afterwards is the plan's own affair."""
        ops.rotate_heads(qkv, rotation)
        self.write(layer, qkv)

    def attend(self, layer: int, qkv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the attention of all tokens, `[T, H * D]`, in `out` where it is given; `write` or `rotate_and_write`
        of the same layer comes first."""


class StepTables(Protocol):
    """Holds what decode steps that are replayed read, at addresses that stay."""

    token_ids: torch.Tensor

    def holds(self, pages: Sequence[Any]) -> bool:
        """Says whether the pages of every row have room."""

    def fill(
        self,
        pages: Sequence[Any],
        positions: Integers,
        token_ids: Integers = (),
        padded_rows: int = 0,
        lengths: Integers | None = None,
    ) -> None:
        """Takes the next step: row i computes the token at `positions[i]`; rows from there to `padded_rows` stand for
        none. `lengths` are how many rows in order are of each request (None: one). Raises InternalError for too few
        pages, or pages that do not exist."""


class PagedMemory:
    """Describes the pages that a backend attends over, `[num_pages, layers, planes, K, block_tokens, D]`. Raises
    InternalError unless they are contiguous."""

    def __init__(self, pages: torch.Tensor) -> None:
        if not pages.is_contiguous():
            raise InternalError("pages must be contiguous")
        self.pages = pages
        self.num_pages, self.num_layers, self.planes, self.kv_heads, self.block_tokens, self.head_dim = pages.shape
        self.device, self.dtype = pages.device, pages.dtype

    @property
    def most_tokens(self) -> int | None:
        """The tokens of the longest request that finds room."""
        return self.num_pages * self.block_tokens

    def oldest_seen(self, position: int) -> int:
        """Returns the first token that the one at `position` sees in any layer. Pages wholly before it are never
        read."""
        return 0

    def page_array(self, pages: Sequence[int], end: int, seen: int = 0) -> np.ndarray:
        """Returns the int64 ids of the pages that hold tokens [0, end), of which [seen, end) are seen. A negative id is
        a hole, a page that was given back: it must lie before token `seen`, and the first page behind it stands in for
        it, so that whatever reads whole tiles of tokens meets numbers of this request. Raises InternalError when pages
        are too few or do not exist."""
        count = -(-end // self.block_tokens)
        ids = np.asarray(pages[:count], dtype=np.int64)
        if len(ids) < count:
            raise InternalError(f"{end} tokens need {count} pages of {self.block_tokens}, got {len(ids)}")
        if (first := seen // self.block_tokens) and ids[:first].min() < 0:
            ids = np.concatenate((np.where(ids[:first] < 0, ids[first], ids[:first]), ids[first:]))
        if ids.min() < 0 or ids.max() >= self.num_pages:
            raise InternalError(f"page ids {ids.min()}..{ids.max()} are outside 0..{self.num_pages - 1}")
        return ids


class AttentionBackend(PagedMemory, ABC):
    """Writes K and V into pages and attends to them. A backend owns no memory but scratch: `pages` belong to the
    caller, who keeps one writer per page. With `capturable` a decode plan's work is launches alone, over buffers that
    stay at their addresses, so that a CUDA graph can hold it (`kvmesh.engine.graphs`)."""

    capturable = False

    def __init__(self, pages: torch.Tensor, num_heads: int, specs: Sequence[AttentionSpec]) -> None:
        super().__init__(pages)
        self.num_heads = num_heads
        self.specs = tuple(specs)
        if len(self.specs) != self.num_layers:
            raise InternalError(f"{len(self.specs)} attention specs for {self.num_layers} layers")
        self._distinct = tuple({spec.sees for spec in self.specs})

    def oldest_seen(self, position: int) -> int:
        return min(seen_from(position, *sees) for sees in self._distinct)

    @abstractmethod
    def plan_prefill(self, spans: Sequence[TokenSpan]) -> StepPlan:
        """Plans a ragged batch; T is the sum of all lengths. The rest of each span's last page is zeroed."""

    @abstractmethod
    def plan_decode(self, pages: Sequence[Sequence[int]], positions: Integers) -> StepPlan:
        """Plans one token a row; T is the number of rows. The plan is valid until the next call."""

    def plan_mixed(self, pages: Sequence[Sequence[int]], positions: Integers, spans: Sequence[TokenSpan]) -> StepPlan:
        """Plans one step of decode rows and spans: the rows come first; T is the rows plus the sum of all lengths."""
        if not spans:
            return self.plan_decode(pages, positions)
        if not pages:
            return self.plan_prefill(spans)
        return MixedPlan(self, self.plan_decode(pages, positions), self.plan_prefill(spans), len(pages))

    def plan_drafts(
        self, pages: Sequence[Sequence[int]], positions: Integers, lengths: Integers, spans: Sequence[TokenSpan]
    ) -> StepPlan:
        """Plans as `plan_mixed` does a step in which request i has `lengths[i]` rows, in order, at positions that
        follow each other. A plan writes the K and V of all tokens before any attends, so that each row, at its own
        position, sees exactly those before it: nothing else is to be done unless a backend reads K and V of a request
        once for all of its rows."""
        return self.plan_mixed(pages, positions, spans)

    def step_tables(self, rows: int, width: int, request_rows: int = 1) -> StepTables:
        """Returns what decode steps of up to `rows` rows of `width` pages read when they are replayed, of requests that
        have up to `request_rows` rows each. Only of a backend that is `capturable`."""
        raise InternalError(f"{type(self).__name__} is not captured")

    def replayed(self, tables: StepTables, rows: int) -> StepPlan:
        """Returns the plan of any step of at most so many rows of `tables`, as they are filled when it is replayed."""
        raise InternalError(f"{type(self).__name__} is not captured")

    def inputs(self, tokens: int) -> torch.Tensor:
        """Returns zeros of the form of what a layer gives the plan of so many tokens."""
        heads = self.num_heads + 2 * self.kv_heads
        return torch.zeros(tokens, heads, self.head_dim, dtype=self.dtype, device=self.device)

    def answer(self, qkv: torch.Tensor) -> torch.Tensor:
        """Returns room for the attention of `qkv`'s tokens."""
        return qkv.new_empty(qkv.shape[0], self.num_heads * self.head_dim)

    def zero_tail(self, page: int, slot: int) -> None:
        """Clears the slots from `slot` on of a page that only one request holds."""
        self.pages[page, :, :, :, slot:] = 0


class SpanTokens(NamedTuple):
    """Says where the tokens of a step's spans lie: the pages of each span from token 0 on, and for each of the T tokens
    its position and its page; int64."""

    ids: list[np.ndarray]
    positions: npt.NDArray[np.int64]
    page_ids: npt.NDArray[np.int64]

    @classmethod
    def of(cls, backend: AttentionBackend, spans: Sequence[TokenSpan]) -> SpanTokens:
        """Finds the pages of spans and zeroes the rest of each span's last page. Raises InternalError as `page_array`
        does, before anything is zeroed."""
        block, none = backend.block_tokens, np.zeros(0, dtype=np.int64)
        ends = [span.start + span.length for span in spans]
        ids = [
            backend.page_array(span.pages, end, backend.oldest_seen(span.start))
            for span, end in zip(spans, ends, strict=True)
        ]
        where = [np.arange(span.start, end) for span, end in zip(spans, ends, strict=True)]
        page_ids = [own[at // block] for own, at in zip(ids, where, strict=True)]
        for own, end in zip(ids, ends, strict=True):
            if end % block:
                backend.zero_tail(int(own[-1]), end % block)
        return cls(ids, np.concatenate((none, *where)), np.concatenate((none, *page_ids)))


class MixedPlan(StepPlan):
    """Runs two plans in one step: the first `rows` tokens are decode's, the others prefill's."""

    def __init__(self, backend: AttentionBackend, decode: StepPlan, prefill: StepPlan, rows: int) -> None:
        self.backend, self.decode, self.prefill, self.rows = backend, decode, prefill, rows
        self.positions = torch.cat((decode.positions, prefill.positions))

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        self.decode.write(layer, qkv[: self.rows])
        self.prefill.write(layer, qkv[self.rows :])

    def attend(self, layer: int, qkv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        out = self.backend.answer(qkv) if out is None else out
        self.decode.attend(layer, qkv[: self.rows], out[: self.rows])
        self.prefill.attend(layer, qkv[self.rows :], out[self.rows :])
        return out


class PageTable:
    """Keeps the page tables of a step's requests from step to step, so that a request that merely goes on is not copied
    again. A table that is kept stays right: from token to token less is seen, never more.

    `ids` is int32 `[rows or more, pages or more]`: row i holds the pages of the step's i-th request from token 0 on;
    what lies past them is left over from other requests and must not be read."""

    def __init__(self, memory: PagedMemory) -> None:
        self.memory = memory
        self.ids: npt.NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)
        self._known: list[tuple[int, ...]] = []
        self._used: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # pages up to a request's last token
        self._ends: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def update(
        self,
        pages: Sequence[Sequence[int]],
        ends: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64] | None = None,
    ) -> npt.NDArray[np.bool_]:
        """Takes the pages of the step's requests; request i has tokens [0, ends[i]) in `pages[i]`, and the step
        computes those from `starts[i]` on (None: the last one). Returns which rows are new: all but those of a request
        that stays at its place, keeps its pages and goes one token on within its last page. Raises InternalError as
        `page_array` does."""
        rows, used = len(pages), -(-ends // self.memory.block_tokens)
        self._reserve(rows, int(used.max()))
        moved: npt.NDArray[np.bool_] = (self._used[:rows] != used) | (self._ends[:rows] + 1 != ends)
        self._ends[:rows] = ends
        fresh = moved.copy()
        others = np.fromiter(map(operator.is_not, pages, self._known), np.bool_, rows)
        for i in np.flatnonzero(moved | others).tolist():
            row = pages[i]
            if not moved[i] and tuple(row) == self._known[i]:
                continue
            self._used[i] = 0  # until the row holds what is said of it
            start = int(ends[i]) - 1 if starts is None else int(starts[i])
            ids = self.memory.page_array(row, int(ends[i]), self.memory.oldest_seen(start))
            self.ids[i, : len(ids)] = ids
            self._known[i] = tuple(row)  # the object itself when it is a tuple already
            self._used[i] = len(ids)
            fresh[i] = True
        return fresh

    def _reserve(self, rows: int, width: int) -> None:
        have_rows, have_width = self.ids.shape
        if rows > have_rows or width > have_width:
            shape = (max(rows, have_rows * 2), max(width, have_width * 2))
            self.ids = np.zeros(shape, dtype=np.int32)
            self._known = [()] * shape[0]
            self._used = np.zeros(shape[0], dtype=np.int64)
            self._ends = np.full(shape[0], -1, dtype=np.int64)
