"""Logit bias and penalties: what changes logits before anything is chosen, by lists of the tokens concerned.

A row's list holds the tokens of its history and of its bias, nothing else: memory and work grow with what was said,
not with the vocabulary, and rows that ask for nothing have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvmesh.engine.batch import SampleParams
from kvmesh.errors import InternalError

_Array = npt.NDArray[Any]
ROOM = 64  # new tokens that fit before the lists grow


class Adjustments:
    """Adjusts the logits of the rows of one block, in order. Lists are padded to `width` with copies of their own first
    entry: whatever is done to that is done to its copies, so that a scatter writes one value however often."""

    def __init__(self, params: Sequence[SampleParams]) -> None:
        """Raises InternalError for a penalty without a history, or a bias that names a token twice."""
        tables = [_table(p) for p in params]
        width = max(len(ids) for ids, _, _, _ in tables) + ROOM
        lists = [np.stack([_padded(values, width) for values in same]) for same in zip(*tables, strict=True)]
        used = np.array([[len(ids)] for ids, _, _, _ in tables], np.int64)
        penalties = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
        self.arrays: list[_Array] = [*lists, used, np.array(penalties, np.float64).T[:, :, None]]
        self._room = ROOM
        self._learns = any(p.history is not None for p in params)

    def receive(self, sent: Iterator[torch.Tensor]) -> None:
        """Takes `arrays` as they are on the device."""
        self._ids, self._bias, self._count, self._seen, self._used = (next(sent) for _ in range(5))
        self._repetition, self._frequency, self._presence = next(sent)
        self.arrays.clear()

    def apply(self, logits: torch.Tensor) -> None:
        """Applies bias, then repetition, frequency and presence penalty, in place on float64 `[rows, vocab]`."""
        x = logits.gather(1, self._ids).add_(self._bias)
        x = torch.where(self._seen, torch.where(x > 0, x / self._repetition, x * self._repetition), x)
        x -= self._frequency * self._count + self._presence * (self._count > 0)
        logits.scatter_(1, self._ids, x)

    def add(self, tokens: torch.Tensor) -> None:
        """Notes that the answers go on with `tokens`, int64 `[rows]`. Nothing waits for the device."""
        if not self._learns:
            return
        if self._room == 0:
            self._grow()
        self._room -= 1
        hit = self._ids == tokens[:, None]
        self._count += hit
        self._seen |= hit
        new = ~hit.any(-1, keepdim=True)
        slot = self._used
        self._ids.scatter_(1, slot, torch.where(new, tokens[:, None], self._ids.gather(1, slot)))
        self._bias.scatter_(1, slot, self._bias.gather(1, slot).masked_fill_(new, 0.0))
        self._count.scatter_(1, slot, self._count.gather(1, slot).masked_fill_(new, 1.0))
        self._seen.scatter_(1, slot, self._seen.gather(1, slot) | new)
        self._used = slot + new

    def _grow(self) -> None:
        width = self._ids.shape[1]
        self._ids, self._bias, self._count, self._seen = (
            torch.cat((lists, lists[:, :1].expand(-1, width)), 1)
            for lists in (self._ids, self._bias, self._count, self._seen)
        )
        self._room = width


def _padded(values: _Array, width: int) -> _Array:
    return np.pad(values, (0, width - len(values)), constant_values=values[0])


def _table(p: SampleParams) -> tuple[_Array, _Array, _Array, _Array]:
    """Returns token ids, their bias, how often the answer has them, whether prompt or answer has them; one entry at
    least."""
    if p.penalised and p.history is None:
        raise InternalError("penalties need a history")
    seen, counts = p.history.table() if p.history is not None else (np.empty(0, np.int64), np.empty(0, np.int64))
    biased = np.array([token for token, _ in p.logit_bias], np.int64)
    ids = np.union1d(seen, biased) if len(seen) + len(biased) else np.zeros(1, np.int64)
    bias, count, known = np.zeros(len(ids)), np.zeros(len(ids)), np.isin(ids, seen)
    at = np.searchsorted(ids, biased)
    if len(np.unique(at)) < len(at):
        raise InternalError("logit_bias names a token twice")
    bias[at] = [value for _, value in p.logit_bias]
    count[np.searchsorted(ids, seen)] = counts
    return ids, bias, count, known
