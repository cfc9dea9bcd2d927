"""Objects of several cache groups between instances of any cut: leased under one number, read, every byte compared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvmesh.blockservice.servicer import NodeStoreServicer
from kvmesh.kvcache.announce import Announcer
from kvmesh.rpc.pb import blocks_pb2 as pb
from tests.support.group_nodes import ALL, FAMILY, GROUPS, Desk, GroupNode, cuts, desk, group_node
from tests.support.nodes import keys_of, node, stub, until


@pytest.fixture
async def bench() -> AsyncIterator[Desk]:
    async with desk() as made:
        yield made


async def lease(n: GroupNode, keys: Sequence[bytes], masks: Sequence[int], **changes: Any) -> pb.LeaseResponse:
    request = pb.LeaseRequest(
        reader="test",
        holder_incarnation=n.incarnation,
        keys=b"".join(keys),
        lease_ms=30_000,
        layout=FAMILY.text,
        groups=bytes(masks),
    )
    for name, value in changes.items():
        setattr(request, name, value)
    async with stub(n.address) as rpc:
        return await rpc.Lease(request, timeout=20)


async def release(n: GroupNode, lease_id: int) -> bool:
    async with stub(n.address) as rpc:
        return (await rpc.ReleaseLease(pb.ReleaseBlocksRequest(lease_id=lease_id), timeout=20)).held == b"\1"


@pytest.mark.parametrize(("holder", "reader"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2)])
async def test_any_cut_to_any_cut(bench: Desk, holder: int, reader: int) -> None:
    """What lies there arrives, object by object: a window's older objects, every second state and one block lack."""
    keys, lacks = keys_of(*range(6)), keys_of("nowhere")
    masks = [0b001, 0b101, 0b001, 0b111, 0b011, 0b111]
    async with group_node("a", holder) as a, group_node("b", reader) as b:
        await a.fill(bench, keys, masks)
        await a.check(bench, keys, masks)
        pulled = await b.ended(b.pull([*keys, *lacks], [a.range_of(7)]))
        assert pulled.arrived == tuple(range(6)) and list(pulled.groups) == masks, pulled
        await b.check(bench, [*keys, *lacks], [*masks, 0])
        assert (
            b.blocks.pulled_bytes
            == pulled.bytes_done
            == sum(b.parts[g].shard_bytes * reader for mask in masks for g in range(len(GROUPS)) if mask >> g & 1)
        )
        await until(lambda: not a.blocks.leases)
        a.settled()
        b.settled()


async def test_each_group_from_who_has_it(bench: Desk) -> None:
    """Two holders in two cuts have other groups; a third lies of itself, and a fourth is asked for the rest."""
    keys = keys_of(*range(4))
    async with group_node("a") as a, group_node("b", 2) as b, group_node("c") as c, group_node("r") as r:
        await a.fill(bench, keys, [0b001] * 4)
        await b.fill(bench, keys, [0b111] * 2 + [0b011] * 2)
        await c.fill(bench, keys[2:], [0b100] * 2)
        ranges = [a.range_of(4, groups=0b001), b.range_of(4, groups=0b110), c.range_of(4)]
        pulled = await r.ended(r.pull(keys, ranges))
        assert pulled.groups == bytes([ALL] * 4), pulled
        await r.check(bench, keys)
        assert b.store.stores[0].stats.leased_blocks == 0, "its range names two other groups"


async def test_a_lease_is_confirmed_when_every_part_of_it_is_open(bench: Desk) -> None:
    keys = keys_of(*range(3))
    async with group_node("a") as a:
        await a.fill(bench, keys)
        first, second = await lease(a, keys, [ALL] * 3), await lease(a, keys, [ALL] * 3)
        assert first.held_groups == bytes([ALL] * 3) and first.held == b"\1" * 3
        assert a.blocks.leases == 2 * len(GROUPS)
        assert await release(a, first.lease_id)
        a.store.stores[1].drop_all()  # this group's memory is gone
        async with stub(a.address) as rpc:
            with pytest.raises(Exception, match="over"):
                await rpc.RenewLease(pb.RenewBlocksRequest(lease_id=second.lease_id, lease_ms=9), timeout=20)
        assert not await release(a, second.lease_id)
        assert not a.blocks.leases
        third = await lease(a, keys, [ALL] * 3)
        assert third.held_groups == bytes([0b101] * 3)
        assert [group.group for group in third.ranks[0].groups] == [0, 2] and not third.ranks[0].offset
        assert await release(a, third.lease_id)


async def test_what_was_read_does_not_count_when_one_group_of_it_is_not_confirmed(
    bench: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(*range(3))
    async with group_node("a") as a, group_node("b") as b:
        await a.fill(bench, keys)
        confirm = a.blocks.leasing.release

        def late(lease_id: int) -> bool:
            a.store.stores[2].drop_all()
            return confirm(lease_id)

        monkeypatch.setattr(a.blocks.leasing, "release", late)
        pulled = await b.ended(b.pull(keys, [a.range_of(3)]))
        assert pulled.arrived == () and "confirmed" in pulled.cause, pulled
        b.settled()


@pytest.mark.parametrize("older", [False, True])
async def test_a_holder_that_knows_of_no_groups_holds_nothing(older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of an older version, at a holder of this version or of that one, under the same keys and even the same
    layout: whole blocks."""
    keys = keys_of(*range(3))
    serve = NodeStoreServicer.Lease

    async def deaf(self: NodeStoreServicer, request: pb.LeaseRequest, context: Any) -> pb.LeaseResponse:
        request.groups = b""
        return await serve(self, request, context)

    if older:
        monkeypatch.setattr(NodeStoreServicer, "Lease", deaf)
    async with node("old", layout=FAMILY.text, shard=FAMILY.object(0).shard_bytes) as old, group_node("b") as b:
        extents = old.store.begin(keys)
        assert None not in extents
        for key in keys:
            old.store.seal(key)
        pulled = await b.ended(b.pull(keys, [old.range_of(0, 3)]))
        assert pulled.arrived == () and "holds none" in pulled.cause, pulled
        assert old.store.stats.leases_given == older, "what an older holder leases is not believed"
        await until(lambda: not old.store.stats.leases)
        b.settled()


async def test_who_names_no_groups_gets_nothing(bench: Desk) -> None:
    keys = keys_of(*range(2))
    async with group_node("a", 2) as a:
        await a.fill(bench, keys)
        for layout in ("", FAMILY.text, a.parts[0].layout, "another"):
            for any_cut in (False, True):
                told = await lease(a, keys, [], layout=layout, any_cut=any_cut)
                assert not told.lease_id and not told.ranks and told.held == bytes(2), (layout, told)
        assert (await lease(a, keys, [ALL] * 2, layout="another")).held_groups == bytes(2)
        told = await lease(a, keys, [0b1000, 0], layout=FAMILY.text)
        assert told.held_groups == bytes(2) and not told.lease_id
        with pytest.raises(Exception, match="masks for 2 keys"):
            await lease(a, keys, [ALL])


async def test_no_plan_joins_two_groups(bench: Desk) -> None:
    keys = keys_of(*range(2))
    async with group_node("a") as a, group_node("b", 2) as b:
        await a.fill(bench, keys)
        a.parts[1].shards = tuple(replace(cut, group=0) for cut in a.parts[1].shards)
        pulled = await b.ended(b.pull(keys, [a.range_of(2)], [0b010] * 2))
        assert pulled.arrived == () and "group" in pulled.cause, pulled
        # Nor is a part believed that a rank tells of a group that the reader did not ask for.
        a.parts[1].shards = cuts(1, 1)
        told = await b.ended(b.pull(keys, [a.range_of(2)], [0b010] * 2))
        assert told.groups == bytes([0b010] * 2)
        await until(lambda: not a.blocks.leases)
        b.settled()


async def test_checksums_of_every_group(bench: Desk) -> None:
    import xxhash

    from tests.support.group_nodes import piece

    keys = keys_of(*range(2))
    async with group_node("a", 2) as a:
        await a.fill(bench, keys, [0b111, 0b011])
        told = await lease(a, keys, [ALL] * 2, want_checksums=True)
        for rank in told.ranks:
            for group in rank.groups:
                held = [key for key, mask in zip(keys, told.held_groups, strict=True) if mask >> group.group & 1]
                wanted = [xxhash.xxh3_64_intdigest(piece(key, a.cuts[group.group][rank.rank])) for key in held]
                assert list(group.checksum) == wanted and len(group.offset) == len(held)
        assert await release(a, told.lease_id)


async def test_what_is_here_pinned_listed_and_removed(bench: Desk) -> None:
    keys = keys_of(*range(6))
    masks = [0b111, 0b011, 0b111, 0b011, 0b111, 0b001]
    async with group_node("a") as a, stub(a.address) as rpc:
        await a.fill(bench, keys, masks)
        told = await rpc.Exists(pb.ExistsRequest(keys=b"".join([*keys, *keys_of("no")]), want_pinned=True))
        assert list(told.groups) == [*masks, 0] and list(told.tiers) == [1] * 6 + [0]
        assert list(told.layouts) == [FAMILY.text] and told.pinned == bytes(7)
        sizes = [part.shard_bytes for part in a.parts]
        assert told.nbytes[1] == sizes[0] + sizes[1] and told.nbytes[5] == sizes[0]
        parts = [part async for part in rpc.ListBlocks(pb.ListBlocksRequest())]
        listed = dict(zip(a.store.keys(), parts[0].groups, strict=True))
        assert parts[0].keys == b"".join(a.store.keys()) and [listed[key] for key in keys] == masks
        # A hit at the end of 4 blocks needs all anchors, the last three windows, and the state of block 3, which lacks.
        pin = pb.PinBlocksRequest(keys=b"".join(keys[:4]), layout=FAMILY.text, kind=pb.PIN_KIND_HARD)
        assert (await rpc.Pin(pin)).done == b"\1" * 4
        assert a.store.stores[0].pinned_hard(keys) == [True] * 4 + [False] * 2
        assert a.store.stores[1].pinned_hard(keys) == [False, True, True, True, False, False]
        assert not any(a.store.stores[2].pinned_hard(keys))
        assert (await rpc.Exists(pb.ExistsRequest(keys=b"".join(keys), want_pinned=True))).pinned == b"\1" * 4 + bytes(
            2
        )
        pin.kind = pb.PIN_KIND_NONE
        assert (await rpc.Pin(pin)).done == b"\1" * 4
        assert not any(any(store.pinned_hard(keys)) for store in a.store.stores)
        held = await lease(a, keys[:1], [0b100])
        gone = await rpc.Remove(pb.RemoveBlocksRequest(keys=b"".join(keys[:2]), spare_leased=True))
        assert gone.removed == 1 and gone.spared == bytes([2, 0]), "leased in one group alone"
        assert await release(a, held.lease_id)
        assert (await rpc.Remove(pb.RemoveBlocksRequest(keys=b"".join(keys)))).removed == 5
        assert not a.store.keys()
        status = await rpc.GetStore(pb.GetNodeStoreRequest())
        assert status.layout == FAMILY.text and status.shard_bytes == sum(sizes)
        found = {one.group: (one.extents_total, one.extents_free) for one in status.pools.groups}
        assert found == dict.fromkeys(range(len(GROUPS)), (24, 24))
        a.settled()


async def test_pins_of_all_groups_or_none(bench: Desk) -> None:
    """The limit is each store's: a chain that passes it in one group is not pinned in another."""
    keys = keys_of(*range(24))
    async with group_node("a", total=24) as a, stub(a.address) as rpc:
        await a.fill(bench, keys, [0b011] * 24)
        request = pb.PinBlocksRequest(keys=b"".join(keys), kind=pb.PIN_KIND_HARD)
        with pytest.raises(Exception, match="hard_pins"):
            await rpc.Pin(request)
        assert not any(any(store.pinned_hard(keys)) for store in a.store.stores)


async def test_quotas_count_anchors_and_evict_in_all_groups(bench: Desk) -> None:
    keys = [b"tagA" + bytes([at]) * 12 for at in range(6)]
    async with group_node("a") as a:
        await a.fill(bench, keys)
        a.blocks.beat_answered(_limited(b"tagA", 6), 0)
        assert a.blocks.partitions.quotas.count(b"tagA") == 6, "not three times as many"
        await asyncio.sleep(0)
        assert len(a.store.keys()) == 6
        held = a.store.stores[0].hold(keys)
        a.blocks.beat_answered(_limited(b"tagA", 2), 0)
        assert a.store.masks(keys) == bytes([ALL] * 6), "while all anchors are in use nothing goes in their place"
        a.store.stores[0].release(held)
        a.blocks.beat_answered(_limited(b"tagA", 2), 0)
        await until(lambda: len(a.store.keys()) == 2)
        assert a.store.masks(a.store.keys()) == bytes([ALL] * 2), "what stays is whole, what went is nowhere"
        a.settled()


def _limited(tag: bytes, blocks: int) -> Any:
    from kvmesh.rpc.pb import store_pb2 as pb_store

    return pb_store.BeatResponse(quotas=[pb_store.Quota(tag=tag, blocks=blocks)])


async def test_masks_are_announced_as_they_are_from_now_on(bench: Desk) -> None:
    keys = keys_of(*range(3))
    async with group_node("a") as a:
        said = Announcer("a", 7, a.blocks.partitions.source)
        await a.fill(bench, keys, [0b011, 0b001, 0b111])
        first = said.next()
        assert first is not None and dict(zip(first.sealed, first.groups, strict=True)) == dict(
            zip(keys, [0b011, 0b001, 0b111], strict=True)
        )
        said.acked()
        await a.fill(bench, keys[1:2], [0b010])
        a.store.stores[2].remove(keys[2:])
        a.store.remove(keys[:1])
        second = said.next()
        assert second is not None and second.removed == (keys[0],)
        assert dict(zip(second.sealed, second.groups, strict=True)) == {keys[1]: 0b011, keys[2]: 0b011}


async def test_copies_that_others_order(bench: Desk) -> None:
    """An instance of two ranks pulls at a master's wish from one of one rank, as the holder says what there is."""
    keys = keys_of(*range(4))
    masks = [0b001, 0b011, 0b111, 0b011]
    async with group_node("a") as a, group_node("b", 2) as b, stub(b.address) as rpc:
        await a.fill(bench, keys, masks)
        request = pb.PullBlocksRequest(
            keys=b"".join([*keys, *keys_of("no")]), holders=[a.ref], timeout_ms=5_000, groups=bytes([0b001] * 5)
        )
        told = await rpc.Pull(request, timeout=20)
        assert told.held == b"\1" * 4 + b"\0" and told.held_groups == bytes([0b001] * 4 + [0])
        request.groups = b""
        told = await rpc.Pull(request, timeout=20)
        assert told.held == b"\1" * 4 + b"\0" and list(told.held_groups) == [*masks, 0]
        await b.check(bench, keys, masks)
        request.layout, request.groups = FAMILY.text, bytes([ALL] * 5)
        told = await rpc.Pull(request, timeout=20)
        assert told.held == bytes([0, 0, 1, 0, 0]), "not all that was asked for is here"
        request.layout = FAMILY.text.replace("float32", "bfloat16")
        with pytest.raises(Exception, match="not kept here"):
            await rpc.Pull(request, timeout=20)
        b.settled()


async def test_a_copy_that_finds_no_room_leaves_nothing_begun(bench: Desk) -> None:
    keys = keys_of(*range(6))
    async with group_node("a") as a, group_node("b", total=4) as b, stub(b.address) as rpc:
        await a.fill(bench, keys)
        # Two extents of the anchor's store are in somebody's hands.
        taken = b.store.stores[0].allocate(2)
        request = pb.PullBlocksRequest(keys=b"".join(keys), holders=[a.ref], timeout_ms=5_000)
        told = await rpc.Pull(request, timeout=20)
        assert told.held == b"\1\1" + bytes(4) and list(told.held_groups) == [ALL] * 2 + [0] * 4
        b.store.stores[0].release(taken)
        await b.check(bench, keys, [ALL] * 2 + [0] * 4)
        b.settled()


async def test_a_lost_rank_ends_all_groups(bench: Desk) -> None:
    keys = keys_of(*range(2))
    async with group_node("a", 2) as a:
        await a.fill(bench, keys)
        a.blocks.ranks_lost("gone")
        assert not a.store.keys()
