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
from kvmesh.engine.batch import Integers
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
        rows = len(pages)
        count = rows + len(spans)
        steps = np.empty(
            (count, 4), dtype=np.int32
        )  # first token of the step, length, start, rest of page to be cleared
        starts = np.empty(count, dtype=np.int64)
        starts[:rows] = positions
        starts[rows:] = [span.start for span in spans]
        lengths = np.ones(count, dtype=np.int64)
        lengths[rows:] = [span.length for span in spans]
        steps[:, 0] = np.cumsum(lengths) - lengths
        steps[:, 1] = lengths
        steps[:, 2] = starts
        steps[:, 3] = self.table.update([*pages, *(span.pages for span in spans)], starts + lengths, starts)
        where = [starts[:rows], *(np.arange(span.start, span.start + span.length) for span in spans)]
        return NativePlan(self, torch.from_numpy(np.concatenate(where)), torch.from_numpy(steps))


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
