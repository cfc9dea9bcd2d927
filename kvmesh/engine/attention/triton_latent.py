"""Latent attention on CUDA: Triton's kernels over the pages where they lie, and decode steps that can be captured.

Decode is absorbed and has its tables and lists of shares from `triton_backend`. A chunk of a prompt is absorbed, too,
token by token as if each were a row, where it is so short that this costs fewer operations (`absorbed_costs_less`).
Longer ones have K and V written out: the contexts of all such spans of a step, end to end, go through a workspace of
`PIECE_TOKENS` tokens, for as many heads at a time as `WORKSPACE_BYTES` hold, and the softmax goes on from piece to
piece (`kernels.latent_prefill`). So a layer's scratch is bound, however long contexts are: by `scratch_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvmesh.engine.attention.backend import MixedPlan, SpanTokens, StepPlan, StepTables, TokenSpan
from kvmesh.engine.attention.latent import LatentBackend, UpProjection, absorbed_costs_less
from kvmesh.engine.attention.triton_backend import (
    DecodeStep,
    DecodeTables,
    LaunchedTables,
    ShareSizes,
    capability_of,
    processors_of,
    sent,
    table_of,
)
from kvmesh.engine.batch import Integers
from kvmesh.engine.config_latent import PIECE_TOKENS, WORKSPACE_BYTES, LatentConfig, written_out_bytes
from kvmesh.engine.kernels.decode import longest_share, queries_for, scratch_elements, shares_of, tiles_of
from kvmesh.engine.kernels.latent_decode import LatentVariant, head_tiles, latent_decode, variant_for
from kvmesh.engine.kernels.latent_prefill import ENTRY, expanded_variant, latent_prefill, state_elements
from kvmesh.engine.kernels.latent_write import rotate_and_write_latents
from kvmesh.engine.rope import Rotation


class TritonLatent(LatentBackend):
    """Attends through Triton's kernels. `decode_tables` serve the steps that are not replayed, and grow with the batch;
    `variant` and `expanded` are the sizes of programs. `absorbed_times`: how many times as long as an operation over K
    and V that are written out one of the absorbed kernel takes."""

    capturable = True
    absorbed_times = 1.5  # of an H200, 128 heads behind 65,536 tokens: 1.3 for 64 queries, 1.6 for 256

    def __init__(self, pages: torch.Tensor, sizes: LatentConfig, ups: Sequence[UpProjection]) -> None:
        super().__init__(pages, sizes, ups)
        self._capability = capability = capability_of(self.device)
        self.variant = variant_for(self.num_heads, self.latent, pages.element_size(), capability)
        self.expanded = expanded_variant(pages.element_size(), capability)
        self.processors = processors_of(self.device)
        self.windows = [(0, 0)]
        self.tile, self.resident = self.variant.keys, self.variant.resident
        self.share_programs, self.share_dim = max(1, head_tiles(self.num_heads, self.variant)), self.latent
        self.decode_tables = LaunchedTables(self)

    def queries_for(self, rows: int, times: int = 1) -> int:
        return queries_for(rows, 1)  # their heads are cut into tiles anyway

    def variant_of(self, queries: int) -> LatentVariant:
        """Returns the sizes of programs that compute requests of up to so many rows."""
        if queries == 1:
            return self.variant
        return variant_for(self.num_heads * queries, self.latent, self.dtype.itemsize, self._capability)

    def share_sizes(self, queries: int) -> ShareSizes:
        if queries == 1:
            return ShareSizes(self.share_programs, self.resident, self.tile)
        variant = self.variant_of(queries)
        return ShareSizes(max(1, head_tiles(self.num_heads * queries, variant)), variant.resident, variant.keys)

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        return sent(array, self.device)

    def plan_prefill(self, spans: Sequence[TokenSpan]) -> TritonLatentPrefill:
        return TritonLatentPrefill(self, spans)

    def plan_decode(self, pages: Sequence[Sequence[int]], positions: Integers) -> TritonLatentDecode:
        return TritonLatentDecode(self, self.decode_tables.filled(pages, positions), len(pages))

    def plan_drafts(
        self, pages: Sequence[Sequence[int]], positions: Integers, lengths: Integers, spans: Sequence[TokenSpan]
    ) -> StepPlan:
        """Plans the rows of a request as one of its list of work."""
        if not pages:
            return self.plan_prefill(spans)
        decode = TritonLatentDecode(self, self.decode_tables.filled(pages, positions, lengths), len(pages))
        return TritonLatentMixed(self, decode, self.plan_prefill(spans), len(pages)) if spans else decode

    def plan_mixed(self, pages: Sequence[Sequence[int]], positions: Integers, spans: Sequence[TokenSpan]) -> StepPlan:
        if not spans or not pages:
            return super().plan_mixed(pages, positions, spans)
        return TritonLatentMixed(self, self.plan_decode(pages, positions), self.plan_prefill(spans), len(pages))

    def step_tables(self, rows: int, width: int, request_rows: int = 1) -> DecodeTables:
        return DecodeTables(self, rows, width, self.queries_for(request_rows))

    def replayed(self, tables: StepTables, rows: int) -> TritonLatentDecode:
        assert isinstance(tables, DecodeTables)
        return TritonLatentDecode(self, tables, rows, replayed=True)

    def attend_absorbed(
        self,
        layer: int,
        q: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor],
        shares: tuple[torch.Tensor, torch.Tensor | None],
        scratch: torch.Tensor,
        out: torch.Tensor,
        requests: torch.Tensor | None = None,
        queries: int = 1,
    ) -> None:
        """Fills `out [T, H * V]` for queries `[T, H, nope + rope]`, not absorbed yet. `tables`: pages, owners and
        lengths, `shares`: work and joins, and `requests` and `queries` as of `latent_decode`."""
        up, nope = self.ups[layer], self.sizes.nope
        if not self.num_heads:
            return
        absorbed = torch.bmm(q[..., :nope].transpose(0, 1), up.key).transpose(0, 1)
        means = q.new_empty(len(q), self.num_heads, self.latent)
        pages = self.layers[layer]
        latent_decode(
            absorbed, q[..., nope:], pages, *tables, *shares, self.scale, scratch, means, self.variant_of(queries),
            requests=requests, queries=queries,
        )  # fmt: skip
        answers = out.view(len(out), self.num_heads, up.value_dim).transpose(0, 1)
        torch.bmm(means.transpose(0, 1), up.value.transpose(1, 2), out=answers)

    def heads_at_once(self, tokens: int, queries: int) -> int:
        """Returns for how many heads K and V are written out at a time, of so many tokens, where so many queries go on
        from piece to piece: all that WORKSPACE_BYTES hold, in parts of one size, one at least."""
        of_token = (self.sizes.nope + self.sizes.value) * self.dtype.itemsize
        of_head = tokens * of_token + queries * (self.sizes.value + 1) * 4
        parts = -(-self.num_heads // max(1, WORKSPACE_BYTES // max(1, of_head)))
        return max(1, -(-self.num_heads // max(1, parts)))

    def scratch_bytes(self, queries: int) -> int:
        """Returns what writing out K and V takes at most beside a step of so many queries, in one layer."""
        return written_out_bytes(self.sizes, queries, self.dtype.itemsize, PIECE_TOKENS, WORKSPACE_BYTES)


class TritonLatentPlan(StepPlan):
    """Writes the rows of a step's tokens in one launch, norm and rotation included. `slots` int32 `[T]` as of
    `kernels.write.write_kv`."""

    backend: TritonLatent
    slots: torch.Tensor

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        self._write(layer, qkv, None)

    def rotate_and_write(self, layer: int, qkv: torch.Tensor, rotation: Rotation) -> None:
        self._write(layer, qkv, rotation)

    def _write(self, layer: int, qkv: torch.Tensor, rotation: Rotation | None) -> None:
        backend, sizes = self.backend, self.backend.sizes
        rotate_and_write_latents(
            qkv,
            backend.layers[layer],
            self.slots,
            backend.num_heads,
            sizes.nope,
            sizes.latent,
            rotation,
            sizes.interleaved,
        )


class TritonLatentDecode(DecodeStep, TritonLatentPlan):
    """Attends for the rows of a `DecodeStep`."""

    def __init__(self, backend: TritonLatent, tables: DecodeTables, rows: int, replayed: bool = False) -> None:
        DecodeStep.__init__(self, tables, rows, replayed)
        self.backend = backend

    def attend(self, layer: int, qkv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        backend, tables = self.backend, self.tables
        out = backend.answer(qkv) if out is None else out
        q = backend.split(qkv)[0]
        where = (tables.table.device, None, self.lengths)
        shares = self.shares((0, 0))
        backend.attend_absorbed(layer, q, where, shares, tables.scratch, out, tables.requests, tables.queries)
        return out


class AbsorbedRun(NamedTuple):
    """Lists the work of spans that follow each other and are absorbed: their queries are `rows` of the step."""

    rows: slice
    tables: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
    shares: tuple[torch.Tensor, torch.Tensor | None]
    slots: int


class ContextPiece(NamedTuple):
    """Is one filling of the workspace: pages and slots of the rows that are gathered, and the list of work."""

    page_ids: torch.Tensor
    slots: torch.Tensor
    work: torch.Tensor


class TritonLatentPrefill(TritonLatentPlan):
    """Is the plan of a ragged batch of spans."""

    def __init__(self, backend: TritonLatent, spans: Sequence[TokenSpan]) -> None:
        self.backend, block = backend, backend.block_tokens
        tokens = SpanTokens.of(backend, spans)
        self.positions = backend.tensor(tokens.positions)
        self.slots = backend.tensor((tokens.page_ids * block + tokens.positions % block).astype(np.int32))
        self.runs: list[AbsorbedRun] = []
        self.pieces: list[ContextPiece] = []
        self.queries = 0  # of spans that are written out
        few = [absorbed_costs_less(span, backend.sizes, backend.absorbed_times) for span in spans]
        lengths = [span.length for span in spans]
        firsts = [sum(lengths[:at]) for at in range(len(spans))]
        written = [at for at in range(len(spans)) if not few[at]]
        if written:
            self._write_out([spans[at] for at in written], [tokens.ids[at] for at in written],
                            [firsts[at] for at in written])  # fmt: skip
        at = 0
        while at < len(spans):
            end = at
            while end < len(spans) and few[end]:
                end += 1
            if end > at:
                rows = slice(firsts[at], firsts[end - 1] + lengths[end - 1])
                self.runs.append(self._run(rows, tokens.positions[rows], tokens.ids[at:end], lengths[at:end]))
            at = max(end, at + 1)

    def _run(
        self, rows: slice, positions: np.ndarray, ids: Sequence[np.ndarray], lengths: Sequence[int]
    ) -> AbsorbedRun:
        backend, seen = self.backend, positions + 1
        _, tiles = tiles_of(seen, 0, backend.tile)
        longest = longest_share(tiles, backend.share_programs, backend.processors, backend.resident)
        work, joins = shares_of(seen, 0, backend.tile, longest)
        # Rows of one share leave nothing to be joined: slots are counted without them.
        counts = np.where(joins[:, 1] > 1, joins[:, 1], 0)
        moved = np.cumsum(counts) - counts
        split = work[:, 3] >= 0
        work[split, 3] += (moved - joins[:, 0])[work[split, 0]].astype(np.int32)
        joins[:, 0] = moved
        owners = np.repeat(np.arange(len(ids), dtype=np.int32), lengths)
        tables = (table_of(ids), owners, seen.astype(np.int32))
        table, owner, ends = (backend.tensor(array) for array in tables)
        joined = backend.tensor(joins) if split.any() else None
        return AbsorbedRun(rows, (table, owner, ends), (backend.tensor(work), joined), int(counts.sum()))

    def _write_out(self, spans: Sequence[TokenSpan], ids: Sequence[np.ndarray], firsts: Sequence[int]) -> None:
        """Cuts the contexts of spans into pieces of the workspace, in order; `firsts` are the spans' first queries."""
        backend, block, most = self.backend, self.backend.block_tokens, self.backend.expanded.queries
        rows: list[
            tuple[np.ndarray, np.ndarray]
        ] = []  # of the piece that is being filled: pages and slots, and the list of work
        work: list[tuple[int, ...]] = []
        filled = 0

        def end_piece() -> None:
            nonlocal filled
            page_ids, slots = (np.concatenate(part) for part in zip(*rows, strict=True))
            array = np.array(work, dtype=np.int32).reshape(-1, ENTRY)
            # The longest first; entries with no query in common may run in any order.
            array = array[np.argsort(array[:, 4] - array[:, 5], kind="stable")]
            self.pieces.append(ContextPiece(*(backend.tensor(part) for part in (page_ids, slots, array))))
            rows.clear()
            work.clear()
            filled = 0

        for span, own, first in zip(spans, ids, firsts, strict=True):
            end, begin = span.start + span.length, 0
            while begin < end:
                if filled == PIECE_TOKENS:
                    end_piece()
                until = min(end, begin + PIECE_TOKENS - filled)
                where = np.arange(begin, until)
                rows.append((own[where // block], where % block))
                for at in range(0, span.length, most):
                    position, count = span.start + at, min(most, span.length - at)
                    if position + count <= begin:
                        continue
                    last = min(until, position + count)
                    work.append((first + at, position, count, filled, begin, last, begin > 0, last == position + count))
                filled += until - begin
                begin = until
        if rows:
            end_piece()
        if len(self.pieces) > 1:
            self.queries = len(self.positions)

    def attend(self, layer: int, qkv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        backend, sizes = self.backend, self.backend.sizes
        out = backend.answer(qkv) if out is None else out
        q, heads = backend.split(qkv)[0], backend.num_heads
        for run in self.runs:
            need = scratch_elements(run.slots, heads, backend.latent)
            scratch = torch.empty(need, dtype=torch.float32, device=backend.device)
            backend.attend_absorbed(layer, q[run.rows], run.tables, run.shares, scratch, out[run.rows])
        if not self.pieces or not heads:
            return out
        longest = max(len(piece.slots) for piece in self.pieces)
        some = backend.heads_at_once(longest, self.queries)
        need = state_elements(self.queries, some, sizes.value)
        state = torch.empty(need, dtype=torch.float32, device=backend.device)
        workspace = out.new_empty(longest, some * (sizes.nope + sizes.value))
        widths = (sizes.nope, sizes.rope, sizes.latent, sizes.value)
        for first in range(0, heads, some):
            own = slice(first, min(first + some, heads))
            weight = backend.ups[layer].weight[own].flatten(0, 1)
            target = out[:, own.start * sizes.value : own.stop * sizes.value]
            for piece in self.pieces:
                lines = backend.layers[layer][piece.page_ids, piece.slots]
                room = workspace.view(-1)[: len(lines) * len(weight)].view(len(lines), len(weight))
                torch.mm(lines[:, : sizes.latent], weight.T, out=room)
                latent_prefill(
                    q[:, own], lines, room, piece.work, state, backend.scale, target, widths, backend.expanded
                )
        return out


class TritonLatentMixed(TritonLatentPlan, MixedPlan):
    """Writes the rows of decode's tokens and of spans together."""

    backend: TritonLatent

    def __init__(
        self, backend: TritonLatent, decode: TritonLatentDecode, prefill: TritonLatentPrefill, rows: int
    ) -> None:
        MixedPlan.__init__(self, backend, decode, prefill, rows)
        self.slots = torch.cat((decode.slots, prefill.slots))
