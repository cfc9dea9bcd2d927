"""Where blocks lie in the SSD tier, where the next goes, and what makes room. Pure: no I/O, no clock, no randomness.

Buckets are a queue: records are appended to the newest (the *open* one), and the oldest goes as a whole when space runs
short, its hot records being appended anew before, and what else is worth it being offered to the tier below
(`Reinsert`, `Demote`, then `Drop`). Reasons for whole buckets in order of age:
the device sees long appends and whole files that vanish, which its own garbage collection likes; no free-space map has
to survive a crash; a removed key stays removed, since what tells so lies in a younger bucket than what it removed; and
re-insertion of what was read since makes a CLOCK of it, at a bounded price in writes (`reinsert_percent` of a bucket).

    claim ──▶ append ──▶ (the caller writes) ──▶ commit: found from now on
       └───────── unclaim: nothing was written
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.kvcache.store_stats import Changes
from kvmesh.tiers.calls import NetChanges
from kvmesh.tiers.ssd.format import MAX_PAYLOAD, PAGE, FooterEntry, footer_bytes, record_bytes

# ── what the brain is told and what it answers ──────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class SsdLimits:
    """`capacity_bytes` limits all files together and is never exceeded. Eviction begins when one more bucket would not
    fit into `high_percent` of it, and ends when it would fit into `low_percent`. A record of the oldest bucket is
    appended anew when it was read `reinsert_hits` times, hottest first, up to `reinsert_percent` of a bucket's bytes.
    """

    capacity_bytes: int
    bucket_bytes: int
    high_percent: int = 98
    low_percent: int = 96
    reinsert_percent: int = 25
    reinsert_hits: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.low_percent <= self.high_percent <= 100:
            raise ValueError(
                f"low_percent={self.low_percent}, high_percent={self.high_percent}: 0 < low <= high <= 100"
            )
        if not 0 <= self.reinsert_percent <= 50 or self.reinsert_hits < 1:
            raise ValueError(
                f"reinsert_percent={self.reinsert_percent} (0..50), reinsert_hits={self.reinsert_hits} (>=1)"
            )
        if self.bucket_bytes % PAGE or self.bucket_bytes < 16 * PAGE:
            raise ValueError(f"bucket_bytes={self.bucket_bytes}: must be a multiple of {PAGE}, at least {16 * PAGE}")
        if self.capacity_bytes * self.low_percent < 300 * self.bucket_bytes:
            raise ValueError(
                f"capacity_bytes={self.capacity_bytes}: low_percent={self.low_percent} of it must hold three "
                f"buckets of bucket_bytes={self.bucket_bytes}"
            )

    @property
    def max_length(self) -> int:
        """The largest payload in bytes: one record fills a bucket together with the bucket's header and footer."""
        return min(self.bucket_bytes - 2 * PAGE - footer_bytes(1, 0), MAX_PAYLOAD)

    @property
    def max_removed(self) -> int:
        """How many removed keys one record can hold; with its footer it takes at most about half a bucket."""
        return min(4096, self.bucket_bytes // 64)


class RecordPlace(NamedTuple):
    """Where a block lies: it is the `ordinal`-th record of a bucket. `offset` is that of its header page, `length` the
    bytes of its payload."""

    bucket: int
    ordinal: int
    offset: int
    length: int
    checksum: int


class Slot(NamedTuple):
    """Room for one record in the open bucket: `size` bytes from `offset` on."""

    bucket: int
    offset: int
    size: int
    seq: int


@dataclass(frozen=True, slots=True)
class Closing:
    """What a bucket's footer says; it is written at `offset`, the bucket's tail. `seq` is the highest sequence number
    in the bucket."""

    bucket: int
    offset: int
    entries: list[FooterEntry]
    removed: list[bytes]
    seq: int


@dataclass(frozen=True, slots=True)
class Reinsert:
    """A step: append these blocks again, in order of offset, and call `move`; those that lie elsewhere by then are
    skipped."""

    blocks: tuple[tuple[bytes, RecordPlace, int], ...]  # with the hits to say to `move`


@dataclass(frozen=True, slots=True)
class Demote:
    """A step: offer these blocks, which are evicted with their bucket, to the tier below if they are still at the given
    place."""

    blocks: tuple[tuple[bytes, RecordPlace], ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """A step: delete this bucket's file, and call `gone` when its space is free."""

    bucket: int


# ── the brain ───────────────────────────────────────────────────────────────────────────────────────

# One bucket's records, as the brain keeps them: columns, about 40 bytes a record beside its key.


class Bucket:
    """The records of one file; a record's `ordinal` is its number in the order of writing. Only the index knows whether
    a record is alive."""

    __slots__ = (
        "checksums",
        "closed",
        "end",
        "hits",
        "keys",
        "lengths",
        "live",
        "live_bytes",
        "number",
        "pages",
        "removed",
        "reserved",
        "reserved_removed",
        "seq",
        "size",
        "tail",
    )

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size  # bytes that its file takes
        self.tail = self.end = PAGE  # where the next record goes; where the last written one ends
        self.closed = False
        self.live = self.live_bytes = 0
        self.seq = 0  # highest written
        self.reserved = self.reserved_removed = 0  # records being written, removed keys in them
        self.removed: list[bytes] = []
        self.keys: list[bytes] = []
        self.pages = array("I")
        self.lengths = array("I")
        self.checksums = array("Q")
        self.hits = bytearray()

    def add(self, entry: FooterEntry, hits: int) -> int:
        """Adds a live record and returns its ordinal."""
        self.keys.append(entry.key)
        self.pages.append(entry.offset // PAGE)
        self.lengths.append(entry.length)
        self.checksums.append(entry.checksum)
        self.hits.append(hits)
        self.live += 1
        self.live_bytes += entry.length
        self.end = max(self.end, entry.offset + record_bytes(entry.length))
        return len(self.keys) - 1

    def entry(self, ordinal: int) -> FooterEntry:
        """Returns the record's entry in the footer."""
        return FooterEntry(
            self.keys[ordinal], self.pages[ordinal] * PAGE, self.lengths[ordinal], self.checksums[ordinal]
        )


HITS_KEPT = 3  # of a re-inserted record: it may survive so many more rounds without being read


class Brain:
    """One tier's index and log. It has one owner, or a lock around each call. Calls cost O(1) a key, except
    `next_step`, `force` and `discard`: O(records of one bucket). `worth` says whether an evicted block is to be offered
    to the tier below; None means that there is none."""

    def __init__(self, limits: SsdLimits, worth: Callable[[bytes], bool] | None = None) -> None:
        self.limits = limits
        self._worth = worth
        self._offered = 0  # the bucket whose last step was a `Demote`
        self.evicted = self.reinserted = 0  # blocks, since the start
        self._index: dict[bytes, int] = {}  # bucket << 32 | ordinal
        self._pending: dict[bytes, int] = {}  # being written → ticket
        self._buckets: dict[int, Bucket] = {}  # oldest first
        self._going: dict[int, int] = {}  # dropped, space not free yet → bytes
        self._open: Bucket | None = None
        self._next_bucket, self._next_seq, self._tickets = 1, 1, 0
        self._used = 0  # bytes of `_buckets`
        self._empty: deque[int] = deque()  # closed buckets whose last block went
        self._victim: int | None = None
        self._hot: deque[tuple[bytes, RecordPlace, int]] = deque()  # of the victim, with hits
        self._evicting = False
        self._changes = NetChanges()

    # ── look-up ──────────────────────────────────────────────────────────────────────────────────────

    def __len__(self) -> int:
        """Returns the number of blocks that can be found."""
        return len(self._index)

    def __contains__(self, key: bytes) -> bool:
        return key in self._index

    def keys(self) -> list[bytes]:
        """Returns the keys of all blocks. O(blocks)."""
        return list(self._index)

    def lookup(self, key: bytes) -> RecordPlace | None:
        """Returns where the block lies now, or None. It changes nothing; call `hit` when the block was read."""
        at = self._index.get(key)
        return None if at is None else self._place(at >> 32, at & 0xFFFFFFFF)

    def hit(self, key: bytes) -> None:
        """Notes that the block was read, which makes it more likely to be appended anew."""
        at = self._index.get(key)
        if at is not None:
            hits, ordinal = self._buckets[at >> 32].hits, at & 0xFFFFFFFF
            hits[ordinal] = min(hits[ordinal] + 1, 255)

    @property
    def used_bytes(self) -> int:
        """The bytes of all files. An open bucket counts in full, a dropped one until its file is gone."""
        return self._used + sum(self._going.values())

    @property
    def live_bytes(self) -> int:
        """The payload bytes of blocks that can be found. O(buckets)."""
        return sum(bucket.live_bytes for bucket in self._buckets.values())

    @property
    def buckets(self) -> int:
        """The number of files, without dropped ones."""
        return len(self._buckets)

    def knows(self, number: int) -> bool:
        """Says whether this bucket is neither dropped nor lost."""
        return number in self._buckets

    @property
    def open_bucket(self) -> int | None:
        """The number of the bucket that takes records, or None."""
        return None if self._open is None else self._open.number

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────

    def claim(self, key: bytes) -> int | None:
        """Returns a ticket to write this block, or None when it is here or being written."""
        if key in self._index or key in self._pending:
            return None
        self._tickets += 1
        self._pending[key] = self._tickets
        return self._tickets

    def claimed(self, key: bytes, ticket: int) -> bool:
        """Says whether the ticket is still valid: the block was not removed since."""
        return self._pending.get(key) == ticket

    def unclaim(self, key: bytes, ticket: int) -> None:
        """Gives a ticket back, because the block will not be written or was not."""
        if self.claimed(key, ticket):
            del self._pending[key]

    def fits(self, length: int, *, removed: int = 0) -> bool:
        """Says whether there is an open bucket that can take a payload of `length` bytes, which lists `removed` removed
        keys."""
        bucket = self._open
        if bucket is None:
            return False
        entries, gone = len(bucket.keys) + bucket.reserved + 1, len(bucket.removed) + bucket.reserved_removed + removed
        return bucket.tail + record_bytes(length) + footer_bytes(entries, gone) <= bucket.size

    def append(self, length: int, *, removed: int = 0) -> Slot:
        """Reserves room at the open bucket's tail; `fits` must hold. `commit`, `move` or `bury` ends the append; after
        a failed write the bucket must be closed or lost instead."""
        bucket = self._open
        assert bucket is not None and bucket.tail + record_bytes(length) < bucket.size
        slot = Slot(bucket.number, bucket.tail, record_bytes(length), self._next_seq)
        bucket.tail += slot.size
        bucket.reserved += 1
        bucket.reserved_removed += removed
        self._next_seq += 1
        return slot

    def commit(self, key: bytes, ticket: int, slot: Slot, length: int, checksum: int) -> bool:
        """Notes that the block's record is written, so that the block is found. Returns False when the block was
        removed, or its bucket lost, meanwhile."""
        bucket = self._ended(slot)
        wanted = self.claimed(key, ticket)
        self.unclaim(key, ticket)
        if bucket is None or not wanted:
            return False
        self._index[key] = self._add(bucket, FooterEntry(key, slot.offset, length, checksum), 0)
        self._changes.came(key)
        return True

    def is_at(self, key: bytes, place: RecordPlace) -> bool:
        """Says whether the block still lies at this place."""
        return self._index.get(key) == place.bucket << 32 | place.ordinal

    def move(self, key: bytes, place: RecordPlace, slot: Slot, hits: int) -> bool:
        """Notes that a copy of the block at `place` is written, where the block lies from now on. Returns False as
        `commit` does."""
        bucket, here = self._ended(slot), self.is_at(key, place)
        if bucket is None or not here:
            return False
        self._forget(key)
        self._index[key] = self._add(bucket, FooterEntry(key, slot.offset, place.length, place.checksum), hits)
        self.reinserted += 1
        return True

    # ── removing ─────────────────────────────────────────────────────────────────────────────────────

    def remove(self, keys: Iterable[bytes]) -> None:
        """Removes blocks from the index, those being written included. To survive a restart, a record with the keys
        must follow: `append(KEY_BYTES * n, removed=n)`, then `bury`."""
        for key in keys:
            self._pending.pop(key, None)
            if key in self._index:
                self._forget(key)
                del self._index[key]
                self._changes.went(key)

    def bury(self, slot: Slot, keys: Sequence[bytes]) -> bool:
        """Notes that the record of removed keys is written. Returns False when its bucket was lost meanwhile; then it
        must be repeated."""
        bucket = self._ended(slot, len(keys))
        if bucket is not None:
            bucket.removed.extend(keys)
        return bucket is not None

    # ── buckets ──────────────────────────────────────────────────────────────────────────────────────

    def restore(
        self, number: int, size: int, entries: Sequence[FooterEntry], removed: Sequence[bytes], seq: int
    ) -> None:
        """Adds a closed bucket found at the start, whose file has `size` bytes; buckets come in ascending order, before
        all other calls. `removed` are keys that are dead in older buckets; `seq` is the bucket's highest sequence
        number, 0 when unknown."""
        assert self._open is None and number >= self._next_bucket
        self.remove(removed)
        bucket = Bucket(number, size)
        bucket.removed, bucket.closed = list(removed), True
        self._buckets[number] = bucket
        self._used += size
        for entry in entries:
            if entry.key in self._index:
                self._forget(entry.key)
            else:
                self._changes.came(entry.key)
            self._index[entry.key] = self._add(bucket, entry, 0)
        if not bucket.live:
            self._empty.append(number)
        self._next_bucket = number + 1
        self._next_seq = max(self._next_seq, seq + 1)

    def start_after(self, number: int, seq: int) -> None:
        """Notes that bucket and sequence numbers up to these were used by earlier processes."""
        self._next_bucket = max(self._next_bucket, number + 1)
        self._next_seq = max(self._next_seq, seq + 1)

    def may_open(self) -> bool:
        """Says whether one more bucket fits into the capacity; if not, call `force`."""
        return self.used_bytes + self.limits.bucket_bytes <= self.limits.capacity_bytes

    def reserve(self) -> int:
        """Returns the number of the next bucket, which is never given again."""
        self._next_bucket += 1
        return self._next_bucket - 1

    def opened(self, number: int) -> None:
        """Notes that a bucket's file exists with `bucket_bytes`, and makes it the open one; there must be none."""
        assert self._open is None
        self._open = self._buckets[number] = Bucket(number, self.limits.bucket_bytes)
        self._used += self.limits.bucket_bytes

    def close_open(self) -> Closing | None:
        """Closes the open bucket to records and returns what its footer says. All appends must have ended or failed; a
        failed record at the tail is overwritten. Call `closed` when the footer is written, or cannot be."""
        bucket, self._open = self._open, None
        if bucket is None:
            return None
        bucket.tail, bucket.reserved, bucket.reserved_removed = bucket.end, 0, 0
        entries = [bucket.entry(ordinal) for ordinal in self._alive(bucket)]
        return Closing(bucket.number, bucket.tail, entries, list(bucket.removed), bucket.seq)

    def closed(self, number: int, size: int) -> None:
        """Notes that the bucket's file ends at `size` bytes."""
        bucket = self._buckets.get(number)
        if bucket is not None:
            self._used += size - bucket.size
            bucket.size, bucket.closed = size, True
            if not bucket.live:
                self._empty.append(number)

    def next_step(self, max_bytes: int) -> Reinsert | Demote | Drop | None:
        """Returns what to do next to make room. A `Reinsert` holds at most `max_bytes` of payload, or one block."""
        if self._victim is None:
            if (empty := self._next_empty()) is not None:
                return self.discard(empty)
            if not self._pick_victim():
                return None
        assert self._victim is not None
        blocks: list[tuple[bytes, RecordPlace, int]] = []
        size = 0
        while self._hot and (not blocks or size + self._hot[0][1].length <= max_bytes):
            key, place, hits = self._hot.popleft()
            if self.is_at(key, place):
                blocks.append((key, place, hits))
                size += place.length
        return Reinsert(tuple(blocks)) if blocks else self._leave(self._victim)

    def force(self) -> Demote | Drop | None:
        """Evicts the oldest bucket, hot or not, because there is no room for the next one; it takes this step or this
        and the next. Returns None when no bucket can be evicted."""
        oldest = next((bucket.number for bucket in self._buckets.values() if bucket.closed), None)
        return None if oldest is None else self._leave(oldest)

    def discard(self, number: int) -> Drop:
        """Removes all blocks of this bucket, lost or evicted; its bytes count until `gone`."""
        bucket = self._buckets.pop(number)
        self._used -= bucket.size
        self._going[number] = bucket.size
        for ordinal in self._alive(bucket):
            key = bucket.keys[ordinal]
            del self._index[key]
            self._changes.went(key)
        if number == self._victim:
            self._victim = None
            self._hot.clear()
        if bucket is self._open:
            self._open = None
        return Drop(number)

    def removed_in(self, number: int) -> list[bytes]:
        """Returns keys that this bucket's records list as removed and older buckets may still hold. They must be
        written again when the bucket is lost out of turn."""
        bucket = self._buckets.get(number)
        if bucket is None or next(iter(self._buckets)) == number:
            return []
        return [key for key in bucket.removed if key not in self._index]

    def gone(self, number: int) -> None:
        """Notes that the space of a dropped bucket is free."""
        self._going.pop(number, None)

    def take_changes(self) -> Changes:
        """Returns how the keys that can be found differ from what they were at the last call; at the first call, from
        none."""
        return self._changes.take()

    @property
    def changed(self) -> bool:
        """Whether `take_changes` has something to return."""
        return bool(self._changes)

    def check_integrity(self) -> None:
        """Raises AssertionError unless index, buckets and accounts agree. O(blocks)."""
        assert self._used == sum(bucket.size for bucket in self._buckets.values())
        assert self.used_bytes <= self.limits.capacity_bytes, (self.used_bytes, self.limits.capacity_bytes)
        assert list(self._buckets) == sorted(self._buckets) and not self._buckets.keys() & self._going.keys()
        assert not self._index.keys() & self._pending.keys()
        self._changes.check()
        for bucket in self._buckets.values():
            alive = self._alive(bucket)
            assert bucket.live == len(alive)
            assert bucket.live_bytes == sum(bucket.lengths[ordinal] for ordinal in alive)
            assert bucket.closed or bucket is self._open
        assert sum(bucket.live for bucket in self._buckets.values()) == len(self._index)

    # ── inner ────────────────────────────────────────────────────────────────────────────────────────

    def _add(self, bucket: Bucket, entry: FooterEntry, hits: int) -> int:
        return bucket.number << 32 | bucket.add(entry, hits)

    def _place(self, number: int, ordinal: int) -> RecordPlace:
        _, offset, length, checksum = self._buckets[number].entry(ordinal)
        return RecordPlace(number, ordinal, offset, length, checksum)

    def _alive(self, bucket: Bucket) -> list[int]:
        first, index = bucket.number << 32, self._index
        return [ordinal for ordinal, key in enumerate(bucket.keys) if index.get(key) == first | ordinal]

    def _ended(self, slot: Slot, removed: int = 0) -> Bucket | None:
        """Ends an append whose record is written. Returns its bucket, or None when that was lost meanwhile."""
        bucket = self._buckets.get(slot.bucket)
        if bucket is not None:
            bucket.reserved -= 1
            bucket.reserved_removed -= removed
            bucket.end = max(bucket.end, slot.offset + slot.size)
            bucket.seq = max(bucket.seq, slot.seq)
        return bucket

    def _forget(self, key: bytes) -> None:
        """Marks the record that the index names for `key` as dead."""
        at = self._index[key]
        bucket = self._buckets[at >> 32]
        bucket.live -= 1
        bucket.live_bytes -= bucket.lengths[at & 0xFFFFFFFF]
        if bucket.closed and not bucket.live:
            self._empty.append(bucket.number)

    def _next_empty(self) -> int | None:
        """Returns a closed bucket without live blocks whose removed keys lie in no older bucket, or None."""
        oldest = next(iter(self._buckets.values()), None)
        if oldest is not None and oldest.closed and not oldest.live:
            return oldest.number
        while self._empty:
            bucket = self._buckets.get(self._empty.popleft())
            if bucket is not None and not bucket.removed:
                return bucket.number
        return None

    def _pick_victim(self) -> bool:
        """Chooses the oldest closed bucket when room is short, and which of its blocks are hot. Returns whether
        it did."""
        percent = self.limits.low_percent if self._evicting else self.limits.high_percent
        self._evicting = (self._used + self.limits.bucket_bytes) * 100 > self.limits.capacity_bytes * percent
        victim = next((bucket for bucket in self._buckets.values() if bucket.closed), None)
        if not self._evicting or victim is None:
            return False
        self._victim = victim.number
        budget = self.limits.bucket_bytes * self.limits.reinsert_percent // 100
        read = [ordinal for ordinal in self._alive(victim) if victim.hits[ordinal] >= self.limits.reinsert_hits]
        kept = []
        for ordinal in sorted(read, key=lambda ordinal: -victim.hits[ordinal]):
            budget -= record_bytes(victim.lengths[ordinal])
            if budget < 0:
                break
            kept.append(ordinal)
        self._hot.extend(
            (victim.keys[ordinal], self._place(victim.number, ordinal), min(victim.hits[ordinal], HITS_KEPT) - 1)
            for ordinal in sorted(kept)
        )
        return True

    def _leave(self, number: int) -> Demote | Drop:
        """Returns a bucket's last steps: once an offer of the blocks worth it, then its end."""
        if self._worth is not None and self._offered != number:
            self._offered, bucket = number, self._buckets[number]
            going = [ordinal for ordinal in self._alive(bucket) if self._worth(bucket.keys[ordinal])]
            if going:
                return Demote(tuple((bucket.keys[ordinal], self._place(number, ordinal)) for ordinal in going))
        return self._evict(number)

    def _evict(self, number: int) -> Drop:
        self.evicted += self._buckets[number].live
        return self.discard(number)
