"""Shard layouts: sizes, slices, and plans that carry one layout into another (bytes checked by really copying)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvmesh.errors import ConfigError
from kvmesh.kvcache.layout import ShardLayout, plan

LLAMA3_70B = ShardLayout(layers=80, kv_heads=8, block_tokens=64, head_dim=128, itemsize=2)


def test_sizes() -> None:
    assert LLAMA3_70B.kv_bytes_per_token == 327_680
    assert LLAMA3_70B.shard_bytes == 327_680 * 64
    assert LLAMA3_70B.head_bytes == 16 * 1024
    slices = [LLAMA3_70B.layer_slice(layer) for layer in range(80)]
    assert slices[0] == (0, LLAMA3_70B.layer_bytes)
    assert all(a + length == b for (a, length), (b, _) in itertools.pairwise(slices))
    assert sum(slices[-1]) == LLAMA3_70B.shard_bytes
    for layer in (-1, 80):
        with pytest.raises(IndexError):
            LLAMA3_70B.layer_slice(layer)


@pytest.mark.parametrize("field", ["layers", "kv_heads", "block_tokens", "head_dim", "itemsize", "first_head"])
def test_bad_fields_are_named(field: str) -> None:
    good = {"layers": 1, "kv_heads": 1, "block_tokens": 16, "head_dim": 2, "itemsize": 4}
    with pytest.raises(ConfigError, match=f"{field}=-1"):
        ShardLayout(**{**good, field: -1})


def test_equal_layouts_need_one_slice() -> None:
    assert plan(LLAMA3_70B, LLAMA3_70B) == [(0, 0, LLAMA3_70B.shard_bytes)]


def test_blocks_that_differ_are_refused() -> None:
    for field, value in (("block_tokens", 32), ("head_dim", 64), ("itemsize", 4)):
        other = ShardLayout(
            **{**{name: getattr(LLAMA3_70B, name) for name in LLAMA3_70B.__dataclass_fields__}, field: value}
        )
        with pytest.raises(ConfigError, match=f"differ in {field}"):
            plan(LLAMA3_70B, other)


def cut(pp: int, tp: int) -> list[ShardLayout]:
    """The shards of a 4-layer, 4-head model over pp * tp ranks."""
    return [
        ShardLayout(4 // pp, 4 // tp, 16, 2, 2, first_layer=i * (4 // pp), first_head=j * (4 // tp))
        for i in range(pp)
        for j in range(tp)
    ]


@pytest.mark.parametrize(("src", "dst"), list(itertools.product([(1, 1), (2, 1), (1, 2), (2, 4), (4, 4)], repeat=2)))
def test_any_split_into_any_other(src: tuple[int, int], dst: tuple[int, int]) -> None:
    block = np.arange(4 * 2 * 4 * 16 * 2, dtype=np.uint16).reshape(4, 2, 4, 16, 2)

    def part(shard: ShardLayout) -> bytearray:
        layers = slice(shard.first_layer, shard.first_layer + shard.layers)
        heads = slice(shard.first_head, shard.first_head + shard.kv_heads)
        return bytearray(np.ascontiguousarray(block[layers, :, heads]).tobytes())

    for target in cut(*dst):
        landed, written = bytearray(target.shard_bytes), 0
        for source in cut(*src):
            data = part(source)
            for a, b, length in plan(source, target):
                landed[b : b + length] = data[a : a + length]
                written += length
        assert written == target.shard_bytes  # every byte once
        assert landed == part(target)
