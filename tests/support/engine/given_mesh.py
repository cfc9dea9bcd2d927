"""A mesh of tensor-parallel ranks whose group is given: threads of one process, or a double that counts calls."""

from __future__ import annotations

from kvmesh.engine.axes import Axes
from kvmesh.engine.parallel import SOLO, Group, RankMesh


class GivenMesh(RankMesh):
    def __init__(self, group: Group) -> None:
        self._given = group
        super().__init__(Axes(tp=group.size), group.rank)

    def group(self, *over: str) -> Group:
        return self._given if len(self.axes.peers(self.rank, over)) > 1 else SOLO
