"""What outlives a full collection is not looked over again, until the process ends."""

from __future__ import annotations

import gc
import weakref

from kvmesh.loading import LastingHeap


class Node:
    """Something that can be in a cycle."""

    def __init__(self) -> None:
        self.me = self


def test_old_objects_are_frozen_and_found_again_in_the_end() -> None:
    gc.collect()
    before = gc.get_freeze_count()
    heap = LastingHeap()
    try:
        kept = Node()
        seen = weakref.ref(kept)
        gc.collect()
        assert gc.get_freeze_count() > before
        del kept
        gc.collect()
        assert seen() is not None, "a cycle that got old is garbage nobody looks for"
        young = weakref.ref(Node())
        gc.collect()
        assert young() is None
    finally:
        heap.close()
    gc.collect()
    assert seen() is None


def test_minor_collections_freeze_nothing() -> None:
    gc.collect()
    heap = LastingHeap()
    try:
        before = gc.get_freeze_count()
        gc.collect(0)
        gc.collect(1)
        assert gc.get_freeze_count() == before
    finally:
        heap.close()
