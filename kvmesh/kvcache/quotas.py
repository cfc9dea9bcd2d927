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
    """What is needed of a node store."""

    def keys(self) -> list[bytes]: ...

    def holds(self, key: bytes) -> bool: ...

    def place(self, key: bytes) -> int | None:
        """Lower: it would go earlier; None: it is in use, or not here."""

    def evict_one(self, key: bytes, *, spared: bool) -> bool | None:
        """Whether this block went: True; False: a soft pin spares it (and `spared` is not set); None: it is in use."""


class TagQuotas:
    """Of all stores of one node, on their thread. Counting costs O(1) a block; so does the order in which a limited
    tag's blocks go, least recently used first, which is kept for limited tags alone."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self._limits: dict[bytes, int] = {}
        self._lanes: dict[bytes, OrderedDict[tuple[bytes, Store], None]] = {}
        self._unlisted: set[bytes] = set()  # limited tags of which the lane lacks some
        self._stores: Sequence[Store] = ()
        self._listing: Iterator[int] | None = None

    @property
    def limits(self) -> Mapping[bytes, int]:
        """Tag → blocks."""
        return self._limits

    def count(self, tag: bytes) -> int:
        """Sealed blocks with this tag."""
        return self._counts.get(tag, 0)

    def limit(self, limits: Mapping[bytes, int], stores: Iterable[Store]) -> None:
        """These and no others from now on; 0 or less: none. What is above goes with `enforce`. O(tags, stores)."""
        self._limits = {tag: blocks for tag, blocks in limits.items() if blocks > 0}
        new = self._limits.keys() - self._lanes.keys()
        self._lanes = {tag: self._lanes.get(tag, OrderedDict()) for tag in self._limits}
        self._unlisted = (self._unlisted & self._limits.keys()) | new
        if new:
            self._stores = list(stores)
            self._listing = self._list(frozenset(self._unlisted))

    def added(self, store: Store, key: bytes) -> None:
        """It was sealed: others of its tag may have to go."""
        tag = key[:TAG_BYTES]
        self._counts[tag] = self._counts.get(tag, 0) + 1
        if tag in self._lanes:
            self._lanes[tag][key, store] = None
            if tag not in self._unlisted:
                self._enforce(tag, (key, store))

    def added_all(self, keys: Iterable[bytes]) -> None:
        """`added` of each, where no tag is limited."""
        counts = self._counts
        for key in keys:
            counts[key[:TAG_BYTES]] = counts.get(key[:TAG_BYTES], 0) + 1

    def gone(self, store: Store, key: bytes) -> None:
        """It is sealed no more."""
        tag = key[:TAG_BYTES]
        if self._counts[tag] == 1:
            del self._counts[tag]
        else:
            self._counts[tag] -= 1
        if tag in self._lanes:
            self._lanes[tag].pop((key, store), None)

    def used(self, store: Store, keys: Iterable[bytes]) -> None:
        """They were used now, the last of `keys` first; those that are not sealed there are passed over."""
        for key in keys:
            lane, entry = self._lanes.get(key[:TAG_BYTES]), (key, store)
            if lane is None:
                continue
            if entry in lane:
                lane.move_to_end(entry)
            elif key[:TAG_BYTES] in self._unlisted and store.holds(key):
                lane[entry] = None

    def enforce(self) -> bool:
        """Put some blocks in order, and evict what is above an allowance, a few blocks of each tag; whether the next
        call would go on."""
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
        """AssertionError unless these stores hold what is counted. O(all blocks)."""
        held = [(key, store) for store in stores for key in store.keys()]  # noqa: SIM118
        counts: dict[bytes, int] = {}
        for key, _ in held:
            counts[key[:TAG_BYTES]] = counts.get(key[:TAG_BYTES], 0) + 1
        assert counts == self._counts, "blocks of a tag are counted wrong"
        for tag, lane in self._lanes.items():
            there = {entry for entry in held if entry[0][:TAG_BYTES] == tag}
            assert set(lane) == there or (tag in self._unlisted and set(lane) < there), "a lane and what is sealed"

    def _list(self, tags: frozenset[bytes]) -> Iterator[int]:
        """Put all blocks of these tags where they belong, before those that their lanes have already; yields how many
        it has looked at since."""
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
        """At most STEP blocks are looked at; those that cannot go now stand last from then on. Whether some went, and
        more have to."""
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
