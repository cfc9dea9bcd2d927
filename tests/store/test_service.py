"""The store master over real gRPC."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.errors import ConfigError, InvalidRequest, KvmeshError, ProtocolMismatch, Unavailable, UnknownInstance
from kvmesh.rpc import channels, protocol, status
from kvmesh.rpc.pb import common_pb2, store_pb2, store_pb2_grpc
from kvmesh.services.store import main
from kvmesh.services.store.config import StoreConfig
from tests.support.services import Running, running, until

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


async def test_pool_nodes_are_told_to_those_who_beat(stub: Any) -> None:
    await stub.Join(joining("prefill-0"), timeout=TIMEOUT)
    pool = joining("pool-0")
    pool.member.role = common_pb2.ROLE_POOL
    await stub.Join(pool, timeout=TIMEOUT)
    usage = store_pb2.StoreUsage(capacity_bytes=100, free_bytes=2**64 - 1, blocks=3)
    own = await stub.Beat(store_pb2.BeatRequest(instance=ref("pool-0"), usage=usage), timeout=TIMEOUT)
    assert not own.pools
    beat = await stub.Beat(store_pb2.BeatRequest(instance=ref()), timeout=TIMEOUT)
    assert [(p.instance, p.free_bytes) for p in beat.pools] == [(ref("pool-0"), 100)]
    status = await stub.GetStatus(store_pb2.GetStoreStatusRequest(), timeout=TIMEOUT)
    assert [s.member.role for s in status.stores] == [common_pb2.ROLE_PREFILL, common_pb2.ROLE_POOL]
    assert not status.stores[0].HasField("usage")
    assert status.stores[1].usage.capacity_bytes == 100


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
    stream = stub.Watch(store_pb2.WatchRequest())
    first = await asyncio.wait_for(stream.read(), TIMEOUT)
    assert first.snapshot and not first.more
    (event,) = first.events
    assert (event.member.change, event.member.member.instance.instance_id) == (store_pb2.MEMBER_CHANGE_JOINED, "a")
    await stub.Join(joining("b", 5), timeout=TIMEOUT)
    await stub.Join(joining("b", 6), timeout=TIMEOUT)
    await stub.Leave(store_pb2.LeaveRequest(instance=ref("b", 6)), timeout=TIMEOUT)
    found = await next_events(stream, 5)  # the silent "a" dies of its lease
    assert [e.seq for e in found] == list(range(first.seq + 1, first.seq + 6))
    told = [e.member for e in found]
    assert {(m.change, m.member.instance.instance_id, m.member.instance.incarnation) for m in told} == {
        (store_pb2.MEMBER_CHANGE_JOINED, "b", 5),
        (store_pb2.MEMBER_CHANGE_DIED, "b", 5),
        (store_pb2.MEMBER_CHANGE_JOINED, "b", 6),
        (store_pb2.MEMBER_CHANGE_LEFT, "b", 6),
        (store_pb2.MEMBER_CHANGE_DIED, "a", 1),
    }
    stream.cancel()


async def test_a_quiet_stream_still_says_where_it_stands(stub: Any) -> None:
    stream = stub.Watch(store_pb2.WatchRequest())
    first = await asyncio.wait_for(stream.read(), TIMEOUT)
    quiet = await asyncio.wait_for(stream.read(), TIMEOUT)
    assert first.snapshot
    assert not quiet.snapshot
    assert not quiet.events
    assert quiet.seq == first.seq
    stream.cancel()


async def test_stopping_ends_the_streams_with_a_named_error() -> None:
    async with running(main.run, config()) as store, channels.connect(store.address) as channel:
        stream = store_pb2_grpc.StoreMasterStub(channel).Watch(store_pb2.WatchRequest())
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
    assert 'kvmesh_store_members_count{role="pool"}' in text
    with pytest.raises(ConfigError, match=str(store.port)):
        async with running(main.run, config(port=store.port)):
            pass


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize(
    "wrong",
    [{"heartbeat_interval_ms": 0}, {"lease_ms": 100}, {"watch_queue": 0}, {"max_members": 0}],
    ids=lambda w: next(iter(w)),
)
def test_config_names_the_field(wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        StoreConfig(**wrong)
