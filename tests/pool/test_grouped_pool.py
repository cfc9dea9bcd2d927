"""A pool node and objects of several cache groups: whole ones, put together from any cut and read into any."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from kvmesh.blockservice.object_family import family_of, part_of
from kvmesh.errors import InvalidRequest
from kvmesh.kvcache.keys import split
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.pool import pool
from kvmesh.pool.config import PoolConfig
from kvmesh.pool.partitions import PoolPartitions
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import store_pb2 as pb_store
from tests.pool.test_pool import Master, master, of_pool, pool_config
from tests.support.group_nodes import ALL, FAMILY, GROUPS, Desk, GroupNode, cuts, desk, group_node
from tests.support.nodes import keys_of, node, stub
from tests.support.services import Running, running, until


@pytest.fixture
async def bench() -> AsyncIterator[Desk]:
    async with desk() as made:
        yield made


async def ask(
    service: Running, holder: GroupNode, keys: Sequence[bytes], masks: bytes = b"", layout: str = FAMILY.text
) -> pb.PullBlocksResponse:
    request = pb.PullBlocksRequest(
        keys=b"".join(keys), holders=[holder.ref], layout=layout, timeout_ms=20_000, groups=masks
    )
    async with stub(service.address) as rpc:
        return await rpc.Pull(request, timeout=30)


async def masks_of(store: Master, key: bytes) -> dict[str, int]:
    """What the master knows of a block: each holder's mask."""
    (told,) = (await store.rpc.Lookup(pb_store.LookupRequest(keys=key))).holders
    return dict(zip(told.store_ids, told.groups or b"\1" * len(told.store_ids), strict=True))


async def test_from_two_ranks_to_the_pool_to_one_and_to_four(bench: Desk) -> None:
    keys = keys_of(*range(6))
    masks = [0b001, 0b011, 0b111, 0b011, 0b111, 0b001]
    async with master() as store, running(pool.run, pool_config(store.address, "shm")) as service:
        async with group_node("one") as one, group_node("four", 4) as four:
            async with group_node("two", 2) as two:
                await two.fill(bench, keys, masks)
                told = await ask(service, two, [*keys, *keys_of("no")], bytes([0b010] * 7))
                assert list(told.held_groups) == [mask & 0b010 for mask in masks] + [0]
                # The holder is asked what there is: a master's order names no layout.
                told = await ask(service, two, keys, layout="")
                assert list(told.held_groups) == masks and told.held == b"\1" * 6
            for reader in (one, four):
                pulled = await reader.ended(reader.pull(keys, [await of_pool(service, 6)]))
                assert list(pulled.groups) == masks, pulled
                await reader.check(bench, keys, masks)
                reader.settled()

            async def heard() -> bool:
                return [(await masks_of(store, key)).get("pool-0") for key in keys] == masks

            await until(heard)
        async with stub(service.address) as rpc:
            status = await rpc.GetStore(pb.GetNodeStoreRequest())
            assert status.layout == FAMILY.text and status.pools.store_blocks == 6 and not status.pools.store_writing
            assert sorted(one.group for one in status.pools.groups) == [0, 1, 2]
            listed = [part async for part in rpc.ListBlocks(pb.ListBlocksRequest())]
            assert dict(zip(split(listed[0].keys), listed[0].groups, strict=True)) == dict(
                zip(keys, masks, strict=True)
            )
            found = await rpc.Exists(pb.ExistsRequest(keys=b"".join(keys)))
            assert list(found.groups) == masks
            assert found.nbytes[2] == sum(FAMILY.object(g).shard_bytes for g in range(len(GROUPS)))
            pin = pb.PinBlocksRequest(keys=b"".join(keys[:3]), kind=pb.PIN_KIND_HARD)
            assert (await rpc.Pin(pin)).done == b"\1" * 3
            assert (await rpc.GetStore(pb.GetNodeStoreRequest())).hard_pinned == 3 + 2 + 1
            assert (await rpc.Remove(pb.RemoveBlocksRequest(keys=b"".join(keys)))).removed == 6
            assert not any((await rpc.Exists(pb.ExistsRequest(keys=b"".join(keys)))).tiers)


async def test_a_pool_keeps_older_blocks_of_the_same_keys_apart(bench: Desk) -> None:
    """Whole blocks of an older version lie there under the same keys: neither is taken for the other."""
    keys = keys_of(*range(3))
    async with (
        master() as store,
        running(pool.run, pool_config(store.address, "shm")) as service,
        node("old", layout="older") as old,
        group_node("new") as new,
        group_node("r", 2) as r,
    ):
        for key in keys[:2]:
            assert None not in old.store.begin([key])
            old.store.seal(key)
        await new.fill(bench, keys[1:])
        async with stub(service.address) as rpc:
            request = pb.PullBlocksRequest(
                keys=b"".join(keys[:2]), holders=[old.ref], layout="older", shard_bytes=old.shard, timeout_ms=9_000
            )
            assert (await rpc.Pull(request, timeout=20)).held == b"\1\1"
            assert list((await ask(service, new, keys)).held_groups) == [0, ALL, ALL]
            whole = pb.LeaseRequest(
                reader="t", holder_incarnation=(await of_pool(service, 1)).incarnation, keys=b"".join(keys),
                lease_ms=1_000, layout="older",
            )  # fmt: skip
            assert (await rpc.Lease(whole)).held == bytes([1, 1, 0])
            whole.layout, whole.any_cut = "another", True
            assert (await rpc.Lease(whole)).held == bytes(3)
        pulled = await r.ended(r.pull(keys, [await of_pool(service, 3)]))
        assert pulled.arrived == (1, 2) and pulled.groups == bytes([ALL] * 2), pulled
        await r.check(bench, keys, [0, ALL, ALL])


async def test_an_instance_of_two_ranks_offloads(bench: Desk) -> None:
    """Its coldest objects, group by group, above the threshold; and pulls them back when its own have gone."""
    keys = keys_of(*range(12))
    async with (
        master() as store,
        running(pool.run, pool_config(store.address, "shm")) as service,
        group_node("a", 2, offload_percent=25, total=16) as a,
    ):
        await a.fill(bench, keys, [0b011] * 12)
        a.join(store.address)
        await until(lambda: _sees(a))
        async with stub(service.address) as rpc:

            async def copied() -> bool:
                told = await rpc.Exists(pb.ExistsRequest(keys=b"".join(keys)))
                return sum(mask == 0b011 for mask in told.groups) >= 8

            await until(copied)
            told = await rpc.Exists(pb.ExistsRequest(keys=b"".join(keys)))
        there = [key for key, mask in zip(keys, told.groups, strict=True) if mask == 0b011]
        a.evict()
        pulled = await a.ended(a.pull(there, [await of_pool(service, 12)], [0b011] * len(there)))
        assert len(pulled.arrived) == len(there), pulled
        await a.check(bench, there, [0b011] * len(there))


async def _sees(a: GroupNode) -> bool:
    assert a.blocks._offload is not None
    return bool(a.blocks._offload.pools)


async def test_a_pool_nodes_disk_keeps_each_group_and_gives_it_to_any_cut(bench: Desk, tmp_path: Path) -> None:
    keys = keys_of(*range(4))
    masks = [0b001, 0b011, 0b111, 0b111]

    def config(address: str) -> PoolConfig:
        return PoolConfig(
            instance_id="pool-0",
            store=address,
            memory_mb=4,
            transports="shm",
            announce_ms=10,
            ssd_path=str(tmp_path),
            ssd_capacity_mb=16,
            ssd_offload_percent=0,
            ssd_layouts=4,
        )

    async with master() as store:
        async with running(pool.run, config(store.address)) as service, group_node("a", 2) as a:
            await a.fill(bench, keys, masks)
            assert list((await ask(service, a, keys)).held_groups) == masks
            async with stub(service.address) as rpc:

                async def written() -> bool:
                    told = await rpc.GetStore(pb.GetNodeStoreRequest())
                    return bool(told.tiers[0].blocks == sum(mask.bit_count() for mask in masks))

                await until(written)
        assert len([path for path in (tmp_path / "rank-0").iterdir() if path.is_dir()]) == len(GROUPS)
        async with running(pool.run, config(store.address)) as service, group_node("b") as b:
            async with stub(service.address) as rpc:
                told = await rpc.Exists(pb.ExistsRequest(keys=b"".join(keys)))
                assert list(told.groups) == masks and set(told.tiers) == {2} and list(told.layouts) == [FAMILY.text]
            pulled = await b.ended(b.pull(keys, [await of_pool(service, 4)]))
            assert list(pulled.groups) == masks, pulled
            await b.check(bench, keys, masks)
            async with stub(service.address) as rpc:
                assert (await rpc.Remove(pb.RemoveBlocksRequest(keys=b"".join(keys[2:])))).removed == 2
        async with running(pool.run, config(store.address)) as service, stub(service.address) as rpc:
            told = await rpc.Exists(pb.ExistsRequest(keys=b"".join(keys)))
            assert list(told.groups) == [*masks[:2], 0, 0], "removed in every group's folder"


# ── pure ─────────────────────────────────────────────────────────────────────────────────────────────


def partitions() -> PoolPartitions:
    return PoolPartitions(4096, 4 << 20, high_percent=95, low_percent=90, lease_seed=1)


def put(parts: PoolPartitions, group: int, keys: Sequence[bytes]) -> NodeStore:
    place = parts.groups_of(FAMILY.text)[group]
    found = parts.room(place.layout, place.shard_bytes, len(keys))
    assert None not in found.begin(keys)
    for key in keys:
        found.seal(key)
    return found.store


def test_masks_of_what_is_here_and_what_has_gone_whole() -> None:
    parts, (a, b, c) = partitions(), keys_of(*"abc")
    plain = parts.room("another model", 8192, 1)
    assert plain.begin([c]) != [None] and plain.seal(c)
    assert parts.take_changes().groups == b"" and parts.masks([c]) == b"", "blocks of one object have no masks"
    put(parts, 0, [a])
    windows = put(parts, 1, [a, b])
    changes = parts.take_changes()
    assert dict(zip(changes.sealed, changes.groups, strict=True)) == {a: 0b011, b: 0b010}
    assert parts.masks([a, b, c, b"-" * 16]) == bytes([0b011, 0b010, 1, 0])
    windows.remove([a, b])
    changes = parts.take_changes()
    assert (changes.sealed, changes.groups, changes.removed) == ((a,), bytes([0b001]), (b,))
    assert [part.group for part in parts.family(FAMILY.text)] == [0, 1]
    parts.settle()
    assert [part.group for part in parts.family(FAMILY.text)] == [0], "what holds nothing gives its memory back"


def test_a_quota_counts_anchors_and_takes_the_rest_along() -> None:
    parts = partitions()
    keys = [b"tagA" + bytes([at]) * 12 for at in range(4)]
    anchors, windows, states = (put(parts, group, keys) for group in range(3))
    assert parts.quotas.count(b"tagA") == 4
    states.pin_hard(keys)
    (held,) = windows.hold(keys[:1])
    parts.quotas.limit({b"tagA": 0, b"tagB": 1}, [anchors])
    parts.quotas.limit({b"tagA": 1}, [anchors])
    while parts.quotas.enforce():
        pass
    (left,) = anchors.keys()
    assert windows.keys() == [left] and len(states.keys()) == 4, "what is pinned hard stays"
    windows.release([held])
    for store in (anchors, windows, states):
        store.check_integrity()


@pytest.mark.parametrize("changed", [FAMILY.part(1, cuts(2, 1)), FAMILY.part(0)])
def test_only_whole_objects_of_their_size_are_kept(changed: str) -> None:
    with pytest.raises(InvalidRequest, match="whole objects"):
        partitions().room(changed, FAMILY.object(1).shard_bytes, 1)


def test_a_family_is_what_its_text_says() -> None:
    read = family_of(FAMILY.text)
    assert read is not None and read.text == FAMILY.text and read.itemsizes == FAMILY.itemsizes
    assert [read.object(g) for g in range(3)] == [FAMILY.object(g) for g in range(3)]
    assert [(g.name, g.kind, g.keep, g.optional) for g in read.groups] == [
        (g.name, g.kind, g.keep, g.optional) for g in GROUPS
    ]
    for group in range(3):
        for ranks in (1, 2, 4):
            said = part_of(FAMILY.part(group, cuts(ranks, group)))
            assert said is not None and said.group == group and said.cuts == cuts(ranks, group)
    assert read.needed(1, 6) == range(3, 6) and read.needed(2, 6) == range(5, 6)
    for text in ("", "bytes", "fp float32 2x2x1x16x32 L0 H0 rank 0/1", FAMILY.text + " ", FAMILY.text[:-1] + "0x"):
        assert family_of(text) is None and part_of(text + " #0") is None
    assert part_of(FAMILY.text + " #3") is None and part_of(FAMILY.text + " #0 L0") is None
