"""This module has the settings of a client of the Store."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field, fields

from kvmesh.errors import ConfigError
from kvmesh.rpc.addresses import check_addresses
from kvmesh.storeclient.placement import POLICIES
from kvmesh.transfer.transports import registry

KEYS = ("content", "granted", "computed")


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Has the settings of one client: sizes in bytes or MiB, times in the unit of their names. Raises ConfigError
    naming field and value."""

    store: str = field(
        default="127.0.0.1:7002",
        metadata={"help": "Store masters, HOST:PORT[,HOST:PORT...]: whichever leads is asked."},
    )
    namespace: str = field(default="", metadata={"help": "Whose blocks: quotas and removal go by it."})
    node_id: str = field(
        default_factory=socket.gethostname,
        metadata={"help": "Name of this machine, as its pool node has it: blocks there are nearest."},
    )
    transports: str = field(
        default="auto",
        metadata={"help": "Transfer transports, preferred first; auto: those that can be had here."},
    )
    transfer_network: str = field(
        default="untrusted",
        metadata={
            "help": "trusted: under TLS blocks may cross the network unencrypted (rdma, plain tcp); as the nodes."
        },
    )
    host: str = field(default="127.0.0.1", metadata={"help": "Nodes read puts from here over tcp."})
    advertise_host: str = field(default="", metadata={"help": "Host that nodes dial; empty: host."})
    nics: str = field(default="", metadata={"help": "NICs of transfers; empty: all."})
    keys: str = field(
        default="content",
        metadata={
            "help": "Keys of puts: content (a hash) or granted (a number); computed: each put names a key, which "
            "follows from what its block means.",
            "choices": KEYS,
        },
    )
    placement: str = field(
        default="local", metadata={"help": "Pool node of a put: local first, random, best2.", "choices": POLICIES}
    )
    verify: bool = field(default=False, metadata={"help": "Compare checksums (xxh3) of everything put and got."})
    staging_mb: int = field(default=64, metadata={"help": "Registered memory that other memory goes through, MiB."})
    timeout_ms: int = field(default=30_000, metadata={"help": "Of an operation that names no time of its own."})
    lease_ms: int = field(default=5_000, metadata={"help": "Asked for blocks that are being read; renewed."})
    read_within_ms: int = field(
        default=5_000, metadata={"help": "A node must have read a put by then, else the next one is asked."}
    )
    put_stall_ms: int = field(
        default=1_000,
        metadata={
            "help": "A node that has not taken a put by then (and a second for each 32 MiB) is passed over while there "
            "is another one."
        },
    )
    concurrency: int = field(default=64, metadata={"help": "Operations under way at once; others wait."})
    fault: str = field(default="", metadata={"help": "JSON for the fault transport (tests)."})
    near: bool = field(
        default=True, metadata={"help": "Read what nodes of this machine have in memory without asking them (shm)."}
    )
    locations: int = field(default=65_536, metadata={"help": "Blocks whose holders are remembered for some seconds."})

    def __post_init__(self) -> None:
        kinds: dict[str, type] = {"str": str, "int": int, "bool": bool}
        for each in fields(self):
            value, kind = getattr(self, each.name), kinds[str(each.type)]
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                why = f"must be {kind.__name__}, not {type(value).__name__}"
                raise ConfigError(f"{each.name}={value!r}: {why}", field=each.name)
        check_addresses(self.store)
        try:
            self.namespace.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"namespace={self.namespace!r}: is not UTF-8", field="namespace") from None
        choices: dict[str, tuple[str, ...]] = {"keys": KEYS, "placement": POLICIES}
        for key, names in choices.items():
            if getattr(self, key) not in names:
                raise ConfigError(f"{key}={getattr(self, key)!r}: not one of {', '.join(names)}", field=key)
        for key, least, most in (
            ("staging_mb", 1, 1 << 20),
            ("timeout_ms", 1, 24 * 3_600_000),
            ("lease_ms", 10, 600_000),
            ("read_within_ms", 10, 60_000),
            ("put_stall_ms", 10, 60_000),
            ("concurrency", 1, 65_536),
            ("locations", 0, 1 << 24),
        ):
            if not least <= getattr(self, key) <= most:
                raise ConfigError(f"{key}={getattr(self, key)}: not in {least}..{most}", field=key)
        listed, known = self.transport_list, registry.known()
        names = ("shm",) if listed == (registry.AUTO,) else listed
        if not names or not set(names) <= set(known) or len(set(names)) < len(names):
            raise ConfigError(
                f"transports={self.transports!r}: a list of {', '.join(known)}, each once, or auto", field="transports"
            )

    @property
    def transport_list(self) -> tuple[str, ...]:
        return split_list(self.transports)

    @property
    def timeout_s(self) -> float:
        return self.timeout_ms / 1000


def split_list(text: str) -> tuple[str, ...]:
    """Returns ("a", "b") for "a, b"."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
