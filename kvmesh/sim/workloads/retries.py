"""Clients that were refused and come again when they were told to; what they should have been told.

That is reckoned from what only a simulation knows: the true work of every instance. Those who wait outside are served
in the order of their first refusals, each by the instance that would have it first, as early as its first token then
comes within its SLO: nobody passes, and no machine stands still for their sake. Requests that nobody knows of yet are
not foreseen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from kvmesh.sim.life import Life
from kvmesh.sim.prefiller import Prefiller
from kvmesh.sim.report.records import RetryWait

REASON = "ttft"  # refusals that are judged: those for decode's steps have another measure


class WaitingClients:
    """The clients that were refused and have not come back yet."""

    def __init__(self, prefills: Mapping[str, Prefiller], slo_s: float, hop_s: float) -> None:
        """`slo_s`: of requests that bear none; `hop_s`: what a request takes on its way to prefill."""
        self._prefills, self._slo_s, self._hop_s = prefills, slo_s, hop_s
        self._turns: dict[Life, int] = {}  # of all that were refused and are not placed, by their first refusals
        self._seconds: dict[Life, dict[str, float]] = {}  # that each of them takes alone, at each instance
        self._waiting: dict[Life, None] = {}
        self._on_way: dict[Life, None] = {}  # placed, and not yet there
        self._number = 0

    def refused(self, life: Life, reason: str, told_s: float, now: float) -> None:
        """Records a refusal; `waits` tells whether the client comes again."""
        right_s = math.nan
        if reason == REASON:
            if life not in self._turns:
                self._number += 1
                self._turns[life] = self._number
            right_s = self._right_s(life)
        life.record.waits = (*life.record.waits, RetryWait(told_s, right_s))

    def waits(self, life: Life) -> None:
        """Records that the client will come back when it was told to."""
        self._waiting[life] = None

    def comes(self, life: Life) -> None:
        """Records that the client asks again."""
        self._waiting.pop(life, None)

    def placed(self, life: Life) -> None:
        """Records that the request was taken: `arrives` follows."""
        self._on_way[life] = None
        self.ended(life)
        if life.record.waits and not life.made_before:
            *before, last = life.record.waits
            life.record.waits = (*before, replace(last, placed=True))

    def arrives(self, life: Life) -> None:
        """Its prefill instance has it, or is gone."""
        self._on_way.pop(life, None)

    def ended(self, life: Life) -> None:
        """Forgets a client that does not come again."""
        self._turns.pop(life, None)
        self._seconds.pop(life, None)

    def _right_s(self, life: Life) -> float:
        """When it should come, in seconds from now on."""
        able = {name: one for name, one in self._prefills.items() if not one.dead}
        if not able:
            return math.nan
        free = {name: one.backlog_s() for name, one in able.items()}
        for other in self._on_way:
            if other.prefiller is not None and not other.prefiller.dead:
                free[other.prefiller.node.name] += self._alone_s(other, able)[other.prefiller.node.name]
        turn = self._turns[life]
        # Few come out of turn, so this is nearly sorted.
        before = sorted(
            (one for one in self._waiting if self._turns.get(one, turn) < turn), key=self._turns.__getitem__
        )
        for other in before:
            self._serve(other, free, able)
        return self._serve(life, free, able)

    def _serve(self, life: Life, free: dict[str, float], able: Mapping[str, Prefiller]) -> float:
        """The same, once each instance is free after so long; what serves it then has that work, too."""
        own = self._alone_s(life, able)
        name = min(free, key=lambda one: free[one] + own[one])
        slo_s = life.request.ttft_slo_s or self._slo_s
        comes_s = max(0.0, free[name] + own[name] + self._hop_s - slo_s)
        free[name] = max(free[name], comes_s) + own[name]
        return comes_s

    def _alone_s(self, life: Life, able: Mapping[str, Prefiller]) -> dict[str, float]:
        known = self._seconds.get(life, {})
        if not known.keys() >= able.keys():
            known = {name: one.alone_s(life.tokens, life.request.keys) for name, one in able.items()}
            if life in self._turns:
                self._seconds[life] = known
        return known
