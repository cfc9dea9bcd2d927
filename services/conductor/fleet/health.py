"""The circuit breakers of all instances: who rests, and when so many fail that it cannot be the instances. Pure.

Never more than half of a pool rests (Envoy calls that its panic threshold): where more would, nobody does, since what
fails them all is something else, and work that may fail is better than none.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass

from kvmesh.services.conductor.domain import Life, Outcome, RequestOutcome
from kvmesh.services.conductor.fleet.breaker import Breaker, BreakerPhase
from kvmesh.services.conductor.settings import BreakerSettings

SURVEY_S = 1.0  # while nobody rests

Pool = Hashable


@dataclass(frozen=True, slots=True)
class Standing:
    """One instance in a survey. `pools` are those that it works in (a model's prefill, its decode); `able` says that it
    would get work, apart from its breaker."""

    life: Life
    pools: tuple[Pool, ...]
    able: bool


@dataclass(slots=True)
class _Known:
    breaker: Breaker
    since: float
    pools: tuple[Pool, ...] = ()
    able_in: tuple[Pool, ...] = ()  # where it is counted


class Breakers:
    """The breakers of the incarnations that a survey has visited and that were not forgotten since. A survey visits
    some at a time."""

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._known: dict[Life, _Known] = {}
        self._named: dict[str, Life] = {}
        self._able: dict[Pool, set[Life]] = {}
        self._probes: dict[str, set[Life]] = {}
        self._tripped: set[Life] = set()  # not closed, and perhaps some that have closed
        self._panics: dict[Pool, bool] = {}  # at `_judged_at`, and while nothing changes
        self._judged_at = float("-inf")
        self._surveyed_at = float("-inf")

    @property
    def tripped(self) -> Collection[Life]:
        """The incarnations that may be at rest."""
        return self._tripped

    def due(self, now: float) -> bool:
        """Says whether it is time to visit all instances."""
        return bool(self._tripped) or now - self._surveyed_at >= SURVEY_S

    def begin(self, now: float) -> None:
        """Notes that a survey begins."""
        self._surveyed_at = now

    def survey(self, standings: Iterable[Standing], now: float) -> None:
        """Updates some of the instances, as they are now."""
        for one in standings:
            known = self._known.get(one.life)
            if known is None:
                known = self._known[one.life] = _Known(Breaker(self._settings), now)
                self._named[one.life[0]] = one.life
            known.pools = one.pools
            self._count(one.life, known, one.pools if one.able else ())
        self._tripped = {life for life in self._tripped if self._trips(life, now)}
        trying = {name: {x for x in lives if self._tries(x, name, now)} for name, lives in self._probes.items()}
        self._probes = {name: lives for name, lives in trying.items() if lives}
        self._panics.clear()

    def forget(self, life: Life) -> None:
        """Forgets an instance that no longer exists."""
        known = self._known.pop(life, None)
        if known is None:
            return
        if self._named[life[0]] == life:
            del self._named[life[0]]
        self._count(life, known, ())
        self._tripped.discard(life)
        self._panics.clear()

    def _count(self, life: Life, known: _Known, able_in: tuple[Pool, ...]) -> None:
        if able_in == known.able_in:
            return
        for pool in known.able_in:
            self._able[pool].discard(life)
            if not self._able[pool]:
                del self._able[pool]
        for pool in able_in:
            self._able.setdefault(pool, set()).add(life)
        known.able_in = able_in

    def why_not(self, life: Life, now: float) -> str:
        """Returns why the instance is at rest, or ""."""
        if life not in self._tripped:
            return ""
        known = self._known[life]
        why = known.breaker.why_not(now)
        return why if why and not any(self._panic(pool, now) for pool in known.pools) else ""

    def placed(self, life: Life, request_id: str, now: float) -> None:
        """Notes a request placed there; after a rest the first one is the probe."""
        if life in self._tripped and self._known[life].breaker.placed(request_id, now):
            self._probes.setdefault(request_id, set()).add(life)
            self._panics.clear()

    def served(self, life: Life, request_id: str, now: float) -> None:
        """Notes that the instance has prefilled the request; when that began is unknown."""
        if (known := self._known.get(life)) is not None:
            known.breaker.succeeded(request_id, float("-inf"), now)
            self._panics.clear()

    def record_outcome(self, life: Life, outcome: RequestOutcome, now: float) -> None:
        """Notes how a request ended, once for each attempt, as the decode instance `life` reports."""
        began = now - outcome.duration_s
        lives = self._probes.pop(outcome.request_id, set()) & self._known.keys()
        match outcome.outcome:
            case Outcome.DONE:
                for one in (lives | {life}) & self._known.keys():
                    self._known[one].breaker.succeeded(outcome.request_id, began, now)
            case Outcome.FAILED if (blamed := self._named.get(outcome.blamed)) is not None:
                known = self._known[blamed]
                if began >= known.since:  # else its last life may have failed it
                    known.breaker.failed(outcome.request_id, began, now)
                    self._tripped.add(blamed)
            case _:
                pass
        for one in lives:
            self._known[one].breaker.released(outcome.request_id)
        self._panics.clear()

    def drop(self, life: Life) -> None:
        """Resets the breaker of an incarnation that is over."""
        if (known := self._known.get(life)) is not None:
            known.breaker = Breaker(self._settings)
        self._tripped.discard(life)
        self._panics.clear()

    def _trips(self, life: Life, now: float) -> bool:
        return self._known[life].breaker.phase(now) is not BreakerPhase.CLOSED

    def _tries(self, life: Life, request_id: str, now: float) -> bool:
        return life in self._tripped and self._known[life].breaker.probe(now) == request_id

    def _panic(self, pool: Pool, now: float) -> bool:
        """Says whether more than half of those that could work in the pool would be at rest."""
        if now != self._judged_at:
            self._panics.clear()
            self._judged_at = now
        if pool not in self._panics:
            able: Collection[Life] = self._able.get(pool, ())
            resting = sum(life in able and self._known[life].breaker.why_not(now) != "" for life in self._tripped)
            self._panics[pool] = 2 * resting > len(able)
        return self._panics[pool]
