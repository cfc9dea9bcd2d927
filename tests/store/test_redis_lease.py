"""The lease and the books in a real Redis, and what a master without one does about terms."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvmesh.errors import ConfigError, InvalidRequest, StaleTerm, Unavailable
from kvmesh.leader.leader import Ask, LeaseGranted, LeaseHeld, LeaseSilent
from kvmesh.leader.redis_lease import Redis, RedisLease, check_url
from kvmesh.rpc import channels
from kvmesh.rpc.pb import store_pb2, store_pb2_grpc
from kvmesh.services.store import durable, main
from kvmesh.services.store.config import StoreConfig
from kvmesh.services.store.durable import Durable, MemoryDurable, RedisDurable, nothing
from tests.store.test_service import failing
from tests.support.redis_server import RedisServer, needs_redis, redis_server
from tests.support.services import running
from tests.support.store.mesh import TIMEOUT, joining

LEASE_MS = 60_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as started:
        yield started


@asynccontextmanager
async def connected(server: RedisServer, mesh: str, timeout_s: float = 5.0) -> AsyncIterator[Redis]:
    redis = Redis(server.url, mesh, timeout_s)
    try:
        yield redis
    finally:
        await redis.close()


@needs_redis
async def test_the_lease_goes_round_with_growing_terms(server: RedisServer) -> None:
    async with connected(server, "round") as redis, connected(server, "other") as other:
        a, b = RedisLease(redis, "a:1", LEASE_MS), RedisLease(redis, "b:1", LEASE_MS)
        assert await a.ask(Ask(1, 0, 0, 0)) == LeaseGranted(1, 1, True)  # its first one ever
        assert await a.ask(Ask(2, 0, 0, 0)) == LeaseGranted(2, 1, True)  # the first answer may have been lost
        assert await a.ask(Ask(3, 0, 1, 1)) == LeaseGranted(3, 1, True)
        held = await b.ask(Ask(1, 0, 0, 0))
        assert isinstance(held, LeaseHeld) and (held.term, held.leader) == (1, "a:1")
        assert 0 < held.left_s <= LEASE_MS / 1000
        another_life = await a.ask(Ask(4, 1, 0, 0))
        assert isinstance(another_life, LeaseHeld) and another_life.leader == "a:1"
        assert await RedisLease(other, "c:1", LEASE_MS).ask(Ask(1, 0, 0, 0)) == LeaseGranted(1, 1, True)
        await b.release(0)  # not its own
        assert isinstance(await b.ask(Ask(2, 0, 0, 0)), LeaseHeld)
        await a.release(0)
        assert await b.ask(Ask(3, 0, 0, 7)) == LeaseGranted(3, 8, False)
        late = await a.ask(Ask(5, 0, 1, 1))  # a renewal of the lease that it gave back
        assert isinstance(late, LeaseHeld) and late.term == 8


@needs_redis
async def test_a_renewal_restores_what_redis_has_lost_and_a_new_lease_is_unsure(server: RedisServer) -> None:
    async with connected(server, "lost") as redis:
        a, b = RedisLease(redis, "a:1", LEASE_MS), RedisLease(redis, "b:1", LEASE_MS)
        assert await a.ask(Ask(1, 0, 0, 4, first=5)) == LeaseGranted(1, 5, True)
        await redis.client.delete(redis.key("leader"), redis.key("terms"))
        assert await a.ask(Ask(2, 0, 5, 5)) == LeaseGranted(2, 5, False)
        assert isinstance(await b.ask(Ask(1, 0, 0, 0)), LeaseHeld)
        await a.release(0)
        assert await b.ask(Ask(2, 0, 0, 0)) == LeaseGranted(2, 6, False)
        await b.release(0)
        await redis.client.hset(redis.key("terms"), "run", "another start")
        for number in (3, 4):
            assert await a.ask(Ask(number, 2, 0, 0, first=99)) == LeaseGranted(number, 7, True)
        await redis.client.delete(redis.key("leader"), redis.key("terms"))
        assert await b.ask(Ask(3, 0, 0, 0, first=99)) == LeaseGranted(3, 99, True)


@needs_redis
async def test_a_redis_that_is_gone_is_told_within_the_deadline(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    async with connected(server, "gone", 0.3) as redis:
        lease, books = RedisLease(redis, "a:1", LEASE_MS), RedisDurable(redis)
        await lease.ask(Ask(1, 0, 0, 0))
        server.kill()
        answer = await lease.ask(Ask(2, 0, 1, 1))
        assert isinstance(answer, LeaseSilent) and answer.why.startswith("redis: ")
        await lease.release(0)
        with pytest.raises(Unavailable, match="redis: "):
            await books.load()
        with pytest.raises(Unavailable, match="redis: "):
            await books.put(durable.NAME, {b"a": b"b"}, 1)


async def keeps_and_fences(books: Durable) -> None:
    """What any Durable does under growing terms."""
    assert await books.load() == nothing()
    many = {i.to_bytes(4, "big") + b"\0 \xff": bytes([i % 256]) * (i % 9) for i in range(5000)}
    await books.put(durable.NAME, many, 3)
    await books.put(durable.QUOTA, {b"q": b"1"}, 3)
    await books.put(durable.QUOTA, {b"q": b"2", b"r": b""}, 4)
    await books.delete(durable.QUOTA, [b"r", b"unknown"], 4)
    await books.put(durable.QUOTA, {}, 4)
    assert await books.load() == {**nothing(), durable.NAME: many, durable.QUOTA: {b"q": b"2"}}


async def test_books_in_memory() -> None:
    books = MemoryDurable()
    await keeps_and_fences(books)
    with pytest.raises(StaleTerm, match="term=3"):
        await books.put(durable.QUOTA, {b"q": b"stale"}, 3)
    with pytest.raises(StaleTerm):
        await books.delete(durable.NAME, [b"q"], 3)


@needs_redis
async def test_books_in_redis_refuse_a_leader_of_yesterday(server: RedisServer) -> None:
    async with connected(server, "books") as redis:
        lease, books = RedisLease(redis, "a:1", LEASE_MS), RedisDurable(redis)
        await lease.ask(Ask(1, 0, 0, 2))
        await keeps_and_fences(books)
        await lease.release(0)
        assert await lease.ask(Ask(2, 1, 0, 8)) == LeaseGranted(2, 9, False)
        before = await books.load()
        with pytest.raises(StaleTerm, match=r"term=8.*9"):
            await books.put(durable.QUOTA, {b"q": b"stale"}, 8)
        with pytest.raises(StaleTerm):
            await books.delete(durable.QUOTA, [b"q"], 8)
        assert await books.load() == before
        await books.put(durable.QUOTA, {b"q": b"9"}, 9)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"redis": "10.0.0.1:6379"}, "redis='10.0.0.1:6379': must be redis://"),
        ({"redis": "redis://h:port/0"}, "redis='redis://h:port/0'"),
        ({"mesh": "a:b"}, "mesh='a:b'"),
        ({"advertise": "here"}, "advertise='here'"),
        ({"redis": "redis://h/0", "host": "0.0.0.0"}, "advertise=''"),
        ({"leader_lease_ms": 5}, "leader_lease_ms=5"),
        ({"redis": "redis://h/0", "state_path": "x"}, "state_path='x': with redis"),
        ({"state_path": "/nowhere/at/all"}, "state_path='/nowhere/at/all': "),
        ({"state_path": __file__}, "state_path="),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        main.Master(StoreConfig(**settings))
    assert text in caught.value.message


async def test_a_lone_master_rises_above_what_nodes_have_heard() -> None:
    config = StoreConfig(heartbeat_interval_ms=50, lease_ms=60_000)
    async with running(main.run, config) as master, channels.connect(master.address) as channel:
        stub: Any = store_pb2_grpc.StoreMasterStub(channel)

        async def join(name: str, term: int) -> int:
            request = joining(name)
            request.term = term
            return int((await stub.Join(request, timeout=TIMEOUT)).term)

        first = await join("a", 0)
        assert first > 100_000_000, "an earlier life of it, of which nobody tells, had a lower one"
        assert await join("a", first) == first, "it has this from us"
        assert await join("b", first) == first + 1, "it was no member: another life of this master told it"
        assert await join("c", first + 40) == first + 41
        beat = store_pb2.BeatRequest(instance=joining("a").member.instance, term=first + 2)
        assert (await stub.Beat(beat, timeout=TIMEOUT)).term == first + 41
        status = await stub.GetStatus(store_pb2.GetStoreStatusRequest(), timeout=TIMEOUT)
        assert (status.term, status.leading, status.leader) == (first + 41, True, master.address)
        assert list(status.rebuilding) == ["a", "b", "c"]
        absurd = joining("d")
        absurd.term = 1 << 40
        error = await failing(stub.Join(absurd, timeout=TIMEOUT))
        assert isinstance(error, InvalidRequest) and error.field == "term"


@pytest.mark.parametrize(
    ("url", "shown"),
    [("http://u:hunter2@h/0", "http://u:***@h/0"), ("u:hunter2@h", "u:***@h"), ("ftp://:hun@ter2@h", "ftp://:***@h")],
)
def test_a_bad_url_is_named_without_its_password(url: str, shown: str) -> None:
    with pytest.raises(ConfigError, match="redis=") as refused:
        check_url(url)
    assert shown in refused.value.message
    assert "hun" not in refused.value.message
