"""What the store master can be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmesh.config import ServiceConfig
from kvmesh.rpc.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class StoreConfig(ServiceConfig):
    """Raises ConfigError naming the field when intervals do not fit together."""

    heartbeat_interval_ms: int = field(default=500, metadata={"help": "How often members beat, in ms.", "min": 1})
    lease_ms: int = field(default=2000, metadata={"help": "A member silent for longer is dead, in ms.", "min": 1})
    watch_queue: int = field(
        default=65_536, metadata={"help": "Events kept for one watcher; one further behind starts over.", "min": 1}
    )
    watch_queue_bytes: int = field(
        default=64 << 20, metadata={"help": "The same in bytes; watchers share the memory.", "min": 1}
    )
    max_watchers: int = field(default=64, metadata={"help": "Open watch streams; more are refused.", "min": 1})
    max_members: int = field(default=4096, metadata={"help": "Live members; more are refused.", "min": 1})
    max_store_blocks: int = field(
        default=1 << 22, metadata={"help": "Blocks of one node store; more are not in the map.", "min": 1}
    )

    def __post_init__(self) -> None:
        if self.heartbeat_interval_ms < 1:
            raise ConfigError(
                f"heartbeat_interval_ms={self.heartbeat_interval_ms}: must be at least 1", field="heartbeat_interval_ms"
            )
        if self.lease_ms < 2 * self.heartbeat_interval_ms:
            raise ConfigError(
                f"lease_ms={self.lease_ms}: must be at least two heartbeats ({2 * self.heartbeat_interval_ms})"
            )
        for name in ("watch_queue", "watch_queue_bytes", "max_watchers", "max_members", "max_store_blocks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1", field=name)
