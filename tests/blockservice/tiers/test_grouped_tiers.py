"""Objects of several cache groups below DRAM: a folder a group, read back by their owner and, in any cut, by others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from kvmesh.blockservice.tiers.parts import TierSettings
from kvmesh.kvcache.announce import Announcer
from kvmesh.kvcache.keys import split
from kvmesh.kvcache.tiers import Tier
from kvmesh.rpc.pb import blocks_pb2 as pb
from tests.support.group_nodes import FAMILY, GROUPS, Desk, GroupNode, desk, group_node
from tests.support.nodes import keys_of, stub, until
from tests.support.s3_server import S3, s3_server

MASKS = [0b001, 0b011, 0b111, 0b011, 0b111, 0b001]


@pytest.fixture
async def bench() -> AsyncIterator[Desk]:
    async with desk() as made:
        yield made


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


def on_disk(path: Path) -> TierSettings:
    return TierSettings(path=path, capacity_bytes=32 << 20, offload_percent=0, staging_percent=50)


def in_objects(s3: S3) -> TierSettings:
    url = f"s3://{s3.bucket()}/kv"
    return TierSettings(path=Path(), capacity_bytes=0, offload_percent=0, staging_percent=50, url=url)


def lower_masks(n: GroupNode, keys: Sequence[bytes]) -> list[int]:
    """What of each key lies below DRAM."""
    lower = n.blocks.lower
    assert lower is not None
    found = [0] * len(keys)
    for source in lower.ranges(keys):
        for block in range(source.first_block, source.first_block + source.blocks):
            found[block] |= source.groups
    return found


async def below(n: GroupNode, bench: Desk, keys: Sequence[bytes], masks: Sequence[int]) -> None:
    """These are below DRAM, and nothing is in it."""
    await n.fill(bench, keys, masks)
    await until(lambda: lower_masks(n, keys) == list(masks))
    await until(lambda: not any(store.usage.held for store in n.store.stores))
    n.evict()


async def go_round(n: GroupNode, bench: Desk, keys: Sequence[bytes], tier: Tier) -> None:
    """Its owner reads some of it back; a reader of another cut leases the rest, which is staged for that."""
    lower = n.blocks.lower
    assert lower is not None and lower.holds(keys[0]) and not lower.holds(keys_of("no")[0])
    some = [mask & 0b011 for mask in MASKS[:3]]
    pulled = await n.ended(n.pull(keys[:3], lower.ranges(keys[:3]), some))
    assert list(pulled.groups) == some and pulled.lower == (0, 1, 2) and pulled.bytes_done == 0, pulled
    await n.check(bench, keys[:3], some)
    other = 3 - len(n.ranks)
    async with group_node("reader", other) as reader:
        got = await reader.ended(reader.pull([*keys, *keys_of("no")], [n.range_of(7, tier)]))
        assert list(got.groups) == MASKS and not got.lower, got
        await reader.check(bench, [*keys, *keys_of("no")], [*MASKS, 0])
    await n.check(bench, keys, MASKS)
    await until(lambda: not n.blocks.leases)
    n.settled()


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_disk_keeps_each_group(bench: Desk, tmp_path: Path, ranks: int) -> None:
    keys = keys_of(*range(6))
    async with group_node("a", ranks, tiers=on_disk(tmp_path)) as a:
        await below(a, bench, keys, MASKS)
        for rank in range(ranks):
            folders = [path for path in (tmp_path / f"rank-{rank}").iterdir() if path.is_dir()]
            assert len(folders) == len(GROUPS), folders
        async with stub(a.address) as rpc:
            told = await rpc.Exists(pb.ExistsRequest(keys=b"".join(keys)))
            assert list(told.groups) == MASKS and set(told.tiers) == {int(Tier.SSD)}
            assert list(told.layouts) == [FAMILY.text]
            assert told.nbytes[1] == a.parts[0].shard_bytes + a.parts[1].shard_bytes
        await go_round(a, bench, keys, Tier.SSD)
        async with stub(a.address) as rpc:
            assert (await rpc.Remove(pb.RemoveBlocksRequest(keys=b"".join(keys[1:3])))).removed == 2
        assert lower_masks(a, keys) == [MASKS[0], 0, 0, *MASKS[3:]]
    # The next life finds and announces the rest, object by object.
    async with group_node("a", ranks, incarnation=8, tiers=on_disk(tmp_path)) as a:
        left = dict(zip([keys[0], *keys[3:]], [MASKS[0], *MASKS[3:]], strict=True))
        (level,) = a.blocks._tiering.levels  # type: ignore[union-attr]
        said = Announcer("a", 8, level.source).next()
        assert said is not None and dict(zip(said.sealed, said.groups, strict=True)) == left
        async with stub(a.address) as rpc:
            parts = {part.tier: part async for part in rpc.ListBlocks(pb.ListBlocksRequest())}
        ssd = parts[Tier.SSD.value]  # type: ignore[index]
        assert dict(zip(split(ssd.keys), ssd.groups, strict=True)) == left
        pulled = await a.ended(a.pull(keys, a.blocks.lower.ranges(keys), MASKS))  # type: ignore[union-attr]
        assert dict(zip([keys[at] for at in pulled.arrived], pulled.groups, strict=True)) == left
        await a.check(bench, keys, [MASKS[0], 0, 0, *MASKS[3:]])


@pytest.mark.parametrize("ranks", [1, 2])
async def test_object_storage_keeps_each_group(bench: Desk, s3: S3, ranks: int) -> None:
    keys, settings = keys_of(*range(6)), in_objects(s3)
    async with group_node("a", ranks, tiers=settings) as a:
        await below(a, bench, keys, MASKS)
        await go_round(a, bench, keys, Tier.OBJECT)
        assert await a.blocks.forget(keys[:1]) == 1
    async with group_node("a", ranks, incarnation=8, tiers=settings) as a:
        assert lower_masks(a, keys) == [0, *MASKS[1:]]
