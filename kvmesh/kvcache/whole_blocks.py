"""The layout of whole blocks, as a text that pool nodes understand: what they keep of a model with one cache group, so
that ranks of any cut write and read it.

    <fingerprint, epoch of the weights> <dtype> <layers>x<planes>x<heads>x<tokens>x<dim> L0 H0 rank 0/1

It is the layout of an instance of one rank. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from kvmesh.errors import ConfigError
from kvmesh.kvcache.layout import ShardLayout

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SHAPE = r"(\d{1,6})x([12])x(\d{1,6})x(\d{1,6})x(\d{1,9})"
_WHOLE = re.compile(rf"[^|#]+ ({'|'.join(ITEMSIZES)}) {_SHAPE} L0 H0 rank 0/1")


def shard_text(shard: ShardLayout) -> str:
    """Returns a rank's part of a block in words."""
    dims = f"{shard.layers}x{shard.planes}x{shard.kv_heads}x{shard.block_tokens}x{shard.head_dim}"
    turn = f" T{shard.turn}/{shard.turns}" if shard.turns > 1 else ""
    return f"{dims} L{shard.first_layer} H{shard.first_head}{turn}"


class WholeBlocks(NamedTuple):
    """Is the layout of whole blocks, and the bytes of one."""

    layout: str
    nbytes: int


def whole_blocks(layout: str, shards: Sequence[ShardLayout]) -> WholeBlocks:
    """Returns how whole blocks lie, of which ranks have these shards; `layout` is the first rank's."""
    layers = max(shard.first_layer + shard.layers for shard in shards)
    heads = max(shard.first_head + shard.kv_heads for shard in shards)
    whole = replace(shards[0], layers=layers, kv_heads=heads, first_layer=0, first_head=0, turn=0, turns=1)
    begin = layout.rpartition(f" {shard_text(shards[0])} ")[0]
    return WholeBlocks(f"{begin} {shard_text(whole)} rank 0/1", whole.shard_bytes)


@lru_cache(maxsize=256)
def shard_in(layout: str) -> ShardLayout | None:
    """Returns the whole block that a layout says; None for the layout of anything else."""
    found = _WHOLE.fullmatch(layout)
    if found is None:
        return None
    layers, planes, heads, tokens, dim = map(int, found.groups()[1:])
    try:
        return ShardLayout(layers, heads, tokens, dim, ITEMSIZES[found[1]], planes=planes)
    except ConfigError:
        return None
