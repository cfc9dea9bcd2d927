"""For all tests: threads of numeric libraries are capped, and whole meshes come last."""

from __future__ import annotations

import gc
import os

import pytest

# Modules are no garbage, and there are many: nobody looks them over while they are imported, nor between tests.
gc.disable()
# Before torch is imported anywhere, and inherited by every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What fails in milliseconds is told before meshes are started, and the one mesh that many share lives at the end
    only; the order is otherwise as written."""

    def last(item: pytest.Item) -> tuple[bool, bool]:
        return item.get_closest_marker("mesh") is not None, "small_mesh" in getattr(item, "fixturenames", ())

    items.sort(key=last)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
