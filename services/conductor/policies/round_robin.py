"""Placement in turns, for comparison. Pure."""

from __future__ import annotations

import random
from collections import OrderedDict

from kvmesh.services.conductor.domain import Schedule
from kvmesh.services.conductor.policies.policy import PickingPolicy, Pool

MAX_TURNS = 65_536  # instances whose last turn is remembered


class RoundRobin(PickingPolicy):
    """Picks the instance whose last turn is longest ago; a new instance counts as never having had one."""

    def __init__(self) -> None:
        self._turn = 0
        self._turns: dict[str, OrderedDict[str, int]] = {}  # by half

    def pick(self, request: Schedule, pool: Pool, rng: random.Random) -> str:
        turns = self._turns.setdefault(pool.half, OrderedDict())
        chosen = min(pool.names, key=lambda name: turns.get(name, 0))
        self._turn += 1
        turns[chosen] = self._turn
        turns.move_to_end(chosen)
        if len(turns) > MAX_TURNS:
            turns.popitem(last=False)
        return chosen
