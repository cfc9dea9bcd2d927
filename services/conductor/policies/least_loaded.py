"""Load alone, for comparison. Pure."""

from __future__ import annotations

import random

from kvmesh.services.conductor.domain import Schedule
from kvmesh.services.conductor.placing import ties
from kvmesh.services.conductor.policies.policy import PickingPolicy, Pool


class LeastLoaded(PickingPolicy):
    """Picks the least predicted load; of those that are as good the one with the fewest requests, then chance."""

    def pick(self, request: Schedule, pool: Pool, rng: random.Random) -> str:
        """See `PickingPolicy`."""
        return ties.pick(pool.names, pool.load_s, pool.requests, rng)
