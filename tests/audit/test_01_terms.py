"""Leader terms that were made up: a stranger's, a member's, a node's, a wrong clock's, one left in Redis. The mesh goes
on, at a term below the maximum."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner

from kvmesh.cli.app import app
from kvmesh.errors import InvalidRequest, KvmeshError, UnknownInstance
from kvmesh.leader.redis_lease import Redis
from kvmesh.rpc import channels
from kvmesh.rpc.pb import store_pb2, store_pb2_grpc
from kvmesh.rpc.status import from_rpc_error
from kvmesh.rpc.terms import MAX_TERM
from kvmesh.services.store import main
from kvmesh.services.store.config import StoreConfig
from tests.support.redis_server import RedisServer, needs_redis, redis_server
from tests.support.services import Running, running, until
from tests.support.store.mesh import TIMEOUT, joining

HUGE = MAX_TERM
LEASE_MS = 300


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as started:
        yield started


def alone(**more: Any) -> StoreConfig:
    return StoreConfig(heartbeat_interval_ms=50, lease_ms=60_000, **more)


def shared(redis: RedisServer, mesh: str, **more: Any) -> StoreConfig:
    return alone(redis=redis.url, mesh=mesh, leader_lease_ms=LEASE_MS, **more)


class Master:
    """One master, and what nodes and strangers say to it."""

    def __init__(self, service: Running, channel: grpc.aio.Channel) -> None:
        self.service = service
        self.stub: Any = store_pb2_grpc.StoreMasterStub(channel)

    async def call(self, method: str, request: Any) -> Any:
        try:
            return await getattr(self.stub, method)(request, timeout=TIMEOUT)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None

    async def join(self, name: str, term: int = 0) -> int:
        request = joining(name)
        request.term = term
        return int((await self.call("Join", request)).term)

    async def beat(self, name: str, term: int = 0, incarnation: int = 1) -> int:
        ref = joining(name, incarnation).member.instance
        return int((await self.call("Beat", store_pb2.BeatRequest(instance=ref, term=term))).term)

    async def announce(self, name: str, term: int) -> int:
        said = store_pb2.Announcement(store_id=name, incarnation=1, seq=1)
        return int((await self.call("Announce", store_pb2.AnnounceRequest(announcement=said, term=term))).term)

    async def status(self) -> store_pb2.GetStoreStatusResponse:
        found: store_pb2.GetStoreStatusResponse = await self.call("GetStatus", store_pb2.GetStoreStatusRequest())
        return found

    async def term(self) -> int:
        """Once it leads."""

        async def leads() -> int:
            told = await self.status()
            return told.term if told.leading else 0

        return int(await until(leads))


@contextlib.asynccontextmanager
async def master(config: StoreConfig) -> AsyncIterator[Master]:
    async with running(main.run, config) as service, channels.connect(service.address) as channel:
        yield Master(service, channel)


async def serves(one: Master) -> int:
    """A node of an honest mesh is taken, beats, and has what it says in the map; the term."""
    term = await one.term()
    assert term < MAX_TERM
    joined = await one.join("honest", term)
    assert joined < MAX_TERM and await one.beat("honest", joined) < MAX_TERM
    return joined


async def poisoned(one: Master) -> None:
    """All that a stranger and a member can say of terms."""
    for term in (HUGE, HUGE - 1, 1 << 30):
        with pytest.raises((UnknownInstance, InvalidRequest)):
            await one.beat("stranger", term)
        with pytest.raises((UnknownInstance, InvalidRequest)):
            await one.announce("stranger", term)
    await one.join("member")
    for term in (HUGE, HUGE - 1, 1 << 30):
        for saying in (one.join("member", term), one.beat("member", term), one.announce("member", term)):
            with contextlib.suppress(KvmeshError):
                await saying


async def test_a_stranger_moves_no_term() -> None:
    async with master(alone()) as one:
        before = await one.term()
        with pytest.raises((UnknownInstance, InvalidRequest)):
            await one.beat("stranger", HUGE)
        with pytest.raises((UnknownInstance, InvalidRequest)):
            await one.announce("stranger", HUGE - 7)
        with pytest.raises(UnknownInstance):
            await one.beat("stranger", before + 1)
        assert await one.term() == before
        await serves(one)


async def test_a_member_wastes_a_bounded_number_of_terms() -> None:
    async with master(alone()) as one:
        before = await one.term()
        await poisoned(one)
        assert await serves(one) < before + (1 << 26)


@needs_redis
async def test_with_redis_a_leader_goes_on_and_a_restart_recovers(redis: RedisServer) -> None:
    async with master(shared(redis, "poisoned")) as one:
        before = await one.term()
        await poisoned(one)
        assert await serves(one) < before + (1 << 26)
    async with master(shared(redis, "poisoned")) as one:
        assert await serves(one) < before + (1 << 26)


@needs_redis
@pytest.mark.parametrize("left", [str(HUGE), str(1 << 40), "-5", "many", ""])
async def test_a_value_left_in_redis_is_survived(redis: RedisServer, left: str) -> None:
    mesh = f"left-{len(left)}"
    async with contextlib.AsyncExitStack() as stack:
        books = Redis(redis.url, mesh, 5.0)
        stack.push_async_callback(books.close)
        await books.client.hset(books.key("terms"), "term", left)
        async with master(shared(redis, mesh)) as one:
            await serves(one)
            found = await books.client.hget(books.key("terms"), "term")
            assert 0 < int(found) < MAX_TERM


@needs_redis
@pytest.mark.parametrize("left", ["nonsense", f"{HUGE} someone.0 0 h:1"])
async def test_a_lease_left_in_redis_for_ever_is_survived(redis: RedisServer, left: str) -> None:
    mesh = f"lease-{len(left)}"
    async with contextlib.AsyncExitStack() as stack:
        books = Redis(redis.url, mesh, 5.0)
        stack.push_async_callback(books.close)
        await books.client.set(books.key("leader"), left)
        async with master(shared(redis, mesh)) as one:
            await serves(one)


@pytest.mark.parametrize("year", [1970, 2019, 2088, 9999])
async def test_a_wrong_clock_is_survived(year: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = (year - 1970) * 31_556_952.0 + 100
    monkeypatch.setattr("kvmesh.rpc.terms.wall_clock", lambda: seconds)
    monkeypatch.setattr("kvmesh.leader.leadership.wall_clock", lambda: seconds)
    async with master(alone()) as one:
        first = await serves(one)
        assert 0 < first <= (1 << 30) + 16
        assert await one.join("later", first) < MAX_TERM


@needs_redis
def test_the_verb_shows_and_forgets_terms_and_refuses_under_a_leader(redis: RedisServer) -> None:
    def terms(*args: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["terms", *args, "--redis", redis.url, "--mesh", "verb"])
        assert done.exit_code == code, done.output
        return done.output

    async def fill(**kept: str) -> None:
        books = Redis(redis.url, "verb", 5.0)
        await books.client.hset(books.key("terms"), "term", str(HUGE))
        for key, value in kept.items():
            await books.client.set(books.key(key), value)
        await books.close()

    asyncio.run(fill(leader="7 x.0 0 h:1"))
    terms("reset", "--yes", code=1)
    assert str(HUGE) in terms("reset", "--yes", "--force")
    assert "term none, nobody holds the lease" in terms("reset", "--yes")
    asyncio.run(fill())
    assert "counted as forgotten" in terms("show", "--store", "127.0.0.1:1")
    terms("reset", code=1)  # nobody has said yes
    assert str(HUGE) in terms("reset", "--yes")
