"""Attention to parts of a context, and how such parts become one answer.

Of a part, a query finds the mean of the values by its own weights, and the log of the sum of these (`lse`). Parts are
joined by that log, exactly: the weight of a part is exp(lse - that of all). A part without tokens has lse = -inf and
weighs nothing; a sink is a logit without a value, and belongs to no part: it is counted once, where parts are joined.

Shapes: T queries, H query heads, K KV heads (H is a multiple of K), D and V the widths of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from kvmesh.engine.attention.backend import AttentionBackend, PagedMemory
from kvmesh.engine.attention.latent import LatentBackend, UpProjection
from kvmesh.engine.attention.native_backend import NativeAttention
from kvmesh.engine.attention.native_latent import NativeLatent
from kvmesh.engine.config import AttentionSpec
from kvmesh.errors import InternalError

Column = npt.NDArray[np.int64]
SCORE_ELEMENTS = 8 * 2**20  # of a tile's scores
TILE_TOKENS = 512  # of a context that are gathered at a time


class AttendedPart(NamedTuple):
    """What queries found in a part of their context: `values [..., T, H, V]` and `lse [..., T, H]`, float32."""

    values: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def empty(cls, queries: int, heads: int, width: int, device: torch.device) -> AttendedPart:
        """Returns what is found where there are no tokens."""
        lse = torch.full((queries, heads), -torch.inf, device=device)
        return cls(torch.zeros(queries, heads, width, device=device), lse)


def join_parts(parts: AttendedPart, sinks: torch.Tensor | None = None) -> AttendedPart:
    """Joins `values [P, T, H, V]` and `lse [P, T, H]` of P parts. `sinks`, float32 `[H]`, takes part in the softmax
    once. A query that found nothing anywhere has zeros."""
    lse = parts.lse
    if sinks is not None:
        lse = torch.cat((lse, sinks.expand(1, *lse.shape[1:])))
    top = lse.amax(0)
    base = top.masked_fill(top == -torch.inf, 0.0)  # of nothing at all: -inf - -inf would be NaN
    total = (lse - base).exp_().sum(0).log_().add_(base)
    found = total.masked_fill(top == -torch.inf, 0.0)
    weights = (parts.lse - found).exp_()
    return AttendedPart(torch.einsum("pth,pthv->thv", weights, parts.values), total)


def dense_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float = 0.0, first: int | None = None
) -> AttendedPart:
    """Attends for queries `[T, H, D]` to keys `[n, K, D]` and values `[n, K, V]`: to all of them, or, where `first` is
    given, query i to those up to number `first` + i."""
    queries, heads, _ = q.shape
    count, kv_heads, width = v.shape
    if not count or not queries:
        return AttendedPart.empty(queries, heads, width, q.device)
    keys, values = k.float().permute(1, 2, 0), v.float().transpose(0, 1)  # [K, D, n] and [K, n, V]
    found = AttendedPart.empty(queries, heads, width, q.device)
    tile = max(1, SCORE_ELEMENTS // (heads * count))
    for at in range(0, queries, tile):
        own = q[at : at + tile].float() * scale
        rows = len(own)
        grouped = own.view(rows, kv_heads, -1, own.shape[-1]).permute(1, 2, 0, 3)  # [K, G, rows, D]
        scores = torch.matmul(grouped, keys[:, None])
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        if first is not None:
            scores += torch.full((rows, count), -torch.inf, device=q.device).triu_(first + at + 1)
        lse = scores.logsumexp(-1)
        mean = torch.matmul((scores - lse[..., None]).exp_(), values[:, None])  # [K, G, rows, V]
        found.values[at : at + rows] = mean.permute(2, 0, 1, 3).reshape(rows, heads, width)
        found.lse[at : at + rows] = lse.permute(2, 0, 1).reshape(rows, heads)
    return found


class QueryRun(NamedTuple):
    """Is `queries` queries from number `first` on that see the first `seen` tokens of request `row` that lie here."""

    first: int
    queries: int
    row: int
    seen: int


class ContextTable:
    """Keeps the page tables of a step's requests, int32 `[rows or more, pages or more]`, from step to step: a table
    that is the same object is not looked into."""

    def __init__(self, memory: PagedMemory) -> None:
        self._memory = memory
        self.ids: npt.NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)
        self._known: list[tuple[int, ...]] = []
        self._counts: Column = np.zeros(0, dtype=np.int64)

    def update(self, pages: Sequence[Sequence[int]], ends: Column) -> None:
        """Takes the pages of the step's requests, of which request i has `ends[i]` tokens here. Raises InternalError
        where these have no room, or where a page does not exist."""
        rows, width = len(pages), max(map(len, pages), default=0)
        have_rows, have_width = self.ids.shape
        if rows > have_rows or width > have_width:
            shape = (max(rows, 2 * have_rows), max(width, 2 * have_width))
            self.ids, self._known = np.zeros(shape, dtype=np.int32), [()] * shape[0]
            self._counts = np.zeros(shape[0], dtype=np.int64)
        for row, own in enumerate(pages):
            if own is self._known[row] or tuple(own) == self._known[row]:
                continue
            ids = np.asarray(own, dtype=np.int64)
            if len(ids) and not 0 <= ids.min() <= ids.max() < self._memory.num_pages:
                raise InternalError(
                    f"page ids {ids.min()}..{ids.max()} are outside 0..{self._memory.num_pages - 1}: "
                    "a context that ranks share has no holes"
                )
            self.ids[row, : len(ids)] = ids
            self._known[row], self._counts[row] = tuple(own), len(ids)
        short = ends > self._counts[:rows] * self._memory.block_tokens
        if short.any():
            row = int(short.argmax())
            raise InternalError(f"{ends[row]} tokens of a rank need more than {self._counts[row]} pages")


class PartBackend:
    """Attends to parts of contexts in the pages of `backend`, through torch on any device. `plan` says what the queries
    of a step see; `attend` then serves every layer. Layers have no windows: see `by_context`. `heads_times`: how many
    ranks' heads ask at once."""

    heads_times = 1

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend, self.specs = backend, backend.specs
        self.runs: Sequence[QueryRun] = ()
        self.width = backend.head_dim  # of values

    def plan(self, runs: Sequence[QueryRun], table: npt.NDArray[np.int32]) -> None:
        """Takes the runs of a step, whose queries may see nothing, and the table of its requests."""
        self.runs, device, block = runs, self.backend.device, self.backend.block_tokens
        self.ids = [
            torch.from_numpy(table[run.row, : -(-run.seen // block)].astype(np.int64)).to(device) for run in runs
        ]

    def attend(self, layer: int, q: torch.Tensor) -> AttendedPart:
        """Returns what queries `[T, H, D]` find in a layer's pages; a query that is in no run finds nothing."""
        spec = self.specs[layer]
        found = AttendedPart.empty(len(q), q.shape[1], self.width, q.device)
        for run, ids in zip(self.runs, self.ids, strict=True):
            if not run.seen:
                continue
            own = slice(run.first, run.first + run.queries)
            tiles = []
            step = max(1, TILE_TOKENS // self.backend.block_tokens)
            for at in range(0, len(ids), step):
                kv = self.tokens(layer, ids[at : at + step], run.seen - at * self.backend.block_tokens)
                tiles.append(dense_part(q[own], *kv, spec.scale, spec.softcap))
            part = tiles[0]
            if len(tiles) > 1:
                part = join_parts(AttendedPart(*(torch.stack(both) for both in zip(*tiles, strict=True))))
            found.values[own], found.lse[own] = part
        return found

    def tokens(self, layer: int, ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V `[n, K, D]` of the first `count` tokens of these pages."""
        pages = self.backend.pages[:, layer].index_select(0, ids)  # [n, 2, K, block, D]
        k, v = pages.permute(1, 0, 3, 2, 4).reshape(2, -1, *pages.shape[2:3], pages.shape[4]).unbind()
        return k[:count], v[:count]

    def chunk(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int) -> AttendedPart:
        """Returns what queries `[T, H, D]` of a chunk find in the chunk itself, keys `[n, K, D]` and values `[n, K,
        V]`: query i sees those up to number `first` + i."""
        return dense_part(q, k, v, self.specs[layer].scale, self.specs[layer].softcap, first)


class LatentParts(PartBackend):
    """Attends to latents: queries are absorbed, `[T, H, latent + rope]`, and what they find is means of latents."""

    backend: LatentBackend

    def __init__(self, backend: LatentBackend) -> None:
        super().__init__(backend)
        self.width = backend.latent

    def tokens(self, layer: int, ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.backend.layers[layer].index_select(0, ids).view(-1, 1, self.backend.head_dim)[:count]
        return rows, rows[..., : self.width]


class NativeParts(PartBackend):
    """Attends through the C++ operator, to pages where they lie."""

    backend: NativeAttention

    def plan(self, runs: Sequence[QueryRun], table: npt.NDArray[np.int32]) -> None:
        seeing = [run for run in runs if run.seen]
        self.sequences = torch.tensor([(r.first, r.queries, r.seen - 1, 0) for r in seeing], dtype=torch.int32)
        self.runs = seeing
        self.table = torch.from_numpy(np.ascontiguousarray(table[[run.row for run in seeing]]))

    def attend(self, layer: int, q: torch.Tensor) -> AttendedPart:
        spec = self.specs[layer]
        if not self.runs:
            return AttendedPart.empty(len(q), q.shape[1], self.width, q.device)
        where = (self.sequences, self.table)
        found = torch.ops.kvmesh.paged_parts.default(
            self.backend.pages, layer, q.contiguous(), *where, spec.scale, spec.softcap, True
        )
        return AttendedPart(*found)

    def chunk(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int) -> AttendedPart:
        return native_chunk(q, k, v, self.specs[layer], first)


def native_chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, first: int) -> AttendedPart:
    """Is `PartBackend.chunk` by the C++ operator: keys and values become one page, as wide as the wider of the two."""
    width = -(-max(q.shape[-1], v.shape[-1]) // 2) * 2  # the operator takes even ones
    page = q.new_zeros(1, 1, 2, k.shape[1], len(k), width)
    page[0, 0, 0, :, :, : k.shape[-1]] = k.transpose(0, 1)
    page[0, 0, 1, :, :, : v.shape[-1]] = v.transpose(0, 1)
    asked = functional.pad(q, (0, width - q.shape[-1])).contiguous()
    sequences = torch.tensor([[0, len(q), first, 0]], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    values, lse = torch.ops.kvmesh.paged_parts.default(
        page, 0, asked, sequences, table, spec.scale, spec.softcap, False
    )
    return AttendedPart(values[..., : v.shape[-1]], lse)


class NativeLatentParts(LatentParts):
    """Attends to latents through the C++ operator, each query as a row of its own."""

    backend: NativeLatent

    def plan(self, runs: Sequence[QueryRun], table: npt.NDArray[np.int32]) -> None:
        self.runs = runs
        counts = [run.queries for run in runs]
        rows = np.repeat(np.array([run.row for run in runs], dtype=np.int64), counts)
        self.table = torch.from_numpy(np.ascontiguousarray(table[rows]))
        self.ends = torch.from_numpy(np.repeat(np.array([run.seen for run in runs], dtype=np.int64), counts))

    def attend(self, layer: int, q: torch.Tensor) -> AttendedPart:
        if len(self.ends) != len(q):
            raise InternalError(f"{len(q)} queries for runs of {len(self.ends)}")
        found = torch.ops.kvmesh.latent_parts.default(
            self.backend.pages, layer, q.contiguous(), self.table, self.ends, self.width, self.specs[layer].scale
        )
        return AttendedPart(*found)

    def chunk(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int) -> AttendedPart:
        return native_chunk(q, k, v, self.specs[layer], first)


def part_backend(backend: AttentionBackend) -> PartBackend:
    """Returns what attends to parts of contexts in the pages of a backend."""
    if backend.capturable:  # only Triton's backends are, and only with them is triton imported
        from kvmesh.engine.attention.triton_parts import triton_parts

        return triton_parts(backend)
    if isinstance(backend, NativeLatent):
        return NativeLatentParts(backend)
    if isinstance(backend, LatentBackend):
        return LatentParts(backend)
    return NativeParts(backend) if isinstance(backend, NativeAttention) else PartBackend(backend)


def expanded_chunk(
    parts: PartBackend, layer: int, q: torch.Tensor, rows: torch.Tensor, up: UpProjection, first: int
) -> AttendedPart:
    """Is `PartBackend.chunk` of latent rows `[n, latent + rope]` for queries `[T, H, nope + rope]` that are not
    absorbed: K and V of the chunk are written out. It finds values `[T, H, V]`."""
    keys, values = up.expand(rows[:, : up.latent])
    shared = rows[None, :, up.latent :].expand(up.heads, -1, -1)
    k = torch.cat((keys, shared), -1)
    return parts.chunk(layer, q, k.transpose(0, 1), values.transpose(0, 1), first)
