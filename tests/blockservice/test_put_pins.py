"""Pins at a real pool node: how much may be pinned, what it costs others, and removals that spare pinned or leased."""

from __future__ import annotations

from kvmesh.errors import InvalidRequest, Overloaded
from kvmesh.rpc.pb import blocks_pb2 as pb
from tests.support.nodes import keys_of
from tests.support.putting import held, pool_and_caller, refused


async def test_pins() -> None:
    async with pool_and_caller() as caller:
        hard, soft = keys_of("h1", "h2"), keys_of("s")
        answer = await caller.put(hard, [300_000, 300_000], pin=pb.PIN_KIND_HARD)
        assert answer.held == b"\1\1"
        await caller.put(soft, [300_000], pin=pb.PIN_KIND_SOFT, pin_ttl_ms=60_000)
        done = await caller.rpc.Pin(
            pb.PinBlocksRequest(keys=soft[0] + keys_of("no")[0], kind=pb.PIN_KIND_SOFT, ttl_ms=60_000)
        )
        assert done.done == b"\1\0"
        counts = await caller.counts()
        assert (counts.hard_pinned, counts.soft_pinned) == (2, 1)
        for turn in range(12):
            assert (await caller.put(keys_of(turn), [600_000])).held == b"\1"
        assert await held(caller, [*hard, *soft]) == b"\1\1\1", "others went"
        much = await refused(caller.put(keys_of("a", "b", "c"), [800_000] * 3, pin=pb.PIN_KIND_HARD))
        assert isinstance(much, Overloaded) and "pinned" in much.message
        for kind, pinned in ((pb.PIN_KIND_HARD, 3), (pb.PIN_KIND_NONE, 0)):
            everything = pb.PinBlocksRequest(keys=b"".join([*hard, *soft]), kind=kind, layout="bytes")
            assert (await caller.rpc.Pin(everything)).done == b"\1\1\1"
            assert (await caller.counts()).hard_pinned == pinned


async def test_what_must_not_be_pinned_costs_nobody_a_block() -> None:
    """4 MiB, of which half may be pinned: what is beyond that is refused before anything goes for it."""
    async with pool_and_caller() as caller:
        pinned, others, new = keys_of("p", "q"), keys_of(*range(4)), keys_of("x", "y")
        await caller.put(pinned, [512 << 10] * 2, pin=pb.PIN_KIND_HARD)
        assert (await caller.put(others, [640 << 10] * 4)).held == b"\1" * 4
        much = await refused(caller.put(new, [700_000] * 2, pin=pb.PIN_KIND_HARD, read_within_ms=100))
        assert isinstance(much, Overloaded) and "hard_pins=2" in much.message
        assert await held(caller, [*pinned, *others]) == b"\1" * 6
        answer = await caller.put(new, [200_000, 900_000], pin=pb.PIN_KIND_HARD, read_within_ms=100)
        assert answer.held == b"\1\0" and "hard_pins=2" in answer.why_not, "the two together are too much"
        assert await held(caller, [*pinned, *others]) == b"\1" * 6


async def test_what_is_pinned_already_counts_once() -> None:
    async with pool_and_caller() as caller:
        keys = keys_of(*range(3))
        for _ in range(2):
            assert (await caller.put(keys, [640 << 10] * 3, pin=pb.PIN_KIND_HARD)).held == b"\1\1\1"
            again = pb.PinBlocksRequest(keys=b"".join(keys), kind=pb.PIN_KIND_HARD, layout="bytes")
            assert (await caller.rpc.Pin(again)).done == b"\1\1\1"
        assert (await caller.counts()).hard_pinned == 3


async def test_a_removal_that_spares_hard_pins() -> None:
    async with pool_and_caller() as caller:
        keys = keys_of("hard", "soft", "free")
        await caller.put(keys[:1], [300_000], pin=pb.PIN_KIND_HARD)
        await caller.put(keys[1:2], [300_000], pin=pb.PIN_KIND_SOFT, pin_ttl_ms=60_000)
        await caller.put(keys[2:], [300_000])
        gone = await caller.rpc.Remove(pb.RemoveBlocksRequest(keys=b"".join(keys), spare_pinned=True))
        assert (gone.removed, gone.spared) == (2, b"\1\0\0")
        assert await held(caller, keys) == b"\1\0\0"
        wrong = await refused(caller.rpc.Remove(pb.RemoveBlocksRequest(prefix=b"abcd", spare_pinned=True)))
        assert isinstance(wrong, InvalidRequest) and wrong.field == "spare_pinned"
        gone = await caller.rpc.Remove(pb.RemoveBlocksRequest(keys=keys[0]))
        assert (gone.removed, gone.spared) == (1, b"")


async def test_a_removal_that_spares_what_is_leased() -> None:
    async with pool_and_caller() as caller:
        keys = keys_of("both", "leased", "pinned", "free")
        await caller.put([keys[0], keys[2]], [300_000, 5_000], pin=pb.PIN_KIND_HARD)
        await caller.put([keys[1], keys[3]], [300_000, 5_000])
        lease = await caller.lease(keys[:2])
        packed = b"".join(keys)
        gone = await caller.rpc.Remove(pb.RemoveBlocksRequest(keys=packed, spare_pinned=True, spare_leased=True))
        assert (gone.removed, gone.spared) == (1, b"\1\2\1\0")
        await caller.put(keys[3:], [5_000])
        gone = await caller.rpc.Remove(pb.RemoveBlocksRequest(keys=packed, spare_leased=True))
        assert (gone.removed, gone.spared) == (2, b"\2\2\0\0"), "a pin alone does not keep it"
        await caller.read(keys[:2], lease)
        await caller.release(lease)
        gone = await caller.rpc.Remove(pb.RemoveBlocksRequest(keys=packed, spare_leased=True))
        assert (gone.removed, gone.spared) == (2, bytes(4)) and await held(caller, keys) == bytes(4)
        wrong = await refused(caller.rpc.Remove(pb.RemoveBlocksRequest(prefix=b"abcd", spare_leased=True)))
        assert isinstance(wrong, InvalidRequest) and wrong.field == "spare_leased"
