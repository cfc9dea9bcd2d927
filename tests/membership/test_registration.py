"""Registrars against a real store master and a real conductor in this process."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvmesh.errors import UnknownInstance
from kvmesh.membership.registrar import Acknowledged, MembershipPeer, Registrar
from kvmesh.rpc import channels, protocol
from kvmesh.rpc.pb import common_pb2, conductor_pb2, conductor_pb2_grpc, store_pb2, store_pb2_grpc
from kvmesh.rpc.server import Server
from kvmesh.services.conductor import main as conductor_main
from kvmesh.services.conductor.config import ConductorConfig
from kvmesh.services.store import main as store_main
from kvmesh.services.store.config import StoreConfig
from tests.support.services import Running, running, until

TIMEOUT = 10.0


def store_config(port: int = 0) -> StoreConfig:
    return StoreConfig(port=port, heartbeat_interval_ms=50, lease_ms=1000)


def conductor_config(store: str, port: int = 0) -> ConductorConfig:
    return ConductorConfig(port=port, store=store, heartbeat_interval_ms=50, lease_ms=1000)


class Instance:
    """What a front would be to its registrar."""

    def __init__(self, conductor: str, store: str, name: str = "prefill-0", incarnation: int = 1) -> None:
        self.fresh = conductor_pb2.HeartbeatRequest(load=conductor_pb2.Load(free_pages=10))
        self.is_ready = True
        self.reports = 0
        self.failing = False
        self.ref = common_pb2.InstanceRef(instance_id=name, address="127.0.0.1:9", incarnation=incarnation)
        role = common_pb2.ROLE_PREFILL if name.startswith("prefill") else common_pb2.ROLE_DECODE
        card = common_pb2.ModelCard(name="demo", fingerprint="f", block_tokens=16, max_context_tokens=1000)
        self.registrar = Registrar(
            self.ref, role, "node", card, 100, 8, conductor, store, self.report, lambda: self.is_ready
        )

    def report(self) -> conductor_pb2.HeartbeatRequest:
        self.reports += 1
        if self.failing:
            raise RuntimeError("no idea how I am")
        fresh, self.fresh = self.fresh, conductor_pb2.HeartbeatRequest(load=self.fresh.load)
        fresh.not_ready_reason = "" if self.is_ready else "warming up"
        return fresh


@contextlib.asynccontextmanager
async def alive(instance: Instance) -> AsyncIterator[asyncio.Event]:
    stop = asyncio.Event()
    task = asyncio.create_task(instance.registrar.run(stop))
    try:
        yield stop
    finally:
        stop.set()
        await asyncio.wait_for(task, TIMEOUT)


class Mesh:
    """Asks the two services what they know."""

    def __init__(self, store: str, conductor: str) -> None:
        self.store_channel = channels.connect(store)
        self.conductor_channel = channels.connect(conductor)
        self.store: Any = store_pb2_grpc.StoreMasterStub(self.store_channel)
        self.conductor: Any = conductor_pb2_grpc.ConductorStub(self.conductor_channel)

    async def close(self) -> None:
        await self.store_channel.close()
        await self.conductor_channel.close()

    async def members(self) -> list[tuple[str, int]]:
        answer = await self.store.ListMembers(store_pb2.ListMembersRequest(), timeout=TIMEOUT, wait_for_ready=True)
        return [(m.instance.instance_id, m.instance.incarnation) for m in answer.members]

    async def status(self) -> Any:
        request = conductor_pb2.GetConductorStatusRequest()
        return await self.conductor.GetStatus(request, timeout=TIMEOUT, wait_for_ready=True)

    async def ready(self) -> list[tuple[str, int]]:
        return [(i.instance.instance_id, i.instance.incarnation) for i in (await self.status()).instances if i.ready]

    async def settled(self, *expected: tuple[str, int]) -> None:
        """Both know exactly these, and the conductor follows the master."""

        async def so() -> bool:
            assert sorted(await self.members()) == sorted(expected)
            assert sorted(await self.ready()) == sorted(expected)
            assert (await self.status()).store_master == "connected"
            return True

        await until(so)


@pytest.fixture
async def store() -> AsyncIterator[Running]:
    async with running(store_main.run, store_config()) as service:
        yield service


@pytest.fixture
async def conductor(store: Running) -> AsyncIterator[Running]:
    async with running(conductor_main.run, conductor_config(store.address)) as service:
        yield service


@pytest.fixture
async def mesh(store: Running, conductor: Running) -> AsyncIterator[Mesh]:
    found = Mesh(store.address, conductor.address)
    yield found
    await found.close()


async def test_it_registers_beats_and_says_goodbye(mesh: Mesh, store: Running, conductor: Running) -> None:
    instance = Instance(conductor.address, store.address)
    async with alive(instance):
        await mesh.settled(("prefill-0", 1))
        assert instance.registrar.registered == {"conductor": True, "store": True}
        (status,) = (await mesh.status()).instances
        assert status.load.free_pages == 10
        assert status.capacity_blocks == 100
    assert await mesh.members() == []
    assert instance.registrar.registered == {"conductor": False, "store": False}
    assert await mesh.ready() == []


async def test_not_ready_and_a_failing_report_take_it_out_of_service(
    mesh: Mesh, store: Running, conductor: Running, caplog: pytest.LogCaptureFixture
) -> None:
    instance = Instance(conductor.address, store.address)

    async def reason() -> str:
        (status,) = (await mesh.status()).instances
        return str(status.not_ready_reason)

    async with alive(instance):
        await mesh.settled(("prefill-0", 1))
        instance.is_ready = False

        async def warming() -> bool:
            return await reason() == "warming up"

        await until(warming)
        instance.is_ready = instance.failing = True

        async def failed() -> bool:
            return "report failed" in await reason()

        await until(failed)
        instance.failing = False
        await mesh.settled(("prefill-0", 1))
    assert "no idea how I am" in caplog.text


@pytest.mark.parametrize("restarted", ["store", "conductor"])
@pytest.mark.slow
async def test_a_restart_of_either_is_healed(restarted: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(running(store_main.run, store_config()))
        conductor = await stack.enter_async_context(running(conductor_main.run, conductor_config(store.address)))
        mesh = Mesh(store.address, conductor.address)
        stack.push_async_callback(mesh.close)
        await stack.enter_async_context(alive(Instance(conductor.address, store.address)))
        await mesh.settled(("prefill-0", 1))
        if restarted == "store":
            await store.stop()

            async def on_its_own() -> bool:  # the conductor says so and goes on with its own heartbeats
                status = await mesh.status()
                return status.store_master != "connected" and await mesh.ready() == [("prefill-0", 1)]

            await until(on_its_own)
            await stack.enter_async_context(running(store_main.run, store_config(store.port)))
        else:
            await conductor.stop()
            assert await mesh.members() == [("prefill-0", 1)]
            config = conductor_config(store.address, conductor.port)
            await stack.enter_async_context(running(conductor_main.run, config))
        await mesh.settled(("prefill-0", 1))


async def test_a_new_incarnation_replaces_the_old_for_good(mesh: Mesh, store: Running, conductor: Running) -> None:
    async with alive(Instance(conductor.address, store.address, incarnation=1)):
        await mesh.settled(("prefill-0", 1))
        async with alive(Instance(conductor.address, store.address, incarnation=2)):
            await mesh.settled(("prefill-0", 2))
            events = mesh.store.Watch(store_pb2.WatchRequest())
            seqs = {(await asyncio.wait_for(events.read(), TIMEOUT)).seq for _ in range(5)}
            events.cancel()
            assert len(seqs) == 1  # the old one does not take the name back
    assert await mesh.ready() == []


async def test_beats_carry_the_usage_and_bring_the_pool_nodes(mesh: Mesh, store: Running, conductor: Running) -> None:
    """A pool node joins the master alone; an instance hears of it, with the bytes that it has left."""
    ref = common_pb2.InstanceRef(instance_id="pool-0", address="127.0.0.1:8", incarnation=4)
    free = [70]
    usage = lambda: store_pb2.StoreUsage(capacity_bytes=100, free_bytes=free[0], blocks=3)  # noqa: E731
    pool = Registrar.pool_node(ref, "node", store.address, usage)
    heard: list[list[tuple[str, int]]] = []
    instance = Instance(conductor.address, store.address)
    instance.registrar = Registrar(
        instance.ref, common_pb2.ROLE_PREFILL, "node", common_pb2.ModelCard(name="demo", fingerprint="f",
        block_tokens=16, max_context_tokens=1000), 100, 8, conductor.address, store.address, instance.report,
        lambda: True, on_pools=lambda pools: heard.append([(p.instance.instance_id, p.free_bytes) for p in pools]),
    )  # fmt: skip
    async with alive(instance):
        stop = asyncio.Event()
        beating = asyncio.create_task(pool.run(stop))
        await until(lambda: _so(heard[-1:] == [[("pool-0", 70)]]))
        assert pool.registered == {"store": True}
        free[0] = 5
        pool.urge_store()
        pool.urge()  # nobody to hurry for, and no error
        await until(lambda: _so(heard[-1:] == [[("pool-0", 5)]]))
        assert await mesh.ready() == [("prefill-0", 1)], "the conductor never hears of it"
        (told,) = [
            s
            for s in (await mesh.store.GetStatus(store_pb2.GetStoreStatusRequest())).stores
            if s.member.role == common_pb2.ROLE_POOL
        ]
        assert (told.usage.capacity_bytes, told.usage.blocks) == (100, 3)
        stop.set()
        await asyncio.wait_for(beating, TIMEOUT)
        await until(lambda: _so(heard[-1:] == [[]]))


async def _so(what: bool) -> bool:
    return what


class Deaf(conductor_pb2_grpc.ConductorServicer):
    """A conductor that takes heartbeats in but fails to acknowledge them while `failing`."""

    def __init__(self, version: int = protocol.PROTOCOL_VERSION) -> None:
        self.failing = False
        self.beats: list[Any] = []
        self.registrations = 0
        self.version = version
        self.known = True

    async def Register(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.registrations += 1
        if self.version != protocol.PROTOCOL_VERSION:
            protocol.check(self.version, "this test")
        self.known = True
        return conductor_pb2.RegisterInstanceResponse(heartbeat_interval_ms=20_000, lease_ms=60_000)

    async def Heartbeat(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.beats.append(request)
        if not self.known:
            raise UnknownInstance("who?")
        if self.failing:
            raise RuntimeError("lost")
        return conductor_pb2.HeartbeatResponse()

    async def Schedule(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    ListModels = GetStatus = Schedule


@contextlib.asynccontextmanager
async def deaf(servicer: Deaf) -> AsyncIterator[str]:
    server = Server("127.0.0.1", 0)
    conductor_pb2_grpc.add_ConductorServicer_to_server(servicer, server.grpc)
    await server.start()
    yield server.address
    await server.stop(0)


async def count(what: list[Any], at_least: int) -> None:
    async def enough() -> bool:
        return len(what) >= at_least

    await until(enough)


async def test_what_was_not_acknowledged_is_sent_again_once_and_in_order() -> None:
    servicer = Deaf()
    servicer.failing = True
    async with deaf(servicer) as address:
        instance = Instance(address, "127.0.0.1:1")
        instance.fresh.prefill_samples.add(request_id="a", computed_tokens=5)
        instance.fresh.finished_request_ids.append("a")
        async with alive(instance):
            await count(servicer.beats, 2)
            instance.fresh.finished_request_ids.append("b")
            instance.fresh.decode_samples.add(batch=3)
            await count(servicer.beats, len(servicer.beats) + 2)
            failed = len(servicer.beats)
            servicer.failing = False
            await count(servicer.beats, failed + 1)
            acknowledged = servicer.beats[-1]
            instance.registrar.urge()
            await count(servicer.beats, len(servicer.beats) + 1)
        assert [s.request_id for s in acknowledged.prefill_samples] == ["a"]
        assert list(acknowledged.finished_request_ids) == ["a", "b"]
        assert [s.batch for s in acknowledged.decode_samples] == [3]
        after = servicer.beats[servicer.beats.index(acknowledged) + 1]
        assert not after.prefill_samples
        assert not after.finished_request_ids
        assert not after.decode_samples
        seqs = [beat.seq for beat in servicer.beats]
        assert seqs == sorted(set(seqs))
        last = servicer.beats[-1]
        assert not last.ready
        assert last.not_ready_reason == "shutting down"


async def test_urging_beats_soon_and_coalesces() -> None:
    servicer = Deaf()
    async with deaf(servicer) as address, alive(instance := Instance(address, "127.0.0.1:1")):
        await count(servicer.beats, 1)  # the next is due in 20 s
        for _ in range(100):
            instance.registrar.urge()
        await count(servicer.beats, 2)
        instance.registrar.urge()
        await count(servicer.beats, 3)
        assert len(servicer.beats) == 3


async def test_not_known_any_more_means_registering_again_at_once() -> None:
    servicer = Deaf()
    async with deaf(servicer) as address, alive(instance := Instance(address, "127.0.0.1:1")):
        await count(servicer.beats, 1)
        servicer.known = False
        instance.registrar.urge()
        await count(servicer.beats, 3)
        assert servicer.registrations == 2


async def test_another_protocol_is_an_error_in_the_log_and_tried_slowly(caplog: pytest.LogCaptureFixture) -> None:
    servicer = Deaf(version=99)
    async with deaf(servicer) as address, alive(Instance(address, "127.0.0.1:1")):

        async def refused() -> bool:
            return any("refuses" in r.message and r.levelname == "ERROR" for r in caplog.records)

        await until(refused)
        assert servicer.registrations == 1
        assert not servicer.beats


async def test_with_nobody_there_it_ends_quietly() -> None:
    instance = Instance("127.0.0.1:1", "127.0.0.1:1")
    async with alive(instance):
        assert instance.registrar.registered == {"conductor": False, "store": False}


class NeverBeats(MembershipPeer):
    """Enters, and fails with its first beat."""

    name = "nobody"
    service = conductor_pb2.DESCRIPTOR.services_by_name["Conductor"]
    fast = "Heartbeat"
    address = "127.0.0.1:9"

    def __init__(self, stop: asyncio.Event) -> None:
        super().__init__(random.Random(1))
        self.failures: list[int] = []
        self._stop = stop

    async def _enter(self, channel: Any, timeout_s: float) -> Acknowledged:
        return Acknowledged(10, 1000)

    async def _beat(self, line: Any, timeout_s: float) -> Acknowledged:
        raise RuntimeError("a bug")

    async def _goodbye(self, line: Any, timeout_s: float) -> None:
        pass

    def _after(self, error: Exception, failures: int) -> float:
        self.failures.append(failures)
        if len(self.failures) == 4:
            self._stop.set()
        return min(super()._after(error, failures), 0.01)


async def test_to_enter_is_no_success_when_no_beat_follows() -> None:
    """It backs off: a bug met in each beat had it enter again fifty times a second."""
    stop = asyncio.Event()
    peer = NeverBeats(stop)
    await asyncio.wait_for(peer.run(stop), TIMEOUT)
    assert peer.failures == [1, 2, 3, 4]
