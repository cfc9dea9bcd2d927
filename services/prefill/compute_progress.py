"""Counts how much an instance has computed, so that the work between two moments is known. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvmesh.services.prefill.planner import Chunk


class ComputeProgress(NamedTuple):
    """Counts the steps, prompt tokens, and twice the attention pairs computed so far. Each token attends to those
    before it, so a chunk from token s to token e has (e + s)·(e - s) / 2 pairs."""

    steps: int = 0
    tokens: int = 0
    double_pairs: int = 0

    def plus(self, chunks: Iterable[Chunk]) -> ComputeProgress:
        """Returns the progress after one more step, of these chunks."""
        tokens, double_pairs = self.tokens, self.double_pairs
        for chunk in chunks:
            tokens += chunk.end - chunk.start
            double_pairs += chunk.end**2 - chunk.start**2
        return ComputeProgress(self.steps + 1, tokens, double_pairs)

    def since(self, earlier: ComputeProgress) -> ComputeProgress:
        """Returns what was computed since `earlier`."""
        return ComputeProgress(*(now - then for now, then in zip(self, earlier, strict=True)))
