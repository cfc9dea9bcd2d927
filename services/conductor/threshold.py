"""The balancing threshold of Algorithm 1: how many times as long as the local prefix the best one must be before
fetching is weighed. Pure."""

from __future__ import annotations

from services.conductor.domain import Measured
from services.conductor.placement import Choice
from services.conductor.settings import Settings


class Threshold:
    """Fixed, or following the load."""

    def __init__(self, settings: Settings) -> None:
        self._fixed = settings.balancing_threshold

    def value(self, now: float) -> float:
        """As it is now."""
        return self._fixed

    def placed(self, choice: Choice, now: float) -> None:
        """A request went there."""

    def measured(self, measured: Measured, now: float) -> None:
        """What a prefill took."""
