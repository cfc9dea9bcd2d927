"""A page pool as seen by those who share it with a prefix cache: what the cache holds alone is free for the taking."""

from __future__ import annotations

from collections.abc import Iterable

from kvmesh.kvcache.page_pool import PagePool
from kvmesh.kvcache.prefix_cache import PrefixCache


class CachedPages:
    """The pool under `cache`: idle cached pages count as free and are evicted when somebody takes them, and the cache's
    own references do not count. Pure, like both."""

    def __init__(self, pool: PagePool, cache: PrefixCache) -> None:
        self._pool = pool
        self._cache = cache

    @property
    def total(self) -> int:
        """Pages there are."""
        return self._pool.total

    @property
    def free(self) -> int:
        """Pages that nobody but the cache holds."""
        return self._pool.free + self._cache.evictable

    def refcount(self, page: int) -> int:
        """References to `page`, the cache's own left out."""
        return self._pool.refcount(page) - self._cache.holds_page(page)

    def allocate(self, n: int) -> list[int]:
        """Take `n` pages, one reference each; cached blocks make room. All or nothing: PoolExhausted."""
        if self._pool.free < n <= self.free:
            self._cache.evict(n - self._pool.free)
        return self._pool.allocate(n)

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each page."""
        self._pool.share(pages)

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference of each page."""
        self._pool.release(pages)

    def check_integrity(self) -> None:
        """PageInvariantError unless pool and cache agree. O(total)."""
        self._cache.check_integrity()
