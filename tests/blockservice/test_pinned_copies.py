"""Copies that keep the hard pins of where they come from, or are not made."""

from __future__ import annotations

from kvmesh.errors import InvalidRequest
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import common_pb2 as pb_common
from tests.support.nodes import keys_of
from tests.support.putting import Caller, pool_and_caller, refused

BIG = 700_000


async def pull(to: Caller, source: Caller, keys: list[bytes], **more: object) -> bytes:
    holder = (await source.counts()).instance
    asked = pb.PullBlocksRequest(keys=b"".join(keys), holders=[holder], timeout_ms=20_000, **more)  # type: ignore[arg-type]
    return (await to.rpc.Pull(asked, timeout=30)).held


async def pinned(at: Caller, keys: list[bytes]) -> bytes:
    return (await at.rpc.Exists(pb.ExistsRequest(keys=b"".join(keys), want_pinned=True), timeout=10)).pinned


async def test_what_is_pinned_hard_stays_so_where_it_is_copied_to() -> None:
    async with pool_and_caller(instance_id="a") as a, pool_and_caller(instance_id="b") as b:
        hard, free = keys_of("h0", "h1"), keys_of("f0", "f1")
        await a.put(hard, [BIG, 100], pin=pb.PIN_KIND_HARD)
        await a.put(free, [BIG, 100])
        assert await pinned(a, [*hard, *free]) == b"\1\1\0\0"
        assert (await a.rpc.Exists(pb.ExistsRequest(keys=hard[0]), timeout=10)).pinned == b""
        assert await pull(b, a, [hard[0], free[0]], pins=True) == b"\1\1"
        assert await pull(b, a, [hard[1], free[1]]) == b"\1\1"
        assert await pinned(b, [*hard, *free]) == b"\1\0\0\0"
        b.blocks.update(a.blocks)
        await b.check([*hard, *free])


async def test_what_may_not_be_pinned_is_not_copied() -> None:
    """Half of b's 4 MiB may be pinned."""
    async with pool_and_caller(instance_id="a", memory_mb=16) as a, pool_and_caller(instance_id="b") as b:
        hard, free = keys_of(*range(4)), keys_of("free")
        await a.put(hard, [BIG] * 4, pin=pb.PIN_KIND_HARD)
        await a.put(free, [BIG])
        held = await pull(b, a, [*hard, *free], pins=True)
        assert 0 < sum(held[:4]) < 4 and held[4] == 1
        assert await pinned(b, hard) == held[:4]
        await b.idle()
        assert (await b.counts()).hard_pinned == sum(held[:4])


async def test_pins_are_asked_for_where_the_layout_is() -> None:
    async with pool_and_caller() as a:
        ref = pb_common.InstanceRef(instance_id="x", address="127.0.0.1:1")
        asked = pb.PullBlocksRequest(
            keys=keys_of(1)[0], holders=[ref], timeout_ms=50, pins=True, layout="l", shard_bytes=8
        )
        error = await refused(a.rpc.Pull(asked))
        assert isinstance(error, InvalidRequest)
        assert error.field == "layout"
