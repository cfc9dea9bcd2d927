from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvmesh.ranks import client
from tests.support.warm_processes import warm_ranks


@pytest.fixture(scope="package")
def forked_ranks() -> Iterator[None]:
    """Ranks are forked from one process that has imported torch."""
    before = client.start_process
    with warm_ranks():
        yield
    client.start_process = before  # of a run of several folders
