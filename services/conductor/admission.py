"""Whether a request is taken at all. Pure: time comes in as an argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.conductor.domain import Refuse, Schedule
from services.conductor.instance import Instance
from services.conductor.placement import Choice
from services.conductor.settings import Settings


@dataclass(frozen=True, slots=True)
class Slo:
    """What one request is held to, in seconds."""

    ttft_s: float
    tbt_s: float


class Admission:
    """One conductor's gate: before a request is weighed, and once it has a choice."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def slo(self, request: Schedule) -> Slo:
        """Its own, else the default."""
        return Slo(request.ttft_slo_s or self._settings.slo_ttft_s, request.tbt_slo_s or self._settings.slo_tbt_s)

    def gate(self, request: Schedule, usable: Sequence[Instance], now: float) -> Refuse | None:
        """Why it is not even weighed. `usable`: instances of its model that may get work."""
        return None

    def confirm(self, request: Schedule, choice: Choice, slo: Slo, now: float) -> Choice | Refuse:
        """The choice that policy made, or why it is refused all the same."""
        return choice
