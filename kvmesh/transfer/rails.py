"""Which rail a frame takes: how fast each is, which are at rest, and when these are tried again. Pure: `now` (any
monotonic seconds) is an argument, the sender's lock is held around every call.

    READY ──3 losses in 10 s, or "down"──▶ RESTING ──rest over──▶ PROBED: one small frame at a time
      ▲                                       ▲                      │ lost: rests twice as long
      └───────────────── a frame arrived ─────┼──────────────────────┘

Among the ready rails of a tier a frame takes the one where it is expected to arrive first:

    (bytes in flight over the local NIC + its own) / measured bandwidth + time since the rail's last sign of life

A rail of which nothing is known is taken to be fast, for two frames at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.send_queue import RANKS, SendFlow, SendTurns
from kvmesh.transfer.stats import Meter
from kvmesh.transfer.transports.base import Rail

NOMINAL_BYTES_S = 12.5e9  # 100 Gb/s: of a rail of which nothing is known
UNKNOWN_FRAMES = 2  # on a rail of unknown bandwidth beside others
SAMPLE_BYTES = 1 << 20  # bandwidth is measured over so many bytes, or a whole busy period
TRUSTED_BYTES = 64 << 10  # a first measurement over less says more of latency than of bandwidth
MEMORY_BYTES = 4 << 20  # the average forgets over so many
STALE_S = 10.0  # an unused rail is believed to be twice as fast for each so many seconds
STALL_S = 0.05  # a rail silent for so long holds no budget of its NIC any more
INFINITY = float("inf")
AVOID_S = 1e6  # the rail that just lost this very slice

Topology = Mapping[str, tuple[Sequence[str], Sequence[str]]]


@dataclass(eq=False, slots=True)
class Nic:
    """A local NIC (name "": the transport has no choice). `inflight` counts bytes on their way, without those on
    stalled rails."""

    transport: str
    name: str
    budget: int
    inflight: int = 0
    parked: SendTurns[SendFlow] = field(default_factory=SendTurns)
    busy: dict[RailState, None] = field(default_factory=dict)  # ways with a frame on them
    meter: Meter = field(default_factory=Meter)


@dataclass(eq=False, slots=True)
class RailState:
    """A rail to one peer with its measurements. `rest_until` is 0 while it does not rest."""

    rail: Rail
    nic: Nic
    segment: str = ""
    nominal: float = NOMINAL_BYTES_S
    frames: int = 0
    inflight: int = 0  # bytes
    stalled: bool = False
    bandwidth: float = 0.0  # bytes per second; 0: unknown
    latency: float = 0.0  # seconds from post to answer, average
    progress_at: float = 0.0
    window_at: float = 0.0
    window_bytes: int = 0
    sampled_at: float = 0.0
    losses: deque[float] = field(default_factory=deque)
    failed_at: float = float("-inf")
    rest_until: float = 0.0
    pause: float = 0.0
    back_at: float = 0.0
    down: bool = False
    cause: str = ""
    parked: list[SendFlow] = field(default_factory=list)
    class_bytes: list[int] = field(default_factory=lambda: [0] * RANKS)
    arrived: int = 0  # frames
    lost: int = 0
    rests: int = 0

    @property
    def capacity(self) -> int:
        """How many frames may be on the rail now."""
        return 1 if self.rest_until else self.rail.transport.limits.inflight_frames

    @property
    def full(self) -> bool:
        return self.frames >= self.capacity


Tiers = tuple[tuple[RailState, ...], ...]


class RailChoice(NamedTuple):
    """The rail for a frame. `width` is how many rails share the work. When the rail has no room (`open` is false),
    another one is better if it has none until `again_at`."""

    way: RailState
    width: int = 1
    again_at: float = float("inf")
    open: bool = True


def tiers(
    rails: Iterable[Rail],
    local_location: str = "",
    remote_location: str = "",
    own_topology: Topology | None = None,
    peer_topology: Topology | None = None,
) -> tuple[tuple[Rail, ...], ...]:
    """Orders rails in tiers of preference: by transport in the given order; within a transport first those whose NICs
    both memory locations prefer, then the rest; detours last. A location or rail without topology prefers everything.
    Neighbours in a tier share no NIC where possible."""
    found: list[tuple[Rail, ...]] = []
    by_transport: dict[int, list[Rail]] = {}
    for rail in rails:
        by_transport.setdefault(id(rail.transport), []).append(rail)
    near = (own_topology or {}).get(local_location, ((), ()))[0]
    far = (peer_topology or {}).get(remote_location, ((), ()))[0]
    for ways in by_transport.values():
        straight = [r for r in ways if not r.detour]
        first = [r for r in straight if _preferred(r.local, near) and _preferred(r.remote, far)]
        chosen = set(first)
        for tier in (first, [r for r in straight if r not in chosen], [r for r in ways if r.detour]):
            if tier:
                found.append(tuple(_diagonally(tier)))
    return tuple(found)


def _preferred(name: str, preferred: Sequence[str]) -> bool:
    return not name or not preferred or name in preferred


def _diagonally(rails: Sequence[Rail]) -> list[Rail]:
    """Orders rails as a→x, b→y, a→y, b→x, so that the first frames load every NIC on both sides."""
    near = list(dict.fromkeys(r.local for r in rails))
    far = list(dict.fromkeys(r.remote for r in rails))
    width = max(len(near), len(far))
    return sorted(rails, key=lambda r: ((far.index(r.remote) - near.index(r.local)) % width, near.index(r.local)))


class RailBoard:
    """The rails and NICs of one engine."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.nics: dict[tuple[str, str], Nic] = {}

    def way(self, rail: Rail, gbps: float = 0.0, segment: str = "") -> RailState:
        """Makes the state of a new rail. `gbps` is the speed of the slower NIC, 0 if unknown."""
        key = (rail.transport.name, rail.local)
        nic = self.nics.get(key)
        if nic is None:
            nic = self.nics[key] = Nic(*key, self.config.nic_inflight_bytes)
        losses: deque[float] = deque(maxlen=self.config.trip_errors)
        return RailState(rail, nic, segment, gbps * 1e9 / 8 if gbps > 0 else NOMINAL_BYTES_S, losses=losses)

    # ── choosing ──────────────────────────────────────────────────────────────────────────────────

    def choose(self, tiers: Tiers, nbytes: int, now: float, avoid: Rail | None = None) -> RailChoice | None:
        """Chooses the rail for a frame of about `nbytes` bytes, which may have no room yet; None when all rails are at
        rest. A later tier is used when every rail of the earlier ones rests. A rail whose rest is over gets the next
        frame as a probe."""
        for tier in tiers:
            if len(tier) == 1:
                way = tier[0]
                if not way.rest_until:
                    room = way.frames < way.rail.transport.limits.inflight_frames
                    return RailChoice(way, 1, INFINITY, room)
                if way.rest_until <= now and not way.frames:
                    return RailChoice(way)
                continue
            choice = self._best(tier, nbytes, now, avoid)
            if choice is not None:
                return choice
        return self._last_resort(tiers, now)

    def _best(self, tier: tuple[RailState, ...], nbytes: int, now: float, avoid: Rail | None) -> RailChoice | None:
        best: RailState | None = None
        lowest = spare = (float("inf"), 0)
        width, room = 0, False
        unknown: RailState | None = None
        for way in tier:
            if way.rest_until:
                if way.rest_until <= now and not way.frames and way.rail is not avoid:
                    return RailChoice(way, len(tier))
                continue
            width += 1
            if not way.bandwidth and way.frames >= UNKNOWN_FRAMES:
                unknown = unknown or way
                continue
            cost = (self.expected_s(way, nbytes, now), way.inflight)
            if way.rail is avoid:
                cost = (cost[0] + AVOID_S, 0)
            full = way.full
            if not full and cost < spare:
                spare = cost
            if cost < lowest:
                best, lowest, room = way, cost, not full
        if best is None:
            return None if unknown is None else RailChoice(unknown, width, float("inf"), False)
        again_at = now + spare[0] - lowest[0] if not room else float("inf")
        return RailChoice(best, width, again_at, room)

    def expected_s(self, way: RailState, nbytes: int, now: float) -> float:
        """Returns the expected seconds until a frame posted now has arrived."""
        bandwidth = way.bandwidth or way.nominal
        ahead = way.nic.inflight
        if way.frames:
            silent = now - way.progress_at
            if way.stalled:
                ahead += way.inflight
        else:
            silent = 0.0
            idle = now - way.sampled_at
            if way.bandwidth and idle > STALE_S:
                bandwidth *= 2.0 ** min(int(idle / STALE_S), 30)
        return (ahead + nbytes) / bandwidth + silent

    @staticmethod
    def _last_resort(tiers: Tiers, now: float) -> RailChoice | None:
        """Chooses among rails that rest or are being probed. One that was put to rest for its losses is better than
        none; one that is down is not."""
        waiting: RailState | None = None
        for tier in tiers:
            for way in tier:
                if way.down and way.rest_until > now:
                    continue
                if not way.frames:
                    return RailChoice(way)
                waiting = waiting or way
        return None if waiting is None else RailChoice(waiting, 1, float("inf"), False)

    @staticmethod
    def why_none(tiers: Tiers) -> str:
        """Returns the causes for which rails rest, with the rails of each cause."""
        rails: dict[str, list[str]] = {}
        for way in (way for tier in tiers for way in tier if way.rest_until):
            rails.setdefault(way.cause.removeprefix(f"{way.rail}: "), []).append(str(way.rail))
        more = {cause: f" and {len(names) - 2} more" if len(names) > 2 else "" for cause, names in rails.items()}
        return "; ".join(f"{', '.join(names[:2])}{more[cause]}: {cause}" for cause, names in rails.items())

    # ── what happens to frames ────────────────────────────────────────────────────────────────────

    def posted(self, way: RailState, nbytes: int, now: float) -> None:
        nic = way.nic
        if not way.frames:
            way.progress_at = way.window_at = now
            way.window_bytes = 0
            nic.busy[way] = None
        way.frames += 1
        way.inflight += nbytes
        if not way.stalled:
            nic.inflight += nbytes

    def answered(self, way: RailState, nbytes: int, now: float) -> None:
        """Notes that a frame is not on its way any more, whatever became of it."""
        nic = way.nic
        way.frames -= 1
        way.inflight -= nbytes
        if way.stalled:
            way.stalled = False
            nic.inflight += way.inflight
        else:
            nic.inflight -= nbytes
        way.progress_at = now
        if not way.frames:
            del nic.busy[way]

    def landed(self, way: RailState, nbytes: int, posted_at: float, now: float) -> None:
        """Notes that the target acknowledged a frame; it follows `answered`. Only a frame posted after a failure shows
        that the failure is over."""
        if way.rest_until and posted_at >= way.failed_at:
            way.rest_until, way.back_at, way.down = 0.0, now, False
            way.losses.clear()
        way.arrived += 1
        took = now - posted_at
        way.latency = took if way.latency == 0.0 else way.latency + 0.1 * (took - way.latency)
        way.window_bytes += nbytes
        if way.window_bytes >= SAMPLE_BYTES or not way.frames:
            self._sample(way, now)

    @staticmethod
    def _sample(way: RailState, now: float) -> None:
        """Measures the bandwidth of a busy period: its bytes by its length. Small ones weigh little, since they measure
        latency."""
        nbytes, elapsed = way.window_bytes, now - way.window_at
        way.window_at, way.window_bytes = now, 0
        if elapsed <= 0.0 or not nbytes:
            return
        rate = nbytes / elapsed
        way.nic.meter.bandwidth.observe(rate)
        if way.bandwidth:
            way.bandwidth += (rate - way.bandwidth) * nbytes / (nbytes + MEMORY_BYTES)
        elif nbytes >= TRUSTED_BYTES:
            way.bandwidth = rate
        way.sampled_at = now

    def lost(self, way: RailState, posted_at: float, cause: str, now: float, *, down: bool) -> bool:
        """Notes that a frame did not arrive; it follows `answered`. Frames posted before an earlier loss was known
        count with that loss. Returns True when the rail goes to rest."""
        way.lost += 1
        if down or (way.rest_until and way.rest_until <= now):
            return self._rest(way, cause, now, down=down)
        if posted_at <= way.failed_at:
            return False
        way.failed_at = now
        way.losses.append(now)
        if len(way.losses) < self.config.trip_errors or now - way.losses[0] > self.config.trip_window_s:
            return False
        return self._rest(way, cause, now, down=False)

    def _rest(self, way: RailState, cause: str, now: float, *, down: bool) -> bool:
        if way.rest_until > now:
            way.down = way.down or down
            return False
        failed_again = bool(way.rest_until) or now - way.back_at < way.pause
        way.pause = min(way.pause * 2, self.config.rest_cap_s) if failed_again else self.config.rest_s
        way.rest_until, way.down, way.cause = now + way.pause, down, cause
        way.losses.clear()
        way.failed_at = now
        way.rests += 1
        return True

    def stalls(self, nic: Nic, now: float) -> None:
        """Takes the bytes of rails without a sign of life out of the NIC's budget, so that a frozen peer does not keep
        others waiting."""
        for way in nic.busy:
            if not way.stalled and now - way.progress_at >= STALL_S:
                way.stalled = True
                nic.inflight -= way.inflight


KeyT = TypeVar("KeyT", bound=Hashable)


class LruSieve(Generic[KeyT]):
    """A set of at most `capacity` keys, or more while they are busy, with SIEVE eviction (Zhang et al., NSDI 2024): one
    visited bit a key, and one hand that sweeps from old to new. The engine limits its connections with it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._visited: dict[KeyT, bool] = {}  # oldest first
        self._hand: KeyT | None = None  # the next to look at; None: the oldest

    def __len__(self) -> int:
        return len(self._visited)

    def touch(self, key: KeyT, may_evict: Callable[[KeyT], bool]) -> list[KeyT]:
        """Notes a use of `key`, and returns the keys evicted to make room for it."""
        if key in self._visited:
            self._visited[key] = True
            return []
        evicted = []
        while len(self._visited) >= self.capacity:
            victim = self._sweep(may_evict)
            if victim is None:
                break
            evicted.append(victim)
        self._visited[key] = False
        return evicted

    def remove(self, key: KeyT) -> None:
        if self._hand == key:
            keys = list(self._visited)
            at = keys.index(key) + 1
            self._hand = keys[at] if at < len(keys) else None
        self._visited.pop(key, None)

    def _sweep(self, may_evict: Callable[[KeyT], bool]) -> KeyT | None:
        keys = list(self._visited)
        at = keys.index(self._hand) if self._hand in self._visited else 0
        for step in range(2 * len(keys)):
            key = keys[(at + step) % len(keys)]
            if self._visited[key]:
                self._visited[key] = False
            elif may_evict(key):
                self._hand = key
                self.remove(key)
                return key
        return None
