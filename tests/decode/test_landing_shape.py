"""Where an instance of several ranks lets KV land: in pages only if peers reach those of every rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.decode.core import shape_of


def front(*direct: bool) -> Any:
    """What `shape_of` reads of a front: its ranks' Ready."""
    ranks = [
        SimpleNamespace(
            ready=SimpleNamespace(
                num_pages=8,
                num_extents=8,
                direct_landing=each,
                engine_name=f"decode-0/{at}@1",
                shard_bytes=4096,
                page_base_offset=4096 if each else 0,
                extent_base_offset=1 << 20,
                groups=(),
            )
        )
        for at, each in enumerate(direct)
    ]
    config = SimpleNamespace(block_tokens=16)
    return SimpleNamespace(ranks=ranks, config=config, max_context_tokens=128, cache_groups=())


@pytest.mark.parametrize(
    ("direct", "host_landing", "lands"),
    [
        ((True, True), False, True),
        ((True, False), False, False),
        ((False, True), False, False),
        ((True, True), True, False),
    ],
)
def test_one_rank_whose_pages_are_not_reached_keeps_all_in_host_memory(
    direct: tuple[bool, ...], host_landing: bool, lands: bool
) -> None:
    assert shape_of(front(*direct), host_landing).direct_landing is lands
