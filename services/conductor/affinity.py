"""What nearness is worth: requests of one session where the last one went, requests of one origin together. Terms of
the score, never a router of its own. Pure."""

from __future__ import annotations

from services.conductor.domain import Schedule
from services.conductor.placement import Choice
from services.conductor.settings import AffinitySettings


class Affinity:
    """Remembers where sessions and origins went lately, bounded."""

    def __init__(self, settings: AffinitySettings) -> None:
        self._settings = settings

    def placed(self, request: Schedule, choice: Choice, now: float) -> None:
        """It went there."""
