"""SIEVE eviction (Zhang et al., NSDI 2024): one visited bit a key, one hand that sweeps from old to new."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


class LruSieve(Generic[KeyT]):
    """At most `capacity` keys, unless more than that are busy."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._visited: dict[KeyT, bool] = {}  # oldest first
        self._hand: KeyT | None = None  # the next to look at; None: the oldest

    def __len__(self) -> int:
        return len(self._visited)

    def touch(self, key: KeyT, may_evict: Callable[[KeyT], bool]) -> list[KeyT]:
        """Notes a use; returns keys evicted to make room for a new one."""
        if key in self._visited:
            self._visited[key] = True
            return []
        evicted = []
        while len(self._visited) >= self.capacity:
            victim = self._sweep(may_evict)
            if victim is None:
                break
            evicted.append(victim)
        self._visited[key] = False
        return evicted

    def remove(self, key: KeyT) -> None:
        if self._hand == key:
            keys = list(self._visited)
            at = keys.index(key) + 1
            self._hand = keys[at] if at < len(keys) else None
        self._visited.pop(key, None)

    def _sweep(self, may_evict: Callable[[KeyT], bool]) -> KeyT | None:
        keys = list(self._visited)
        at = keys.index(self._hand) if self._hand in self._visited else 0
        for step in range(2 * len(keys)):
            key = keys[(at + step) % len(keys)]
            if self._visited[key]:
                self._visited[key] = False
            elif may_evict(key):
                self._hand = key
                self.remove(key)
                return key
        return None
