"""Which prefill instance probably holds which prefix blocks: approximate, fed by the conductor's own placements.

A block counts from its placement on (as pending: the request before in the queue will have computed it), is confirmed
by the worker's report and withdrawn when the request ended without one. Each instance's share is an LRU list no
longer than its capacity, like the cache it mirrors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    """Key → bitset of instance slots. Matching is O(blocks), whatever the number of instances."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        # slot → key → the request that will compute the block, None once it has. Most recently used last.
        self._slots: dict[int, OrderedDict[bytes, str | None]] = {}
        self._capacity: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def blocks(self, slot: int) -> int:
        """How many blocks slot is thought to hold."""
        return len(self._slots[slot])

    def open(self, capacity_blocks: int) -> int:
        """A free slot (a small int, the bit number) for an instance of that capacity."""
        slot = 0
        while slot in self._slots:
            slot += 1
        self._slots[slot] = OrderedDict()
        self._capacity[slot] = max(1, capacity_blocks)
        return slot

    def close(self, slot: int) -> None:
        """Forget everything that slot holds and free it: its instance or incarnation is gone."""
        for key in self._slots.pop(slot):
            self._clear_bit(key, slot)
        del self._capacity[slot]

    def match(self, keys: Sequence[bytes], among: int) -> dict[int, int]:
        """For every slot of the bitset `among`: how many leading blocks of `keys` it holds."""
        depth: dict[int, int] = {}
        alive = among
        matched = 0
        for key in keys:
            held = self._holders.get(key, 0) & alive
            if held != alive:
                _note(depth, alive & ~held, matched)
                alive = held
                if not alive:
                    break
            matched += 1
        _note(depth, alive, matched)
        return depth

    def place(self, slot: int, keys: Sequence[bytes], request_id: str) -> None:
        """`request_id` was placed there: its blocks count as coming."""
        self._put(slot, keys, request_id)

    def confirm(self, slot: int, keys: Sequence[bytes]) -> None:
        """Those blocks have been computed there."""
        self._put(slot, keys, None)

    def withdraw(self, slot: int, keys: Sequence[bytes], request_id: str) -> None:
        """`request_id` ended unreported: the blocks that only it would have brought do not come."""
        held = self._slots[slot]
        for key in keys:
            if held.get(key) == request_id:
                del held[key]
                self._clear_bit(key, slot)

    def _put(self, slot: int, keys: Sequence[bytes], owner: str | None) -> None:
        held, bit, capacity = self._slots[slot], 1 << slot, self._capacity[slot]
        # Backwards, so that the head of a chain is used later than its tail and outlives it: a tail alone is worthless.
        for key in reversed(keys[:capacity]):
            if key in held:
                held.move_to_end(key)
                if owner is None:
                    held[key] = None
            else:
                held[key] = owner
                self._holders[key] = self._holders.get(key, 0) | bit
        while len(held) > capacity:
            key, _ = held.popitem(last=False)
            self._clear_bit(key, slot)

    def _clear_bit(self, key: bytes, slot: int) -> None:
        left = self._holders[key] & ~(1 << slot)
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]


def _note(depth: dict[int, int], slots: int, blocks: int) -> None:
    while slots:
        lowest = slots & -slots
        depth[lowest.bit_length() - 1] = blocks
        slots ^= lowest
