"""What a request has said and was told, as penalties need it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Counts = npt.NDArray[np.int64]


class History:
    """Counts the distinct tokens of one request and how often its answer has each, in 16 bytes a distinct token.

    It belongs to the row and goes where the row goes; the sampler adds each token that it samples for the row."""

    __slots__ = ("_counts", "_ids", "_new")

    def __init__(self, prompt: Sequence[int] | Ids = (), answer: Sequence[int] | Ids = ()) -> None:
        """`prompt` may be left empty where only the answer counts: all but repetition_penalty."""
        answered, counts = np.unique(np.asarray(answer, np.int64), return_counts=True)
        self._ids: Ids = np.union1d(np.asarray(prompt, np.int64), answered)
        self._counts: Counts = np.zeros(len(self._ids), np.int64)
        self._counts[np.searchsorted(self._ids, answered)] = counts
        self._new: list[int] = []

    def add(self, token_id: int) -> None:
        """Counts one more token of the answer."""
        self._new.append(token_id)

    def ahead(self, tokens: Sequence[int]) -> list[History]:
        """Returns the histories that this one will be once the first, the first two ... of these tokens are the
        answer's."""
        ids, counts = self.table()
        found = []
        for count in range(1, len(tokens) + 1):
            later = History()
            later._ids, later._counts, later._new = ids, counts.copy(), list(tokens[:count])
            found.append(later)
        return found

    def table(self) -> tuple[Ids, Counts]:
        """Returns token ids, ascending, and how often the answer has them (0: only the prompt), int64 `[distinct]`
        each."""
        if self._new:
            found, counts = np.unique(np.array(self._new, np.int64), return_counts=True)
            places = np.searchsorted(self._ids, found)
            inside = places < len(self._ids)
            inside[inside] = self._ids[places[inside]] == found[inside]
            self._counts[places[inside]] += counts[inside]
            fresh = places[~inside]
            self._ids = np.insert(self._ids, fresh, found[~inside])
            self._counts = np.insert(self._counts, fresh, counts[~inside])
            self._new.clear()
        return self._ids, self._counts
