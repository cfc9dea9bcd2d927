"""Meshes of real processes. `small_mesh` is shared by all that ask for it, who come last; `mesh` makes one to order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.mesh.harness import Running, running_mesh
from tests.support.paths import ROOT


@pytest.fixture(scope="session")
def demo_path() -> Path:
    return ROOT / "examples" / "demo-model"


@pytest.fixture
def mesh(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Running]]:
    def make(model: Path, **kwargs: Any) -> AbstractAsyncContextManager[Running]:
        return running_mesh(model, tmp_path / "run", **kwargs)

    return make


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def small_mesh(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """The demo model on 1 + 1 with few pages, so that requests wait, are preempted and share."""
    flags = {"*": {"num_pages": 96, "num_extents": 48}, "conductor": {"slo_tbt_ms": 60_000}}  # on a busy machine, too
    async with running_mesh(demo_path, tmp_path_factory.mktemp("small"), flags=flags) as running:
        yield running
