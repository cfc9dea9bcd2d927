"""This module has the settings of the node store that all kinds of nodes have: the eviction order, and the tiers below
DRAM."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path

from kvmesh.blockservice.tiers.parts import TierSettings
from kvmesh.errors import ConfigError
from kvmesh.kvcache.eviction import BUILT_IN, ORDERS, make_order
from kvmesh.kvcache.tiers import MARK
from kvmesh.membership.places import instance_of
from kvmesh.ranks.transfer_config import TransferConfig

OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "https", "http")  # that obstore takes


@dataclass(frozen=True, kw_only=True)
class TierConfig(TransferConfig):
    """Has the settings common to instances and pool nodes."""

    store_eviction: str = field(
        default="lru",
        metadata={
            "help": f"Which blocks of the host memory go first: {', '.join(BUILT_IN)}, or an order from a package "
            "(entry points kvmesh.eviction_orders).",
            "choices": ORDERS,
        },
    )
    evacuate_ms: int = field(
        default=0,
        metadata={
            "help": "On stop, blocks that no other node holds are moved to pool nodes for so long at most; 0: they go "
            "with this node.",
            "min": 0,
        },
    )
    ssd_path: str = field(
        default="", metadata={"help": "Folder of the SSD tier, for this node alone; empty: no such tier."}
    )
    ssd_capacity_mb: int = field(default=8192, metadata={"help": "Size of the SSD tier, MiB.", "min": 1})
    ssd_offload_percent: int = field(
        default=50,
        metadata={
            "help": "Above this share of the host memory in use cold blocks are copied to the SSD tier.",
            "min": 0,
            "max": 100,
        },
    )
    ssd_staging_percent: int = field(
        default=25,
        metadata={
            "help": "Share of the host memory that blocks of the SSD tier may take while they are read for others.",
            "min": 1,
            "max": 100,
        },
    )

    def check_tiers(self, low_percent: int) -> None:
        """Raises ConfigError naming field and value. `low_percent` is the share of memory that eviction goes down to at
        once."""
        make_order(self.store_eviction, field="store_eviction")  # a pool node makes its own with the first block
        if self.ssd_path and self.ssd_offload_percent > low_percent:
            why = f"above store_low_percent ({low_percent}): blocks would be evicted before they are copied"
            raise ConfigError(f"ssd_offload_percent={self.ssd_offload_percent}: {why}", field="ssd_offload_percent")
        if self.object_url:
            check_object_url(self.object_url)

    object_url: str = field(
        default="",
        metadata={
            "help": "Object storage (s3://bucket/prefix) below the SSD tier, or below the host memory; empty: none. "
            "Credentials and endpoint as AWS's own tools take them (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL ...)."
        },
    )

    object_demote_uses: int = field(
        default=1,
        metadata={
            "help": "What the SSD tier evicts goes to object storage if it was used so often lately; 0: all of it.",
            "min": 0,
            "max": 14,
        },
    )

    warm_segment: str = field(
        default="",
        metadata={"help": "Folder in a tmpfs (/dev/shm/...) for host memory that outlives the process; empty: none."},
    )

    def tiers(self, layouts: int = 0) -> TierSettings | None:
        """Returns the settings of the tiers below DRAM; None without any. `layouts` is as in TierSettings."""
        objects, shared = None, (self.ssd_offload_percent, self.ssd_staging_percent, layouts)
        if self.object_url:
            objects = TierSettings(Path(), 0, *shared, url=self.object_url)
        if not self.ssd_path:
            return objects
        return TierSettings(
            Path(self.ssd_path).absolute(),
            self.ssd_capacity_mb << 20,
            *shared,
            below=objects,
            demote_uses=self.object_demote_uses,
        )


def check_object_url(object_url: str) -> None:
    """Raises ConfigError if the URL cannot be one of an object store. The library would say so only with a pool node's
    first block."""
    scheme, mark, rest = object_url.partition("://")
    if not mark or scheme.lower() not in OBJECT_SCHEMES:
        why = f"must be like s3://bucket/prefix; schemes: {', '.join(OBJECT_SCHEMES)}"
    elif not rest.strip("/"):
        why = f"names no bucket: must be like {scheme}://bucket/prefix"
    else:
        return
    raise ConfigError(f"object_url={object_url!r}: {why}", field="object_url")


def make_ssd_folder(ssd_path: str) -> None:
    """Makes the folder of a pool node, which opens a tier only when there is something to keep. Raises ConfigError when
    it cannot be written to; see `medium_failed`."""
    try:
        Path(ssd_path).mkdir(parents=True, exist_ok=True)
        if os.statvfs(ssd_path).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if not os.access(ssd_path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(f"ssd_path={ssd_path!r}: {error.strerror}", field="ssd_path") from error


def checked_id(instance_id: str, node_id: str, role: str) -> str:
    """Returns the instance's name, made of role, node and pid when none is given. Raises ConfigError when it looks like
    the name of a tier, or of a place of another instance."""
    name = instance_id or f"{role}-{node_id}-{os.getpid()}"
    if MARK in name:
        field, value = ("instance_id", instance_id) if instance_id else ("node_id", node_id)
        raise ConfigError(f"{field}={value!r}: must not hold {MARK!r}, which sets off the tiers of a node", field=field)
    if instance_of(name) != name:
        why = "must not end in .dp and a number, which names a data-parallel place of an instance"
        raise ConfigError(f"instance_id={instance_id!r}: {why}", field="instance_id")
    return name
