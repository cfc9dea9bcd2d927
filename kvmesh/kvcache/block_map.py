"""Which node store holds which block: a bitset of store slots for every key. Master and conductor both keep one.

For every store the map shows state(seq) of one incarnation (see `announce`): batches are taken in order, snapshots when
they are newer, anything else is refused with a verdict. So lost, repeated and reordered announcements leave it behind,
never wrong, and the next snapshot brings it forward.

Parts of a snapshot are gathered aside and replace the store's keys at once with the last part. Batches that come
meanwhile are applied to what is shown, as ever; if they lead past the snapshot, it is thrown away.

No step costs more than its announcement's keys, however much a store holds: what is dropped or replaced vanishes from
every answer at once and is cleared away later, slice by slice, by `sweep`.

A store whose model has several cache groups announces a mask of them with each key. Group 0 is then the store's own
content and every other group a content beside it, with a slot of its own: each is told its part of the same
announcement under the same number, so all of them are at the same state. Counts are of group 0.

Memory: one dict entry and one 16-byte key a block, 16 to 36 bytes a replica in its store's log. Blocks with one replica
share their store's int. Blocks with two or more have an int of a bit for each slot; those whose replica came, or went,
in one announcement share it (`memory_bytes` counts it for each of them: it is an upper bound).
"""

from __future__ import annotations

import enum
import heapq
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import is_not

from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.keys import KEY_BYTES, split

MAX_GONE = 10_000  # dropped stores whose last incarnation is remembered
SHORTEN_KEYS = 64  # of a log that is being shortened, in one step, beside four for each that has come
FIRST_PIECE = 32  # keys looked up before the next, greater piece: a new prompt costs no more
LAST_PIECE = 256  # as great as they get: so many are looked up behind the end at most
KEY_OBJECT_BYTES = sys.getsizeof(bytes(KEY_BYTES))


Place = tuple[str, int]  # a store and a cache group of it


class Verdict(enum.Enum):
    """What became of an announcement."""

    APPLIED = "applied"
    PARTIAL = "partial"  # a part of a snapshot, kept; others follow
    DUPLICATE = "duplicate"  # nothing new in it
    GAP = "gap"  # something before it is missing: ask for a snapshot
    STALE = "stale"  # of an older incarnation


class StoreContent:
    """The keys of one store under one slot: shown, or hidden (being gathered for a snapshot, or to be swept)."""

    __slots__ = "bit", "count", "group", "incarnation", "log", "seq", "slot", "staged_parts", "staged_seq", "store_id"

    def __init__(self, store_id: str, slot: int, incarnation: int, group: int = 0) -> None:
        self.store_id = store_id
        self.group = group  # of the model's cache groups
        self.slot = slot
        self.bit = 1 << slot
        self.incarnation = incarnation
        self.seq = 0
        self.count = 0
        # Every key of this store, packed, in order of arrival; also some that it no longer holds, and some twice.
        self.log = bytearray()
        self.unstage()

    @property
    def place(self) -> Place:
        return self.store_id, self.group

    def unstage(self) -> None:
        self.staged_seq = -1
        self.staged_parts = 0


@dataclass(slots=True)
class _Shortening:
    """The compaction of one log, in place: bytes up to `write` are what is kept of those up to `read`."""

    log: bytearray
    read: int = 0
    write: int = 0
    seen: set[bytes] = field(default_factory=set)


class BlockMap:
    """Maps a key to a bitset of slots. `apply` and `drop` cost O(keys of the announcement); the remaining work waits
    for `sweep`.

    Each content has a slot of its own, a small number. A snapshot is gathered under a hidden slot, which replaces the
    store's slot with the last part; the slot of a dropped content is hidden. No answer contains hidden slots. A store's
    slot therefore *changes* with a newer incarnation and with each snapshot: call `slot` again after every `apply`.
    """

    def __init__(self) -> None:
        self._masks: dict[bytes, int] = {}
        self._stores: dict[str, StoreContent] = {}
        self._further: dict[str, dict[int, StoreContent]] = {}  # by store: its contents of groups above 0
        self._slots: list[StoreContent | None] = []
        self._free_slots: list[int] = []  # a heap: the lowest is used first, so that masks stay short
        self._gone: dict[str, int] = {}  # last incarnation of dropped stores, oldest drop first
        self._replicas = 0
        self._mask_bytes = 0  # of the masks with two bits or more, which have an int of their own
        self._hidden = 0
        self._retired: deque[StoreContent] = deque()
        self._gathering: dict[Place, StoreContent] = {}
        self._shortening: dict[Place, _Shortening] = {}
        self.moved: dict[str, None] | None = None  # stores whose slots have changed; None: the owner does not need them

    def __len__(self) -> int:
        """Returns the number of distinct keys. While `sweep` has work left it is an upper bound."""
        further = sum(content.count for groups in self._further.values() for content in groups.values())
        return min(len(self._masks), self.replicas + further)

    @property
    def replicas(self) -> int:
        """The number of keys of all stores together, of group 0 where there are several. O(stores)."""
        return sum(store.count for store in self._stores.values())

    @property
    def unswept(self) -> int:
        """The number of replicas that are no longer shown and still take memory."""
        return sum(store.count for store in self._retired)

    # ── changes ──────────────────────────────────────────────────────────────────────────────────────

    def apply(self, announcement: Announcement) -> Verdict:
        """Applies an announcement and returns what became of it. Its numbers may be anything. Raises ValueError if a
        key does not have 16 bytes, or if there are masks and not one for each sealed key."""
        _check(announcement.sealed)
        _check(announcement.removed)
        if announcement.groups and len(announcement.groups) != len(announcement.sealed):
            raise ValueError(f"{len(announcement.groups)} masks for {len(announcement.sealed)} sealed keys")
        known = self._stores.get(announcement.store_id)
        last = self._gone.get(announcement.store_id, 0) if known is None else known.incarnation
        if announcement.incarnation < last:
            return Verdict.STALE
        store = known
        if store is None:
            store = self._add_store(announcement.store_id, announcement.incarnation)
        elif announcement.incarnation > last:
            self._clear(store)
            self._drop_further(store.store_id)
            store.incarnation = announcement.incarnation
            store.seq = 0
        first = known is not store or announcement.incarnation > last
        if announcement.groups or store.store_id in self._further:
            return self._of_groups(store, announcement, first)
        return self._take_in(store, announcement, first)

    def drop(self, store_id: str, incarnation: int | None = None) -> int:
        """Forgets all keys of a store, and returns how many. With `incarnation` it does so unless the store has a newer
        incarnation, and announcements of earlier ones stay STALE; without it nothing about the store is remembered."""
        self._moves(store_id)
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
        self._drop_further(store_id)
        self._end(store)
        del self._stores[store_id]
        return count

    def sweep(self, max_keys: int) -> bool:
        """Frees up to `max_keys` replicas that are no longer shown. Returns whether more are left."""
        for place in [place for place in self._gathering if not self._gathers(place)]:
            self._retire(self._gathering.pop(place))
        for place in [place for place, job in self._shortening.items() if not self._is_shown(place, job.log)]:
            del self._shortening[place]
        left = max_keys
        while self._retired and left > 0:
            ghost = self._retired[0]
            start = max(0, len(ghost.log) - left * KEY_BYTES)
            tail = ghost.log[start:]
            del ghost.log[start:]
            self._remove(ghost, split(bytes(tail)))
            left -= len(tail) // KEY_BYTES
            if not ghost.log:
                assert ghost.count == 0, f"{ghost.count} keys of slot {ghost.slot} are not in its log"
                self._retired.popleft()
                self._slots[ghost.slot] = None
                self._hidden &= ~ghost.bit
                heapq.heappush(self._free_slots, ghost.slot)
        return bool(self._retired)

    # ── questions ────────────────────────────────────────────────────────────────────────────────────

    def slot(self, store_id: str) -> int | None:
        """Returns the slot of a store, or None when it never announced anything or was dropped."""
        store = self._stores.get(store_id)
        return None if store is None else store.slot

    def slots(self, store_id: str) -> dict[int, int]:
        """Returns the slot of each cache group that a store has ever announced a key of; group 0 is always there. Empty
        when it never announced anything or was dropped."""
        return {content.group: content.slot for content in self._contents_of(store_id)}

    @property
    def grouped(self) -> bool:
        """Whether any store has announced a cache group above 0."""
        return bool(self._further)

    def has_groups(self, store_id: str) -> bool:
        """Says whether this store has."""
        return store_id in self._further

    def groups(self, store_id: str, keys: Sequence[bytes]) -> bytes:
        """Returns what the store holds of each key, one mask of cache groups a key; b"" when it has never announced any
        but group 0."""
        if store_id not in self._further:
            return b""
        contents = self._contents_of(store_id)
        return bytes(sum(1 << one.group for one in contents if mask & one.bit) for mask in map(self.mask, keys))

    def by_group(self, mask: int, count: int) -> tuple[int, ...]:
        """Returns who of a bitset of slots holds each of the first `count` cache groups, as bitsets of the slots that
        these stores have of group 0. O(slots of the bitset)."""
        found = [0] * count
        while mask:
            low = mask & -mask
            content = self._slots[low.bit_length() - 1]
            if content is not None and content.group < count:
                found[content.group] |= self._stores[content.store_id].bit if content.group else low
            mask ^= low
        return tuple(found)

    def store_of(self, slot: int) -> str:
        """Returns the store of a slot. Raises KeyError when the slot has none."""
        store = self._slots[slot] if 0 <= slot < len(self._slots) else None
        if store is None:
            raise KeyError(f"slot {slot} stands for no store")
        return store.store_id

    def stores(self) -> list[str]:
        """Returns every store that has announced anything and was not dropped since."""
        return list(self._stores)

    def mask(self, key: bytes) -> int:
        """Returns the bitset of the slots that hold `key`."""
        return self._masks.get(key, 0) & ~self._hidden

    def masks(self, keys: Sequence[bytes]) -> list[int]:
        """Returns `mask` of each key."""
        shown, get = ~self._hidden, self._masks.get
        return [get(key, 0) & shown for key in keys]

    def prefix(self, keys: Sequence[bytes], at_least: int = 0) -> list[tuple[int, int]]:
        """Returns who holds the leading `keys`, as runs (end, bitset) of keys with the same holders. The last run ends
        at the first key beyond `at_least` that nobody holds, or at the end; before it, keys that nobody holds have a
        run, too. O(keys) at the speed of a dict's `get` whatever the number of holders, because masks are compared by
        identity first."""
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

    def holders(self, key: bytes) -> list[str]:
        """Returns the stores that hold `key`, in any of its cache groups, in the order of their slots."""
        mask, found = self.mask(key), []
        while mask:  # written out: a master's look-ups are this loop
            low = mask & -mask
            found.append(self.store_of(low.bit_length() - 1))
            mask ^= low
        return list(dict.fromkeys(found)) if self._further else found

    def match(self, keys: Sequence[bytes], among: int) -> dict[int, int]:
        """Returns how many leading `keys` each slot of the bitset `among` holds; slots without the first key are left
        out. The order is arbitrary. O(keys + slots)."""
        leading: dict[int, int] = {}
        alive = among & ~self._hidden
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
        """Returns (slot, length) of the longest run of `keys[start:]` that one slot of `among` holds (the lowest such
        slot), or (-1, 0) when none holds `keys[start]`."""
        alive, index = among & ~self._hidden, start
        while index < len(keys) and (still := alive & self._masks.get(keys[index], 0)):
            alive, index = still, index + 1
        return (-1, 0) if index <= start else ((alive & -alive).bit_length() - 1, index - start)

    def reach(self, keys: Sequence[bytes], start: int, among: int) -> int:
        """Returns the index of the first of `keys[start:]` that no slot of `among` holds; `len(keys)` if each has a
        holder."""
        index, among = start, among & ~self._hidden
        while index < len(keys) and among & self._masks.get(keys[index], 0):
            index += 1
        return index

    def count(self, store_id: str) -> int:
        """Returns the number of keys of a store, of group 0 where it has several; 0 for an unknown one."""
        store = self._stores.get(store_id)
        return 0 if store is None else store.count

    def seq(self, store_id: str) -> int:
        """Returns the number of the last announcement that was applied; 0 when there was none."""
        store = self._stores.get(store_id)
        return 0 if store is None else store.seq

    def incarnation(self, store_id: str) -> int:
        """Returns the incarnation of a store whose keys are shown; 0 for an unknown store."""
        store = self._stores.get(store_id)
        return 0 if store is None else store.incarnation

    def keys_of(self, store_id: str) -> list[bytes]:
        """Returns every key of a store, whatever group of it is held. O(its keys)."""
        found: dict[bytes, None] = {}
        for content in self._contents_of(store_id):
            found |= self._keys_of(content)
        return list(found)

    def log_of(self, store_id: str) -> bytes:
        """Returns packed keys: all that the store holds, mixed with some that it no longer holds, some of them twice.
        It is a memory copy, so a big store can be read in slices; `held` filters a slice."""
        return b"".join(content.log for content in self._contents_of(store_id))

    def held(self, store_id: str, packed: bytes) -> list[bytes]:
        """Returns those of the packed keys that the store holds now, in any group."""
        if store_id in self._further:
            masks, bits = self._masks, self._bits_of(store_id)
            return [key for key in split(packed) if masks.get(key, 0) & bits]
        store = self._stores.get(store_id)
        return [] if store is None else list(self._held(packed, store.bit))

    def memory_bytes(self) -> int:
        """Returns about how many bytes the map takes, unswept replicas included. O(stores)."""
        logs = sum(sys.getsizeof(s.log) + sys.getsizeof(s) for s in self._contents())
        return sys.getsizeof(self._masks) + len(self._masks) * KEY_OBJECT_BYTES + self._mask_bytes + logs

    def check_integrity(self) -> None:
        """Raises AssertionError unless bits, counts, logs and slots agree. O(replicas)."""
        counts = dict.fromkeys(range(len(self._slots)), 0)
        for mask in self._masks.values():
            assert mask, "a key without a holder"
            for slot in _bits(mask):
                counts[slot] += 1
        live = {store.slot: store for store in self._contents()}
        hidden = [*self._retired, *self._gathering.values()]
        assert self._hidden == sum(store.bit for store in hidden), "a hidden slot is shown, or the reverse"
        for slot, count in counts.items():
            store = live.get(slot)
            assert self._slots[slot] is store, f"slot {slot} does not know its store"
            assert (store is None) == (slot in self._free_slots), f"slot {slot} is free and used, or neither"
            assert count == (0 if store is None else store.count), f"slot {slot} has {count} keys"
            if store is not None:
                assert len(self._keys_of(store)) == count, f"slot {slot}: its log lacks keys"
        for store_id, groups in self._further.items():
            anchor = self._stores[store_id]
            for group, content in groups.items():
                assert content.place == (store_id, group), "a content of another store or group"
                for name in ("incarnation", "seq", "staged_seq", "staged_parts"):
                    told = getattr(content, name), getattr(anchor, name)
                    assert told[0] == told[1], f"{store_id} group {group}: {name} is {told[0]}, group 0 has {told[1]}"
        assert self._replicas == sum(counts.values())
        assert self._mask_bytes == sum(int_size(mask) for mask in self._masks.values())

    # ── inner ────────────────────────────────────────────────────────────────────────────────────────

    def _take_in(self, store: StoreContent, announcement: Announcement, first: bool) -> Verdict:
        return self._snapshot(store, announcement) if announcement.snapshot else self._batch(store, announcement, first)

    def _of_groups(self, store: StoreContent, told: Announcement, first: bool) -> Verdict:
        """Applies an announcement to every group of the store. Each is told all of the keys, as sealed or as removed:
        a mask says what is held from now on, and a batch that is not empty is empty for no group. So all of them come
        to the same verdict."""
        masks = dict(zip(told.sealed, told.groups or b"\x01" * len(told.sealed), strict=True))
        mentioned = 0
        for mask in set(masks.values()):
            mentioned |= mask
        for group in _bits(mentioned & ~1):
            self._group_of(store, group)
        verdict = Verdict.DUPLICATE
        for content in self._contents_of(store.store_id):
            bit = 1 << content.group
            sealed = tuple(key for key, mask in masks.items() if mask & bit)
            others = () if told.snapshot else tuple(key for key, mask in masks.items() if not mask & bit)
            part = replace(told, sealed=sealed, removed=told.removed + others, groups=b"")
            verdict = self._take_in(content, part, first)
        return verdict

    def _group_of(self, store: StoreContent, group: int) -> StoreContent:
        """Returns the store's content of that group. One that was never heard of is at the same state as the others:
        no key of it was sealed so far, nor was one in the parts of the snapshot that is being gathered."""
        groups = self._further.setdefault(store.store_id, {})
        content = groups.get(group)
        if content is None:
            content = groups[group] = self._content(store.store_id, store.incarnation, group)
            content.seq, content.staged_seq, content.staged_parts = store.seq, store.staged_seq, store.staged_parts
            old = self._gathering.pop(content.place, None)  # of an earlier incarnation
            if old is not None:
                self._retire(old)
            self._moves(store.store_id)
        return content

    def _contents_of(self, store_id: str) -> list[StoreContent]:
        """Returns what is shown of a store, group 0 first."""
        store = self._stores.get(store_id)
        if store is None:
            return []
        return [store, *self._further[store_id].values()] if store_id in self._further else [store]

    def _bits_of(self, store_id: str) -> int:
        return sum(content.bit for content in self._contents_of(store_id))

    def _drop_further(self, store_id: str) -> None:
        for content in self._further.pop(store_id, {}).values():
            self._end(content)

    def _end(self, content: StoreContent) -> None:
        """Empties a content that is not shown any more and frees its slot."""
        self._clear(content)
        self._slots[content.slot] = None
        heapq.heappush(self._free_slots, content.slot)

    def _batch(self, store: StoreContent, batch: Announcement, first: bool) -> Verdict:
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

    def _snapshot(self, store: StoreContent, part: Announcement) -> Verdict:
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

    def _stage(self, store: StoreContent, keys: Sequence[bytes]) -> None:
        self._add(self._gathered(store), keys)

    def _replace(self, store: StoreContent, keys: Sequence[bytes]) -> None:
        new = self._gathered(store)
        del self._gathering[store.place]
        self._add(new, keys)
        self._swap(store, new)
        self._retire(new)

    def _add(self, store: StoreContent, keys: Iterable[bytes]) -> None:
        packed = self._put(keys, store.bit)
        self._count(store, packed, 1)
        store.log += packed
        self._shorten(store, len(packed) // KEY_BYTES)

    def _put(self, keys: Iterable[bytes], bit: int) -> bytes:
        """Sets the bit in the masks of `keys`; returns, packed, the keys that lacked it. `bit` must be the int object
        that the store shares among its keys."""
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
                    growth = int_size(after) - int_size(mask)
                masks[key] = after
                self._mask_bytes += growth
            new.append(key)
        return b"".join(new)

    def _shorten(self, store: StoreContent, added: int) -> None:
        """Compacts a part of the log, faster than the log grows. At every moment the log names all keys that the store
        holds."""
        job = self._shortening.get(store.place)
        if job is None or job.log is not store.log:
            if not _is_long(store):
                return
            job = self._shortening[store.place] = _Shortening(store.log)
        seen = job.seen
        stop = min(len(job.log), job.read + KEY_BYTES * (4 * added + SHORTEN_KEYS))
        held = dict.fromkeys(self._held(job.log[job.read : stop], store.bit))
        kept = [key for key in held if key not in seen]
        seen.update(kept)
        job.log[job.write : job.write + len(kept) * KEY_BYTES] = b"".join(kept)
        job.read, job.write = stop, job.write + len(kept) * KEY_BYTES
        if stop == len(job.log):
            del job.log[job.write :]
            del self._shortening[store.place]

    def _count(self, store: StoreContent, packed: bytes, sign: int) -> None:
        count = sign * (len(packed) // KEY_BYTES)
        store.count += count
        self._replicas += count
        self._changed(store, packed, sign)

    def _changed(self, store: StoreContent, packed: bytes, sign: int) -> None:
        """Is called when these packed keys were added (`sign` 1) or removed (-1); subclasses count more by it."""

    def _remove(self, store: StoreContent, keys: Iterable[bytes]) -> None:
        self._count(store, self._take(keys, store.bit), -1)

    def _take(self, keys: Iterable[bytes], bit: int) -> bytes:
        """Clears the bit in the masks of `keys`; returns, packed, the keys that had it."""
        masks, gone = self._masks, []
        before, after, growth = 0, 0, 0
        for key in keys:
            mask = masks.get(key, 0)
            if mask is not before:
                if not mask & bit:
                    continue
                before, after = mask, mask ^ bit
                growth = int_size(after) - int_size(mask)
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

    def _clear(self, store: StoreContent) -> None:
        empty = self._aside(store)
        self._swap(store, empty)
        self._retire(empty)
        store.unstage()

    def _contents(self) -> Iterator[StoreContent]:
        """Yields all contents, hidden ones included."""
        yield from self._stores.values()
        for groups in self._further.values():
            yield from groups.values()
        yield from self._retired
        yield from self._gathering.values()

    def _moves(self, store_id: str) -> None:
        if self.moved is not None:
            self.moved[store_id] = None

    def _gathers(self, place: Place) -> bool:
        """Says whether a snapshot of that store is still being gathered; it may have been overtaken, or its store
        dropped."""
        content = self._shown_content(place)
        return content is not None and content.staged_parts > 0

    def _is_shown(self, place: Place, log: bytearray) -> bool:
        content = self._shown_content(place)
        return content is not None and content.log is log

    def _shown_content(self, place: Place) -> StoreContent | None:
        store_id, group = place
        return self._further.get(store_id, {}).get(group) if group else self._stores.get(store_id)

    def _gathered(self, store: StoreContent) -> StoreContent:
        """Returns the content that gathers the current snapshot; for the first part it is empty."""
        found = self._gathering.get(store.place)
        if found is None or store.staged_parts == 1:
            if found is not None:
                self._retire(found)
            found = self._gathering[store.place] = self._aside(store)
        return found

    def _aside(self, store: StoreContent) -> StoreContent:
        """Makes an empty content under a hidden slot."""
        aside = self._content(store.store_id, store.incarnation, store.group)
        self._hidden |= aside.bit
        return aside

    def _content(self, store_id: str, incarnation: int, group: int = 0) -> StoreContent:
        """Makes an empty content under a free slot."""
        slot = heapq.heappop(self._free_slots) if self._free_slots else len(self._slots)
        content = StoreContent(store_id, slot, incarnation, group)
        if slot == len(self._slots):
            self._slots.append(content)
        else:
            self._slots[slot] = content
        return content

    def _swap(self, shown: StoreContent, other: StoreContent) -> None:
        """Exchanges the slots and contents of the two, so that what was hidden is shown and the reverse."""
        shown.slot, other.slot = other.slot, shown.slot
        shown.bit, other.bit = other.bit, shown.bit
        shown.log, other.log = other.log, shown.log
        shown.count, other.count = other.count, shown.count
        self._slots[shown.slot], self._slots[other.slot] = shown, other
        self._moves(shown.store_id)
        self._hidden = self._hidden & ~shown.bit | other.bit

    def _retire(self, ghost: StoreContent) -> None:
        """Queues a hidden content that will never be shown again for `sweep`."""
        self._retired.append(ghost)

    def _keys_of(self, store: StoreContent) -> dict[bytes, None]:
        return dict.fromkeys(self._held(store.log, store.bit))

    def _held(self, packed: bytes | bytearray, bit: int) -> Iterable[bytes]:
        """Returns those of the packed keys whose masks have this bit, in their order."""
        masks = self._masks
        return (key for key in split(bytes(packed)) if masks.get(key, 0) & bit)

    def _only(self, bit: int) -> int:
        """Returns the int object that the store of this one-bit mask shares among its keys."""
        store = self._slots[bit.bit_length() - 1]
        assert store is not None
        return store.bit

    def _add_store(self, store_id: str, incarnation: int) -> StoreContent:
        self._moves(store_id)
        self._gone.pop(store_id, None)
        store = self._stores[store_id] = self._content(store_id, incarnation)
        return store


def _check(keys: tuple[bytes, ...]) -> None:
    for size in set(map(len, keys)):
        if size != KEY_BYTES:
            raise ValueError(f"a key has {size} bytes, not {KEY_BYTES}")


def _is_long(store: StoreContent) -> bool:
    return len(store.log) > KEY_BYTES * (2 * store.count + 1024)


def int_size(mask: int) -> int:
    """Returns the bytes that a mask takes; 0 with one bit, since such ints are shared."""
    return sys.getsizeof(mask) if mask & (mask - 1) else 0


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _runs(masks: list[int]) -> Iterator[tuple[int, int]]:
    """Yields (mask, length) for runs of the same mask object. Two neighbours may hold equal ints; only identical
    objects count as the same here."""
    differs, at = bytes(map(is_not, masks, masks[1:])), 0
    while (last := differs.find(1, at)) >= 0:
        yield masks[at], last + 1 - at
        at = last + 1
    yield masks[at], len(masks) - at
