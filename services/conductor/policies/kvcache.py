"""The mesh's own policy, and the default: Algorithm 1 of the Mooncake paper and what was added to it. Pure."""

from __future__ import annotations

from kvmesh.services.conductor.domain import Schedule
from kvmesh.services.conductor.policies.policy import Choices, PlacementPolicy, Weigh


class KvCache(PlacementPolicy):
    """Leaves the choice to the cost of each candidate, with what it has cached or would fetch (placing/)."""

    def choose(self, request: Schedule, choices: Choices) -> Weigh:
        return Weigh()
