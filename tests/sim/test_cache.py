"""Hit rates of one cache against brute force, and against the published table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import ConfigError
from kvmesh.kvcache.eviction import POLICIES
from kvmesh.sim import cache
from kvmesh.sim.workloads import trace
from tests.support.naive_order import NaiveOrder
from tests.support.paths import ROOT

# Prompts as paths of a tree: an id stands for the whole path to it, as in a trace.
PATHS = st.lists(st.text("abc", min_size=1, max_size=6), max_size=40)
CONVERSATION = "conversation_trace.jsonl"
CAPACITIES = (1_000, 5_859, 10_000, 30_000, 50_000, 100_000)
PUBLISHED = {
    "lru": (0.0445, 0.1355, 0.2112, 0.3257, 0.3546, 0.3637),
    "lfu": (0.0481, 0.0966, 0.1318, 0.2759, 0.3438, 0.3631),
}


def prompts(paths: Sequence[str]) -> list[tuple[int, ...]]:
    ids: dict[str, int] = {}
    return [tuple(ids.setdefault(path[: i + 1], len(ids)) for i in range(len(path))) for path in paths]


def brute_force(asked: Sequence[Sequence[int]], policy: str, capacity: int | None) -> tuple[int, int]:
    """(hits, evicted)"""
    order = NaiveOrder(policy, trace.TRACE_BLOCK)
    hits = evicted = 0
    for ids in asked:
        hits += next((at for at, block in enumerate(ids) if block not in order.entries), len(ids))
        for block in ids:
            if block not in order.entries:
                if len(order.entries) == capacity:
                    evicted += len(order.evict(1))
                order.admit(block, len(ids))
            order.use(block, len(ids))
            order.mark_idle(block)
    return hits, evicted


@given(PATHS, st.integers(1, 12), st.sampled_from(POLICIES))
@settings(max_examples=300, deadline=None)
def test_it_finds_what_brute_force_finds(paths: list[str], capacity: int, policy: str) -> None:
    asked = prompts(paths)
    found = cache.run(asked, policy, capacity)
    assert (found.hits, found.evicted) == brute_force(asked, policy, capacity)
    assert found.blocks == sum(map(len, asked))
    best = cache.run(asked, policy, None)
    assert best.hits == trace.ideal([(ids, len(ids)) for ids in asked], 1).hit_blocks
    assert best.evicted == 0 and found.saved <= best.saved <= best.cost


def test_a_small_trace_by_hand() -> None:
    """Three blocks of room; [1 2] twice, then [3 4], then [1 2] again.

    lru: the second [1 2] hits both; 3 takes the free place, 4 that of 1. The third [1 2] finds no head: 0.
    lfu: 1 and 2 have two uses, 3 has one: 4 takes its place. The third [1 2] hits both."""
    asked = [(1, 2), (1, 2), (3, 4), (1, 2)]
    assert (cache.run(asked, "lru", 3).hits, cache.run(asked, "lfu", 3).hits) == (2, 4)
    assert cache.run(asked, "lru", 3).hit_rate == 2 / 8
    assert cache.run([], "lru", 3).hit_rate == 0


def test_a_hole_ends_a_prefix() -> None:
    assert cache.run([(1, 2, 3), (1, 9, 3)], "lru", None).hits == 1


def test_compute_saved_grows_with_the_square_of_a_prefix() -> None:
    """64 blocks of 512 tokens are where attention costs as much as the rest: such a prompt costs 1.5 times as much."""
    assert cache.recompute_cost(64, 512) == 64 * 1.5
    once = cache.run([tuple(range(64))] * 2, "length", None)
    assert once.compute_saved == 0.5


def test_progress_is_told() -> None:
    told: list[int] = []
    cache.run([tuple(range(i * 1000, i * 1000 + 1000)) for i in range(20)], "lru", 10, progress=told.append)
    assert told == sorted(told) and told[-1] > 16_000 and len(told) < 6


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(ConfigError, match="capacity=0: must be at least 1 block"):
        cache.run([], "lru", 0)
    with pytest.raises(ConfigError, match="eviction='fifo'"):
        cache.run([], "fifo", 1)


@pytest.fixture(scope="module")
def conversation() -> list[tuple[int, ...]]:
    """The published trace: in $TEST_TRACES, or in shared/traces beside the repository or above it."""
    folders = [Path(os.environ["TEST_TRACES"])] if "TEST_TRACES" in os.environ else []
    folders += [base / "shared" / "traces" for base in (ROOT, ROOT.parent)]
    for file in (folder / CONVERSATION for folder in folders):
        if file.is_file():
            return [request.hash_ids for request in trace.read(file)]
    pytest.skip(f"{CONVERSATION} is neither in $TEST_TRACES nor in shared/traces")


@pytest.mark.parametrize(
    "policy", [policy if policy == "lru" else pytest.param(policy, marks=pytest.mark.long) for policy in PUBLISHED]
)
@pytest.mark.slow
def test_the_published_table(conversation: list[tuple[int, ...]], policy: str) -> None:
    found = [cache.run(conversation, policy, capacity) for capacity in CAPACITIES]
    assert [round(one.hit_rate, 4) for one in found] == list(PUBLISHED[policy])


@pytest.mark.slow
def test_the_published_ideal_and_what_length_is_for(conversation: list[tuple[int, ...]]) -> None:
    best = cache.run(conversation, "lru", None)
    assert (best.blocks, round(best.hit_rate, 4)) == (288_500, 0.3664)
    lru, length = (cache.run(conversation, policy, 5_859) for policy in ("lru", "length"))
    assert length.compute_saved > 1.1 * lru.compute_saved
    assert length.hit_rate > lru.hit_rate
