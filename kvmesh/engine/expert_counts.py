"""Counts, on the device, how often each expert of each layer is chosen. A layer adds to its row as it runs, one launch,
and the host looks only when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvmesh.engine.config_experts import ExpertsConfig


class ExpertCounts:
    """Has int64 `table [layers with experts, experts]`: for how many tokens the router has chosen each expert since the
    last `clear`. All ranks of a group count the same. Rows of captured steps that stand for no token are left out as
    `only` says."""

    def __init__(self, experts: ExpertsConfig, device: torch.device) -> None:
        self.layers, self.chosen = experts.layers, experts.chosen
        self.table = torch.zeros(len(experts.layers), experts.count, dtype=torch.int64, device=device)
        self._rows = self.table.unbind()
        self._ones = torch.ones(0, dtype=torch.int64, device=device)
        self._live: torch.Tensor | None = None
        self._host: torch.Tensor | None = None  # of a CUDA device: what the last `told` asked for
        self._copied: Any = None  # a torch.cuda.Event

    def add(self, row: int, chosen: torch.Tensor) -> None:
        """Counts a step's choices `[T, chosen]`, int64, of the layer in this row of the table."""
        choices = chosen.flatten()
        ones = self._live
        if ones is None:
            if len(choices) > len(self._ones):
                self._ones = choices.new_ones(len(choices))
            ones = self._ones[: len(choices)]
        self._rows[row].scatter_add_(0, choices, ones)

    def once(self, live: torch.Tensor) -> torch.Tensor:
        """Returns what `only` takes to count each token once that is `live`, bool `[T]`."""
        return live[:, None].expand(-1, self.chosen).long()

    @contextmanager
    def only(self, live: torch.Tensor) -> Iterator[None]:
        """Within this, tokens are counted `live` times: int64 `[T, chosen]` of 0 and 1, each row of one value. Where
        launches are captured, it is read when they are replayed."""
        self._live = live.flatten()
        try:
            yield
        finally:
            self._live = None

    def clear(self) -> None:
        """Begins to count again from 0."""
        self.table.zero_()

    def told(self) -> Sequence[Sequence[int]] | None:
        """Returns the table, without waiting: on a CUDA device as it was when `told` was called before; None where that
        is not known yet."""
        if self.table.device.type != "cuda":
            return self.table.tolist()
        found = None
        if self._host is None:
            self._host = torch.empty(self.table.shape, dtype=torch.int64, pin_memory=True)
        if self._copied is not None:
            if not self._copied.query():
                return None
            found = self._host.tolist()
        self._host.copy_(self.table, non_blocking=True)
        event: Any = torch.cuda.Event
        self._copied = event()
        self._copied.record()
        return found
