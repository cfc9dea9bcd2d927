"""The store master as a service: wiring, the clock, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable

from kvmesh.rpc.pb import store_pb2_grpc as pb_grpc
from kvmesh.rpc.server import Server, join
from kvmesh.telemetry import names, setup
from services.store.config import StoreConfig
from services.store.servicer import StoreMasterServicer
from services.store.state import MasterState, Publish, Role

SERVICE = "kvmesh.v1.StoreMaster"
STOP_GRACE_S = 0.5
TICK_S, MIN_TICK_S = 0.25, 0.01


async def run(config: StoreConfig, stop: asyncio.Event, started: Callable[[dict[str, object]], None]) -> None:
    """Serve until `stop`; `started` hears the addresses. Raises ConfigError when a port is in use."""
    telemetry = setup.start(
        "store",
        "store",
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


async def _serve(config: StoreConfig, stop: asyncio.Event, started: Callable[[dict[str, object]], None]) -> None:
    state = MasterState(lease_s=config.lease_ms / 1000, stall_s=config.lease_ms / 2000)
    servicer = StoreMasterServicer(
        state,
        incarnation=secrets.randbits(63) | 1,
        heartbeat_interval_ms=config.heartbeat_interval_ms,
        lease_ms=config.lease_ms,
        watch_queue=config.watch_queue,
        clock=time.monotonic,
        observe=_count,
    )
    server = Server(config.host, config.port)
    pb_grpc.add_StoreMasterServicer_to_server(servicer, server.grpc)
    server.serves(SERVICE)
    await server.start()
    try:
        server.set_ready(True)
        started({"address": server.address})
        while not stop.is_set():
            servicer.tick()
            _gauge(state, servicer)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(MIN_TICK_S, min(TICK_S, config.heartbeat_interval_ms / 1000))):
                    await stop.wait()
    finally:
        servicer.close()
        await server.stop(STOP_GRACE_S)


def _count(event: Publish) -> None:
    names.STORE_CHANGES.labels(change=event.change.value).inc()


def _gauge(state: MasterState, servicer: StoreMasterServicer) -> None:
    roles = Counter(member.role for member in state.members)
    for role in Role:
        names.STORE_MEMBERS.labels(role=role.value).set(roles[role])
    names.STORE_HEARTBEAT_AGE.set(state.longest_silence_s(time.monotonic()))
    names.STORE_WATCHERS.set(servicer.watchers)
