"""The node store: which blocks lie in one instance's host segment, and who may still read or write them.

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

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from kvmesh.kvcache.eviction import BLOCK_TOKENS, EvictionOrder, make_order
from kvmesh.kvcache.leases import PINNED_PERCENT, Coverage, Lease, LeaseBook, PinBook
from kvmesh.kvcache.page_pool import PageInvariantError, PagePool
from kvmesh.kvcache.quotas import TagQuotas
from kvmesh.kvcache.store_stats import Changes, StoreExhausted, StoreStats, StoreUsage

MAX_LEASES = 65_536
TRIM_STEP = 256  # blocks that one `trim` evicts at most: some hundred microseconds


def bits_of(bits: Iterable[bool]) -> int:
    """Returns the number whose bits these are, the highest first. O(bits)."""
    return int("".join(map("01".__getitem__, bits)) or "0", 2)


class Journal(Protocol):
    """Hears of every change of a node store in the same turn, before anyone can act on the change."""

    def sealed(self, key: bytes, extent: int, nbytes: int | None) -> None:
        """Notes a sealed block; `nbytes` None means that it fills its extent."""

    def gone(self, key: bytes, extent: int, held: bool) -> None:
        """Notes that a block cannot be found any more; `held` says that its extent is still being read."""

    def removed(self, keys: Sequence[bytes]) -> None:
        """Notes that these keys may not be found any more, whether they were here or not."""


class NodeStore:
    """The metadata of one host segment of `total` extents. It has one owner on one thread. Times are monotonic ns and
    never decrease.

    Operations cost O(1) a block, or O(log n), amortised. When more than `high_percent` of the extents are in use (raw,
    written or sealed), `trim` evicts idle blocks down to `low_percent`. `eviction` is one of `eviction.ORDERS`; another
    raises ConfigError. At most `pinned_percent` of all extents may be pinned hard. `block_bytes` is the size of one
    extent. `lease_seed` should be new at every process start (the incarnation): see `leases`. `quotas` is shared by all
    stores of a node. Misuse, such as sealing what was never begun, raises PageInvariantError: it is a bug.
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
        if not 0 <= low_percent <= high_percent <= 100:
            raise ValueError(f"{low_percent=}, {high_percent=}: must be 0 <= low <= high <= 100")
        self._pool = PagePool(total)
        self._high, self._low = high_percent, low_percent
        self._trimming = False  # the high watermark was passed, and `trim` has not come down to the low one yet
        self._sealed: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}  # sealed extents
        self._tombs: set[int] = set()  # extents of removed blocks that are still held or leased
        self._order: EvictionOrder[bytes] = make_order(eviction, block_tokens)
        self._pins = PinBook(pinned_percent)
        self._coverage = Coverage()  # extents under lease or hard pin
        self._watcher = self._on_held
        self._block_bytes = block_bytes
        self.quotas = TagQuotas() if quotas is None else quotas
        self._short: dict[bytes, int] = {}  # bytes of sealed blocks that do not fill their extents
        self._sealed_bytes = 0
        # Difference to the last `take_changes`, in order; no key is in both.
        self._new: dict[bytes, None] = {}
        self._gone: dict[bytes, None] = {}
        self._evicted = 0
        self.journals: list[Journal] = []
        self.on_added: Callable[[bytes], None] | None = None  # a block is sealed; it may say `replicated`, nothing else
        self.on_evicted_one: Callable[[bytes], None] | None = None  # `evict_one` has evicted a block
        self._max_leases = max_leases
        self._writing: dict[bytes, int] = {}
        self._lengths: dict[bytes, int] = {}  # of what is being written: blocks of its prompt
        self._orphans: set[bytes] = set()  # being written, removed since: to be abandoned, never sealed
        self._leases = LeaseBook(lease_seed, self._coverage)
        self._hits = self._misses = self._leases_given = self._leased_blocks = 0

    @property
    def total(self) -> int:
        """The number of extents."""
        return self._pool.total

    @property
    def free(self) -> int:
        """The number of extents that `allocate` can give now: unheld ones, and those of idle blocks."""
        return self._pool.free + len(self._order)

    @property
    def unheld(self) -> int:
        """The number of extents that hold no block and that nobody writes or reads."""
        return self._pool.free

    @property
    def sealed_blocks(self) -> int:
        """The number of blocks that can be found."""
        return len(self._sealed)

    @property
    def evicted(self) -> int:
        """The number of blocks evicted so far."""
        return self._evicted

    @property
    def stats(self) -> StoreStats:
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
        """How the extents are used now. O(1)."""
        unheld, idle, writing = self._pool.free, len(self._order), len(self._writing)
        pinned, covered = len(self._pins.hard), len(self._coverage)
        held = self.total - unheld - idle - writing - covered
        return StoreUsage(self.total, unheld, idle, self._order.protected, writing, pinned, covered - pinned, held)

    # ── extents ───────────────────────────────────────────────────────────────────────────────────────────────

    def allocate(self, n: int) -> list[int]:
        """Returns `n` extents with one reference each, after evicting idle blocks if needed. Raises StoreExhausted, and
        takes none, when there are fewer."""
        if n > self.free:
            raise StoreExhausted(n, self.usage, self.next_expiry)
        self._evict(n - self._pool.free)
        return self._pool.allocate(n)

    def share(self, extents: Iterable[int]) -> None:
        """Adds one reference to each extent."""
        self._pool.share(extents)

    def release(self, extents: Iterable[int]) -> None:
        """Drops one reference of each extent, from the last to the first."""
        given = list(extents)
        self._pool.release(reversed(given))
        if self._tombs:
            self._tombs.difference_update([extent for extent in given if not self._pool.refcount(extent)])

    def grow(self, n: int) -> int:
        """Adds `n` extents, because there is more memory; returns the number of the first."""
        return self._pool.grow(n)

    def withdrawable(self, extents: Iterable[int], *, spared: bool = False) -> bool:
        """Says whether nobody holds, leases or writes any of these extents, or has pinned it hard; softly pinned blocks
        count too unless `spared`."""
        for extent in extents:
            key = self._key_of.get(extent)
            if self._pool.refcount(extent) > (key is not None):
                return False
            if key is not None and not spared and key in self._pins.soft:
                return False
        return True

    def withdraw(self, extents: Sequence[int], *, spared: bool = False) -> bool:
        """Removes these extents and evicts the idle blocks in them, because their memory is given to someone else.
        Returns False, and changes nothing, unless they are `withdrawable`."""
        if not self.withdrawable(extents, spared=spared):
            return False
        for extent in extents:
            key = self._key_of.get(extent)
            if key is not None:
                self._go(key)
        self._pool.withdraw(extents)
        return True

    def restore(self, extents: Iterable[int]) -> None:
        """Adds withdrawn extents again, free."""
        self._pool.restore(extents)

    # ── sealed blocks ─────────────────────────────────────────────────────────────────────────────────────────

    def peek(self, keys: Sequence[bytes]) -> int:
        """Returns how many leading `keys` are sealed, without changing anything."""
        return len(list(itertools.takewhile(self._sealed.__contains__, keys)))

    def holds(self, key: bytes) -> bool:
        """Says whether `key` is sealed here."""
        return key in self._sealed

    def sealed_bits(self, keys: Sequence[bytes]) -> int:
        """Returns which of `keys` are sealed: bit i is that of the i-th key."""
        return bits_of(map(self._sealed.__contains__, reversed(keys)))

    def coming_bits(self, keys: Sequence[bytes]) -> int:
        """Returns which of `keys` are being written and may be sealed then: bit i is that of the i-th key."""
        writing, orphans = self._writing, self._orphans
        return bits_of([key in writing and key not in orphans for key in reversed(keys)]) if writing else 0

    def keys(self) -> list[bytes]:
        """Returns every sealed key, in the order of sealing. O(blocks)."""
        return list(self._sealed)

    def sizes(self, keys: Sequence[bytes]) -> list[int | None]:
        """Returns the bytes of each block, None for one that is not sealed."""
        return [self._short.get(key, self._block_bytes) if key in self._sealed else None for key in keys]

    def extents_of(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the extents of those of `keys` that are sealed here."""
        return [self._sealed[key] for key in keys if key in self._sealed]

    def hold(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the extents of the leading sealed `keys`, with one reference each that the caller must `release`.
        Holding does not count as a use; the caller calls `touch` at the end of the request."""
        extents = [self._sealed[key] for key in keys[: self.peek(keys)]]
        self._pool.share(extents)
        self._hits += len(extents)
        self._misses += len(keys) - len(extents)
        return extents

    def borrow(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the extents of these sealed blocks, with one reference each, to be copied elsewhere. It counts as no
        hit. `release` makes each block the most recently used; `evict_first` undoes that."""
        extents = [self._sealed[key] for key in keys]
        self._pool.share(extents)
        return extents

    def touch(self, keys: Sequence[bytes], *, use: bool = True) -> None:
        """Notes that these blocks were used now; those not sealed are ignored. It is called for a whole chain at the
        end of its request, which makes the head the most recent. With `use` it counts one use of each block (for lfu
        and length) and tells the prompt's length; without, only the recency changes. A held block becomes idle, with
        its recency, when it is released."""
        self._order.touch(keys, use=use)
        if self.quotas.limits:
            self.quotas.used(self, reversed(keys))

    def read(self, keys: Iterable[bytes]) -> None:
        """Notes that these blocks were read without a lease, each by itself: they count as hits and as used now, the
        first of them last. Those not sealed are ignored."""
        found = [key for key in keys if key in self._sealed]
        self._hits += len(found)
        if self._order.counts_uses:
            for key in reversed(found):
                self.touch((key,))
        else:
            self.touch(found)

    def take_changes(self) -> Changes:
        """Returns how the sealed keys differ from what they were at the last call; at the first call, from none."""
        changes = Changes(tuple(self._new), tuple(self._gone))
        self._new, self._gone = {}, {}
        return changes

    # ── writing and removing ──────────────────────────────────────────────────────────────────────────────────

    def writing(self, key: bytes) -> bool:
        """Says whether `key` was begun and neither sealed nor abandoned."""
        return key in self._writing

    def written(self) -> list[bytes]:
        """Returns the keys of all blocks that are being written. O(those)."""
        return list(self._writing)

    def begin(self, keys: Sequence[bytes]) -> list[int | None]:
        """Returns an extent for each block to be written, the caller's until `seal` or `abandon`; None for a block that
        is sealed or being written already, or finds no room. Sealed blocks of `keys` are touched, and none of them is
        evicted for the others. When room is short, the first of `keys` get it."""
        missing = dict.fromkeys([key for key in keys if key not in self._sealed and key not in self._writing])
        if len(missing) > self._pool.free:  # others have to go: not these
            own = [key for key in reversed(keys) if key in self._order]
            for key in own:
                self._order.mark_busy(key)
            extents = self.allocate(min(len(missing), self.free))
            for key in own:
                self._order.mark_idle(key)
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
        """Makes a begun block, whose bytes are all in its extent, findable and immutable. `nbytes` is its size if it
        does not fill its extent. Returns False, and frees the extent, when the key was sealed otherwise or removed
        meanwhile."""
        extent, length = self._end_writing(key)
        if key in self._orphans or key in self._sealed:
            self._orphans.discard(key)
            self._give_back(extent)
            return False
        self._add(key, extent, length, nbytes)
        self.trim()
        return True

    def seal_all(self, keys: Iterable[bytes]) -> None:
        """Seals each block, in this order; they fill their extents. It is much cheaper than single calls when no block
        must be evicted meanwhile."""
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
        """Frees the extent of a begun block that will not be written. The caller promises that nobody writes to it."""
        extent, _ = self._end_writing(key)
        self._orphans.discard(key)
        self._give_back(extent)

    def adopt(self, key: bytes, extent: int, nbytes: int | None = None) -> bool:
        """Makes a raw extent with complete bytes this block, and takes over the caller's reference. Returns False,
        after releasing that reference, when the block exists."""
        if key in self._sealed:
            self.release((extent,))
            return False
        self._pool.watch((extent,), self._watcher)  # PageInvariantError: it is free, or a block already
        self._add(key, extent, 1, nbytes)
        self.trim()
        return True

    def adopt_all(self, keys: Sequence[bytes], extents: Sequence[int]) -> None:
        """Adopts each block, in this order; they fill their extents. It is much cheaper than single calls when no block
        must be evicted meanwhile."""
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
        """Removes blocks, pinned or not; blocks that are being written will not be sealed. Returns whether each was
        here. Extents that are held, leased or written stay in use until they are let go."""
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
        """Removes all blocks, because their memory is gone with its rank, and returns how many. Extents that are held
        or written stay in use until they are let go; leases run to their end and cannot be renewed."""
        dropped = list(self._sealed)
        self.remove(dropped)
        self._orphans.update(self._writing)
        self._leases.finalize()
        return len(dropped)

    # ── leases ────────────────────────────────────────────────────────────────────────────────────────────────

    def lease(self, keys: Sequence[bytes], duration_ns: int, now: int) -> Lease:
        """Leases the sealed ones of `keys` until `now + duration_ns`. Nothing is leased, and the id is 0, when none is
        sealed, the duration is not positive, or the limit of open leases is reached."""
        found = tuple(self._sealed.get(key) for key in keys)
        extents = tuple(extent for extent in found if extent is not None)
        self._misses += len(found) - len(extents)
        if not extents or duration_ns <= 0 or len(self._leases) >= self._max_leases:
            return Lease(0, (None,) * len(keys), now)
        self._hits += len(extents)
        self._leases_given += 1
        self._leased_blocks += len(extents)
        if self._order.counts_uses:
            for key in keys:
                self._order.use(key, len(keys))
        self._pool.share(extents)
        until_ns = now + duration_ns
        return Lease(self._leases.open(extents, until_ns), found, until_ns)

    def renew(self, lease_id: int, duration_ns: int, now: int) -> int | None:
        """Returns the lease's new end, `now + duration_ns` or the old one if that is later; None when the lease is
        over."""
        return self._leases.renew(lease_id, now + duration_ns, now)

    def unlease(self, lease_id: int) -> bool:
        """Ends a lease. Returns True if its extents have not changed since it was given, so that what was read is
        right; False when it is unknown, over already, or the memory is gone (`drop_all`)."""
        final = self._leases.is_final(lease_id)
        extents = self._leases.close(lease_id)
        self.release(extents)
        return bool(extents) and not final

    def expire(self, now: int, most: int | None = None) -> int:
        """Ends leases and soft pins whose time is over, at most `most` of each (fewer of leases with many extents, see
        `LeaseBook`), and returns the number of leases. Their blocks stay until it is called. While more are left,
        `next_expiry` lies in the past."""
        over = self._leases.expire(now, most)
        for extents in over:
            self.release(extents)
        for key in self._pins.soft.due(now, most):
            self._order.protect(key, False)
        return len(over)

    @property
    def next_expiry(self) -> int | None:
        """When `expire` has something to do, in monotonic ns; None when no lease and no soft pin is open."""
        ends = [end for end in (self._leases.next_expiry, self._pins.soft.next) if end is not None]
        return min(ends, default=None)

    def leased(self, keys: Sequence[bytes]) -> list[bool]:
        """Returns whether each key is here and under a lease."""
        hard, sealed = self._pins.hard, self._sealed
        return [key in sealed and self._coverage.count(sealed[key]) > (key in hard) for key in keys]

    # ── pins ──────────────────────────────────────────────────────────────────────────────────────────────────

    def pin(self, keys: Sequence[bytes], duration_ns: int, now: int) -> list[bool]:
        """Pins the sealed ones of `keys` softly until `now + duration_ns`, or the end they have if that is later: they
        are evicted after all others, and not by the watermark. Returns whether each is pinned."""
        pinned = [key in self._sealed and duration_ns > 0 for key in keys]
        for key, yes in zip(reversed(keys), reversed(pinned), strict=True):
            if yes:
                self._pins.soft.extend(key, now + duration_ns)
                self._order.protect(key, True)
        return pinned

    def pin_hard(self, keys: Sequence[bytes]) -> list[bool]:
        """Pins the sealed ones of `keys` until `unpin`, `remove` or `drop_all`; they are not evicted. Returns whether
        each is pinned. Raises PinLimit, and pins none, when that would exceed the limit."""
        hard, new = self._pins.hard, self.check_pins(keys)
        hard.update((key, self._sealed[key]) for key in new)
        extents = [self._sealed[key] for key in new]
        self._pool.share(extents)
        self._coverage.add(extents)
        return [key in hard for key in keys]

    def check_pins(self, keys: Iterable[bytes]) -> list[bytes]:
        """Returns which blocks `pin_hard` would pin that are not pinned yet, each once. Raises PinLimit when they are
        too many."""
        new = [key for key in dict.fromkeys(keys) if key in self._sealed and key not in self._pins.hard]
        self._pins.check(new, self.total)
        return new

    def unpin(self, keys: Sequence[bytes]) -> list[bool]:
        """Ends soft and hard pins. Returns whether each key was pinned."""
        return [any(self._unpin(key)) for key in reversed(keys)][::-1]

    def pinned_hard(self, keys: Sequence[bytes]) -> list[bool]:
        """Returns whether each key is here and pinned hard."""
        return [key in self._pins.hard for key in keys]

    # ── eviction ──────────────────────────────────────────────────────────────────────────────────────────────

    def trim(self) -> int:
        """Evicts idle blocks without a pin down to the low watermark if the high one is exceeded, and returns how many.
        At most TRIM_STEP are evicted at once; the next call, which every `seal` and `adopt` makes, goes on."""
        if not self._is_high:
            return 0
        total = self._pool.total
        excess = total - self._pool.free - self._low * total // 100
        went = self._evict(min(excess, TRIM_STEP), protected=False)
        self._trimming = went == TRIM_STEP < excess
        return went

    def coldest(self, n: int) -> list[bytes]:
        """Returns the keys of the up to `n` blocks that will be evicted first, in that order."""
        return list(itertools.islice(self._order, max(n, 0)))

    def place(self, key: bytes) -> int | None:
        """Returns the block's eviction priority; see `quotas.Store`."""
        return self._order.priority(key)

    def evict_first(self, keys: Sequence[bytes]) -> None:
        """Makes the idle ones of these that are not pinned the next to be evicted, in this order, because a copy of
        them lies elsewhere. (Copying them was a use, which had made them the last.)"""
        for key in reversed(keys):
            self._order.evict_first(key)

    def evict_one(self, key: bytes, *, spared: bool) -> bool | None:
        """Evicts one block; see `quotas.Store`."""
        if key not in self._order:
            return None
        if key in self._pins.soft and not spared:
            return False
        self._go(key)
        if self.on_evicted_one is not None:
            self.on_evicted_one(key)
        return True

    def replicated(self, keys: Iterable[bytes], elsewhere: bool = True) -> None:
        """Notes that copies of these blocks lie elsewhere (or no longer do) as far as the owner knows, which makes
        losing them cheaper; see `eviction`. It is forgotten with the block, and promises nothing: only a hard pin keeps
        a last copy."""
        for key in keys:
            if key in self._sealed:
                self._order.set_replicated(key, elsewhere)

    def have_copies(self, extents: Iterable[int]) -> bool:
        """Says whether all blocks in these extents have copies elsewhere, as last told by `replicated`."""
        keys = (self._key_of.get(extent) for extent in extents)
        return all(key is None or self._order.is_replicated(key) for key in keys)

    def check_integrity(self) -> None:
        """Raises AssertionError (PageInvariantError) unless owners, references and order agree. O(total)."""
        self._pool.check_integrity()
        self._order.check_integrity()
        if {extent: key for key, extent in self._sealed.items()} != self._key_of:
            raise PageInvariantError("sealed keys and extents disagree")
        ordered, counts = list(self._order), self._pool.refcounts(self._sealed.values())
        idle = {key for key, count in zip(self._sealed, counts, strict=True) if count == 1}
        if wrong := idle ^ set(ordered):
            raise PageInvariantError(f"{len(wrong)} blocks are idle and not in the order of eviction, or the reverse")
        if len(self._order) != len(ordered) or 0 in self._pool.refcounts(self._tombs):
            raise PageInvariantError("a block twice in the order, or a tombstone that nobody holds")
        pins = self._pins
        if not (pins.hard.items() <= self._sealed.items() and self._short.keys() <= self._sealed.keys()):
            raise PageInvariantError("a pin or a size of a block that is not here")
        if self._new.keys() & self._gone.keys():
            raise PageInvariantError("a key both new and gone")
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

    # ── inner ─────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _is_high(self) -> bool:
        """Whether `trim` has something to do, judged by the watermarks."""
        total = self._pool.total
        return self._trimming or (total - self._pool.free) * 100 > self._high * total

    def _can_add_all(self, blocks: Mapping[bytes, int]) -> bool:
        """Says whether `_add_all` has the same effect as adding one by one: no key is here, and nothing is evicted or
        called between two of them."""
        calm = not (self._is_high or self.quotas.limits or self.on_added is not None)
        return calm and self._sealed.keys().isdisjoint(blocks)

    def _add_all(self, blocks: Mapping[bytes, int], lengths: Sequence[int]) -> None:
        """Adds all blocks, in this order, when `_can_add_all` says so; they fill their extents."""
        extents = list(blocks.values())
        self._sealed.update(blocks)
        self._key_of.update(zip(extents, blocks, strict=True))
        for journal in self.journals:
            for key, extent in blocks.items():
                journal.sealed(key, extent, None)
        if self._tombs:
            self._tombs.difference_update(extents)
        self._sealed_bytes += self._block_bytes * len(blocks)
        for key, length in zip(blocks, lengths, strict=True) if self._order.counts_uses else ():
            self._order.admit(key, length)
        counts = self._pool.refcounts(extents)
        idle = (key for key, count in zip(blocks, counts, strict=True) if count == 1)
        self._order.mark_all_idle(list(blocks if counts.count(1) == len(counts) else idle))
        returned = self._gone.keys() & blocks.keys() if self._gone else ()
        for key in returned:
            del self._gone[key]
        self._new.update(dict.fromkeys([key for key in blocks if key not in returned] if returned else blocks))
        self.quotas.added_all(blocks)

    def _add(self, key: bytes, extent: int, length: int, nbytes: int | None) -> None:
        self._sealed[key] = extent
        self._key_of[extent] = key
        for journal in self.journals:
            journal.sealed(key, extent, nbytes)
        self._tombs.discard(extent)
        if nbytes is not None and nbytes != self._block_bytes:
            self._short[key] = nbytes
        self._sealed_bytes += self._block_bytes if nbytes is None else nbytes
        self._order.admit(key, length)
        if self._pool.refcount(extent) == 1:
            self._order.mark_idle(key)
        if key in self._gone:
            del self._gone[key]
        else:
            self._new[key] = None
        if self.on_added is not None:
            self.on_added(key)
        self.quotas.added(self, key)

    def _end_writing(self, key: bytes) -> tuple[int, int]:
        """Removes a begun block; returns its extent and the number of blocks of its prompt. Raises PageInvariantError
        when it was not begun."""
        extent = self._writing.pop(key, None)
        if extent is None:
            raise PageInvariantError(f"block {key.hex()} was never begun, or has been sealed or abandoned already")
        return extent, self._lengths.pop(key)

    def _give_back(self, extent: int) -> None:
        self._pool.unwatch((extent,))
        self.release((extent,))

    def _remove(self, key: bytes) -> None:
        self._unpin(key)
        self._order.forget(key)
        self._erase((key,))

    def _erase(self, keys: Sequence[bytes]) -> None:
        """Removes sealed blocks that are neither pinned nor in the eviction order any more."""
        extents = [self._sealed.pop(key) for key in keys]
        for key, extent in zip(keys, extents, strict=True):
            del self._key_of[extent]
            self._sealed_bytes -= self._short.pop(key, self._block_bytes) if self._short else self._block_bytes
            if key in self._new:
                del self._new[key]
            else:
                self._gone[key] = None
            self.quotas.gone(self, key)
        self._pool.unwatch(extents)
        self._pool.release(extents)
        held = [count > 0 for count in self._pool.refcounts(extents)]
        self._tombs.update(itertools.compress(extents, held))
        for journal in self.journals:
            for key, extent, read in zip(keys, extents, held, strict=True):
                journal.gone(key, extent, read)

    def _go(self, key: bytes) -> None:
        """Evicts one idle block out of turn."""
        self._order.forget(key)
        self._pins.soft.drop(key)
        self._erase((key,))
        self._evicted += 1

    def _unpin(self, key: bytes) -> tuple[bool, bool]:
        """Removes both pins of a key; returns whether it was pinned softly, and hard."""
        soft, extent = self._pins.soft.drop(key), self._pins.hard.pop(key, None)
        if soft:
            self._order.protect(key, False)
        if extent is not None:
            self._coverage.drop((extent,))
            self.release((extent,))
        return soft, extent is not None

    def _evict(self, n: int, *, protected: bool = True) -> int:
        """Evicts up to `n` idle blocks in the order of the policy; returns how many."""
        if n <= 0:
            return 0
        gone = self._order.evict(n, protected=protected)
        for key in gone if self._pins.soft else ():
            self._pins.soft.drop(key)
        self._erase(gone)
        self._evicted += len(gone)
        return len(gone)

    def _on_held(self, extents: Sequence[int], held: bool) -> None:
        # Extents that are being written have no key yet: their writers share them with somebody.
        keys = [key for extent in extents if (key := self._key_of.get(extent)) is not None]
        if held:
            self._order.mark_all_busy(keys)
        else:
            self._order.mark_all_idle(keys)
            if self.quotas.limits:
                self.quotas.used(self, keys)
