"""A mesh paces itself: with a small budget four instances beat ever more rarely, and nobody is lost; when they go, the
one that stays beats more often again. Real conductor, real store master, real registrars, in this process."""

import contextlib
from collections.abc import AsyncIterator

import pytest

from kvmesh.rpc.pb import store_pb2
from kvmesh.services.conductor import main as conductor_main
from kvmesh.services.conductor.config import ConductorConfig
from kvmesh.services.store import main as store_main
from kvmesh.services.store.config import StoreConfig
from tests.membership.test_registration import TIMEOUT, Instance, Mesh, alive
from tests.support.services import Running, running, until

PACE = {"heartbeat_interval_ms": 100, "lease_ms": 500, "heartbeats_per_s": 1}  # four by the door count as one
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")


@pytest.fixture
async def services() -> AsyncIterator[tuple[Running, Running]]:
    async with running(store_main.run, StoreConfig(**PACE)) as store:
        config = ConductorConfig(store=store.address, **PACE)
        async with running(conductor_main.run, config) as conductor:
            yield store, conductor


async def intervals(mesh: Mesh) -> tuple[int, int]:
    """As the conductor and the store master tell them now, ms."""
    store = await mesh.store.GetStatus(store_pb2.GetStoreStatusRequest(), timeout=TIMEOUT)
    return (await mesh.status()).heartbeat_interval_ms, store.heartbeat_interval_ms


@pytest.mark.slow
async def test_it_stretches_loses_nobody_and_shrinks_again(
    services: tuple[Running, Running], caplog: pytest.LogCaptureFixture
) -> None:
    store, conductor = services
    mesh = Mesh(store.address, conductor.address)
    caplog.set_level("INFO", "kvmesh.membership.registrar")
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(mesh.close)
        assert await intervals(mesh) == (100, 100)
        stayed = Instance(conductor.address, store.address, NAMES[0])
        await stack.enter_async_context(alive(stayed))
        async with contextlib.AsyncExitStack() as others:
            for name in NAMES[1:]:
                await others.enter_async_context(alive(Instance(conductor.address, store.address, name)))
            await mesh.settled(*((name, 1) for name in NAMES))

            async def slow() -> bool:
                return min(await intervals(mesh)) >= 800 and all(
                    peer._interval_s >= 0.8 for peer in (stayed.registrar._store, *stayed.registrar._conductors)
                )

            await until(slow)

            async def silent_for_longer_than_the_lease_that_is_set() -> bool:
                told = (await mesh.status()).instances
                assert len(told) == 4 and all(one.ready for one in told)
                return any(one.silent_ms > 600 for one in told)

            await until(silent_for_longer_than_the_lease_that_is_set)
            assert len(await mesh.members()) == 4

        async def quick() -> bool:
            assert await mesh.ready() == [(NAMES[0], 1)] and await mesh.members() == [(NAMES[0], 1)]
            return max(await intervals(mesh)) <= 300 and all(
                peer._interval_s <= 0.3 for peer in (stayed.registrar._store, *stayed.registrar._conductors)
            )

        await until(quick)
    told = [record.message for record in caplog.records if record.name == "kvmesh.membership.registrar"]
    assert len(told) == 8, f"each registered twice, and once each: {told}"
