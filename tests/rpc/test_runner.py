"""The common run of services without ranks: what is started ends, in order, whatever fails."""

import asyncio
import contextlib
import urllib.request
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.config import ServiceConfig
from kvmesh.errors import ConfigError
from kvmesh.rpc import channels, runner
from kvmesh.rpc.server import Server, check_port
from tests.support.services import running, until


class Recorder(runner.ServiceRunner):
    def __init__(self, failing: str = "") -> None:
        super().__init__("store", tick_s=0.0)
        self.seen: list[str] = []
        self.ticks = 0
        self.port = 0
        self._failing = failing
        self._server: Server | None = None

    def _saw(self, what: str) -> None:
        self.seen.append(what)
        if what == self._failing:
            raise ZeroDivisionError(what)

    def add_to(self, server: Server) -> None:
        self._server = server
        server.serves("kvmesh.v1.StoreMaster")
        self._saw("add_to")

    async def start(self) -> None:
        assert self._server is not None
        self.port = self._server.port
        self._saw("start")

    def tick(self) -> None:
        self.ticks += 1
        if self.ticks == 1:
            self._saw("tick")

    async def close(self) -> None:
        self._saw("close")

    async def run(self, config: Any, stop: asyncio.Event, started: Any) -> None:
        await runner.run(self, config, stop, started)


async def test_serves_until_stopped() -> None:
    service = Recorder()
    assert service.tick_s == runner.MIN_TICK_S
    async with running(service.run, ServiceConfig()) as live, channels.connect(live.address) as channel:
        assert service.port == live.port

        async def serving() -> bool:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service="kvmesh.v1.StoreMaster"), timeout=10)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        async def ticking() -> bool:
            return service.ticks >= 3

        await until(serving)
        await until(ticking)
        assert "kvmesh_store_build_info" in await asyncio.to_thread(_fetch, f"http://{live.metrics}/metrics")
    assert service.seen == ["add_to", "start", "tick", "close"]
    check_port("127.0.0.1", live.port)
    check_port("127.0.0.1", int(live.metrics.rpartition(":")[2]))


@pytest.mark.parametrize("failing", ["start", "tick", "close"])
async def test_a_failure_leaves_nothing_running(failing: str) -> None:
    service = Recorder(failing)
    with pytest.raises(ZeroDivisionError, match=failing):
        async with running(service.run, ServiceConfig()) as live:
            await asyncio.wait_for(live.stop(), 30)
    assert service.seen[-1] == "close"
    check_port("127.0.0.1", service.port)


async def test_a_port_in_use_is_named_before_anything_starts() -> None:
    async with running(Recorder().run, ServiceConfig()) as live:
        second = Recorder()
        with pytest.raises(ConfigError, match=f"port={live.port}"):
            await runner.run(second, ServiceConfig(port=live.port), asyncio.Event(), lambda _: None)
        assert second.seen == ["add_to"]


def _fetch(url: str) -> str:
    with contextlib.closing(urllib.request.urlopen(url, timeout=10)) as answer:
        return str(answer.read().decode())
