"""Blocks that are not announced yet, but will be at an instance: told by the conductor's own placements.

A block counts from its placement on (the request before in the queue will have computed or fetched it), is confirmed
by the worker's report and withdrawn when the request ended without one. It leaves when the node store announces it, or
a bounded time after it was confirmed: a full store seals nothing. Each instance's share is an LRU list no longer than
its device pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class _Slot:
    __slots__ = ("capacity", "confirmed", "held")

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        # key → the request that will bring the block, None once it has. Most recently used last.
        self.held: OrderedDict[bytes, str | None] = OrderedDict()
        self.confirmed: OrderedDict[bytes, float] = OrderedDict()  # until when; those of None in `held`, soonest first


class Pending:
    """Key → bitset of instance slots: numbers of its own, unlike those of the `BlockMap`."""

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}
        self._slots: dict[int, _Slot] = {}

    def __len__(self) -> int:
        """Distinct keys."""
        return len(self._masks)

    def mask(self, key: bytes) -> int:
        """Bitset of the slots where `key` is coming."""
        return self._masks.get(key, 0)

    def blocks(self, slot: int) -> int:
        """How many blocks are coming there."""
        return len(self._slots[slot].held)

    def open(self, capacity_blocks: int) -> int:
        """A free slot (a small int, the bit number) for an instance of that capacity."""
        slot = 0
        while slot in self._slots:
            slot += 1
        self._slots[slot] = _Slot(capacity_blocks)
        return slot

    def close(self, slot: int) -> None:
        """Forget everything that slot expects and free it: its instance or incarnation is gone."""
        for key in self._slots.pop(slot).held:
            self._clear_bit(key, slot)

    def place(self, slot: int, keys: Sequence[bytes], request_id: str) -> None:
        """`request_id` was placed there: its blocks count as coming."""
        self._put(slot, keys, request_id, 0.0)

    def confirm(self, slot: int, keys: Sequence[bytes], until: float) -> None:
        """Those blocks are there now; they count until then (never earlier than an `until` before)."""
        self._put(slot, keys, None, until)

    def withdraw(self, slot: int, keys: Sequence[bytes], request_id: str) -> None:
        """`request_id` ended unreported: the blocks that only it would have brought do not come."""
        held = self._slots[slot].held
        for key in keys:
            if held.get(key) == request_id:
                self._remove(slot, key)

    def arrived(self, slot: int, keys: Sequence[bytes]) -> None:
        """The node store has announced them: they need no promise any more."""
        held = self._slots[slot].held
        if held:
            for key in keys:
                if key in held:
                    self._remove(slot, key)

    def settle(self, slot: int, is_there: Callable[[bytes], bool]) -> None:
        """As `arrived`, for whatever of this slot `is_there`."""
        self.arrived(slot, [key for key in self._slots[slot].held if is_there(key)])

    def expire(self, now: float) -> None:
        """Confirmed blocks whose time is over count no more."""
        for slot, record in self._slots.items():
            while record.confirmed:
                key, until = next(iter(record.confirmed.items()))
                if until > now:
                    break
                self._remove(slot, key)

    def _put(self, slot: int, keys: Sequence[bytes], owner: str | None, until: float) -> None:
        record, bit = self._slots[slot], 1 << slot
        held, confirmed = record.held, record.confirmed
        # Backwards, so that the head of a chain is used later than its tail and outlives it: a tail alone is worthless.
        for key in reversed(keys[: record.capacity]):
            if key in held:
                held.move_to_end(key)
                if owner is None:
                    held[key] = None
            else:
                held[key] = owner
                self._masks[key] = self._masks.get(key, 0) | bit
            if owner is None:
                confirmed[key] = until
                confirmed.move_to_end(key)
        while len(held) > record.capacity:
            self._remove(slot, next(iter(held)))

    def _remove(self, slot: int, key: bytes) -> None:
        record = self._slots[slot]
        del record.held[key]
        record.confirmed.pop(key, None)
        self._clear_bit(key, slot)

    def _clear_bit(self, key: bytes, slot: int) -> None:
        left = self._masks[key] & ~(1 << slot)
        if left:
            self._masks[key] = left
        else:
            del self._masks[key]
