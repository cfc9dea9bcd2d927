"""How many blocks of each tenant one node may hold: an allowance for each tag (the first bytes of a key).

The master divides a tenant's quota among the nodes; what it tells a node is that node's allowance. Above it, the tag's
own coldest idle blocks go, those that a soft pin spares last; nobody else's ever go for it. A sealed block that is in
use, and the one that has just been sealed, are not evicted: an allowance may be passed while its blocks are read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Protocol

from kvmesh.kvcache.keys import TAG_BYTES

STEP = 64  # blocks looked at in one call


class Store(Protocol):
    """What is needed of a node store."""

    def keys(self) -> list[bytes]: ...

    def coldest(self, n: int) -> list[bytes]: ...

    def evict_one(self, key: bytes, *, spared: bool) -> bool | None:
        """Whether this block went: True; False: a soft pin spares it (and `spared` is not set); None: it is in use."""


class TagQuotas:
    """Of all stores of one node, on their thread. Counting costs O(1) a block; so does the order in which a limited
    tag's blocks go, least recently used first, which is kept for limited tags alone."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self._limits: dict[bytes, int] = {}
        self._lanes: dict[bytes, OrderedDict[tuple[bytes, Store], None]] = {}

    @property
    def limits(self) -> Mapping[bytes, int]:
        """Tag → blocks."""
        return self._limits

    def count(self, tag: bytes) -> int:
        """Sealed blocks with this tag."""
        return self._counts.get(tag, 0)

    def limit(self, limits: Mapping[bytes, int], stores: Iterable[Store]) -> None:
        """These and no others from now on; 0 or less: none. O(all blocks) when a tag becomes limited; what is above
        goes with `enforce`."""
        self._limits = {tag: blocks for tag, blocks in limits.items() if blocks > 0}
        new = self._limits.keys() - self._lanes.keys()
        self._lanes = {tag: self._lanes.get(tag, OrderedDict()) for tag in self._limits}
        if new:
            for store in stores:
                keys = store.keys()
                for key in (*store.coldest(len(keys)), *keys):  # the idle ones in their order, then those in use
                    if key[:TAG_BYTES] in new:
                        self._lanes[key[:TAG_BYTES]][key, store] = None

    def added(self, store: Store, key: bytes) -> None:
        """It was sealed: others of its tag may have to go."""
        tag = key[:TAG_BYTES]
        self._counts[tag] = self._counts.get(tag, 0) + 1
        if tag in self._lanes:
            self._lanes[tag][key, store] = None
            self._enforce(tag, (key, store))

    def gone(self, store: Store, key: bytes) -> None:
        """It is sealed no more."""
        tag = key[:TAG_BYTES]
        if self._counts[tag] == 1:
            del self._counts[tag]
        else:
            self._counts[tag] -= 1
        if tag in self._lanes:
            del self._lanes[tag][key, store]

    def used(self, store: Store, keys: Iterable[bytes]) -> None:
        """They were used now, the last of `keys` first; those that are not sealed there are passed over."""
        for key in keys:
            lane = self._lanes.get(key[:TAG_BYTES])
            if lane is not None and (key, store) in lane:
                lane.move_to_end((key, store))

    def enforce(self) -> bool:
        """Evict what is above an allowance, a few blocks of each tag; whether there may be more to evict."""
        above = [self._enforce(tag, None) for tag in self._limits]
        return any(above)

    def check_integrity(self, stores: Iterable[Store]) -> None:
        """AssertionError unless these stores hold what is counted. O(all blocks)."""
        held = [(key, store) for store in stores for key in store.keys()]  # noqa: SIM118
        counts: dict[bytes, int] = {}
        for key, _ in held:
            counts[key[:TAG_BYTES]] = counts.get(key[:TAG_BYTES], 0) + 1
        assert counts == self._counts, "blocks of a tag are counted wrong"
        for tag, lane in self._lanes.items():
            assert set(lane) == {entry for entry in held if entry[0][:TAG_BYTES] == tag}, "a lane and what is sealed"

    def _enforce(self, tag: bytes, spare: tuple[bytes, Store] | None) -> bool:
        """At most STEP blocks are looked at; those that cannot go now stand last from then on."""
        lane, limit, spared = self._lanes[tag], self._limits[tag], []
        for _ in range(min(STEP, len(lane))):
            if self._counts.get(tag, 0) <= limit:
                return False
            key, store = entry = next(iter(lane))
            went = False if entry == spare else store.evict_one(key, spared=False)
            if not went:
                lane.move_to_end(entry)
                if went is False and entry != spare:
                    spared.append(entry)
        for key, store in spared:
            if self._counts.get(tag, 0) <= limit:
                return False
            store.evict_one(key, spared=True)
        return self._counts.get(tag, 0) > limit
