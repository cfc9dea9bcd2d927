"""What an engine has done and is doing, as plain numbers: `engine.stats()`. Counters only grow, and outlive the peers;
they are kept per local NIC, of which there are few."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from kvmesh.transfer.api import TrafficClass, TransferState

if TYPE_CHECKING:
    from kvmesh.transfer.peer_link import PeerLink
    from kvmesh.transfer.rails import Nic, RailState
    from kvmesh.transfer.transports.base import FrameKind

LATENCY_BOUNDS_S = (50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
BANDWIDTH_BOUNDS = (1e6, 1e7, 3e7, 1e8, 3e8, 5e8, 1e9, 2e9, 3e9, 5e9, 7.5e9, 1e10, 1.5e10, 2.5e10, 5e10, 1e11)
MAX_CAUSES = 32


@dataclass(frozen=True, slots=True)
class HistogramStats:
    """A histogram. `counts[i]` counts observations <= `bounds[i]` that are above the bound before; one more entry
    counts those above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> tuple[int, ...]:
        """Returns cumulative counts, as Prometheus wants them; the last is the total."""
        return tuple(accumulate(self.counts))


@dataclass(frozen=True, slots=True)
class TrafficStats:
    """Frames that targets answered, by operation (write, read, notify, checksum) and traffic class."""

    operation: str
    traffic_class: TrafficClass
    nbytes: int
    frames: int
    slices: int


@dataclass(frozen=True, slots=True)
class NicStats:
    """Counters and state of one local NIC (name "": the transport has no choice of NICs). `errors` counts by cause:
    "lost", "down", "unsettled", "checksum", "refused: ...". `latency` is in seconds from post to answer, `bandwidth` in
    bytes per second of busy periods. `waiting` counts flows that wait for room in the NIC's budget."""

    transport: str
    nic: str
    in_flight_bytes: int
    in_flight_frames: int
    waiting: int
    traffic: tuple[TrafficStats, ...]
    errors: Mapping[str, int]
    latency: HistogramStats
    bandwidth: HistogramStats


@dataclass(frozen=True, slots=True)
class RailStats:
    """The present state of one rail. `bandwidth` (bytes per second, 0 unknown) and `latency` (seconds) are averages.
    `class_bytes` counts bytes by traffic class since the segment was opened. `cause` is why the rail last went to rest,
    "" if it never did."""

    segment: str
    transport: str
    local: str
    remote: str
    in_flight_bytes: int
    in_flight_frames: int
    bandwidth: float
    latency: float
    class_bytes: tuple[int, ...]
    frames: int
    losses: int
    rests: int
    resting: bool
    down: bool
    cause: str


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The statistics of an engine. `requests` counts those that became final by class and state; `waiting` counts flows
    with something to post, by class."""

    nics: tuple[NicStats, ...]
    rails: tuple[RailStats, ...]
    requests: Mapping[tuple[TrafficClass, TransferState], int]
    waiting: tuple[int, ...]
    unfinished: int  # groups of requests
    counters: Mapping[str, int]


class Histogram:
    """A histogram that observations are added to."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def freeze(self) -> HistogramStats:
        return HistogramStats(self.bounds, tuple(self.counts), self.total)


@dataclass(eq=False, slots=True)
class Meter:
    """The counters of one NIC."""

    traffic: dict[tuple[FrameKind, int], list[int]] = field(default_factory=dict)  # bytes, frames, slices
    errors: dict[str, int] = field(default_factory=dict)
    latency: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS_S))
    bandwidth: Histogram = field(default_factory=lambda: Histogram(BANDWIDTH_BOUNDS))

    def arrived(self, kind: FrameKind, rank: int, nbytes: int, slices: int, took_s: float) -> None:
        row = self.traffic.get((kind, rank))
        if row is None:
            row = self.traffic[kind, rank] = [0, 0, 0]
        row[0] += nbytes
        row[1] += 1
        row[2] += slices
        self.latency.observe(took_s)

    def erred(self, cause: str, n: int = 1) -> None:
        """Counts an error. Causes beyond MAX_CAUSES count as "other", so that their number is bounded."""
        if cause not in self.errors and len(self.errors) >= MAX_CAUSES:
            cause = "other"
        self.errors[cause] = self.errors.get(cause, 0) + n


@lru_cache
def bytes_counter(transport: str, kind: FrameKind) -> str:
    """Returns the name of an engine's byte counter, such as "tcp.write_bytes"."""
    return f"{transport}.{kind.name.lower()}_bytes"


def nic_stats(nic: Nic) -> NicStats:
    """Returns the statistics of a NIC. The caller holds the sender's lock."""
    traffic = tuple(
        TrafficStats(kind.name.lower(), TrafficClass(rank), *row) for (kind, rank), row in nic.meter.traffic.items()
    )
    frames = sum(way.frames for way in nic.busy)
    in_flight = sum(way.inflight for way in nic.busy)
    meter = nic.meter
    return NicStats(
        nic.transport,
        nic.name,
        in_flight,
        frames,
        nic.parked.count,
        traffic,
        dict(meter.errors),
        meter.latency.freeze(),
        meter.bandwidth.freeze(),
    )


def rail_stats(links: Iterable[PeerLink], now: float) -> tuple[RailStats, ...]:
    """Returns the statistics of all rails of these links. The caller holds the sender's lock."""
    return tuple(_rail(link.name, way, now) for link in links for way in link.ways.values())


def _rail(segment: str, way: RailState, now: float) -> RailStats:
    rail = way.rail
    return RailStats(
        segment,
        rail.transport.name,
        rail.local,
        rail.remote,
        way.inflight,
        way.frames,
        way.bandwidth,
        way.latency,
        tuple(way.class_bytes),
        way.arrived,
        way.lost,
        way.rests,
        way.rest_until > now,
        way.down,
        way.cause,
    )
