"""How much an instance has computed, so that what was computed between two moments can be told. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvmesh.services.prefill.planner import Chunk


class ComputeProgress(NamedTuple):
    """Steps, prompt tokens, and twice the pairs of attention: each token looks at those before it, so a chunk from s to
    e has (e + s)·(e - s) / 2."""

    steps: int = 0
    tokens: int = 0
    double_pairs: int = 0

    def plus(self, chunks: Iterable[Chunk]) -> ComputeProgress:
        """One step more."""
        tokens, double_pairs = self.tokens, self.double_pairs
        for chunk in chunks:
            tokens += chunk.end - chunk.start
            double_pairs += chunk.end**2 - chunk.start**2
        return ComputeProgress(self.steps + 1, tokens, double_pairs)

    def since(self, earlier: ComputeProgress) -> ComputeProgress:
        """What came in between."""
        return ComputeProgress(*(now - then for now, then in zip(self, earlier, strict=True)))
