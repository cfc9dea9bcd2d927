"""Gauges with one series for each thing that there is now."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Gauge


class PresentSeries:
    """Shows values by their labels, and takes away the series of what is no longer there."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._shown: set[tuple[str, ...]] = set()

    def show(self, values: Mapping[tuple[str, ...], float]) -> None:
        """Shows these values, which are all there are; keys are the labels in their order."""
        for labels in self._shown - values.keys():
            self._gauge.remove(*labels)
        for labels, value in values.items():
            self._gauge.labels(*labels).set(value)
        self._shown = set(values)
