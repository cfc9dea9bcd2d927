"""Who says which coupled instance gets a request, and the plain routers of simulations without conductors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvmesh.errors import KvmeshError
from kvmesh.services.conductor.domain import Refuse
from kvmesh.sim.config import Routing
from kvmesh.sim.coupled import Coupled, CoupledRow


class EngineRouter(Protocol):
    """Chooses among the engines of a cluster, and hears what becomes of requests there."""

    def place(self, guest: CoupledRow) -> Coupled | Refuse:
        """Returns where a request goes that asks now."""

    def reaches(self, guest: CoupledRow, engine: Coupled) -> KvmeshError | None:
        """Notes that a request is about to be given to the engine; returns why it is turned away instead."""

    def leaves(self, guest: CoupledRow, engine: Coupled, error: KvmeshError | None) -> None:
        """Notes that a request which was given to the engine has ended there."""

    def check_empty(self) -> None:
        """Raises AssertionError unless all requests have left: after the last one."""


class PlainRouter:
    """Chooses in turns, or the engine with the fewest requests; those that have as many take turns."""

    def __init__(self, engines: Sequence[Coupled], routing: Routing) -> None:
        self._engines, self._routing = engines, routing
        self._turn = -1

    def place(self, guest: CoupledRow) -> Coupled:
        count = len(self._engines)
        turns = range(self._turn + 1, self._turn + 1 + count)
        self._turn = turns[0]
        if self._routing is Routing.LEAST_LOADED:
            self._turn = min(turns, key=lambda n: self._engines[n % count].live)
        self._turn %= count
        return self._engines[self._turn]

    def reaches(self, guest: CoupledRow, engine: Coupled) -> None:
        """Turns nobody away."""

    def leaves(self, guest: CoupledRow, engine: Coupled, error: KvmeshError | None) -> None:
        """Does nothing: engines count their requests themselves."""

    def check_empty(self) -> None:
        """Does nothing: it keeps no requests."""
