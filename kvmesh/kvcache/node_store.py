"""The node store: what lies in one instance's host segment, and who may still touch it.

    allocate ──▶ raw extent ──────── adopt ───────┐
                                                  ▼       hold, lease        release, unlease, expire
    begin ─────▶ WRITING ─────────── seal ────▶ SEALED, idle ──▶ SEALED, held ──▶ SEALED, idle (most recent)
                    └── abandon ──▶ free            └── evicted: allocate, begin, trim ──▶ free

Extents are numbers 0..total-1 of a `PagePool`. A sealed block holds one reference of its extent, a block being written
too; every hold, every lease and a hard pin adds one. So a block is *idle* when the store's is the only reference, and
only idle blocks are evicted, in the order of a policy (`eviction`). A use ends when the last holder lets go: that
moment is a block's place in the order. Whoever lets go of several at once, does so from the last to the first: a
chain's head outlives its tail.

A removed block is found no more at once; readers who hold or lease its extent go on, and the last one gives it back.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from kvmesh.kvcache.eviction import BLOCK_TOKENS, EvictionOrder, make_order
from kvmesh.kvcache.leases import Lease, LeaseBook
from kvmesh.kvcache.page_pool import PageInvariantError
from kvmesh.kvcache.pins import PINNED_PERCENT, PinBook
from kvmesh.kvcache.quotas import TagQuotas
from kvmesh.kvcache.sealed_blocks import SealedBlocks
from kvmesh.kvcache.store_stats import Changes, StoreExhausted, StoreStats, StoreUsage

__all__ = ["Changes", "Lease", "NodeStore", "StoreExhausted", "StoreStats", "StoreUsage"]

MAX_LEASES = 65_536


class NodeStore(SealedBlocks):
    """Metadata of one host segment of `total` extents. One owner on one thread; times: monotonic ns, never decreasing.

    Every operation costs O(1) a block, or O(log n), amortised. Above `high_percent` of extents in use (raw, written,
    sealed) idle blocks go until `low_percent` are (`trim`). `eviction`: lru, lfu or length (ConfigError: another).
    `pinned_percent` of all extents may be pinned hard. `block_bytes`: of one extent. `lease_seed` should be new at
    every process start (the incarnation): see `leases`. `quotas`: one for all stores of a node. Misuse (sealing what
    was never begun, releasing what nobody holds) is PageInvariantError: a bug.
    """

    def __init__(
        self,
        total: int,
        *,
        high_percent: int = 95,
        low_percent: int = 90,
        eviction: str = "lru",
        block_tokens: int = BLOCK_TOKENS,
        block_bytes: int = 0,
        pinned_percent: int = PINNED_PERCENT,
        lease_seed: int = 0,
        max_leases: int = MAX_LEASES,
        quotas: TagQuotas | None = None,
    ) -> None:
        marks = (high_percent, low_percent)
        order: EvictionOrder[bytes] = make_order(eviction, block_tokens)
        shared = TagQuotas() if quotas is None else quotas
        super().__init__(total, order, PinBook(pinned_percent), marks, block_bytes, shared)
        self._max_leases = max_leases
        self._writing: dict[bytes, int] = {}
        self._lengths: dict[bytes, int] = {}  # of what is being written: blocks of its prompt
        self._orphans: set[bytes] = set()  # being written, removed since: to be abandoned, never sealed
        self._leases = LeaseBook(lease_seed, self._coverage)
        self._hits = self._misses = self._leases_given = self._leased_blocks = 0

    @property
    def stats(self) -> StoreStats:
        """Counts, see `StoreStats`."""
        return StoreStats(
            sealed=len(self._sealed),
            idle=len(self._order),
            writing=len(self._writing),
            leases=len(self._leases),
            hits=self._hits,
            misses=self._misses,
            evicted=self._evicted,
            leases_given=self._leases_given,
            leased_blocks=self._leased_blocks,
            soft_pinned=len(self._pins.soft),
            hard_pinned=len(self._pins.hard),
            tombstones=len(self._tombs),
            sealed_bytes=self._sealed_bytes,
        )

    @property
    def usage(self) -> StoreUsage:
        """Whose the extents are. O(1)."""
        unheld, idle, writing = self._pool.free, len(self._order), len(self._writing)
        pinned, covered = len(self._pins.hard), len(self._coverage)
        held = self.total - unheld - idle - writing - covered
        return StoreUsage(self.total, unheld, idle, self._order.spared, writing, pinned, covered - pinned, held)

    def allocate(self, n: int) -> list[int]:
        """`n` extents, one reference each, evicting idle blocks as needed. All or nothing: StoreExhausted."""
        if n > self.free:
            raise StoreExhausted(n, self.usage, self.next_expiry)
        self._evict(n - self._pool.free)
        return self._pool.allocate(n)

    # ── blocks ──────────────────────────────────────────────────────────────────────────────────────────────

    def hold(self, keys: Sequence[bytes]) -> list[int]:
        """Extents of the leading sealed ones of `keys`, with one reference each for the caller to `release`. It
        is no use by itself: `touch` says it, at the end of the request."""
        extents = [self._sealed[key] for key in keys[: self.peek(keys)]]
        self._pool.share(extents)
        self._hits += len(extents)
        self._misses += len(keys) - len(extents)
        return extents

    def writing(self, key: bytes) -> bool:
        """Whether somebody has begun `key` and neither sealed nor abandoned it."""
        return key in self._writing

    def written(self) -> list[bytes]:
        """Keys of all blocks that are being written. O(those)."""
        return list(self._writing)

    def begin(self, keys: Sequence[bytes]) -> list[int | None]:
        """An extent for each block to be written, the caller's until `seal` or `abandon`. None: sealed or being written
        already, or no room. Blocks of `keys` that are sealed are touched, and none of them makes room for the others;
        when room is short, the first ones of `keys` get it."""
        missing = dict.fromkeys([key for key in keys if key not in self._sealed and key not in self._writing])
        if len(missing) > self._pool.free:  # others have to go: not these
            own = [key for key in reversed(keys) if key in self._order]
            for key in own:
                self._order.take(key)
            extents = self.allocate(min(len(missing), self.free))
            for key in own:
                self._order.put(key)
        else:
            if len(missing) < len(keys):
                self.touch(keys, use=False)
            extents = self.allocate(len(missing))
        begun = dict(zip(missing, extents, strict=False))
        self._pool.watch(extents, self._watcher)
        self._writing.update(begun)
        self._lengths.update(dict.fromkeys(begun, len(keys)))
        # A key that stands twice in `keys` is begun once.
        return [begun.pop(key, None) for key in keys]

    def seal(self, key: bytes, nbytes: int | None = None) -> bool:
        """All bytes of a begun block are in its extent: from now on it can be found, and never changes. `nbytes`: so
        many there are, if it does not fill the extent. False: given back instead, since it was sealed otherwise or
        removed meanwhile."""
        extent, length = self._end_writing(key)
        if key in self._orphans or key in self._sealed:
            self._orphans.discard(key)
            self._give_back(extent)
            return False
        self._add(key, extent, length, nbytes)
        self.trim()
        return True

    def seal_all(self, keys: Iterable[bytes]) -> None:
        """`seal` each, in this order: they fill their extents. At a fraction of the cost where none of them makes
        others go."""
        rest = deque(keys)
        while rest and self._is_high:
            self.seal(rest.popleft())
        blocks = {key: extent for key in rest if (extent := self._writing.get(key)) is not None}
        if len(blocks) < len(rest) or self._orphans or not self._can_add_all(blocks):
            for key in rest:
                self.seal(key)
            return
        for key in blocks:
            del self._writing[key]
        self._add_all(blocks, [self._lengths.pop(key) for key in blocks])

    def abandon(self, key: bytes) -> None:
        """A begun block will not be written: its extent goes back. Nobody may write to it any more."""
        extent, _ = self._end_writing(key)
        self._orphans.discard(key)
        self._give_back(extent)

    def adopt(self, key: bytes, extent: int, nbytes: int | None = None) -> bool:
        """A raw extent whose bytes are complete becomes this block; the caller's reference passes over (False: the
        block exists, the reference was released)."""
        if key in self._sealed:
            self.release((extent,))
            return False
        self._pool.watch((extent,), self._watcher)  # PageInvariantError: it is free, or a block already
        self._add(key, extent, 1, nbytes)
        self.trim()
        return True

    def adopt_all(self, keys: Sequence[bytes], extents: Sequence[int]) -> None:
        """`adopt` each, in this order: they fill their extents. At a fraction of the cost where none of them makes
        others go."""
        rest = deque(zip(keys, extents, strict=True))
        while rest and self._is_high:
            self.adopt(*rest.popleft())
        blocks = dict(rest)
        if len(blocks) < len(rest) or not self._can_add_all(blocks):
            for key, extent in rest:
                self.adopt(key, extent)
            return
        self._pool.watch(blocks.values(), self._watcher)
        self._add_all(blocks, [1] * len(blocks))

    def remove(self, keys: Iterable[bytes]) -> list[bool]:
        """Whether each was here. None is found any more, pinned or not, and what is being written will not be sealed.
        Extents that others hold, lease or write stay theirs until they let go."""
        here, keys = [], list(keys)
        for journal in self.journals:
            journal.removed(keys)
        for key in keys:
            here.append(key in self._sealed or (key in self._writing and key not in self._orphans))
            if key in self._sealed:
                self._remove(key)
            if key in self._writing:
                self._orphans.add(key)
        return here

    def drop_all(self) -> int:
        """The memory is gone with its rank: no block is found any more. Returns how many were. Extents that others hold
        or write stay theirs until they let go; leases run to their end and cannot be renewed."""
        dropped = list(self._sealed)
        self.remove(dropped)
        self._orphans.update(self._writing)
        self._leases.finalize()
        return len(dropped)

    # ── leases ──────────────────────────────────────────────────────────────────────────────────────────────

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
        if self._order.counts:
            for key in keys:
                self._order.use(key, len(keys))
        self._pool.share(extents)
        until_ns = now + duration_ns
        return Lease(self._leases.open(extents, until_ns), found, until_ns)

    def read(self, keys: Iterable[bytes]) -> None:
        """These were read without a lease, each for itself: hits, and used now, the first of them last. Those that are
        not sealed are passed over."""
        found = [key for key in keys if key in self._sealed]
        self._hits += len(found)
        if self._order.counts:
            for key in reversed(found):
                self.touch((key,))
        else:
            self.touch(found)

    def renew(self, lease_id: int, duration_ns: int, now: int) -> int | None:
        """Its new end: `now + duration_ns`, or the old one if that is later. None: that lease is over."""
        return self._leases.renew(lease_id, now + duration_ns, now)

    def unlease(self, lease_id: int) -> bool:
        """The reader is done. True: its extents have not changed since the lease was given, and what it read of them is
        right. False: unknown or over already, or the memory has gone (`drop_all`)."""
        final = self._leases.is_final(lease_id)
        extents = self._leases.close(lease_id)
        self.release(extents)
        return bool(extents) and not final

    def expire(self, now: int, most: int | None = None) -> int:
        """End leases and soft pins whose time is over, at most so many of each, and of leases that hold much fewer (see
        `LeaseBook`); returns how many leases. Until it is called, their blocks stay. While there is more, `next_expiry`
        lies in the past."""
        over = self._leases.expire(now, most)
        for extents in over:
            self.release(extents)
        for key in self._pins.soft.due(now, most):
            self._order.spare(key, False)
        return len(over)

    @property
    def next_expiry(self) -> int | None:
        """When `expire` has something to do, monotonic ns; None: no lease and no soft pin is open."""
        ends = [end for end in (self._leases.next_expiry, self._pins.soft.next) if end is not None]
        return min(ends, default=None)

    def check_integrity(self) -> None:
        """AssertionError (PageInvariantError) unless owners, references and order agree. O(total)."""
        super().check_integrity()
        self._leases.check_integrity()
        held = self._leases.held()
        self._coverage.check(Counter([*held, *self._pins.hard.values()]))
        owned = [*self._sealed.values(), *self._writing.values()]
        if len(set(owned)) != len(owned):
            raise PageInvariantError("an extent has two owners")
        if 0 in self._pool.refcounts((*owned, *held)):
            raise PageInvariantError("an extent that is sealed, being written or leased is free")
        if not self._orphans <= self._writing.keys() or self._lengths.keys() != self._writing.keys():
            raise PageInvariantError("orphans that nobody writes, or a length of a block that nobody writes")

    # ── inner ───────────────────────────────────────────────────────────────────────────────────────────────

    def _end_writing(self, key: bytes) -> tuple[int, int]:
        """Its extent, and blocks of its prompt."""
        extent = self._writing.pop(key, None)
        if extent is None:
            raise PageInvariantError(f"block {key.hex()} was never begun, or has been sealed or abandoned already")
        return extent, self._lengths.pop(key)

    def _give_back(self, extent: int) -> None:
        self._pool.unwatch((extent,))
        self.release((extent,))
