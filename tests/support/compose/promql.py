"""What PromQL expressions name: enough to compare them with the metrics that there are. promtool checks the grammar."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.metrics import MetricWrapperBase

from kvmesh import errors
from kvmesh.services.gateway.pool_member import pool_member_families
from kvmesh.telemetry import names

PROMETHEUS_OWN = {"up": "gauge", "process_cpu_seconds_total": "counter", "process_resident_memory_bytes": "gauge"}
PROMETHEUS_OWN["process_open_fds"] = "gauge"
TARGET_LABELS = {"job", "instance", "service"}
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
# Read from a process's own count, so it only grows, but is no Counter.
GROWING_GAUGES = {"kvmesh_node_evicted_blocks_count"}


@dataclass(frozen=True)
class Series:
    """What one name in an expression stands for."""

    kind: str
    labels: frozenset[str]


def known() -> dict[str, Series]:
    """Every series that a service can show."""
    found = {name: Series(kind, frozenset()) for name, kind in PROMETHEUS_OWN.items()}
    metrics = [one for one in vars(names).values() if isinstance(one, MetricWrapperBase)]
    told = [(one._name, one._type, one._labelnames) for one in (*metrics, *names.BUILD_INFO.values())]
    told += [(one.name, one.kind, one.labels) for one in (*names.NODE_TRANSFER_FAMILIES, *names.NODE_EXPERT_FAMILIES)]
    told += pool_member_families()
    for name, kind, labels in told:
        for suffix in SUFFIXES[kind]:
            extra = {"le"} if suffix == "_bucket" else set()
            found[name + suffix] = Series(kind, frozenset(labels) | extra)
    return found


_STRING = re.compile(r'"[^"]*"')
_NAME = re.compile(r"\b(kvmesh_\w+|vllm:\w+|process_\w+|up)\b")
_SELECTED = re.compile(r"([a-z][\w:]+)\{([^}]*)\}")
_GROUPED = re.compile(r"\b(?:by|without) \(([^)]*)\)")
_RATED = re.compile(r"\b(?:rate|increase)\(([\w:]+)\{")
_EVER = re.compile(r"max by \([^)]*\) \((\w+)\{[^}]*\}\) > 0")  # whether this process has counted it since it started


def faults(expression: str, series: dict[str, Series]) -> Iterator[str]:
    """What is wrong with it, each in one line."""
    bare = _STRING.sub('""', expression)
    used = {name for name in _NAME.findall(bare) if name in series}
    for name in dict.fromkeys(_NAME.findall(bare)):
        if name not in series:
            yield f"there is no {name}"
    for name, selectors in _SELECTED.findall(bare):
        labels = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selectors))
        if "job" not in labels:
            yield f"{name} is not of our job"
        if name in series and (strange := labels - series[name].labels - TARGET_LABELS):
            yield f"{name} has no label {', '.join(sorted(strange))}"
    if unselected := used - {name for name, _ in _SELECTED.findall(bare)}:
        yield f"{', '.join(sorted(unselected))} is not of our job"
    of_all = TARGET_LABELS | {"__name__", "version"} | set().union(*(series[name].labels for name in used))
    for group in _GROUPED.findall(bare):
        for label in (part.strip() for part in group.split(",")):
            if label not in of_all:
                yield f"grouped by {label}, which none of it has"
    yield from _misuses(bare, used, series)


def _misuses(bare: str, used: set[str], series: dict[str, Series]) -> Iterator[str]:
    rated, ever = set(_RATED.findall(bare)), set(_EVER.findall(bare))
    for name in sorted(used):
        grows = series[name].kind != "gauge" or name in GROWING_GAUGES
        if grows and name not in rated | ever:
            yield f"{name} only grows: its rate is wanted"
        if not grows and name in rated:
            yield f"{name} is a gauge: it has no rate"
    if "histogram_quantile" in bare:
        if any(not name.endswith("_bucket") for name in used):
            yield "a quantile of what is no histogram"
        if not any("le" in group.replace(" ", "").split(",") for group in _GROUPED.findall(bare)):
            yield "a quantile without le"


def outcomes() -> set[str]:
    """What a request may end as."""

    def below(cls: type[errors.KvmeshError]) -> Iterator[type[errors.KvmeshError]]:
        yield cls
        for one in cls.__subclasses__():
            yield from below(one)

    return {cls.code for cls in below(errors.KvmeshError)} | {"stop", "length", "cancelled"}
