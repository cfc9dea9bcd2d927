"""What a target has admitted an opener to: epochs, the ranges of their windows, and writes under way. Pure.

An admission holds for queue pairs of its generation only. It ends when the opener gives it up, when the target asks for
it back (a fence), or when the generation does (a fence that destroyed queue pairs).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_MAX_EPOCHS = 1024
_MANY = 16  # parts from here on are checked by numpy


@dataclass(eq=False, slots=True)
class WindowGrant:
    """`starts` and `ends` of the window's ranges, sorted. `asked_by`: serials of the frames that waited when it was
    asked for: a part outside the ranges is outside the window only for them, as windows grow."""

    number: int
    generation: int
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    asked_by: frozenset[int]

    def outside(self, parts: Sequence[tuple[int, int, int, int]]) -> tuple[int, ...]:
        """Indices of the parts that are not in one range."""
        starts, ends = self.starts, self.ends
        if len(parts) < _MANY:
            found = []
            for i, (_, _, offset, length) in enumerate(parts):
                at = int(starts.searchsorted(offset, "right")) - 1
                if at < 0 or offset + length > ends[at]:
                    found.append(i)
            return tuple(found)
        if not len(starts):
            return tuple(range(len(parts)))
        table = np.array(parts, dtype=np.int64)
        at_all = starts.searchsorted(table[:, 2], "right") - 1
        inside = (at_all >= 0) & (table[:, 2] + table[:, 3] <= ends[at_all])
        return tuple(np.flatnonzero(~inside).tolist())


@dataclass(eq=False, slots=True)
class Admissions:
    """`flying`: writes by epoch that are on a queue pair, or were on one that is not settled yet."""

    known: dict[int, WindowGrant] = field(default_factory=dict)
    flying: dict[int, int] = field(default_factory=dict)
    asked: dict[int, frozenset[int]] = field(default_factory=dict)
    _revoked: dict[int, int] = field(default_factory=dict)

    def ask(self, epoch: int, waiting: Iterable[int]) -> bool:
        """Whether to ask the target now: it is not being asked already."""
        if epoch in self.asked:
            return False
        self.asked[epoch] = frozenset(waiting)
        return True

    def admitted(
        self, epoch: int, number: int, generation: int, starts: Sequence[int], ends: Sequence[int]
    ) -> frozenset[int]:
        """The target's answer; returns the frames that a refusal (number 0) concerns."""
        asked_by = self.asked.pop(epoch, frozenset())
        self.known.pop(epoch, None)
        if number:
            if len(self.known) >= _MAX_EPOCHS:
                self.known.pop(next(iter(self.known)))
            first, last = np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)
            self.known[epoch] = WindowGrant(number, generation, first, last, asked_by)
        return asked_by

    def flew(self, epoch: int) -> None:
        self.flying[epoch] = self.flying.get(epoch, 0) + 1

    def landed(self, epoch: int) -> int:
        """A write of it ended, however. The admission that can be given back now, or 0."""
        left = self.flying.get(epoch, 0) - 1
        if left > 0:
            self.flying[epoch] = left
            return 0
        self.flying.pop(epoch, None)
        return self._revoked.pop(epoch, 0)

    def idle(self, epoch: int) -> bool:
        """Whether it could be given up now."""
        return epoch in self.known and not self.flying.get(epoch)

    def give_up(self, epoch: int) -> int:
        """Its number when nothing of it is under way, which ends it; 0 otherwise."""
        admission = self.known.get(epoch)
        if admission is None or self.flying.get(epoch):
            return 0
        del self.known[epoch]
        return admission.number

    def revoke(self, epoch: int, number: int) -> bool:
        """The target wants it back: no further write. Whether it can be given back at once."""
        self.known.pop(epoch, None)
        if self.flying.get(epoch):
            self._revoked[epoch] = number
            return False
        return True

    def fenced(self, generation: int) -> None:
        """What was admitted before that generation is void."""
        self.known = {epoch: a for epoch, a in self.known.items() if a.generation >= generation}
        self._revoked.clear()

    def disconnected(self) -> None:
        """Everything is void but what is under way."""
        self.known.clear()
        self.asked.clear()
        self._revoked.clear()
