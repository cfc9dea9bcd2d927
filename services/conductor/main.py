"""The conductor as a service: wiring, the clock, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable

from kvmesh.rpc.pb import conductor_pb2_grpc as pb_grpc
from kvmesh.rpc.server import Server, join
from kvmesh.telemetry import names, setup
from services.conductor.config import ConductorConfig
from services.conductor.domain import Event, Settings
from services.conductor.servicer import ConductorServicer
from services.conductor.state import ConductorState
from services.conductor.watch import MemberWatch

SERVICE = "kvmesh.v1.Conductor"
STOP_GRACE_S = 0.5
TICK_S, MIN_TICK_S = 0.2, 0.01


async def run(config: ConductorConfig, stop: asyncio.Event, started: Callable[[dict[str, object]], None]) -> None:
    """Serve until `stop`; `started` hears the addresses. Raises ConfigError when a port is in use."""
    telemetry = setup.start(
        "conductor",
        "conductor",
        trace_dir=config.trace_dir,
        otlp_endpoint=config.otlp_endpoint,
        log_level=config.log_level,
    )
    try:
        metrics_port, close_metrics = names.serve_metrics(config.host, config.metrics_port)
        try:
            await _serve(config, stop, lambda found: started({**found, "metrics": join(config.host, metrics_port)}))
        finally:
            await asyncio.to_thread(close_metrics)
    finally:
        await asyncio.to_thread(telemetry.shutdown)


async def _serve(config: ConductorConfig, stop: asyncio.Event, started: Callable[[dict[str, object]], None]) -> None:
    rng = random.Random()
    state = ConductorState(settings_of(config), rng, time.monotonic())

    def deliver(event: Event) -> None:
        servicer.deliver(event)

    watch = MemberWatch(config.store, deliver, silence_s=config.store_silence_ms / 1000, rng=rng)
    servicer = ConductorServicer(
        state,
        heartbeat_interval_ms=config.heartbeat_interval_ms,
        lease_ms=config.lease_ms,
        clock=time.monotonic,
        store_status=lambda: watch.status,
    )
    server = Server(config.host, config.port)
    pb_grpc.add_ConductorServicer_to_server(servicer, server.grpc)
    server.serves(SERVICE)
    await server.start()
    following = asyncio.create_task(watch.run(stop))
    try:
        server.set_ready(True)
        started({"address": server.address})
        while not stop.is_set():
            servicer.tick()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(MIN_TICK_S, min(TICK_S, config.lease_ms / 8000))):
                    await stop.wait()
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await server.stop(STOP_GRACE_S)


def settings_of(config: ConductorConfig) -> Settings:
    """The brain's numbers."""
    lease_s = config.lease_ms / 1000
    return Settings(
        lease_s=lease_s,
        slo_ttft_s=config.slo_ttft_ms / 1000,
        slo_tbt_s=config.slo_tbt_ms / 1000,
        stall_s=lease_s / 2,
        warm_up_s=2 * lease_s,
    )
