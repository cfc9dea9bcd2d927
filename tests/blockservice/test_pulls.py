"""Blocks read from a holder that cuts them otherwise: every byte of ours comes from its place, whatever came when."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from kvmesh.blockservice.pulls import by_block, cut_reads
from kvmesh.kvcache.groups import plan_group
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.ranks import protocol as m

LAYERS, HEADS, TOKENS, DIM = 3, 4, 16, 8


def cut(ranks: int) -> tuple[ShardLayout, ...]:
    """As tensor parallel does: with more ranks than heads, neighbours are replicas."""
    heads = max(HEADS // ranks, 1)
    return tuple(ShardLayout(LAYERS, heads, TOKENS, DIM, 4, first_head=HEADS * rank // ranks) for rank in range(ranks))


def shard(whole: np.ndarray, layout: ShardLayout) -> np.ndarray:
    """One rank's bytes of one block `[layers, 2, heads, tokens, dim]`."""
    part = whole[:, :, layout.first_head : layout.first_head + layout.kv_heads]
    return np.frombuffer(np.ascontiguousarray(part).tobytes(), dtype=np.uint8)


@pytest.mark.parametrize(("holder", "ours"), [(2, 1), (1, 2), (2, 4), (8, 2), (8, 1), (1, 8)])
def test_every_byte_comes_from_its_place(holder: int, ours: int) -> None:
    """Five blocks, in extents that lie apart in both segments."""
    blocks = 5
    whole = np.random.default_rng(7).random((blocks, LAYERS, 2, HEADS, TOKENS, DIM), dtype=np.float32)
    writers, readers = cut(holder), cut(ours)
    there = [[1000 + (blocks - at) * 2 * layout.shard_bytes for at in range(blocks)] for layout in writers]
    here = [[64 + at * 3 * layout.shard_bytes for at in range(blocks)] for layout in readers]
    segments = [np.zeros(1000 + 12 * layout.shard_bytes, dtype=np.uint8) for layout in writers]
    memories = [np.full(64 + 15 * layout.shard_bytes, 0xEE, dtype=np.uint8) for layout in readers]
    for layout, places, segment in zip(writers, there, segments, strict=True):
        for at, place in enumerate(places):
            segment[place : place + layout.shard_bytes] = shard(whole[at], layout)
    reads = cut_reads(plan_group(writers, readers), there, here)
    assert {read.writer for read in reads} == set(range(holder)), "replicas take turns"
    for read in reads:
        for source, target, size in zip(read.offsets, read.landing, read.sizes, strict=True):
            assert (memories[read.reader][target : target + size] == 0xEE).all(), "read twice"
            memories[read.reader][target : target + size] = segments[read.writer][source : source + size]
    for layout, places, memory in zip(readers, here, memories, strict=True):
        for at, place in enumerate(places):
            assert (memory[place : place + layout.shard_bytes] == shard(whole[at], layout)).all()
            memory[place : place + layout.shard_bytes] = 0xEE
        assert (memory == 0xEE).all(), "written outside its place"


def test_a_block_has_arrived_when_every_run_of_it_has() -> None:
    plan = plan_group(cut(2), cut(1))
    offsets = [[0, 10_000, 20_000]] * 2
    first, second = cut_reads(plan, offsets, [[0, 30_000, 60_000]])
    assert (first.writer, second.writer) == (0, 1)
    runs = len(first.blocks) // 3
    assert runs == LAYERS * 2  # K and V of each layer
    rng, everything = random.Random(3), tuple(range(len(first.blocks)))
    said = m.PullEnded(1, everything, "", 1, 2, 3)
    assert by_block(None, first, 3) is None
    whole = by_block(said, first, 3)
    assert whole is not None and whole.arrived == (0, 1, 2)
    lost = rng.choice([at for at in everything if first.blocks[at] == 1])
    partly = msgspec.structs.replace(said, arrived=tuple(at for at in everything if at != lost))
    found = by_block(partly, first, 3)
    assert found is not None and found.arrived == (0, 2)
    nothing = by_block(msgspec.structs.replace(said, arrived=()), first, 3)
    assert nothing is not None and nothing.arrived == ()
