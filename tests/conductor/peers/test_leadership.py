"""Several conductors and a real Redis: who leads, what becomes of operators' words, what a lost Redis costs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh.cli.up.plan import Ports
from kvmesh.errors import ConfigError, Unavailable, UnknownInstance
from kvmesh.leader.redis_lease import Redis
from kvmesh.rpc import channels
from kvmesh.rpc.pb import conductor_pb2 as pb
from kvmesh.rpc.pb import conductor_pb2_grpc, store_pb2, store_pb2_grpc
from kvmesh.rpc.process import PARENT_ENV
from kvmesh.services.conductor import main
from kvmesh.services.conductor.config import ConductorConfig
from kvmesh.services.conductor.domain import Cordon, CordonState, Event, Lead
from kvmesh.services.conductor.peers.cordon_book import CordonBook
from kvmesh.services.conductor.peers.leadership import PART, ConductorLeadership
from kvmesh.services.store import main as store_main
from kvmesh.services.store.config import StoreConfig
from tests.conductor.test_service import beat, failing, registering, scheduling
from tests.support.redis_server import RedisServer, needs_redis, redis_server
from tests.support.services import Running, running, until
from tests.support.store.mesh import joining

TIMEOUT = 10.0
LEASE_MS = 600
NOWHERE = "127.0.0.1:1"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as started:
        yield started


def config(redis: RedisServer | None, mesh: str = "m", store: str = NOWHERE, **more: Any) -> ConductorConfig:
    lease = {"redis": redis.url, "mesh": mesh, "leader_lease_ms": LEASE_MS} if redis is not None else {}
    return ConductorConfig(store=store, heartbeat_interval_ms=50, lease_ms=60_000, **(lease | more))


class One:
    """A conductor and what is asked of it."""

    def __init__(self, service: Running) -> None:
        self.service = service
        self.channel = channels.connect(service.address)
        self.stub: Any = conductor_pb2_grpc.ConductorStub(self.channel)

    async def serve(self, *names: str) -> None:
        """These instances are known and ready there."""
        for name in names:
            await self.stub.Register(registering(name), timeout=TIMEOUT)
            await self.stub.Heartbeat(beat(name), timeout=TIMEOUT)

    async def status(self) -> Any:
        return await self.stub.GetStatus(pb.GetConductorStatusRequest(), timeout=TIMEOUT)

    async def role(self) -> str:
        return str((await self.status()).leadership.role)

    async def leads(self) -> bool:
        return await self.role() == "leader"

    async def cordon(self, name: str, state: int, reason: str = "") -> Any:
        request = pb.CordonRequest(instance_id=name, state=state, reason=reason)  # type: ignore[arg-type]
        return await self.stub.Cordon(request, timeout=TIMEOUT)

    async def reasons(self) -> dict[str, str]:
        return {i.instance.instance_id: i.not_ready_reason for i in (await self.status()).instances}


@contextlib.asynccontextmanager
async def conductor(settings: ConductorConfig) -> AsyncIterator[One]:
    async with running(main.run, settings) as service:
        one = One(service)
        try:
            yield one
        finally:
            await one.channel.close()


async def test_alone_it_leads() -> None:
    async with conductor(config(None)) as one:
        told = (await one.status()).leadership
        assert (told.role, told.term, told.leader) == ("alone", 1, one.service.address)


@needs_redis
async def test_one_leads_the_other_stands_by_and_follows(redis: RedisServer) -> None:
    async with conductor(config(redis, "two")) as a:
        await until(a.leads)
        async with (
            conductor(config(redis, "two")) as b,
            conductor(config(redis, "another mesh".replace(" ", "-"))) as c,
        ):
            await until(c.leads)
            leader, other, term = await until(lambda: leader_and_standby(a, b))
            for one in (a, b):
                await one.serve("p0", "d0")
                assert (await one.stub.Schedule(scheduling(), timeout=TIMEOUT)).placement.decode.instance_id == "d0"
            await leader.service.stop()
            await until(other.leads)
            assert (await other.status()).leadership.term > term


async def leader_and_standby(*pair: One) -> tuple[One, One, int] | None:
    """Who of two leads, who stands by and names that one, and the term; None while it is not so. A machine that stands
    still for longer than the lease may give the lead to the other one: nothing here depends on which it is."""
    for leader, other in (pair, pair[::-1]):
        leads, stands_by = (await leader.status()).leadership, (await other.status()).leadership
        if (leads.role, stands_by.role, stands_by.leader) == ("leader", "standby", leader.service.address):
            return leader, other, leads.term
    return None


def conductor_process(port: int, redis: RedisServer, mesh: str, log: Path) -> subprocess.Popen[bytes]:
    flags = {"port": port, "store": NOWHERE, "redis": redis.url, "mesh": mesh, "leader-lease-ms": LEASE_MS}
    argv = [sys.executable, "-m", "kvmesh.cli", "serve", "conductor", *(f"--{k}={v}" for k, v in flags.items())]
    with log.open("wb") as out:
        env = {**os.environ, PARENT_ENV: str(os.getpid())}
        return subprocess.Popen(argv, stdout=out, stderr=out, env=env)


@needs_redis
async def test_a_leader_that_is_killed_is_followed(redis: RedisServer, tmp_path: Path) -> None:
    port, log = Ports().take(), tmp_path / "log"
    process = conductor_process(port, redis, "killed", log)
    try:
        leader = f"127.0.0.1:{port}"

        async with channels.connect(leader) as channel:
            stub: Any = conductor_pb2_grpc.ConductorStub(channel)

            async def leads() -> bool:
                assert process.poll() is None, log.read_text()
                request = pb.GetConductorStatusRequest()
                with contextlib.suppress(grpc.RpcError):
                    return (await stub.GetStatus(request, timeout=TIMEOUT)).leadership.role == "leader"
                return False

            await until(leads, 60.0)
        async with conductor(config(redis, "killed")) as heir:

            async def follows() -> bool:
                return (await heir.status()).leadership.leader == leader

            await until(follows)
            assert await heir.role() == "standby"
            process.kill()
            await until(heir.leads)
    finally:
        process.kill()
        process.wait(10)


@needs_redis
async def test_without_redis_it_places_and_orders_nothing(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        async with conductor(config(server)) as one:
            await one.serve("p0", "d0")
            await until(one.leads)
            server.kill()

            async def ended() -> bool:
                return await one.role() == "standby"

            await asyncio.wait_for(until(ended), LEASE_MS / 1000 + TIMEOUT)
            await one.stub.Heartbeat(beat("p0", seq=2), timeout=TIMEOUT)
            assert (await one.stub.Schedule(scheduling(), timeout=TIMEOUT)).placement.prefill.instance_id == "p0"
            told = await failing(one.cordon("p0", pb.CORDON_STATE_CORDONED))
            assert isinstance(told, Unavailable) and "redis" in told.message
            assert (await one.reasons())["p0"] == "", "nothing has changed"
            server.start()
            await until(one.leads)


@needs_redis
async def test_a_leader_that_stood_still_orders_nothing_when_it_wakes(redis: RedisServer) -> None:
    """Its clock jumps past its lease while another takes over: before anything else the brain hears that it is over."""
    clocks, heard = {"a": 100.0, "b": 100.0}, {"a": [], "b": []}  # type: ignore[var-annotated]
    real = asyncio.get_running_loop().time

    def office(name: str) -> ConductorLeadership:
        start = real()
        return ConductorLeadership(config(redis, "frozen"), heard[name].append, lambda: clocks[name] + real() - start)

    a, b = office("a"), office("b")
    try:
        await a.open("a:1")
        await until(lambda: _so(a.leads()))
        await b.open("b:1")
        await asyncio.sleep(0)
        assert not b.leads()
        a._leadership._running.cancel()  # type: ignore[union-attr]  # it stands still
        await until(lambda: _so(b.leads()))
        clocks["a"] += LEASE_MS / 1000
        assert not a.leads(), "its lease has run out, whoever asks"
        assert [type(e) for e in heard["a"]] == [Lead, Lead]
        assert heard["a"][0].term > 0 and heard["a"][1] == Lead(0)
        assert heard["b"] == [Lead(heard["b"][0].term)] and heard["b"][0].term > heard["a"][0].term
    finally:
        await a.close()
        await b.close()


async def _so(what: bool) -> bool:
    return what


# ── operators' words ──────────────────────────────────────────────────────────────────────────────


@needs_redis
async def test_a_word_reaches_every_conductor_and_the_next_one(redis: RedisServer) -> None:
    # Redis has a part of the lease to answer in: on a machine that does other things, too.
    settings = config(redis, "words", leader_lease_ms=60_000)
    async with conductor(settings) as a, conductor(settings) as b:
        await a.serve("p0", "d0")
        await b.serve("p0", "d0")
        assert isinstance(await failing(a.cordon("p9", pb.CORDON_STATE_CORDONED)), UnknownInstance)
        assert (await a.cordon("p0", pb.CORDON_STATE_CORDONED, "bad fan")).was == pb.CORDON_STATE_UNSPECIFIED
        assert (await a.reasons())["p0"] == "cordoned: bad fan", "at once where it was said"

        async def everywhere(one: One, reason: str) -> bool:
            return (await one.reasons()).get("p0") == reason

        await until(lambda: everywhere(b, "cordoned: bad fan"))
        async with conductor(settings) as late:
            await late.serve("p0", "d0")
            assert (await late.reasons())["p0"] == "cordoned: bad fan", "read before it took its first instance"
        assert (await b.cordon("p0", pb.CORDON_STATE_UNSPECIFIED)).was == pb.CORDON_STATE_CORDONED
        await until(lambda: everywhere(a, ""))


@contextlib.asynccontextmanager
async def book(server: RedisServer, mesh: str) -> AsyncIterator[tuple[CordonBook, list[Event]]]:
    redis, heard = Redis(server.url, mesh, 2.0, PART), []  # type: ignore[var-annotated]
    opened = CordonBook(redis, heard.append)
    try:
        yield opened, heard
    finally:
        await opened.close()
        await redis.close()


@needs_redis
async def test_a_redis_that_forgets_is_told_again(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        async with book(server, "m") as (a, _), book(server, "m") as (b, heard):
            await a.put(Cordon("p0", CordonState.CORDONED, "reason with spaces"))
            await a.put(Cordon("p1", CordonState.DRAINING))
            await b.sync()
            kept = [
                Cordon("p0", CordonState.CORDONED, "reason with spaces", kept=True),
                Cordon("p1", CordonState.DRAINING, "", kept=True),
            ]
            assert sorted(heard, key=str) == sorted(kept, key=str)
            server.kill()
            server.start()
            async with book(server, "m") as (c, fresh):
                await c.sync()
                assert fresh == [], "as Redis has it: nothing"
                await c.put(Cordon("p9", CordonState.CORDONED))  # by a conductor that was started after Redis
                await b.put(Cordon("p1", CordonState.OPEN))
                await c.sync()
                await a.sync()
                assert {(e.instance_id, e.state) for e in fresh[1:]} == {  # type: ignore[union-attr]
                    ("p9", CordonState.OPEN),
                    ("p0", CordonState.CORDONED),
                }, "those who knew more have the last word"


@needs_redis
async def test_there_is_a_limit_in_redis_too(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvmesh.services.conductor.peers.cordon_book.MAX_CORDONS", 2)
    async with book(redis, "limit") as (a, _):
        for name in ("p0", "p1", "p0"):
            await a.put(Cordon(name, CordonState.CORDONED))
        with pytest.raises(Exception, match="2 instances are cordoned already"):
            await a.put(Cordon("p2", CordonState.CORDONED))
        await a.put(Cordon("p0", CordonState.OPEN))
        await a.put(Cordon("p2", CordonState.CORDONED))


async def test_a_drain_is_told_to_the_store_master_and_taken_back() -> None:
    settings = StoreConfig(heartbeat_interval_ms=50, lease_ms=60_000)
    async with (
        running(store_main.run, settings) as store,
        conductor(config(None, store=store.address)) as one,
        channels.connect(store.address) as channel,
    ):
        master: Any = store_pb2_grpc.StoreMasterStub(channel)
        await one.serve("p0", "p0.dp1", "d0")
        told = await failing(one.cordon("p0", pb.CORDON_STATE_DRAINING, "old"))
        assert isinstance(told, Unavailable) and "the store master does not know it" in told.message
        reasons = await one.reasons()
        assert reasons["p0"] == reasons["p0.dp1"] == "draining: old", "no place gets work all the same"
        assert not reasons["d0"]
        for place in ("p0", "p0.dp1"):
            await master.Join(joining(place), timeout=TIMEOUT)

        async def draining() -> list[str]:
            status = await master.GetStatus(store_pb2.GetStoreStatusRequest(), timeout=TIMEOUT)
            return [s.member.store_id for s in status.stores if s.draining]

        assert await draining() == []
        await one.cordon("p0.dp1", pb.CORDON_STATE_DRAINING, "old")
        assert sorted(await draining()) == ["p0", "p0.dp1"], "what is said of a place holds for its instance"
        assert (await one.cordon("p0", pb.CORDON_STATE_UNSPECIFIED)).was == pb.CORDON_STATE_DRAINING
        assert await draining() == []
        await one.cordon("p0", pb.CORDON_STATE_CORDONED)
        assert await draining() == [], "a cordon alone moves nothing"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"redis": "10.0.0.1:6379"}, "redis='10.0.0.1:6379': must be redis://"),
        ({"mesh": "a:b"}, "mesh='a:b'"),
        ({"advertise": "here"}, "advertise='here'"),
        ({"redis": "redis://h/0", "host": "0.0.0.0"}, "advertise=''"),
        ({"leader_lease_ms": 5}, "leader_lease_ms=5"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        main.ConductorService(ConductorConfig(store=NOWHERE, **settings))
    assert text in caught.value.message
