"""What services share. All of them: logs, traces and metrics around their life (`observed`). Control services: one
server, ticks, stop (`run`)."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable

from kvmesh.config import ServiceConfig
from kvmesh.rpc import security
from kvmesh.rpc.fastpath.control import ControlFastPath
from kvmesh.rpc.server import Server, join
from kvmesh.telemetry import names, setup
from kvmesh.telemetry.metrics_server import MetricsLimits

STOP_GRACE_S = 0.5
MIN_TICK_S = 0.01


class ServiceRunner(ABC):
    """What one service adds to the common run. `name` is its short name ("store"), `tick_s` the pause between ticks."""

    def __init__(self, name: str, *, tick_s: float) -> None:
        self.name = name
        self.tick_s = max(MIN_TICK_S, tick_s)

    @abstractmethod
    def add_to(self, server: Server) -> None:
        """Add servicers to `server.grpc` and name them with `server.serves`. It does not listen yet."""

    async def start(self) -> None:  # noqa: B027
        """The server listens and nobody was told: begin background tasks. Must return soon."""

    def door(self) -> ControlFastPath | None:
        """Beside gRPC, for the calls that come most often. Asked once, after `add_to`."""
        return None

    @abstractmethod
    def tick(self) -> None:
        """Time passes: once after `start`, then every `tick_s`. What it raises ends the service."""

    async def close(self) -> None:  # noqa: B027
        """End streams and tasks: the server is about to stop. Called once after `start`, also when that failed."""


def serve_metrics(config: ServiceConfig) -> tuple[str, Callable[[], None]]:
    """Serve the metrics and probe port as `config` says; returns its address and what closes it.

    Raises ConfigError when the port is in use or the certificate cannot be used."""
    host = config.metrics_host or config.host
    tls = None
    if config.metrics_tls == "auto" and config.tls_cert:
        security.load_pair(config.tls_cert, config.tls_key, "tls_cert", "tls_key")  # names what is wrong
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(config.tls_cert, config.tls_key, password="")
    limits = MetricsLimits(config.metrics_connections, config.metrics_timeout_ms / 1000)
    port, close = names.serve_metrics(host, config.metrics_port, limits, tls)
    return join(host, port), close


@contextlib.asynccontextmanager
async def observed(service: str, instance_id: str, config: ServiceConfig) -> AsyncIterator[str]:
    """Logs, traces and metrics of a service while it lives; gives the address of its metrics.

    Raises ConfigError when their port is in use or a setting of the telemetry is wrong."""
    telemetry = setup.start(
        service,
        instance_id,
        trace_dir=config.trace_dir,
        otlp_endpoint=config.otlp_endpoint,
        log_level=config.log_level,
        log_file=config.log_file,
        limits=setup.TelemetryLimits.of(config),
    )
    try:
        metrics, close_metrics = serve_metrics(config)
        try:
            yield metrics
        finally:
            await asyncio.to_thread(close_metrics)
    finally:
        await asyncio.to_thread(telemetry.shutdown)


async def run(
    service: ServiceRunner, config: ServiceConfig, stop: asyncio.Event, started: Callable[[dict[str, object]], None]
) -> None:
    """Serve until `stop`; `started` hears {"address", "metrics"}. Nothing is left running.

    Raises ConfigError when a port is in use or a setting of the telemetry is wrong."""
    async with observed(service.name, service.name, config) as metrics:
        await _serve(service, config, stop, started, metrics)


async def _serve(
    service: ServiceRunner,
    config: ServiceConfig,
    stop: asyncio.Event,
    started: Callable[[dict[str, object]], None],
    metrics: str,
) -> None:
    server = Server(config.host, config.port)
    service.add_to(server)
    door = service.door()
    if door is not None:
        door.add_to(server)
    await server.start()
    try:
        try:
            if door is not None:
                await door.open(config.host)
            await service.start()
            server.set_ready(True)
            started({"address": server.address, "metrics": metrics})
            while not stop.is_set():
                service.tick()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(service.tick_s):
                        await stop.wait()
        finally:
            if door is not None:
                await door.close()
            await service.close()
    finally:
        await server.stop(STOP_GRACE_S)
