"""What a leading conductor orders so that load stays even: copies of hot blocks, roles, hints to autoscalers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.conductor.domain import Action, Role, Schedule
from services.conductor.index import Index, Survey
from services.conductor.instance import Instance
from services.conductor.settings import Settings


@dataclass(frozen=True, slots=True)
class Hint:
    """See `ScaleHint` in conductor.proto."""

    model: str
    role: Role
    instances: int
    change: int
    load: float
    reason: str


class Balance:
    """Watches placements; `tick` gives orders while this conductor leads."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def saw(self, request: Schedule, survey: Survey, now: float) -> None:
        """A request was weighed; `survey`: who holds its blocks."""

    def tick(self, instances: Iterable[Instance], index: Index, now: float, *, leads: bool) -> Sequence[Action]:
        """Orders of this moment. `instances`: those that may get work."""
        return ()

    def hints(self, instances: Iterable[Instance], now: float) -> Sequence[Hint]:
        """How many instances each pool wants."""
        return ()
