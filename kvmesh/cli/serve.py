"""`kvmesh serve SERVICE`: one service in this process, from flags, environment, a TOML file and defaults."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import typer

from kvmesh.cli import options
from kvmesh.cli.console import one_line_errors
from kvmesh.cli.up.advertising import resolved
from kvmesh.config import ServiceConfig, load
from kvmesh.errors import ConfigError
from kvmesh.loading import lasting_imports

log = logging.getLogger("kvmesh.cli.serve")

_NOT_GIVEN = "127.0.0.1:0"  # of the configurations: no port


@dataclass(frozen=True)
class Service:
    """What a service is, an example of starting it alone, and where its code lies: `config` names the module and class
    of its configuration, `main` the module with its `run`."""

    text: str
    example: str
    config: tuple[str, str]
    main: str


def _service(name: str, text: str, example: str) -> Service:
    config = (f"kvmesh.services.{name}.config", f"{name.capitalize()}Config")
    return Service(text, example, config, f"kvmesh.services.{name}.main")


SERVICES: dict[str, Service] = {
    "gateway": _service(
        "gateway",
        "Front door: OpenAI-compatible REST and gRPC; tokenizes, asks the conductor, streams.",
        "--model ./my-model --conductor 127.0.0.1:7001 --http-port 8000 --port 8001",
    ),
    "conductor": _service(
        "conductor",
        "Global scheduler: decides where each request is prefilled and decoded, or refuses it.",
        "--port 7001 --store 127.0.0.1:7002",
    ),
    "prefill": _service(
        "prefill",
        "Computes prompts and pushes their KV, layer by layer, to decode instances.",
        "--model ./my-model --port 7010 --conductor 127.0.0.1:7001 --store 127.0.0.1:7002",
    ),
    "decode": _service(
        "decode",
        "Takes KV from prefill instances and generates tokens in one continuous batch.",
        "--model ./my-model --port 7020 --conductor 127.0.0.1:7001 --store 127.0.0.1:7002",
    ),
    "coupled": Service(
        "Prefill and decode in one instance: prompts are computed beside the answers that it generates, in one batch. "
        "For one device, or as half of any pair; `kvmesh role` makes it prefill, decode or both while it runs.",
        "--model ./my-model --port 7040 --conductor 127.0.0.1:7001 --store 127.0.0.1:7002",
        ("kvmesh.services.coupled.config", "CoupledConfig"),
        "kvmesh.services.coupled.main",
    ),
    "external": Service(
        "External instances: engines that are not kvmesh's own (vLLM, or whatever speaks its HTTP interface with token "
        "ids), scheduled like kvmesh's instances: SLO admission, prefix affinity, explain, traces, circuit breakers, "
        "migration. An engine needs no change; its /metrics are read, and its prefix cache is believed to hold what "
        "was placed there (docs/howto/external-engines.md).",
        "--url http://127.0.0.1:8100,http://127.0.0.1:8101 --model ./my-model --conductor 127.0.0.1:7001",
        ("kvmesh.external.config", "ExternalConfig"),
        "kvmesh.external.main",
    ),
    "store": _service(
        "store",
        "Store master: membership and the block map.",
        "--port 7002",
    ),
    "picker": _service(
        "picker",
        "Endpoint picker of the Gateway API Inference Extension (ext-proc): a proxy asks it where a request shall go. "
        "It tokenizes a prompt once and asks the conductor, or picks the least loaded gateway; it names an endpoint "
        "and fallbacks, or answers 429 and 503 itself.",
        "--conductor 127.0.0.1:7001 --model ./my-model --gateways 127.0.0.1:8000 --port 9002",
    ),
    "ranks": Service(
        "Rank host: runs ranks of instances whose front is on another machine (their --rank-hosts).",
        "--host 10.0.0.2 --port 7050 --model ./my-model --store 10.0.0.1:7002",
        ("kvmesh.instance.rank_host_config", "RanksConfig"),
        "kvmesh.instance.rank_host",
    ),
    "pool": Service(
        "Pool node: memory for KV blocks, without an engine; other nodes put cold blocks there and read them.",
        "--port 7030 --store 127.0.0.1:7002 --memory-mb 4096",
        ("kvmesh.pool.config", "PoolConfig"),
        "kvmesh.pool.pool",
    ),
}

STOP_S = 20.0  # for all of a stop but its grace

# Variables of the KVMESH_ namespace that are no service's configuration.
RESERVED_KEYS = frozenset(("parent_pid", "url", "api_key", "namespace", "native", "amx", "rank_log"))

PRECEDENCE = (
    "Every option may also come from the environment as KVMESH_<NAME> (KVMESH_LOG_LEVEL=debug) or from a TOML file "
    'given with --config (log_level = "debug"). A flag wins over the environment, the environment over the file, '
    "the file over the default. Unknown keys are refused."
)


@cache
def config_class(service: str) -> type[ServiceConfig]:
    """`GatewayConfig` of "gateway", and so on."""
    module, name = SERVICES[service].config
    cls: type[ServiceConfig] = getattr(importlib.import_module(module), name)
    return cls


@cache
def known_keys() -> frozenset[str]:
    """Configuration keys of any service: an environment is shared by all services of a machine."""
    from kvmesh.cli.up.settings import MeshSettings

    classes: list[Any] = [config_class(name) for name in SERVICES]
    fields = [field for cls in [*classes, MeshSettings] for field in dataclasses.fields(cls)]
    keys = {field.name for field in fields if not field.metadata.get("internal")}
    return frozenset(keys) | RESERVED_KEYS


def register(app: typer.Typer) -> None:
    """Add one command a service, its options made from the fields of its configuration."""
    for service, about in SERVICES.items():
        text = f"{about.text}\n\n{PRECEDENCE}\n\nExample:\n\n    kvmesh serve {service} {about.example}"
        app.command(service, help=text)(_command(service))


def _command(service: str) -> Callable[..., None]:
    @one_line_errors
    def command(**given: Any) -> None:
        path = given.pop("config")
        config = load(config_class(service), given, toml=path, env=os.environ, also_known=known_keys())
        serve(service, config)

    return options.taking(command, service, [*options.of_config(config_class(service)), options.CONFIG])


def _grace_s(config: ServiceConfig) -> float:
    """What it may take on stop before that is a hang, seconds."""
    return sum(getattr(config, key, 0) for key in ("stop_delay_ms", "stop_grace_ms", "evacuate_ms")) / 1000


def serve(service: str, config: ServiceConfig) -> None:
    """Run one service until it is told to stop."""
    from kvmesh.cli.up import hashing
    from kvmesh.instance.config import InstanceConfig
    from kvmesh.instance.rank_lending import placed
    from kvmesh.rpc import exposure, process, security
    from kvmesh.rpc.addresses import split
    from kvmesh.rpc.server import check_port
    from kvmesh.telemetry import setup

    process.follow_supervisor()
    for key in ("port", "http_port", "metrics_port"):  # before a model is loaded for minutes
        host = config.metrics_host if key == "metrics_port" else ""
        check_port(host or config.host, getattr(config, key, 0), key)
    for key in ("conductor", "store"):
        if (addresses := getattr(config, key, None)) is not None and (addresses or service != "ranks"):
            for address in split(addresses, key):
                check_peer(key, address)
    config = resolved(config)
    security.configure(config)
    if getattr(config, "instance_id", None) == "":
        config = dataclasses.replace(cast(Any, config), instance_id=f"{service}-{config.node_id}-{os.getpid()}")
    telemetry = setup.start(
        service,
        getattr(config, "instance_id", service),
        trace_dir=config.trace_dir,
        otlp_endpoint=config.otlp_endpoint,
        log_level=config.log_level,
        log_file=config.log_file,
        limits=setup.TelemetryLimits.of(config),
    )
    if warning := exposure.warning(config):
        log.warning("%s", warning)
    try:
        if isinstance(config, InstanceConfig) and config.model and hashing.on_terminal():
            hashing.fingerprints([config.model], cache_dir=config.cache_dir)  # elsewhere its ranks log how far it is
        if service == "decode" and getattr(config, "local_prefill_tokens", False):
            from kvmesh.services.coupled.config import CoupledConfig

            service, config = "coupled", CoupledConfig.of_decode(cast(Any, config))
        with lasting_imports():
            run = importlib.import_module(SERVICES[service].main).run

        def started(told: dict[str, object]) -> None:
            log.info("serving %s", " ".join(f"{key}={value}" for key, value in told.items()))
            if config.ready_file:
                write_ready(Path(config.ready_file), told)

        async def main(stop: asyncio.Event) -> None:
            placed_config = await placed(config, stop) if isinstance(config, InstanceConfig) else config
            if placed_config is not None:
                await run(placed_config, stop, started)
            log.info("stopped")

        process.run(main, stop_s=STOP_S + _grace_s(config))
    except ConfigError:
        raise
    except Exception as err:
        log.critical("failed: %s", err, exc_info=err)
        raise typer.Exit(1) from None
    finally:
        telemetry.shutdown()


def check_peer(key: str, address: str) -> None:
    """ConfigError unless it names a port: without its peer, such a service would wait for ever and be of no use."""
    port = address.rpartition(":")[2]
    if address == _NOT_GIVEN:
        raise ConfigError(f"{key}: not given; --{key} HOST:PORT says where it is", field=key)
    if not (port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"{key}={address!r}: must be HOST:PORT (--{key})", field=key)


def write_ready(path: Path, told: dict[str, object]) -> None:
    """Write the ready file so that a reader sees all of it or none. ConfigError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(json.dumps({"pid": os.getpid(), **told}), encoding="utf-8")
        part.replace(path)
    except OSError as err:
        raise ConfigError(f"ready_file={str(path)!r}: {err.strerror}", field="ready_file") from None
