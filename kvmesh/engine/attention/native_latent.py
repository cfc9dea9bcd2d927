"""Latent attention on CPUs by operators of `kvmesh.engine.cpu`: decode rows, and chunks of few queries, by one that
reads pages where they lie; other chunks by the operator of plain attention, over K and V that are written out for some
heads at a time, as wide as the wider of the two. These take `WRITTEN_BYTES`, or one head's where that is more.

What the operators answer of a request depends on that request alone, to the last bit, on any number of threads; the
product that writes K and V out is torch's, of one request at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from kvmesh.engine.attention.backend import StepPlan, TokenSpan
from kvmesh.engine.attention.latent import (
    LatentBackend,
    LatentDecodePlan,
    LatentPrefillPlan,
    UpProjection,
    absorbed_costs_less,
)
from kvmesh.engine.batch import Integers
from kvmesh.engine.config_latent import LatentConfig

WRITTEN_BYTES = 32 << 20
ABSORBED_TIMES = 1.9  # how many times as long a multiplication of the absorbed operator takes (docs/reports)


class NativeLatent(LatentBackend):
    """Attends through the C++ operator, which must be loaded (`native.loaded()`), over float32 or bfloat16."""

    def __init__(self, pages: torch.Tensor, sizes: LatentConfig, ups: Sequence[UpProjection]) -> None:
        super().__init__(pages, sizes, ups)
        self.decode = NativeLatentDecode(self)
        self.latent_attention = torch.ops.kvmesh.latent_attention.default
        self.paged_attention = torch.ops.kvmesh.paged_attention.default

    def plan_prefill(self, spans: Sequence[TokenSpan]) -> StepPlan:
        return NativeLatentPrefill(self, spans)


class NativeLatentDecode(LatentDecodePlan):
    """Is the decode plan, absorbed, valid until the next one."""

    backend: NativeLatent

    def plan(self, pages: Sequence[Sequence[int]], positions: Integers) -> LatentDecodePlan:
        super().plan(pages, positions)
        self.ids, self.ends = torch.from_numpy(self.table.ids), self.positions + 1
        return self

    def attend_absorbed(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        backend = self.backend
        attended: torch.Tensor = backend.latent_attention(
            backend.pages, layer, q.contiguous(), self.ids, self.ends, backend.latent, backend.scale
        )
        return attended


class NativeLatentPrefill(LatentPrefillPlan):
    """Is the plan of a ragged batch of spans."""

    backend: NativeLatent

    def _span(
        self, layer: int, span: TokenSpan, page_ids: torch.Tensor, q: torch.Tensor, up: UpProjection
    ) -> torch.Tensor:
        if absorbed_costs_less(span, self.backend.sizes, ABSORBED_TIMES):
            return self._absorbed(layer, span, page_ids, q, up)
        return self._written_out(layer, span, page_ids, q, up)

    def _absorbed(
        self, layer: int, span: TokenSpan, page_ids: torch.Tensor, q: torch.Tensor, up: UpProjection
    ) -> torch.Tensor:
        """Returns `[length, H, V]`: each query is a row of its own."""
        backend = self.backend
        table = page_ids.to(torch.int32).repeat(span.length, 1)
        ends = torch.arange(span.start + 1, span.start + span.length + 1)
        means = backend.latent_attention(
            backend.pages, layer, up.absorb(q).contiguous(), table, ends, backend.latent, backend.scale
        )
        return up.values(means)

    def _written_out(
        self, layer: int, span: TokenSpan, page_ids: torch.Tensor, q: torch.Tensor, up: UpProjection
    ) -> torch.Tensor:
        """Returns `[length, H, V]`. The context is one page for the operator, [K and V, heads, tokens, width]."""
        backend, nope = self.backend, up.nope
        rows = backend.layers[layer].index_select(0, page_ids).view(-1, backend.head_dim)
        latents, shared = rows[:, : backend.latent], rows[:, backend.latent :]
        width = -(-max(q.shape[-1], up.value_dim) // 2) * 2  # the operator takes even ones
        at_once = max(1, WRITTEN_BYTES // (2 * len(rows) * width * rows.element_size()))
        out = q.new_empty(span.length, up.heads, up.value_dim)
        table = torch.zeros(1, 1, dtype=torch.int32)
        sequence = torch.tensor([[0, span.length, span.start, 0]], dtype=torch.int32)
        for first in range(0, up.heads, at_once):
            own = slice(first, min(first + at_once, up.heads))
            heads = own.stop - first
            both = functional.linear(latents, up.weight[own].flatten(0, 1)).view(len(rows), heads, -1).transpose(0, 1)
            page = rows.new_zeros(1, 1, 2, heads, len(rows), width)
            keys, values = page[0, 0].unbind()
            keys[..., :nope] = both[..., :nope]
            keys[..., nope : q.shape[-1]] = shared
            values[..., : up.value_dim] = both[..., nope:]
            asked = q.new_zeros(span.length, 3 * heads, width)  # the operator reads no K and V here
            asked[:, :heads, : q.shape[-1]] = q[:, own]
            attended = backend.paged_attention(page, 0, asked, sequence, table, backend.scale, 0, 0, 0.0, None)
            out[:, own] = attended.view(span.length, heads, width)[..., : up.value_dim]
        return out
