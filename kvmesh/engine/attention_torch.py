"""The torch backend of `attention`: gathers pages into a padded batch and calls scaled_dot_product_attention.

GQA without repeated heads: the G query heads of a KV head ride as G queries (decode) or as an axis over which K and V
have stride 0 (prefill). Whole pages of one head are gathered by one index_select a layer, whose index is
computed once a step and kept while the batch stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from kvmesh.engine.attention import AttentionBackend, Span, StepPlan
from kvmesh.engine.config import AttentionSpec

MASK_ELEMENTS = 4 * 2**20  # a prefill mask of at most this many elements is made at once; longer chunks go in tiles


class TorchAttention(AttentionBackend):
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
        self.decode_batch = DecodeBatch(self)

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)

    def zero_tail(self, page: int, slot: int) -> None:
        """Clear the slots from `slot` on of a page that its request is the only one to hold."""
        self.pages[page, :, :, :, slot:] = 0

    def write(self, layer: int, qkv: torch.Tensor, page_ids: torch.Tensor, slots: torch.Tensor) -> None:
        kv = qkv[:, self.num_heads :].view(-1, 2, self.kv_heads, self.head_dim)
        self.layers[layer][page_ids, :, :, slots] = kv

    def plan_prefill(self, spans: Sequence[Span]) -> StepPlan:
        return PrefillPlan(self, spans)

    def plan_decode(self, pages: Sequence[Sequence[int]], positions: Sequence[int]) -> StepPlan:
        return self.decode_batch.plan(pages, positions)


class PrefillSpan:
    """One request's part of a prefill step: rows [first, first + length) of the batch."""

    def __init__(self, backend: TorchAttention, span: Span, ids: np.ndarray, first: int) -> None:
        self.start, self.length, self.first = span.start, span.length, first
        self.end = span.start + span.length
        self.mask: torch.Tensor | None = None
        if span.start:
            rows = backend.head_rows[:, :, None] + ids * backend.page_stride
            self.gather = backend.tensor(rows.reshape(-1))

    def keys(self, backend: TorchAttention, layer: int, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[K, end, D]` of all the request's tokens; a cold request's are this step's own."""
        if not self.start:
            kv = qkv[self.first : self.first + self.length, backend.num_heads :]
            kv = kv.transpose(0, 1)
            return kv[: backend.kv_heads], kv[backend.kv_heads :]
        kv = torch.index_select(backend.flat_layers[layer], 0, self.gather)
        kv = kv.view(2, backend.kv_heads, -1, backend.head_dim)[:, :, : self.end]
        return kv[0], kv[1]

    def attend(self, backend: TorchAttention, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Fills rows [first, first + length) of `out [T, K, G, D]`."""
        k, v = (x[:, None].expand(-1, backend.group, -1, -1) for x in self.keys(backend, layer, qkv))
        rows = slice(self.first, self.first + self.length)
        q = (
            qkv[rows, : backend.num_heads]
            .view(-1, backend.kv_heads, backend.group, backend.head_dim)
            .permute(1, 2, 0, 3)
        )
        target = out[rows].permute(1, 2, 0, 3)
        if not self.start:
            target.copy_(functional.scaled_dot_product_attention(q, k, v, is_causal=self.length > 1))
            return
        tile = max(1, MASK_ELEMENTS // self.end)
        for at in range(0, self.length, tile):
            to = min(at + tile, self.length)
            seen = self.start + to
            answer = functional.scaled_dot_product_attention(
                q[:, :, at:to], k[:, :, :seen], v[:, :, :seen], attn_mask=self._mask(backend, at, to)
            )
            target[:, :, at:to].copy_(answer)

    def _mask(self, backend: TorchAttention, at: int, to: int) -> torch.Tensor | None:
        """Additive `[to - at, start + to]`; kept for the next layer when one tile covers the span."""
        if to - at == 1:
            return None
        if self.mask is not None:
            return self.mask
        mask = torch.full((to - at, self.start + to), -torch.inf, dtype=backend.dtype, device=backend.device)
        mask.triu_(self.start + at + 1)
        if to - at == self.length:
            self.mask = mask
        return mask


class PrefillPlan:
    def __init__(self, backend: TorchAttention, spans: Sequence[Span]) -> None:
        self.backend = backend
        self.spans: list[PrefillSpan] = []
        positions, page_ids = [], []
        first = 0
        for span in spans:
            end = span.start + span.length
            ids = backend.page_array(span.pages, end)
            where = np.arange(span.start, end)
            positions.append(where)
            page_ids.append(ids[where // backend.block_tokens])
            self.spans.append(PrefillSpan(backend, span, ids, first))
            if end % backend.block_tokens:
                backend.zero_tail(int(ids[-1]), end % backend.block_tokens)
            first += span.length
        self.positions = backend.tensor(np.concatenate(positions))
        self.page_ids = backend.tensor(np.concatenate(page_ids))
        self.slots = self.positions % backend.block_tokens

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        self.backend.write(layer, qkv, self.page_ids, self.slots)

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        backend = self.backend
        out = qkv.new_empty(qkv.shape[0], backend.kv_heads, backend.group, backend.head_dim)
        for span in self.spans:
            span.attend(backend, layer, qkv, out)
        return out.view(qkv.shape[0], -1)


class DecodeBatch:
    """The decode plan. Keeps the page table and the gather index from step to step and touches only rows that changed:
    another request, another page list, or a token that enters a new page."""

    def __init__(self, backend: TorchAttention) -> None:
        self.backend = backend
        self.table = np.zeros((0, 0), dtype=np.int64)  # [rows, capacity]; unused entries repeat the row's first page
        self.known: list[tuple[int, ...]] = []
        self.used = np.zeros(0, dtype=np.int64)  # pages a row attends to
        self.last = np.zeros(0, dtype=np.int64)  # a row's last position
        self.indexed = (0, 0)  # (rows, pages) that `gather` was made for
        self.gather = torch.empty(0, dtype=torch.int64)
        self.scratch = torch.empty(0)
        self.reach = torch.empty(0, dtype=torch.int64)
        self.mask = torch.empty(0)
        self.positions = torch.empty(0, dtype=torch.int64)
        self.page_ids = torch.empty(0, dtype=torch.int64)
        self.slots = torch.empty(0, dtype=torch.int64)

    def plan(self, pages: Sequence[Sequence[int]], positions: Sequence[int]) -> DecodeBatch:
        backend = self.backend
        rows, block = len(pages), backend.block_tokens
        where = np.asarray(positions, dtype=np.int64)
        slots, used = where % block, where // block + 1
        width = int(used.max())
        self._reserve(rows, width)
        changed = self._update(pages, where, used, slots)
        if changed or self.indexed != (rows, width):
            self._index(rows, width)
        self.positions = backend.tensor(where)
        self.slots = backend.tensor(slots)
        self.page_ids = backend.tensor(self.table[np.arange(rows), used - 1])
        beyond = self.reach[: width * block] > self.positions[:, None]
        self.mask = torch.zeros(beyond.shape, dtype=backend.dtype, device=backend.device).masked_fill_(
            beyond, -torch.inf
        )
        self.mask = self.mask.view(rows, 1, 1, -1)
        return self

    def _reserve(self, rows: int, width: int) -> None:
        have_rows, have_width = self.table.shape
        if rows > have_rows or width > have_width:
            shape = (max(rows, have_rows * 2), max(width, have_width * 2))
            self.table = np.zeros(shape, dtype=np.int64)
            self.known = [()] * shape[0]
            self.used = np.zeros(shape[0], dtype=np.int64)
            self.last = np.full(shape[0], -1, dtype=np.int64)
            self.reach = torch.arange(shape[1] * self.backend.block_tokens, device=self.backend.device)

    def _update(self, pages: Sequence[Sequence[int]], where: np.ndarray, used: np.ndarray, slots: np.ndarray) -> bool:
        """Refill the table's rows that do not just go one token on; their current page is cleared past that token."""
        rows = len(pages)
        moved = ((self.used[:rows] != used) | (self.last[:rows] + 1 != where)).tolist()
        self.last[:rows] = where
        changed = False
        for i, row in enumerate(pages):
            if not moved[i] and (row is self.known[i] or tuple(row) == self.known[i]):
                continue
            count = int(used[i])
            ids = self.backend.page_array(row, count * self.backend.block_tokens)
            self.table[i] = ids[0]
            self.table[i, :count] = ids
            self.known[i] = tuple(row)  # the object itself when it is a tuple already
            self.used[i] = count
            self.backend.zero_tail(int(ids[-1]), int(slots[i]))
            changed = True
        return changed

    def _index(self, rows: int, width: int) -> None:
        backend = self.backend
        pages = self.table[:rows, :width] * backend.page_stride
        index = backend.head_rows[:, None, :, None] + pages[None, :, None, :]
        self.gather = backend.tensor(index.reshape(-1))
        self.indexed = (rows, width)
        need, line = self.gather.numel(), backend.block_tokens * backend.head_dim
        if self.scratch.shape[0] < need:
            self.scratch = torch.empty((need * 5 // 4, line), dtype=backend.dtype, device=backend.device)

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        self.backend.write(layer, qkv, self.page_ids, self.slots)

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        backend = self.backend
        rows = qkv.shape[0]
        gathered = self.scratch[: self.gather.numel()]
        torch.index_select(backend.flat_layers[layer], 0, self.gather, out=gathered)
        k, v = gathered.view(2, rows, backend.kv_heads, -1, backend.head_dim).unbind(0)
        q = qkv[:, : backend.num_heads].view(rows, backend.kv_heads, backend.group, backend.head_dim)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).reshape(rows, -1)
