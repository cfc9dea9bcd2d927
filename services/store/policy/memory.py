"""A bound on the memory of the map: past it the coldest keys are left out, and what is left out is known.

Coldest: of SAMPLE keys drawn by lot for each that must go, the one asked for least lately. A store of which keys were
left out owes a snapshot, for which it is asked when there is room for them again.
"""

from __future__ import annotations

import random

from kvmesh.kvcache.announce import Announcement
from kvmesh.services.store.block_map import ENTRY_BYTES, REPLICA_BYTES, MasterMap
from kvmesh.services.store.policy.heat import KeyHeat

SAMPLE = 2
ROUND = 1024
MAX_ROUNDS = 128  # in one step; the rest with the next announcement
LOW = 0.9  # there is room again below this share of the limit


class MapMemory:
    """Keeps the map within `limit_bytes`; 0: there is no limit."""

    def __init__(self, blocks: MasterMap, heat: KeyHeat, limit_bytes: int) -> None:
        self._map = blocks
        self._heat = heat
        self.limit_bytes = limit_bytes
        self._missing: dict[str, int] = {}  # store → about how many of its keys were left out
        self.shed = 0  # since the start

    @property
    def missing(self) -> int:
        """About how many replicas are left out now."""
        return sum(self._missing.values())

    def said(self, said: Announcement) -> None:
        """To be called before an announcement is applied: what is removed need not be missed any more."""
        missing = self._missing.get(said.store_id)
        if missing and said.removed:
            unknown = len(said.removed) - len(self._map.held(said.store_id, b"".join(said.removed)))
            self._missing[said.store_id] = max(1, missing - unknown)

    def keep(self, rng: random.Random) -> int:
        """Leave out as much as is needed, up to MAX_ROUNDS of it, which is more than an announcement brings; how many
        replicas that were."""
        shed = 0
        for _ in range(MAX_ROUNDS if self.limit_bytes else 0):
            if self._map.bound_bytes <= self.limit_bytes:
                break
            if self._map.sweep(ROUND):
                continue  # what nobody sees goes first
            excess = self._map.bound_bytes - self.limit_bytes
            wanted = min(ROUND, excess // (ENTRY_BYTES + REPLICA_BYTES) + 1)
            keys = sorted(self._map.sample(SAMPLE * wanted, rng), key=self._heat.of)[:wanted]
            for store_id, gone in self._map.forget(keys).items():
                self._missing[store_id] = self._missing.get(store_id, 0) + len(gone)
                shed += len(gone)
            if not keys:
                break
        self.shed += shed
        return shed

    def ended(self, store_id: str) -> None:
        """Forget a store that is none any more."""
        self._missing.pop(store_id, None)

    def lacks(self, store_id: str) -> bool:
        """Whether some of its keys are left out."""
        return store_id in self._missing

    def wants_snapshot(self, store_id: str) -> bool:
        """Whether something of it is missing and there is room for that again."""
        missing = self._missing.get(store_id, 0)
        needed = missing * (ENTRY_BYTES + REPLICA_BYTES)
        # A snapshot is gathered beside what is shown.
        gathered = REPLICA_BYTES * (self._map.count(store_id) + missing)
        return bool(missing) and self._map.bound_bytes + needed + gathered < LOW * self.limit_bytes

    def began_snapshot(self, store_id: str) -> None:
        """All of the store is said again: nothing of it is missing."""
        self._missing.pop(store_id, None)
