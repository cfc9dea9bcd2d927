"""Eviction orders as their words say, with lists that are sorted afresh for every question."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass
class Entry:
    uses: int = 0
    length: int = 1
    replicated: bool = False
    protected: bool = False
    idle: bool = False
    priority: tuple[int, int] = (0, 0)  # age + cost, time
    first: int = 0  # when; 0: is not


class NaiveOrder:
    """The same words as EvictionOrder. `parity`: tokens at which attention costs as much as the rest."""

    def __init__(self, policy: str, block_tokens: int = 64) -> None:
        self.policy, self.block_tokens = policy, block_tokens
        self.entries: dict[Hashable, Entry] = {}
        self.age = self.time = 0

    def cost(self, entry: Entry) -> int:
        if self.policy == "lru":
            full = 2
        elif self.policy == "lfu":
            full = 2 * entry.uses
        elif self.policy == "length":
            tokens = entry.length * self.block_tokens
            full = round(16 * min(max(entry.uses, 1), 8) * (1 + tokens / 2 / 32_768))
        else:
            raise ValueError(f"policy={self.policy!r}: NaiveOrder.cost has no rule for it: add its words here")
        return full // 2 if entry.replicated else full

    def now(self, entry: Entry) -> tuple[int, int]:
        self.time += 1
        return (self.age + self.cost(entry), self.time)

    def admit(self, key: Hashable, length: int = 1) -> None:
        self.entries[key] = Entry(length=length)

    def use(self, key: Hashable, length: int = 1) -> None:
        if key in self.entries:
            entry = self.entries[key]
            entry.uses += 1
            entry.length = max(entry.length, length)

    def forget(self, key: Hashable) -> None:
        self.entries.pop(key, None)

    def mark_idle(self, key: Hashable) -> None:
        entry = self.entries[key]
        entry.idle, entry.first, entry.priority = True, 0, self.now(entry)

    def mark_busy(self, key: Hashable) -> None:
        if key in self.entries:
            self.entries[key].idle = False
            self.entries[key].first = 0

    def touch(self, keys: Sequence[Hashable], use: bool = True) -> None:
        for key in reversed(keys):
            if key in self.entries:
                if use:
                    self.use(key, len(keys))
                if self.entries[key].idle:
                    self.mark_idle(key)

    def evict_first(self, key: Hashable) -> None:
        entry = self.entries.get(key)
        if entry is not None and entry.idle and not entry.protected:
            self.time += 1
            entry.first = self.time

    def set_replicated(self, key: Hashable, elsewhere: bool) -> None:
        entry = self.entries[key]
        if entry.replicated == elsewhere:
            return
        entry.replicated = elsewhere
        if entry.idle and not entry.first:
            priority = self.now(entry)
            entry.priority = priority if not elsewhere else min(entry.priority, priority)

    def protect(self, key: Hashable, protected: bool) -> None:
        entry = self.entries[key]
        if entry.protected != protected:
            entry.protected = protected
            if entry.idle:
                self.mark_idle(key)

    def order(self, protected: bool = True) -> list[Hashable]:
        idle = [
            (key, entry) for key, entry in self.entries.items() if entry.idle and (protected or not entry.protected)
        ]
        idle.sort(key=lambda one: (one[1].protected, -one[1].first, one[1].priority))
        return [key for key, _ in idle]

    def evict(self, n: int, protected: bool = True) -> list[Hashable]:
        gone = self.order(protected)[: max(n, 0)]
        for key in gone:
            entry = self.entries.pop(key)
            if not entry.first and self.policy != "lfu":
                self.age = max(self.age, entry.priority[0])
        return gone
