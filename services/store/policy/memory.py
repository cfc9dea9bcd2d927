"""Bounds the memory of the map: past the limit the coldest keys are left out, and how many are left out is known.

For each key that must go, SAMPLE keys are drawn at random; those that were looked up least lately go. A store of which
keys were left out owes a snapshot, for which it is asked when there is room for the keys again.
"""

from __future__ import annotations

import random

from kvmesh.kvcache.announce import Announcement
from kvmesh.services.store.block_map import ENTRY_BYTES, REPLICA_BYTES, MasterMap
from kvmesh.services.store.policy.heat import KeyHeat

SAMPLE = 2
ROUND = 1024
MAX_ROUNDS = 128  # in one step; the rest with the next announcement
LOW = 0.9  # below this share of the limit there is room again


class MapMemory:
    """Keeps the map within `limit_bytes`; 0 means that there is no limit."""

    def __init__(self, blocks: MasterMap, heat: KeyHeat, limit_bytes: int) -> None:
        self._map = blocks
        self._heat = heat
        self.limit_bytes = limit_bytes
        self._missing: dict[str, int] = {}  # store → about how many of its keys were left out
        self.shed = 0  # replicas that were left out since the start

    @property
    def missing(self) -> int:
        """About how many replicas are left out now."""
        return sum(self._missing.values())

    def said(self, said: Announcement) -> None:
        """Notes an announcement, before it is applied: removed keys that were left out are no longer missing."""
        missing = self._missing.get(said.store_id)
        if missing and said.removed:
            unknown = len(said.removed) - len(self._map.held(said.store_id, b"".join(said.removed)))
            self._missing[said.store_id] = max(1, missing - unknown)

    def keep(self, rng: random.Random) -> int:
        """Leaves out as many keys as is needed, up to MAX_ROUNDS of ROUND keys, which is more than an announcement
        brings. Returns how many replicas that were."""
        shed = 0
        for _ in range(MAX_ROUNDS if self.limit_bytes else 0):
            if self._map.bound_bytes <= self.limit_bytes:
                break
            if self._map.sweep(ROUND):
                continue  # keys that no answer shows any more go first
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
        """Forgets a store whose member has ended."""
        self._missing.pop(store_id, None)

    def lacks(self, store_id: str) -> bool:
        """Whether keys of the store are left out."""
        return store_id in self._missing

    def wants_snapshot(self, store_id: str) -> bool:
        """Whether keys of the store are left out and there is room for them again."""
        missing = self._missing.get(store_id, 0)
        needed = missing * (ENTRY_BYTES + REPLICA_BYTES)
        # A snapshot is gathered beside what is shown.
        gathered = REPLICA_BYTES * (self._map.count(store_id) + missing)
        return bool(missing) and self._map.bound_bytes + needed + gathered < LOW * self.limit_bytes

    def began_snapshot(self, store_id: str) -> None:
        """Notes that a snapshot of the store begins: nothing of the store is missing then."""
        self._missing.pop(store_id, None)
