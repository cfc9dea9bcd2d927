"""Eviction orders as their words say, with lists that are sorted afresh for every question."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass
class Entry:
    uses: int = 0
    length: int = 1
    copied: bool = False
    spared: bool = False
    idle: bool = False
    place: tuple[int, int] = (0, 0)  # life + price, time
    cooled: int = 0  # when; 0: is not


class NaiveOrder:
    """The same words as EvictionOrder. `parity`: tokens at which attention costs as much as the rest."""

    def __init__(self, policy: str, block_tokens: int = 64) -> None:
        self.policy, self.block_tokens = policy, block_tokens
        self.entries: dict[Hashable, Entry] = {}
        self.life = self.time = 0

    def price(self, entry: Entry) -> int:
        if self.policy == "lru":
            full = 2
        elif self.policy == "lfu":
            full = 2 * entry.uses
        else:
            tokens = entry.length * self.block_tokens
            full = round(16 * min(max(entry.uses, 1), 8) * (1 + tokens / 2 / 32_768))
        return full // 2 if entry.copied else full

    def now(self, entry: Entry) -> tuple[int, int]:
        self.time += 1
        return (self.life + self.price(entry), self.time)

    def admit(self, key: Hashable, length: int = 1) -> None:
        self.entries[key] = Entry(length=length)

    def use(self, key: Hashable, length: int = 1) -> None:
        if key in self.entries:
            entry = self.entries[key]
            entry.uses += 1
            entry.length = max(entry.length, length)

    def forget(self, key: Hashable) -> None:
        self.entries.pop(key, None)

    def put(self, key: Hashable) -> None:
        entry = self.entries[key]
        entry.idle, entry.cooled, entry.place = True, 0, self.now(entry)

    def take(self, key: Hashable) -> None:
        if key in self.entries:
            self.entries[key].idle = False
            self.entries[key].cooled = 0

    def touch(self, keys: Sequence[Hashable], use: bool = True) -> None:
        for key in reversed(keys):
            if key in self.entries:
                if use:
                    self.use(key, len(keys))
                if self.entries[key].idle:
                    self.put(key)

    def cool(self, key: Hashable) -> None:
        entry = self.entries.get(key)
        if entry is not None and entry.idle and not entry.spared:
            self.time += 1
            entry.cooled = self.time

    def copied(self, key: Hashable, elsewhere: bool) -> None:
        entry = self.entries[key]
        if entry.copied == elsewhere:
            return
        entry.copied = elsewhere
        if entry.idle and not entry.cooled:
            place = self.now(entry)
            entry.place = place if not elsewhere else min(entry.place, place)

    def spare(self, key: Hashable, spared: bool) -> None:
        entry = self.entries[key]
        if entry.spared != spared:
            entry.spared = spared
            if entry.idle:
                self.put(key)

    def order(self, spared: bool = True) -> list[Hashable]:
        idle = [(key, entry) for key, entry in self.entries.items() if entry.idle and (spared or not entry.spared)]
        idle.sort(key=lambda one: (one[1].spared, -one[1].cooled, one[1].place))
        return [key for key, _ in idle]

    def evict(self, n: int, spared: bool = True) -> list[Hashable]:
        gone = self.order(spared)[: max(n, 0)]
        for key in gone:
            entry = self.entries.pop(key)
            if not entry.cooled and self.policy != "lfu":
                self.life = max(self.life, entry.place[0])
        return gone
