"""A mesh of tensor-parallel ranks whose group is given: threads of one process, or a double that counts calls."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from kvmesh.engine.axes import Axes
from kvmesh.engine.parallel import SOLO, Group, RankMesh


class GivenMesh(RankMesh):
    def __init__(self, group: Group) -> None:
        self._given = group
        super().__init__(Axes(tp=group.size), group.rank)

    def group(self, *over: str) -> Group:
        return self._given if len(self.axes.peers(self.rank, over)) > 1 else SOLO


class Together(Group):
    """A rank that is a thread beside others of this process."""

    capturable = False

    def __init__(self, rank: int, parts: list[torch.Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.parts, self.barrier = rank, len(parts), parts, barrier

    def _all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.parts[self.rank] = x.clone()
        self.barrier.wait(60)
        found = [part for part in self.parts if part is not None]
        self.barrier.wait(60)
        return found

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self._all(x)).sum(0))

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        return torch.cat(self._all(x), -1)
