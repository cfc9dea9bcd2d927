"""The page tables of a step's requests, kept from step to step: what merely goes on is recognised, not copied again."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvmesh.engine.attention import AttentionBackend


class PageTable:
    """`ids` int32 `[rows or more, pages or more]`: row i holds the pages of the step's i-th request from token 0 on;
    what lies past them is left over from others and must not be read."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self.ids: npt.NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)
        self._known: list[tuple[int, ...]] = []
        self._used: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # pages up to a request's last token
        self._ends: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def update(self, pages: Sequence[Sequence[int]], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Request i has tokens [0, ends[i]) in `pages[i]`. Answers which rows are new: everything but a request at the
        same place with the same pages that goes one token on within its page. InternalError as of `page_array`."""
        rows, used = len(pages), -(-ends // self.backend.block_tokens)
        self._reserve(rows, int(used.max()))
        moved: npt.NDArray[np.bool_] = (self._used[:rows] != used) | (self._ends[:rows] + 1 != ends)
        self._ends[:rows] = ends
        fresh = moved.copy()
        others = np.fromiter(map(operator.is_not, pages, self._known), np.bool_, rows)
        for i in np.flatnonzero(moved | others).tolist():
            row = pages[i]
            if not moved[i] and tuple(row) == self._known[i]:
                continue
            self._used[i] = 0  # until the row holds what is said of it
            ids = self.backend.page_array(row, int(ends[i]))
            self.ids[i, : len(ids)] = ids
            self._known[i] = tuple(row)  # the object itself when it is a tuple already
            self._used[i] = len(ids)
            fresh[i] = True
        return fresh

    def _reserve(self, rows: int, width: int) -> None:
        have_rows, have_width = self.ids.shape
        if rows > have_rows or width > have_width:
            shape = (max(rows, have_rows * 2), max(width, have_width * 2))
            self.ids = np.zeros(shape, dtype=np.int32)
            self._known = [()] * shape[0]
            self._used = np.zeros(shape[0], dtype=np.int64)
            self._ends = np.full(shape[0], -1, dtype=np.int64)
