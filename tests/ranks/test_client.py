"""What a rank's process is started with."""

from __future__ import annotations

import psutil
import pytest

from kvmesh.ranks.client import TUNABLES, RankClient, streaming_copies
from tests.support.nodes import until


def test_the_users_tunables_stay() -> None:
    ours = "glibc.cpu.x86_non_temporal_threshold=0x80000"
    assert streaming_copies({}) == ours
    assert streaming_copies({TUNABLES: "glibc.malloc.tcache_count=3"}) == f"glibc.malloc.tcache_count=3:{ours}"
    theirs = "glibc.cpu.x86_non_temporal_threshold=0x1000000"
    assert streaming_copies({TUNABLES: theirs}) == theirs


@pytest.mark.parametrize("streaming", [False, True])
async def test_only_a_rank_that_stores_copies_past_the_cache(streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TUNABLES, raising=False)
    rank = RankClient(0, lambda *_: None, lambda *_: None)
    rank.spawn(1, streaming)
    try:
        process = psutil.Process(rank.pid)
        # /proc shows an empty environment until the kernel has laid it out in the new program.
        await until(lambda: process.environ())
        found = process.environ().get(TUNABLES, "")
    finally:
        await rank.close()
    assert ("x86_non_temporal_threshold=0x80000" in found) is streaming
