"""A BlockMap whose steps stay short however much a store holds: what is dropped or replaced vanishes at once and is
cleared away later, slice by slice."""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import is_not

from kvmesh.kvcache.block_map import BlockMap, _is_long, _split, _Store
from kvmesh.kvcache.keys import KEY_BYTES

SHORTEN_KEYS = 64  # of a log that is being shortened, in one step, beside four for each that has come
FIRST_PIECE = 32  # keys looked up before the next, greater piece: a new prompt costs no more
LAST_PIECE = 256  # as great as they get: so many are looked up behind the end at most


@dataclass(slots=True)
class _Shortening:
    """Of one log, in place: bytes up to `write` are what is kept of those up to `read`."""

    log: bytearray
    read: int = 0
    write: int = 0
    seen: set[bytes] = field(default_factory=set)


class SteadyBlockMap(BlockMap):
    """`apply` and `drop` cost O(keys of the announcement); the rest of the work waits for `sweep`.

    Every content lives under a slot of its own. A snapshot is gathered under a hidden slot, which takes the place of
    the store's with the last part; a dropped content's slot is hidden. Hidden slots are in no answer. So a store's
    slot *changes* with a newer incarnation and with each snapshot: ask `slot` again after every `apply`."""

    def __init__(self) -> None:
        super().__init__()
        self._hidden = 0
        self._retired: deque[_Store] = deque()
        self._gathering: dict[str, _Store] = {}
        self._shortening: dict[str, _Shortening] = {}
        self.moved: dict[str, None] | None = None  # stores whose slots have changed: for whoever puts a dict here

    def __len__(self) -> int:
        """Distinct keys; while `sweep` has work left at most so many, and no fewer than shown."""
        return min(len(self._masks), self.replicas)

    @property
    def replicas(self) -> int:
        """Keys of all stores together. O(stores)."""
        return sum(store.count for store in self._stores.values())

    @property
    def unswept(self) -> int:
        """Replicas that are no longer shown and still take memory."""
        return sum(store.count for store in self._retired)

    def sweep(self, max_keys: int) -> bool:
        """Clear away up to `max_keys` of what is no longer shown; whether there is more."""
        for store_id in [name for name in self._gathering if not self._gathers(name)]:
            self._retire(self._gathering.pop(store_id))
        for store_id in [name for name, job in self._shortening.items() if not self._is_shown(name, job.log)]:
            del self._shortening[store_id]
        left = max_keys
        while self._retired and left > 0:
            ghost = self._retired[0]
            start = max(0, len(ghost.log) - left * KEY_BYTES)
            tail = ghost.log[start:]
            del ghost.log[start:]
            self._remove(ghost, _split(tail))
            left -= len(tail) // KEY_BYTES
            if not ghost.log:
                assert ghost.count == 0, f"{ghost.count} keys of slot {ghost.slot} are not in its log"
                self._retired.popleft()
                self._slots[ghost.slot] = None
                self._hidden &= ~ghost.bit
                heapq.heappush(self._free_slots, ghost.slot)
        return bool(self._retired)

    # ── questions ────────────────────────────────────────────────────────────────────────────────────

    def mask(self, key: bytes) -> int:
        """Bitset of the slots that hold `key`."""
        return super().mask(key) & ~self._hidden

    def prefix(self, keys: Sequence[bytes], at_least: int = 0) -> list[tuple[int, int]]:
        """Who holds the leading `keys`: runs (end, bitset) of keys with the same holders, up to the first key beyond
        `at_least` that nobody holds, or to the last. What is before it and held by nobody has a run, too. O(keys) at
        the speed of a dict's `get`, however many the holders: masks are compared by identity first."""
        get, shown = self._masks.get, ~self._hidden
        runs: list[tuple[int, int]] = []
        at, size, last = 0, FIRST_PIECE, -1
        while at < len(keys):
            piece = list(map(get, keys[at : at + size], repeat(0)))
            alike = [(piece[0], len(piece))] if piece.count(piece[0]) == len(piece) else _runs(piece)
            for raw, length in alike:
                mask = raw & shown
                if not mask and at + length > at_least:
                    return runs if at >= at_least else [*runs, (at_least, 0)]
                at += length
                if mask == last:
                    runs[-1] = at, mask
                else:
                    runs.append((at, mask))
                    last = mask
            size = min(2 * size, LAST_PIECE)
        return runs

    def masks(self, keys: Sequence[bytes]) -> list[int]:
        """`mask` of each."""
        shown, get = ~self._hidden, self._masks.get
        return [get(key, 0) & shown for key in keys]

    def holders(self, key: bytes) -> list[str]:
        """The stores that hold `key`, by slot."""
        mask, found = self.mask(key), []
        while mask:
            low = mask & -mask
            found.append(self.store_of(low.bit_length() - 1))
            mask ^= low
        return found

    def match(self, keys: Sequence[bytes], among: int) -> dict[int, int]:
        """See BlockMap."""
        return super().match(keys, among & ~self._hidden)

    def run(self, keys: Sequence[bytes], start: int, among: int) -> tuple[int, int]:
        """See BlockMap."""
        return super().run(keys, start, among & ~self._hidden)

    def reach(self, keys: Sequence[bytes], start: int, among: int) -> int:
        """See BlockMap."""
        return super().reach(keys, start, among & ~self._hidden)

    def log_of(self, store_id: str) -> bytes:
        """Packed keys: all that the store holds, also some that it no longer holds, and some twice. A copy of memory,
        so that a big store can be read slice by slice; `held` tells which of a slice are true now."""
        store = self._stores.get(store_id)
        return b"" if store is None else bytes(store.log)

    def held(self, store_id: str, packed: bytes) -> list[bytes]:
        """Those of `packed` that the store holds now."""
        store = self._stores.get(store_id)
        return [] if store is None else list(self._held(packed, store.bit))

    def memory_bytes(self) -> int:
        """About what the map takes, what is not swept yet included. O(stores)."""
        hidden = [*self._retired, *self._gathering.values()]
        return super().memory_bytes() + sum(sys.getsizeof(store.log) + sys.getsizeof(store) for store in hidden)

    def check_integrity(self) -> None:
        """AssertionError unless bits, counts, logs and slots agree. O(replicas)."""
        hidden = [*self._retired, *self._gathering.values()]
        assert self._hidden == sum(store.bit for store in hidden)
        for ghost in hidden:
            assert self._slots[ghost.slot] is ghost
            assert len(self._keys_of(ghost)) == ghost.count
        if not hidden:
            super().check_integrity()

    def drop(self, store_id: str, incarnation: int | None = None) -> int:
        """See BlockMap."""
        self._moves(store_id)
        return super().drop(store_id, incarnation)

    # ── inner ────────────────────────────────────────────────────────────────────────────────────────

    def _moves(self, store_id: str) -> None:
        if self.moved is not None:
            self.moved[store_id] = None

    def _add_store(self, store_id: str, incarnation: int) -> _Store:
        self._moves(store_id)
        return super()._add_store(store_id, incarnation)

    def _gathers(self, store_id: str) -> bool:
        """Whether a snapshot of that store is still under way: it may have been overtaken, or its store dropped."""
        store = self._stores.get(store_id)
        return store is not None and store.staged_parts > 0

    def _is_shown(self, store_id: str, log: bytearray) -> bool:
        store = self._stores.get(store_id)
        return store is not None and store.log is log

    def _shorten(self, store: _Store, added: int) -> None:
        """Some of it, faster than the log grows. At every moment the log names all that the store holds."""
        job = self._shortening.get(store.store_id)
        if job is None or job.log is not store.log:
            if not _is_long(store):
                return
            job = self._shortening[store.store_id] = _Shortening(store.log)
        seen = job.seen
        stop = min(len(job.log), job.read + KEY_BYTES * (4 * added + SHORTEN_KEYS))
        held = dict.fromkeys(self._held(job.log[job.read : stop], store.bit))
        kept = [key for key in held if key not in seen]
        seen.update(kept)
        job.log[job.write : job.write + len(kept) * KEY_BYTES] = b"".join(kept)
        job.read, job.write = stop, job.write + len(kept) * KEY_BYTES
        if stop == len(job.log):
            del job.log[job.write :]
            del self._shortening[store.store_id]

    def _stage(self, store: _Store, keys: Sequence[bytes]) -> None:
        self._add(self._gathered(store), keys)

    def _replace(self, store: _Store, keys: Sequence[bytes]) -> None:
        new = self._gathered(store)
        del self._gathering[store.store_id]
        self._add(new, keys)
        self._swap(store, new)
        self._retire(new)

    def _clear(self, store: _Store) -> None:
        empty = self._aside(store)
        self._swap(store, empty)
        self._retire(empty)
        store.unstage()

    def _gathered(self, store: _Store) -> _Store:
        """Where the parts of the snapshot under way are gathered; empty for its first part."""
        found = self._gathering.get(store.store_id)
        if found is None or store.staged_parts == 1:
            if found is not None:
                self._retire(found)
            found = self._gathering[store.store_id] = self._aside(store)
        return found

    def _aside(self, store: _Store) -> _Store:
        """An empty content under a hidden slot."""
        slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._slots)
        aside = _Store(store.store_id, slot, store.incarnation)
        if slot == len(self._slots):
            self._slots.append(aside)
        else:
            self._slots[slot] = aside
        self._hidden |= aside.bit
        return aside

    def _swap(self, shown: _Store, other: _Store) -> None:
        """The two change slots and contents; what was hidden is shown and the other way round."""
        shown.slot, other.slot = other.slot, shown.slot
        shown.bit, other.bit = other.bit, shown.bit
        shown.log, other.log = other.log, shown.log
        shown.count, other.count = other.count, shown.count
        self._slots[shown.slot], self._slots[other.slot] = shown, other
        self._moves(shown.store_id)
        self._hidden = self._hidden & ~shown.bit | other.bit

    def _retire(self, ghost: _Store) -> None:
        """A hidden content that nobody will show again."""
        self._retired.append(ghost)


def _runs(masks: list[int]) -> Iterator[tuple[int, int]]:
    """Two neighbours may be equal ints: only the same object counts as the same here."""
    differs, at = bytes(map(is_not, masks, masks[1:])), 0
    while (last := differs.find(1, at)) >= 0:
        yield masks[at], last + 1 - at
        at = last + 1
    yield masks[at], len(masks) - at
