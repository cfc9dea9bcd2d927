"""NodeStore: what is to stay and what is to go, rule by rule: pins, removal, sizes, figures, steps."""

from __future__ import annotations

import pytest

from kvmesh.errors import Overloaded
from kvmesh.kvcache import node_store
from kvmesh.kvcache.store_stats import Changes, StoreExhausted, StoreUsage
from tests.kvcache.test_node_store import chain, fill, full

# ── pins ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_soft_pin_lasts_until_its_end_or_until_nothing_else_is_left() -> None:
    store = full(4, high_percent=75, low_percent=0)
    fill(store, "a")
    fill(store, "b")
    assert store.pin([chain("a")[0], chain("z")[0]], 10, now=5) == [True, False]
    assert (store.next_expiry, store.stats.soft_pinned, store.usage.spared) == (15, 1, 1)
    raw = store.allocate(2)
    assert store.trim() == 1  # b; the watermark leaves the pinned one
    assert store.holds(chain("a")[0]) and not store.holds(chain("b")[0])
    raw += store.allocate(1)
    assert store.holds(chain("a")[0])
    raw += store.allocate(1)  # nothing else is left
    assert not store.holds(chain("a")[0])
    assert (store.next_expiry, store.stats.soft_pinned) == (None, 0)
    store.release(raw)


def test_the_end_of_a_soft_pin_is_a_use() -> None:
    store = full(4)
    for path in ("ab", "x"):
        fill(store, path)
    store.pin(chain("ab"), 10, now=0)
    assert store.pin(chain("a"), 5, now=0) == [True]  # never shorter
    assert store.expire(9) == 0 and store.coldest(9) == [*chain("x"), *reversed(chain("ab"))]
    fill(store, "y")
    assert (store.next_expiry, store.expire(10)) == (10, 0)
    assert store.coldest(9) == [*chain("x"), *chain("y"), *reversed(chain("ab"))]
    store.pin(chain("y"), 10, now=10)
    assert store.unpin([*chain("y"), *chain("x")]) == [True, False]
    assert store.coldest(1) == chain("x") and store.next_expiry is None
    store.pin(chain("ab"), 10, now=10)
    store.unpin(chain("ab"))
    assert store.coldest(9)[-2:] == [*reversed(chain("ab"))]


def test_a_hard_pin_holds_against_everything_but_unpin_and_remove() -> None:
    store = full(4, pinned_percent=50)
    fill(store, "abc")
    a, b, c = chain("abc")
    assert store.pin_hard([a, b, a]) == [True, True, True]
    with pytest.raises(Overloaded, match="hard_pins=1: 2 of 4 blocks are pinned, at most 2 may be") as caught:
        store.pin_hard([a, c])
    assert caught.value.field == "hard_pins"
    assert (store.usage.pinned, store.free, store.coldest(9)) == (2, 2, [c])
    raw = store.allocate(2)
    with pytest.raises(StoreExhausted):
        store.allocate(1)
    assert store.remove([b]) == [True]
    assert store.unpin([a, b]) == [True, False]
    assert (store.free, store.coldest(9)) == (2, [a])
    store.pin_hard([a])
    assert store.drop_all() == 1
    store.release(raw)
    assert (store.free, store.usage.pinned) == (4, 0)
    store.check_integrity()


# ── removal, sizes, figures ──────────────────────────────────────────────────────────────────────────


def test_a_removed_block_is_a_tombstone_until_its_last_reader_is_done() -> None:
    store = full(3)
    fill(store, "ab")
    a, b = chain("ab")
    store.take_changes()
    lease = store.lease([a], 10, now=0)
    assert store.remove([a, b, chain("z")[0]]) == [True, True, False]
    assert store.remove([a]) == [False]
    assert (store.peek([a]), store.lease([a], 10, now=0).lease_id, store.take_changes().removed) == (0, 0, (a, b))
    assert (store.stats.tombstones, store.usage.leased, store.free) == (1, 1, 2)
    (again,) = store.begin([a])  # the same key may be written again, elsewhere
    assert again not in lease.extents and store.seal(a)
    assert store.renew(lease.lease_id, 10, now=5) == 15  # its reader goes on
    store.unlease(lease.lease_id)
    assert (store.stats.tombstones, store.usage.leased, store.free) == (0, 0, 3)


def test_what_is_being_written_when_it_is_removed_is_never_found() -> None:
    store = full(2)
    (a,) = chain("a")
    store.begin([a])
    assert (store.remove([a]), store.remove([a])) == ([True], [False])
    assert store.begin([a]) == [None]
    assert not store.seal(a) and not store.holds(a)
    assert (store.free, store.take_changes()) == (2, Changes())


def test_sizes_are_those_of_the_bytes() -> None:
    store = full(4, block_bytes=4096)
    a, b, c = chain("abc")
    store.begin([a, b])
    store.seal(a, 1000)
    store.seal(b)
    store.adopt(c, store.allocate(1)[0], 0)
    assert store.sizes([a, b, c, chain("z")[0]]) == [1000, 4096, 0, None]
    assert store.stats.sealed_bytes == 5096
    store.remove([a, c])
    assert (store.sizes([a]), store.stats.sealed_bytes) == ([None], 4096)


def test_an_exhausted_pool_says_whose_it_is() -> None:
    store = full(8)
    fill(store, "abcd")
    store.allocate(1)
    store.begin(chain("x"))
    store.pin_hard(chain("a"))
    store.lease(chain("ab"), 10, now=7)
    store.hold(chain("abc")[2:])
    with pytest.raises(StoreExhausted) as caught:
        store.allocate(4)
    assert str(caught.value) == ("4 extents wanted, 3 of 8 free: 2 held, 1 leased, 1 pinned, 1 being written, 1 idle")
    assert caught.value.usage == StoreUsage(8, unheld=2, idle=1, spared=0, writing=1, pinned=1, leased=1, held=2)
    assert caught.value.next_expiry == 17
    assert store.stats.evicted == 0


# ── bounded work ─────────────────────────────────────────────────────────────────────────────────────


def test_one_seal_never_trims_more_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_store, "TRIM_STEP", 3)
    store = full(20, high_percent=90, low_percent=40)
    fill(store, "abcdefghijklmnopqr")
    assert store.stats.evicted == 0
    fill(store, "x")
    evicted = [store.stats.evicted]
    while store.trim():
        evicted.append(store.stats.evicted)
    assert evicted == [3, 6, 9, 11]
    assert (store.stats.sealed, store.trim()) == (8, 0)


def test_mass_expiry_goes_in_steps() -> None:
    store = full(10, max_leases=1_000)
    fill(store, "abcdefgh")
    for _ in range(500):
        store.lease(chain("a"), 10, now=0)
    store.pin(chain("abcdefgh"), 10, now=0)
    steps = []
    while (at := store.next_expiry) is not None and at <= 10:
        steps.append((store.expire(10, most=200), store.stats.soft_pinned))
    assert steps == [(200, 0), (200, 0), (100, 0)]
    assert store.usage.leased == 0
