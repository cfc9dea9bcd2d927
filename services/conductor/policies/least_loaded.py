"""Placement by load alone, for comparison. Pure."""

from __future__ import annotations

import random

from kvmesh.services.conductor.domain import Schedule
from kvmesh.services.conductor.placing import ties
from kvmesh.services.conductor.policies.policy import PickingPolicy, Pool


class LeastLoaded(PickingPolicy):
    """Picks the least predicted load; among loads as good as that the fewest requests, then by chance."""

    def pick(self, request: Schedule, pool: Pool, rng: random.Random) -> str:
        return ties.pick(pool.names, pool.load_s, pool.requests, rng)
