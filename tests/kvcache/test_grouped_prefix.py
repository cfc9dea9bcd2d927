"""GroupedPrefixCache: hits are what `longest_hit` says of what is cached, a block of the chain that goes takes its
other pages with it, holes are allowed; against a dict of (group, key) → page. Broken caches are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, GroupPages, PrefixHit, needed_blocks
from kvmesh.kvcache.grouped_prefix import GroupedPrefixCache
from kvmesh.kvcache.page_pool import PageInvariantError, PagePool
from tests.kvcache.test_cache_groups import group, model_hit

BLOCK = 2
ALL = group(CacheKind.ALL, 0, "all")
WINDOW = group(CacheKind.WINDOW, 5, "window")  # two blocks
SHORT = group(CacheKind.WINDOW, 2, "short")  # one
CHUNK = group(CacheKind.CHUNK, 6, "chunk")
STATE = group(CacheKind.STATE, 2, "state")
EXTRA = group(CacheKind.ALL, 0, "extra", optional=True)
MODELS = [(ALL, WINDOW), (ALL, STATE), (ALL, CHUNK, EXTRA), (WINDOW, SHORT), (WINDOW,), (CHUNK, STATE)]
PAGES = 9


def chain(path: str) -> list[bytes]:
    return [path[: i + 1].encode() for i in range(len(path))]


def made(*groups: CacheGroup, pages: int = 16) -> tuple[GroupedPrefixCache, list[PagePool]]:
    pools = [PagePool(pages) for _ in groups]
    return GroupedPrefixCache(groups, pools, BLOCK), pools


def fill(
    cache: GroupedPrefixCache, pools: Sequence[PagePool], path: str, holes: Sequence[tuple[int, int]] = ()
) -> list[GroupPages]:
    """Caches a chain but for its `holes` (group, block), and lets go of it."""
    pages = [GroupPages(g, 0, tuple(pool.allocate(len(path)))) for g, pool in enumerate(pools)]
    given = [
        GroupPages(g, 0, tuple(-1 if (g, b) in holes else page for b, page in enumerate(ids))) for g, _, ids in pages
    ]
    cache.insert(chain(path), given)
    for g, _, ids in pages:
        pools[g].release(ids)
    return given


def test_a_hit_takes_what_it_needs_and_nothing_else() -> None:
    cache, pools = made(ALL, WINDOW)
    (_, _, every), (_, _, window) = fill(cache, pools, "abcdef")
    hit, pages = cache.match(chain("abcdxy"), 5)
    assert hit == PrefixHit(4, (4, 4), (), ())
    assert pages == [GroupPages(0, 0, every[:4]), GroupPages(1, 2, window[2:4])]
    assert (cache.hits, cache.misses) == (4, 1)
    assert [pools[1].refcount(page) for page in window] == [1, 1, 2, 2, 1, 1]
    assert (cache.evictable(0), cache.evictable(1)) == (2, 4)
    for g, _, ids in pages:
        pools[g].release(ids)
    assert (cache.evictable(0), cache.evictable(1)) == (6, 6)


@pytest.mark.parametrize(
    ("of", "holes", "hit"),
    [
        (WINDOW, [(1, 3)], 6),  # blocks 4 and 5 are seen
        (WINDOW, [(1, 4)], 4),
        (group(CacheKind.WINDOW, 6, "six"), [(1, 3)], 3),  # one token more, one block more
        (CHUNK, [(1, 2)], 6),  # token 12 begins a chunk: nothing of the one before is seen
        (CHUNK, [(1, 2), (0, 5)], 5),  # and token 10 sees from 6 on
        (CHUNK, [(1, 4), (0, 5)], 4),
        (STATE, [(1, 5)], 5),
        (STATE, [(1, 5), (1, 4), (1, 2)], 4),
    ],
)
def test_a_hole_costs_the_cuts_that_see_it(of: CacheGroup, holes: list[tuple[int, int]], hit: int) -> None:
    cache, pools = made(ALL, of)
    path = "abcdef"
    if (0, 5) in holes:
        path = "abcde"
    fill(cache, pools, path, holes)
    assert cache.peek(chain("abcdef"), 6).blocks == hit
    got, pages = cache.match(chain("abcdef"), 6)
    assert got.blocks == hit and all(-1 not in ids for _, _, ids in pages)
    cache.check_integrity()


def test_a_block_of_the_chain_takes_its_other_pages_with_it() -> None:
    cache, pools = made(ALL, WINDOW)
    fill(cache, pools, "abcd")
    assert cache.evict(0, 1) == 1
    assert (pools[0].free, pools[1].free) == (13, 13), "from the tail"
    _, held = cache.match(chain("abc"), 3)
    assert cache.forget(chain("abc")[1:2]) == 2  # ab and abc
    assert pools[1].free == 13, "whoever holds them keeps them"
    for g, _, ids in held:
        pools[g].release(ids)
    assert pools[1].free == 15 and cache.peek(chain("abc"), 3).blocks == 1
    cache.check_integrity()


def test_without_a_group_that_keeps_all_a_chain_is_records() -> None:
    cache, pools = made(WINDOW)
    fill(cache, pools, "abcdef", holes=[(0, 0), (0, 1)])
    assert cache.peek(chain("abcdef"), 6).blocks == 6 and cache.peek(chain("abc"), 3).blocks == 0
    assert cache.evict(0, 2) == 2  # abc, abcd: the oldest; abcde and abcdef are what a hit needs
    assert cache.peek(chain("abcdef"), 6).blocks == 6
    assert cache.forget(chain("a")) == 6, "it is known what continues a"
    assert pools[0].free == 16 and cache.keys() == []
    cache.check_integrity()


def test_an_optional_group_is_whole_or_left_out() -> None:
    cache, pools = made(ALL, EXTRA)
    fill(cache, pools, "abcd", holes=[(1, 1)])
    hit, pages = cache.match(chain("abcd"), 4)
    assert hit == PrefixHit(4, (4, 1), (), (1,)) and [g for g, _, _ in pages] == [0]


def test_misuse_is_found() -> None:
    cache, pools = made(ALL, WINDOW)
    pages = pools[0].allocate(2)
    with pytest.raises(PageInvariantError, match="for a chain of 2"):
        cache.insert(chain("ab"), [GroupPages(0, 0, (pages[0], -1))])
    with pytest.raises(PageInvariantError, match="for a chain of 2"):
        cache.insert(chain("ab"), [GroupPages(0, 1, (pages[1],))])
    mine = pools[1].allocate(1)
    cache.insert(chain("a"), [GroupPages(0, 0, (pages[0],)), GroupPages(1, 0, (mine[0],))])
    with pytest.raises(PageInvariantError, match="another key"):
        cache.insert(chain("b"), [GroupPages(0, 0, (pages[1],)), GroupPages(1, 0, (mine[0],))])
    with pytest.raises(ValueError, match="1 pools for 2 groups"):
        GroupedPrefixCache((ALL, WINDOW), pools[:1], BLOCK)


# ── all together ─────────────────────────────────────────────────────────────────────────────────────

PATHS = st.text(alphabet="ab", min_size=1, max_size=6)


@dataclass(eq=False)
class Row:
    """A request: its path and, for each group, a page or -1 of each block."""

    path: str
    pages: list[list[int]]


class PrefixModel(RuleBasedStateMachine):
    make: type[GroupedPrefixCache] = GroupedPrefixCache

    @initialize(groups=st.sampled_from(MODELS))
    def begin_life(self, groups: tuple[CacheGroup, ...]) -> None:
        self.groups = groups
        self.pools = [PagePool(PAGES) for _ in groups]
        self.cache = self.make(groups, self.pools, BLOCK)
        self.chained = groups[0].kind is CacheKind.ALL
        self.cached: dict[tuple[int, bytes], int] = {}
        self.idle: list[tuple[int, bytes]] = []  # in the order in which they became so
        self.rows: list[Row] = []
        self.content: dict[tuple[int, int], bytes] = {}  # what lies in a page that is held

    def bits(self, keys: Sequence[bytes]) -> list[int]:
        return [sum(1 << i for i, key in enumerate(keys) if (g, key) in self.cached) for g in range(len(self.groups))]

    def is_held(self, g: int, page: int) -> bool:
        return any(page in row.pages[g] for row in self.rows)

    def sync(self) -> None:
        """Notes which pages became idle, or busy, by the last release, match or insertion of one page."""
        now = [(g, key) for (g, key), page in self.cached.items() if not self.is_held(g, page)]
        self.idle = [one for one in self.idle if one in now] + [one for one in now if one not in self.idle]

    def gone(self) -> list[tuple[int, bytes]]:
        """What is cached no more, which nobody held."""
        keys = list({key for _, key in self.cached})
        held = self.cache.held(keys) if not self.chained else [self.there(g, keys) for g in range(len(self.groups))]
        lost = [(g, key) for g, key in self.cached if not held[g] >> keys.index(key) & 1]
        for one in lost:
            del self.cached[one]
        return lost

    def there(self, g: int, keys: Sequence[bytes]) -> int:
        """What is cached, key by key: `held` takes chains."""
        return sum(1 << i for i, key in enumerate(keys) if self.cache.held(chain(key.decode()))[g] >> len(key) - 1 & 1)

    @rule(path=PATHS, most=st.integers(0, 7), data=st.data())
    def begin(self, path: str, most: int, data: st.DataObject) -> None:
        keys, most = chain(path), min(most, len(path))
        expected = model_hit(self.groups, BLOCK, most, self.bits(keys))
        assert self.cache.peek(keys, most) == expected
        hit, found = self.cache.match(keys, most)
        assert hit == expected
        rows = [[-1] * len(path) for _ in self.groups]
        for g, first, ids in found:
            needed = needed_blocks(self.groups[g], BLOCK, hit.blocks * BLOCK)
            assert range(first, first + len(ids)) == needed and g not in hit.gaps
            assert [self.content[g, page] for page in ids] == keys[needed.start : needed.stop], "another block's page"
            rows[g][first : first + len(ids)] = ids
        assert {g for g, _, _ in found} == set(range(len(self.groups))) - set(hit.gaps)
        row = Row(path, rows)
        self.rows.append(row)
        self.sync()
        for g, pool in enumerate(self.pools):
            optional = g in hit.gaps or self.groups[g].kind is CacheKind.STATE
            missing = [b for b in range(hit.blocks, len(path)) if not optional or data.draw(st.booleans())]
            short = len(missing) - pool.free
            if short > self.cache.evictable(g):
                missing = []
            elif short > 0:
                assert self.cache.evict(g, short) == short, "evictable promised more than evict could free"
                self.check_evicted(g, short)
            for block, page in zip(missing, pool.allocate(len(missing)), strict=True):
                rows[g][block] = page
                self.content[g, page] = keys[block]

    def check_evicted(self, g: int, n: int) -> None:
        order = [one for one in self.idle if one[0] == g]
        gone = self.gone()
        if g == 0 and self.chained:
            left = {key for of, key in self.cached if of == 0}
            assert len([one for one in gone if one[0] == 0]) == n
            assert all(key in left for of, key in self.cached), "a page of a block that has gone"
        else:
            assert set(gone) == set(order[:n]), "not the oldest"
        self.sync()

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows))
        keys = chain(row.path)
        whole = row.pages[0].index(-1) if self.chained and -1 in row.pages[0] else len(keys)
        n = data.draw(st.integers(0, whole))
        start = data.draw(st.integers(0, n))
        before = set(self.cached)
        pages = [GroupPages(g, 0, tuple(ids)) for g, ids in enumerate(row.pages)]
        new = self.cache.insert(keys[:n], pages, start)
        if start and self.chained and (0, keys[start - 1]) not in before:
            start = 0
        if not self.chained and start and not any(key.startswith(keys[start - 1]) for _, key in before):
            start = 0
        for g, ids in enumerate(row.pages):
            for key, page in list(zip(keys, ids, strict=True))[start:n]:
                if page >= 0 and (g, key) not in self.cached:
                    self.cached[g, key] = page
        assert new == len(self.cached) - len(before)
        self.sync()

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def drop_leading_pages(self, data: st.DataObject) -> None:
        """What no later token sees is given back, as `freed_blocks` says or later."""
        row = data.draw(st.sampled_from(self.rows))
        g = data.draw(st.integers(0, len(self.groups) - 1))
        if g or not self.chained:
            for block in range(data.draw(st.integers(0, len(row.path)))):
                self.let_go(row, g, block)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.rows))
        for g in range(len(self.groups)):
            for block in reversed(range(len(row.path))):
                self.let_go(row, g, block)
        self.rows.remove(row)

    def let_go(self, row: Row, g: int, block: int) -> None:
        page = row.pages[g][block]
        if page >= 0:
            row.pages[g][block] = -1
            self.pools[g].release([page])
            self.sync()

    @rule(data=st.data(), n=st.integers(0, PAGES))
    def evict(self, data: st.DataObject, n: int) -> None:
        g = data.draw(st.integers(0, len(self.groups) - 1))
        can = self.cache.evictable(g)
        if g or not self.chained:
            assert can == len([one for one in self.idle if one[0] == g])
        assert self.cache.evict(g, n) == min(n, can)
        self.check_evicted(g, min(n, can))

    @rule(path=PATHS)
    def forget(self, path: str) -> None:
        known = {key for _, key in self.cached}
        self.cache.forget(chain(path))
        for one in [one for one in self.cached if one[1][:1] == path[:1].encode()]:
            del self.cached[one]
        assert set(self.cache.keys()) == {key for key in known if key[:1] != path[:1].encode()}
        self.sync()

    @rule(path=PATHS, at=st.integers(0, 5))
    def forget_one(self, path: str, at: int) -> None:
        """One block in doubt, and what is known to continue it."""
        key = chain(path)[min(at, len(path) - 1)]
        if any(known == key for _, known in self.cached):
            self.cache.forget([key])
            for one in [one for one in self.cached if one[1].startswith(key)]:
                del self.cached[one]
            self.sync()

    @invariant()
    def it_is_whole(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_integrity()
        assert set(self.cache.keys()) == {key for _, key in self.cached}
        for (g, key), page in self.cached.items():
            assert self.content[g, page] == key, "a page with another block's KV"
            assert self.cache.holds_page(g, page)
        for g, pool in enumerate(self.pools):
            used = {page for (of, _), page in self.cached.items() if of == g}
            used.update(page for row in self.rows for page in row.pages[g] if page >= 0)
            assert pool.free == PAGES - len(used)
        for row in self.rows:
            for g, ids in enumerate(row.pages):
                assert all(self.content[g, page] == chain(row.path)[b] for b, page in enumerate(ids) if page >= 0)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for row in list(self.rows):
            for g in range(len(self.groups)):
                self.pools[g].release([page for page in row.pages[g] if page >= 0])
        self.cache.clear()
        assert [pool.free for pool in self.pools] == [PAGES] * len(self.groups), "something is cached for ever"


SETTINGS = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_it_does_what_the_model_does() -> None:
    run_state_machine_as_test(PrefixModel, settings=SETTINGS)


class FreesUnderReaders(GroupedPrefixCache):
    """A hit's pages are not held for whoever takes them."""

    def match(self, keys: Sequence[bytes], most: int) -> tuple[PrefixHit, list[GroupPages]]:
        hit, found = super().match(keys, most)
        for g, _, ids in found[1:]:
            self._pools[g].release(ids)
        return hit, found


class KeepsOrphans(GroupedPrefixCache):
    """A block that goes leaves its other pages."""

    def _on_block_gone(self, key: bytes) -> None:
        """Does nothing."""


class TakesTooMuch(GroupedPrefixCache):
    """A hit takes all pages of every group."""

    def match(self, keys: Sequence[bytes], most: int) -> tuple[PrefixHit, list[GroupPages]]:
        hit, found = super().match(keys, most)
        for at, (g, first, ids) in enumerate(found):
            while g in self._sides and first and (page := self._sides[g].pages.get(keys[first - 1])) is not None:
                self._pools[g].share([page])
                first, ids = first - 1, (page, *ids)
            found[at] = GroupPages(g, first, ids)
        return hit, found


class StopsAtTheFirstHole(GroupedPrefixCache):
    """A hit is as long as every group's leading run."""

    def peek(self, keys: Sequence[bytes], most: int) -> PrefixHit:
        leading = min((~bits & (bits + 1)).bit_length() - 1 for bits in self.held(keys[:most]))
        return super().peek(keys, min(most, leading))


class InsertsHoles(GroupedPrefixCache):
    """A block that has no page gets the next one's."""

    def insert(self, keys: Sequence[bytes], pages: Sequence[GroupPages], start: int = 0) -> int:
        packed = [GroupPages(g, first, tuple(i for i in ids if i >= 0)) for g, first, ids in pages]
        return super().insert(keys, packed, start)


class ForgetsHints(GroupedPrefixCache):
    """Blocks that an earlier call has inserted, and that were evicted since, stay away."""

    def insert(self, keys: Sequence[bytes], pages: Sequence[GroupPages], start: int = 0) -> int:
        if start and self.peek(keys[:start], start).blocks < start:
            return super().insert(keys[:0], [], 0)
        return super().insert(keys, pages, start)


@pytest.mark.parametrize(
    "broken", [FreesUnderReaders, KeepsOrphans, TakesTooMuch, StopsAtTheFirstHole, InsertsHoles, ForgetsHints]
)
@pytest.mark.slow
def test_a_broken_cache_is_found(broken: type[GroupedPrefixCache], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixModel, "make", broken)
    found = settings(
        SETTINGS, max_examples=500, derandomize=True, database=None, report_multiple_bugs=False, phases=[Phase.generate]
    )
    with pytest.raises((AssertionError, KeyError, IndexError)):
        run_state_machine_as_test(PrefixModel, settings=found)
