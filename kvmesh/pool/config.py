"""What a pool node can be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmesh.blockservice.tiers.config import TierConfig
from kvmesh.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PoolConfig(TierConfig):
    """Memory without an engine. Raises ConfigError naming field and value when settings do not fit together."""

    instance_id: str = field(default="", metadata={"help": "Name in the mesh; empty: made from role, node_id and pid."})
    store: str = field(default="127.0.0.1:0", metadata={"help": "Store masters, host:port,host:port,..."})
    memory_mb: int = field(default=512, metadata={"help": "Memory that it gives to the mesh, MiB.", "min": 1})
    rank_silence_ms: int = field(
        default=5000, metadata={"help": "A rank silent this long makes the node not ready.", "min": 1}
    )
    store_high_percent: int = field(
        default=95, metadata={"help": "Above this share of the memory the coldest blocks go.", "min": 1, "max": 100}
    )
    store_low_percent: int = field(default=90, metadata={"help": "... down to this share.", "min": 0, "max": 100})
    store_lease_ms: int = field(default=5_000, metadata={"help": "Longest lease given to readers, ms.", "min": 10})
    announce_ms: int = field(
        default=50, metadata={"help": "Changes of the node store are announced this often, ms.", "min": 1}
    )

    ssd_layouts: int = field(
        default=2,
        metadata={
            "help": "So many layouts of shards share the SSD tier, each an equal part of it.",
            "min": 1,
            "max": 64,
        },
    )

    def __post_init__(self) -> None:
        if self.store_low_percent > self.store_high_percent:
            raise ConfigError(
                f"store_low_percent={self.store_low_percent}: above store_high_percent ({self.store_high_percent})",
                field="store_low_percent",
            )
        self.check_tiers(self.store_low_percent)
        self.check_transfer()
