"""The node store: what lies in one instance's host segment, and who may still touch it.

    allocate ──▶ raw extent ──────── adopt ───────┐
                                                  ▼       hold, lease        release, unlease, expire
    begin ─────▶ WRITING ─────────── seal ────▶ SEALED, idle ──▶ SEALED, held ──▶ SEALED, idle (most recent)
                    └── abandon ──▶ free            └── evicted: allocate, begin, trim ──▶ free

Extents are numbers 0..total-1 of a `PagePool`. A sealed block holds one reference of its extent, a block being written
too; every hold and every lease adds one. So a block is *idle* when the store's is the only reference, and only idle
blocks are evicted, least recently used first. A use ends when the last holder lets go: that moment is a block's place
in the order. Whoever lets go of several at once, does so from the last to the first: a chain's head outlives its tail.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvmesh.kvcache.leases import Lease, LeaseBook
from kvmesh.kvcache.page_pool import PageInvariantError, PagePool, PoolExhausted

__all__ = ["Changes", "Lease", "NodeStore", "StoreStats"]

MAX_LEASES = 65_536


@dataclass(frozen=True, slots=True)
class Changes:
    """How the sealed keys differ from what they were: removing `removed`, then adding `sealed` gives what is now."""

    sealed: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts of now: `sealed`, `idle` (of those), `writing`, `leases`. Counts since the start: the others."""

    sealed: int
    idle: int
    writing: int
    leases: int
    hits: int  # blocks asked for by `hold` and `lease` and found
    misses: int
    evicted: int
    leases_given: int
    leased_blocks: int  # in all leases given


class NodeStore:
    """Metadata of one host segment of `total` extents. One owner on one thread; times: monotonic ns, never decreasing.

    Every operation costs O(1) a block, amortised. Above `high_percent` of extents in use (raw, written, sealed) idle
    blocks go until `low_percent` are (`trim`). `lease_seed` should be new at every process start (the incarnation):
    see `leases`. Misuse (sealing what was never begun, releasing what nobody holds) is PageInvariantError: a bug.
    """

    def __init__(
        self,
        total: int,
        *,
        high_percent: int = 95,
        low_percent: int = 90,
        lease_seed: int = 0,
        max_leases: int = MAX_LEASES,
    ) -> None:
        if not 0 <= low_percent <= high_percent <= 100:
            raise ValueError(f"low_percent={low_percent}, high_percent={high_percent}: must be 0 <= low <= high <= 100")
        self._pool = PagePool(total)
        self._high, self._low, self._max_leases = high_percent, low_percent, max_leases
        self._sealed: dict[bytes, int] = {}
        self._writing: dict[bytes, int] = {}
        self._orphans: set[bytes] = set()  # being written, begun before `drop_all`: to be abandoned, never sealed
        self._key_of: dict[int, bytes] = {}  # sealed extents
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self._watcher = self._on_held
        self._leases = LeaseBook(lease_seed)
        # Difference to the last `take_changes`, in order; no key is in both.
        self._new: dict[bytes, None] = {}
        self._gone: dict[bytes, None] = {}
        self._hits = self._misses = self._evicted = self._leases_given = self._leased_blocks = 0

    @property
    def total(self) -> int:
        """Extents there are."""
        return self._pool.total

    @property
    def free(self) -> int:
        """Extents that `allocate` can give now: unheld ones and those of idle blocks."""
        return self._pool.free + len(self._idle)

    @property
    def stats(self) -> StoreStats:
        """Counts, see `StoreStats`."""
        return StoreStats(
            sealed=len(self._sealed),
            idle=len(self._idle),
            writing=len(self._writing),
            leases=len(self._leases),
            hits=self._hits,
            misses=self._misses,
            evicted=self._evicted,
            leases_given=self._leases_given,
            leased_blocks=self._leased_blocks,
        )

    def grow(self, n: int) -> None:
        """`n` more extents, numbered on from `total` (the rank has told how much memory there is)."""
        self._pool.grow(n)

    # ── raw extents ──────────────────────────────────────────────────────────────────────────────────

    def allocate(self, n: int) -> list[int]:
        """`n` extents, one reference each, evicting idle blocks as needed. All or nothing: PoolExhausted."""
        if n > self.free:
            raise PoolExhausted(n, self.free, self.total)
        self._evict(n - self._pool.free)
        return self._pool.allocate(n)

    def share(self, extents: Iterable[int]) -> None:
        """One more reference to each."""
        self._pool.share(extents)

    def release(self, extents: Iterable[int]) -> None:
        """Drop one reference of each, from the last to the first."""
        self._pool.release(reversed(list(extents)))

    # ── blocks ───────────────────────────────────────────────────────────────────────────────────────

    def peek(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are sealed without a hole. Changes nothing."""
        sealed = self._sealed
        for count, key in enumerate(keys):
            if key not in sealed:
                return count
        return len(keys)

    def hold(self, keys: Sequence[bytes]) -> list[int]:
        """Extents of the leading sealed ones of `keys`, with one reference each for the caller to `release`."""
        extents = [self._sealed[key] for key in keys[: self.peek(keys)]]
        self._pool.share(extents)
        self._hits += len(extents)
        self._misses += len(keys) - len(extents)
        return extents

    def touch(self, keys: Sequence[bytes]) -> None:
        """These were used now; those not sealed are passed over. To be said of a whole chain at the end of its request:
        its head is then the most recent. Held blocks need no touch: they are touched when they are let go."""
        for key in reversed(keys):
            if key in self._idle:
                self._idle.move_to_end(key)

    def holds(self, key: bytes) -> bool:
        """Whether `key` is sealed here."""
        return key in self._sealed

    def writing(self, key: bytes) -> bool:
        """Whether somebody has begun `key` and neither sealed nor abandoned it."""
        return key in self._writing

    def begin(self, keys: Sequence[bytes]) -> list[int | None]:
        """An extent for each block to be written, the caller's until `seal` or `abandon`. None: sealed or being written
        already, or no room. Blocks of `keys` that are sealed are touched, and none of them makes room for the others;
        when room is short, the first ones of `keys` get it."""
        self.touch(keys)
        missing = dict.fromkeys(key for key in keys if key not in self._sealed and key not in self._writing)
        spared = sum(key in self._idle for key in set(keys)) if len(missing) > self._pool.free else 0
        room = min(len(missing), self.free - spared)
        begun: dict[bytes, int] = dict(zip(itertools.islice(missing, room), self.allocate(room), strict=True))
        for extent in begun.values():
            self._pool.watch(extent, self._watcher)
        self._writing.update(begun)
        # A key that stands twice in `keys` is begun once.
        return [begun.pop(key, None) for key in keys]

    def seal(self, key: bytes) -> bool:
        """All bytes of a begun block are in its extent: from now on it can be found, and never changes. False: given
        back instead, since it was sealed otherwise meanwhile or begun before `drop_all`."""
        extent = self._end_writing(key)
        if key in self._orphans or key in self._sealed:
            self._orphans.discard(key)
            self._pool.unwatch(extent)
            self._pool.release((extent,))
            return False
        self._add(key, extent)
        self.trim()
        return True

    def abandon(self, key: bytes) -> None:
        """A begun block will not be written: its extent goes back. Nobody may write to it any more."""
        extent = self._end_writing(key)
        self._orphans.discard(key)
        self._pool.unwatch(extent)
        self._pool.release((extent,))

    def adopt(self, key: bytes, extent: int) -> bool:
        """A raw extent whose bytes are complete becomes this block; the caller's reference passes over (False: the
        block exists, the reference was released)."""
        if key in self._sealed:
            self._pool.release((extent,))
            return False
        self._pool.watch(extent, self._watcher)  # PageInvariantError: it is free, or a block already
        self._add(key, extent)
        self.trim()
        return True

    def drop_all(self) -> int:
        """The memory is gone with its rank: no block is found any more. Returns how many were. Extents that others hold
        or write stay theirs until they let go; leases run to their end and cannot be renewed."""
        dropped = list(self._sealed)
        for key in dropped:
            self._remove(key)
        self._orphans.update(self._writing)
        self._leases.finalize()
        return len(dropped)

    # ── leases ───────────────────────────────────────────────────────────────────────────────────────

    def lease(self, keys: Sequence[bytes], duration_ns: int, now: int) -> Lease:
        """Sealed ones of `keys` stay until `now + duration_ns`. Nothing sealed, no time, or as many leases open as
        there may be: nothing is leased, the id is 0."""
        found = tuple(self._sealed.get(key) for key in keys)
        extents = tuple(extent for extent in found if extent is not None)
        self._misses += len(found) - len(extents)
        if not extents or duration_ns <= 0 or len(self._leases) >= self._max_leases:
            return Lease(0, (None,) * len(keys), now)
        self._hits += len(extents)
        self._leases_given += 1
        self._leased_blocks += len(extents)
        self._pool.share(extents)
        until_ns = now + duration_ns
        return Lease(self._leases.open(extents, until_ns), found, until_ns)

    def renew(self, lease_id: int, duration_ns: int, now: int) -> int | None:
        """Its new end: `now + duration_ns`, or the old one if that is later. None: that lease is over."""
        return self._leases.renew(lease_id, now + duration_ns, now)

    def unlease(self, lease_id: int) -> bool:
        """The reader is done. False: unknown, or over already."""
        extents = self._leases.close(lease_id)
        self.release(extents)
        return bool(extents)

    def expire(self, now: int) -> int:
        """End the leases whose time is over; returns how many. Until it is called, their blocks stay."""
        over = self._leases.expire(now)
        for extents in over:
            self.release(extents)
        return len(over)

    @property
    def next_expiry(self) -> int | None:
        """When `expire` has something to do, monotonic ns; None: no lease is open."""
        return self._leases.next_expiry

    # ── eviction ─────────────────────────────────────────────────────────────────────────────────────

    def trim(self) -> int:
        """Evict idle blocks down to the low watermark if the high one is passed; returns how many went."""
        used = self.total - self._pool.free
        if used * 100 <= self._high * self.total:
            return 0
        return self._evict(used - self._low * self.total // 100)

    def coldest(self, n: int) -> list[bytes]:
        """Keys of the up to `n` blocks that will be evicted first, in that order."""
        return list(itertools.islice(self._idle, max(n, 0)))

    def cool(self, keys: Sequence[bytes]) -> None:
        """Idle ones of these go first from now on, in this order: a copy of them lies elsewhere. (To copy them was a
        use, which had made them the last to go.)"""
        for key in reversed(keys):
            if key in self._idle:
                self._idle.move_to_end(key, last=False)

    # ── what others are told ─────────────────────────────────────────────────────────────────────────

    def take_changes(self) -> Changes:
        """How the sealed keys differ from what they were at the last call; the first call: from none."""
        changes = Changes(tuple(self._new), tuple(self._gone))
        self._new, self._gone = {}, {}
        return changes

    def keys(self) -> list[bytes]:
        """Every sealed key, in the order of sealing. O(blocks)."""
        return list(self._sealed)

    def check_integrity(self) -> None:
        """AssertionError (PageInvariantError) unless owners, references and order agree. O(total)."""
        self._pool.check_integrity()
        self._leases.check_integrity()
        owned = [*self._sealed.values(), *self._writing.values()]
        if len(set(owned)) != len(owned):
            raise PageInvariantError("an extent has two owners")
        if {extent: key for key, extent in self._sealed.items()} != self._key_of:
            raise PageInvariantError("sealed keys and extents disagree")
        if idle := {key for key, extent in self._sealed.items() if self._pool.refcount(extent) == 1} ^ set(self._idle):
            raise PageInvariantError(f"{len(idle)} blocks are idle and not in the order of eviction, or the reverse")
        if any(self._pool.refcount(extent) == 0 for extent in (*owned, *self._leases.held())):
            raise PageInvariantError("an extent that is sealed, being written or leased is free")
        if not self._orphans <= self._writing.keys() or self._new.keys() & self._gone.keys():
            raise PageInvariantError("orphans that nobody writes, or a key both new and gone")

    # ── inner ────────────────────────────────────────────────────────────────────────────────────────

    def _end_writing(self, key: bytes) -> int:
        extent = self._writing.pop(key, None)
        if extent is None:
            raise PageInvariantError(f"block {key.hex()} was never begun, or has been sealed or abandoned already")
        return extent

    def _add(self, key: bytes, extent: int) -> None:
        self._sealed[key] = extent
        self._key_of[extent] = key
        if self._pool.refcount(extent) == 1:
            self._idle[key] = None
        if key in self._gone:
            del self._gone[key]
        else:
            self._new[key] = None

    def _remove(self, key: bytes) -> None:
        extent = self._sealed.pop(key)
        del self._key_of[extent]
        self._idle.pop(key, None)
        self._pool.unwatch(extent)
        self._pool.release((extent,))
        if key in self._new:
            del self._new[key]
        else:
            self._gone[key] = None

    def _evict(self, n: int) -> int:
        """Up to `n` idle blocks go, least recently used first."""
        went = min(max(n, 0), len(self._idle))
        for _ in range(went):
            self._remove(next(iter(self._idle)))
        self._evicted += went
        return went

    def _on_held(self, extent: int, held: bool) -> None:
        key = self._key_of.get(extent)
        if key is None:  # being written: its writer shares it with somebody
            return
        if held:
            del self._idle[key]
        else:
            self._idle[key] = None
