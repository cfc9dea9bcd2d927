"""Who holds which block, as the master keeps it. Pure.

`MasterMap` is a block map that also counts by tenant's tag, and forgets keys of all stores at once. All that begin with
a prefix vanish from every answer in one step and are cleared away later: a sweep of that prefix masks them in the slots
that it has yet to go through. What is added to such a slot meanwhile is shown, and spared.

`BlockDirectory` feeds it from announcements of members only. A tier of a node is a store of its own in it
(`tiers.store_name`): limits are each one's own, numbers and snapshots too; they end together.
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

# At most, by CPython's growth of dicts (to three times what they hold) and of bytearrays (by an eighth), and by how
# long a log gets before it is shortened.
ENTRY_BYTES = 184  # of a key: itself 64, in the dict up to 120
REPLICA_BYTES = 36
LOG_SLACK_BYTES = 18 << 10
TAG_ENTRY_BYTES = 160  # of one tag in one store's counts: key, int and its share of the dict


FIRST_KEYS = 1024  # of a prefix, swept at once
STEP_KEYS = 2048  # ... and in one step: each costs more than one of a store that is gone
SCAN_KEYS = 65_536  # of a log, looked through in one step
SCAN_COST = 1024  # keys that could be taken out meanwhile
MAX_SWEEPS = 64  # with more, the oldest is ended in one go


@dataclass(slots=True)
class _Sweep:
    """The sweep of one prefix, slot by slot, the lowest first."""

    prefix: bytes
    bits: int  # slots that it has not been through
    spared: dict[bytes, int] = field(default_factory=dict)  # key → slots that it came to meanwhile
    log: bytes | None = None  # of the lowest slot; None: not begun
    at: int = 0
    found: bytes = b""  # of what it has looked through, still to be taken out


class MasterMap(BlockMap):
    """`apply` and `drop` cost as in BlockMap, besides O(watched tags) when a store's content changes as a whole.

    A slot keeps its content for life, whichever store shows it: counts by tag are kept by slot. `forgotten` hears what
    a sweep took out of a store. `mask`, `holders`, `held`, `page` and `sample` show nothing of what a sweep has yet to
    take out, nor do counts: only what is masked by prefixes longer than a tag is counted until it is found."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: Callable[[str, list[bytes]], None] = lambda store_id, keys: None
        self.first_keys = FIRST_KEYS
        self._sweeps: deque[_Sweep] = deque()
        self._tags: defaultdict[int, dict[bytes, int]] = defaultdict(dict)  # slot → tag → keys
        self._tag_entries = 0
        self._masked: defaultdict[int, Counter[bytes]] = defaultdict(Counter)  # slot → tag → keys masked by short ones
        self._taking = False  # all that is removed now is masked by a short prefix
        self._watched: dict[bytes, int] = {}  # tag → replicas shown

    @property
    def store_count(self) -> int:
        """How many stores have announced anything and were not dropped since."""
        return len(self._stores)

    # ── tags ─────────────────────────────────────────────────────────────────────────────────────────

    def watch(self, tag: bytes) -> None:
        """Keep the sum of `tag` over all stores in DRAM. O(stores)."""
        names = (name for name in self._stores if MARK not in name)
        self._watched.setdefault(tag, sum(self.tagged_at(name, tag) for name in names))

    def unwatch(self, tag: bytes) -> None:
        """Keep no sum of it any more."""
        self._watched.pop(tag, None)

    def tagged(self, tag: bytes) -> int:
        """Replicas of a watched tag in DRAM, of all stores together. Raises KeyError when it is not watched."""
        return self._watched[tag]

    def tagged_at(self, store_id: str, tag: bytes) -> int:
        """How many keys with this tag one store has."""
        store = self._stores.get(store_id)
        return 0 if store is None else self._shown_at(store.slot, tag)

    def count(self, store_id: str) -> int:
        """How many keys a store has; 0 for an unknown one. O(tags that are being swept there)."""
        store = self._stores.get(store_id)
        return 0 if store is None else store.count - self._masked_at(store.slot)

    @property
    def replicas(self) -> int:
        """How many keys all stores have together. O(stores)."""
        return super().replicas - sum(self._masked_at(store.slot) for store in self._stores.values())

    # ── keys of all stores ───────────────────────────────────────────────────────────────────────────

    def forget(self, keys: Iterable[bytes]) -> dict[str, list[bytes]]:
        """Take these keys out of every store, also out of what is being gathered and what is not swept yet; which of
        each store are gone. What stores say of them later counts again."""
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
        return gone

    def forget_prefix(self, prefix: bytes) -> None:
        """As `forget`, of all keys that begin so. O(stores), O(their tags) with a prefix shorter than a tag; the rest
        waits for `sweep`. `forgotten` hears of it."""
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
        """Whether keys that are shown no more are still there."""
        return bool(self._sweeps)

    def sweep(self, max_keys: int) -> bool:
        """Sweep as BlockMap does, and what begins with a forgotten prefix, too."""
        more = super().sweep(max_keys)
        if not more:
            self._sweep_prefixes(min(max_keys, STEP_KEYS))
        return more or bool(self._sweeps)

    def mask(self, key: bytes) -> int:
        """Bitset of the slots that hold `key`."""
        mask = super().mask(key)
        return mask & ~self._swept(key) if mask and self._sweeps else mask

    def held(self, store_id: str, packed: bytes) -> list[bytes]:
        """Those of `packed` that the store holds now."""
        found = super().held(store_id, packed)
        if not found or not self._sweeps:
            return found
        bit = self._stores[store_id].bit
        return [key for key in found if not self._swept(key) & bit]

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def bound_bytes(self) -> int:
        """What the map never exceeds, besides LOG_SLACK_BYTES for each store. O(1)."""
        tags = TAG_ENTRY_BYTES * self._tag_entries
        return len(self._masks) * ENTRY_BYTES + self._mask_bytes + self._replicas * REPLICA_BYTES + tags

    def sample(self, count: int, rng: random.Random) -> list[bytes]:
        """Up to `count` keys that are there, drawn by lot (a key as often as it has replicas)."""
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
        """The `limit` lowest keys of one store above `after` that begin with `prefix`, ascending. O(its keys)."""
        store = self._stores.get(store_id)
        if store is None or not self._may_have(store, prefix):
            return []
        words = _beginning(bytes(store.log), prefix)
        order = words[:, :8].copy().view(">u8").ravel().astype(np.uint64)
        if len(after) >= 8:
            above = order >= int.from_bytes(after[:8], "big")
            words, order = words[above], order[above]
        some = 2 * limit
        while True:
            # As many of the lowest as may be needed: the log names some that are gone, and some twice.
            lowest = words if len(words) <= some else words[order <= np.partition(order, some)[some]]
            found = sorted(key for key in set(self.held(store_id, lowest.tobytes())) if key > after)
            if len(found) >= limit or len(lowest) == len(words):
                return found[:limit]
            some *= 4

    def shown(self) -> Iterator[tuple[str, int]]:
        """(store, its bit) of all stores. A store's bit changes with each snapshot."""
        return ((store.store_id, store.bit) for store in self._stores.values())

    def memory_bytes(self) -> int:
        """What the map takes (see BlockMap), with counts by tag."""
        return super().memory_bytes() + TAG_ENTRY_BYTES * self._tag_entries

    def check_integrity(self) -> None:
        """Raises AssertionError unless counts by tag are those of the keys. O(replicas)."""
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
        """Slots that hold it only because a sweep, of a prefix of at most `longest` bytes, has yet to go through
        them."""
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
        """Show nothing of what begins so at that store any more."""
        tags, masked = self._tags.get(store.slot, {}), self._masked[store.slot]
        counted = not store.bit & self._hidden and MARK not in store.store_id
        for tag in [prefix] if len(prefix) == TAG_BYTES else [tag for tag in tags if tag.startswith(prefix)]:
            if counted and tag in self._watched:
                self._watched[tag] -= self._shown_at(store.slot, tag)
            masked[tag] = tags.get(tag, 0)

    def _unmasked(self, store: StoreContent, tag: bytes, keys: int, packed: bytes) -> int:
        """Of `keys` keys with this tag that have gone, all those of `packed`: how many were masked."""
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
        """Do about as much work as taking out so many keys."""
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
                sweep.log, sweep.at = bytes(store.log), 0  # as it moves while it is shortened
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
        known = self._stores.get(store.store_id) is store or self._gathering.get(store.store_id) is store
        if gone and known:
            self.forgotten(store.store_id, gone)

    def _add(self, store: StoreContent, keys: Iterable[bytes]) -> None:
        if self._sweeps:
            keys = list(keys)
            self._remove(store, [key for key in keys if self._swept(key) & store.bit])
            self._spare(store, keys)
        super()._add(store, keys)

    def _spare(self, store: StoreContent, keys: Sequence[bytes]) -> None:
        """From now on no sweep that is under way takes these out of that store, not even when its slot has got another
        content since."""
        for sweep in self._sweeps:
            if sweep.bits & store.bit:
                some = [key for key in keys if key.startswith(sweep.prefix)]
                sweep.spared.update((key, sweep.spared.get(key, 0) | store.bit) for key in some)

    def _may_have(self, store: StoreContent, prefix: bytes) -> bool:
        return len(prefix) < TAG_BYTES or prefix[:TAG_BYTES] in self._tags.get(store.slot, {})

    def _changed(self, store: StoreContent, packed: bytes, sign: int) -> None:
        counts, shown = self._tags[store.slot], not store.bit & self._hidden and MARK not in store.store_id
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
        for tag in self._watched if MARK not in shown.store_id else ():
            self._watched[tag] += self._shown_at(other.slot, tag) - self._shown_at(shown.slot, tag)
        super()._swap(shown, other)


def _beginning(log: bytes, prefix: bytes) -> NDArray[np.uint8]:
    """The keys of a log that begin with `prefix`, [n, 16], also some that its store no longer holds, and some twice."""
    words = np.frombuffer(log, np.uint8).reshape(-1, KEY_BYTES)
    for at, byte in enumerate(prefix):
        words = words[words[:, at] == byte]
    return words


def _tally(packed: bytes) -> dict[bytes, int]:
    """How many keys each tag has. Keys of one batch mostly have one tag: that costs next to nothing."""
    count = len(packed) // KEY_BYTES
    if not count:
        return {}
    if all(packed[at::KEY_BYTES] == packed[at : at + 1] * count for at in range(TAG_BYTES)):
        return {packed[:TAG_BYTES]: count}
    return Counter([packed[at : at + TAG_BYTES] for at in range(0, len(packed), KEY_BYTES)])


READ_KEYS = 8192  # of a store that is told to a watcher, in one turn of the loop: some milliseconds


class BlockDirectory:
    """The map, and what of it goes on to watchers. No call costs more than the keys of one announcement; what a dropped
    store leaves behind is cleared by `sweep`."""

    def __init__(self, *, max_store_blocks: int) -> None:
        self.map = MasterMap()
        self._max = max_store_blocks
        self._tiered = False  # whether any store has ever told of a tier below DRAM
        # Parts of a snapshot go on only when all are here: a watcher that begins in between has missed none.
        self._parts: dict[str, list[Announcement]] = {}

    @property
    def stores(self) -> int:
        """How many stores announce, each tier for itself."""
        return self.map.store_count

    def bounded(self, said: Announcement) -> Announcement:
        """`said` without what is too much for one store. The rest is true, only not all that there is; a refusal would
        leave in the map for ever what the store has evicted."""
        if said.snapshot:
            parts = self._parts.get(said.store_id, []) if said.part else []
            room = max(0, self._max - sum(len(part.sealed) for part in parts))
            return said if len(said.sealed) <= room else replace(said, sealed=said.sealed[:room])
        count = self.map.count(said.store_id)
        if count + len(said.sealed) <= self._max:
            return said
        room = max(0, self._max - count + len(self.map.held(said.store_id, b"".join(set(said.removed)))))
        # As removed they keep the batch from being empty, which would say that something is missing.
        return replace(said, sealed=said.sealed[:room], removed=said.removed + said.sealed[room:])

    def apply(self, said: Announcement) -> tuple[Verdict, Sequence[Announcement]]:
        """Apply an announcement: what became of it, and what watchers are to be told."""
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
            del self._parts[said.store_id]  # overtaken by batches
        return verdict, (said,) if said.seq else ()

    def holders(self, key: bytes) -> list[tuple[str, Tier]]:
        """The nodes that hold `key`, each tier for itself."""
        return [split_name(name) for name in self.map.holders(key)]

    def store_ids(self, key: bytes) -> list[str]:
        """The nodes that hold `key`, each once, in whichever tier."""
        names = self.map.holders(key)
        return list(dict.fromkeys(split_name(name)[0] for name in names)) if self._tiered else names

    def ends(self, store_id: str) -> dict[str, int]:
        """The number of the last announcement of each of its tiers that has said anything."""
        return {name: seq for name in store_names(store_id) if (seq := self.map.seq(name))}

    def drop(self, store_id: str) -> None:
        """Drop a store whose life has ended: its blocks are in no answer from now on, in whichever tier."""
        for name in store_names(store_id):
            self._parts.pop(name, None)
            self.map.drop(name)

    def sweep(self, max_keys: int) -> bool:
        """Clear away what dropped stores left behind, a slice of it; whether there is more."""
        return self.map.sweep(max_keys)

    def read(self, store_id: str, incarnation: int, lives: Callable[[], bool]) -> Iterator[Announcement]:
        """A snapshot of one living store in parts, to be taken while other events are applied between them.

        It may hold later changes too, and half of a later content: whoever applies every announcement relayed since
        the first part was taken is right in the end, as sealing and removing twice changes nothing. A store that no
        longer `lives` is told to its end in a hurry: its end is among the events that follow."""
        seq, log, step = self.map.seq(store_id), self.map.log_of(store_id), READ_KEYS * KEY_BYTES
        if seq == 0:
            return
        for part, start in enumerate(range(0, len(log) or 1, step)):
            living = lives()
            keys = self.map.held(store_id, log[start : start + step]) if living else []
            more = living and start + step < len(log)
            yield Announcement(store_id, incarnation, seq, tuple(keys), snapshot=True, part=part, more=more)
            if not more:
                return
