"""Which node store holds which block: a bitset of store slots for every key. Kept by master and conductor alike.

For every store the map shows state(seq) of one incarnation (see `announce`): batches are taken in order, snapshots when
they are newer, anything else is refused with a verdict. So lost, repeated and reordered announcements leave it behind,
never wrong, and the next snapshot brings it forward.

Parts of a snapshot are collected aside and replace the store's keys at once with the last part. Batches that come
meanwhile are applied to what is shown, as ever; if they lead past the snapshot, it is thrown away.

Memory: one dict entry and one 16-byte key a block, 16 to 36 bytes a replica in its store's log. Blocks with one replica
share their store's int. Blocks with two or more have an int of a bit for each slot; those whose replica came, or went,
in one announcement share it (`memory_bytes` counts it for each of them: it is an upper bound).
"""

from __future__ import annotations

import enum
import heapq
import sys
from collections.abc import Iterable, Iterator, Sequence

from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.keys import KEY_BYTES

MAX_GONE = 10_000  # dropped stores whose last incarnation is remembered
_KEY_SIZE = sys.getsizeof(bytes(KEY_BYTES))


class Verdict(enum.Enum):
    """What became of an announcement."""

    APPLIED = "applied"
    PARTIAL = "partial"  # a part of a snapshot, kept; others follow
    DUPLICATE = "duplicate"  # nothing new in it
    GAP = "gap"  # something before it is missing: ask for a snapshot
    STALE = "stale"  # of an older incarnation


class _Store:
    __slots__ = (
        "bit", "count", "incarnation", "log", "seq", "slot", "staged", "staged_parts", "staged_seq", "store_id",
    )  # fmt: skip

    def __init__(self, store_id: str, slot: int, incarnation: int) -> None:
        self.store_id = store_id
        self.slot = slot
        self.bit = 1 << slot
        self.incarnation = incarnation
        self.seq = 0
        self.count = 0
        # Every key of this store, packed, in order of arrival; also some that it no longer holds, and some twice.
        self.log = bytearray()
        self.unstage()

    def unstage(self) -> None:
        self.staged = bytearray()
        self.staged_seq = -1
        self.staged_parts = 0


class BlockMap:
    """Key → bitset of slots. A slot is a small number that stands for one store from its first announcement until it
    is dropped; then it may stand for another. A newer incarnation keeps its store's slot and starts from nothing.

    `apply` costs O(1) a key (a snapshot: also O(1) for each key it replaces), `drop` O(keys of that store)."""

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}
        self._stores: dict[str, _Store] = {}
        self._slots: list[_Store | None] = []
        self._free_slots: list[int] = []  # a heap: the lowest is used first, so that masks stay short
        self._gone: dict[str, int] = {}  # last incarnation of dropped stores, oldest drop first
        self._replicas = 0
        self._mask_bytes = 0  # of the masks with two bits or more, which have an int of their own

    def __len__(self) -> int:
        """Distinct keys."""
        return len(self._masks)

    @property
    def replicas(self) -> int:
        """Keys of all stores together."""
        return self._replicas

    # ── changes ──────────────────────────────────────────────────────────────────────────────────────

    def apply(self, announcement: Announcement) -> Verdict:
        """Take in what a store says. Numbers may be anything; ValueError if a key has not 16 bytes."""
        _check(announcement.sealed)
        _check(announcement.removed)
        known = self._stores.get(announcement.store_id)
        last = self._gone.get(announcement.store_id, 0) if known is None else known.incarnation
        if announcement.incarnation < last:
            return Verdict.STALE
        store = known
        if store is None:
            store = self._add_store(announcement.store_id, announcement.incarnation)
        elif announcement.incarnation > last:
            self._clear(store)
            store.incarnation = announcement.incarnation
            store.seq = 0
        if announcement.snapshot:
            return self._snapshot(store, announcement)
        return self._batch(store, announcement, known is not store or announcement.incarnation > last)

    def drop(self, store_id: str, incarnation: int | None = None) -> int:
        """Forget all keys of a store; returns how many. With `incarnation`: unless it lives a newer life, and
        announcements of lives before that one stay STALE. Without: nothing of it is remembered."""
        store = self._stores.get(store_id)
        if incarnation is None:
            self._gone.pop(store_id, None)
        elif store is not None and store.incarnation > incarnation:
            return 0
        else:
            self._gone[store_id] = max(incarnation, self._gone.pop(store_id, 0))
            if len(self._gone) > MAX_GONE:
                del self._gone[next(iter(self._gone))]
        if store is None:
            return 0
        count = store.count
        self._clear(store)
        del self._stores[store_id]
        self._slots[store.slot] = None
        heapq.heappush(self._free_slots, store.slot)
        return count

    # ── questions ────────────────────────────────────────────────────────────────────────────────────

    def slot(self, store_id: str) -> int | None:
        """The slot of a store; None: it never announced anything, or was dropped."""
        store = self._stores.get(store_id)
        return None if store is None else store.slot

    def store_of(self, slot: int) -> str:
        """The store that a slot stands for. KeyError: none."""
        store = self._slots[slot] if 0 <= slot < len(self._slots) else None
        if store is None:
            raise KeyError(f"slot {slot} stands for no store")
        return store.store_id

    def stores(self) -> list[str]:
        """Every store that has announced anything and was not dropped since."""
        return list(self._stores)

    def mask(self, key: bytes) -> int:
        """Bitset of the slots that hold `key`."""
        return self._masks.get(key, 0)

    def masks(self, keys: Sequence[bytes]) -> list[int]:
        """`mask` of each."""
        get = self._masks.get
        return [get(key, 0) for key in keys]

    def holders(self, key: bytes) -> list[str]:
        """The stores that hold `key`, by slot."""
        return [self.store_of(slot) for slot in _bits(self._masks.get(key, 0))]

    def match(self, keys: Sequence[bytes], among: int) -> dict[int, int]:
        """How many of `keys`, from the first on, each slot of the bitset `among` holds; slots without the first one
        are left out. O(keys + slots), most blocks first or not: no order."""
        leading: dict[int, int] = {}
        alive = among
        for index, key in enumerate(keys):
            still = alive & self._masks.get(key, 0)
            if still != alive:
                if index:
                    leading.update(dict.fromkeys(_bits(alive ^ still), index))
                if not still:
                    return leading
                alive = still
        leading.update(dict.fromkeys(_bits(alive) if keys else (), len(keys)))
        return leading

    def run(self, keys: Sequence[bytes], start: int, among: int) -> tuple[int, int]:
        """(slot, length) of the longest run of `keys[start:]` that one slot of `among` holds; the lowest such slot.
        (-1, 0): nobody holds `keys[start]`."""
        alive, index = among, start
        while index < len(keys) and (still := alive & self._masks.get(keys[index], 0)):
            alive, index = still, index + 1
        return (-1, 0) if index <= start else ((alive & -alive).bit_length() - 1, index - start)

    def reach(self, keys: Sequence[bytes], start: int, among: int) -> int:
        """Index of the first of `keys[start:]` that no slot of `among` holds; `len(keys)` if each has a holder."""
        index = start
        while index < len(keys) and among & self._masks.get(keys[index], 0):
            index += 1
        return index

    def count(self, store_id: str) -> int:
        """Keys of a store; 0 for an unknown one."""
        store = self._stores.get(store_id)
        return 0 if store is None else store.count

    def seq(self, store_id: str) -> int:
        """Number of the last announcement that is included; 0: none."""
        store = self._stores.get(store_id)
        return 0 if store is None else store.seq

    def incarnation(self, store_id: str) -> int:
        """The life of a store whose keys are shown; 0: unknown store."""
        store = self._stores.get(store_id)
        return 0 if store is None else store.incarnation

    def keys_of(self, store_id: str) -> list[bytes]:
        """Every key of a store. O(its keys)."""
        store = self._stores.get(store_id)
        return [] if store is None else list(self._keys_of(store))

    def memory_bytes(self) -> int:
        """About what the map takes. O(stores)."""
        logs = sum(sys.getsizeof(s.log) + sys.getsizeof(s.staged) + sys.getsizeof(s) for s in self._stores.values())
        return sys.getsizeof(self._masks) + len(self._masks) * _KEY_SIZE + self._mask_bytes + logs

    def check_integrity(self) -> None:
        """AssertionError unless bits, counts, logs and slots agree. O(replicas)."""
        counts = dict.fromkeys(range(len(self._slots)), 0)
        for mask in self._masks.values():
            assert mask, "a key without a holder"
            for slot in _bits(mask):
                counts[slot] += 1
        live = {store.slot: store for store in self._stores.values()}
        for slot, count in counts.items():
            store = live.get(slot)
            assert self._slots[slot] is store, f"slot {slot} does not know its store"
            assert (store is None) == (slot in self._free_slots), f"slot {slot} is free and used, or neither"
            assert count == (0 if store is None else store.count), f"slot {slot} has {count} keys"
            if store is not None:
                assert len(self._keys_of(store)) == count, f"slot {slot}: its log lacks keys"
        assert self._replicas == sum(counts.values())
        assert self._mask_bytes == sum(_int_size(mask) for mask in self._masks.values())

    # ── inner ────────────────────────────────────────────────────────────────────────────────────────

    def _batch(self, store: _Store, batch: Announcement, first: bool) -> Verdict:
        if batch.seq <= store.seq:
            return Verdict.APPLIED if first and batch.seq == 0 else Verdict.DUPLICATE
        if batch.seq > store.seq + 1 or not (batch.sealed or batch.removed):
            return Verdict.GAP  # an empty batch repeats a number: what had it first is missing here
        self._remove(store, batch.removed)
        self._add(store, batch.sealed)
        store.seq = batch.seq
        if store.staged_seq <= store.seq:
            store.unstage()
        return Verdict.APPLIED

    def _snapshot(self, store: _Store, part: Announcement) -> Verdict:
        if part.seq <= store.seq or part.seq < store.staged_seq:
            return Verdict.DUPLICATE
        if part.seq > store.staged_seq:
            if part.part != 0:
                return Verdict.GAP
            store.unstage()
            store.staged_seq = part.seq
        if part.part < store.staged_parts:
            return Verdict.DUPLICATE
        if part.part > store.staged_parts:
            return Verdict.GAP
        store.staged_parts += 1
        if part.more:
            self._stage(store, part.sealed)
            return Verdict.PARTIAL
        self._replace(store, part.sealed)
        store.seq = part.seq
        store.unstage()
        return Verdict.APPLIED

    def _stage(self, store: _Store, keys: Sequence[bytes]) -> None:
        """Part `staged_parts` - 1 of a snapshot that goes on."""
        store.staged += b"".join(keys)

    def _replace(self, store: _Store, keys: Sequence[bytes]) -> None:
        """What was staged and `keys` is all that the store holds."""
        new = dict.fromkeys(_split(store.staged))
        new.update(dict.fromkeys(keys))
        self._remove(store, [key for key in self._keys_of(store) if key not in new])
        self._add(store, new)

    def _add(self, store: _Store, keys: Iterable[bytes]) -> None:
        packed = self._put(keys, store.bit)
        self._count(store, packed, 1)
        store.log += packed
        self._shorten(store, len(packed) // KEY_BYTES)

    def _put(self, keys: Iterable[bytes], bit: int) -> bytes:
        """Set this bit, the store's own int, in the masks of `keys`; those that lacked it, packed."""
        masks, new = self._masks, []
        before, after, growth = 0, bit, 0  # keys of one chain have the same holders: they share the int that is made
        for key in keys:
            mask = masks.get(key)
            if mask is None:
                masks[key] = bit  # the store's own int: shared by all keys that it alone holds
            elif mask & bit:
                continue
            else:
                if mask is not before:
                    before, after = mask, mask | bit
                    growth = _int_size(after) - _int_size(mask)
                masks[key] = after
                self._mask_bytes += growth
            new.append(key)
        return b"".join(new)

    def _shorten(self, store: _Store, added: int) -> None:
        """Keep the log in proportion to what the store holds; `added` keys have just come."""
        if _is_long(store):
            store.log = bytearray().join(self._keys_of(store))

    def _count(self, store: _Store, packed: bytes, sign: int) -> None:
        count = sign * (len(packed) // KEY_BYTES)
        store.count += count
        self._replicas += count
        self._changed(store, packed, sign)

    def _changed(self, store: _Store, packed: bytes, sign: int) -> None:
        """These keys were added (`sign` 1) or removed (-1). For maps that count more."""

    def _remove(self, store: _Store, keys: Iterable[bytes]) -> None:
        self._count(store, self._take(keys, store.bit), -1)

    def _take(self, keys: Iterable[bytes], bit: int) -> bytes:
        """Clear this bit in the masks of `keys`; those that had it, packed."""
        masks, gone = self._masks, []
        before, after, growth = 0, 0, 0
        for key in keys:
            mask = masks.get(key, 0)
            if mask is not before:
                if not mask & bit:
                    continue
                before, after = mask, mask ^ bit
                growth = _int_size(after) - _int_size(mask)
                if after and after & (after - 1) == 0:
                    after = self._only(after)
            if after:
                self._mask_bytes += growth
                masks[key] = after
            elif before:
                del masks[key]
            else:
                continue
            gone.append(key)
        return b"".join(gone)

    def _clear(self, store: _Store) -> None:
        self._remove(store, self._keys_of(store))
        store.log = bytearray()
        store.unstage()

    def _keys_of(self, store: _Store) -> dict[bytes, None]:
        return dict.fromkeys(self._held(store.log, store.bit))

    def _held(self, packed: bytes | bytearray, bit: int) -> Iterable[bytes]:
        """Those of `packed` whose masks have this bit, in their order."""
        masks = self._masks
        return (key for key in _split(packed) if masks.get(key, 0) & bit)

    def _only(self, bit: int) -> int:
        """The shared int of the one slot that `bit` stands for."""
        store = self._slots[bit.bit_length() - 1]
        assert store is not None
        return store.bit

    def _add_store(self, store_id: str, incarnation: int) -> _Store:
        self._gone.pop(store_id, None)
        slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._slots)
        store = _Store(store_id, slot, incarnation)
        if slot == len(self._slots):
            self._slots.append(store)
        else:
            self._slots[slot] = store
        self._stores[store_id] = store
        return store


def _check(keys: tuple[bytes, ...]) -> None:
    for size in set(map(len, keys)):
        if size != KEY_BYTES:
            raise ValueError(f"a key has {size} bytes, not {KEY_BYTES}")


def _is_long(store: _Store) -> bool:
    return len(store.log) > KEY_BYTES * (2 * store.count + 1024)


def _int_size(mask: int) -> int:
    """What a mask takes beyond the shared ones: 0 with one bit."""
    return sys.getsizeof(mask) if mask & (mask - 1) else 0


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _split(packed: bytes | bytearray) -> Iterator[bytes]:
    raw = bytes(packed)
    return (raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES))
