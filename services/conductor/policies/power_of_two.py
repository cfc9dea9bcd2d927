"""Placement by load among two instances, for comparison. Pure."""

from __future__ import annotations

import random

from kvmesh.services.conductor.domain import Schedule
from kvmesh.services.conductor.placing import ties
from kvmesh.services.conductor.policies.policy import PickingPolicy, Pool


class PowerOfTwo(PickingPolicy):
    """Picks the less loaded of two instances drawn by chance (Mitzenmacher 2001)."""

    def pick(self, request: Schedule, pool: Pool, rng: random.Random) -> str:
        drawn = rng.sample(pool.names, min(2, len(pool.names)))
        return ties.pick(drawn, pool.load_s, pool.requests, rng)
