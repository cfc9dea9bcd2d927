"""The tokens of one row, in the order in which they came, and where its last ones occurred before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ids32 = npt.NDArray[np.int32]
LOOKS_BACK = 32_768  # tokens that are searched: a few tens of microseconds


class Occurrence(NamedTuple):
    """Says where the last `length` tokens occurred before: `next` is the place of the token that came after them. A
    length of 0 is none."""

    next: int
    length: int


NOWHERE = Occurrence(0, 0)


class TokenLog:
    """Keeps tokens, 4 bytes each."""

    __slots__ = ("_count", "_ids")

    def __init__(self, *parts: Sequence[int] | npt.NDArray[np.int64]) -> None:
        given = [np.asarray(part, np.int32) for part in parts]
        self._count = sum(map(len, given))
        self._ids: Ids32 = np.zeros(max(64, self._count + self._count // 4), np.int32)
        if given:
            np.concatenate(given, out=self._ids[: self._count])

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> Ids32:
        """The tokens, int32 `[count]`: a view, which `extend` may leave behind."""
        return self._ids[: self._count]

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens."""
        end = self._count + len(tokens)
        if end > len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            if end > len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros(end, np.int32)))
        self._ids[self._count : end] = tokens
        self._count = end

    def last_occurrence(self, least: int, most: int) -> Occurrence:
        """Finds the longest suffix, of `least` to `most` tokens, that occurred before among the last LOOKS_BACK tokens,
        and the last place where it did. An occurrence may overlap the suffix itself."""
        ids = self.ids[-LOOKS_BACK:]
        end = len(ids) - 1
        if end < least:
            return NOWHERE
        found = np.flatnonzero(ids[:end] == ids[end])  # where its last token stands
        length = 1
        while len(found) and length < most:
            longer = found[found >= length]
            longer = longer[ids[longer - length] == ids[end - length]] if length <= end else longer[:0]
            if not len(longer):
                break
            found, length = longer, length + 1
        if not len(found) or length < least:
            return NOWHERE
        return Occurrence(int(found[-1]) + 1 + self._count - len(ids), length)

    def continued(self, occurrence: Occurrence, count: int) -> list[int]:
        """Returns `count` tokens that came after an occurrence. Where it overlaps the end, what was copied is copied
        again: a text that repeats itself goes on repeating itself."""
        copied: list[int] = self.ids[occurrence.next : occurrence.next + count].tolist()
        period = self._count - occurrence.next
        while len(copied) < count:
            copied.append(copied[len(copied) - period])
        return copied
