"""This module has the transfer settings of instances and pool nodes, and the engine's configuration made of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from kvmesh.config import ServiceConfig
from kvmesh.errors import ConfigError, TransferError

if TYPE_CHECKING:
    from kvmesh.ranks.protocol import Configure
    from kvmesh.transfer import EngineConfig, Notification, TransferEngine


def listed(text: str) -> tuple[str, ...]:
    """Returns ("a", "b") for "a, b"."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def check(transports: str, nics: str) -> None:
    """Raises ConfigError naming key and value."""
    from kvmesh.transfer.transports import registry

    names, known = listed(transports), registry.known()
    if names == (registry.AUTO,):
        names = ("shm",)  # always there
    if not names or not set(names) <= set(known):
        raise ConfigError(f"transports={transports!r}: a list of {', '.join(known)}, or auto", field="transports")
    for key, text in (("transports", transports), ("nics", nics)):
        if len(set(listed(text))) < len(listed(text)):
            raise ConfigError(f"{key}={text!r}: one is named twice", field=key)


@dataclass(frozen=True, kw_only=True)
class TransferConfig(ServiceConfig):
    """Has the settings of a rank's transfer engine."""

    transports: str = field(
        default="auto",
        metadata={
            "help": "Transfer transports, preferred first: rdma, shm, tcp; auto: those that can be had here. Under TLS "
            "tcp is encrypted, and rdma, which is not, is used with transfer_network=trusted alone."
        },
    )
    transfer_network: str = field(
        default="untrusted",
        metadata={
            "help": "trusted: the network between hosts may see KV unencrypted, so that under TLS rdma may be used and "
            "tcp goes plain.",
            "choices": ("untrusted", "trusted"),
        },
    )
    nics: str = field(
        default="",
        metadata={
            "help": "NICs of transfers: RDMA devices for rdma (mlx5_0,mlx5_1), network interfaces for tcp "
            "(eth0,eth1); empty: every active RDMA device, and tcp on host.",
        },
    )
    topology: str = field(
        default="",
        metadata={
            "help": 'NICs of each memory location, preferred and secondary: {"cpu:0": \\[\\["mlx5_0"], \\["mlx5_1"]]}, '
            "or a file of it; empty: found in /sys.",
            "metavar": "JSON|FILE",
        },
    )
    rdma_gid_index: int = field(default=-1, metadata={"help": "GID of each RDMA port; -1: found by looking."})
    rdma_mtu: int = field(
        default=0, metadata={"help": "Largest RDMA packet: 256, 512, 1024, 2048, 4096; 0: the ports' smaller one."}
    )
    rdma_pairs: str = field(
        default="",
        metadata={"help": "RDMA devices here and there that reach each other, mlx5_0=mlx5_1,...; empty: by address."},
    )
    rdma_slice_bytes: int = field(default=1 << 20, metadata={"help": "Bytes of one RDMA work request."})
    rdma_queue_depth: int = field(default=256, metadata={"help": "Work requests outstanding on a queue pair."})
    rdma_qps_per_rail: int = field(
        default=1, metadata={"help": "Queue pairs between two RDMA devices, for each pair of engines."}
    )
    rdma_traffic_class: int = field(default=0, metadata={"help": "RoCE v2's IP traffic class: DSCP × 4."})
    rdma_service_level: int = field(default=0, metadata={"help": "InfiniBand's service level, or RoCE's priority."})
    rdma_pkey_index: int = field(default=0, metadata={"help": "Index of the InfiniBand partition's key."})
    rdma_ack_exponent: int = field(
        default=14, metadata={"help": "An RDMA packet is sent again after 4.096 µs × 2^this (1..31)."}
    )
    rdma_retry_cnt: int = field(default=6, metadata={"help": "... so often (0..6), before its rail is down."})
    fault: str = field(default="", metadata={"help": "JSON for the fault transport (tests)."})
    advertise_host: str = field(
        default="",
        metadata={"help": "Host that peers dial; empty: host; auto: this machine's, on the way to the master."},
    )
    door_port: int = field(
        default=0,
        metadata={
            "help": "TCP port of the store's door, a shorter way than gRPC for those who can reach it; 0 picks a free "
            "one, -1: none.",
            "min": -1,
            "max": 65535,
        },
    )

    @property
    def transport_list(self) -> tuple[str, ...]:
        return listed(self.transports)

    @property
    def leave_host(self) -> bool:
        """Whether bytes may go to other hosts unencrypted."""
        return not (self.tls_cert or self.tls_ca) or self.transfer_network == "trusted"

    @property
    def transfer_tls(self) -> dict[str, str]:
        """The fields of EngineConfig that have tcp speak TLS; empty: plain."""
        from kvmesh.transfer.config import tls_fields

        return tls_fields(self, network=self.transfer_network)

    @property
    def nic_list(self) -> tuple[str, ...]:
        return listed(self.nics)

    @property
    def rdma_settings(self) -> dict[str, int | tuple[str, ...]]:
        """The settings that differ from the engine's defaults, under the names that they have there."""
        found: dict[str, int | tuple[str, ...]] = {}
        for one in fields(TransferConfig):
            value = getattr(self, one.name)
            if one.name.startswith("rdma_") and value != one.default:
                found[one.name] = listed(value) if isinstance(value, str) else value
        return found

    def check_transfer(self) -> None:
        """Raises ConfigError naming key and value. What only the rank can see, the rank refuses itself."""
        from kvmesh.transfer import EngineConfig
        from kvmesh.transfer.transports import registry

        check(self.transports, self.nics)
        try:
            EngineConfig(**self.rdma_settings)  # type: ignore[arg-type]
            if "rdma" in self.transport_list and (seen := registry.why_seen("rdma", leave_host=self.leave_host)):
                raise TransferError(f"transports={self.transports!r}: {seen}", field="transports")
        except TransferError as err:
            raise ConfigError(err.message, field=err.field) from None


def start_engine(name: str, configure: Configure, on_notify: Callable[[Notification], None] | None) -> TransferEngine:
    """Starts a rank's transfer engine. Raises ConfigError for NICs and topologies that this host does not have, and for
    transports and certificates that cannot be used; TransferError for anything else."""
    from kvmesh.transfer import TransferEngine

    try:
        return TransferEngine(name, engine_config(configure), on_notify)
    except TransferError as err:
        if err.field in ("nics", "topology", "transports", "tls_cert"):
            raise ConfigError(err.message, field=err.field) from None
        raise


def own_location() -> str:
    """Returns where host memory lies that this process touches first: the NUMA node that it is bound to, else the first
    that it may use."""
    from kvmesh.transfer.host import memory_location

    return memory_location(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "cpu:0"


def engine_config(configure: Configure) -> EngineConfig:
    """Returns the configuration of a rank's engine. Raises TransferError for what the engine refuses."""
    from kvmesh.transfer import EngineConfig

    return EngineConfig(
        transports=configure.transports,
        nics=configure.nics,
        topology=configure.topology,
        fault=configure.fault,
        host=configure.host,
        advertise_host=configure.advertise_host,
        leave_host=configure.leave_host,
        **configure.tls,  # type: ignore[arg-type]
        **configure.rdma,  # type: ignore[arg-type]
    )
