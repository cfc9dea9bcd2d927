"""The circuit breaker of one instance: it rests when too many of its requests fail, and is tried again. Pure.

    CLOSED ──enough failures──▶ OPEN ──its rest is over──▶ HALF_OPEN ──the probe is answered──▶ CLOSED
                                 ▲                             │
                                 └──────the probe fails: the rest doubles

Only requests that began after the rest judge it anew: what was under way when it opened tells of the time before. A
probe that nobody reports is given up after `probe_s`, so that there is always another one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from kvmesh.services.conductor.settings import BreakerSettings

BUCKETS = 10  # of a window: failures count for 90% to 100% of it


class BreakerPhase(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


@dataclass(slots=True)
class _Bucket:
    index: int
    requests: int = 0
    failures: int = 0


class BreakerWindow:
    """How many requests ended within the last `window_s` seconds, and how many of them failed."""

    def __init__(self, window_s: float) -> None:
        self._bucket_s = window_s / BUCKETS
        self._buckets: deque[_Bucket] = deque(maxlen=BUCKETS)

    def add(self, *, failed: bool, now: float) -> None:
        """Counts one request that ended."""
        index = int(now / self._bucket_s)
        if not self._buckets or self._buckets[-1].index != index:
            self._buckets.append(_Bucket(index))
        self._buckets[-1].requests += 1
        self._buckets[-1].failures += failed

    def count(self, now: float) -> tuple[int, int]:
        """Returns the numbers of requests and failures."""
        first = int(now / self._bucket_s) - BUCKETS + 1
        recent = [bucket for bucket in self._buckets if bucket.index >= first]
        return sum(bucket.requests for bucket in recent), sum(bucket.failures for bucket in recent)

    def clear(self) -> None:
        """Forgets everything."""
        self._buckets.clear()


class Breaker:
    """The breaker of one instance. `now` is in seconds of one clock and never decreases; `began` is when the request in
    question began on that clock."""

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._window = BreakerWindow(settings.window_s)
        self._until: float | None = None  # it rests; None: closed
        self._rest_s = 0.0  # the last one
        self._closed_at = 0.0
        self._probe: tuple[str, float] | None = None  # request_id, given up when
        self._why = ""

    def phase(self, now: float) -> BreakerPhase:
        if self._until is None:
            return BreakerPhase.CLOSED
        return BreakerPhase.OPEN if now < self._until else BreakerPhase.HALF_OPEN

    def why_not(self, now: float) -> str:
        """Returns why the instance gets no request now; "" when it may have one (half open: exactly one)."""
        match self.phase(now):
            case BreakerPhase.CLOSED:
                return ""
            case BreakerPhase.OPEN:
                assert self._until is not None
                return f"rests for {self._until - now:.1f} s more: {self._why}"
            case BreakerPhase.HALF_OPEN:
                probe = self.probe(now)
                return f"is being tried with request {probe} after its rest: {self._why}" if probe else ""

    def probe(self, now: float) -> str:
        """Returns the request that probes it now, or ""."""
        if self._probe is None or now >= self._probe[1]:
            return ""
        return self._probe[0]

    def placed(self, request_id: str, now: float) -> bool:
        """Notes a request placed there; returns whether it is the probe."""
        if self.phase(now) is not BreakerPhase.HALF_OPEN or self.probe(now):
            return False
        self._probe = request_id, now + self._settings.probe_s
        return True

    def released(self, request_id: str) -> None:
        """Notes that the request ended in a way that says nothing about the instance."""
        if self._probe is not None and self._probe[0] == request_id:
            self._probe = None

    def succeeded(self, request_id: str, began: float, now: float) -> None:
        """Notes that the instance has done its part of the request."""
        match self.phase(now):
            case BreakerPhase.CLOSED:
                self._window.add(failed=False, now=now)
            case BreakerPhase.HALF_OPEN if self._judges(request_id, began, now):
                self._until, self._probe, self._closed_at = None, None, now
                self._window.clear()
            case _:
                pass

    def failed(self, request_id: str, began: float, now: float) -> None:
        """Notes that the instance failed the request."""
        match self.phase(now):
            case BreakerPhase.CLOSED:
                self._window.add(failed=True, now=now)
                requests, failures = self._window.count(now)
                s = self._settings
                if failures >= s.failures and failures >= s.share * requests:
                    why = f"{failures} of {requests} requests failed within {s.window_s:g} s"
                    self._open(self._next_rest_s(now), why, now)
            case BreakerPhase.HALF_OPEN if self._judges(request_id, began, now):
                self._open(min(self._settings.max_rest_s, 2 * self._rest_s), "it failed again after its rest", now)
            case _:
                pass

    def _judges(self, request_id: str, began: float, now: float) -> bool:
        assert self._until is not None
        return began >= self._until or request_id == self.probe(now)

    def _open(self, rest_s: float, why: str, now: float) -> None:
        self._until, self._rest_s, self._why, self._probe = now + rest_s, rest_s, why, None
        self._window.clear()

    def _next_rest_s(self, now: float) -> float:
        """Returns twice the last rest, halved for each window in which the breaker has been closed since."""
        windows = min(64, int((now - self._closed_at) / self._settings.window_s))
        rest_s = 2 * self._rest_s * 0.5**windows
        return min(self._settings.max_rest_s, max(self._settings.rest_s, rest_s))
