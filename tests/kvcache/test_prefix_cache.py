"""PrefixCache: the longest prefix is found, holders are counted, chains are eaten from their tails."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmesh.kvcache.page_pool import PageInvariantError, PagePool
from kvmesh.kvcache.prefix_cache import PrefixCache


def chain(path: str) -> list[bytes]:
    """Keys of a prompt whose blocks are the characters of `path`: each names its whole prefix."""
    return [path[: i + 1].encode() for i in range(len(path))]


def fill(cache: PrefixCache, pool: PagePool, path: str) -> list[int]:
    pages = pool.allocate(len(path))
    cache.insert(chain(path), pages)
    pool.release(pages)
    return pages


def test_the_longest_prefix_is_shared_with_the_caller() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool)
    pages = fill(cache, pool, "abc")
    got = cache.match(chain("abxy"))
    assert got == pages[:2]
    assert [pool.refcount(p) for p in pages] == [2, 2, 1]
    assert (cache.hits, cache.misses) == (2, 2)
    pool.release(got)
    assert cache.evictable == 3


def test_a_duplicate_key_keeps_its_first_page() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool)
    first = fill(cache, pool, "ab")
    mine = pool.allocate(3)
    assert cache.insert(chain("abc"), mine) == 1
    assert cache.match(chain("abc")) == [*first, mine[2]]
    pool.release([*first, mine[2]])
    pool.release(mine)
    assert pool.free == 8 - 3


def test_an_idle_parent_of_a_held_child_is_not_evictable() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool)
    first = fill(cache, pool, "a")
    mine = pool.allocate(2)
    cache.insert(chain("ab"), mine)  # "a" stays on `first`, which nobody else holds
    assert pool.refcount(first[0]) == 1
    assert cache.evictable == 0
    assert cache.evict(1) == 0
    pool.release(mine)
    assert cache.evictable == 2


def test_the_oldest_chain_goes_first_and_each_from_its_tail() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool)
    fill(cache, pool, "abc")
    fill(cache, pool, "xy")
    pool.release(cache.match(chain("ab")))
    left = []
    while cache.evict(1):
        left.append((cache.peek(chain("abc")), cache.peek(chain("xy"))))
    assert left == [(2, 2), (2, 1), (2, 0), (1, 0), (0, 0)]


def test_insert_goes_on_where_an_earlier_chunk_ended_even_after_eviction() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool)
    twin = fill(cache, pool, "ab")
    mine = pool.allocate(4)
    assert cache.insert(chain("ab"), mine[:2]) == 0
    assert cache.evict(2) == 2  # the twin's pages; ours were never cached
    assert cache.insert(chain("abcd"), mine, start=2) == 4
    cache.check_integrity()
    assert cache.match(chain("abcd")) == mine
    assert twin != mine[:2]


def test_what_is_in_doubt_goes_with_all_that_continues_it_and_holders_keep_their_pages() -> None:
    pool = PagePool(8)
    cache = PrefixCache(pool)
    fill(cache, pool, "abcd")
    fill(cache, pool, "abx")
    mine = cache.match(chain("abc"))
    assert cache.forget(chain("abc")[1:2]) == 4  # ab, abc, abcd, abx
    assert cache.peek(chain("abcd")) == 1
    assert [pool.refcount(page) for page in mine] == [2, 1, 1]
    cache.insert(chain("abc"), mine)
    assert cache.peek(chain("abcd")) == 3
    pool.release(mine)
    assert pool.free + cache.evictable == 8


def test_a_page_has_one_key() -> None:
    pool = PagePool(4)
    cache = PrefixCache(pool)
    pages = pool.allocate(1)
    cache.insert(chain("a"), pages)
    with pytest.raises(PageInvariantError, match="another key"):
        cache.insert(chain("b"), pages)


PATHS = st.text(alphabet="ab", min_size=1, max_size=5)
PAGES = 12


class Forest(RuleBasedStateMachine):
    """Requests match, compute the rest, insert, release in any order; the cache gives way under pressure."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.cache = PrefixCache(self.pool)
        self.requests: list[tuple[str, list[int]]] = []
        self.content: dict[int, bytes] = {}  # page → key whose KV lies there, for pages somebody holds

    @rule(path=PATHS)
    def begin(self, path: str) -> None:
        keys = chain(path)
        found = self.cache.match(keys)
        assert [self.content[p] for p in found] == keys[: len(found)], "a page with another block's KV"
        need = len(path) - len(found)
        if need > self.pool.free + self.cache.evictable:
            self.pool.release(found)
            return
        short = need - self.pool.free
        if short > 0:
            assert self.cache.evict(short) == short, "evictable promised more than evict could free"
        pages = found + self.pool.allocate(need)
        self.content.update(zip(pages, keys, strict=True))
        self.requests.append((path, pages))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        path, pages = data.draw(st.sampled_from(self.requests))
        n = data.draw(st.integers(0, len(path)))
        start = data.draw(st.integers(0, n))
        if start and self.cache.peek(chain(path)[:start]) < start:
            start = 0
        self.cache.insert(chain(path)[:n], pages[:n], start)
        assert self.cache.peek(chain(path)) >= n

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        order = data.draw(st.permutations(request[1]))
        self.pool.release(order)

    @rule(n=st.integers(0, PAGES))
    def evict(self, n: int) -> None:
        can = self.cache.evictable
        assert self.cache.evict(n) == min(n, can)

    @rule(path=PATHS)
    def forget(self, path: str) -> None:
        before = len(self.cache)
        gone = self.cache.forget(chain(path))
        assert len(self.cache) == before - gone
        assert self.cache.peek(chain(path)) == 0
        assert not any(key.startswith(path[:1].encode()) for key in self.cache._blocks), "a child outlived its parent"

    @invariant()
    def counts_agree(self) -> None:
        self.cache.check_integrity()
        held = {page for _, pages in self.requests for page in pages}
        unheld = PAGES - len(held) - self.pool.free
        assert self.cache.evictable <= unheld
        assert self.pool.free + len(held | set(self.cache._by_page)) == PAGES

    def teardown(self) -> None:
        for _, pages in self.requests:
            self.pool.release(pages)
        assert self.pool.free + self.cache.evictable == PAGES
        self.cache.clear()
        assert self.pool.free == PAGES


TestForest = Forest.TestCase
TestForest.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
