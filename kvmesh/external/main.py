"""`kvmesh serve external`: an external instance for each endpoint, as flags and the file of endpoints say."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from kvmesh.errors import KvmeshError
from kvmesh.external import endpoints
from kvmesh.external.config import ExternalConfig
from kvmesh.external.endpoints import EngineEndpoint
from kvmesh.external.engine_client import EngineClient
from kvmesh.external.facts import EngineFacts, ModelFolder
from kvmesh.external.instance import ExternalInstance, find
from kvmesh.rpc.runner import observed
from kvmesh.rpc.server import Server
from kvmesh.telemetry import names
from kvmesh.watched_files import WatchedFiles

log = logging.getLogger(__name__)

LOOK_S = 0.5
ANEW_S = 0.2  # before an instance begins another life
STOP_S = 5.0  # beyond the grace, for streams to end and conductors to be told


async def run(config: ExternalConfig, stop: asyncio.Event, started: Callable[[dict[str, object]], None]) -> None:
    """Serves until `stop`. Raises ConfigError at start: a flag, the model's folder, or the file of endpoints."""
    config.check()
    names.activate("external")
    host = ExternalHost(config)
    async with observed("external", config.instance_id or "external", config) as metrics:
        await host.run(stop, lambda address: started({"address": address, "metrics": metrics}))


class ExternalHost:
    """The external instances of one process. Raises ConfigError for what is wrong with flags and files."""

    def __init__(self, config: ExternalConfig) -> None:
        self._config = config
        self._folder = ModelFolder.read(config.model, config.served_name)
        given = endpoints.of_urls(config.url)
        self._file: WatchedFiles[tuple[EngineEndpoint, ...]] | None = None
        if path := config.endpoints_file:
            # A name or URL that a flag has, too, is refused as one that the file has twice.
            read = lambda: endpoints.checked((*given, *endpoints.of_file(path)), "endpoints")  # noqa: E731
            self._file = WatchedFiles(f"endpoints of {path}", [path], read)
        self._given = given
        self._lives: dict[str, _EndpointLives] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    async def run(self, stop: asyncio.Event, started: Callable[[str], None]) -> None:
        """Starts and ends instances as the endpoints change, until `stop`."""
        server = Server(self._config.host, self._config.port)  # of health checks alone: instances have their own
        await server.start()
        try:
            server.set_ready(True)
            started(server.address)
            while not stop.is_set():
                self._follow(self._given if self._file is None else await asyncio.to_thread(self._file.value))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await stop.wait()
        finally:
            self._follow(())
            if self._leaving:
                _, late = await asyncio.wait(self._leaving, timeout=self._config.stop_grace_ms / 1000 + STOP_S)
                for task in late:
                    task.cancel()
                await asyncio.gather(*late, return_exceptions=True)
            await server.stop(0.5)

    def _follow(self, wanted: tuple[EngineEndpoint, ...]) -> None:
        running = {name: lives.endpoint for name, lives in self._lives.items()}
        changes = endpoints.changes(running, wanted)
        for name in changes.leave:
            lives = self._lives.pop(name)
            log.info("endpoint %s leaves: %s", name, lives.endpoint.url)
            lives.stop.set()
            self._leaving.add(lives.task)
            lives.task.add_done_callback(self._leaving.discard)
        for one in changes.join:
            log.info("endpoint %s joins: %s", one.name, one.url)
            self._lives[one.name] = _EndpointLives(self._config, one, self._folder)
        names.EXTERNAL_ENDPOINTS.set(len(self._lives))


class _EndpointLives:
    """The lives of one endpoint's instance, one after another, until `stop` is set."""

    def __init__(self, config: ExternalConfig, endpoint: EngineEndpoint, folder: ModelFolder) -> None:
        self._config = config
        self.endpoint = endpoint
        self._folder = folder
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(self._run(), name=f"external {endpoint.name}")

    async def _run(self) -> None:
        config = self._config
        client = EngineClient(
            self.endpoint.url,
            api_key=config.engine_api_key,
            timeout_s=config.engine_timeout_ms / 1000,
            max_running=self.endpoint.max_running or config.max_running,
        )
        try:
            while not self.stop.is_set():
                try:
                    await self._live(client)
                except Exception:
                    log.exception("external instance %s failed; it begins anew", self.endpoint.name)
                    await asyncio.sleep(ANEW_S)
        finally:
            await client.close()

    async def _live(self, client: EngineClient) -> None:
        facts: EngineFacts | None = None
        unknown = ""
        try:
            facts = await find(client, self.endpoint, self._config, self._folder)
        except KvmeshError as err:
            unknown = err.message
            log.warning("external instance %s gets no work: %s", self.endpoint.name, unknown)
        instance = ExternalInstance(self._config, self.endpoint, self._folder, client, facts, unknown)
        await instance.run(self.stop, 0)
