"""Placement by chance, for comparison. Pure."""

from __future__ import annotations

import random

from kvmesh.services.conductor.domain import Schedule
from kvmesh.services.conductor.policies.policy import PickingPolicy, Pool


class RandomPick(PickingPolicy):
    """Picks an instance by chance."""

    def pick(self, request: Schedule, pool: Pool, rng: random.Random) -> str:
        return rng.choice(pool.names)
