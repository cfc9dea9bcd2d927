"""The local prefix cache of one pool: block key → page, shared by reference count.

Block keys are chained hashes (`kvmesh.kvcache.keys`), so a key stands for its whole prefix and the cached
blocks form a forest: a block's parent is the block before it. The cache holds one reference to every
cached page. A block is *idle* when neither it nor any cached descendant has another holder; idle blocks
are evictable, least recently used first. A block becomes idle only after all of its children have, so that
order always puts children before their parents: a chain is eaten from its tail and never loses its middle.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvmesh.kvcache.page_pool import PageInvariantError, PagePool


class _Block:
    __slots__ = ("children", "held", "key", "page", "parent", "pins")

    def __init__(self, key: bytes, page: int, parent: _Block | None) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.children = 0
        self.held = False  # the page has a holder besides the cache
        self.pins = 0  # (1 if held) + children with pins; 0 = idle


class PrefixCache:
    """Maps keys to pages of `pool`. Operations cost O(1) a block (amortised over share, release and insert).

    A pool has at most one cache. `hits` and `misses` count the blocks passed to `match`.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._blocks: dict[bytes, _Block] = {}
        self._by_page: dict[int, _Block] = {}
        self._idle: OrderedDict[bytes, _Block] = OrderedDict()  # oldest first
        self.hits = 0
        self.misses = 0
        self.on_gone: Callable[[bytes], None] | None = None  # a block is cached no more; it may not change this cache

    def __len__(self) -> int:
        """Returns the number of cached blocks, held or idle."""
        return len(self._blocks)

    @property
    def evictable(self) -> int:
        """The number of idle blocks, which is how many pages `evict` can free now."""
        return len(self._idle)

    def holds_page(self, page: int) -> bool:
        """Says whether a cached block lies in this page."""
        return page in self._by_page

    def pages(self) -> set[int]:
        """Returns every cached page. O(blocks)."""
        return set(self._by_page)

    def peek(self, keys: Sequence[bytes]) -> int:
        """Returns how many of `keys`, a chain from its first block on, are cached, without changing anything. O(log
        keys)."""
        # No cached block lacks its parent, so the cached ones are a prefix of the chain.
        return bisect.bisect_left(keys, True, key=lambda key: key not in self._blocks)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the pages of the longest cached prefix of `keys`, with one reference each that the caller must
        release."""
        pages = [self._blocks[key].page for key in keys[: self.peek(keys)]]
        self._pool.share(pages)
        self.hits += len(pages)
        self.misses += len(keys) - len(pages)
        return pages

    def insert(self, keys: Sequence[bytes], pages: Sequence[int], start: int = 0) -> int:
        """Caches the chain `keys` (from the prompt's first block on), with `pages[i]` holding the KV of `keys[i]`.
        Returns the number of new blocks.

        The caller holds every page and keeps its references; the cache adds its own. A key that is cached already keeps
        its page. Blocks before `start` were inserted by an earlier call; this is a hint, and evicted ones are inserted
        again.
        """
        if len(keys) != len(pages):
            raise PageInvariantError(f"{len(keys)} keys for {len(pages)} pages")
        if start > 0 and keys[start - 1] not in self._blocks:
            start = 0
        parent = self._blocks[keys[start - 1]] if start > 0 else None
        before = len(self._blocks)
        for key, page in zip(keys[start:], pages[start:], strict=True):
            parent = self._blocks.get(key) or self._add(key, page, parent)
        return len(self._blocks) - before

    def renew(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Has the cached ones of a chain lie in these pages, which hold the same and whose caller holds them, where
        nobody but the cache holds those that they lie in: these are freed. Else whoever goes on over them would keep
        two pages of each block from being evicted."""
        for key, page in zip(keys, pages, strict=True):
            block = self._blocks.get(key)
            if block is None or block.held or page in self._by_page:
                continue
            old, block.page = block.page, page
            del self._by_page[old]
            self._by_page[page] = block
            self._pool.unwatch((old,))
            self._pool.release((old,))
            others = self._pool.refcount(page) > 1
            self._pool.watch((page,), self._on_held)
            self._pool.share((page,))
            if others:
                self._on_held([page], True)

    def evict(self, n: int) -> int:
        """Frees the pages of up to `n` idle blocks, least recently used first; returns how many."""
        freed = 0
        while freed < n and self._idle:
            _, block = self._idle.popitem(last=False)
            if block.children or block.pins:
                raise PageInvariantError(f"page {block.page} is idle before its children are gone")
            del self._blocks[block.key]
            del self._by_page[block.page]
            if block.parent is not None:
                block.parent.children -= 1
            self._pool.unwatch((block.page,))
            self._pool.release((block.page,))
            if self.on_gone is not None:
                self.on_gone(block.key)
            freed += 1
        return freed

    def forget(self, keys: Sequence[bytes]) -> int:
        """Removes these blocks and all that continue them, because their bytes are in doubt; returns how many. Holders
        keep their pages. O(blocks), unless none of `keys` is cached."""
        doubted = {key: self._blocks[key] for key in keys if key in self._blocks}
        for key, block in self._blocks.items() if doubted else ():  # parents stand before their children
            if block.parent is not None and block.parent.key in doubted:
                doubted[key] = block
        for key in [key for key in reversed(self._blocks) if key in doubted]:
            self._drop(doubted[key])
        return len(doubted)

    def keys(self) -> list[bytes]:
        """Returns the keys of all cached blocks."""
        return list(self._blocks)

    def _drop(self, block: _Block) -> None:
        """Removes a block without children."""
        del self._blocks[block.key], self._by_page[block.page]
        self._idle.pop(block.key, None)
        parent = block.parent
        if parent is not None:
            parent.children -= 1
            if block.pins:
                self._unpin(parent)
        self._pool.unwatch((block.page,))
        self._pool.release((block.page,))
        if self.on_gone is not None:
            self.on_gone(block.key)

    def _unpin(self, block: _Block | None) -> None:
        while block is not None:
            block.pins -= 1
            if block.pins:
                return
            self._idle[block.key] = block
            block = block.parent

    def clear(self) -> int:
        """Evicts everything idle; returns the number of pages freed."""
        return self.evict(len(self._idle))

    def check_integrity(self) -> None:
        """Raises PageInvariantError unless counts, holders and order agree, here and in the pool. O(blocks)."""
        self._pool.check_integrity()
        children: dict[bytes, int] = {}
        pins = {key: int(block.held) for key, block in self._blocks.items()}
        for block in self._blocks.values():
            self._check(block)
            if block.parent is not None:
                children[block.parent.key] = children.get(block.parent.key, 0) + 1
                pins[block.parent.key] += block.pins > 0
        for key, block in self._blocks.items():
            if block.children != children.get(key, 0) or block.pins != pins[key]:
                raise PageInvariantError(f"page {block.page}: wrong count of children or pins")
            if (block.pins == 0) != (key in self._idle):
                raise PageInvariantError(f"page {block.page}: idle list and pins disagree")
        age = {key: i for i, key in enumerate(self._idle)}
        for key, block in self._idle.items():
            if block.parent is not None and age.get(block.parent.key, len(age)) < age[key]:
                raise PageInvariantError(f"page {block.page}: its parent would be evicted first")

    def _check(self, block: _Block) -> None:
        refs = self._pool.refcount(block.page)
        if refs < 1 or block.held != (refs > 1):
            raise PageInvariantError(f"page {block.page}: {refs} references, held={block.held}")
        if self._by_page.get(block.page) is not block or len(self._by_page) != len(self._blocks):
            raise PageInvariantError(f"page {block.page} is cached under two keys")
        if block.parent is not None and self._blocks.get(block.parent.key) is not block.parent:
            raise PageInvariantError(f"page {block.page}: its parent is no longer cached")

    def _add(self, key: bytes, page: int, parent: _Block | None) -> _Block:
        if page in self._by_page:
            raise PageInvariantError(f"page {page} is cached under another key")
        block = _Block(key, page, parent)
        self._blocks[key] = self._by_page[page] = block
        self._idle[key] = block
        if parent is not None:
            parent.children += 1
        others = self._pool.refcount(page) > 1  # holders beside the caller: it was cached before, and forgotten
        self._pool.watch((page,), self._on_held)
        self._pool.share((page,))  # the caller's reference is the second one: this pins the block
        if others:
            self._on_held([page], True)
        return block

    def _on_held(self, pages: list[int], held: bool) -> None:
        for page in pages:
            self._turn(self._by_page[page], held)

    def _turn(self, block: _Block | None, held: bool) -> None:
        assert block is not None
        block.held = held
        # Pins climb only while a block turns from idle to pinned or back: O(1) for each of a chain's blocks.
        while block is not None:
            block.pins += 1 if held else -1
            if block.pins != (1 if held else 0):
                return
            if held:
                del self._idle[block.key]
            else:
                self._idle[block.key] = block
            block = block.parent


# ── the pool as others see it ───────────────────────────────────────────────────────────────────────

# What the cache holds alone is free for the taking.


class IdlePages(Protocol):
    """What a cache tells of the pages that it has of one pool; see `PrefixCache`."""

    @property
    def evictable(self) -> int: ...

    def holds_page(self, page: int, /) -> bool: ...

    def evict(self, n: int, /) -> int: ...

    def check_integrity(self) -> None: ...


class CachedPages:
    """The view of `pool` with `cache` on top: idle cached pages count as free and are evicted when pages are taken, and
    the cache's own references do not count. Pure, as both are."""

    def __init__(self, pool: PagePool, cache: IdlePages) -> None:
        self._pool = pool
        self._cache = cache

    @property
    def total(self) -> int:
        """The number of pages."""
        return self._pool.total

    @property
    def free(self) -> int:
        """The number of pages that nobody but the cache holds."""
        return self._pool.free + self._cache.evictable

    def refcount(self, page: int) -> int:
        """Returns the number of references to `page`, without the cache's own."""
        return self._pool.refcount(page) - self._cache.holds_page(page)

    def allocate(self, n: int) -> list[int]:
        """Takes `n` pages with one reference each, after evicting cached blocks if needed. Raises PoolExhausted, and
        takes none, when there are fewer."""
        if self._pool.free < n <= self.free:
            self._cache.evict(n - self._pool.free)
        return self._pool.allocate(n)

    def share(self, pages: Iterable[int]) -> None:
        """Adds one reference to each page."""
        self._pool.share(pages)

    def release(self, pages: Iterable[int]) -> None:
        """Drops one reference of each page."""
        self._pool.release(pages)

    def check_integrity(self) -> None:
        """Raises PageInvariantError unless pool and cache agree. O(total)."""
        self._cache.check_integrity()
