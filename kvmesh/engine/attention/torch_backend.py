"""The torch backend of `attention`: gathers pages into padded tiles and calls scaled_dot_product_attention.

It runs on any device and is what the native backends are compared with. GQA without repeated heads: the G query heads
of a KV head ride as G queries (decode) or as an axis over which K and V have stride 0 (prefill). Whole pages of one
head are gathered by one index_select a tile; a layer with a window or chunk gathers
the pages of that only. Scratch is bounded
by `scratch_elements`, or by one request's context where that is more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from kvmesh.engine.attention.backend import AttentionBackend, PageTable, SpanTokens, StepPlan, TokenSpan, seen_from
from kvmesh.engine.batch import Integers
from kvmesh.engine.config import AttentionSpec
from kvmesh.errors import InternalError

Array = npt.NDArray[np.int64]


class TorchAttention(AttentionBackend):
    scratch_elements = 8 * 2**20  # of K and V gathered, of a mask, or of one tile's scores

    def __init__(self, pages: torch.Tensor, num_heads: int, specs: Sequence[AttentionSpec]) -> None:
        super().__init__(pages, num_heads, specs)
        self.group = num_heads // self.kv_heads
        self.layers = [pages[:, layer] for layer in range(self.num_layers)]
        # A row of `flat` is one head's page of K or V, in the order (page, layer, kv, head); `flat_layers[l]` begins at
        # layer l of page 0.
        per_layer = 2 * self.kv_heads
        flat = pages.view(-1, self.block_tokens * self.head_dim)
        self.flat_layers = [flat[layer * per_layer :] for layer in range(self.num_layers)]
        self.page_stride = self.num_layers * per_layer
        self.head_rows = np.arange(per_layer, dtype=np.int64).reshape(2, self.kv_heads)
        self.scratch = torch.empty(0, dtype=self.dtype, device=self.device)
        self.decode_batch = TorchDecodePlan(self)

    def tensor(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)

    def queries(self, qkv: torch.Tensor) -> torch.Tensor:
        """Returns the queries of `qkv`, `[T, K, G, D]`."""
        return qkv[:, : self.num_heads].view(-1, self.kv_heads, self.group, self.head_dim)

    def write(self, layer: int, qkv: torch.Tensor, page_ids: torch.Tensor, slots: torch.Tensor) -> None:
        kv = qkv[:, self.num_heads :].view(-1, 2, self.kv_heads, self.head_dim)
        self.layers[layer][page_ids, :, :, slots] = kv

    def gather_index(self, ids: Array) -> torch.Tensor:
        """Returns the rows of `flat` with K and V of every head of the pages `ids [rows, n]`, in the order (kv, row,
        head, n)."""
        rows = self.head_rows[:, None, :, None] + ids[None, :, None, :] * self.page_stride
        return self.tensor(rows.reshape(-1))

    def gather(self, layer: int, index: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns K and V `[rows, K, tokens, D]`; they lie in scratch and are overwritten by the next call."""
        if self.scratch.shape[0] < index.numel():
            line = self.block_tokens * self.head_dim
            self.scratch = torch.empty((index.numel(), line), dtype=self.dtype, device=self.device)
        out = self.scratch[: index.numel()]
        torch.index_select(self.flat_layers[layer], 0, index, out=out)
        k, v = out.view(2, rows, self.kv_heads, -1, self.head_dim).unbind(0)
        return k, v

    def plan_prefill(self, spans: Sequence[TokenSpan]) -> StepPlan:
        return TorchPrefillPlan(self, spans)

    def plan_decode(self, pages: Sequence[Sequence[int]], positions: Integers) -> StepPlan:
        return self.decode_batch.plan(pages, positions)


def softmax_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    spec: AttentionSpec,
    causal: bool = False,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns softmax(softcapped(q kᵀ) + mask) v over `[..., queries, D]` and `[..., keys, D]`; `causal` is given only
    without a mask, and `sinks` is float32, of the form of scores with one key."""
    if not spec.softcap and sinks is None:
        return functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=spec.scale)
    scores = torch.matmul(q.float() * (spec.scale / (spec.softcap or 1.0)), k.float().transpose(-1, -2))
    if spec.softcap:
        scores.tanh_().mul_(spec.softcap)
    if causal:
        scores += torch.full(scores.shape[-2:], -torch.inf, device=q.device).triu_(1)
    if mask is not None:
        scores += mask
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        weights = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1).softmax(-1)[..., :-1]
    return torch.matmul(weights, v.float()).to(q.dtype)


class PrefillSpan:
    """Holds one request's part of a prefill step: rows [first, first + length) of the batch."""

    def __init__(self, backend: TorchAttention, span: TokenSpan, ids: Array, first: int) -> None:
        self.backend, self.first, self.ids = backend, first, ids
        self.start, self.length, self.end = span.start, span.length, span.start + span.length
        self.gathers: dict[tuple[int, int], torch.Tensor] = {}
        self.masks: dict[tuple[tuple[int, int], int, int], torch.Tensor] = {}

    def keys(self, layer: int, qkv: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Returns the first token that this chunk sees (or one before it on the same page), and K and V `[K, tokens,
        D]` from it on; a request without a cached prefix uses this step's own K and V."""
        backend, spec = self.backend, self.backend.specs[layer]
        if not self.start:
            kv = qkv[self.first : self.first + self.length, backend.num_heads :].transpose(0, 1)
            return 0, kv[: backend.kv_heads], kv[backend.kv_heads :]
        page = seen_from(self.start, *spec.sees) // backend.block_tokens
        if spec.sees not in self.gathers:
            self.gathers[spec.sees] = backend.gather_index(self.ids[None, page:])
        k, v = backend.gather(layer, self.gathers[spec.sees], 1)
        return page * backend.block_tokens, k[0], v[0]

    def attend(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Fills rows [first, first + length) of `out [T, K, G, D]`."""
        backend, spec = self.backend, self.backend.specs[layer]
        begin, *kv = self.keys(layer, qkv)
        k, v = (x[:, None].expand(-1, backend.group, -1, -1) for x in kv)
        rows = slice(self.first, self.first + self.length)
        q = backend.queries(qkv[rows]).permute(1, 2, 0, 3)
        target = out[rows].permute(1, 2, 0, 3)
        sinks = None if spec.sinks is None else spec.sinks.view(backend.kv_heads, backend.group, 1, 1)
        if not (self.start or any(spec.sees) or spec.softcap or spec.sinks is not None):
            target.copy_(softmax_attention(q, k, v, None, spec, causal=self.length > 1))
            return
        tile = self.tile(spec)
        for at in range(0, self.length, tile):
            to = min(at + tile, self.length)
            seen = slice(seen_from(self.start + at, *spec.sees) - begin, self.start + to - begin)
            mask = self.mask(spec.sees, at, to)
            tiles = (q[:, :, at:to], k[:, :, seen], v[:, :, seen])
            target[:, :, at:to].copy_(softmax_attention(*tiles, mask, spec, sinks=sinks))

    def tile(self, spec: AttentionSpec) -> int:
        """Returns how many queries go at a time, so that their mask, or their scores where these are made, fit the
        scratch."""
        scored = spec.softcap or spec.sinks is not None
        room = self.backend.scratch_elements // (self.backend.num_heads if scored else 1)
        keep = spec.window or spec.chunk
        if not keep:
            return max(1, room // self.end)
        tile = max(keep, 64)  # sees up to tile + keep - 1 keys: at least a third of the mask is of use
        return max(1, min(tile, room // (tile + keep)))

    def mask(self, sees: tuple[int, int], at: int, to: int) -> torch.Tensor | None:
        """Additive `[to - at, keys]` over all keys that some query of the tile sees; None where every query sees all.
        Kept for the next layer when one tile covers the span."""
        if to - at == 1:
            return None
        mask = self.masks.get((sees, at, to))
        if mask is None:
            backend = self.backend
            first, (window, chunk) = seen_from(self.start + at, *sees), sees
            shape = (to - at, self.start + to - first)
            mask = torch.full(shape, -torch.inf, dtype=backend.dtype, device=backend.device)
            mask.triu_(self.start + at - first + 1)
            if window:
                hidden = torch.ones(shape, dtype=torch.bool, device=backend.device)
                mask.masked_fill_(hidden.tril_(self.start + at - first - window), -torch.inf)
            if chunk:
                query = torch.arange(self.start + at, self.start + to, device=backend.device)[:, None]
                key = torch.arange(first, self.start + to, device=backend.device)
                mask.masked_fill_(key < query - query % chunk, -torch.inf)
            if to - at == self.length:
                self.masks[sees, at, to] = mask
        return mask


class TorchPrefillPlan(StepPlan):
    def __init__(self, backend: TorchAttention, spans: Sequence[TokenSpan]) -> None:
        self.backend = backend
        self.spans: list[PrefillSpan] = []
        tokens, first = SpanTokens.of(backend, spans), 0
        for span, ids in zip(spans, tokens.ids, strict=True):
            self.spans.append(PrefillSpan(backend, span, ids, first))
            first += span.length
        self.positions = backend.tensor(tokens.positions)
        self.page_ids = backend.tensor(tokens.page_ids)
        self.slots = self.positions % backend.block_tokens

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        self.backend.write(layer, qkv, self.page_ids, self.slots)

    def attend(self, layer: int, qkv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        backend = self.backend
        out = backend.answer(qkv) if out is None else out
        heads = out.view(qkv.shape[0], backend.kv_heads, backend.group, backend.head_dim)
        for span in self.spans:
            span.attend(layer, qkv, heads)
        return out


class DecodeTiles:
    """Holds what the layers of one window or chunk gather in a decode step, as tiles of rows [(rows, index, mask)]. The
    indices are kept while the rows stay on their pages; the masks are made anew each step."""

    def __init__(self, backend: TorchAttention, window: int, chunk: int) -> None:
        self.backend, self.window, self.chunk = backend, window, chunk
        self.first: Array = np.zeros(0, dtype=np.int64)  # each row's first page that it sees
        self.tiles: list[tuple[slice, torch.Tensor, torch.Tensor]] = []

    def plan(self, table: npt.NDArray[np.int32], where: Array, changed: bool) -> None:
        backend, block = self.backend, self.backend.block_tokens
        first = np.maximum(where - self.window + 1, 0) // block if self.window else np.zeros_like(where)
        if self.chunk:
            first = where // self.chunk * self.chunk // block
        last = where // block
        per_page = 2 * backend.kv_heads * block * backend.head_dim
        height = max(1, backend.scratch_elements // (per_page * int((last - first).max() + 1)))
        keep = not changed and np.array_equal(first, self.first)
        old, self.tiles, self.first = self.tiles, [], first
        for i, at in enumerate(range(0, len(where), height)):
            rows = slice(at, min(at + height, len(where)))
            width = int((last[rows] - first[rows]).max()) + 1
            if keep:
                index = old[i][1]
            else:  # past its last page a row repeats it: finite numbers, all masked
                columns = np.minimum(first[rows, None] + np.arange(width), last[rows, None])
                index = backend.gather_index(np.take_along_axis(table[rows], columns, 1).astype(np.int64))
            self.tiles.append((rows, index, self.mask(where[rows], first[rows], width)))

    def mask(self, where: Array, first: Array, width: int) -> torch.Tensor:
        """Additive `[rows, 1, 1, tokens]`."""
        backend = self.backend
        at = torch.arange(width * backend.block_tokens, device=backend.device)
        last = backend.tensor(where - first * backend.block_tokens)[:, None]
        hidden = at > last
        if self.window:
            hidden |= at <= last - self.window
        if self.chunk:
            hidden |= at < last - backend.tensor(where % self.chunk)[:, None]
        mask = torch.zeros(hidden.shape, dtype=backend.dtype, device=backend.device)
        return mask.masked_fill_(hidden, -torch.inf)[:, None, None]


class TorchDecodePlan(StepPlan):
    """Is the decode plan, valid until the next one. Its table and indices are kept from step to step."""

    def __init__(self, backend: TorchAttention) -> None:
        self.backend = backend
        self.table = PageTable(backend)
        self.tiles = {spec.sees: DecodeTiles(backend, *spec.sees) for spec in backend.specs}
        self.positions = torch.empty(0, dtype=torch.int64)
        self.page_ids = torch.empty(0, dtype=torch.int64)
        self.slots = torch.empty(0, dtype=torch.int64)

    def plan(self, pages: Sequence[Sequence[int]], positions: Integers) -> TorchDecodePlan:
        backend, block = self.backend, self.backend.block_tokens
        where = np.asarray(positions, dtype=np.int64)
        fresh = self.table.update(pages, where + 1)
        current = self.table.ids[np.arange(len(pages)), where // block].astype(np.int64)
        for row in np.flatnonzero(fresh).tolist():
            backend.zero_tail(int(current[row]), int(where[row]) % block)
        changed = bool(fresh.any()) or len(pages) != self.positions.shape[0]
        for tiles in self.tiles.values():
            tiles.plan(self.table.ids, where, changed)
        self.positions = backend.tensor(where)
        self.slots = backend.tensor(where % block)
        self.page_ids = backend.tensor(current)
        return self

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        self.backend.write(layer, qkv, self.page_ids, self.slots)

    def attend(self, layer: int, qkv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        backend, spec = self.backend, self.backend.specs[layer]
        q = backend.queries(qkv)
        if len(q) != len(self.positions):
            raise InternalError(f"{len(q)} rows for a plan of {len(self.positions)}: a newer one has been made")
        out = backend.answer(qkv) if out is None else out
        heads = out.view(q.shape)
        sinks = None if spec.sinks is None else spec.sinks.view(backend.kv_heads, backend.group, 1)
        for rows, index, mask in self.tiles[spec.sees].tiles:
            k, v = backend.gather(layer, index, rows.stop - rows.start)
            heads[rows] = softmax_attention(q[rows], k, v, mask, spec, sinks=sinks)
        return out
