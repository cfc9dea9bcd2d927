"""The pool offline: what it finds is what a cache of unbounded size finds, until there is too little room."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.sim.workloads import trace
from kvmesh.testing.offline_pool import OfflinePool, OfflinePoolConfig

BLOCK = 4


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """A tree of prefixes over few tokens."""
    made: list[list[int]] = []
    for _ in range(count):
        head = rng.choice(made)[: rng.randrange(0, 30)] if made and rng.random() < 0.7 else []
        made.append(head + [rng.randrange(50) for _ in range(rng.randrange(1, 20))])
    return made


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30), ways=st.integers(1, 3))
def test_with_room_the_pool_finds_all_there_is(seed: int, ways: int) -> None:
    rng = random.Random(seed)
    work = prompts(rng, 25)
    names = [f"p{i}" for i in range(ways)]
    pool = OfflinePool(
        OfflinePoolConfig(
            prefills=dict.fromkeys(names, (500, 500)), decodes={"d": 500}, block_tokens=BLOCK, chunk_tokens=8
        )
    )
    hits = [pool.serve(prompt, rng.randrange(1, 9), rng.choice(names), "d") for prompt in work]
    found = sum(hit.cached_tokens for hit in hits)
    assert found == trace.reachable(work, BLOCK).hit_tokens
    pool.map.check_integrity()
    for name, store in pool.stores.items():
        store.check_integrity()
        assert set(pool.map.keys_of(name)) == set(store.keys())


@pytest.mark.parametrize("extents", [4, 12, 40])
def test_less_room_finds_less_and_stays_consistent(extents: int) -> None:
    rng = random.Random(3)
    work = prompts(rng, 150)
    pool = OfflinePool(
        OfflinePoolConfig(prefills={"p": (20, extents)}, decodes={"d": 2}, block_tokens=BLOCK, chunk_tokens=8)
    )
    found = sum(pool.serve(prompt, 2, "p", "d").cached_tokens for prompt in work)
    assert 0 < found < trace.reachable(work, BLOCK).hit_tokens
    for name, store in pool.stores.items():
        store.check_integrity()
        assert store.stats.sealed <= store.total
        assert set(pool.map.keys_of(name)) == set(store.keys())
