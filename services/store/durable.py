"""What no node knows and a new leader must: quotas, bindings of names, replica targets and pins, configuration.

Written under a term, and refused once a later one has been given: what a frozen leader had on its way when another
took over changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from kvmesh.errors import StaleTerm

QUOTA, NAME, TARGET, SETTING = "quota", "name", "target", "setting"
TOMBSTONE, DRAIN, UNPIN, CONFIG = "tombstone", "drain", "unpin", "config"
KINDS = (QUOTA, NAME, TARGET, SETTING, TOMBSTONE, DRAIN, UNPIN, CONFIG)

Kept = dict[str, dict[bytes, bytes]]  # by kind; every kind is there


def nothing() -> Kept:
    """Of every kind."""
    return {kind: {} for kind in KINDS}


class Durable(Protocol):
    """Survives the master when there is a Redis. Every call ends within the store's own deadline."""

    async def load(self) -> Kept:
        """All that is kept. Raises Unavailable."""

    async def put(self, kind: str, items: Mapping[bytes, bytes], term: int) -> None:
        """Keep all of `items`, over what was there. Raises StaleTerm (nothing is kept), Unavailable (nobody knows)."""

    async def delete(self, kind: str, keys: Collection[bytes], term: int) -> None:
        """Forget them. Raises StaleTerm, Unavailable."""


class MemoryDurable:
    """Without Redis: as long as the process lives."""

    def __init__(self) -> None:
        self._kept = nothing()
        self._term = 0

    async def load(self) -> Kept:
        """See Durable."""
        return {kind: dict(items) for kind, items in self._kept.items()}

    async def put(self, kind: str, items: Mapping[bytes, bytes], term: int) -> None:
        """See Durable."""
        self._fence(term)
        self._kept[kind].update(items)

    async def delete(self, kind: str, keys: Collection[bytes], term: int) -> None:
        """See Durable."""
        self._fence(term)
        for key in keys:
            self._kept[kind].pop(key, None)

    def _fence(self, term: int) -> None:
        if term < self._term:
            raise StaleTerm(f"term={term}: the store has been written under term {self._term}", field="term")
        self._term = term
