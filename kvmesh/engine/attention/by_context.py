"""Attention of ranks that share the tokens of a context (`kvmesh.engine.context`): dcp, cp, or both.

Each rank's pages hold its own tokens alone. What a rank computes of a step are all tokens over dcp, for its heads, and
a share of the tokens over cp. For each layer:

    1  cp: K and V of the step's tokens are gathered; each rank writes those whose turn is its own
    2  queries with a context in pages are gathered: heads over dcp, tokens over cp
    3  each rank attends to its own tokens, for all of these, and tells the log of the sum of weights
    4  what was found goes to the rank whose tokens and heads it is (all-to-all), which joins it
    5  queries of a chunk attend to the chunk's K and V, which are here whole, and that is joined with 4

The context in pages is what was there before a chunk, so that all queries of a chunk see the same of it; a sequence of
one token, as every decode row is, sees itself in the pages, and has no step 5. Sinks are counted in the last join.
Ranks take the same decisions from the same lengths: who sends what is never told.

First form: layers with a window, or with states, are refused (`parallel.check_shares`); steps are not replayed from
graphs; on a GPU parts are attended to by torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvmesh.engine import ops
from kvmesh.engine.attention.backend import AttentionBackend, StepPlan, StepTables, TokenSpan
from kvmesh.engine.attention.latent import LatentBackend
from kvmesh.engine.attention.parts import (
    AttendedPart,
    ContextTable,
    QueryRun,
    expanded_chunk,
    join_parts,
    part_backend,
)
from kvmesh.engine.batch import Integers
from kvmesh.engine.context import ContextShare, zigzag
from kvmesh.engine.parallel import Group, RankMesh
from kvmesh.engine.rope import Rotation
from kvmesh.errors import InternalError

Column = npt.NDArray[np.int64]


class Sequences(NamedTuple):
    """Are the requests of a step: sequence i computes `lengths[i]` tokens from `starts[i]` on."""

    starts: Column
    lengths: Column

    @property
    def firsts(self) -> Column:
        """The step's number of each sequence's first token."""
        firsts: Column = np.cumsum(self.lengths) - self.lengths
        return firsts

    @property
    def in_pages(self) -> Column:
        """How many tokens of each sequence its queries look for in pages."""
        seen: Column = self.starts + (self.lengths == 1)
        return seen


class Deal(NamedTuple):
    """Says which of a step's tokens one rank of cp computes: `tokens`, their numbers in the step, and `counts[i]`, how
    many are of sequence i. They are in the order of sequences, and ascend within one."""

    tokens: Column
    counts: Column


def deal_tokens(sequences: Sequences, ranks: int) -> tuple[Deal, ...]:
    """Deals a step's tokens over the ranks of cp: chunks zig-zag, sequences of one token in turn."""
    deals = []
    for rank in range(ranks):
        tokens, counts = [np.zeros(0, dtype=np.int64)], []
        for number, (first, length) in enumerate(zip(sequences.firsts, sequences.lengths, strict=True)):
            if length == 1:
                own = np.arange(first, first + (number % ranks == rank))
            else:
                own = first + np.concatenate(
                    [np.arange(run.start, run.stop) for run in zigzag(int(length), ranks)[rank]]
                )
            tokens.append(own)
            counts.append(len(own))
        deals.append(Deal(np.concatenate(tokens), np.array(counts, dtype=np.int64)))
    return tuple(deals)


class ContextAttention:
    """Attends over the pages of `backend`, which hold this rank's share of every context; it has a page table for each
    request that is the same at every rank (`kvmesh.engine.context`). Plans are valid until the next one is made."""

    capturable = False

    def __init__(self, backend: AttentionBackend, mesh: RankMesh) -> None:
        self.backend, self.parts = backend, part_backend(backend)
        self.share = ContextShare.of(mesh.axes, mesh.rank, backend.block_tokens)
        self.group: Group = mesh.group("cp", "dcp")
        self.cp: Group = mesh.group("cp")
        self.dcp = self.parts.heads_times = mesh.axes.dcp
        if self.group.size != self.share.turns:
            raise InternalError(f"{self.group.size} ranks share a context by {self.share.turns} turns")
        self.specs, self.device, self.dtype = backend.specs, backend.device, backend.dtype
        self.num_heads, self.kv_heads, self.head_dim = backend.num_heads, backend.kv_heads, backend.head_dim
        self.block_tokens = backend.block_tokens
        self.table = ContextTable(backend)

    @property
    def most_tokens(self) -> int | None:
        """The tokens of the longest request that finds room at all ranks together."""
        return self.backend.num_pages * self.block_tokens * self.share.turns

    def plan_mixed(
        self,
        pages: Sequence[Sequence[int]],
        positions: Integers,
        spans: Sequence[TokenSpan],
        drafted: Integers | None = None,
    ) -> ContextPlan:
        """Plans one step of decode rows and spans, as `AttentionBackend.plan_mixed` does; `drafted` are the rows of
        each request, as of `plan_drafts`."""
        starts = np.array([*np.asarray(positions, dtype=np.int64), *(span.start for span in spans)], dtype=np.int64)
        lengths = np.array([*[1] * len(pages), *(span.length for span in spans)], dtype=np.int64)
        tables = [*pages, *(span.pages for span in spans)]
        return ContextPlan(self, Sequences(starts, lengths), tables, drafted)

    def plan_drafts(
        self, pages: Sequence[Sequence[int]], positions: Integers, lengths: Integers, spans: Sequence[TokenSpan]
    ) -> ContextPlan:
        """Plans as `AttentionBackend.plan_drafts` does: what a row of a draft sees here follows from its own
        position. A backend may read what lies here once for all rows of a request."""
        return self.plan_mixed(pages, positions, spans, lengths)

    def plan_prefill(self, spans: Sequence[TokenSpan]) -> ContextPlan:
        return self.plan_mixed((), (), spans)

    def plan_decode(self, pages: Sequence[Sequence[int]], positions: Integers) -> ContextPlan:
        return self.plan_mixed(pages, positions, ())

    def step_tables(self, rows: int, width: int) -> StepTables:
        raise InternalError("steps of ranks that share a context are not replayed")

    def replayed(self, tables: StepTables, rows: int) -> StepPlan:
        raise InternalError("steps of ranks that share a context are not replayed")

    def inputs(self, tokens: int) -> torch.Tensor:
        return self.backend.inputs(tokens)

    def answer(self, qkv: torch.Tensor) -> torch.Tensor:
        return self.backend.answer(qkv)

    def index(self, numbers: Column) -> torch.Tensor:
        """Copies an array to the device without waiting for the copy."""
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(self.device, non_blocking=True)


class ContextPlan(StepPlan):
    """Attends for one step. `positions` are those of the step's tokens that this rank computes."""

    def __init__(
        self,
        attention: ContextAttention,
        sequences: Sequences,
        pages: Sequence[Sequence[int]],
        drafted: Integers | None = None,
    ) -> None:
        self.attention, self.sequences = attention, sequences
        self._owners = np.arange(len(pages))  # whose table each sequence has: a request's rows have the first one's
        if drafted is not None:
            rows = np.asarray(drafted, np.int64)
            self._owners[: rows.sum()] = np.repeat(np.cumsum(rows) - rows, rows)
        share, ranks, rank = attention.share, attention.cp.size, attention.cp.rank
        ends = sequences.starts + sequences.lengths
        attention.table.update(pages, share.local_lens(ends))
        self.deals = deal_tokens(sequences, ranks)
        own = self.deals[rank]
        numbers = np.concatenate([deal.tokens for deal in self.deals])  # in the order in which ranks are gathered
        where = np.repeat(sequences.starts - sequences.firsts, sequences.lengths) + np.arange(len(numbers))
        self.positions = attention.index(where[own.tokens])
        self.own = attention.index(own.tokens) if ranks > 1 else None
        self.counts = [len(deal.tokens) for deal in self.deals]
        back = np.empty_like(numbers)
        back[numbers] = np.arange(len(numbers))
        # Where each of the step's tokens is in what is gathered.
        self.back = attention.index(back) if ranks > 1 else None
        self._plan_writes(numbers, where[numbers])
        self._plan_queries()
        self._plan_chunks(own)
        self._kv: torch.Tensor | None = None  # of all tokens of the step, of the layer that was written last

    def _plan_writes(self, numbers: Column, where: Column) -> None:
        """Finds the slots of those tokens that are to lie here, among the tokens in the order in which they are
        gathered, and clears what lies behind them in the last page, here with or without a token."""
        attention, table = self.attention, self.attention.table.ids
        share, block = attention.share, attention.block_tokens
        rows = np.repeat(np.arange(len(self.sequences.lengths)), self.sequences.lengths)[numbers]
        kept = np.flatnonzero(share.here(where))
        local = share.local_lens(where[kept])
        pages = table[rows[kept], local // block].astype(np.int64)
        self.kept = None if len(kept) == len(numbers) and attention.cp.size == 1 else attention.index(kept)
        self.slots = (attention.index(pages), attention.index(local % block))
        starts, lengths = self.sequences.starts, self.sequences.lengths
        last = (starts + lengths - 1) // (share.turns * block)
        filled = share.local_lens(starts + lengths) - last * block  # of the last page: none, where a turn has not come
        # A row that goes on within a page found it cleared.
        begun = (lengths > 1) | (starts == last * share.turns * block)
        for row in np.flatnonzero(begun & (filled < block)).tolist():
            attention.backend.zero_tail(int(table[row, last[row]]), int(filled[row]))

    def _plan_queries(self) -> None:
        """Finds the queries that look for tokens in pages, anywhere, and what of these they see here."""
        attention, sequences = self.attention, self.sequences
        seen = attention.share.local_lens(sequences.in_pages)
        asks = sequences.in_pages > 0
        runs, first, self.asking_counts = [], 0, []
        for deal in self.deals:
            before = first
            for row in np.flatnonzero(asks & (deal.counts > 0)).tolist():
                runs.append(QueryRun(first, int(deal.counts[row]), int(self._owners[row]), int(seen[row])))
                first += int(deal.counts[row])
            self.asking_counts.append(first - before)
        own = self.deals[attention.cp.rank]
        asking = np.repeat(asks, own.counts)
        self.anyone_asks, self.all_ask = bool(asks.any()), bool(asks.all())
        self.asking = None if self.all_ask else attention.index(np.flatnonzero(asking))
        if self.anyone_asks:
            attention.parts.plan(runs, attention.table.ids)

    def _plan_chunks(self, own: Deal) -> None:
        """Lists, of each chunk, which of the tokens in the order of the step are its K and V, and this rank's runs of
        queries: (first of its own tokens, how many, the first one's number in the chunk)."""
        self.chunks: list[tuple[slice, list[tuple[slice, int]]]] = []
        at = 0
        for first, length, count in zip(self.sequences.firsts, self.sequences.lengths, own.counts, strict=True):
            mine = own.tokens[at : at + count] - first
            if length > 1 and count:
                cuts = [0, *(np.flatnonzero(np.diff(mine) > 1) + 1).tolist(), int(count)]
                runs = [(slice(at + begin, at + end), int(mine[begin])) for begin, end in pairwise(cuts)]
                self.chunks.append((slice(int(first), int(first + length)), runs))
            at += int(count)

    # ── a layer ──

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        backend, attention = self.attention.backend, self.attention
        kv = backend.split(qkv)[1] if isinstance(backend, LatentBackend) else qkv[:, backend.num_heads :]
        if attention.cp.size > 1:
            kv = attention.cp.gather_rows(kv.contiguous(), self.counts)
        kept = kv if self.kept is None else kv.index_select(0, self.kept)
        pages, slots = self.slots
        backend.pages[:, layer][pages, :, :, slots] = kept.reshape(-1, *backend.pages.shape[2:4], backend.head_dim)
        self._kv = kv if self.back is None else kv.index_select(0, self.back)

    def rotate_and_write(self, layer: int, qkv: torch.Tensor, rotation: Rotation) -> None:
        backend = self.attention.backend
        if isinstance(backend, LatentBackend):
            backend.rotate(qkv, rotation)
        else:
            ops.rotate_heads(qkv, rotation)
        self.write(layer, qkv)

    def attend(self, layer: int, qkv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        attention, sinks = self.attention, self.attention.specs[layer].sinks
        found = self._in_pages(layer, qkv, None if self.chunks else sinks)
        if self.chunks:
            found = self._with_chunks(layer, qkv, found, sinks)
        assert found is not None, "a sequence looks into pages or is a chunk"
        out = attention.answer(qkv) if out is None else out
        out.view(found.values.shape).copy_(found.values)
        return out

    def _in_pages(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None) -> AttendedPart | None:
        """Returns what this rank's queries that ask find in the pages of all ranks."""
        if not self.anyone_asks:
            return None
        backend = self.attention.backend
        asked = qkv if self.asking is None else qkv.index_select(0, self.asking)
        if isinstance(backend, LatentBackend):
            up = backend.ups[layer]
            found = self._over_ranks(layer, up.absorb(backend.split(asked)[0]), sinks)
            return AttendedPart(up.values(found.values.to(qkv.dtype)).float(), found.lse)
        return self._over_ranks(layer, asked[:, : backend.num_heads], sinks)

    def _over_ranks(self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None) -> AttendedPart:
        """Returns what queries `[T, H, D]` of this rank find in the pages of all ranks, joined."""
        attention, heads = self.attention, q.shape[1]
        if attention.group.size == 1:
            return join_parts(AttendedPart(*(x[None] for x in attention.parts.attend(layer, q))), sinks)
        rows = [count * heads for count in self.asking_counts for _ in range(attention.dcp)]
        gathered = attention.group.gather_rows(q.reshape(-1, q.shape[-1]), rows)
        found = attention.parts.attend(layer, self._by_token(gathered, rows, heads))
        both = torch.cat((found.values, found.lse[..., None]), -1)
        sent = []
        for tokens in torch.split(both, self.asking_counts):
            sent += [part.reshape(-1, both.shape[-1]) for part in torch.split(tokens, heads, 1)]
        mine = attention.group.all_to_all(torch.cat(sent), rows, [len(q) * heads] * len(rows))
        mine = mine.view(len(rows), len(q), heads, both.shape[-1])
        return join_parts(AttendedPart(mine[..., :-1], mine[..., -1]), sinks)

    def _by_token(self, gathered: torch.Tensor, rows: Sequence[int], heads: int) -> torch.Tensor:
        """Returns `[T, heads of all of dcp, D]` of the ranks' rows of tokens and heads."""
        dcp = self.attention.dcp
        if dcp == 1:
            return gathered.view(-1, heads, gathered.shape[-1])
        parts = [part.view(-1, heads, part.shape[-1]) for part in torch.split(gathered, list(rows))]
        tokens = [torch.cat(parts[at : at + dcp], 1) for at in range(0, len(parts), dcp)]
        return tokens[0] if len(tokens) == 1 else torch.cat(tokens)

    def _with_chunks(
        self, layer: int, qkv: torch.Tensor, before: AttendedPart | None, sinks: torch.Tensor | None
    ) -> AttendedPart:
        """Returns what all of this rank's queries find: in the pages, and in the chunk that they are of."""
        backend, parts, kv = self.attention.backend, self.attention.parts, self._kv
        assert kv is not None, "write comes first"
        width = backend.sizes.value if isinstance(backend, LatentBackend) else backend.head_dim
        found = AttendedPart.empty(len(qkv), backend.num_heads, width, qkv.device)
        q = backend.split(qkv)[0] if isinstance(backend, LatentBackend) else qkv[:, : backend.num_heads]
        for tokens, runs in self.chunks:
            for own, first in runs:
                seen = kv[tokens][: first + own.stop - own.start]
                if isinstance(backend, LatentBackend):
                    part = expanded_chunk(parts, layer, q[own], seen, backend.ups[layer], first)
                else:
                    part = parts.chunk(layer, q[own], seen[:, : backend.kv_heads], seen[:, backend.kv_heads :], first)
                found.values[own], found.lse[own] = part
        if before is None:
            return join_parts(AttendedPart(*(x[None] for x in found)), sinks)
        if self.asking is not None:
            asked, before = before, AttendedPart.empty(len(qkv), backend.num_heads, width, qkv.device)
            before.values[self.asking], before.lse[self.asking] = asked
        return join_parts(AttendedPart(*(torch.stack(both) for both in zip(before, found, strict=True))), sinks)
