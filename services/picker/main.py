"""The endpoint picker as a service: wiring, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable

from kvmesh.rpc.pb import envoy_external_processor_pb2_grpc as pb_grpc
from kvmesh.rpc.runner import serve_metrics
from kvmesh.rpc.server import Server
from kvmesh.services.gateway.conductor import Conductor
from kvmesh.services.gateway.request_memory import RequestMemory
from kvmesh.services.gateway.text.tokenizer import Tokenizer
from kvmesh.services.picker import servicer
from kvmesh.services.picker.catalog import EndpointCatalog
from kvmesh.services.picker.config import PickerConfig
from kvmesh.services.picker.picker import EndpointPicker
from kvmesh.services.picker.prompts import PromptReader
from kvmesh.services.picker.releases import CALL_S, RequestReleases
from kvmesh.telemetry import names

log = logging.getLogger(__name__)

LIVENESS, READINESS = "liveness", "readiness"  # names of health that the protocol asks for
_GRPC_GRACE_S = 0.5


async def run(config: PickerConfig, stop: asyncio.Event, started: Callable[[dict[str, object]], None]) -> None:
    """Serves until `stop`; `started` hears the addresses (gRPC, "metrics"). Raises ConfigError: a port in use, a bad
    address; CheckpointError: no tokenizer there."""
    readers = await _readers(config)
    names.activate("picker")
    async with contextlib.AsyncExitStack() as stack:
        metrics, close_metrics = serve_metrics(config)
        stack.push_async_callback(asyncio.to_thread, close_metrics)
        conductor = Conductor(
            config.conductor,
            timeout_s=config.schedule_timeout_ms / 1000,
            retry_s=0.0,  # a request that cannot be placed goes by load at once
            max_waiting=0,
            max_placing=config.max_placing,
        )
        stack.push_async_callback(conductor.close)
        releases = RequestReleases(lambda some: conductor.release(some, CALL_S))
        stack.push_async_callback(releases.close)
        server = Server(config.host, config.port, limits=config.call_limits)

        def on_ready(ready: bool, why_not: str) -> None:
            names.PICKER_READY.set(ready)
            server.set_ready(ready and not stop.is_set(), "shutting down" if stop.is_set() else why_not)

        probes = config.gateway_probe != "off"
        catalog = EndpointCatalog(conductor, config.gateways, probes=probes, on_ready=on_ready)
        memory = RequestMemory(config.max_request_memory)
        picker = EndpointPicker(config, readers, conductor, catalog, memory, releases)
        stack.callback(picker.close)
        process = servicer.PickerServicer(config, picker, catalog, memory, releases)
        pb_grpc.add_ExternalProcessorServicer_to_server(process, server.grpc)
        server.serves(servicer.SERVICE)
        server.answers_probe(LIVENESS, live=True)
        server.answers_probe(READINESS, live=False)
        await server.start()
        stack.push_async_callback(server.stop, _GRPC_GRACE_S)
        looking = asyncio.create_task(catalog.run(), name="catalog")
        stack.push_async_callback(_end, looking)
        started({"address": server.address, "metrics": metrics})
        waiting = asyncio.create_task(stop.wait(), name="stop")
        stack.push_async_callback(_end, waiting)
        await asyncio.wait((looking, waiting), return_when=asyncio.FIRST_COMPLETED)
        if looking.done():
            looking.result()  # it never ends by itself
        server.set_ready(False, "shutting down")
        await asyncio.sleep(config.stop_delay_ms / 1000)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(config.stop_grace_ms / 1000):
                await process.idle.wait()
        process.stopping = True


async def _readers(config: PickerConfig) -> dict[str, PromptReader]:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one prompt is one call
    found = {}
    for name, folder in config.folders.items():
        tokenizer = await asyncio.to_thread(Tokenizer.load, folder)
        reader = PromptReader(tokenizer, special_prompts=config.special_prompts, cache_bytes=config.text_cache_mb << 20)
        log.info("model %s: known texts are %s", name, "divided" if reader.texts.divides else "kept whole")
        found[name] = reader
    if not found:
        log.info("no model is named: requests go by load, not by the prefixes that engines hold")
    return found


async def _end(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
