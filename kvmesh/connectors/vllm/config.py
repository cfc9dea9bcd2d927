"""This module has the connector's settings: what vLLM passes on as `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from kvmesh.errors import ConfigError
from kvmesh.rpc.addresses import is_loopback, split, split_address
from kvmesh.storeclient.config import ClientConfig

_KINDS: dict[str, type] = {"str": str, "int": int, "bool": bool}
_CLIENT = ("store", "namespace", "node_id", "transports", "transfer_network", "host", "advertise_host", "nics")


@dataclass(frozen=True, kw_only=True)
class ConnectorConfig:
    """Has the settings of one connector; what a field means is in its `help`. Empty texts among those of the Store's
    client stand for the client's own defaults. Raises ConfigError naming field and value."""

    store: str = field(default="127.0.0.1:7002", metadata={"help": "Store masters, HOST:PORT[,HOST:PORT...]."})
    namespace: str = field(default="", metadata={"help": "Whose blocks: quotas and removal go by it."})
    node_id: str = field(default="", metadata={"help": "Name of this machine, as its pool node has it."})
    transports: str = field(default="auto", metadata={"help": "Transfer transports, preferred first: shm, rdma, tcp."})
    transfer_network: str = field(default="untrusted", metadata={"help": "As of the Store's client."})
    host: str = field(default="", metadata={"help": "Nodes read what is saved from here over tcp."})
    advertise_host: str = field(default="", metadata={"help": "Host that nodes dial; empty: host."})
    nics: str = field(default="", metadata={"help": "NICs of transfers; empty: all."})
    model_identity: str = field(
        default="",
        metadata={
            "help": "What the model's weights are called. Whoever shares a namespace and a name shares KV, so it must "
            "change with the weights. Empty: a hash of every byte of the checkpoint's safetensors."
        },
    )
    save_decoded: bool = field(default=True, metadata={"help": "Save blocks of answers, too, not of prompts alone."})
    lookup_timeout_ms: int = field(default=1_000, metadata={"help": "A lookup that takes longer is a miss."})
    load_timeout_ms: int = field(
        default=2_000, metadata={"help": "What a request has not loaded by then is computed instead."}
    )
    save_timeout_ms: int = field(default=5_000, metadata={"help": "A save that takes longer is given up."})
    pause_ms: int = field(
        default=5_000, metadata={"help": "Nothing is looked up for so long after a load or lookup ran out of time."}
    )
    load_staging_mb: int = field(default=64, metadata={"help": "Memory that loads go through, MiB."})
    save_staging_mb: int = field(
        default=128, metadata={"help": "Memory that saves wait in, MiB; when it is full, blocks are not saved."}
    )
    load_threads: int = field(default=2, metadata={"help": "Threads that load."})
    save_threads: int = field(default=1, metadata={"help": "Threads that save."})
    part_kib: int = field(
        default=1_024, metadata={"help": "Layers of a block are stored in parts of at least so many KiB."}
    )
    pool: bool = field(default=True, metadata={"help": "Use the Store; without it only pushes are served."})
    push: bool = field(
        default=False,
        metadata={"help": "Hand prompts over between a prefill and a decode engine; each rank listens on a port."},
    )
    push_port: int = field(
        default=0, metadata={"help": "Rank i listens on push_port + i of host; 0: on whichever port is free."}
    )
    push_timeout_ms: int = field(
        default=5_000, metadata={"help": "What prefill has not pushed by then is computed instead."}
    )
    push_staging_mb: int = field(
        default=64, metadata={"help": "Memory that pushes go through at each end, MiB: sent and received apart."}
    )
    push_threads: int = field(
        default=3, metadata={"help": "Threads that push, and as many that receive; one engine has never all of them."}
    )
    hold_ms: int = field(
        default=60_000, metadata={"help": "Pages of a prompt that nobody has asked for by then are given back."}
    )

    def __post_init__(self) -> None:
        for each in fields(self):
            value, kind = getattr(self, each.name), _KINDS[str(each.type)]
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                why = f"must be {kind.__name__}, not {type(value).__name__}"
                raise ConfigError(f"{each.name}={value!r}: {why}", field=each.name)
        for name, least, most in (
            ("lookup_timeout_ms", 1, 60_000),
            ("load_timeout_ms", 10, 600_000),
            ("save_timeout_ms", 10, 600_000),
            ("pause_ms", 0, 600_000),
            ("load_staging_mb", 1, 1 << 20),
            ("save_staging_mb", 1, 1 << 20),
            ("load_threads", 1, 16),
            ("save_threads", 1, 16),
            ("part_kib", 1, 1 << 20),
            ("push_port", 0, 65_535),
            ("push_timeout_ms", 10, 600_000),
            ("push_staging_mb", 1, 1 << 20),
            ("push_threads", 1, 16),
            ("hold_ms", 100, 3_600_000),
        ):
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"{name}={getattr(self, name)}: not in {least}..{most}", field=name)
        if not (self.pool or self.push):
            raise ConfigError("pool=False: without push there is nothing to do", field="pool")
        self.client()

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> ConnectorConfig:
        """Returns the settings out of vLLM's extra configuration. Raises ConfigError for a name that is none."""
        known = {each.name for each in fields(cls)}
        if unknown := sorted(set(extra) - known):
            why = f"is no setting of KvmeshConnector; there are {', '.join(sorted(known))}"
            raise ConfigError(f"kv_connector_extra_config: {unknown[0]!r} {why}", field=unknown[0])
        return cls(**extra)

    def unreachable(self) -> str:
        """Returns what keeps other machines from this engine, naming the field; "" when nothing here does. All may run
        on one machine, so it is a warning."""
        client = self.client()
        own = client.advertise_host or client.host
        if not is_loopback(own) or client.nics:
            return ""
        todo = "set host, or advertise_host, in kv_connector_extra_config to an address of this machine"
        if self.pool and not all(is_loopback(split_address(one)[0]) for one in split(self.store)):
            return f"host={own!r}: pool nodes on other machines cannot read what is saved here; {todo}"
        if self.push and not (self.host or self.advertise_host):
            return f"host={own!r}, by default: prompts are handed over within this machine alone; {todo}"
        return ""

    def client(self) -> ClientConfig:
        """Returns the settings of a client of the Store for this connector."""
        defaults = {each.name: each.default for each in fields(ClientConfig) if each.default is not MISSING}
        own = {name: getattr(self, name) for name in _CLIENT}
        given = {name: value for name, value in own.items() if value or name == "namespace"}
        given = {name: value for name, value in given.items() if defaults.get(name) != value}
        return ClientConfig(keys="computed", staging_mb=8, timeout_ms=self.load_timeout_ms, **given)
