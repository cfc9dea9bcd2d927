"""The gateway as a service: REST and gRPC on one event loop, wiring, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Collection
from typing import Any

from kvmesh.errors import ConfigError
from kvmesh.rpc import security
from kvmesh.rpc.pb import gateway_pb2_grpc
from kvmesh.rpc.public_calls import PublicCalls
from kvmesh.rpc.runner import serve_metrics
from kvmesh.rpc.server import Server
from kvmesh.services.gateway import servicer
from kvmesh.services.gateway.conductor import Catalog, Conductor
from kvmesh.services.gateway.config import GatewayConfig
from kvmesh.services.gateway.core import GatewayCore
from kvmesh.services.gateway.hold_gate import HoldGate
from kvmesh.services.gateway.key_file import KeyFile
from kvmesh.services.gateway.models import Models
from kvmesh.services.gateway.pool_member import PoolMemberMetrics
from kvmesh.services.gateway.quota_book import QuotaBook, RedisQuotas
from kvmesh.services.gateway.request_memory import RequestMemory
from kvmesh.services.gateway.rest import app
from kvmesh.services.gateway.rest.hosts import HostCheck, checks_hosts
from kvmesh.services.gateway.rest.http_server import HttpServer
from kvmesh.services.gateway.rest.response_store import open_store
from kvmesh.services.gateway.sessions import Key, Sessions
from kvmesh.services.gateway.text.answers.families import FAMILIES, find_family
from kvmesh.services.gateway.text.prepare import Preparer
from kvmesh.services.gateway.text.tokenizer import Tokenizer
from kvmesh.telemetry import names

log = logging.getLogger(__name__)

_GRPC_GRACE_S = 0.5


async def run(config: GatewayConfig, stop: asyncio.Event, started: Callable[[dict[str, object]], None]) -> None:
    """Serve until `stop`; `started` hears the addresses (gRPC, "http", "metrics"). ConfigError: a port in use,
    no model, bad API keys or certificates; CheckpointError: no tokenizer there."""
    models = Models(await _preparers(config))
    keys = KeyFile(config.api_keys)
    keys.load()
    http_tls = security.watched_context(config.http_tls_cert, config.http_tls_key, "http_tls_cert", "http_tls_key")
    names.activate("gateway")
    async with contextlib.AsyncExitStack() as stack:
        metrics, close_metrics = serve_metrics(config)
        stack.push_async_callback(asyncio.to_thread, close_metrics)
        conductor = Conductor(
            config.conductor,
            timeout_s=config.schedule_timeout_ms / 1000,
            retry_s=config.schedule_retry_ms / 1000,
            max_waiting=config.max_waiting_batch,
            max_placing=config.max_placing,
        )
        stack.push_async_callback(conductor.close)
        gateway_id = config.instance_id or f"gateway-{os.getpid()}"
        sessions = Sessions(gateway_id, secrets.randbits(63), config.session_timeout_ms / 1000)
        stack.push_async_callback(sessions.close)
        memory = RequestMemory(config.request_memory)
        responses = await open_store(config.response_store, config.response_bounds, config.mesh)
        stack.push_async_callback(responses.close)
        quotas = QuotaBook(RedisQuotas(config.quota_redis, config.mesh) if config.quota_redis else None)
        stack.push_async_callback(quotas.close)
        await quotas.beat()  # so that the first request is decided by all gateways
        calls = PublicCalls(
            config.call_limits,
            servicer.GatewayPolicy(keys, memory),
            open_methods=(servicer.STATUS,),
            without_message=(servicer.STATUS,),
        )
        grpc_server = Server(config.host, config.port, public=calls, limits=config.call_limits)

        def on_ready(ready: bool) -> None:
            ready = ready and not core.leaving
            names.GATEWAY_READY.set(ready)
            grpc_server.set_ready(ready, core.not_ready_reason)

        def on_instances(living: Collection[Key]) -> None:
            sessions.keep_only(living)

        holds = HoldGate(config.hold_limits, models.names)
        catalog = Catalog(conductor, models, on_ready=on_ready, on_instances=on_instances, holds=holds)
        core = GatewayCore(config, models, keys, conductor, sessions, catalog, memory, responses, quotas, holds)
        stack.callback(core.close)
        member = PoolMemberMetrics(list(models), core.queues)
        names.REGISTRIES["gateway"].register(member)
        stack.callback(names.REGISTRIES["gateway"].unregister, member)
        stack.push_async_callback(core.traces.close)
        gateway_pb2_grpc.add_GatewayServicer_to_server(servicer.GatewayServicer(core), grpc_server.grpc)
        grpc_server.serves(servicer.SERVICE)
        await grpc_server.start()
        stack.push_async_callback(grpc_server.stop, _GRPC_GRACE_S)
        application: Any = app.build(core)
        if checks_hosts(config, keys=keys.required):
            application = HostCheck(application, config.allowed_hosts)
        http = HttpServer(application, config, http_tls)
        await http.start()
        stack.push_async_callback(http.stop)
        for name, work in (("catalog", catalog.run()), ("api keys", keys.follow()), ("quotas", quotas.run())):
            stack.push_async_callback(_end, asyncio.create_task(work, name=name))
        started(
            {
                "address": grpc_server.address,
                "http": http.address,
                "scheme": "https" if http_tls else "http",
                "metrics": metrics,
            }
        )
        await stop.wait()
        await _drain(core, grpc_server, config.stop_grace_ms / 1000)


async def _preparers(config: GatewayConfig) -> dict[str, Preparer]:
    folders, named = config.folders, config.answer_families
    if not folders:
        raise ConfigError("model='': the gateway needs a checkpoint folder (its tokenizer)", field="model")
    # One prompt is one call: rayon's threads would only wait for each other.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    found = {}
    for name, folder in folders.items():
        tokenizer = await asyncio.to_thread(Tokenizer.load, folder)
        guess = find_family(tokenizer.model_type, tokenizer.templates.get("default", ""))
        family = FAMILIES[named[name]] if name in named else guess
        log.info("model %s: answers are read as those of %s", name, family.name)
        found[name] = Preparer(tokenizer, special_prompts=config.special_prompts, family=family)
    return found


async def _drain(core: GatewayCore, server: Server, grace_s: float) -> None:
    """Not ready, for so long as those who look at that need to see it; what runs gets a little time, then one clear
    error."""
    core.leaving = True
    server.set_ready(False, "shutting down")
    await asyncio.sleep(core.config.stop_delay_ms / 1000)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            await core.idle.wait()
    if core.running:
        log.warning("stopping with %d requests in flight", len(core.running))
    core.stopping = True
    core.holds.close()
    await core.sessions.close()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
