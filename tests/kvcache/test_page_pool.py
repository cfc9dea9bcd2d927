"""PagePool: holders are counted right, whatever the order of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmesh.kvcache.page_pool import PageInvariantError, PagePool, PoolExhausted


def test_a_fresh_pool_counts_up_and_a_freed_page_comes_back_first() -> None:
    pool = PagePool(5)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release([1])
    assert pool.allocate(2) == [1, 3]
    assert (pool.free, pool.total) == (1, 5)


def test_allocate_is_all_or_nothing() -> None:
    pool = PagePool(3)
    pool.allocate(2)
    with pytest.raises(PoolExhausted, match="2 pages wanted, 1 of 3 free"):
        pool.allocate(2)
    assert pool.free == 1
    assert pool.allocate(0) == []


def test_a_shared_page_is_free_only_after_its_last_holder() -> None:
    pool = PagePool(1)
    pages = pool.allocate(1)
    pool.share(pages)
    pool.release(pages)
    assert (pool.refcount(0), pool.free) == (1, 0)
    pool.release(pages)
    assert (pool.refcount(0), pool.free) == (0, 1)


@pytest.mark.parametrize("page", [0, -1, 7])
def test_a_page_nobody_holds_cannot_be_shared_or_released(page: int) -> None:
    pool = PagePool(2)
    with pytest.raises(PageInvariantError, match=f"page {page} "):
        pool.release([page])
    with pytest.raises(PageInvariantError, match=f"page {page} "):
        pool.share([page])


def test_a_watcher_sees_the_second_holder_come_and_go() -> None:
    pool = PagePool(2)
    page, other = pool.allocate(2)
    seen: list[tuple[int, bool]] = []
    pool.watch((page,), lambda pages, held: seen.extend((p, held) for p in pages))
    pool.share([page, other])
    pool.share([page])
    pool.release([page, page, other])
    assert seen == [(page, True), (page, False)]
    with pytest.raises(PageInvariantError, match="watches"):
        pool.release([page])


def test_withdrawn_pages_are_not_there_until_they_are_restored() -> None:
    pool = PagePool(4)
    held = pool.allocate(1)
    with pytest.raises(PageInvariantError, match="page 0 withdrawn"):
        pool.withdraw([1, 0])
    assert (pool.free, pool.total) == (3, 4), "none of them went"
    pool.withdraw([1, 2])
    with pytest.raises(PoolExhausted, match="2 pages wanted, 1 of 2 free"):
        pool.allocate(2)
    with pytest.raises(PageInvariantError, match="page 1 withdrawn"):
        pool.withdraw([1])
    with pytest.raises(PageInvariantError, match="page 3 restored"):
        pool.restore([3])
    pool.grow(1)
    assert sorted(pool.allocate(2)) == [3, 4], "numbers of withdrawn pages stay theirs"
    pool.restore([2])
    assert pool.allocate(1) == [2] and (pool.free, pool.total) == (0, 4)
    pool.release(held)
    pool.check_integrity()


class Holders(RuleBasedStateMachine):
    """The model: a bag of references held by somebody."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(6)
        self.bag: list[int] = []
        self.out: set[int] = set()

    @rule(n=st.integers(0, 7))
    def allocate(self, n: int) -> None:
        free = 6 - len(set(self.bag) | self.out)
        if n > free:
            with pytest.raises(PoolExhausted):
                self.pool.allocate(n)
            return
        pages = self.pool.allocate(n)
        assert len(set(pages)) == n
        assert self.out.union(self.bag).isdisjoint(pages), "a held or withdrawn page was handed out"
        self.bag += pages

    @precondition(lambda self: self.bag)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.bag))
        self.pool.share([page])
        self.bag.append(page)

    @precondition(lambda self: self.bag)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.bag))
        self.pool.release([page])
        self.bag.remove(page)

    @rule(pages=st.sets(st.integers(0, 5)))
    def withdraw(self, pages: set[int]) -> None:
        if pages & (self.out | set(self.bag)):
            with pytest.raises(PageInvariantError):
                self.pool.withdraw(pages)
            return
        self.pool.withdraw(pages)
        self.out |= pages

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.out)))
        self.pool.restore([page])
        self.out.discard(page)

    @invariant()
    def references_are_holders(self) -> None:
        self.pool.check_integrity()
        assert [self.pool.refcount(p) for p in range(6)] == [self.bag.count(p) for p in range(6)]
        assert self.pool.free == 6 - len(set(self.bag) | self.out)
        assert self.pool.total == 6 - len(self.out)


TestHolders = Holders.TestCase
TestHolders.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
