"""In which order idle blocks are evicted: what every order has in common, and the three that come with kvmesh.

An order (`EvictionOrder`) is a policy's answer to one question: what does it *cost* to lose this block now? The rest is
common to all. Every idle block has a *priority*; the lowest is evicted first. It is given when the block becomes idle
or is touched:

    priority = (age + cost, time)        age: the greatest age + cost of what has been evicted so far

`time` counts such moments, so equal sums go by the last use. `age` grows as blocks go, so that what was dear once and
is not used again goes in the end. (This is N. Young's GreedyDual.) The policies:

    lru      the cost is the same for all: exact LRU.
    lfu      the cost is the number of uses since the block was sealed, and `age` stays 0: exact LFU, ties by last use;
             a count is lost on eviction.
    length   the cost is uses x recompute cost: see `LengthOrder`.

An installed package adds one as an entry point of the group `kvmesh.eviction_orders`
(docs/howto/add-an-eviction-order.md).

What others know changes the cost or the class:

    replicated     another node has a copy: to lose this one costs a pull instead of a computation. The cost is halved,
                   from the moment that it was told. Under lru such a block lives for half a turnover of the pool: the
                   hottest ones, which every node has, still stay, and old ones go before blocks nobody else has.
    evicted first  goes before all others, until it is used again.
    protected      goes when nothing else is left (soft pins). The end of it is a use.

Blocks of one cost stand in one *queue* in the order of their priorities, so that a use appends and nothing is sorted; a
heap holds the queues by their heads. A use costs O(1), an eviction O(log queues) amortised; there are as many queues as
different costs: 2 (lru), of the order of the square root of all uses at most (lfu), some hundreds (length). No object
is kept per block that the garbage collector would walk through.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from kvmesh.errors import ConfigError
from kvmesh.plugins import Plugins

K = TypeVar("K", bound=Hashable)

BLOCK_TOKENS = 64
TIME_BITS = 48  # of a priority
_PREFERRED = -1  # in the place of a queue's number
# Tokens of context at which attention costs a token as much as the linear layers: 2 x parameters / (4 x layers x width)
# is 30,000 for an 8B and 53,000 for a 70B model of the LLaMA family.
PARITY_TOKENS = 32_768
MOST_USES = 8
_LRU_COST = 2  # so that half of it is a number
_UNIT = 16  # of LengthOrder's cost: its resolution


class EvictionOrder(ABC, Generic[K]):
    """The order in which one store's idle blocks are evicted. A policy defines what losing a block costs (`cost`). A
    policy that learns from uses also overrides `admit`, `use` and `forget`, and keeps what it knows of a key from
    `admit` to `forget`.

    A key is *admitted*, then marked idle (nobody reads the block) and busy (somebody does) again and again, and
    *forgotten*. Calls about unknown keys are ignored, except `mark_idle` and `admit`, whose caller knows the key.

    `ages` says whether `age` grows, so that a block that has long been unused is evicted whatever it cost.
    `counts_uses` says whether the policy needs `use` and lengths; if not, they are not reported to it.
    """

    ages: ClassVar[bool] = True
    counts_uses: ClassVar[bool] = True

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        if block_tokens < 1:
            raise ConfigError(f"block_tokens={block_tokens}: must be at least 1", field="block_tokens")
        self._age = self._time = 0
        self._queue_of: dict[K, int] = {}  # every idle block
        self._queues: dict[int, OrderedDict[K, int]] = {}  # queue → key → priority, lowest first
        # (priority, queue) of ordinary and of protected ones: one entry a queue, at or below the priority of its head.
        self._heads: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self._preferred: OrderedDict[K, None] = OrderedDict()
        self._replicated: set[K] = set()
        self._protected: set[K] = set()
        self._protected_idle = 0

    @abstractmethod
    def cost(self, key: K) -> int:
        """Returns what losing the only copy of this block costs now, in the policy's own units: a whole number, at
        least 0. It is called when the block becomes idle or is touched, and may return another value each time."""

    # ── what is known of a block ─────────────────────────────────────────────────────────────────────

    def admit(self, key: K, length: int = 1) -> None:
        """Notes a new block, sealed, not idle yet and never used. `length` is the number of blocks of its prompt, if
        known. The place of the block in that prompt is not given."""

    def use(self, key: K, length: int = 1) -> None:
        """Notes one use of the block for a prompt of `length` blocks. In an instance the end of a request is a use of
        each block of its prompt, also of those that it computed or pulled. The priority changes with the next
        `mark_idle`."""

    def forget(self, key: K) -> None:
        """Notes that the block does not exist any more."""
        self.mark_busy(key)
        self._replicated.discard(key)
        self._protected.discard(key)

    def set_replicated(self, key: K, elsewhere: bool) -> None:
        """Notes that another node has a copy of the block, or no longer has. The priority of an idle block is computed
        anew as of now; with a copy it replaces the old one only if it is lower."""
        if elsewhere == (key in self._replicated):
            return
        (self._replicated.add if elsewhere else self._replicated.discard)(key)
        queue = self._queue_of.get(key, _PREFERRED)
        if queue == _PREFERRED:
            return
        # A copy may leave it where it is: the cost is halved, but the age has grown since.
        if not elsewhere or self._age + self.cost(key) // 2 < self._queues[queue][key] >> TIME_BITS:
            self.mark_idle(key)

    def is_replicated(self, key: K) -> bool:
        """Says whether `set_replicated` last reported a copy."""
        return key in self._replicated

    def protect(self, key: K, protected: bool) -> None:
        """Sets whether the block is evicted only when no unprotected one is left. A block that loses protection counts
        as used now."""
        if protected == (key in self._protected):
            return
        (self._protected.add if protected else self._protected.discard)(key)
        if key in self._queue_of:
            self.mark_idle(key)

    # ── idle blocks ──────────────────────────────────────────────────────────────────────────────────

    def __len__(self) -> int:
        """Returns how many blocks are idle."""
        return len(self._queue_of)

    def __contains__(self, key: K) -> bool:
        """Says whether the block is idle."""
        return key in self._queue_of

    def priority(self, key: K) -> int | None:
        """Returns an idle block's priority, or None for one that is not idle. Among blocks of one protection lower ones
        are evicted earlier; all blocks of `evict_first` have the same."""
        number = self._queue_of.get(key)
        if number is None:
            return None
        return _PREFERRED if number == _PREFERRED else self._queues[number][key]

    @property
    def protected(self) -> int:
        """How many idle blocks are protected."""
        return self._protected_idle

    def mark_idle(self, key: K) -> None:
        """Notes that nobody reads the block any more; it becomes the last among those of its cost."""
        cost = self.cost(key)
        if key in self._replicated:
            cost //= 2
        number = 2 * cost + (key in self._protected)
        self._time += 1
        priority = (self._age + cost << TIME_BITS) + self._time
        queue = self._queues.get(number)
        if queue is None:
            queue = self._queues[number] = OrderedDict()
            heapq.heappush(self._heads[number & 1], (priority, number))
        old = self._queue_of.get(key)
        if old == number:
            queue.move_to_end(key)
        else:
            if old is not None:
                self._leave(key, old)
            self._queue_of[key] = number
            self._protected_idle += number & 1
        queue[key] = priority

    def mark_busy(self, key: K) -> None:
        """Notes that somebody reads the block, which therefore cannot be evicted."""
        number = self._queue_of.pop(key, None)
        if number is None:
            return
        if number == _PREFERRED:
            del self._preferred[key]
        else:
            del self._queues[number][key]
            self._protected_idle -= number & 1

    def mark_all_idle(self, keys: Sequence[K]) -> None:
        """Marks each key idle, in this order."""
        for key in keys:
            self.mark_idle(key)

    def mark_all_busy(self, keys: Sequence[K]) -> None:
        """Marks each key busy, in this order."""
        for key in keys:
            self.mark_busy(key)

    def touch(self, keys: Sequence[K], *, use: bool = True) -> None:
        """Marks the idle ones of `keys` idle again, from the last to the first. With `use`, each of `keys` counts as
        used."""
        use = use and self.counts_uses
        for key in reversed(keys):
            if use:
                self.use(key, len(keys))
            if key in self._queue_of:
                self.mark_idle(key)

    def evict_first(self, key: K) -> None:
        """Makes the block, if idle and not protected, the first to be evicted until it is used again."""
        queue = self._queue_of.get(key)
        if queue is None or key in self._protected:
            return
        self._leave(key, queue)
        self._queue_of[key] = _PREFERRED
        self._preferred[key] = None
        self._preferred.move_to_end(key, last=False)

    def evict(self, n: int, *, protected: bool = True) -> list[K]:
        """Forgets and returns up to `n` idle blocks, in the order of eviction; without `protected`, only unprotected
        ones."""
        gone: list[K] = []
        while len(gone) < n and (key := self._first(protected)) is not None:
            queue = self._queue_of[key]
            if queue != _PREFERRED and self.ages:
                self._age = max(self._age, self._queues[queue][key] >> TIME_BITS)
            self.forget(key)
            gone.append(key)
        return gone

    def __iter__(self) -> Iterator[K]:
        """Yields idle blocks in the order in which they would be evicted if nothing were used. Nothing may change
        meanwhile. O(queues), and O(log queues) for each block."""
        yield from self._preferred
        for heads in self._heads:
            if len(heads) == 1:
                yield from self._queues[heads[0][1]]
                continue
            queues = [((priority, key) for key, priority in self._queues[number].items()) for _, number in heads]
            for _, key in heapq.merge(*queues):  # priorities differ: keys are never compared
                yield key

    def check_integrity(self) -> None:
        """Raises AssertionError unless queues, priorities and heads agree. O(idle blocks)."""
        found = {key: number for number, queue in self._queues.items() for key in queue} | dict.fromkeys(
            self._preferred, _PREFERRED
        )
        assert found == self._queue_of, "queues and their index disagree"
        protected_idle = len(self._protected & self._queue_of.keys())
        assert self._protected_idle == protected_idle, "protected blocks are counted wrong"
        assert sorted(number for heads in self._heads for _, number in heads) == sorted(self._queues)
        for heads in self._heads:
            for bound, number in heads:
                priorities = list(self._queues[number].values())
                assert priorities == sorted(priorities), "a queue out of order"
                assert not priorities or bound <= priorities[0], "a queue's head is lower than the heap knows"
                keys = self._queues[number].keys()
                right = keys <= self._protected if number & 1 else keys.isdisjoint(self._protected)
                assert right, "a key in a wrong queue"

    # ── inner ────────────────────────────────────────────────────────────────────────────────────────

    def _leave(self, key: K, number: int) -> None:
        """Removes a key from its queue; an empty queue stays until its entry in the heap comes up."""
        if number == _PREFERRED:
            del self._preferred[key]
        else:
            del self._queues[number][key]
            self._protected_idle -= number & 1

    def _first(self, protected: bool) -> K | None:
        if self._preferred:
            return next(iter(self._preferred))
        for heads in self._heads if protected else self._heads[:1]:
            while heads:
                bound, number = heads[0]
                queue = self._queues[number]
                if not queue:
                    heapq.heappop(heads)
                    del self._queues[number]
                    continue
                key = next(iter(queue))
                if queue[key] == bound:
                    return key
                heapq.heapreplace(heads, (queue[key], number))
        return None


# ── the policies that come with kvmesh ───────────────────────────────────────────────────────────────


class LruOrder(EvictionOrder[K]):
    """Evicts the least recently used block first."""

    counts_uses = False

    def cost(self, key: K) -> int:
        """Returns 2 for every block."""
        return _LRU_COST

    def mark_idle(self, key: K) -> None:
        """Overrides EvictionOrder. The most frequent case, a block that is neither replicated nor protected, makes no
        further call."""
        queue = self._queues.get(2 * _LRU_COST)
        if queue is None or key in self._queue_of or ((self._replicated or self._protected) and self._is_told(key)):
            super().mark_idle(key)
            return
        self._time += 1
        self._queue_of[key] = 2 * _LRU_COST
        queue[key] = (self._age + _LRU_COST << TIME_BITS) + self._time

    def mark_all_idle(self, keys: Sequence[K]) -> None:
        queue, new = self._only_queue, dict.fromkeys(keys, 2 * _LRU_COST)
        if queue is None or len(new) < len(keys) or not self._queue_of.keys().isdisjoint(new):
            super().mark_all_idle(keys)
            return
        self._queue_of.update(new)
        for key, priority in zip(new, self._priorities(len(new)), strict=True):  # half the cost of `OrderedDict.update`
            queue[key] = priority

    def mark_all_busy(self, keys: Sequence[K]) -> None:
        queue, queue_of = self._only_queue, self._queue_of
        if queue is None:
            super().mark_all_busy(keys)
            return
        for key in keys:
            if queue_of.pop(key, None) is not None:
                del queue[key]

    def touch(self, keys: Sequence[K], *, use: bool = True) -> None:
        """Overrides EvictionOrder. Whole chains are touched again and again, so blocks that stay in their queue cost no
        call."""
        queue = self._only_queue
        if queue is None:
            self._touch_each(keys)
            return
        idle, to_end = list(filter(queue.__contains__, reversed(keys))), queue.move_to_end
        for key, priority in zip(idle, self._priorities(len(idle)), strict=True):
            to_end(key)
            queue[key] = priority

    def evict(self, n: int, *, protected: bool = True) -> list[K]:
        queue = self._only_queue
        if queue is None or n <= 0 or not queue:
            return super().evict(n, protected=protected)
        gone = [queue.popitem(last=False) for _ in range(min(n, len(queue)))]
        self._age = max(self._age, gone[-1][1] >> TIME_BITS)
        for key, _ in gone:
            del self._queue_of[key]
        return [key for key, _ in gone]

    @property
    def _only_queue(self) -> OrderedDict[K, int] | None:
        """The queue of all idle blocks, if one queue holds them and no block is replicated or protected; else None."""
        queue = self._queues.get(2 * _LRU_COST)
        alike = queue is not None and len(queue) == len(self._queue_of) and not (self._replicated or self._protected)
        return queue if alike else None

    def _priorities(self, n: int) -> range:
        """Returns the next `n` priorities of blocks that are neither replicated nor protected."""
        first = (self._age + _LRU_COST << TIME_BITS) + self._time + 1
        self._time += n
        return range(first, first + n)

    def _touch_each(self, keys: Sequence[K]) -> None:
        queue_of, queue = self._queue_of, self._queues.get(2 * _LRU_COST)
        told, age = self._replicated or self._protected, self._age + _LRU_COST << TIME_BITS
        for key in reversed(keys):
            number = queue_of.get(key)
            if number == 2 * _LRU_COST and queue is not None and not (told and self._is_told(key)):
                self._time += 1
                queue.move_to_end(key)
                queue[key] = age + self._time
            elif number is not None:
                self.mark_idle(key)

    def _is_told(self, key: K) -> bool:
        return key in self._replicated or key in self._protected


class LfuOrder(EvictionOrder[K]):
    """Evicts the least often used block first, and among those the least recently used."""

    ages = False

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        super().__init__(block_tokens)
        self._uses: dict[K, int] = {}

    def cost(self, key: K) -> int:
        """Returns twice the block's uses."""
        return 2 * self._uses[key]

    def admit(self, key: K, length: int = 1) -> None:
        self._uses[key] = 0

    def use(self, key: K, length: int = 1) -> None:
        if key in self._uses:
            self._uses[key] += 1

    def forget(self, key: K) -> None:
        super().forget(key)
        self._uses.pop(key, None)


class LengthOrder(EvictionOrder[K]):
    """Keeps blocks of long prompts longer, because they cost more to recompute for each byte.

    A token costs the linear layers, and attention over all tokens before it: 1 + position / PARITY_TOKENS, in units of
    the former. A prompt of n blocks is useful from its head on, and its missing end is computed; so all its blocks get
    the same cost, the mean over the prompt:

        cost = uses x (1 + n x block_tokens / (2 x PARITY_TOKENS))

    with at most MOST_USES uses, and n of the longest prompt that used the block. A cost by the block's own position
    would keep tails without their heads, which serve nobody. Uses multiply, since what was shared once is shared again.
    `age` must grow, else blocks that were once used much would never be evicted.
    """

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        super().__init__(block_tokens)
        self._blocks = 2 * PARITY_TOKENS / block_tokens  # of a prompt whose cost is 2
        self._known: dict[K, int] = {}  # (uses, length) in one number

    def cost(self, key: K) -> int:
        """Returns the cost that the class defines, in sixteenths."""
        length, uses = divmod(self._known[key], MOST_USES + 1)
        return round(_UNIT * max(uses, 1) * (1 + length / self._blocks))

    def admit(self, key: K, length: int = 1) -> None:
        self._known[key] = length * (MOST_USES + 1)

    def use(self, key: K, length: int = 1) -> None:
        known = self._known.get(key)
        if known is not None:
            before, uses = divmod(known, MOST_USES + 1)
            self._known[key] = max(before, length) * (MOST_USES + 1) + min(uses + 1, MOST_USES)

    def forget(self, key: K) -> None:
        super().forget(key)
        self._known.pop(key, None)


BUILT_IN = {
    "lru": "kvmesh.kvcache.eviction:LruOrder",
    "lfu": "kvmesh.kvcache.eviction:LfuOrder",
    "length": "kvmesh.kvcache.eviction:LengthOrder",
}
POLICIES = tuple(BUILT_IN)
ORDERS = Plugins("kvmesh.eviction_orders", BUILT_IN)


def make_order(policy: str, block_tokens: int = BLOCK_TOKENS, field: str = "eviction") -> EvictionOrder[Any]:
    """Returns an empty order of this policy. `block_tokens` is the number of tokens in a block, which `length` uses.
    Raises ConfigError, which names `field`, when there is no such policy or what has the name is no EvictionOrder; see
    `Plugins.load`."""
    found = ORDERS.load(policy, field)
    if not (isinstance(found, type) and issubclass(found, EvictionOrder)):
        raise ConfigError(f"{field}={policy!r}: {found!r} is no subclass of EvictionOrder", field=field)
    try:
        made: EvictionOrder[Any] = found(block_tokens)
    except TypeError as error:  # an abstract one, or another signature
        raise ConfigError(f"{field}={policy!r}: {error}", field=field) from error
    return made
