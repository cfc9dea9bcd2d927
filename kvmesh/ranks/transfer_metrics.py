"""Brings the counters of a rank's transfer engine from the rank to the metrics of its instance.

Labels are bounded: ranks by the world size, transports and NICs by this host's configuration, classes, operations and
states by their enums, causes by the engine. Peers are no label: there may be any number of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import msgspec

from kvmesh.telemetry import names
from kvmesh.telemetry.sampled import Buckets, SampledFamily, Value
from kvmesh.transfer import TrafficClass, TransferEngine
from kvmesh.transfer.stats import HistogramStats, NicStats


class TransferStats(msgspec.Struct, frozen=True, array_like=True):
    """Has totals since the engine's start, and what is going on. `rails` are (transport, NIC, state, number of pairs of
    NICs), `requests` are (class, final state, number), `waiting` is the number of peers with something to post, by
    class."""

    nics: tuple[NicStats, ...]
    rails: tuple[tuple[str, str, str, int], ...]
    requests: tuple[tuple[int, str, int], ...]
    waiting: tuple[int, ...]


def stats_of(engine: TransferEngine) -> TransferStats:
    """Returns the statistics, at the rank. It is short: a lock and a few hundred numbers."""
    stats = engine.stats()
    rails: Counter[tuple[str, str, str]] = Counter()
    for rail in stats.rails:
        state = "down" if rail.down else "resting" if rail.resting else "ready"
        rails[rail.transport, rail.local, state] += 1
    return TransferStats(
        stats.nics,
        tuple((*key, count) for key, count in rails.items()),
        tuple((int(kind), state.value, count) for (kind, state), count in stats.requests.items()),
        stats.waiting,
    )


def tell(source: Hashable, rank: int, stats: TransferStats) -> None:
    """Sets the metrics of this rank, at the front."""
    rows: dict[SampledFamily, dict[tuple[str, ...], Value]] = {family: {} for family in names.NODE_TRANSFER_FAMILIES}
    who = str(rank)
    for nic in stats.nics:
        at = (who, nic.transport, nic.nic)
        for traffic in nic.traffic:
            labels = (*at, traffic.operation, class_name(traffic.traffic_class))
            rows[names.NODE_TRANSFER_BYTES][labels] = traffic.nbytes
            rows[names.NODE_TRANSFER_FRAMES][labels] = traffic.frames
            rows[names.NODE_TRANSFER_SLICES][labels] = traffic.slices
        causes: Counter[str] = Counter()
        for cause, count in nic.errors.items():
            causes[cause.partition(":")[0]] += count
        for cause, count in causes.items():
            rows[names.NODE_TRANSFER_ERRORS][(*at, cause)] = count
        rows[names.NODE_TRANSFER_INFLIGHT][at] = nic.in_flight_bytes
        rows[names.NODE_TRANSFER_INFLIGHT_FRAMES][at] = nic.in_flight_frames
        rows[names.NODE_TRANSFER_LATENCY][at] = _buckets(nic.latency)
        rows[names.NODE_TRANSFER_BANDWIDTH][at] = _buckets(nic.bandwidth)
    for transport, local, state, pairs in stats.rails:
        rows[names.NODE_TRANSFER_RAILS][who, transport, local, state] = pairs
    for kind, state, count in stats.requests:
        rows[names.NODE_TRANSFER_REQUESTS][who, class_name(kind), state] = count
    for kind, count in enumerate(stats.waiting):
        rows[names.NODE_TRANSFER_WAITING][who, class_name(kind)] = count
    names.NODE_TRANSFERS.tell(source, rows)


def forget(source: Hashable) -> None:
    """Drops the metrics of a rank that is gone."""
    names.NODE_TRANSFERS.forget(source)


def class_name(traffic_class: int) -> str:
    """Returns the label of a traffic class: "handoff", "prefetch", "background"."""
    return TrafficClass(traffic_class).name.lower()


def _buckets(histogram: HistogramStats) -> Buckets:
    return Buckets(histogram.bounds, histogram.counts, histogram.total)
