"""The order in which idle blocks go, whatever their price: see eviction.py for places, prices and classes.

Blocks of one price stand in one *lane* in the order of their places, so that a use appends and nothing is sorted; a
heap holds the lanes by their heads. A use costs O(1), an eviction O(log lanes) amortised; there are as many lanes as
different prices: 2 (lru), of the order of the square root of all uses at most (lfu), some hundreds (length). No object
is kept per block that the garbage collector would walk through.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import ClassVar, Generic, TypeVar

from kvmesh.errors import ConfigError

K = TypeVar("K", bound=Hashable)

BLOCK_TOKENS = 64
TIME_BITS = 48  # of a place
_COOLED = -1


class EvictionOrder(ABC, Generic[K]):
    """The order of one pool's idle blocks. Keys are *admitted*, then *put* (idle) and *taken* (in use) again and again,
    and *forgotten*. What is said of unknown keys is passed over, but for `put` and `admit`: their caller knows."""

    name: ClassVar[str]
    ages: ClassVar[bool] = True
    counts: ClassVar[bool] = True  # False: `use` and lengths say nothing to it

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        if block_tokens < 1:
            raise ConfigError(f"block_tokens={block_tokens}: must be at least 1", field="block_tokens")
        self._life = self._time = 0
        self._lane_of: dict[K, int] = {}  # every idle block
        self._lanes: dict[int, OrderedDict[K, int]] = {}  # lane → key → place, lowest first
        # (place, lane) of ordinary and of spared ones: one entry a lane, at or below the place of its head.
        self._heads: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self._cooled: OrderedDict[K, None] = OrderedDict()
        self._copied: set[K] = set()
        self._spared: set[K] = set()
        self._spared_idle = 0

    @abstractmethod
    def price(self, key: K) -> int:
        """What losing the only copy of this block costs now; at least 0, in units of the policy's own."""

    # ── what is known of a block ─────────────────────────────────────────────────────────────────────

    def admit(self, key: K, length: int = 1) -> None:
        """A new block, not idle yet, never used. `length`: blocks of the prompt it belongs to, as far as known."""

    def use(self, key: K, length: int = 1) -> None:
        """Somebody used it once, for a prompt of `length` blocks. Its place does not change: see `put`."""

    def forget(self, key: K) -> None:
        """It does not exist any more."""
        self.take(key)
        self._copied.discard(key)
        self._spared.discard(key)

    def copied(self, key: K, elsewhere: bool) -> None:
        """A copy of it lies elsewhere, or no longer does. An idle block's place is reckoned anew as of now, and taken
        where it is lower (a copy) or in any case (none any more)."""
        if elsewhere == (key in self._copied):
            return
        (self._copied.add if elsewhere else self._copied.discard)(key)
        lane = self._lane_of.get(key, _COOLED)
        if lane == _COOLED:
            return
        # A copy may leave it where it is: the price is halved, but of a life that has grown since.
        if not elsewhere or self._life + self.price(key) // 2 < self._lanes[lane][key] >> TIME_BITS:
            self.put(key)

    def has_copy(self, key: K) -> bool:
        """Whether `copied` has said so."""
        return key in self._copied

    def spare(self, key: K, spared: bool) -> None:
        """It goes when nothing else is left, or (no longer) in its turn, as if used now."""
        if spared == (key in self._spared):
            return
        (self._spared.add if spared else self._spared.discard)(key)
        if key in self._lane_of:
            self.put(key)

    # ── idle blocks ──────────────────────────────────────────────────────────────────────────────────

    def __len__(self) -> int:
        """Idle blocks."""
        return len(self._lane_of)

    def __contains__(self, key: K) -> bool:
        """Whether it is idle."""
        return key in self._lane_of

    def place(self, key: K) -> int | None:
        """Of an idle block: lower ones go earlier, of those of its class (cooled ones are alike). None: not idle."""
        number = self._lane_of.get(key)
        if number is None:
            return None
        return _COOLED if number == _COOLED else self._lanes[number][key]

    @property
    def spared(self) -> int:
        """Idle blocks that are spared."""
        return self._spared_idle

    def put(self, key: K) -> None:
        """It is idle, as of now: the last of its price."""
        price = self.price(key)
        if key in self._copied:
            price //= 2
        number = 2 * price + (key in self._spared)
        self._time += 1
        place = (self._life + price << TIME_BITS) + self._time
        lane = self._lanes.get(number)
        if lane is None:
            lane = self._lanes[number] = OrderedDict()
            heapq.heappush(self._heads[number & 1], (place, number))
        old = self._lane_of.get(key)
        if old == number:
            lane.move_to_end(key)
        else:
            if old is not None:
                self._leave(key, old)
            self._lane_of[key] = number
            self._spared_idle += number & 1
        lane[key] = place

    def take(self, key: K) -> None:
        """It is in use, and cannot be evicted."""
        number = self._lane_of.pop(key, None)
        if number is None:
            return
        if number == _COOLED:
            del self._cooled[key]
        else:
            del self._lanes[number][key]
            self._spared_idle -= number & 1

    def put_all(self, keys: Sequence[K]) -> None:
        """`put` each, in this order."""
        for key in keys:
            self.put(key)

    def take_all(self, keys: Sequence[K]) -> None:
        """`take` each."""
        for key in keys:
            self.take(key)

    def touch(self, keys: Sequence[K], *, use: bool = True) -> None:
        """`put` those of `keys` that are idle, from the last to the first; with `use` each of `keys` is used."""
        use = use and self.counts
        for key in reversed(keys):
            if use:
                self.use(key, len(keys))
            if key in self._lane_of:
                self.put(key)

    def cool(self, key: K) -> None:
        """If idle and not spared, it goes first from now on."""
        lane = self._lane_of.get(key)
        if lane is None or key in self._spared:
            return
        self._leave(key, lane)
        self._lane_of[key] = _COOLED
        self._cooled[key] = None
        self._cooled.move_to_end(key, last=False)

    def evict(self, n: int, *, spared: bool = True) -> list[K]:
        """Up to `n` idle blocks in the order in which they go: they are forgotten. Without `spared`, none of those."""
        gone: list[K] = []
        while len(gone) < n and (key := self._first(spared)) is not None:
            lane = self._lane_of[key]
            if lane != _COOLED and self.ages:
                self._life = max(self._life, self._lanes[lane][key] >> TIME_BITS)
            self.forget(key)
            gone.append(key)
        return gone

    def __iter__(self) -> Iterator[K]:
        """Idle blocks in the order in which they would go, if nothing were used. Nothing may change meanwhile.
        O(lanes), and O(log lanes) for each."""
        yield from self._cooled
        for heads in self._heads:
            if len(heads) == 1:
                yield from self._lanes[heads[0][1]]
                continue
            lanes = [((place, key) for key, place in self._lanes[number].items()) for _, number in heads]
            for _, key in heapq.merge(*lanes):  # places differ: keys are never compared
                yield key

    def check_integrity(self) -> None:
        """AssertionError unless lanes, places and heads agree. O(idle blocks)."""
        found = {key: number for number, lane in self._lanes.items() for key in lane} | dict.fromkeys(
            self._cooled, _COOLED
        )
        assert found == self._lane_of, "lanes and their index disagree"
        assert self._spared_idle == len(self._spared & self._lane_of.keys()), "spared blocks are counted wrong"
        assert sorted(number for heads in self._heads for _, number in heads) == sorted(self._lanes)
        for heads in self._heads:
            for bound, number in heads:
                places = list(self._lanes[number].values())
                assert places == sorted(places), "a lane out of order"
                assert not places or bound <= places[0], "a lane's head is lower than the heap knows"
                keys = self._lanes[number].keys()
                assert keys <= self._spared if number & 1 else keys.isdisjoint(self._spared), "a key in a wrong lane"

    # ── inner ────────────────────────────────────────────────────────────────────────────────────────

    def _leave(self, key: K, number: int) -> None:
        """Out of its lane; an empty one stays until its entry in the heap surfaces."""
        if number == _COOLED:
            del self._cooled[key]
        else:
            del self._lanes[number][key]
            self._spared_idle -= number & 1

    def _first(self, spared: bool) -> K | None:
        if self._cooled:
            return next(iter(self._cooled))
        for heads in self._heads if spared else self._heads[:1]:
            while heads:
                bound, number = heads[0]
                lane = self._lanes[number]
                if not lane:
                    heapq.heappop(heads)
                    del self._lanes[number]
                    continue
                key = next(iter(lane))
                if lane[key] == bound:
                    return key
                heapq.heapreplace(heads, (lane[key], number))
        return None
