"""Placement by cost without a shared cache, for comparison. Pure."""

from __future__ import annotations

from kvmesh.services.conductor.domain import Schedule
from kvmesh.services.conductor.policies.policy import Choices, PlacementPolicy, Weigh


class CacheAware(PlacementPolicy):
    """Leaves the choice to the cost of each candidate, which has its own prefix alone."""

    def choose(self, request: Schedule, choices: Choices) -> Weigh:
        return Weigh(fetch=False)
