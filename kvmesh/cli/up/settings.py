"""What `kvmesh up` can be told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvmesh.blockservice.tiers.config import TierConfig
from kvmesh.cli.up.instance_groups import DTYPES, METAVAR, InstanceGroup, groups_of
from kvmesh.config import ServiceConfig, same_as, without_password
from kvmesh.engine.axes import Axes
from kvmesh.errors import ConfigError
from kvmesh.external.endpoints import EngineEndpoint, endpoint
from kvmesh.external.endpoints import checked as checked_endpoints
from kvmesh.instance.config import InstanceConfig
from kvmesh.ranks.transfer_config import TransferConfig, check
from kvmesh.rpc.addresses import is_loopback
from kvmesh.services.conductor.config import ConductorConfig
from kvmesh.services.decode.config import DecodeConfig
from kvmesh.services.gateway.config import GatewayConfig

_PORT = {"min": 0, "max": 65535}
_GROUPS = {"metavar": METAVAR, "repeat": True}
_RANKS = {"min": 1, "max": 64}
CONDUCTOR_PORT, STORE_PORT = 7001, 7002  # of the first ones, where other machines can join
EVERY_ADDRESS = ("", "0.0.0.0", "::")  # to listen on

INSTANCES = ("prefill", "decode", "coupled")  # services whose instances have ranks


@dataclass(frozen=True, slots=True)
class Served:
    """One model of a mesh. `path`: as given, or its checkpoint folder; `prefix`: of its instances' names."""

    name: str
    path: str
    prefix: str


@dataclass(frozen=True, slots=True)
class Joined:
    """The mesh that this machine's instances serve in: host:port of its conductors and store masters."""

    conductors: tuple[str, ...]
    masters: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MeshSettings:
    """One mesh on this machine, or (`join`) this machine's part of one; `joined`: what was found there.

    `flags` and `env` are for tests and benchmarks: by process name ("decode-0"), by service ("decode") or "*" for all;
    a service takes only what its configuration knows."""

    model: str = field(
        default="",
        metadata={
            "help": "Checkpoint folder, Hugging Face id, or demo-moe; empty: the demo model.",
            "metavar": "PATH|HUB_ID",
        },
    )
    served_name: str = field(default="", metadata={"help": "Model name clients use; empty: made from the model."})
    add_model: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Another model in the same mesh, with as many instances of its own; may be given several times.",
            "metavar": "[NAME=]PATH",
            "repeat": True,
        },
    )
    prefill: int | str = field(
        default=1,
        metadata={
            "help": "Prefill instances of each model. Given several times for instances on other devices or of another "
            "dtype than --device and --dtype say: --prefill 2 --prefill 1@cpu:float32 "
            "(docs/howto/serve-several-models.md).",
            **_GROUPS,
        },
    )
    decode: int | str = field(default=1, metadata={"help": "The same of decode instances.", **_GROUPS})
    coupled: int | str = field(
        default=0,
        metadata={
            "help": "Instances of each model that do both (docs/operate/coupled.md); then --prefill and --decode may "
            "be 0.",
            **_GROUPS,
        },
    )
    external: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "An engine that is not kvmesh's own (vLLM), as an instance of the mesh; may be given several "
            "times; then --prefill and --decode may be 0 (docs/howto/external-engines.md).",
            "metavar": "http://HOST:PORT",
            "repeat": True,
        },
    )
    external_file: str = field(
        default="",
        metadata={
            "help": "JSON or YAML file of more such engines, which may change while they serve.",
            "metavar": "FILE",
        },
    )
    external_name: str = field(
        default="",
        metadata={
            "help": "Model name of the external engines; empty: that of the model. Needed where kvmesh's own instances "
            "serve it as well, whose KV fits no engine of others."
        },
    )
    prefill_tp: int = field(
        default=1,
        metadata={"help": "Rank processes that share each prefill instance's model (tensor parallel).", **_RANKS},
    )
    decode_tp: int = field(
        default=1,
        metadata={"help": "The same of each decode instance; the two may differ.", **_RANKS},
    )
    coupled_tp: int = field(default=1, metadata={"help": "The same of each coupled instance.", **_RANKS})
    prefill_mesh: str = field(
        default="",
        metadata={
            "help": "Along which axes rank processes share each prefill instance's model, in place of --prefill-tp: "
            "pp=4,tp=2 are four stages of layers of two ranks each (docs/operate/pipelines.md).",
            "metavar": "AXIS=N,...",
        },
    )
    decode_mesh: str = field(
        default="", metadata={"help": "The same of each decode instance.", "metavar": "AXIS=N,..."}
    )
    coupled_mesh: str = field(
        default="", metadata={"help": "The same of each coupled instance.", "metavar": "AXIS=N,..."}
    )
    prefill_hosts: int = field(
        default=1,
        metadata={
            "help": "Machines that the ranks of each prefill instance are on: this one and those that join with "
            "--as ranks (docs/operate/rank-hosts.md).",
            "metavar": "N",
            **_RANKS,
        },
    )
    decode_hosts: int = field(
        default=1, metadata={"help": "The same of each decode instance.", "metavar": "N", **_RANKS}
    )
    coupled_hosts: int = field(
        default=1, metadata={"help": "The same of each coupled instance.", "metavar": "N", **_RANKS}
    )
    rank_network: str = same_as(
        InstanceConfig,
        "rank_network",
        help="Interface (eth1) or network (10.0.0.0/8) over which ranks on several machines compute; under TLS "
        "it must be named, which says that it is trusted. Empty: the way to the other machines.",
        metavar="INTERFACE|NETWORK",
    )
    masters: int = field(
        default=1, metadata={"help": "Store masters, of which one leads; several need --redis.", "min": 1, "max": 9}
    )
    conductors: int = field(
        default=1,
        metadata={
            "help": "Conductors: all place, one of them orders; several need --redis "
            "(docs/operate/conductor-operation.md).",
            "min": 1,
            "max": 9,
        },
    )
    redis: str = field(
        default="",
        metadata={
            "help": "Redis that says which master and which conductor leads; auto: a redis-server of this mesh's own.",
            "secret": True,
            "metavar": "auto|redis://HOST:PORT/0",
        },
    )
    pool: int = field(default=0, metadata={"help": "Pool nodes: memory without an engine.", "min": 0, "max": 64})
    pool_memory_mb: int = field(default=256, metadata={"help": "KV memory of each pool node, MiB.", "min": 1})
    store_eviction: str = same_as(TierConfig, "store_eviction")
    ssd_path: str = same_as(
        TierConfig,
        "ssd_path",
        help="Folder of the SSD tier, a subfolder for each instance; empty: none.",
        metavar="FOLDER",
    )
    ssd_capacity_mb: int = same_as(TierConfig, "ssd_capacity_mb", help="Size of each instance's SSD tier, MiB.")
    object_url: str = same_as(
        TierConfig,
        "object_url",
        help="Object storage for all instances' blocks, like s3://bucket/prefix; empty: none.",
        metavar="URL",
    )
    warm_segment: str = same_as(
        TierConfig,
        "warm_segment",
        help="Folder in a tmpfs (/dev/shm/...): host segments there outlive their instances; empty: none.",
    )
    host: str = field(
        default="127.0.0.1",
        metadata={
            "help": "Address that all services listen on and others dial; other machines can join at one that they "
            "reach (docs/operate/multi-host.md)."
        },
    )
    advertise_host: str = same_as(
        TransferConfig,
        "advertise_host",
        help="Address that others dial, where it is not --host; auto: this machine's own on its default route.",
        metavar="ADDRESS|auto",
    )
    join: str = field(
        default="",
        metadata={
            "help": "Serve in a mesh on other machines, found by its conductors (port 7001 if none is given); only "
            "instances and pool nodes are started here.",
            "metavar": "HOST[:PORT],...",
        },
    )
    join_as: str = field(
        default="instances",
        metadata={
            "help": "What this machine gives with --join: instances of its own (and pool nodes), or ranks to instances "
            "of other machines (their --prefill-hosts, --decode-hosts, --coupled-hosts).",
            "choices": ("instances", "ranks"),
            "metavar": "instances|ranks",
            "flag": "--as",
        },
    )
    node_id: str = same_as(
        ServiceConfig, "node_id", default="", help="Name of this machine in the mesh; empty: its host name."
    )
    conductor_port: int | None = field(
        default=None,
        metadata={
            "help": "Port of the first conductor, 10 more for each further one; 0 picks free ones. By default "
            f"{CONDUCTOR_PORT} where other machines can join, else free ones.",
            "metavar": "N",
            **_PORT,
        },
    )
    store_port: int | None = field(
        default=None,
        metadata={"help": f"The same of store masters; {STORE_PORT}.", "metavar": "N", **_PORT},
    )
    http_port: int = field(default=8000, metadata={"help": "REST port; 0 picks a free one.", **_PORT})
    grpc_port: int = field(default=8001, metadata={"help": "gRPC port; 0 picks a free one.", **_PORT})
    dtype: str = same_as(InstanceConfig, "dtype", choices=DTYPES)
    device: str = same_as(InstanceConfig, "device")
    block_tokens: int = same_as(
        InstanceConfig,
        "block_tokens",
        help="Tokens a KV block: a power of two in 16..512.",
        choices=(16, 32, 64, 128, 256, 512),
    )
    weights_epoch: int = same_as(
        InstanceConfig,
        "weights_epoch",
        help="Number of these weights where you give them one; KV is shared within one epoch alone "
        "(docs/reference/models.md).",
    )
    speculate: str = same_as(DecodeConfig, "speculate")
    max_draft_tokens: int = same_as(DecodeConfig, "max_draft_tokens")
    draft_model: str = same_as(
        DecodeConfig,
        "draft_model",
        help="Folder or Hugging Face name of the model that drafts where --speculate says draft: of any family that is "
        "served and keeps no states, with the same tokenizer.",
        metavar="MODEL",
    )
    memory_mb: int = same_as(
        InstanceConfig,
        "memory_mb",
        help="KV memory of each rank, MiB; 0: what is left beside the weights, of the GPU or of 70% of this machine's "
        "available memory, divided among the ranks (docs/internals/engine.md).",
        min=0,
    )
    threads: int = same_as(InstanceConfig, "threads", help="Compute threads of each rank.", min=1)
    transports: str = same_as(
        TransferConfig,
        "transports",
        help="How KV moves between instances, preferred first: rdma, shm, tcp; auto: what can be had here. "
        "Under TLS tcp is encrypted, and rdma, which is not, wants --transfer-network trusted.",
    )
    transfer_network: str = same_as(
        TransferConfig,
        "transfer_network",
        help="trusted: the network between machines may see KV: under TLS tcp goes plain and rdma may be used.",
    )
    nics: str = same_as(
        TransferConfig,
        "nics",
        help="NICs that KV moves over: RDMA devices for rdma, network interfaces for tcp; empty: all.",
    )
    topology: str = same_as(
        TransferConfig,
        "topology",
        help="NICs of each memory location, preferred and secondary; empty: found in /sys (docs/transfer.md).",
    )
    slo_ttft_ms: int = same_as(
        ConductorConfig,
        "slo_ttft_ms",
        help="Refuse requests whose first token would come later than this (429).",
        flag="--slo-ttft",
        metavar="MS",
    )
    slo_tbt_ms: int = same_as(
        ConductorConfig,
        "slo_tbt_ms",
        help="Refuse requests whose tokens would be further apart than this (429).",
        flag="--slo-tbt",
        metavar="MS",
    )
    api_keys: str = same_as(
        GatewayConfig,
        "api_keys",
        help="File of API keys; the gateway then refuses requests without one.",
        metavar="FILE",
    )
    rollout: bool = same_as(GatewayConfig, "rollout")
    rollout_folders: str = same_as(InstanceConfig, "rollout_folders")
    rollout_trainers: str = same_as(InstanceConfig, "rollout_trainers")
    tls: bool = field(
        default=False,
        metadata={"help": "mTLS between all services, with certificates made for this run (in its folder)."},
    )
    tls_cert: str = same_as(
        ServiceConfig, "tls_cert", help="PEM certificate of all services, in place of made ones.", metavar="FILE"
    )
    tls_key: str = same_as(ServiceConfig, "tls_key", help="Its PEM private key.", metavar="FILE")
    tls_ca: str = same_as(
        ServiceConfig, "tls_ca", help="PEM certificates of the authorities that services trust.", metavar="FILE"
    )
    http_tls: bool = field(
        default=False,
        metadata={"help": "HTTPS for clients of the REST port, with a certificate made for this run (in its folder)."},
    )
    http_tls_cert: str = same_as(
        GatewayConfig, "http_tls_cert", help="PEM certificate of the REST port, in place of a made one.", metavar="FILE"
    )
    http_tls_key: str = same_as(GatewayConfig, "http_tls_key", help="Its PEM private key.", metavar="FILE")
    tls_server_name: str = same_as(
        ServiceConfig,
        "tls_server_name",
        help="Name in the services' certificates, {role} in it for each one's; empty: the addresses called.",
    )
    set: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "Anything else that a service can be told (kvmesh serve SERVICE --help), for a service, one "
            "process or * for all: --set conductor.policy=least_loaded --set decode-0.max_running=8.",
            "metavar": "PROCESS.KEY=VALUE",
            "repeat": True,
        },
    )
    run_dir: str = field(
        default="", metadata={"help": "Folder for logs and traces; empty: a new one under the state folder."}
    )
    otlp_endpoint: str = same_as(
        ServiceConfig, "otlp_endpoint", help="Also send traces to this OTLP gRPC collector, e.g. http://127.0.0.1:4317."
    )
    log_level: str = same_as(ServiceConfig, "log_level")
    flags: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, metadata={"internal": True})
    env: Mapping[str, Mapping[str, str]] = field(default_factory=dict, metadata={"internal": True})
    joined: Joined | None = field(default=None, metadata={"internal": True})

    def __post_init__(self) -> None:
        self._check_addresses()
        if self.join:
            self._check_join()
        elif self.lends:
            why = "a machine lends ranks to a mesh that it joins: give --join HOST as well"
            raise ConfigError(f"as={self.join_as!r}: {why}", field="as")
        if self.http_port and self.http_port == self.grpc_port:
            raise ConfigError(
                f"grpc_port={self.grpc_port}: is http_port too; choose another with --grpc-port", field="grpc_port"
            )
        if self.masters > 1 and not self.redis:
            why = "which of several leads is kept in Redis: give --redis auto, or its URL"
            raise ConfigError(f"masters={self.masters}: {why}", field="masters")
        if self.conductors > 1 and not self.redis:
            why = "which of several orders is kept in Redis: give --redis auto, or its URL"
            raise ConfigError(f"conductors={self.conductors}: {why}", field="conductors")
        self._check_dtypes()
        for key in ("prefill", "decode"):
            if not self.count(key) and not self.count("coupled") and not self.join and not self._external_alone:
                raise ConfigError(f"{key}=0: without --coupled instances at least one is needed", field=key)
        self._check_external()
        for service in INSTANCES:
            if self.axes(service).world > 1 and not self.count(service):
                key = self.axes_key(service)
                why = f"there are no {service} instances: give --{service} as well"
                raise ConfigError(f"{key}={getattr(self, key)}: {why}", field=key)
            self._check_hosts(service)
        check(self.transports, self.nics)
        if self.tls and self.tls_cert:
            raise ConfigError(f"tls_cert={self.tls_cert!r}: --tls makes certificates of its own", field="tls_cert")
        if self.http_tls and self.http_tls_cert:
            raise ConfigError(
                f"http_tls_cert={self.http_tls_cert!r}: --http-tls makes a certificate of its own",
                field="http_tls_cert",
            )
        for one, other in (("http_tls_cert", "http_tls_key"), ("http_tls_key", "http_tls_cert")):
            if getattr(self, one) and not getattr(self, other):
                raise ConfigError(f"{other}='': is needed with {one}", field=other)
        seen = {self.model_name}
        for served in self.served[1:]:
            if served.name in seen:
                why = "a model of this name is there already; give another as NAME=PATH"
                raise ConfigError(f"add_model={served.name!r}: {why}", field="add_model")
            seen.add(served.name)

    @property
    def externals(self) -> tuple[EngineEndpoint, ...]:
        """The external engines that flags name. Raises ConfigError for a URL that is none."""
        found = [endpoint(url, field="external") for url in self.external]
        return checked_endpoints(found, "external")

    @property
    def has_external(self) -> bool:
        """Whether there may be external engines."""
        return bool(self.external or self.external_file)

    @property
    def _external_alone(self) -> bool:
        return self.has_external and not any(self.count(service) for service in INSTANCES)

    @property
    def external_model(self) -> str:
        """The model name of the external engines."""
        return self.external_name or self.model_name

    def _check_external(self) -> None:
        """Raises ConfigError for URLs that are none, and where own instances have the same model name."""
        _ = self.externals
        if self.external_name and not self.has_external:
            why = "there are no external engines: give --external or --external-file as well"
            raise ConfigError(f"external_name={self.external_name!r}: {why}", field="external_name")
        if self.has_external and not self._external_alone and self.external_model == self.model_name:
            why = "their KV fits none of kvmesh's own instances: give --prefill 0 --decode 0, or have both under names "
            why += "of their own with --external-name NAME"
            raise ConfigError(f"external_name={self.external_name!r}: {why}", field="external_name")
        if self.has_external and self.lends:
            why = "with --as ranks this machine gives ranks to others, and nothing else: leave it out"
            raise ConfigError(f"external={','.join(self.external)!r}: {why}", field="external")

    @property
    def further_models(self) -> dict[str, str]:
        """The folders of all models but the first, by the names that clients use."""
        found = {served.name: served.path for served in self.served[1:]}
        return found | ({self.external_model: self.model} if self.has_external and not self._external_alone else {})

    @property
    def first_model(self) -> str:
        """The name of the first model: the external engines' own where nobody else serves it."""
        return self.external_model if self._external_alone else self.model_name

    def _check_addresses(self) -> None:
        if self.host in EVERY_ADDRESS and not self.advertise_host and not self.join:
            why = "others need one address to dial: give that to --host, or beside this to --advertise-host"
            raise ConfigError(f"host={self.host!r}: {why}", field="host")
        if self.advertise_host in EVERY_ADDRESS[1:] or is_loopback(self.advertise_host):
            why = "other machines would dial themselves: name the address that they reach this one at"
            raise ConfigError(f"advertise_host={self.advertise_host!r}: {why}", field="advertise_host")
        if self.advertise_host and is_loopback(self.host) and not self.join:
            why = f"nobody who dials {self.advertise_host} would be heard: give --host 0.0.0.0 as well"
            raise ConfigError(f"host={self.host!r}: {why}", field="host")

    def _check_join(self) -> None:
        """A machine that joins brings instances, nothing else."""
        for key, none in (("masters", 1), ("conductors", 1), ("redis", ""), ("api_keys", "")):
            if (value := getattr(self, key)) != none:
                why = "the mesh that is joined has its own: leave it out with --join"
                shown = without_password(value) if isinstance(value, str) else value
                raise ConfigError(f"{key}={shown!r}: {why}", field=key)
        if self.lends:
            usual = {one.name: one.default for one in fields(self)}
            parts = [f"{service}{part}" for service in INSTANCES for part in ("", "_tp", "_mesh", "_hosts")]
            for key in ("add_model", "pool", *parts):
                if (value := getattr(self, key)) != usual[key]:
                    why = "with --as ranks this machine gives ranks to others, and nothing else: leave it out"
                    raise ConfigError(f"{key}={value!r}: {why}", field=key)
        if self.tls:
            why = "its certificates would be this run's alone: with --join give --tls-cert, --tls-key and --tls-ca"
            raise ConfigError(f"tls=True: {why} (docs/operate/security.md)", field="tls")
        if self.http_tls or self.http_tls_cert:
            given = "http_tls" if self.http_tls else "http_tls_cert"
            why = "the REST port is at the mesh that is joined: leave it out with --join"
            raise ConfigError(f"{given}={getattr(self, given)!r}: {why}", field=given)
        if not (self.lends or self.pool or self.has_external or any(self.count(key) for key in INSTANCES)):
            why = "nothing would be started: with --join give --prefill, --decode, --coupled, --pool or --external"
            raise ConfigError(f"join={self.join!r}: {why}", field="join")

    def _check_hosts(self, service: str) -> None:
        """Raises ConfigError unless the ranks of each instance of `service` can be on as many machines as asked for."""
        key, hosts, axes = f"{service}_hosts", self.hosts(service), self.axes(service)
        flag = f"--{key.replace('_', '-')}"
        if hosts == 1:
            return
        if axes.world == 1:
            why = (
                f"an instance of one rank is on one machine: say how it is cut with --{service}-mesh, as in tp={hosts}"
            )
            raise ConfigError(f"{key}={hosts}: {why}", field=key)
        if axes.dp > 1:
            why = f"the ranks of dp={axes.dp} groups are on one machine; start --{service} on each of several machines"
            raise ConfigError(f"{key}={hosts}: {why}", field=key)
        if axes.world % hosts:
            why = f"{hosts} machines do not have equal parts of {axes.world} ranks ({axes})"
            raise ConfigError(f"{key}={hosts}: {why}", field=key)
        if not self.address and not self.join:
            why = "no other machine reaches a mesh on 127.0.0.1: give --host ADDRESS, this machine's own"
            raise ConfigError(f"{key}={hosts}: {why}", field=key)
        if (self.tls or self.tls_cert or self.tls_ca) and not self.rank_network:
            why = (
                f"{flag} {hosts} under TLS needs the network that ranks compute over, which is not encrypted: name the "
                "interface or network that you trust, as in --rank-network 10.0.0.0/24"
            )
            raise ConfigError(f"rank_network='': {why}", field="rank_network")
        if self.add_model:
            why = f"a mesh with instances on several machines ({flag} {hosts}) has none"
            raise ConfigError(f"add_model={self.add_model!r}: {why}", field="add_model")
        if self.tls:
            why = f"with {flag} {hosts} other machines need certificates, too: give --tls-cert, --tls-key and --tls-ca"
            raise ConfigError(f"tls=True: {why} (docs/operate/multi-host.md)", field="tls")

    @property
    def lends(self) -> bool:
        """Whether this machine gives ranks to instances elsewhere, and nothing else."""
        return self.join_as == "ranks"

    def hosts(self, service: str) -> int:
        """On how many machines the ranks of each instance of `service` are."""
        return int(getattr(self, f"{service}_hosts"))

    @property
    def address(self) -> str:
        """What other machines dial; "": no machine but this one reaches the mesh."""
        return self.advertise_host or ("" if is_loopback(self.host) else self.host)

    @property
    def model_name(self) -> str:
        """The name clients use (of the first model)."""
        return self.served_name or Path(self.model).name

    def axes(self, service: str) -> Axes:
        """Along which axes the ranks of each instance of this service share the model. Raises ConfigError as
        `Axes.of_settings` does."""
        mesh, short = f"{service}_mesh", f"{service}_tp"
        return Axes.of_settings(getattr(self, mesh), getattr(self, short), mesh, short)

    def axes_key(self, service: str) -> str:
        """The setting that says what `axes` does."""
        return f"{service}_mesh" if getattr(self, f"{service}_mesh") else f"{service}_tp"

    @property
    def ranks(self) -> int:
        """Rank processes of all instances on this machine together."""
        return sum(self.ranks_on(device) for device in {group.device for group in self._groups()})

    def ranks_on(self, device: str) -> int:
        """Rank processes of all instances on `device` of this machine, as `groups` names it."""
        a_model = sum(
            group.count * self.axes(service).world // self.hosts(service)
            for service in INSTANCES
            for group in self.groups(service)
            if group.device == device
        )
        return len(self.served) * a_model

    def groups(self, service: str) -> tuple[InstanceGroup, ...]:
        """The instances of `service` that each model gets, device and dtype of every group filled in; none where this
        machine lends ranks."""
        if self.lends:
            return ()
        return tuple(
            InstanceGroup(group.count, group.device or self.device, group.dtype or self.dtype)
            for group in groups_of(service, getattr(self, service))
        )

    def count(self, service: str) -> int:
        """How many instances of `service` each model gets."""
        return sum(group.count for group in self.groups(service))

    def _groups(self) -> list[InstanceGroup]:
        return [group for service in INSTANCES for group in self.groups(service) if group.count]

    @property
    def mixed(self) -> bool:
        """Whether instances of one model may differ in the dtype of their KV, or in the device that `auto` goes by."""
        kinds = {(one.dtype, one.device.partition(":")[0] if one.dtype == "auto" else "") for one in self._groups()}
        return len(kinds) > 1

    def _check_dtypes(self) -> None:
        """Raises ConfigError where no prefill could work with any decode: their KV has another dtype."""
        prefill, decode = (
            {group.dtype for group in self.groups(service) if group.count} for service in ("prefill", "decode")
        )
        if prefill and decode and "auto" not in prefill | decode and not prefill & decode:
            if self.join or self.count("coupled"):
                return
            why = f"none has the dtype of a prefill instance ({', '.join(sorted(prefill))}), so none could take its KV"
            raise ConfigError(f"decode={self.decode!r}: {why}", field="decode")

    @property
    def served(self) -> tuple[Served, ...]:
        """Every model of the mesh, the first one first. ConfigError: a name or path is missing or cannot be."""
        found = [Served(self.model_name, self.model, "")]
        for text in self.add_model:
            name, equals, path = text.partition("=")
            if not equals:
                name, path = (Path(text).name if Path(text).expanduser().is_dir() else text), text
            if not name or not path or "," in text:
                why = "must be NAME=PATH or PATH, without commas"
                raise ConfigError(f"add_model={text!r}: {why}", field="add_model")
            found.append(Served(name, path, re.sub(r"[^\w.-]", "-", name) + "-"))
        return tuple(found)
