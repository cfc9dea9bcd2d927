"""Some instances of a table's view. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvmesh.services.conductor.candidates.fields import FEW, Mask
from kvmesh.services.conductor.fleet.instance import Instance

if TYPE_CHECKING:
    from kvmesh.services.conductor.candidates.columns import View


class Selection(Sequence[Instance]):
    """Some instances of a view, as a mask of rows. Instances are looked up only when they are accessed one by one."""

    __slots__ = ("_count", "_instances", "mask", "view")

    def __init__(self, view: View, mask: Mask) -> None:
        self.view, self.mask = view, mask
        self._instances: list[Instance] | None = None
        self._count = -1

    def _listed(self) -> list[Instance]:
        if self._instances is None:
            instances = self.view.columns.instances
            self._instances = [instances[row] for row in np.flatnonzero(self.mask).tolist()]
        return self._instances

    def __len__(self) -> int:
        if self._count < 0:
            self._count = int(np.count_nonzero(self.mask))
        return self._count

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._listed()[index]

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._listed())

    def some(self, unable: int) -> list[Instance]:
        """Returns all of them if they are few; of many, at most `unable` of those that may not get work."""
        if len(self.view.columns) <= FEW:
            return list(self)
        rows = np.flatnonzero(self.mask & ~self.view.able)[:unable]
        return [self.view.columns.instances[row] for row in rows.tolist()]

    @property
    def first(self) -> Instance:
        """Any of them; there is at least one."""
        return self.view.columns.instances[int(self.mask.argmax())]

    def only(self, names: Collection[str]) -> Selection:
        """Returns those with one of these names."""
        mask = np.zeros_like(self.mask)
        mask[[row for name in names if (row := self.view.columns.row(name)) >= 0]] = True
        return Selection(self.view, self.mask & mask)

    def without(self, names: Collection[str]) -> Selection:
        """Returns all except those with one of these names."""
        rows = [row for name in names if (row := self.view.columns.row(name)) >= 0 and self.mask[row]]
        if not rows:
            return self
        mask = self.mask.copy()
        mask[rows] = False
        return Selection(self.view, mask)
