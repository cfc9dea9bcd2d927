"""The CPU backend: two operators of `kvmesh.engine.cpu` that read and write pages where they lie.

A decode row is a run of one token, so one call serves rows and spans together. An answer depends on its request alone,
to the last bit: neither on the batch nor on the number of threads (of the model around it: see product_tiles.cpp on
AMX).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvmesh.engine.attention.backend import AttentionBackend, PageTable, StepPlan, TokenSpan
from kvmesh.engine.batch import Column, Integers
from kvmesh.engine.config import AttentionSpec


class NativeAttention(AttentionBackend):
    """Attends through the C++ operators, which must be loaded (`native.loaded()`). A plan is valid until the next one
    is made."""

    def __init__(self, pages: torch.Tensor, num_heads: int, specs: Sequence[AttentionSpec]) -> None:
        super().__init__(pages, num_heads, specs)
        self.table = PageTable(self)
        self.write_kv = torch.ops.kvmesh.write_kv.default
        self.paged_attention = torch.ops.kvmesh.paged_attention.default

    def plan_prefill(self, spans: Sequence[TokenSpan]) -> StepPlan:
        return self.plan_mixed((), (), spans)

    def plan_decode(self, pages: Sequence[Sequence[int]], positions: Integers) -> StepPlan:
        return self.plan_mixed(pages, positions, ())

    def plan_mixed(self, pages: Sequence[Sequence[int]], positions: Integers, spans: Sequence[TokenSpan]) -> StepPlan:
        return self._plan(pages, np.asarray(positions, np.int64), np.ones(len(pages), np.int64), spans)

    def plan_drafts(
        self, pages: Sequence[Sequence[int]], positions: Integers, lengths: Integers, spans: Sequence[TokenSpan]
    ) -> StepPlan:
        """Plans the rows of one request as one run: its K and V are read once for all of them."""
        own = np.asarray(lengths, np.int64)
        firsts = np.cumsum(own) - own
        return self._plan([pages[row] for row in firsts.tolist()], np.asarray(positions)[firsts], own, spans)

    def _plan(
        self, pages: Sequence[Sequence[int]], first: Column, runs: Column, spans: Sequence[TokenSpan]
    ) -> NativePlan:
        """Plans requests of which i has `runs[i]` tokens from position `first[i]` on, and spans behind them."""
        rows = len(pages)
        count = rows + len(spans)
        steps = np.empty(
            (count, 4), dtype=np.int32
        )  # first token of the step, length, start, rest of page to be cleared
        starts = np.empty(count, dtype=np.int64)
        starts[:rows] = first
        starts[rows:] = [span.start for span in spans]
        lengths = np.empty(count, dtype=np.int64)
        lengths[:rows] = runs
        lengths[rows:] = [span.length for span in spans]
        steps[:, 0] = np.cumsum(lengths) - lengths
        steps[:, 1] = lengths
        steps[:, 2] = starts
        steps[:, 3] = self.table.update([*pages, *(span.pages for span in spans)], starts + lengths, starts)
        where = np.arange(lengths.sum()) + np.repeat(starts - steps[:, 0], lengths)
        return NativePlan(self, torch.from_numpy(where), torch.from_numpy(steps))


class NativePlan(StepPlan):
    def __init__(self, backend: NativeAttention, positions: torch.Tensor, sequences: torch.Tensor) -> None:
        self.backend, self.positions, self.sequences = backend, positions, sequences
        self.table = torch.from_numpy(backend.table.ids)

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        self.backend.write_kv(self.backend.pages, layer, qkv, self.sequences, self.table)

    def attend(self, layer: int, qkv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        backend, spec = self.backend, self.backend.specs[layer]
        attended: torch.Tensor = backend.paged_attention(
            backend.pages, layer, qkv, self.sequences, self.table, spec.scale, *spec.sees, spec.softcap, spec.sinks
        )
        return attended if out is None else out.copy_(attended)
