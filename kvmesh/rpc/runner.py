"""What services share. All of them: logs, traces and metrics around their life (`observed`). Control services: one
server, ticks, stop (`run`)."""

from __future__ import annotations

import asyncio
import contextlib
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
    """What one service adds to the common run. `name` is its short name ("store"), `tick_s` the seconds between
    ticks."""

    def __init__(self, name: str, *, tick_s: float) -> None:
        self.name = name
        self.tick_s = max(MIN_TICK_S, tick_s)

    @abstractmethod
    def add_to(self, server: Server) -> None:
        """Adds servicers to `server.grpc` and names them with `server.serves`. The server does not listen yet."""

    async def start(self) -> None:  # noqa: B027
        """Begins background tasks. The server listens, and nobody has been told yet. It must return soon."""

    def door(self) -> ControlFastPath | None:
        """Returns the fast path for the calls that come most often, or None. It is called once, after `add_to`."""
        return None

    @abstractmethod
    def tick(self) -> None:
        """Handles the passing of time: it is called once after `start`, then every `tick_s`. An exception ends the
        service."""

    async def close(self) -> None:  # noqa: B027
        """Ends streams and tasks, because the server is about to stop. It is called once after `start`, also when that
        failed."""


def serve_metrics(config: ServiceConfig) -> tuple[str, Callable[[], None]]:
    """Serves the metrics and probe port as `config` says; returns its address and a function that closes it.

    Raises ConfigError when the port is in use or the certificate cannot be used.
    """
    host = config.metrics_host or config.host
    tls = None
    if config.metrics_tls == "auto" and config.tls_cert:
        tls = security.watched_context(config.tls_cert, config.tls_key, "tls_cert", "tls_key")
    limits = MetricsLimits(config.metrics_connections, config.metrics_timeout_ms / 1000)
    port, close = names.serve_metrics(host, config.metrics_port, limits, tls)
    return join(host, port), close


@contextlib.asynccontextmanager
async def observed(service: str, instance_id: str, config: ServiceConfig) -> AsyncIterator[str]:
    """Runs logs, traces and metrics of a service inside the context; yields the address of the metrics.

    Raises ConfigError when the port is in use or a telemetry setting is wrong.
    """
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
    """Serves until `stop` and leaves nothing running; `started` is called with {"address", "metrics"}.

    Raises ConfigError when a port is in use or a telemetry setting is wrong.
    """
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
