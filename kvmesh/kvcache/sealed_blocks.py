"""The sealed blocks of one pool of extents: which there are, in what order the idle ones go, and which are to stay.

The part of a node store that does not ask who writes or reads: `NodeStore` builds on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from kvmesh.kvcache.eviction import EvictionOrder
from kvmesh.kvcache.leases import Coverage
from kvmesh.kvcache.page_pool import PageInvariantError, PagePool
from kvmesh.kvcache.pins import PinBook
from kvmesh.kvcache.quotas import TagQuotas
from kvmesh.kvcache.store_stats import Changes

TRIM_STEP = 256  # blocks that one `trim` evicts at most: some hundred microseconds


class Journal(Protocol):
    """Hears of every change in the turn in which it is made: before anybody can act on it."""

    def sealed(self, key: bytes, extent: int, nbytes: int | None) -> None:
        """`nbytes` none: it fills its extent."""

    def gone(self, key: bytes, extent: int, held: bool) -> None:
        """It is found no more; `held`: somebody reads its extent yet."""

    def removed(self, keys: Sequence[bytes]) -> None:
        """Nobody may find these any more, whether they were here or not."""


class SealedBlocks:
    """Key → extent, each with one reference of its extent. Watermarks in percent of all extents, see `trim`."""

    def __init__(
        self,
        total: int,
        order: EvictionOrder[bytes],
        pins: PinBook,
        watermarks: tuple[int, int],
        block_bytes: int,
        quotas: TagQuotas,
    ) -> None:
        high, low = watermarks
        if not 0 <= low <= high <= 100:
            raise ValueError(f"low_percent={low}, high_percent={high}: must be 0 <= low <= high <= 100")
        self._pool = PagePool(total)
        self._high, self._low = high, low
        self._trimming = False  # the high watermark was passed, and `trim` has not come down to the low one yet
        self._sealed: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}  # sealed extents
        self._tombs: set[int] = set()  # extents of removed blocks that somebody still holds or leases
        self._order = order
        self._pins = pins
        self._coverage = Coverage()  # extents under lease or hard pin
        self._watcher = self._on_held
        self._block_bytes = block_bytes
        self.quotas = quotas
        self._short: dict[bytes, int] = {}  # bytes of sealed blocks that do not fill their extents
        self._sealed_bytes = 0
        # Difference to the last `take_changes`, in order; no key is in both.
        self._new: dict[bytes, None] = {}
        self._gone: dict[bytes, None] = {}
        self._evicted = 0
        self.journals: list[Journal] = []
        self.on_added: Callable[[bytes], None] | None = None  # a block is sealed; it may say `replicated`, nothing else

    @property
    def total(self) -> int:
        """Extents there are."""
        return self._pool.total

    @property
    def free(self) -> int:
        """Extents that `allocate` can give now: unheld ones and those of idle blocks."""
        return self._pool.free + len(self._order)

    @property
    def sealed_blocks(self) -> int:
        """Blocks that can be found."""
        return len(self._sealed)

    @property
    def evicted(self) -> int:
        """Blocks that have had to go so far."""
        return self._evicted

    @property
    def unheld(self) -> int:
        """Extents that hold no block and that nobody writes or reads."""
        return self._pool.free

    def grow(self, n: int) -> int:
        """`n` more extents, numbered on (there is more memory); returns the first one's number."""
        return self._pool.grow(n)

    def withdrawable(self, extents: Iterable[int], *, spared: bool = False) -> bool:
        """Whether nobody holds, leases or writes any of these, or has pinned it hard or (without `spared`) softly."""
        for extent in extents:
            key = self._key_of.get(extent)
            if self._pool.refcount(extent) > (key is not None):
                return False
            if key is not None and not spared and key in self._pins.soft:
                return False
        return True

    def withdraw(self, extents: Sequence[int], *, spared: bool = False) -> bool:
        """Take these extents out, with the idle blocks in them: their memory is to be somebody else's. False, and
        nothing has changed, unless they are `withdrawable`."""
        if not self.withdrawable(extents, spared=spared):
            return False
        for extent in extents:
            key = self._key_of.get(extent)
            if key is not None:
                self._go(key)
        self._pool.withdraw(extents)
        return True

    def restore(self, extents: Iterable[int]) -> None:
        """Withdrawn extents are here again, free."""
        self._pool.restore(extents)

    def share(self, extents: Iterable[int]) -> None:
        """One more reference to each."""
        self._pool.share(extents)

    def release(self, extents: Iterable[int]) -> None:
        """Drop one reference of each, from the last to the first."""
        given = list(extents)
        self._pool.release(reversed(given))
        if self._tombs:
            self._tombs.difference_update([extent for extent in given if not self._pool.refcount(extent)])

    # ── blocks ──────────────────────────────────────────────────────────────────────────────────────────────

    def peek(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, from the first on, are sealed without a hole. Changes nothing."""
        return len(list(itertools.takewhile(self._sealed.__contains__, keys)))

    def holds(self, key: bytes) -> bool:
        """Whether `key` is sealed here."""
        return key in self._sealed

    def keys(self) -> list[bytes]:
        """Every sealed key, in the order of sealing. O(blocks)."""
        return list(self._sealed)

    def sizes(self, keys: Sequence[bytes]) -> list[int | None]:
        """Bytes of each; None: it is not sealed."""
        return [self._short.get(key, self._block_bytes) if key in self._sealed else None for key in keys]

    def borrow(self, keys: Sequence[bytes]) -> list[int]:
        """Extents of these sealed blocks, one reference each, to be copied elsewhere; counted nowhere. `release` gives
        each the place of one used just now: `cool` says otherwise."""
        extents = [self._sealed[key] for key in keys]
        self._pool.share(extents)
        return extents

    def touch(self, keys: Sequence[bytes], *, use: bool = True) -> None:
        """These were used now; those not sealed are passed over. To be said of a whole chain at the end of its request:
        its head is then the most recent. `use`: counts as one use of each (lfu, length), and tells the prompt's length;
        False: only its place is meant. Held blocks need it for their counts alone: they get a place when let go."""
        self._order.touch(keys, use=use)
        if self.quotas.limits:
            self.quotas.used(self, reversed(keys))

    def take_changes(self) -> Changes:
        """How the sealed keys differ from what they were at the last call; the first call: from none."""
        changes = Changes(tuple(self._new), tuple(self._gone))
        self._new, self._gone = {}, {}
        return changes

    # ── pins ────────────────────────────────────────────────────────────────────────────────────────────────

    def pin(self, keys: Sequence[bytes], duration_ns: int, now: int) -> list[bool]:
        """Soft: those of `keys` that are sealed go after all others, until `now + duration_ns` or the end they have, if
        that is later; the watermark spares them. Whether each is pinned."""
        pinned = [key in self._sealed and duration_ns > 0 for key in keys]
        for key, yes in zip(reversed(keys), reversed(pinned), strict=True):
            if yes:
                self._pins.soft.extend(key, now + duration_ns)
                self._order.spare(key, True)
        return pinned

    def pinned_hard(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each is here and pinned hard."""
        return [key in self._pins.hard for key in keys]

    def leased(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each is here and under a lease."""
        hard, sealed = self._pins.hard, self._sealed
        return [key in sealed and self._coverage.count(sealed[key]) > (key in hard) for key in keys]

    def pin_hard(self, keys: Sequence[bytes]) -> list[bool]:
        """Those of `keys` that are sealed are not evicted until `unpin`, `remove` or `drop_all`. Whether each is
        pinned. Overloaded, and none is, when that would pass the limit."""
        hard = self._pins.hard
        new = [key for key in dict.fromkeys(keys) if key in self._sealed and key not in hard]
        self._pins.check(new, self.total)
        hard.update((key, self._sealed[key]) for key in new)
        extents = [self._sealed[key] for key in new]
        self._pool.share(extents)
        self._coverage.add(extents)
        return [key in hard for key in keys]

    def unpin(self, keys: Sequence[bytes]) -> list[bool]:
        """Neither hard nor soft any more. Whether each was pinned."""
        return [any(self._unpin(key)) for key in reversed(keys)][::-1]

    # ── eviction ────────────────────────────────────────────────────────────────────────────────────────────

    def trim(self) -> int:
        """Evict idle blocks that no pin spares down to the low watermark if the high one is passed; returns how many
        went. At most TRIM_STEP go at once: the next call, which every `seal` and `adopt` makes, goes on."""
        if not self._is_high:
            return 0
        total = self._pool.total
        excess = total - self._pool.free - self._low * total // 100
        went = self._evict(min(excess, TRIM_STEP), spared=False)
        self._trimming = went == TRIM_STEP < excess
        return went

    def coldest(self, n: int) -> list[bytes]:
        """Keys of the up to `n` blocks that will be evicted first, in that order."""
        return list(itertools.islice(self._order, max(n, 0)))

    def place(self, key: bytes) -> int | None:
        """See `quotas.Store`."""
        return self._order.place(key)

    def cool(self, keys: Sequence[bytes]) -> None:
        """Idle ones of these, not pinned, go first from now on, in this order: a copy of them lies elsewhere. (To copy
        them was a use, which had made them the last to go.)"""
        for key in reversed(keys):
            self._order.cool(key)

    def replicated(self, keys: Iterable[bytes], elsewhere: bool = True) -> None:
        """Copies of these lie elsewhere (or no longer do), as far as the owner knows: to lose one is cheaper, see
        `eviction`. Forgotten with the block. It promises nothing: only a hard pin keeps a last copy."""
        for key in keys:
            if key in self._sealed:
                self._order.copied(key, elsewhere)

    def extents_of(self, keys: Iterable[bytes]) -> list[int]:
        """Where those of `keys` lie that are sealed here."""
        return [self._sealed[key] for key in keys if key in self._sealed]

    def have_copies(self, extents: Iterable[int]) -> bool:
        """Whether copies of all blocks in these lie elsewhere, as `replicated` has it."""
        keys = (self._key_of.get(extent) for extent in extents)
        return all(key is None or self._order.has_copy(key) for key in keys)

    def evict_one(self, key: bytes, *, spared: bool) -> bool | None:
        """See `quotas.Store`."""
        if key not in self._order:
            return None
        if key in self._pins.soft and not spared:
            return False
        self._go(key)
        return True

    def check_integrity(self) -> None:
        """AssertionError (PageInvariantError) unless owners, references and order agree. O(total)."""
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

    # ── inner ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _is_high(self) -> bool:
        """Whether `trim` has something to do, as far as watermarks tell."""
        total = self._pool.total
        return self._trimming or (total - self._pool.free) * 100 > self._high * total

    def _can_add_all(self, blocks: Mapping[bytes, int]) -> bool:
        """Whether adding them one by one would come to the same as `_add_all`: none is here, nothing is evicted between
        two of them, and nobody may act between two."""
        calm = not (self._is_high or self.quotas.limits or self.on_added is not None)
        return calm and self._sealed.keys().isdisjoint(blocks)

    def _add_all(self, blocks: Mapping[bytes, int], lengths: Sequence[int]) -> None:
        """`_add` of each, in this order, where `_can_add_all`; they fill their extents."""
        extents = list(blocks.values())
        self._sealed.update(blocks)
        self._key_of.update(zip(extents, blocks, strict=True))
        for journal in self.journals:
            for key, extent in blocks.items():
                journal.sealed(key, extent, None)
        if self._tombs:
            self._tombs.difference_update(extents)
        self._sealed_bytes += self._block_bytes * len(blocks)
        for key, length in zip(blocks, lengths, strict=True) if self._order.counts else ():
            self._order.admit(key, length)
        counts = self._pool.refcounts(extents)
        idle = (key for key, count in zip(blocks, counts, strict=True) if count == 1)
        self._order.put_all(list(blocks if counts.count(1) == len(counts) else idle))
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
            self._order.put(key)
        if key in self._gone:
            del self._gone[key]
        else:
            self._new[key] = None
        if self.on_added is not None:
            self.on_added(key)
        self.quotas.added(self, key)

    def _remove(self, key: bytes) -> None:
        self._unpin(key)
        self._order.forget(key)
        self._erase((key,))

    def _erase(self, keys: Sequence[bytes]) -> None:
        """Sealed blocks that are neither pinned nor in the order any more."""
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
        """One idle block is evicted, out of turn."""
        self._order.forget(key)
        self._pins.soft.drop(key)
        self._erase((key,))
        self._evicted += 1

    def _unpin(self, key: bytes) -> tuple[bool, bool]:
        """Whether it was pinned softly, hard."""
        soft, extent = self._pins.soft.drop(key), self._pins.hard.pop(key, None)
        if soft:
            self._order.spare(key, False)
        if extent is not None:
            self._coverage.drop((extent,))
            self.release((extent,))
        return soft, extent is not None

    def _evict(self, n: int, *, spared: bool = True) -> int:
        """Up to `n` idle blocks go, in the order of the policy."""
        if n <= 0:
            return 0
        gone = self._order.evict(n, spared=spared)
        for key in gone if self._pins.soft else ():
            self._pins.soft.drop(key)
        self._erase(gone)
        self._evicted += len(gone)
        return len(gone)

    def _on_held(self, extents: Sequence[int], held: bool) -> None:
        # Extents that are being written have no key yet: their writers share them with somebody.
        keys = [key for extent in extents if (key := self._key_of.get(extent)) is not None]
        if held:
            self._order.take_all(keys)
        else:
            self._order.put_all(keys)
            if self.quotas.limits:
                self.quotas.used(self, keys)
