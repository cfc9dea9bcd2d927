"""The local prefix cache of a model with several cache groups: block key → one page in each group's pool (ADR 0037).

If group 0 keeps all tokens, no hit goes on over a block that it lacks. A `PrefixCache` then keeps its pages, and the
pages of the other groups hang on its blocks: a block that goes takes theirs with it. Otherwise a block is a record
without a page, which stays while a page hangs on it or on a block that continues it.

The other groups' pages have an order of their own: idle ones, which nobody but the cache holds, go least recently used
first. A hole in a group is allowed; a hit is what `longest_hit` says.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvmesh.kvcache.cache_groups import (
    CacheGroup,
    CacheKind,
    GroupPages,
    PrefixHit,
    check_groups,
    longest_hit,
    needed_blocks,
)
from kvmesh.kvcache.node_store import bits_of
from kvmesh.kvcache.page_pool import PageInvariantError, PagePool
from kvmesh.kvcache.prefix_cache import IdlePages, PrefixCache


class _SidePages:
    """One group's pages by key, wherever in a chain they lie. It holds one reference of each, and tells `on_gone` of
    every page that goes."""

    def __init__(self, pool: PagePool, on_gone: Callable[[bytes], None]) -> None:
        self._pool = pool
        self._on_gone = on_gone
        self.pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # oldest first

    @property
    def evictable(self) -> int:
        """How many pages `evict` can free now."""
        return len(self._idle)

    def holds_page(self, page: int) -> bool:
        """Says whether an object lies in this page."""
        return page in self._keys

    def add(self, key: bytes, page: int) -> None:
        """Caches a page that its caller holds."""
        if page in self._keys:
            raise PageInvariantError(f"page {page} is cached under another key")
        self._pool.watch((page,), self._on_held)
        self._keys[page] = key
        self.pages[key] = page
        self._idle[key] = None
        others = self._pool.refcount(page) > 1
        self._pool.share((page,))
        if others:
            self._on_held([page], True)

    def drop(self, key: bytes) -> None:
        """Gives the page of a key back, if it has one; holders keep theirs."""
        page = self.pages.pop(key, None)
        if page is None:
            return
        del self._keys[page]
        self._idle.pop(key, None)
        self._pool.unwatch((page,))
        self._pool.release((page,))
        self._on_gone(key)

    def evict(self, n: int) -> int:
        """Frees up to `n` idle pages, least recently used first; returns how many."""
        freed = 0
        while freed < n and self._idle:
            self.drop(next(iter(self._idle)))
            freed += 1
        return freed

    def check_integrity(self) -> None:
        """Raises PageInvariantError unless pages, holders and order agree. O(pages)."""
        self._pool.check_integrity()
        if {page: key for key, page in self.pages.items()} != self._keys:
            raise PageInvariantError("keys and pages of a group disagree")
        counts = dict(zip(self.pages, self._pool.refcounts(self.pages.values()), strict=True))
        if {key for key, count in counts.items() if count == 1} != self._idle.keys() or 0 in counts.values():
            raise PageInvariantError("a page is idle and held, or neither")

    def _on_held(self, pages: list[int], held: bool) -> None:
        for page in pages:
            if held:
                self._idle.pop(self._keys[page], None)
            else:
                self._idle[self._keys[page]] = None


class _Record:
    __slots__ = ("children", "pages", "parent")

    def __init__(self, parent: bytes | None) -> None:
        self.parent = parent
        self.children = 0
        self.pages = 0  # groups that have a page of this block


class _Records:
    """The blocks of which some group has a page, and those before them: the forest without pages."""

    def __init__(self) -> None:
        self._records: dict[bytes, _Record] = {}  # parents stand before their children

    def add(self, keys: Sequence[bytes], start: int) -> int:
        """Has a record for each block of a chain from `start` on; returns from where on they were made sure of."""
        if start > 0 and keys[start - 1] not in self._records:
            start = 0
        for block in range(start, len(keys)):
            if keys[block] not in self._records:
                parent = keys[block - 1] if block else None
                self._records[keys[block]] = _Record(parent)
                if parent is not None:
                    self._records[parent].children += 1
        return start

    def hang(self, key: bytes) -> None:
        """Notes one more page of a block."""
        self._records[key].pages += 1

    def gone(self, key: bytes) -> None:
        """Notes one page less."""
        self._records[key].pages -= 1
        self.tidy(key)

    def tidy(self, key: bytes | None) -> None:
        """Removes a block without pages and continuations, and those before it that are left so."""
        while key is not None and (record := self._records.get(key)) is not None:
            if record.pages or record.children:
                return
            del self._records[key]
            if record.parent is not None:
                self._records[record.parent].children -= 1
            key = record.parent

    def continuations(self, keys: Sequence[bytes]) -> list[bytes]:
        """Returns those of `keys` that have a record, and all that continue them. O(records), unless none has."""
        found = {key for key in keys if key in self._records}
        for key, record in self._records.items() if found else ():
            if record.parent in found:
                found.add(key)
        return [key for key in self._records if key in found]

    def check_integrity(self, pages: dict[bytes, int]) -> None:
        """Raises PageInvariantError unless these are the pages of each block, and no record is for nothing."""
        children: dict[bytes, int] = {}
        for record in self._records.values():
            if record.parent is not None:
                children[record.parent] = children.get(record.parent, 0) + 1
        for key, record in self._records.items():
            if (record.pages, record.children) != (pages.get(key, 0), children.get(key, 0)):
                raise PageInvariantError("a block's pages or continuations are counted wrong")
            if not record.pages and not record.children:
                raise PageInvariantError("a block without pages and continuations is kept")
        if not pages.keys() <= self._records.keys() or not children.keys() <= self._records.keys():
            raise PageInvariantError("a page, or a continuation, of a block that is not known")


class GroupedPrefixCache:
    """Maps keys to pages: group g's lie in `pools[g]`, each of which has no other cache. Blocks have `block_tokens`
    tokens. `hits` and `misses` count the blocks passed to `match`. Operations cost O(1) a block and group."""

    def __init__(self, groups: Sequence[CacheGroup], pools: Sequence[PagePool], block_tokens: int) -> None:
        check_groups(groups)
        if len(pools) != len(groups):
            raise ValueError(f"{len(pools)} pools for {len(groups)} groups")
        self.groups = tuple(groups)
        self._pools = tuple(pools)
        self._block_tokens = block_tokens
        self._chain: PrefixCache | None = None
        self._records = _Records()
        if groups[0].kind is CacheKind.ALL and not groups[0].optional:
            self._chain = PrefixCache(pools[0])
            self._chain.on_gone = self._on_block_gone
        first = 0 if self._chain is None else 1
        on_gone = self._records.gone if self._chain is None else self._ignore
        self._sides = {g: _SidePages(pools[g], on_gone) for g in range(first, len(groups))}
        self.hits = 0
        self.misses = 0

    def evictable(self, group: int) -> int:
        """Returns how many pages of the group `evict` can free now."""
        return self._of(group).evictable

    def holds_page(self, group: int, page: int) -> bool:
        """Says whether something cached lies in this page of the group."""
        return self._of(group).holds_page(page)

    def held(self, keys: Sequence[bytes]) -> list[int]:
        """Returns what is cached of a chain from its first block on: a bitset of `keys` for each group."""
        chained = [] if self._chain is None else [(1 << self._chain.peek(keys)) - 1]
        return chained + [bits_of(map(side.pages.__contains__, reversed(keys))) for side in self._sides.values()]

    def peek(self, keys: Sequence[bytes], most: int) -> PrefixHit:
        """Returns the longest hit of at most `most` blocks of a chain, without changing anything."""
        return longest_hit(self.groups, self._block_tokens, most, self.held(keys[:most]))

    def match(self, keys: Sequence[bytes], most: int) -> tuple[PrefixHit, list[GroupPages]]:
        """Returns the longest hit of at most `most` blocks, and the pages that it needs of each group, with one
        reference each that the caller must release. An optional group that lacks one has no entry. A state's page is a
        snapshot, which is only to be copied: whoever goes on writes to a page of its own."""
        hit = self.peek(keys, most)
        found = []
        for g in range(len(self.groups)):
            if g in hit.gaps:
                continue
            needed = needed_blocks(self.groups[g], self._block_tokens, hit.blocks * self._block_tokens)
            mine = keys[needed.start : needed.stop]
            if g in self._sides:
                pages = [self._sides[g].pages[key] for key in mine]
                self._pools[g].share(pages)
            else:
                assert self._chain is not None
                pages = self._chain.match(mine)
            found.append(GroupPages(g, needed.start, tuple(pages)))
        self.hits += hit.blocks
        self.misses += min(most, len(keys)) - hit.blocks
        return hit, found

    def take(self, group: int, keys: Sequence[bytes]) -> list[int]:
        """Returns the page of each of these blocks in one group, -1 where it has none, with one reference each that the
        caller must release: for who finds the rest of what a hit needs elsewhere. Of a group 0 that keeps all, `keys`
        is a chain from its first block on."""
        if group in self._sides:
            pages = [self._sides[group].pages.get(key, -1) for key in keys]
            self._pools[group].share(page for page in pages if page >= 0)
            return pages
        assert self._chain is not None
        found = self._chain.match(keys)
        return found + [-1] * (len(keys) - len(found))

    def insert(self, keys: Sequence[bytes], pages: Sequence[GroupPages], start: int = 0) -> int:
        """Caches the chain `keys` (from the prompt's first block on), with what `pages` has of it; -1 stands for a
        hole. Returns the number of new pages.

        The caller holds every page and keeps its references; the cache adds its own. What is cached already keeps its
        page. Blocks before `start` were inserted by an earlier call; this is a hint, and evicted ones are inserted
        again. A group 0 that keeps all has a page for each of `keys`, else PageInvariantError is raised."""
        given = {group: (first, ids) for group, first, ids in pages}
        new = 0
        if self._chain is not None:
            first, ids = given.pop(0, (0, ()))
            if first or len(ids) < len(keys) or -1 in ids[: len(keys)]:
                raise PageInvariantError(f"pages of blocks {first} to {first + len(ids)} for a chain of {len(keys)}")
            if start > 0 and self._chain.peek(keys[:start]) < start:
                start = 0
            new = self._chain.insert(keys, ids[: len(keys)], start)
        else:
            start = self._records.add(keys, start)
        for g, (first, ids) in given.items():
            side = self._sides[g]
            for block in range(max(start, first), min(len(keys), first + len(ids))):
                key, page = keys[block], ids[block - first]
                if page >= 0 and key not in side.pages:
                    side.add(key, page)
                    new += 1
                    if self._chain is None:
                        self._records.hang(key)
        if self._chain is None and keys:
            self._records.tidy(keys[-1])  # and those before it, if nothing hangs on them either
        return new

    def renew(self, keys: Sequence[bytes], pages: Sequence[GroupPages], start: int = 0) -> None:
        """Has group 0's cached pages of a chain, from block `start` on, be those among `pages`, as `PrefixCache.renew`
        does: a hole of another group may have had its blocks computed again."""
        if self._chain is None:
            return
        for group, first, ids in pages:
            if group == 0 and first == 0 and -1 not in ids[: len(keys)]:
                self._chain.renew(keys[start : len(ids)], ids[start : len(keys)])

    def evict(self, group: int, n: int) -> int:
        """Frees up to `n` idle pages of a group, least recently used first; returns how many. Where group 0 keeps all,
        a block of it that goes takes those of the other groups with it."""
        return self._of(group).evict(n)

    def forget(self, keys: Sequence[bytes]) -> int:
        """Removes these blocks in all groups and all that continue them, because their bytes are in doubt; returns how
        many. Holders keep their pages. O(blocks), unless none of `keys` is cached."""
        if self._chain is not None:
            return self._chain.forget(keys)
        gone = self._records.continuations(keys)
        for key in reversed(gone):
            for side in self._sides.values():
                side.drop(key)
        return len(gone)

    def keys(self) -> list[bytes]:
        """Returns the key of every block of which a page is cached, each once. O(blocks)."""
        chained = [] if self._chain is None else self._chain.keys()
        return list(dict.fromkeys((*chained, *(key for side in self._sides.values() for key in side.pages))))

    def clear(self) -> int:
        """Evicts everything idle; returns the number of pages freed."""
        return sum(self.evict(g, self.evictable(g)) for g in reversed(range(len(self.groups))))

    def check_integrity(self) -> None:
        """Raises PageInvariantError unless counts, holders and order agree, here and in the pools. O(blocks)."""
        hung: dict[bytes, int] = {}
        for side in self._sides.values():
            side.check_integrity()
            for key in side.pages:
                hung[key] = hung.get(key, 0) + 1
        if self._chain is None:
            self._records.check_integrity(hung)
            return
        self._chain.check_integrity()
        if not hung.keys() <= set(self._chain.keys()):
            raise PageInvariantError("a page hangs on a block that is not cached")

    def of_group(self, group: int) -> IdlePages:
        """Returns what this cache has of one group's pool, for `CachedPages`."""
        return self._of(group)

    def _of(self, group: int) -> PrefixCache | _SidePages:
        if group in self._sides:
            return self._sides[group]
        assert self._chain is not None and group == 0
        return self._chain

    def _on_block_gone(self, key: bytes) -> None:
        for side in self._sides.values():
            side.drop(key)

    def _ignore(self, key: bytes) -> None:
        """Hears of a page that goes where no record counts it."""
