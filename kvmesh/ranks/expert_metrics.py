"""Brings how often each expert was chosen from rank 0 to the metrics of its instance.

There may be tens of thousands of experts in all layers together, so that none has a metric of its own: a layer is
described by how uneven its experts are. `kvmesh profile --json` tells each expert's tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import msgspec

from kvmesh.telemetry import names
from kvmesh.telemetry.sampled import SampledFamily, Value

WINDOW = 32  # choices of an expert on average, over which a layer is described: fewer are uneven by chance alone


class ExpertStats(msgspec.Struct, frozen=True, array_like=True):
    """Has for each of `layers` how many tokens have had each of its experts, since the rank's start."""

    layers: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]


class ExpertMetrics:
    """Sets the metrics of one instance from what its rank 0 tells, at the front."""

    def __init__(self) -> None:
        self._since: dict[int, Sequence[int]] = {}  # layer → counts where its window began
        self._uneven: dict[tuple[str, ...], Value] = {}
        self._idle: dict[tuple[str, ...], Value] = {}

    def tell(self, source: Hashable, stats: ExpertStats) -> None:
        """Takes the counts so far. A layer is described anew once its window is full."""
        for layer, tokens in zip(stats.layers, stats.tokens, strict=True):
            since = self._since.setdefault(layer, (0,) * len(tokens))
            new = [now - before for now, before in zip(tokens, since, strict=True)]
            if sum(new) < WINDOW * len(new):
                continue
            self._since[layer] = tokens
            self._uneven[str(layer),] = imbalance(new)
            self._idle[str(layer),] = new.count(0)
        total: Value = sum(map(sum, stats.tokens))
        rows: dict[SampledFamily, dict[tuple[str, ...], Value]] = {
            names.NODE_EXPERT_CHOICES: {(): total},
            names.NODE_EXPERT_IMBALANCE: self._uneven,
            names.NODE_EXPERT_IDLE: self._idle,
        }
        names.NODE_EXPERTS.tell(source, {family: dict(values) for family, values in rows.items()})


def forget(source: Hashable) -> None:
    """Drops the metrics of a rank that is gone."""
    names.NODE_EXPERTS.forget(source)


def imbalance(tokens: Sequence[int]) -> float:
    """Returns the busiest expert's tokens over the mean of all: 1 where all have as many, 0 where none has any."""
    total = sum(tokens)
    return max(tokens) * len(tokens) / total if total else 0.0
