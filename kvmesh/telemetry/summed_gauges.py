"""Gauges of several members of the mesh that one process runs: the places on `dp` of one instance."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from prometheus_client import Gauge


class SummedGauges:
    """Sets gauges to the sum over the sources of one process, of which each tells its own values."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Mapping[Gauge, float]] = {}

    def set(self, source: Hashable, values: Mapping[Gauge, float]) -> None:
        """Replaces what this source has told by these values."""
        self._values[source] = values
        for gauge in values:
            gauge.set(sum(own.get(gauge, 0) for own in self._values.values()))
