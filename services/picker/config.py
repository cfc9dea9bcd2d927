"""The configuration of the endpoint picker."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvmesh.config import ServiceConfig, same_as
from kvmesh.errors import ConfigError
from kvmesh.rpc.addresses import check_addresses
from kvmesh.rpc.call_limits import CallLimits
from kvmesh.services.gateway.config import GatewayConfig, model_folders

_MESSAGE_ROOM = 256 << 10  # headers and metadata beside a body


@dataclass(frozen=True, kw_only=True)
class PickerConfig(ServiceConfig):
    """ext-proc on `port`. ConfigError names the field of a bad value."""

    port: int = field(
        default=9002, metadata={"help": "gRPC port of ext-proc and health; 0 picks a free one.", "min": 0, "max": 65535}
    )
    instance_id: str = field(default="", metadata={"help": "Name in traces; empty: made from the pid."})
    conductor: str = same_as(GatewayConfig, "conductor", help="Conductors, HOST:PORT,...: they know the engines.")
    gateways: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "REST ports of kvmesh gateways, HOST:PORT with commas between: they are picked for models that no "
            "engine with a URL of its own serves. A name may stand for several (a headless service).",
            "metavar": "HOST:PORT,...",
        },
    )
    gateway_probe: str = field(
        default="http",
        metadata={
            "help": "http: a gateway is ready while its GET /ready says so; off: always (it speaks HTTPS, or the proxy "
            "checks it).",
            "choices": ("http", "off"),
        },
    )
    model: str = field(
        default="", metadata={"help": "Checkpoint folder of what engines serve: its tokenizer and chat template."}
    )
    served_name: str = same_as(GatewayConfig, "served_name")
    models: tuple[str, ...] = same_as(GatewayConfig, "models")
    special_prompts: bool = same_as(GatewayConfig, "special_prompts")
    fallbacks: int = field(
        default=2,
        metadata={"help": "Endpoints named behind the choice, for a proxy that retries.", "min": 0, "max": 63},
    )
    ttft_slo_ms: int = same_as(GatewayConfig, "ttft_slo_ms", min=0)
    tbt_slo_ms: int = same_as(GatewayConfig, "tbt_slo_ms", min=0)
    max_body_bytes: int = field(
        default=8 << 20, metadata={"help": "Longest body, bytes; 413 beyond.", "min": 1024, "max": 60 << 20}
    )
    max_request_memory: int = field(
        default=256 << 20,
        metadata={
            "help": "Bytes that bodies may take here together: half while they come, half for parsing and tokenizing. "
            "More is answered 429. At least 2 x max_body_bytes."
        },
    )
    body_timeout_s: float = field(
        default=10.0, metadata={"help": "A request must have come whole after so long; 408 then.", "min": 0.1}
    )
    stream_timeout_s: float = field(
        default=3600.0, metadata={"help": "A stream of a proxy, one request, ends after so long.", "min": 0.1}
    )
    max_streams: int = field(
        default=8192, metadata={"help": "Requests at once; more wait at the proxy, or are refused.", "min": 1}
    )
    schedule_timeout_ms: int = field(
        default=1000,
        metadata={
            "help": "Longest wait for a placement; then the choice is made by load, as it was last known.",
            "min": 1,
        },
    )
    max_placing: int = same_as(
        GatewayConfig, "max_placing", default=1024, min=1, help="Placements under way at once; others wait for one."
    )
    threads: int = same_as(GatewayConfig, "threads", min=1)
    text_cache_mb: int = field(
        default=64,
        metadata={
            "help": "MiB of known prompts of a model: one that begins as an earlier one did is tokenized and hashed "
            "where it is new.",
            "min": 1,
        },
    )
    destination_namespace: str = field(
        default="envoy.lb", metadata={"help": "Namespace of the metadata in which endpoints are told."}
    )
    subset_namespace: str = field(
        default="envoy.lb.subset_hint", metadata={"help": "Namespace of the metadata in which proxies tell a subset."}
    )
    stop_delay_ms: int = same_as(GatewayConfig, "stop_delay_ms")
    stop_grace_ms: int = same_as(GatewayConfig, "stop_grace_ms")

    def __post_init__(self) -> None:
        for address in self.gateways:
            check_addresses(address, "gateways")
        if len(set(self.gateways)) != len(self.gateways):
            raise ConfigError(f"gateways={','.join(self.gateways)!r}: names one of them twice", field="gateways")
        if self.max_request_memory < 2 * self.max_body_bytes:
            raise ConfigError(
                f"max_request_memory={self.max_request_memory}: must be at least 2 x max_body_bytes "
                f"({2 * self.max_body_bytes})",
                field="max_request_memory",
            )
        for key in ("destination_namespace", "subset_namespace"):
            if not getattr(self, key):
                raise ConfigError(f"{key}='': must not be empty", field=key)
        self.folders  # noqa: B018 (refuses what it cannot read)

    @property
    def folders(self) -> dict[str, str]:
        """Checkpoint folder of every model by name. Raises ConfigError."""
        return model_folders(self.served_name or Path(self.model).name, self.model, self.models)

    @property
    def call_limits(self) -> CallLimits:
        """The bounds of the gRPC server."""
        return CallLimits(
            message_bytes=self.max_body_bytes + _MESSAGE_ROOM, calls=self.max_streams + 256, streams=self.max_streams
        )
