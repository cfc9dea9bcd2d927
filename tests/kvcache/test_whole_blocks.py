"""The layout of whole blocks: what ranks of any cut say of the same model, and what a pool node reads in it."""

from __future__ import annotations

import pytest

from kvmesh.kvcache.layout import ShardLayout
from kvmesh.kvcache.whole_blocks import shard_in, shard_text, whole_blocks

WHOLE = ShardLayout(4, 2, 16, 24, 2)
CUTS = {
    "one": (WHOLE,),
    "tp=2": tuple(ShardLayout(4, 1, 16, 24, 2, first_head=head) for head in range(2)),
    "pp=2": tuple(ShardLayout(2, 2, 16, 24, 2, first_layer=layer) for layer in (0, 2)),
    "cp=2": tuple(ShardLayout(4, 2, 16, 24, 2, turn=turn, turns=2) for turn in range(2)),
}


@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_says_the_same(cut: str) -> None:
    shards = CUTS[cut]
    said = whole_blocks(f"0123456789abcdef+7 bfloat16 {shard_text(shards[0])} rank 0/{len(shards)}", shards)
    assert said == ("0123456789abcdef+7 bfloat16 4x2x2x16x24 L0 H0 rank 0/1", WHOLE.shard_bytes)
    assert shard_in(said.layout) == WHOLE


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "bytes",
        "x bfloat16 4x2x1x16x24 L0 H1 rank 0/1",
        "x bfloat16 4x2x2x16x24 L0 H0 T0/2 rank 0/2",
        "x bfloat16 4x2x2x16x24 L0 H0 rank 0/1 | x bfloat16 4x2x2x16x24 L0 H0 rank 0/1",
        "x bfloat16 0x2x2x16x24 L0 H0 rank 0/1",
        "x int8 4x2x2x16x24 L0 H0 rank 0/1",
    ],
)
def test_other_layouts_are_no_whole_blocks(layout: str) -> None:
    assert shard_in(layout) is None
