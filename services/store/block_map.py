"""This is the master's map of which node holds which block. Pure.

`MasterMap` is a block map that also counts keys by tenant's tag, and forgets keys of all stores at once. All keys that
begin with a prefix vanish from every answer in one step and are cleared away later: a sweep of that prefix masks them
in the slots that it has yet to go through. A key that is added to such a slot meanwhile is shown, and spared by the
sweep.

`BlockDirectory` feeds the map from announcements of members only. A tier of a node is a store of its own in it
(`tiers.store_name`): each has its own limits, numbers and snapshots; all tiers of a node end together.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.block_map import BlockMap, StoreContent, Verdict
from kvmesh.kvcache.keys import KEY_BYTES, TAG_BYTES, split
from kvmesh.kvcache.tiers import MARK, Tier, split_name, store_names

# Upper bounds. They follow from CPython's growth of dicts (to three times what they hold) and of bytearrays (by an
# eighth), and from how long a log gets before it is shortened.
ENTRY_BYTES = 184  # for a key: the object 64, its place in the dict up to 120
REPLICA_BYTES = 36
LOG_SLACK_BYTES = 18 << 10
TAG_ENTRY_BYTES = 160  # for one tag in one store's counts: key, int and its share of the dict


FIRST_KEYS = 1024  # keys of a prefix that are swept at once
STEP_KEYS = 2048  # keys of a prefix in one later step: each costs more than a key of a store that is gone
SCAN_KEYS = 65_536  # keys of a log that are looked through in one step
SCAN_COST = 1024  # how many keys could be taken out in the time of such a scan
MAX_SWEEPS = 64  # with more, the oldest is carried to its end at once


@dataclass(slots=True)
class _Sweep:
    """Is the sweep of one prefix, slot by slot, the lowest first."""

    prefix: bytes
    bits: int  # bitset of the slots that it has not gone through
    spared: dict[bytes, int] = field(default_factory=dict)  # key → slots that the key was added to meanwhile
    log: bytes | None = None  # the log of the lowest slot; None: that slot is not begun
    at: int = 0
    found: bytes = b""  # packed keys that were found in the log and are still to be taken out


class MasterMap(BlockMap):
    """Is a block map with counts by tag, and removal by prefix. `apply` and `drop` cost as in BlockMap, and O(watched
    tags) when a store's content changes as a whole.

    A slot keeps its content for life, whichever store shows it, so counts by tag are kept by slot. `forgotten` is
    called with what a sweep took out of a store. `mask`, `holders`, `held`, `page` and `sample` show nothing of what a
    sweep has yet to take out, and neither do counts, with one exception: keys that are masked only by prefixes longer
    than a tag are counted until the sweep finds them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: Callable[[str, list[bytes]], None] = lambda store_id, keys: None
        self.first_keys = FIRST_KEYS
        self._sweeps: deque[_Sweep] = deque()
        self._tags: defaultdict[int, dict[bytes, int]] = defaultdict(dict)  # slot → tag → keys
        self._tag_entries = 0
        self._masked: defaultdict[int, Counter[bytes]] = defaultdict(Counter)  # the same, keys masked by short prefixes
        self._taking = False  # whether all keys that are being removed are masked by a short prefix
        self._watched: dict[bytes, int] = {}  # tag → replicas shown

    @property
    def store_count(self) -> int:
        """How many stores have announced anything and were not dropped since."""
        return len(self._stores)

    # ── tags ─────────────────────────────────────────────────────────────────────────────────────────

    def watch(self, tag: bytes) -> None:
        """Keeps the sum of `tag` over all stores in DRAM from now on. Its cost is O(stores)."""
        names = (name for name in self._stores if MARK not in name)
        self._watched.setdefault(tag, sum(self.tagged_at(name, tag) for name in names))

    def unwatch(self, tag: bytes) -> None:
        """Stops keeping the sum of `tag`."""
        self._watched.pop(tag, None)

    def tagged(self, tag: bytes) -> int:
        """Returns how many replicas with a watched tag are in DRAM, in all stores together. Raises KeyError when the
        tag is not watched."""
        return self._watched[tag]

    def tagged_at(self, store_id: str, tag: bytes) -> int:
        """Returns how many keys with this tag one store has."""
        store = self._stores.get(store_id)
        return 0 if store is None else self._shown_at(store.slot, tag)

    def count(self, store_id: str) -> int:
        """Returns how many keys a store has; 0 for an unknown one. Its cost is O(tags that are being swept there)."""
        store = self._stores.get(store_id)
        return 0 if store is None else store.count - self._masked_at(store.slot)

    @property
    def replicas(self) -> int:
        """How many keys all stores have together. Its cost is O(stores)."""
        return super().replicas - sum(self._masked_at(store.slot) for store in self._stores.values())

    # ── keys of all stores ───────────────────────────────────────────────────────────────────────────

    def forget(self, keys: Iterable[bytes]) -> dict[str, list[bytes]]:
        """Takes these keys out of every store, also out of snapshots that are being gathered and slots that are not
        swept yet. Returns which keys are gone from which store. What stores announce of the keys later counts again."""
        by_mask: dict[int, list[bytes]] = {}
        masks = self._masks
        for key in dict.fromkeys(keys):
            by_mask.setdefault(masks.get(key, 0), []).append(key)
        gone: dict[str, list[bytes]] = {}
        for mask, some in by_mask.items():
            left = mask
            while left:
                low = left & -left
                store = self._slots[low.bit_length() - 1]
                assert store is not None, "a bit of a slot that nobody has"
                self._remove(store, some)
                gone.setdefault(store.store_id, []).extend(some)
                left ^= low
        # A store with several groups of a key has lost one key; so has one that was dropped, until its slots are swept.
        several = self._further or self._retired
        return {name: list(dict.fromkeys(lost)) for name, lost in gone.items()} if several else gone

    def forget_prefix(self, prefix: bytes) -> None:
        """Forgets all keys that begin with `prefix`, as `forget` does. Some keys are cleared at once, the others by
        `sweep`; what is taken out of each store goes to `forgotten`. Its cost is O(stores), and O(their tags) for a
        prefix shorter than a tag."""
        ghosts = {ghost.slot for ghost in self._retired}
        stores = [store for store in self._slots if store is not None and store.slot not in ghosts]
        bits = sum(store.bit for store in stores if self._may_have(store, prefix))
        if bits:
            self._sweeps.append(_Sweep(prefix, bits))
            for store in stores if len(prefix) <= TAG_BYTES else ():
                if store.bit & bits:
                    self._mask(store, prefix)
            self._sweep_prefixes(self.first_keys)
        while len(self._sweeps) > MAX_SWEEPS:
            self._sweep_prefixes(SCAN_COST)

    @property
    def sweeping(self) -> bool:
        """Whether keys that are not shown any more are still in memory."""
        return bool(self._sweeps)

    def sweep(self, max_keys: int) -> bool:
        """Clears away keys as BlockMap does, and then keys of forgotten prefixes. Returns whether there is more to
        clear."""
        more = super().sweep(max_keys)
        if not more:
            self._sweep_prefixes(min(max_keys, STEP_KEYS))
        return more or bool(self._sweeps)

    def mask(self, key: bytes) -> int:
        """Returns the bitset of the slots that hold `key`."""
        mask = super().mask(key)
        return mask & ~self._swept(key) if mask and self._sweeps else mask

    def held(self, store_id: str, packed: bytes) -> list[bytes]:
        """Returns the keys of `packed` that the store holds now."""
        found = super().held(store_id, packed)
        if not found or not self._sweeps:
            return found
        bits = self._bits_of(store_id)
        return [key for key in found if super(MasterMap, self).mask(key) & bits & ~self._swept(key)]

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def bound_bytes(self) -> int:
        """What the map never exceeds in bytes, besides LOG_SLACK_BYTES for each store. Its cost is O(1)."""
        tags = TAG_ENTRY_BYTES * self._tag_entries
        return len(self._masks) * ENTRY_BYTES + self._mask_bytes + self._replicas * REPLICA_BYTES + tags

    def sample(self, count: int, rng: random.Random) -> list[bytes]:
        """Returns up to `count` keys that are there, drawn at random (a key is as likely as it has replicas)."""
        stores = [store for store in self._slots if store is not None and store.count]
        if not stores:
            return []
        found: dict[bytes, None] = {}
        for store in rng.choices(stores, [store.count for store in stores], k=2 * count):
            at = rng.randrange(len(store.log) // KEY_BYTES) * KEY_BYTES
            key = bytes(store.log[at : at + KEY_BYTES])
            if self.mask(key) & store.bit:
                found[key] = None
                if len(found) == count:
                    break
        return list(found)

    def page(self, store_id: str, prefix: bytes, after: bytes, limit: int) -> list[bytes]:
        """Returns the `limit` lowest keys of one store above `after` that begin with `prefix`, ascending. Its cost is
        O(the store's keys)."""
        if not any(self._may_have(content, prefix) for content in self._contents_of(store_id)):
            return []
        words = _beginning(self.log_of(store_id), prefix)
        order = words[:, :8].copy().view(">u8").ravel().astype(np.uint64)
        if len(after) >= 8:
            above = order >= int.from_bytes(after[:8], "big")
            words, order = words[above], order[above]
        some = 2 * limit
        while True:
            # More of the lowest words are taken than `limit`, as the log has keys that are gone, and some keys twice.
            lowest = words if len(words) <= some else words[order <= np.partition(order, some)[some]]
            found = sorted(key for key in set(self.held(store_id, lowest.tobytes())) if key > after)
            if len(found) >= limit or len(lowest) == len(words):
                return found[:limit]
            some *= 4

    def shown(self) -> Iterator[tuple[str, int]]:
        """Yields the name and the bit of every store. A store's bit changes with each snapshot."""
        return ((store.store_id, store.bit) for store in self._stores.values())

    def memory_bytes(self) -> int:
        """Returns what the map takes (see BlockMap), with the counts by tag."""
        return super().memory_bytes() + TAG_ENTRY_BYTES * self._tag_entries

    def check_integrity(self) -> None:
        """Raises AssertionError unless counts by tag are those of the keys. Its cost is O(replicas)."""
        super().check_integrity()
        for slot, store in enumerate(self._slots):
            counted = dict(self._tags.get(slot, {}))
            true = Counter(key[:TAG_BYTES] for key in self._keys_of(store)) if store is not None else {}
            assert counted == dict(true), f"slot {slot}: counts by tag"
            swept = [key for key in self._keys_of(store) if self._swept(key, TAG_BYTES) & store.bit] if store else []
            masked = +self._masked.get(slot, Counter())
            assert masked == Counter(key[:TAG_BYTES] for key in swept), f"slot {slot}: what is masked"
        assert self._tag_entries == sum(map(len, self._tags.values()))
        for tag, count in self._watched.items():
            names = (name for name in self._stores if MARK not in name)
            assert count == sum(self.tagged_at(name, tag) for name in names), f"sum of {tag.hex()}"

    # ── inner ────────────────────────────────────────────────────────────────────────────────────────

    def _swept(self, key: bytes, longest: int = KEY_BYTES) -> int:
        """Returns the slots that hold `key` only because a sweep, of a prefix of at most `longest` bytes, has yet to go
        through them."""
        gone = 0
        for sweep in self._sweeps:
            if key.startswith(sweep.prefix) and len(sweep.prefix) <= longest:
                gone |= sweep.bits & ~sweep.spared.get(key, 0)
        return gone

    def _shown_at(self, slot: int, tag: bytes) -> int:
        masked = self._masked[slot][tag] if slot in self._masked else 0
        return self._tags.get(slot, {}).get(tag, 0) - masked

    def _masked_at(self, slot: int) -> int:
        return sum(self._masked[slot].values()) if slot in self._masked else 0

    def _mask(self, store: StoreContent, prefix: bytes) -> None:
        """Shows no key of that store that begins with `prefix` any more."""
        tags, masked = self._tags.get(store.slot, {}), self._masked[store.slot]
        counted = not store.bit & self._hidden and _counts(store)
        for tag in [prefix] if len(prefix) == TAG_BYTES else [tag for tag in tags if tag.startswith(prefix)]:
            if counted and tag in self._watched:
                self._watched[tag] -= self._shown_at(store.slot, tag)
            masked[tag] = tags.get(tag, 0)

    def _unmasked(self, store: StoreContent, tag: bytes, keys: int, packed: bytes) -> int:
        """Returns how many of `keys` keys that have gone from the store, all of one tag and all of those in `packed`
        with it, were masked."""
        masked = self._masked.get(store.slot)
        if masked is None or not masked[tag]:
            return 0
        if not self._taking:
            own = (key for key in split(packed) if key[:TAG_BYTES] == tag)
            keys = sum(bool(self._swept(key, TAG_BYTES) & store.bit) for key in own)
        masked[tag] -= keys
        if not masked[tag]:
            del masked[tag]
            if not masked:
                del self._masked[store.slot]
        return keys

    def _sweep_prefixes(self, max_keys: int) -> None:
        """Does about as much work as taking out `max_keys` keys."""
        left = max_keys
        while self._sweeps and left > 0:
            sweep = self._sweeps[0]
            bit = sweep.bits & -sweep.bits
            store = self._slots[bit.bit_length() - 1] if bit else None
            if not bit:
                self._sweeps.popleft()
            elif store is None:
                sweep.bits ^= bit
                sweep.log, sweep.found = None, b""
            elif sweep.found:
                some = sweep.found[: left * KEY_BYTES]
                sweep.found = sweep.found[len(some) :]
                left -= len(some) // KEY_BYTES
                self._take_out(sweep, store, some)
            elif sweep.log is None:
                sweep.log, sweep.at = bytes(store.log), 0  # a copy, as the log moves while it is shortened
                left -= SCAN_COST
            elif sweep.at < len(sweep.log):
                window = sweep.log[sweep.at : sweep.at + SCAN_KEYS * KEY_BYTES]
                sweep.at += len(window)
                sweep.found = _beginning(window, sweep.prefix).tobytes()
                left -= SCAN_COST
            else:
                sweep.bits ^= bit
                sweep.log = None

    def _take_out(self, sweep: _Sweep, store: StoreContent, packed: bytes) -> None:
        masks, bit, spared = self._masks, store.bit, sweep.spared
        gone = [k for k in dict.fromkeys(split(packed)) if masks.get(k, 0) & bit and not spared.get(k, 0) & bit]
        self._taking = len(sweep.prefix) <= TAG_BYTES
        self._remove(store, gone)
        self._taking = False
        known = self._shown_content(store.place) is store or self._gathering.get(store.place) is store
        if gone and known:
            self.forgotten(store.store_id, gone)

    def _add(self, store: StoreContent, keys: Iterable[bytes]) -> None:
        if self._sweeps:
            keys = list(keys)
            self._remove(store, [key for key in keys if self._swept(key) & store.bit])
            self._spare(store, keys)
        super()._add(store, keys)

    def _spare(self, store: StoreContent, keys: Sequence[bytes]) -> None:
        """Keeps every sweep under way from taking these keys out of that store, even when the slot of the store has got
        other content since."""
        for sweep in self._sweeps:
            if sweep.bits & store.bit:
                some = [key for key in keys if key.startswith(sweep.prefix)]
                sweep.spared.update((key, sweep.spared.get(key, 0) | store.bit) for key in some)

    def _may_have(self, store: StoreContent, prefix: bytes) -> bool:
        return len(prefix) < TAG_BYTES or prefix[:TAG_BYTES] in self._tags.get(store.slot, {})

    def _changed(self, store: StoreContent, packed: bytes, sign: int) -> None:
        counts, shown = self._tags[store.slot], not store.bit & self._hidden and _counts(store)
        for tag, n in _tally(packed).items():
            before = counts.get(tag, 0)
            if before + sign * n:
                counts[tag] = before + sign * n
                self._tag_entries += not before
            else:
                del counts[tag]
                self._tag_entries -= 1
            masked = self._unmasked(store, tag, n, packed) if sign < 0 else 0
            if shown and tag in self._watched:
                self._watched[tag] += sign * n + masked

    def _swap(self, shown: StoreContent, other: StoreContent) -> None:
        for tag in self._watched if _counts(shown) else ():
            self._watched[tag] += self._shown_at(other.slot, tag) - self._shown_at(shown.slot, tag)
        super()._swap(shown, other)


def _counts(store: StoreContent) -> bool:
    """Says whether a content counts against a tenant's quota: blocks in DRAM, once whatever groups they have."""
    return not store.group and MARK not in store.store_id


def _beginning(log: bytes, prefix: bytes) -> NDArray[np.uint8]:
    """Returns the keys of a log that begin with `prefix`, [n, 16] uint8: also keys that its store no longer holds, and
    some twice."""
    words = np.frombuffer(log, np.uint8).reshape(-1, KEY_BYTES)
    for at, byte in enumerate(prefix):
        words = words[words[:, at] == byte]
    return words


def _tally(packed: bytes) -> dict[bytes, int]:
    """Returns how many keys each tag has. Keys of one batch mostly have one tag, which is checked first as it costs
    little."""
    count = len(packed) // KEY_BYTES
    if not count:
        return {}
    if all(packed[at::KEY_BYTES] == packed[at : at + 1] * count for at in range(TAG_BYTES)):
        return {packed[:TAG_BYTES]: count}
    return Counter([packed[at : at + TAG_BYTES] for at in range(0, len(packed), KEY_BYTES)])


READ_KEYS = 8192  # keys of a store that are read for a watcher in one turn of the loop: some milliseconds


class BlockDirectory:
    """Keeps the map, fed by announcements, and what of it goes on to watchers. No call costs more than the keys of one
    announcement; what a dropped store leaves behind is cleared by `sweep`."""

    def __init__(self, *, max_store_blocks: int) -> None:
        self.map = MasterMap()
        self._max = max_store_blocks
        self._tiered = False  # whether any store has ever announced a tier below DRAM
        # Parts of a snapshot go on to watchers only when all are here, so a watcher that begins in between misses none.
        self._parts: dict[str, list[Announcement]] = {}

    @property
    def stores(self) -> int:
        """How many stores announce, each tier counted by itself."""
        return self.map.store_count

    def bounded(self, said: Announcement) -> Announcement:
        """Returns `said` without the keys that are too many for one store. What remains is true, only not complete; a
        refusal of the whole announcement would leave keys in the map for ever that the store has evicted."""
        if said.snapshot:
            parts = self._parts.get(said.store_id, []) if said.part else []
            room = max(0, self._max - sum(len(part.sealed) for part in parts))
            if len(said.sealed) <= room:
                return said
            return replace(said, sealed=said.sealed[:room], groups=said.groups[:room])
        count = self.map.count(said.store_id)
        if count + len(said.sealed) <= self._max:
            return said
        room = max(0, self._max - count + len(self.map.held(said.store_id, b"".join(set(said.removed)))))
        # The keys that are too many are given as removed, so that the batch is not empty: an empty one would be a gap.
        removed = said.removed + said.sealed[room:]
        return replace(said, sealed=said.sealed[:room], removed=removed, groups=said.groups[:room])

    def apply(self, said: Announcement) -> tuple[Verdict, Sequence[Announcement]]:
        """Applies an announcement. Returns what became of it, and what watchers are to be told."""
        verdict = self.map.apply(said)
        self._tiered = self._tiered or MARK in said.store_id
        gathered = self._parts.get(said.store_id)
        if verdict is Verdict.PARTIAL:
            if said.part == 0:
                gathered = self._parts[said.store_id] = []
            assert gathered is not None and len(gathered) == said.part, "parts are taken in order"
            gathered.append(said)
            return verdict, ()
        if verdict is not Verdict.APPLIED:
            return verdict, ()
        if said.snapshot:
            self._parts.pop(said.store_id, None)
            return verdict, (*gathered, said) if gathered and said.part else (said,)
        if gathered and gathered[0].seq <= said.seq:
            del self._parts[said.store_id]  # later batches have made the unfinished snapshot void
        return verdict, (said,) if said.seq else ()

    def holders(self, key: bytes) -> list[tuple[str, Tier]]:
        """Returns the nodes that hold `key`, each tier by itself."""
        return [split_name(name) for name in self.map.holders(key)]

    def store_ids(self, key: bytes) -> list[str]:
        """Returns the nodes that hold `key` in any tier, each once."""
        names = self.map.holders(key)
        return list(dict.fromkeys(split_name(name)[0] for name in names)) if self._tiered else names

    def groups_at(self, key: bytes, names: Sequence[str]) -> bytes:
        """Returns which cache groups of `key` each of these stores holds, a tier by itself: one mask a store, empty
        where none has any but group 0."""
        if not any(self.map.has_groups(name) for name in names):
            return b""
        return b"".join(self.map.groups(name, [key]) or b"\x01" for name in names)

    def groups(self, key: bytes, store_ids: Sequence[str]) -> bytes:
        """Returns the same of nodes: what any tier of each holds."""
        if not self.map.grouped:
            return b""
        whole = dict.fromkeys(store_ids, 0)
        holders = self.map.holders(key)
        for name, mask in zip(holders, self.groups_at(key, holders), strict=False):
            store_id = split_name(name)[0]
            if store_id in whole:
                whole[store_id] |= mask
        return bytes(whole.values()) if any(whole.values()) else b""

    def ends(self, store_id: str) -> dict[str, int]:
        """Returns the number of the last announcement of each tier of the node that has announced anything."""
        return {name: seq for name in store_names(store_id) if (seq := self.map.seq(name))}

    def drop(self, store_id: str) -> None:
        """Drops a store whose incarnation has ended: its blocks, in every tier, are in no answer from now on."""
        for name in store_names(store_id):
            self._parts.pop(name, None)
            self.map.drop(name)

    def sweep(self, max_keys: int) -> bool:
        """Clears away a slice of what dropped stores left behind. Returns whether there is more."""
        return self.map.sweep(max_keys)

    def read(self, store_id: str, incarnation: int, lives: Callable[[], bool]) -> Iterator[Announcement]:
        """Yields a snapshot of one store in parts; other events may be applied between them.

        A part may hold later changes, and half of a later content: whoever applies every announcement relayed since the
        first part was taken is right in the end, as sealing and removing twice changes nothing. A store that no longer
        `lives` is cut short: its end is among the events that follow.
        """
        seq, log, step = self.map.seq(store_id), self.map.log_of(store_id), READ_KEYS * KEY_BYTES
        if seq == 0:
            return
        for part, start in enumerate(range(0, len(log) or 1, step)):
            living = lives()
            keys = self.map.held(store_id, log[start : start + step]) if living else []
            more = living and start + step < len(log)
            groups = self.map.groups(store_id, keys)
            yield Announcement(
                store_id, incarnation, seq, tuple(keys), snapshot=True, part=part, more=more, groups=groups
            )
            if not more:
                return
