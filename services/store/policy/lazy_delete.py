"""Prefixes whose keys are void at once in a table that is gone through later, slice by slice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

MAX_OPEN = 65_536  # with more, the table is gone through in one go

V = TypeVar("V")


class LazyDelete:
    """`seq` of a prefix is a moment, as `after` of an entry is: those with a later one are not meant."""

    def __init__(self) -> None:
        self._open: dict[bytes, tuple[int, int]] = {}  # prefix → its seq, and at which look it has been through
        self._looks = 0

    def __len__(self) -> int:
        """Prefixes that are not through."""
        return len(self._open)

    def begin(self, prefix: bytes, seq: int, size: int) -> None:
        """Of a table of `size` entries."""
        self._open[prefix] = (seq, self._looks + size)

    def covers(self, key: bytes, after: int) -> bool:
        """Whether an entry of then is void. O(length of the key)."""
        found = self._open
        return bool(found) and any(found.get(key[:n], (0, 0))[0] > after for n in range(1, len(key) + 1))

    def step(self, table: OrderedDict[bytes, V], after: Callable[[V], int], most: int) -> list[bytes]:
        """Look at `most` entries, all if too many prefixes are open; which of them are void. Entries that come to the
        table go to its end, so those of then have been looked at when as many have as there were."""
        void: list[bytes] = []
        left = len(table) if len(self._open) > MAX_OPEN else min(most, len(table))
        for _ in range(left if self._open else 0):
            key = next(iter(table))
            table.move_to_end(key)
            if self.covers(key, after(table[key])):
                void.append(key)
        self._looks += left
        if left == len(table):
            self._open.clear()
        self._open = {prefix: at for prefix, at in self._open.items() if at[1] > self._looks}
        return void
