"""The store master over real gRPC."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.rpc import channels, protocol, status
from kvmesh.rpc.errors import ConfigError, InvalidRequest, KvmeshError, ProtocolMismatch, Unavailable, UnknownInstance
from kvmesh.rpc.pb import common_pb2, store_pb2, store_pb2_grpc
from kvmesh.rpc.server import Server
from services.store import main
from services.store.config import StoreConfig
from services.store.servicer import StoreMasterServicer
from services.store.state import Join, MasterState, Member, Role
from tests.services import Running, running, until

TIMEOUT = 10.0


def config(**more: Any) -> StoreConfig:
    return StoreConfig(heartbeat_interval_ms=50, lease_ms=500, **more)


def ref(name: str = "prefill-0", incarnation: int = 1) -> common_pb2.InstanceRef:
    return common_pb2.InstanceRef(instance_id=name, address="127.0.0.1:9", incarnation=incarnation)


def joining(name: str = "prefill-0", incarnation: int = 1, version: int = protocol.PROTOCOL_VERSION) -> Any:
    member = store_pb2.Member(instance=ref(name, incarnation), role=common_pb2.ROLE_PREFILL, node_id="n", store_id=name)
    return store_pb2.JoinRequest(protocol_version=version, member=member)


@pytest.fixture
async def store() -> AsyncIterator[Running]:
    async with running(main.run, config()) as service:
        yield service


@pytest.fixture
async def stub(store: Running) -> AsyncIterator[Any]:
    async with channels.connect(store.address) as channel:
        yield store_pb2_grpc.StoreMasterStub(channel)


async def failing(call: Any) -> KvmeshError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return status.from_rpc_error(caught.value)


async def test_join_beat_list_leave(stub: Any) -> None:
    answer = await stub.Join(joining(), timeout=TIMEOUT)
    assert (answer.heartbeat_interval_ms, answer.lease_ms) == (50, 500)
    assert answer.master_incarnation != 0
    beat = await stub.Beat(store_pb2.BeatRequest(instance=ref(), seq=1), timeout=TIMEOUT)
    assert beat.master_incarnation == answer.master_incarnation
    listed = await stub.ListMembers(store_pb2.ListMembersRequest(), timeout=TIMEOUT)
    assert [m.instance for m in listed.members] == [ref()]
    await stub.Leave(store_pb2.LeaveRequest(instance=ref()), timeout=TIMEOUT)
    listed = await stub.ListMembers(store_pb2.ListMembersRequest(), timeout=TIMEOUT)
    assert not listed.members
    assert isinstance(await failing(stub.Beat(store_pb2.BeatRequest(instance=ref()), timeout=TIMEOUT)), UnknownInstance)


@pytest.mark.parametrize("version", [0, 2, 999])
async def test_another_protocol_version_is_refused(stub: Any, version: int) -> None:
    error = await failing(stub.Join(joining(version=version), timeout=TIMEOUT))
    assert isinstance(error, ProtocolMismatch)
    assert "prefill-0" in error.message
    assert str(version) in error.message


async def test_a_nameless_or_roleless_member_is_refused(stub: Any) -> None:
    assert isinstance(await failing(stub.Join(joining(name=""), timeout=TIMEOUT)), InvalidRequest)
    roleless = joining()
    roleless.member.role = common_pb2.ROLE_UNSPECIFIED
    error = await failing(stub.Join(roleless, timeout=TIMEOUT))
    assert isinstance(error, InvalidRequest)
    assert "member.role" in error.message


async def next_events(stream: Any, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        message = await asyncio.wait_for(stream.read(), TIMEOUT)
        assert message is not grpc.aio.EOF
        assert not message.snapshot
        found.extend(message.events)
    return found


async def test_a_watcher_gets_a_snapshot_and_then_every_change(stub: Any) -> None:
    await stub.Join(joining("a"), timeout=TIMEOUT)
    stream = stub.WatchMembers(store_pb2.WatchMembersRequest())
    first = await asyncio.wait_for(stream.read(), TIMEOUT)
    assert first.snapshot
    assert [(e.change, e.member.instance.instance_id) for e in first.events] == [(store_pb2.MEMBER_CHANGE_JOINED, "a")]
    await stub.Join(joining("b", 5), timeout=TIMEOUT)
    await stub.Join(joining("b", 6), timeout=TIMEOUT)
    await stub.Leave(store_pb2.LeaveRequest(instance=ref("b", 6)), timeout=TIMEOUT)
    beats = asyncio.ensure_future(next_events(stream, 5))
    found = await beats  # the silent "a" dies of its lease
    assert [e.seq for e in found] == list(range(first.seq + 1, first.seq + 6))
    kinds = {(e.change, e.member.instance.instance_id, e.member.instance.incarnation) for e in found}
    assert kinds == {
        (store_pb2.MEMBER_CHANGE_JOINED, "b", 5),
        (store_pb2.MEMBER_CHANGE_DIED, "b", 5),
        (store_pb2.MEMBER_CHANGE_JOINED, "b", 6),
        (store_pb2.MEMBER_CHANGE_LEFT, "b", 6),
        (store_pb2.MEMBER_CHANGE_DIED, "a", 1),
    }
    stream.cancel()


async def test_a_quiet_stream_still_says_where_it_stands(stub: Any) -> None:
    stream = stub.WatchMembers(store_pb2.WatchMembersRequest())
    first = await asyncio.wait_for(stream.read(), TIMEOUT)
    quiet = await asyncio.wait_for(stream.read(), TIMEOUT)
    assert first.snapshot
    assert not quiet.snapshot
    assert not quiet.events
    assert quiet.seq == first.seq
    stream.cancel()


async def test_stopping_ends_the_streams_with_a_named_error() -> None:
    async with running(main.run, config()) as store, channels.connect(store.address) as channel:
        stream = store_pb2_grpc.StoreMasterStub(channel).WatchMembers(store_pb2.WatchMembersRequest())
        await asyncio.wait_for(stream.read(), TIMEOUT)
        await store.stop()
        with pytest.raises(grpc.RpcError) as caught:
            await next_events(stream, 1)
        assert isinstance(status.from_rpc_error(caught.value), Unavailable)


async def test_a_restarted_master_has_another_incarnation_and_knows_nobody() -> None:
    async with running(main.run, config()) as first, channels.connect(first.address) as channel:
        stub = store_pb2_grpc.StoreMasterStub(channel)
        before = await stub.Join(joining(), timeout=TIMEOUT)
        await first.stop()
        async with running(main.run, config(port=first.port)):
            beat = stub.Beat(store_pb2.BeatRequest(instance=ref()), timeout=TIMEOUT, wait_for_ready=True)
            assert isinstance(await failing(beat), UnknownInstance)
            after = await stub.Join(joining(), timeout=TIMEOUT)
            assert after.master_incarnation != before.master_incarnation


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


async def test_a_watcher_that_falls_behind_is_closed_and_starts_over(clock: list[float]) -> None:
    servicer = StoreMasterServicer(
        MasterState(lease_s=1e9, stall_s=1e9),
        incarnation=1,
        heartbeat_interval_ms=10_000,
        lease_ms=20_000,
        watch_queue=4,
        clock=lambda: clock[0],
    )
    server = Server("127.0.0.1", 0)
    store_pb2_grpc.add_StoreMasterServicer_to_server(servicer, server.grpc)
    await server.start()
    async with channels.connect(server.address) as channel:
        stub = store_pb2_grpc.StoreMasterStub(channel)
        slow = stub.WatchMembers(store_pb2.WatchMembersRequest())
        assert (await asyncio.wait_for(slow.read(), TIMEOUT)).snapshot
        for i in range(9):  # without a turn of the loop: the stream cannot keep up
            servicer._step(Join(Member(f"m{i}", "h:1", 1, Role.DECODE, "n", "s")))
        with pytest.raises(grpc.RpcError) as caught:
            await asyncio.wait_for(slow.read(), TIMEOUT)
        assert isinstance(status.from_rpc_error(caught.value), Unavailable)

        async def nobody_watches() -> bool:
            return servicer.watchers == 0

        await until(nobody_watches)
        again = stub.WatchMembers(store_pb2.WatchMembersRequest())
        first = await asyncio.wait_for(again.read(), TIMEOUT)
        assert first.snapshot
        assert len(first.events) == 9
        assert first.seq == 9
        again.cancel()
    await server.stop(0)


async def test_health_metrics_and_a_port_in_use(store: Running) -> None:
    async with channels.connect(store.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def serving() -> bool:
            answer = await health.Check(health_pb2.HealthCheckRequest(service="kvmesh.v1.StoreMaster"), timeout=TIMEOUT)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        await until(serving)
        await store_pb2_grpc.StoreMasterStub(channel).Join(joining(), timeout=TIMEOUT)
    text = await asyncio.to_thread(_fetch, f"http://{store.metrics}/metrics")
    assert "kvmesh_store_member_changes_total" in text
    with pytest.raises(ConfigError, match=str(store.port)):
        async with running(main.run, config(port=store.port)):
            pass


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize(
    "wrong", [{"heartbeat_interval_ms": 0}, {"lease_ms": 100}, {"watch_queue": 0}], ids=lambda w: next(iter(w))
)
def test_config_names_the_field(wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        StoreConfig(**wrong)
