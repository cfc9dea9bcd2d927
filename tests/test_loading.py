"""What outlives a full collection is looked over no more until the process ends; calls in progress are waited for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from kvmesh.loading import COLLECT_EVERY, EVERY_S, PATIENCE_S, LastingHeap, rare_collections


class Node:
    """Something that can be in a cycle."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def heap() -> Iterator[LastingHeap]:
    gc.collect()
    gc.disable()  # no collection but those of the heap
    heap = LastingHeap()
    heap.tick(3, PATIENCE_S)  # what is there by now is frozen; 3 is none
    try:
        yield heap
    finally:
        gc.enable()
        heap.close()


@pytest.mark.slow
def test_old_objects_are_frozen_and_found_again_in_the_end(heap: LastingHeap) -> None:
    kept = Node()
    seen = weakref.ref(kept)
    before = gc.get_freeze_count()
    heap.tick(3, PATIENCE_S + EVERY_S)
    assert gc.get_freeze_count() > before
    del kept
    gc.collect()
    assert seen() is not None, "a cycle that got old is garbage nobody looks for"
    young = weakref.ref(Node())
    heap.tick(3, PATIENCE_S + 2 * EVERY_S)
    assert young() is None
    heap.close()
    gc.collect()
    assert seen() is None


def test_calls_in_progress_are_not_frozen(heap: LastingHeap) -> None:
    now, kept = PATIENCE_S, Node()
    seen, before = weakref.ref(kept), gc.get_freeze_count()
    for _ in range(9):
        now += EVERY_S
        heap.tick(4, now)
    assert gc.get_freeze_count() <= before
    del kept
    heap.tick(3, now)
    assert seen() is None, "its call was over before anything was frozen"


def test_what_is_always_there_counts_as_none(heap: LastingHeap) -> None:
    """Twice as many tasks for good: waited for once."""
    heap.tick(6, 2 * PATIENCE_S)
    before = gc.get_freeze_count()
    kept = Node()
    heap.tick(6, 2 * PATIENCE_S + EVERY_S)
    assert gc.get_freeze_count() > before
    assert kept.me is kept


def test_collections_are_apart(heap: LastingHeap) -> None:
    young = weakref.ref(Node())
    heap.tick(3, PATIENCE_S + 0.9 * EVERY_S)
    assert young() is not None
    heap.tick(3, PATIENCE_S + EVERY_S)
    assert young() is None


def test_rare_collections_bound_what_lies_about_in_cycles() -> None:
    before = gc.get_threshold()
    with rare_collections():
        gc.collect()
        nodes = [weakref.ref(Node()) for _ in range(COLLECT_EVERY // 4)]
        assert all(node() is not None for node in nodes), "they are too few for a collection"
        del nodes
        first = weakref.ref(Node())
        kept = [Node() for _ in range(2 * COLLECT_EVERY)]
        assert first() is None
        del kept
    assert gc.get_threshold() == before
