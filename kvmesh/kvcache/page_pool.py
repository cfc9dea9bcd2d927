"""A pool of pages with reference counts.

A *page* is a block's slot; the pool knows only numbers 0..total-1. Whoever uses a page holds a reference;
a page is free when nobody does. Pure Python, no locks: one owner (an instance's brain) on one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Protocol

# (pages, held): these got their second reference (True), or are down to their last one (False), in this order, by one
# `share` or `release`; told at the end of it.
Watcher = Callable[[list[int], bool], None]


class PoolExhausted(Exception):
    """Fewer pages are free than were asked for; none was taken."""

    def __init__(self, wanted: int, free: int, total: int) -> None:
        super().__init__(f"{wanted} pages wanted, {free} of {total} free")
        self.wanted = wanted
        self.free = free
        self.total = total


class PageInvariantError(AssertionError):
    """A reference was counted wrong, such as a page released that nobody holds. It is a bug, never a matter of load."""


class Pages(Protocol):
    """What holders of pages need of a pool; see `PagePool`."""

    @property
    def total(self) -> int: ...

    @property
    def free(self) -> int: ...

    def refcount(self, page: int, /) -> int: ...

    def allocate(self, n: int, /) -> list[int]: ...

    def share(self, pages: Iterable[int], /) -> None: ...

    def release(self, pages: Iterable[int], /) -> None: ...

    def check_integrity(self) -> None: ...


class PagePool:
    """Reference-counted pages 0..num_pages-1. Every operation costs O(1) a page.

    It is deterministic: a fresh pool gives out 0, 1, 2, ...; the page that was freed last is given out first. Pages can
    be taken out of the pool and put back (`withdraw`, `restore`).
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"num_pages={num_pages}: must not be negative")
        self._refs = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._watchers: dict[int, Watcher] = {}
        self._out: set[int] = set()  # withdrawn
        self._stale: set[int] = set()  # of those: still in the free list

    @property
    def total(self) -> int:
        """The number of pages."""
        return len(self._refs) - len(self._out)

    @property
    def free(self) -> int:
        """The number of pages that nobody holds."""
        return len(self._free) - len(self._stale)

    def grow(self, n: int) -> int:
        """Adds `n` free pages with the next numbers, which are given out after those that are free now. Returns the
        first one's number. O(free + n)."""
        if n < 0:
            raise ValueError(f"n={n}: must not be negative")
        old = len(self._refs)
        self._refs += [0] * n
        self._free[:0] = range(old + n - 1, old - 1, -1)
        return old

    def withdraw(self, pages: Iterable[int]) -> None:
        """Takes free pages out, because their memory is given to someone else. They keep their numbers, for `restore`.
        Raises PageInvariantError, and takes none, if one is not free."""
        gone = list(pages)
        for page in gone:
            if self._refs[self._known(page)] or page in self._out:
                raise PageInvariantError(f"page {page} withdrawn, but it is not free")
        # They stay in the free list until they come up: to look for them there would cost all of it.
        self._out.update(gone)
        self._stale.update(gone)

    def restore(self, pages: Iterable[int]) -> None:
        """Puts withdrawn pages back, free. Raises PageInvariantError if one was not withdrawn."""
        for page in pages:
            if page not in self._out:
                raise PageInvariantError(f"page {page} restored, but it was never withdrawn")
            self._out.discard(page)
            if page in self._stale:
                self._stale.discard(page)
            else:
                self._free.append(page)

    def refcount(self, page: int) -> int:
        """Returns the number of references to `page`, 0 if it is free. Raises PageInvariantError if there is no such
        page."""
        return self._refs[self._known(page)]

    def refcounts(self, pages: Iterable[int]) -> list[int]:
        """Returns `refcount` of each page."""
        return list(map(self._refs.__getitem__, self._all_known(pages)))

    def allocate(self, n: int) -> list[int]:
        """Takes `n` free pages with one reference each. Raises PoolExhausted, and takes none, when fewer are free."""
        if n < 0:
            raise ValueError(f"n={n}: must not be negative")
        if n > self.free:
            raise PoolExhausted(n, self.free, self.total)
        pages = [self._pop() for _ in range(n)] if self._stale else [self._free.pop() for _ in range(n)]
        for page in pages:
            self._refs[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds one reference to each page. Raises PageInvariantError if one is free."""
        refs, watchers, turned = self._refs, self._watchers, list[int]()
        try:
            for page in self._all_known(pages):
                count = refs[page]
                if count == 0:
                    raise PageInvariantError(f"page {page} shared, but nobody holds it")
                refs[page] = count + 1
                if count == 1 and page in watchers:
                    turned.append(page)
        finally:
            self._tell(turned, True)

    def release(self, pages: Iterable[int]) -> None:
        """Drops one reference of each page; a page without any is free. Raises PageInvariantError if one is free
        already."""
        refs, watchers, turned = self._refs, self._watchers, list[int]()
        try:
            for page in self._all_known(pages):
                count = refs[page]
                if count == 0:
                    raise PageInvariantError(f"page {page} released, but nobody holds it")
                refs[page] = count - 1
                if count == 1:
                    if page in watchers:
                        raise PageInvariantError(f"page {page} freed while a cache watches it")
                    self._free.append(page)
                elif count == 2 and page in watchers:
                    turned.append(page)
        finally:
            self._tell(turned, False)

    def watch(self, pages: Iterable[int], watcher: Watcher) -> None:
        """Has `watcher` told when one of these pages goes from one holder to two and back. A page has at most one
        watcher, a cache. Raises PageInvariantError, and watches none, if one is watched already, or free."""
        new = self._all_known(pages)
        told = dict.fromkeys(new, watcher)
        if len(told) != len(new) or not self._watchers.keys().isdisjoint(told):
            raise PageInvariantError(f"one of the pages {new} is watched already")
        if not all(map(self._refs.__getitem__, new)):
            raise PageInvariantError(f"one of the pages {new} is watched, but nobody holds it")
        self._watchers.update(told)

    def unwatch(self, pages: Iterable[int]) -> None:
        """Ends `watch`. Raises PageInvariantError if nobody watches one of them."""
        for page in pages:
            if self._watchers.pop(page, None) is None:
                raise PageInvariantError(f"page {page} is not watched")

    def check_integrity(self) -> None:
        """Raises PageInvariantError unless the free list is exactly the set of unheld pages. O(total)."""
        unheld = {page for page, refs in enumerate(self._refs) if refs == 0}
        listed = unheld - (self._out - self._stale)
        if len(self._free) != len(listed) or set(self._free) != listed or not self._stale <= self._out <= unheld:
            raise PageInvariantError(f"free list {sorted(self._free)} is not the unheld pages {sorted(listed)}")
        if min(self._refs, default=0) < 0:
            raise PageInvariantError("a page has less than no holder")
        if not unheld.isdisjoint(self._watchers):
            raise PageInvariantError(f"watched pages are free: {sorted(unheld & self._watchers.keys())}")

    def _pop(self) -> int:
        while (page := self._free.pop()) in self._stale:
            self._stale.discard(page)
        return page

    def _tell(self, pages: list[int], held: bool) -> None:
        for watcher, run in groupby(pages, self._watchers.__getitem__):
            watcher(list(run), held)

    def _all_known(self, pages: Iterable[int]) -> list[int]:
        known = list(pages)
        if known:
            self._known(min(known))
            self._known(max(known))
        return known

    def _known(self, page: int) -> int:
        if not 0 <= page < len(self._refs):
            raise PageInvariantError(f"page {page} is not one of 0..{len(self._refs) - 1}")
        return page
