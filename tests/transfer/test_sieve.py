"""SIEVE: what is used again stays."""

from __future__ import annotations

from kvmesh.transfer.rails import LruSieve


def test_evicts_the_oldest_that_was_not_used_again() -> None:
    pool: LruSieve[str] = LruSieve(3)
    for key in "abc":
        assert pool.touch(key, lambda _: True) == []
    pool.touch("a", lambda _: True)
    assert pool.touch("d", lambda _: True) == ["b"]  # a was visited: the hand passes it
    assert pool.touch("e", lambda _: True) == ["c"]
    assert pool.touch("f", lambda _: True) == ["d"]  # the hand goes on, it does not start again at a
    assert pool.touch("g", lambda _: True) == ["e"]
    assert len(pool) == 3


def test_busy_ones_stay_even_beyond_capacity() -> None:
    pool: LruSieve[int] = LruSieve(2)
    for key in range(4):
        assert pool.touch(key, lambda _: False) == []
    assert len(pool) == 4
    assert sorted(pool.touch(9, lambda k: k != 2)) == [0, 1, 3]
    assert len(pool) == 2


def test_removed_keys_are_forgotten() -> None:
    pool: LruSieve[str] = LruSieve(2)
    pool.touch("a", lambda _: True)
    pool.touch("b", lambda _: True)
    pool.remove("a")
    pool.remove("a")
    assert pool.touch("c", lambda _: True) == []
    assert pool.touch("d", lambda _: True) == ["b"]
