"""Metrics that other processes count: each source reports its totals at times, and scrapes show the last ones."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class SampledFamily:
    """A family of metrics. `kind` is "counter" (its name is without the _total that is shown), "gauge" or
    "histogram"."""

    name: str
    text: str
    kind: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Buckets:
    """The state of a histogram: `counts[i]` observations up to `bounds[i]`, the last entry above all bounds; `total` is
    their sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    def __add__(self, other: Buckets) -> Buckets:
        assert self.bounds == other.bounds, "one family, one set of buckets"
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return Buckets(self.bounds, counts, self.total + other.total)


Value = float | Buckets
Rows = Mapping[SampledFamily, Mapping[tuple[str, ...], Value]]


class SampledMetrics(Collector):
    """Metrics that other processes count; `families` are in the order shown. Sources with equal labels are added up. It
    is thread-safe."""

    def __init__(self, families: Sequence[SampledFamily]) -> None:
        self._families = tuple(families)
        self._told: dict[Hashable, Rows] = {}
        self._lock = threading.Lock()

    def tell(self, source: Hashable, rows: Rows) -> None:
        """Replaces what this source has reported by its present totals."""
        with self._lock:
            self._told[source] = rows

    def forget(self, source: Hashable) -> None:
        """Forgets a source that is gone, and its numbers."""
        with self._lock:
            self._told.pop(source, None)

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            told = list(self._told.values())
        for family in self._families:
            total: dict[tuple[str, ...], Value] = {}
            for rows in told:
                for labels, value in rows.get(family, {}).items():
                    total[labels] = _added(total.get(labels), value)
            yield _metric(family, total)


def _added(before: Value | None, value: Value) -> Value:
    if before is None:
        return value
    if isinstance(before, Buckets) or isinstance(value, Buckets):
        assert isinstance(before, Buckets) and isinstance(value, Buckets), "a family is of one kind"
        return before + value
    return before + value


def _metric(family: SampledFamily, total: Mapping[tuple[str, ...], Value]) -> Metric:
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.text, labels=family.labels)
        for labels, value in total.items():
            assert isinstance(value, Buckets), family.name
            running, buckets = 0, []
            for bound, count in zip((*value.bounds, float("inf")), value.counts, strict=True):
                running += count
                buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(running)))
            histogram.add_metric(labels, buckets, value.total)
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(family.name, family.text, labels=family.labels)
    for labels, value in total.items():
        assert not isinstance(value, Buckets), family.name
        metric.add_metric(labels, value)
    return metric
