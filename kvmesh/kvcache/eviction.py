"""In which order idle blocks go: one order, three prices.

Every idle block has a *place*; the lowest place is evicted first. It is given when the block becomes idle or is
touched:

    place = (life + price, time)        life: the greatest life + price of what has been evicted so far

`time` counts such moments, so equal sums go by the last use. `life` grows as blocks go, so that what was dear once and
is not used again goes in the end. (This is N. Young's GreedyDual.) What differs between policies is the price: what it
costs to lose the block.

    lru      the same for all: exact LRU.
    lfu      uses since the block was sealed, and `life` stays 0: exact LFU, ties by last use; a count is lost on
             eviction.
    length   uses x recompute cost: see `LengthOrder`.

What others know changes the price or the class:

    copied   a copy lies elsewhere: to lose this one costs a pull instead of a computation. The price is halved, from
             the moment that it was told. Under lru such a block lives for half a turnover of the pool: the hottest
             ones, which every node has, still stay, and old ones go before blocks nobody else has.
    cooled   goes before all others, until it is used again.
    spared   goes when nothing else is left (soft pins). The end of it is a use.

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

from kvmesh.rpc.errors import ConfigError

K = TypeVar("K", bound=Hashable)

BLOCK_TOKENS = 64
# Tokens of context at which attention costs a token as much as the linear layers: 2 x parameters / (4 x layers x width)
# is 30,000 for an 8B and 53,000 for a 70B model of the LLaMA family.
PARITY_TOKENS = 32_768
MOST_USES = 8
_LRU_PRICE = 2  # so that half of it is a number
_UNIT = 16  # of LengthOrder's price: its resolution
_TIME_BITS = 48
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
        if not elsewhere or self._life + self.price(key) // 2 < self._lanes[lane][key] >> _TIME_BITS:
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
        place = (self._life + price << _TIME_BITS) + self._time
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
                self._life = max(self._life, self._lanes[lane][key] >> _TIME_BITS)
            self.forget(key)
            gone.append(key)
        return gone

    def __iter__(self) -> Iterator[K]:
        """Idle blocks in the order in which they would go, if nothing were used. Nothing may change meanwhile.
        O(lanes), and O(log lanes) for each."""
        yield from self._cooled
        for heads in self._heads:
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
                assert all((key in self._spared) == (number & 1) for key in self._lanes[number])

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


class LruOrder(EvictionOrder[K]):
    """Least recently used first."""

    name = "lru"
    counts = False

    def price(self, key: K) -> int:
        """2 for every block."""
        return _LRU_PRICE

    def put(self, key: K) -> None:
        """See EvictionOrder. The most frequent case without a further call: nothing is told of it."""
        lane = self._lanes.get(2 * _LRU_PRICE)
        if lane is None or key in self._lane_of or ((self._copied or self._spared) and self._is_told(key)):
            super().put(key)
            return
        self._time += 1
        self._lane_of[key] = 2 * _LRU_PRICE
        lane[key] = (self._life + _LRU_PRICE << _TIME_BITS) + self._time

    def touch(self, keys: Sequence[K], *, use: bool = True) -> None:
        """See EvictionOrder. Said of whole chains again and again: what stays in its lane costs no call."""
        lane_of, lane = self._lane_of, self._lanes.get(2 * _LRU_PRICE)
        told, life = self._copied or self._spared, self._life + _LRU_PRICE << _TIME_BITS
        for key in reversed(keys):
            number = lane_of.get(key)
            if number == 2 * _LRU_PRICE and lane is not None and not (told and self._is_told(key)):
                self._time += 1
                lane.move_to_end(key)
                lane[key] = life + self._time
            elif number is not None:
                self.put(key)

    def _is_told(self, key: K) -> bool:
        return key in self._copied or key in self._spared


class LfuOrder(EvictionOrder[K]):
    """Least often used first, of those the least recently used."""

    name = "lfu"
    ages = False

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        super().__init__(block_tokens)
        self._uses: dict[K, int] = {}

    def price(self, key: K) -> int:
        """Twice its uses."""
        return 2 * self._uses[key]

    def admit(self, key: K, length: int = 1) -> None:
        """See EvictionOrder."""
        self._uses[key] = 0

    def use(self, key: K, length: int = 1) -> None:
        """See EvictionOrder."""
        if key in self._uses:
            self._uses[key] += 1

    def forget(self, key: K) -> None:
        """See EvictionOrder."""
        super().forget(key)
        self._uses.pop(key, None)


class LengthOrder(EvictionOrder[K]):
    """Blocks of long prompts stay longer, as they are dear to recompute for each byte.

    A token costs the linear layers, and attention over all that stands before it: 1 + position / PARITY_TOKENS in
    units of the former. A prompt of n blocks is of use from its head on, and what is missing is computed to its end;
    so all of its blocks get the same price, the mean of the prompt's:

        price = uses x (1 + n x block_tokens / (2 x PARITY_TOKENS))

    with at most MOST_USES uses, and n of the longest prompt that used the block. A price by the block's own position
    would keep tails without their heads, which serve nobody. Uses multiply, since what was shared once is shared again;
    without the growing `life` old favourites would never go.
    """

    name = "length"

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        super().__init__(block_tokens)
        self._blocks = 2 * PARITY_TOKENS / block_tokens  # of a prompt whose price is 2
        self._known: dict[K, int] = {}  # (uses, length) in one number

    def price(self, key: K) -> int:
        """In sixteenths."""
        length, uses = divmod(self._known[key], MOST_USES + 1)
        return round(_UNIT * max(uses, 1) * (1 + length / self._blocks))

    def admit(self, key: K, length: int = 1) -> None:
        """See EvictionOrder."""
        self._known[key] = length * (MOST_USES + 1)

    def use(self, key: K, length: int = 1) -> None:
        """See EvictionOrder."""
        known = self._known.get(key)
        if known is not None:
            before, uses = divmod(known, MOST_USES + 1)
            self._known[key] = max(before, length) * (MOST_USES + 1) + min(uses + 1, MOST_USES)

    def forget(self, key: K) -> None:
        """See EvictionOrder."""
        super().forget(key)
        self._known.pop(key, None)


POLICIES = (LruOrder.name, LfuOrder.name, LengthOrder.name)


def make_order(policy: str, block_tokens: int = BLOCK_TOKENS) -> EvictionOrder[K]:
    """An empty order. `block_tokens`: of a block, what `length` reckons with. ConfigError names an unknown policy."""
    match policy:
        case LruOrder.name:
            return LruOrder(block_tokens)
        case LfuOrder.name:
            return LfuOrder(block_tokens)
        case LengthOrder.name:
            return LengthOrder(block_tokens)
    raise ConfigError(f"eviction={policy!r}: choose one of {', '.join(POLICIES)}", field="eviction")
