"""Latent attention on CPUs: decode rows by an operator of `kvmesh.engine.cpu` that reads pages where they lie, prompts
as `latent` has them.

What the operator answers of a request depends on that request alone, to the last bit, on any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvmesh.engine.attention.latent import LatentBackend, LatentDecodePlan, UpProjection
from kvmesh.engine.batch import Integers
from kvmesh.engine.config_latent import LatentConfig


class NativeLatent(LatentBackend):
    """Attends through the C++ operator, which must be loaded (`native.loaded()`), over float32 or bfloat16."""

    def __init__(self, pages: torch.Tensor, sizes: LatentConfig, ups: Sequence[UpProjection]) -> None:
        super().__init__(pages, sizes, ups)
        self.decode = NativeLatentDecode(self)
        self.latent_attention = torch.ops.kvmesh.latent_attention.default


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
