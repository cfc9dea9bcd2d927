"""Pages that rows of one instance share: an index of complete prompt blocks by key. Pure.

A row that needs a block which lies in a page of another live row takes that page, with a reference of its own, and is
sent nothing for it. The index holds no reference itself: it knows of each page which rows hold it, and forgets the page
with the last of them, before the pool could give it to somebody else. Only what is complete is entered, and nobody
writes to it any more: a row writes behind its prompt's full blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from kvmesh.kvcache.page_pool import PageInvariantError, Pages


class SharedPages:
    """Maps keys to pages of `pool` for as long as a row holds them. A *holder* is a row's number; each has one
    reference to a page, however often it enters or takes it. Operations cost O(1) a block."""

    def __init__(self, pool: Pages) -> None:
        self._pool = pool
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._holders: dict[int, set[int]] = {}  # by page

    def __len__(self) -> int:
        """Returns the number of pages that can be found."""
        return len(self._pages)

    def count(self, keys: Sequence[bytes]) -> int:
        """Returns how many leading `keys` can be found."""
        return sum(1 for _ in takewhile(self._pages.__contains__, keys)) if self._pages else 0

    def take(self, holder: int, keys: Sequence[bytes]) -> list[int]:
        """Returns the pages of `keys`, with one reference each, which `holder` gives back by `release`. Raises KeyError
        if one cannot be found."""
        pages = [self._pages[key] for key in keys]
        self._pool.share(pages)
        for page in pages:
            self._holders[page].add(holder)
        return pages

    def enter(self, holder: int, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Lets others find the `pages` of `keys`, which `holder` holds, complete. A key that is there already keeps its
        page."""
        for key, page in zip(keys, pages, strict=True):
            if self._pages.setdefault(key, page) != page:
                continue
            self._keys[page] = key
            self._holders.setdefault(page, set()).add(holder)

    def release(self, holder: int, pages: Sequence[int]) -> None:
        """Drops the references of `holder` to these pages."""
        for page in pages:
            holders = self._holders.get(page)
            if holders is not None:
                holders.discard(holder)
                if not holders:
                    self._forget(page)
        self._pool.release(pages)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Lets nobody find these blocks any more. Who has them keeps them."""
        for key in keys:
            if key in self._pages:
                self._forget(self._pages[key])

    def distrust(self, pages: Iterable[int]) -> None:
        """Lets nobody find these pages any more, because what lies there is not to be trusted."""
        for page in pages:
            if page in self._keys:
                self._forget(page)

    def clear(self) -> None:
        """Lets nobody find anything any more, because the memory is gone."""
        self._pages, self._keys, self._holders = {}, {}, {}

    def _forget(self, page: int) -> None:
        del self._pages[self._keys.pop(page)]
        del self._holders[page]

    def check_integrity(self) -> None:
        """Raises PageInvariantError unless every page that can be found has holders, with a reference each."""
        for key, page in self._pages.items():
            holders = len(self._holders.get(page, ()))
            if self._keys.get(page) != key or not 0 < holders <= self._pool.refcount(page):
                raise PageInvariantError(f"page {page} of a shared block has {holders} holders")
        if not len(self._pages) == len(self._keys) == len(self._holders):
            raise PageInvariantError("a page that cannot be found has holders")
