"""How many blocks of each tenant one node may hold: an allowance for each tag (the first bytes of a key).

The master divides a tenant's quota among the nodes; what it tells a node is that node's allowance. Above it, the tag's
own coldest idle blocks go, those that a soft pin spares last; nobody else's ever go for it. A sealed block that is in
use, and the one that has just been sealed, are not evicted: an allowance may be passed while its blocks are read.

When a tag becomes limited, its blocks have yet to be put in order. That takes as many steps of `enforce` as the stores
are large; until then nothing goes for that tag. What is sealed or used meanwhile is more recent than all the others.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from kvmesh.kvcache.keys import TAG_BYTES

STEP = 64  # blocks looked at in one call
LOOK = 4096  # keys put in order in one call: some milliseconds


class Store(Protocol):
    """What quotas need of a node store."""

    def keys(self) -> list[bytes]: ...

    def holds(self, key: bytes) -> bool: ...

    def place(self, key: bytes) -> int | None:
        """Returns the block's priority (lower ones are evicted earlier), or None when it is in use or not here."""

    def evict_one(self, key: bytes, *, spared: bool) -> bool | None:
        """Evicts this block and returns True. Returns False when a soft pin keeps it (and `spared` is not set), None
        when it is in use."""


class TagQuotas:
    """The tag quotas of all stores of one node, on their thread. Counting costs O(1) a block. The order in which a
    tag's blocks are evicted, least recently used first, costs the same and is kept for limited tags alone."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self._limits: dict[bytes, int] = {}
        self._lanes: dict[bytes, OrderedDict[tuple[bytes, Store], None]] = {}
        self._unlisted: set[bytes] = set()  # limited tags of which the lane lacks some
        self._stores: Sequence[Store] = ()
        self._listing: Iterator[int] | None = None

    @property
    def limits(self) -> Mapping[bytes, int]:
        """The limit of each tag, in blocks."""
        return self._limits

    def count(self, tag: bytes) -> int:
        """Returns the number of sealed blocks with this tag."""
        return self._counts.get(tag, 0)

    def limit(self, limits: Mapping[bytes, int], stores: Iterable[Store]) -> None:
        """Replaces all limits; 0 or less means no limit. `enforce` then evicts what is above. O(tags, stores)."""
        self._limits = {tag: blocks for tag, blocks in limits.items() if blocks > 0}
        new = self._limits.keys() - self._lanes.keys()
        self._lanes = {tag: self._lanes.get(tag, OrderedDict()) for tag in self._limits}
        self._unlisted = (self._unlisted & self._limits.keys()) | new
        if new:
            self._stores = list(stores)
            self._listing = self._list(frozenset(self._unlisted))

    def added(self, store: Store, key: bytes) -> None:
        """Notes a sealed block; others of its tag may be evicted for it."""
        tag = key[:TAG_BYTES]
        self._counts[tag] = self._counts.get(tag, 0) + 1
        if tag in self._lanes:
            self._lanes[tag][key, store] = None
            if tag not in self._unlisted:
                self._enforce(tag, (key, store))

    def added_all(self, keys: Iterable[bytes]) -> None:
        """Notes sealed blocks, in a cheaper way that is right only while no tag is limited."""
        counts = self._counts
        for key in keys:
            counts[key[:TAG_BYTES]] = counts.get(key[:TAG_BYTES], 0) + 1

    def gone(self, store: Store, key: bytes) -> None:
        """Notes that a block is not sealed any more."""
        tag = key[:TAG_BYTES]
        if self._counts[tag] == 1:
            del self._counts[tag]
        else:
            self._counts[tag] -= 1
        if tag in self._lanes:
            self._lanes[tag].pop((key, store), None)

    def used(self, store: Store, keys: Iterable[bytes]) -> None:
        """Notes that blocks were used now, the last of `keys` first; those not sealed there are ignored."""
        for key in keys:
            lane, entry = self._lanes.get(key[:TAG_BYTES]), (key, store)
            if lane is None:
                continue
            if entry in lane:
                lane.move_to_end(entry)
            elif key[:TAG_BYTES] in self._unlisted and store.holds(key):
                lane[entry] = None

    def enforce(self) -> bool:
        """Orders some blocks of newly limited tags, and evicts a few blocks of each tag above its limit. Returns
        whether more is left to do."""
        looked = 0
        while self._listing is not None and looked < LOOK:
            count = next(self._listing, None)
            if count is None:
                self._listing = None
                self._unlisted.clear()
            else:
                looked += count
        more = [self._enforce(tag, None) for tag in self._limits if tag not in self._unlisted]
        return any(more) or self._listing is not None

    def check_integrity(self, stores: Iterable[Store]) -> None:
        """Raises AssertionError unless these stores hold what is counted. O(all blocks)."""
        held = [(key, store) for store in stores for key in store.keys()]  # noqa: SIM118
        counts: dict[bytes, int] = {}
        for key, _ in held:
            counts[key[:TAG_BYTES]] = counts.get(key[:TAG_BYTES], 0) + 1
        assert counts == self._counts, "blocks of a tag are counted wrong"
        for tag, lane in self._lanes.items():
            there = {entry for entry in held if entry[0][:TAG_BYTES] == tag}
            assert set(lane) == there or (tag in self._unlisted and set(lane) < there), "a lane and what is sealed"

    def _list(self, tags: frozenset[bytes]) -> Iterator[int]:
        """Puts all blocks of these tags into their order, before those that are in it already. Yields how many blocks
        it has looked at since the last time."""
        for store in reversed(self._stores):  # one after the other: places of two stores cannot be compared
            keys, runs = store.keys(), dict[bytes, list[list[bytes]]]()

            def place(key: bytes, store: Store = store) -> float:
                found = store.place(key)
                return float("inf") if found is None else found

            for start in range(0, len(keys), LOOK):
                some: dict[bytes, list[bytes]] = {}
                for key in keys[start : start + LOOK]:
                    if key[:TAG_BYTES] in tags:
                        some.setdefault(key[:TAG_BYTES], []).append(key)
                for tag, run in some.items():
                    runs.setdefault(tag, []).append(sorted(run, key=place, reverse=True))
                yield min(LOOK, len(keys) - start)
            for tag, parts in runs.items():
                for count, key in enumerate(heapq.merge(*parts, key=place, reverse=True), 1):
                    lane, entry = self._lanes.get(tag), (key, store)
                    if lane is not None and entry not in lane and store.holds(key):
                        lane[entry] = None
                        lane.move_to_end(entry, last=False)
                    if count % STEP == 0:
                        yield STEP

    def _enforce(self, tag: bytes, spare: tuple[bytes, Store] | None) -> bool:
        """Evicts blocks of a tag above its limit, looking at STEP of them at most; those that cannot be evicted now
        become the last. Returns whether some were evicted and more have to be."""
        lane, limit, before, spared = self._lanes[tag], self._limits[tag], self.count(tag), []
        for _ in range(min(STEP, len(lane))):
            if self.count(tag) <= limit:
                return False
            key, store = entry = next(iter(lane))
            went = False if entry == spare else store.evict_one(key, spared=False)
            if not went:
                lane.move_to_end(entry)
                if went is False and entry != spare:
                    spared.append(entry)
        for key, store in spared:
            if self.count(tag) <= limit:
                return False
            store.evict_one(key, spared=True)
        return limit < self.count(tag) < before


class NoTagQuotas(TagQuotas):
    """The quotas of a store that holds parts of blocks counted elsewhere: nothing is counted, and nothing goes."""

    def limit(self, limits: Mapping[bytes, int], stores: Iterable[Store]) -> None:
        """Ignores the limits."""

    def added(self, store: Store, key: bytes) -> None:
        """Counts nothing."""

    def added_all(self, keys: Iterable[bytes]) -> None:
        """Counts nothing."""

    def gone(self, store: Store, key: bytes) -> None:
        """Counts nothing."""

    def check_integrity(self, stores: Iterable[Store]) -> None:
        """Raises AssertionError if something is counted."""
        assert not self._counts and not self._limits and not self._lanes, "a store's blocks are counted twice"
