"""Blocks that are not announced yet, but will be at an instance, as the conductor's own placements tell. Pure.

A block counts from its placement on, because the request before it in the queue will have computed or fetched it. The
worker's report confirms it; the end of a request without a report withdraws it. It is removed when the node store
announces it, or a bounded time after it was confirmed, since a full store seals nothing. (Of an engine of others that
reports no blocks it stays.) Each instance's part is an LRU list no longer than its device pool.

Of a model with several cache groups each instance has a slot for each group, as a store has in the `BlockMap`: what is
coming of group g is there. The first one is the instance's own.

Of a long prompt only some blocks are stored, its *marks*: the first 32, every 8th up to the 256th, every 32nd from
there on, and the last one. A block's key stands for all before it, so an instance that will have a mark will also have
the blocks between that mark and the one before. A promise that ends between two marks is rounded down to the first of
them; announced blocks are exact.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import compress, pairwise
from struct import Struct

from kvmesh.kvcache.keys import KEY_BYTES, Keys
from kvmesh.services.conductor.prefixes.walks import Runs, functions, of_marks

EACH, SOME = 32, 256  # blocks of which each one is a mark, and up to which the finer step goes
FINE, COARSE = 8, 32

Marks = tuple[bytes, ...]


@lru_cache(maxsize=512)
def positions(blocks: int) -> tuple[int, ...]:
    """Returns which blocks of a prompt of so many blocks are marks."""
    fine = range(EACH + FINE - 1, min(blocks, SOME), FINE)
    coarse = range(SOME + COARSE - 1, blocks, COARSE)
    found = (*range(min(blocks, EACH)), *fine, *coarse)
    return found if not blocks or found[-1] == blocks - 1 else (*found, blocks - 1)


@lru_cache(maxsize=512)
def ends(blocks: int) -> tuple[int, ...]:
    """Returns up to which block each mark of a prompt of so many blocks reaches."""
    return tuple(at + 1 for at in positions(blocks))


@lru_cache(maxsize=512)
def _picker(blocks: int) -> Struct:
    between = (after - before - 1 for before, after in pairwise((-1, *positions(blocks))))
    return Struct("".join(f"{gap * KEY_BYTES}x{KEY_BYTES}s" for gap in between))


def marks(keys: Sequence[bytes]) -> Marks:
    """Returns the marks of a prompt."""
    return _picker(len(keys)).unpack(Keys.of(keys).packed)


@lru_cache(maxsize=4096)
def span(ordinal: int) -> int:
    """Returns how many blocks, at most, the mark of this ordinal stands for."""
    if ordinal < EACH:
        return 1
    return FINE if ordinal < EACH + (SOME - EACH) // FINE else COARSE


@lru_cache(maxsize=512)
def spans(count: int) -> tuple[int, ...]:
    """Returns the spans of the first `count` marks."""
    return tuple(map(span, range(count)))


class _Slot:
    __slots__ = ("blocks", "capacity", "confirmed", "held")

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self.blocks = 0  # that `held` stands for
        # mark → the request that will bring it, None once it has; and its span. Most recently used last.
        self.held: OrderedDict[bytes, tuple[str | None, int]] = OrderedDict()
        self.confirmed: OrderedDict[bytes, float] = OrderedDict()  # until when; those of None in `held`, soonest first


class Pending:
    """Maps a mark to a bitset of instance slots; these numbers differ from the slots of the `BlockMap`.

    It takes one dict entry and one key for each mark, and one entry of an ordered dict for each slot where the mark is
    coming. Placements cost O(marks).
    """

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}
        self._slots: dict[int, _Slot] = {}
        self._freed: list[int] = []
        self._confirming: set[int] = set()  # slots with confirmed blocks, and some whose last one has gone
        self._further: dict[int, dict[int, int]] = {}  # by an instance's slot: those of groups above 0
        self._group_of: dict[int, tuple[int, int]] = {}  # of such a slot: the instance's, and the group

    def __len__(self) -> int:
        """Returns the number of distinct marks."""
        return len(self._masks)

    def mask(self, key: bytes) -> int:
        """Returns the bitset of the slots where this mark is coming."""
        return self._masks.get(key, 0)

    def prefix(self, keys: Sequence[bytes]) -> Runs:
        """Returns who will have the leading blocks of a prompt, in runs up to the last block that is coming
        anywhere."""
        if not self._masks or not keys:
            return []
        return of_marks(self._masks, marks(keys), ends(len(keys)))

    def blocks(self, slot: int) -> int:
        """Returns how many blocks, at most, are coming there."""
        return self._slots[slot].blocks

    def open(self, capacity_blocks: int) -> int:
        """Returns a free slot (a small int, the bit number) for an instance of that capacity."""
        slot = heapq.heappop(self._freed) if self._freed else len(self._slots)
        self._slots[slot] = _Slot(capacity_blocks)
        return slot

    def of_group(self, slot: int, group: int) -> int:
        """Returns the slot of that group of the instance whose slot this is."""
        if not group:
            return slot
        further = self._further.setdefault(slot, {})
        if group not in further:
            further[group] = self.open(self._slots[slot].capacity)
            self._group_of[further[group]] = slot, group
        return further[group]

    def by_group(self, mask: int, count: int) -> tuple[int, ...]:
        """Returns who of a bitset of slots stands for each of the first `count` groups, by their instances' slots."""
        found = [0] * count
        while mask:
            low = mask & -mask
            own = low.bit_length() - 1
            slot, group = self._group_of.get(own, (own, 0))
            if group < count:
                found[group] |= 1 << slot
            mask ^= low
        return tuple(found)

    def close(self, slot: int) -> None:
        """Forgets everything that the slot expects and frees it, because its instance or incarnation is gone; likewise
        those of its other groups."""
        for further in self._further.pop(slot, {}).values():
            del self._group_of[further]
            self.close(further)
        for key in self._slots.pop(slot).held:
            self._clear_bit(key, slot)
        heapq.heappush(self._freed, slot)

    def place(self, slot: int, marked: Sequence[bytes], request_id: str) -> None:
        """Notes that the request was placed there: its blocks count as coming. `marked` are the prompt's marks."""
        self.put(slot, tuple(marked), request_id, 0.0)

    def confirm(self, slot: int, marked: Sequence[bytes], until: float) -> None:
        """Notes that those blocks are there now; they count until `until`, and never for a shorter time than before."""
        self.put(slot, tuple(marked), None, until)

    def withdraw(self, slot: int, marked: Sequence[bytes], request_id: str) -> None:
        """Notes that the request ended unreported: blocks that only it would have brought do not come."""
        for of_group in (slot, *self._further.get(slot, {}).values()):
            held = self._slots[of_group].held
            for key in marked:
                if held.get(key, _NOBODY)[0] == request_id:
                    self._remove(of_group, key)

    def arrived(self, slot: int, keys: Sequence[bytes], masks: bytes = b"") -> None:
        """Notes that the node store has announced these blocks; `masks` say which groups of each (b"": the first)."""
        held = self._slots[slot].held
        if held:
            for key in filter(held.__contains__, keys if not masks else _of_group(keys, masks, 0)):
                self._remove(slot, key)
        if masks:
            for group, further in self._further.get(slot, {}).items():
                self.arrived(further, _of_group(keys, masks, group))

    def forget_confirmed(self, slot: int) -> None:
        """Removes what was confirmed there, whatever its time: nobody knows any more whether it is there."""
        for of_group in (slot, *self._further.get(slot, {}).values()):
            for key in list(self._slots[of_group].confirmed):
                self._remove(of_group, key)

    def settle(self, slot: int, is_there: Callable[[bytes, int], bool], groups: Iterable[int] = (0,)) -> None:
        """Removes, as `arrived` does, all blocks of this slot for which `is_there` says so of one of these groups."""
        for group in groups:
            if group == 0 or group in self._further.get(slot, {}):
                of_group = self.of_group(slot, group)
                self.arrived(of_group, [key for key in self._slots[of_group].held if is_there(key, group)])

    def expire(self, now: float) -> None:
        """Removes confirmed blocks whose time is over."""
        for slot in list(self._confirming):
            record = self._slots.get(slot)
            while record is not None and record.confirmed:
                key, until = next(iter(record.confirmed.items()))
                if until > now:
                    break
                self._remove(slot, key)
            else:
                self._confirming.discard(slot)

    def put(self, slot: int, marked: Marks, owner: str | None, until: float, lacks: bytes | None = None) -> None:
        """Does what `place` or, without an owner, `confirm` does. `lacks` says of each mark whether it is meant; None
        means all are."""
        record = self._slots[slot]
        if (native := functions()) is not None and owner is not None:
            held = record.held
            told = held, held.move_to_end, self._masks, marked, spans(len(marked)), lacks, record.capacity
            record.blocks += native.promise(*told, 1 << slot, owner)
        else:
            some = zip(marked, spans(len(marked)), strict=True)
            self._put(slot, some if lacks is None else compress(some, lacks), owner, until)
        while record.blocks > record.capacity:
            self._remove(slot, next(iter(record.held)))

    def _put(self, slot: int, marked: Iterable[tuple[bytes, int]], owner: str | None, until: float) -> None:
        record, bit = self._slots[slot], 1 << slot
        held, confirmed, masks = record.held, record.confirmed, self._masks
        if owner is None:
            self._confirming.add(slot)
        fitting, room = [], record.capacity
        for one in marked:
            room -= one[1]
            if room < 0:
                break
            fitting.append(one)
        # Backwards, so that the head of a chain is used later than its tail and outlives it: a tail alone is worthless.
        before, after = 0, bit  # marks of one chain are coming to the same slots: they share the int that is made
        for key, blocks in reversed(fitting):
            if key in held:
                held.move_to_end(key)
                if owner is None:
                    held[key] = None, held[key][1]
            else:
                held[key] = owner, blocks
                record.blocks += blocks
                mask = masks.get(key, 0)
                if mask is not before:
                    before, after = mask, mask | bit
                masks[key] = after
            if owner is None:
                confirmed[key] = until
                confirmed.move_to_end(key)

    def _remove(self, slot: int, key: bytes) -> None:
        record = self._slots[slot]
        record.blocks -= record.held.pop(key)[1]
        record.confirmed.pop(key, None)
        self._clear_bit(key, slot)

    def _clear_bit(self, key: bytes, slot: int) -> None:
        left = self._masks[key] & ~(1 << slot)
        if left:
            self._masks[key] = left
        else:
            del self._masks[key]


def _of_group(keys: Sequence[bytes], masks: bytes, group: int) -> list[bytes]:
    return [key for key, mask in zip(keys, masks, strict=True) if mask >> group & 1]


_NOBODY = None, 0
