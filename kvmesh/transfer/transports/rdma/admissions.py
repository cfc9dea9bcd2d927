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
    """An admission to an epoch's window. `starts` and `ends` are its ranges, sorted. `asked_by` are the serials of the
    frames that waited when it was requested: since windows grow, a part outside the ranges is known to be outside the
    window only for these frames."""

    number: int
    generation: int
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    asked_by: frozenset[int]

    def outside(self, parts: Sequence[tuple[int, int, int, int]]) -> tuple[int, ...]:
        """Returns the indices of the parts that are not inside one range."""
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
    """The admissions of one opener at one target. `flying` counts, by epoch, writes on a queue pair or on one that is
    not settled yet."""

    known: dict[int, WindowGrant] = field(default_factory=dict)
    flying: dict[int, int] = field(default_factory=dict)
    asked: dict[int, frozenset[int]] = field(default_factory=dict)
    _revoked: dict[int, int] = field(default_factory=dict)

    def ask(self, epoch: int, waiting: Iterable[int]) -> bool:
        """Returns whether the target is to be asked now; False when it is being asked already."""
        if epoch in self.asked:
            return False
        self.asked[epoch] = frozenset(waiting)
        return True

    def admitted(
        self, epoch: int, number: int, generation: int, starts: Sequence[int], ends: Sequence[int]
    ) -> frozenset[int]:
        """Takes the target's answer; returns the serials of frames that a refusal (number 0) concerns."""
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
        """Notes the end, of any kind, of a write. Returns the number of an admission that can be given back
        now, or 0."""
        left = self.flying.get(epoch, 0) - 1
        if left > 0:
            self.flying[epoch] = left
            return 0
        self.flying.pop(epoch, None)
        return self._revoked.pop(epoch, 0)

    def idle(self, epoch: int) -> bool:
        """Says whether the epoch's admission could be given up now."""
        return epoch in self.known and not self.flying.get(epoch)

    def give_up(self, epoch: int) -> int:
        """Ends an admission without writes under way and returns its number; 0 otherwise."""
        admission = self.known.get(epoch)
        if admission is None or self.flying.get(epoch):
            return 0
        del self.known[epoch]
        return admission.number

    def revoke(self, epoch: int, number: int) -> bool:
        """Ends an admission that the target wants back, so that no write follows. Returns whether it can be given back
        at once."""
        self.known.pop(epoch, None)
        if self.flying.get(epoch):
            self._revoked[epoch] = number
            return False
        return True

    def fenced(self, generation: int) -> None:
        """Forgets admissions from before this generation."""
        self.known = {epoch: a for epoch, a in self.known.items() if a.generation >= generation}
        self._revoked.clear()

    def disconnected(self) -> None:
        """Forgets everything except writes that are under way."""
        self.known.clear()
        self.asked.clear()
        self._revoked.clear()
