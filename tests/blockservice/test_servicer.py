"""NodeStore RPCs and hostile input: a named error with the field, nothing allocated, the node alive."""

from __future__ import annotations

import json
import os
import random
from collections.abc import AsyncIterator, Callable

import grpc.aio
import pytest
import pytest_asyncio

from kvmesh.errors import InvalidRequest, KvmeshError, Overloaded, UnknownInstance
from kvmesh.rpc import channels, status
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import blocks_pb2_grpc as pb_grpc
from kvmesh.rpc.pb import common_pb2 as pb_common
from tests.support import hostile
from tests.support.nodes import LAYOUT, SHARD, Bench, Node, bench, keys_of, node, stub, until

KEYS = keys_of(*range(4))


@pytest.fixture
async def desk() -> AsyncIterator[Bench]:
    async with bench() as made:
        yield made


@pytest.fixture
async def holder(desk: Bench) -> AsyncIterator[Node]:
    async with node("h", total=16, lease_ms=1_000) as made:
        await made.fill(desk, KEYS)
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lasting() -> AsyncIterator[Node]:
    """The same for all bad input: nothing of it stays."""
    async with bench() as desk, node("h", total=16, lease_ms=1_000) as made:
        await made.fill(desk, KEYS)
        yield made


def lease(**changes: object) -> pb.LeaseRequest:
    good: dict[str, object] = {
        "reader": "r",
        "holder_incarnation": 7,
        "keys": b"".join(KEYS),
        "lease_ms": 500,
        "layout": LAYOUT,
        "want_descriptors": True,
    }
    return pb.LeaseRequest(**(good | changes))  # type: ignore[arg-type]


def pull(**changes: object) -> pb.PullBlocksRequest:
    nowhere = pb_common.InstanceRef(instance_id="x", address="127.0.0.1:1", incarnation=1)
    good: dict[str, object] = {
        "keys": keys_of("new")[0],
        "holders": [nowhere],
        "layout": LAYOUT,
        "shard_bytes": SHARD,
        "timeout_ms": 500,
    }
    return pb.PullBlocksRequest(**(good | changes))  # type: ignore[arg-type]


def put(**changes: object) -> pb.PutBlocksRequest:
    good: dict[str, object] = {
        "keys": b"".join(keys_of("new", "newer")),
        "layout": "bytes",
        "segment": "caller@1",
        "offset": [0, 4096],
        "nbytes": [100, 200],
        "read_within_ms": 500,
    }
    return pb.PutBlocksRequest(**(good | changes))  # type: ignore[arg-type]


def remove(**changes: object) -> pb.RemoveBlocksRequest:
    good: dict[str, object] = {"keys": keys_of("unknown")[0]}
    return pb.RemoveBlocksRequest(**(good | changes))  # type: ignore[arg-type]


def touch(**changes: object) -> pb.TouchBlocksRequest:
    good: dict[str, object] = {"keys": KEYS[0], "layout": LAYOUT, "holder_incarnation": 7}
    return pb.TouchBlocksRequest(**(good | changes))  # type: ignore[arg-type]


def pin(**changes: object) -> pb.PinBlocksRequest:
    good: dict[str, object] = {"keys": keys_of("unknown")[0], "kind": pb.PIN_KIND_SOFT, "ttl_ms": 50}
    return pb.PinBlocksRequest(**(good | changes))  # type: ignore[arg-type]


async def refused(call: object) -> KvmeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    return status.from_rpc_error(caught.value)


def untouched(holder: Node) -> None:
    holder.store.check_integrity()
    stats = holder.store.stats
    assert (stats.sealed, stats.writing, stats.leases) == (len(KEYS), 0, 0)
    assert holder.store.free == holder.store.total


async def test_a_lease_says_what_is_held_and_where(holder: Node) -> None:
    async with stub(holder.address) as rpc:
        keys = [KEYS[2], keys_of("unknown")[0], KEYS[0]]
        answer = await rpc.Lease(lease(keys=b"".join(keys), lease_ms=60_000))
        assert answer.lease_id and answer.held == bytes((1, 0, 1))
        assert answer.lease_ms == 1_000, "bounded by the holder's"
        (rank,) = answer.ranks
        assert (rank.rank, rank.segment) == (0, holder.rank.ready.engine_name)
        assert rank.segment_descriptor == holder.rank.ready.descriptor
        base = holder.rank.ready.extent_base_offset
        assert list(rank.offset) == [base + 2 * SHARD, base]
        renewed = await rpc.RenewLease(pb.RenewBlocksRequest(lease_id=answer.lease_id, lease_ms=700))
        assert 700 <= renewed.lease_ms <= 1_000, "never less than was promised already"
        await rpc.ReleaseLease(pb.ReleaseBlocksRequest(lease_id=answer.lease_id))
        over = await refused(rpc.RenewLease(pb.RenewBlocksRequest(lease_id=answer.lease_id, lease_ms=700)))
        assert isinstance(over, UnknownInstance) and "lease_id" in over.message
    untouched(holder)


async def test_what_was_touched_is_not_the_next_to_go(holder: Node) -> None:
    before = holder.store.stats.hits
    assert holder.store.coldest(4) == KEYS
    async with stub(holder.address) as rpc:
        await rpc.Touch(touch(keys=KEYS[1] + keys_of("unknown")[0] + KEYS[0]))
        assert holder.store.stats.hits == before + 2
        assert holder.store.coldest(4) == [KEYS[2], KEYS[3], KEYS[0], KEYS[1]]
        await rpc.Touch(touch(keys=KEYS[2], layout="another"))
        assert holder.store.stats.hits == before + 2, "of that layout there is nothing here"
        await rpc.Touch(touch(keys=KEYS[2], layout=""))
        assert holder.store.coldest(4) == [KEYS[3], KEYS[0], KEYS[1], KEYS[2]]
        before = holder.store.stats.hits
        await rpc.Touch(touch(keys=KEYS[0] + KEYS[3] + KEYS[3]))
        assert holder.store.stats.hits == before + 3, "once for each read"
        assert holder.store.coldest(4) == [KEYS[1], KEYS[2], KEYS[3], KEYS[0]]
    untouched(holder)


async def test_nothing_held_is_no_error(holder: Node) -> None:
    async with stub(holder.address) as rpc:
        for request in (lease(keys=b"".join(keys_of(8, 9))), lease(layout="another")):
            answer = await rpc.Lease(request)
            assert answer.lease_id == 0 and not any(answer.held) and not answer.ranks
            assert len(answer.held) == len(request.keys) // 16
    untouched(holder)


async def test_a_lease_that_nobody_gives_back_ends_by_itself(holder: Node) -> None:
    async with stub(holder.address) as rpc:
        for ms in (1_500, 1_000, 1_200):
            await rpc.Lease(lease(lease_ms=ms))
        assert holder.store.stats.leases == 3
        await until(lambda: holder.store.stats.leases == 0)
    untouched(holder)


@pytest.mark.parametrize(
    ("request_", "field", "kind"),
    [
        (lease(keys=b""), "keys", InvalidRequest),
        (lease(keys=b"x" * 17), "keys", InvalidRequest),
        (lease(keys=KEYS[0] * 2), "keys", InvalidRequest),
        (lease(keys=os.urandom(16 * 65_537)), "keys", InvalidRequest),
        (lease(lease_ms=0), "lease_ms", InvalidRequest),
        (lease(holder_incarnation=8), "holder_incarnation", UnknownInstance),
        (lease(holder_incarnation=0), "holder_incarnation", UnknownInstance),
        (pull(keys=b"abc"), "keys", InvalidRequest),
        (pull(keys=b""), "keys", InvalidRequest),
        (pull(holders=[]), "holders", InvalidRequest),
        (pull(holders=[pb_common.InstanceRef(instance_id="x", address="no-port")]), "holders.address", InvalidRequest),
        (pull(holders=[pb_common.InstanceRef(address="127.0.0.1:99")]), "holders.address", InvalidRequest),
        (
            pull(holders=[pb_common.InstanceRef(instance_id="x", address="127.0.0.1:99999")]),
            "holders.address",
            InvalidRequest,
        ),
        (pull(holders=[pb_common.InstanceRef(instance_id="x", address="h:1")] * 65), "holders", InvalidRequest),
        (pull(layout="bytes/4096"), "layout", InvalidRequest),
        (pull(layout="l" * 5_000), "layout", InvalidRequest),
        (pull(layout="another"), "layout", InvalidRequest),
        (pull(shard_bytes=0), "shard_bytes", InvalidRequest),
        (pull(shard_bytes=0xFFFFFFFF), "shard_bytes", InvalidRequest),
        (pull(timeout_ms=0), "timeout_ms", InvalidRequest),
        (pull(timeout_ms=0xFFFFFFFF), "timeout_ms", InvalidRequest),
        (pull(term=1 << 31), "term", InvalidRequest),
        (pb.ExistsRequest(keys=b"abc"), "keys", InvalidRequest),
        (pb.ExistsRequest(keys=KEYS[0], layout="l" * 5_000), "layout", InvalidRequest),
        (remove(keys=b""), "keys", InvalidRequest),
        (remove(prefix=b"abcd"), "keys", InvalidRequest),
        (remove(keys=b"", prefix=b"a" * 17), "prefix", InvalidRequest),
        (remove(term=1 << 62), "term", InvalidRequest),
        (pin(keys=b""), "keys", InvalidRequest),
        (pin(kind=0), "kind", InvalidRequest),
        (pin(kind=77), "kind", InvalidRequest),
        (pin(ttl_ms=0), "ttl_ms", InvalidRequest),
        (put(keys=b"x"), "keys", InvalidRequest),
        (put(layout=""), "layout", InvalidRequest),
        (put(layout="bytes/8192"), "layout", InvalidRequest),
        (put(segment=""), "segment", InvalidRequest),
        (put(segment_descriptor=b"nonsense"), "segment_descriptor", InvalidRequest),
        (put(segment_descriptor=b"x" * (2 << 20)), "segment_descriptor", InvalidRequest),
        (put(), "segment_descriptor", UnknownInstance),
        (put(offset=[1]), "offset", InvalidRequest),
        (put(offset=[1, 1 << 63]), "offset", InvalidRequest),
        (put(nbytes=[1, 0]), "nbytes", InvalidRequest),
        (put(nbytes=[1, 1 << 60]), "nbytes", InvalidRequest),
        (put(nbytes=[1]), "nbytes", InvalidRequest),
        (put(checksum=[1]), "checksum", InvalidRequest),
        (put(read_within_ms=0), "read_within_ms", InvalidRequest),
        (put(read_within_ms=1 << 31), "read_within_ms", InvalidRequest),
        (put(pin=9), "pin", InvalidRequest),
        (put(pin=pb.PIN_KIND_SOFT), "pin_ttl_ms", InvalidRequest),
        (put(ticket=1, ticket_offset=1 << 63), "ticket_offset", InvalidRequest),
        (touch(keys=b""), "keys", InvalidRequest),
        (touch(keys=bytes(17)), "keys", InvalidRequest),
        (touch(holder_incarnation=8), "holder_incarnation", UnknownInstance),
        (touch(layout="x" * 1025), "layout", InvalidRequest),
        (pb.RenewBlocksRequest(lease_id=0xFFFFFFFFFFFFFFFF, lease_ms=5), "lease_id", UnknownInstance),
        (pb.RenewBlocksRequest(lease_id=1, lease_ms=0), "lease_ms", InvalidRequest),
    ],
)  # fmt: skip
@pytest.mark.asyncio(loop_scope="module")
async def test_bad_input_is_refused_by_name(
    lasting: Node, request_: object, field: str, kind: type[KvmeshError]
) -> None:
    method = {
        pb.LeaseRequest: "Lease",
        pb.PullBlocksRequest: "Pull",
        pb.RenewBlocksRequest: "RenewLease",
        pb.ExistsRequest: "Exists",
        pb.RemoveBlocksRequest: "Remove",
        pb.PinBlocksRequest: "Pin",
        pb.PutBlocksRequest: "Put",
        pb.TouchBlocksRequest: "Touch",
    }
    async with stub(lasting.address) as rpc:
        error = await refused(getattr(rpc, method[type(request_)])(request_))
        assert isinstance(error, kind), error
        assert error.field == field and field.split(".")[0] in error.message
        untouched(lasting)
        alive = await rpc.Lease(lease(lease_ms=1_000))
        assert alive.held == b"\1" * 4
        await rpc.ReleaseLease(pb.ReleaseBlocksRequest(lease_id=alive.lease_id))


async def test_random_bytes_on_every_call(holder: Node) -> None:
    rng = random.Random(5)
    channel = channels.connect(holder.address)
    service = pb.DESCRIPTOR.services_by_name["NodeStore"]
    valid = {
        "Lease": lease(lease_ms=20),
        "RenewLease": pb.RenewBlocksRequest(lease_id=1, lease_ms=20),
        "ReleaseLease": pb.ReleaseBlocksRequest(lease_id=1),
        "Pull": pull(timeout_ms=20),
        "Exists": pb.ExistsRequest(keys=KEYS[0]),
        "Remove": pb.RemoveBlocksRequest(keys=keys_of("unknown")[0], seq=3),
        "Pin": pb.PinBlocksRequest(keys=keys_of("unknown")[0], kind=pb.PIN_KIND_SOFT, ttl_ms=5),
        "Put": put(read_within_ms=20),
        "Touch": touch(),
        "Doors": pb.DoorsRequest(),
        "ListBlocks": pb.ListBlocksRequest(),
        "GetStore": pb.GetNodeStoreRequest(),
    }
    try:
        await hostile.assault(channel, service, valid, seed=11)
        for method in (
            "Lease",
            "RenewLease",
            "ReleaseLease",
            "Pull",
            "GetStore",
            "Exists",
            "Remove",
            "Pin",
            "Put",
            "Touch",
            "Doors",
        ):
            call: Callable[..., object] = channel.unary_unary(f"/kvmesh.v1.NodeStore/{method}")
            for size in (0, 1, 7, 64, 1_000, 100_000):
                try:
                    await call(rng.randbytes(size), timeout=5)  # type: ignore[misc]
                except grpc.aio.AioRpcError as error:
                    named = status.from_rpc_error(error)
                    assert isinstance(named, InvalidRequest | UnknownInstance), named
        async for _ in pb_grpc.NodeStoreStub(channel).ListBlocks(pb.ListBlocksRequest()):
            pass
    finally:
        await channel.close()
    await until(lambda: holder.store.stats.leases == 0)
    untouched(holder)


async def test_a_pull_from_nowhere_holds_nothing_and_gives_all_back(holder: Node) -> None:
    async with stub(holder.address) as rpc:
        keys = [KEYS[1], *keys_of(*range(100, 130))]  # more than there is room for
        answer = await rpc.Pull(pull(keys=b"".join(keys), timeout_ms=400), timeout=10)
        assert answer.held[0] == 1 and not any(answer.held[1:])
    holder.store.check_integrity()
    assert holder.store.stats.writing == 0


async def test_too_many_pulls_at_once_are_refused(holder: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.blockservice.servicer.MAX_PULLS", 0)
    async with stub(holder.address) as rpc:
        assert isinstance(await refused(rpc.Pull(pull())), Overloaded)
    untouched(holder)


async def test_a_pull_whose_caller_hung_up_still_counts(desk: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.blockservice.servicer.MAX_PULLS", 1)
    stuck = json.dumps({"rules": [{"kind": "freeze", "peer": "a/*", "op": "read"}]})
    async with node("a") as a, node("b", fault=stuck) as b, stub(b.address) as rpc:
        await a.fill(desk, KEYS)
        asked = pull(keys=KEYS[0], holders=[a.ref], timeout_ms=60_000)
        call = rpc.Pull(asked)
        await until(lambda: a.store.stats.leases == 1)
        call.cancel()
        again = pull(keys=KEYS[1], holders=[a.ref], timeout_ms=60_000)
        for _ in range(3):
            assert isinstance(await refused(rpc.Pull(again, timeout=5)), Overloaded)


async def test_too_many_leases_at_once_are_refused(holder: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.blockservice.servicer.MAX_LEASES", 2)
    async with stub(holder.address) as rpc:
        for _ in range(2):
            await rpc.Lease(lease(lease_ms=1_000))
        assert isinstance(await refused(rpc.Lease(lease())), Overloaded)


async def test_list_and_counts(holder: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.blockservice.servicer.LIST_KEYS", 3)
    async with stub(holder.address) as rpc:
        parts = [part async for part in rpc.ListBlocks(pb.ListBlocksRequest())]
        assert [len(part.keys) for part in parts] == [48, 16]
        assert b"".join(part.keys for part in parts) == b"".join(KEYS)
        await rpc.Lease(lease(keys=KEYS[0] + keys_of("unknown")[0]))
        told = await rpc.GetStore(pb.GetNodeStoreRequest())
    assert (told.instance.instance_id, told.instance.incarnation) == ("h", 7)
    assert (told.block_hits, told.block_misses, told.leases_given, told.leased_blocks) == (1, 1, 1, 1)
    assert (told.pools.extents_total, told.pools.store_blocks, told.pools.store_leases) == (16, 4, 1)
    assert (told.capacity_bytes, told.layout, told.shard_bytes) == (16 * SHARD, LAYOUT, SHARD)
    assert (told.pools.pulls, told.pools.store_writing) == (0, 0)
    holder.store.drop_all()
    async with stub(holder.address) as rpc:
        assert [part.keys async for part in rpc.ListBlocks(pb.ListBlocksRequest())] == [b""]
