"""NodeStore, rule by rule; all rules together against a brute-force model: test_node_store_model."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.errors import ConfigError
from kvmesh.kvcache.leases import LeaseBook
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.page_pool import PageInvariantError, PoolExhausted
from kvmesh.kvcache.store_stats import Changes


def chain(path: str) -> list[bytes]:
    """Keys of a prompt whose blocks are the characters of `path`: each names its whole prefix."""
    return [path[: i + 1].encode().ljust(16, b".") for i in range(len(path))]


def fill(store: NodeStore, path: str) -> list[int]:
    """Begin, write and seal all that is missing of a chain, then say that its request has ended."""
    keys = chain(path)
    begun = store.begin(keys)
    for key, extent in zip(keys, begun, strict=True):
        if extent is not None:
            assert store.seal(key)
    store.touch(keys)
    return [extent for extent in begun if extent is not None]


def full(total: int, **kw: Any) -> NodeStore:
    return NodeStore(total, **{"high_percent": 100, **kw})


def test_a_block_is_found_only_once_sealed() -> None:
    store = full(4)
    a, b = chain("ab")
    assert store.begin([a, b]) == [0, 1]
    assert (store.holds(a), store.writing(a), store.peek([a, b])) == (False, True, 0)
    assert store.begin([a]) == [None]
    store.seal(b)
    assert (store.peek([a, b]), store.hold([a, b])) == (0, [])
    store.seal(a)
    assert store.hold([a, b]) == [0, 1]
    assert (store.stats.hits, store.stats.misses, store.stats.idle) == (2, 2, 0)


def test_a_run_leaves_out_a_block_that_somebody_else_sealed_meanwhile() -> None:
    store, keys = full(8), chain("abc")
    assert store.begin(keys) == [0, 1, 2]
    [extent] = store.allocate(1)
    assert store.adopt(keys[1], extent)
    store.seal_all(keys)
    assert store.usage.unheld == 8 - 3
    store.check_integrity()
    assert store.hold(keys) == [0, extent, 2]


def test_the_oldest_chain_goes_first_and_each_from_its_tail() -> None:
    store = full(6)
    fill(store, "abc")
    fill(store, "xyz")
    store.release(store.hold(chain("ab")))
    assert store.coldest(9) == [chain("abc")[2], *reversed(chain("xyz")), *reversed(chain("ab"))]
    assert store.coldest(1) == [chain("abc")[2]]


def test_room_for_new_blocks_never_comes_from_their_own_chain() -> None:
    store = full(4)
    fill(store, "ab")
    fill(store, "x")
    held = store.hold(chain("a"))
    assert store.begin(chain("abcdef")) == [None, None, 2, 3, None, None]
    assert store.peek(chain("ab")) == 2
    assert not store.holds(chain("x")[0])
    with pytest.raises(PoolExhausted, match="2 extents wanted, 1 of 4 free"):
        store.allocate(2)
    store.release(held)


def test_held_and_leased_blocks_stay() -> None:
    store = full(4)
    fill(store, "ab")
    fill(store, "xy")
    held = store.hold(chain("ab"))
    lease = store.lease([b"?" * 16, *chain("xy")], 10, now=0)
    assert lease.extents == (None, 2, 3)
    assert store.free == 0
    store.release(held[1:])
    assert store.allocate(1) == [held[1]]
    assert store.expire(9) == 0
    assert (store.next_expiry, store.expire(10), store.free) == (10, 1, 2)


def test_a_lease_runs_from_now_and_renewals_never_shorten_it() -> None:
    store = full(4)
    fill(store, "a")
    lease = store.lease(chain("a"), 100, now=50)
    assert lease.until_ns == 150
    assert store.renew(lease.lease_id, 10, now=60) == 150
    assert store.renew(lease.lease_id, 100, now=149) == 249
    assert store.renew(lease.lease_id, 100, now=249) is None  # over, even before `expire` has seen it
    assert store.renew(lease.lease_id + 1, 100, now=60) is None
    assert store.unlease(lease.lease_id)
    assert not store.unlease(lease.lease_id)
    assert store.lease(chain("a"), 0, now=0).lease_id == 0
    assert store.lease(chain("b"), 9, now=0).lease_id == 0


def test_there_are_so_many_leases_and_no_more() -> None:
    store = NodeStore(4, max_leases=2)
    fill(store, "a")
    got = [store.lease(chain("a"), 100, now=0) for _ in range(3)]
    assert [lease.extents for lease in got] == [(0,), (0,), (None,)]
    assert (got[2].lease_id, store.stats.leases, store.stats.leases_given) == (0, 2, 2)


def test_lease_ids_are_not_used_again_nor_by_another_life() -> None:
    lives = [LeaseBook(seed) for seed in (0, 1, 1_700_000_000_000_000_000, 2**64 + 5)]
    ids = [book.open((0,), 9) for book in lives for _ in range(5_000)]
    assert len(set(ids)) == len(ids)
    assert all(0 < lease_id < 2**64 for lease_id in ids)


def test_renewals_leave_no_heap_behind() -> None:
    book = LeaseBook(0)
    lease_id = book.open((0,), 1)
    for now in range(1, 10_000):
        assert book.renew(lease_id, now + 1, now - 1) == now + 1
    assert len(book._ends._heap) < 200
    assert (book.next_expiry, book.expire(9_999), book.expire(10_000)) == (10_000, [], [(0,)])


def test_the_watermark_trims_what_is_idle() -> None:
    store = NodeStore(20, high_percent=50, low_percent=25)
    fill(store, "abcdefghij")
    assert store.stats.sealed == 10
    fill(store, "x")
    assert store.stats.sealed == 5
    assert store.stats.evicted == 6
    assert store.peek(chain("abcdefghij")) == 4
    held = store.hold(chain("abcd"))
    raw = store.allocate(10)
    assert (store.trim(), store.stats.sealed) == (1, 4)
    store.release(raw + held)


def test_a_raw_extent_becomes_a_block() -> None:
    store = full(4)
    first, second, third = store.allocate(3)
    a, b = chain("ab")
    assert store.adopt(a, first)
    assert not store.adopt(a, second)
    store.share([third])
    assert store.adopt(b, third)
    assert store.coldest(9) == [a]  # somebody else still holds b
    store.release([third])
    assert (store.coldest(9), store.free) == ([a, b], 4)
    with pytest.raises(PageInvariantError):
        store.adopt(chain("c")[0], first)


def test_a_block_sealed_twice_keeps_its_first_extent() -> None:
    store = full(4)
    (a,) = chain("a")
    store.begin([a])
    (raw,) = store.allocate(1)
    store.adopt(a, raw)
    assert not store.seal(a)
    assert (store.hold([a]), store.stats.writing) == ([raw], 0)
    assert store.free == 3


def test_when_the_memory_is_gone_nothing_is_freed_under_a_reader_or_writer() -> None:
    store = full(4)
    a, b, c = chain("abc")
    fill(store, "ab")
    lease = store.lease([a], 10, now=0)
    held = store.hold([a, b])
    (written,) = store.begin([c])
    assert store.drop_all() == 2
    assert (store.peek([a]), store.free, store.keys()) == (0, 1, [])
    assert store.begin([c]) == [None]
    assert store.renew(lease.lease_id, 10, now=1) is None
    assert not store.seal(c)  # what was written is gone too
    assert store.begin([c]) == [written]
    store.abandon(c)
    store.release(held)
    assert store.free == 3
    store.expire(10)
    assert store.free == 4
    store.check_integrity()


def test_changes_are_net_and_bounded() -> None:
    store = full(2)
    fill(store, "a")
    assert store.take_changes() == Changes(tuple(chain("a")), ())
    for path in ["bx", "cy", "dz", "a"] * 50:
        store.release(store.allocate(2))
        fill(store, path)
    assert store.take_changes() == Changes((), ())
    store.release(store.allocate(2))
    assert store.take_changes() == Changes((), tuple(chain("a")))
    assert store.take_changes() == Changes()


def test_misuse_is_told_at_once() -> None:
    store = full(2)
    (a,) = chain("a")
    for misuse in (store.seal, store.abandon):
        with pytest.raises(PageInvariantError, match="never begun"):
            misuse(a)
    (extent,) = store.begin([a])
    assert extent is not None
    with pytest.raises(PageInvariantError):
        store.release([extent])
    with pytest.raises(ValueError, match="low_percent=96, high_percent=95"):
        NodeStore(2, low_percent=96)


def test_it_grows() -> None:
    store = full(0)
    with pytest.raises(PoolExhausted):
        store.allocate(1)
    store.grow(2)
    assert store.allocate(1) == [0]
    store.grow(2)
    assert (store.allocate(3), store.total, store.free) == ([1, 2, 3], 4, 0)
    store.check_integrity()


# ── policies ─────────────────────────────────────────────────────────────────────────────────────────


def test_the_policy_is_chosen_by_name() -> None:
    stores = {policy: full(3, eviction=policy) for policy in ("lru", "lfu")}
    a, b, c = (chain(path)[0] for path in "abc")
    for store in stores.values():
        for path in "aabc":
            fill(store, path)
        store.unlease(store.lease([b], 10, now=0).lease_id)
        store.touch([c], use=False)  # its place, not its count
    # Uses: a twice, b once and leased once, c once; in the order of time a, b, c.
    assert stores["lru"].coldest(3) == [a, b, c]
    assert stores["lfu"].coldest(3) == [c, a, b]
    with pytest.raises(ConfigError, match="eviction='mru': choose one of lru, lfu, length"):
        NodeStore(1, eviction="mru")


def test_length_keeps_blocks_of_long_prompts() -> None:
    store = full(12, eviction="length", block_tokens=8192)  # 8 blocks are dear
    fill(store, "abcdefgh")
    fill(store, "xy")
    fill(store, "z")
    assert store.coldest(3) == [*chain("z"), *reversed(chain("xy"))]


@pytest.mark.parametrize("policy", ["lru", "lfu", "length"])
def test_room_for_a_chain_never_comes_from_itself_under_any_policy(policy: str) -> None:
    store = full(4, eviction=policy)
    fill(store, "ab")
    for _ in range(5):
        fill(store, "x")
    store.evict_first(chain("ab"))
    store.replicated(chain("ab"))
    assert store.begin(chain("abcd")) == [None, None, 2, 3]
    assert store.peek(chain("ab")) == 2 and not store.holds(chain("x")[0])


def test_blocks_with_copies_elsewhere_go_before_others() -> None:
    store = full(4)
    for path in "abcd":
        fill(store, path)
    a, b, c, d = (chain(path)[0] for path in "abcd")
    store.replicated([d, b, chain("z")[0]])
    assert store.coldest(4) == [d, b, a, c]  # in the order in which it was told
    store.replicated([d], elsewhere=False)
    assert store.coldest(4) == [b, a, c, d]


def test_who_copies_blocks_elsewhere_hears_of_each_and_borrows_them_uncounted() -> None:
    store, heard = full(4), list[bytes]()
    store.on_added = heard.append
    keys = chain("abc")
    store.begin(keys[:2])
    assert heard == []
    store.seal(keys[0])
    store.abandon(keys[1])
    (raw,) = store.allocate(1)
    store.adopt(keys[2], raw)
    assert heard == [keys[0], keys[2]]
    lent = store.borrow([keys[2], keys[0]])
    assert lent == [raw, 0] and store.usage.held == 2
    assert len(store.allocate(2)) == store.free + 2, "what is lent is not evicted"
    store.release(lent)
    assert (store.stats.hits, store.stats.misses, store.stats.idle) == (0, 0, 2)
    store.evict_first([keys[0]])
    assert store.coldest(2) == [keys[0], keys[2]]
    with pytest.raises(KeyError):
        store.borrow(chain("x"))
    store.check_integrity()
