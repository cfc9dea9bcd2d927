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
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvmesh.errors import ConfigError
from kvmesh.kvcache.eviction_order import BLOCK_TOKENS, TIME_BITS, EvictionOrder, K

__all__ = ["BLOCK_TOKENS", "PARITY_TOKENS", "POLICIES", "EvictionOrder", "make_order"]

# Tokens of context at which attention costs a token as much as the linear layers: 2 x parameters / (4 x layers x width)
# is 30,000 for an 8B and 53,000 for a 70B model of the LLaMA family.
PARITY_TOKENS = 32_768
MOST_USES = 8
_LRU_PRICE = 2  # so that half of it is a number
_UNIT = 16  # of LengthOrder's price: its resolution


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
        lane[key] = (self._life + _LRU_PRICE << TIME_BITS) + self._time

    def put_all(self, keys: Sequence[K]) -> None:
        """See EvictionOrder."""
        lane, new = self._only_lane, dict.fromkeys(keys, 2 * _LRU_PRICE)
        if lane is None or len(new) < len(keys) or not self._lane_of.keys().isdisjoint(new):
            super().put_all(keys)
            return
        self._lane_of.update(new)
        for key, place in zip(new, self._places(len(new)), strict=True):  # half the cost of `OrderedDict.update`
            lane[key] = place

    def take_all(self, keys: Sequence[K]) -> None:
        """See EvictionOrder."""
        lane, lane_of = self._only_lane, self._lane_of
        if lane is None:
            super().take_all(keys)
            return
        for key in keys:
            if lane_of.pop(key, None) is not None:
                del lane[key]

    def touch(self, keys: Sequence[K], *, use: bool = True) -> None:
        """See EvictionOrder. Said of whole chains again and again: what stays in its lane costs no call."""
        lane = self._only_lane
        if lane is None:
            self._touch_each(keys)
            return
        idle, to_end = list(filter(lane.__contains__, reversed(keys))), lane.move_to_end
        for key, place in zip(idle, self._places(len(idle)), strict=True):
            to_end(key)
            lane[key] = place

    def evict(self, n: int, *, spared: bool = True) -> list[K]:
        """See EvictionOrder."""
        lane = self._only_lane
        if lane is None or n <= 0 or not lane:
            return super().evict(n, spared=spared)
        gone = [lane.popitem(last=False) for _ in range(min(n, len(lane)))]
        self._life = max(self._life, gone[-1][1] >> TIME_BITS)
        for key, _ in gone:
            del self._lane_of[key]
        return [key for key, _ in gone]

    @property
    def _only_lane(self) -> OrderedDict[K, int] | None:
        """The lane of all idle blocks, where there is one and nothing was told of any block; None: there is not."""
        lane = self._lanes.get(2 * _LRU_PRICE)
        alike = lane is not None and len(lane) == len(self._lane_of) and not (self._copied or self._spared)
        return lane if alike else None

    def _places(self, n: int) -> range:
        """The next `n`, of blocks of which nothing was told."""
        first = (self._life + _LRU_PRICE << TIME_BITS) + self._time + 1
        self._time += n
        return range(first, first + n)

    def _touch_each(self, keys: Sequence[K]) -> None:
        lane_of, lane = self._lane_of, self._lanes.get(2 * _LRU_PRICE)
        told, life = self._copied or self._spared, self._life + _LRU_PRICE << TIME_BITS
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
