"""This module has the settings of the store master."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvmesh.config import ControlConfig
from kvmesh.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class StoreConfig(ControlConfig):
    """Has the settings of one store master. Raises ConfigError naming the field when intervals do not fit together."""

    door_port: int = field(
        default=0,
        metadata={
            "help": "TCP port of the door, a shorter way than gRPC for heartbeats, announcements and look-ups; 0 "
            "picks a free one, -1: none.",
            "min": -1,
            "max": 65535,
        },
    )
    max_announcements: int = field(
        default=4096,
        metadata={"help": "Announcements and look-ups that wait here to be heard; more are refused at once.", "min": 1},
    )
    heartbeat_interval_ms: int = field(default=500, metadata={"help": "How often members beat, in ms.", "min": 1})
    lease_ms: int = field(default=2000, metadata={"help": "A member silent for longer is dead, in ms.", "min": 1})
    heartbeats_per_s: int = field(
        default=400,
        metadata={
            "help": "Heartbeats over gRPC of all members in a second (four by a door count as one); were there more, "
            "interval and lease grow alike. 0: they never do.",
            "min": 0,
        },
    )
    announcements_per_s: int = field(
        default=1300,
        metadata={
            "help": "Announcements of all stores in a second, a quarter of them with nothing new; where there would be "
            "more, each store announces more rarely. 0: as often as its own announce_ms says.",
            "min": 0,
        },
    )
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
    max_map_mb: int = field(
        default=4096,
        metadata={"help": "Memory of the map of blocks, MiB; past it the coldest are left out. 0: no limit.", "min": 0},
    )
    hot_lookups: int = field(
        default=256,
        metadata={"help": "A block asked for so often within 10 s gets one copy more. 0: none does.", "min": 0},
    )
    max_names: int = field(
        default=1 << 20, metadata={"help": "Names of the public client; more are refused.", "min": 1}
    )
    tombstone_s: int = field(
        default=3600,
        metadata={
            "help": "A node away for longer than this (s) drops all it has when something was removed meanwhile.",
            "min": 1,
        },
    )
    redis: str = field(
        default="",
        metadata={
            "help": "Redis that says which of several masters leads and keeps what no node knows; empty: this is the "
            "only master.",
            "secret": True,
            "metavar": "redis://HOST:PORT/0",
        },
    )
    state_path: str = field(
        default="",
        metadata={
            "help": "File in which the only master keeps what no node knows (names, quotas, removals, ...) over a "
            "restart; empty: nothing is kept without redis.",
            "metavar": "FILE",
        },
    )
    reconfigure: bool = field(
        default=False,
        metadata={
            "help": "When this master leads, its own limits, leases and intervals replace those kept in redis; without "
            "it, those of the first leader stand."
        },
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
        for name, least in (
            ("heartbeats_per_s", 0),
            ("announcements_per_s", 0),
            ("max_map_mb", 0),
            ("hot_lookups", 0),
            ("max_names", 1),
            ("tombstone_s", 1),
            ("max_announcements", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least {least}", field=name)
        self.check_control(redis=self.redis)
        if self.state_path and self.redis:
            text = f"state_path={self.state_path!r}: with redis everything is kept there; leave one of them out"
            raise ConfigError(text, field="state_path")


# The settings that all masters of a mesh must decide by are kept in Redis, so that a new leader decides as the last
# one. The first leader writes its own values. A later leader uses those, whatever its own flags say, unless it was
# started with `reconfigure`: then it writes its own.
SHARED = (
    "heartbeat_interval_ms",
    "lease_ms",
    "heartbeats_per_s",
    "announcements_per_s",
    "max_members",
    "max_store_blocks",
    "max_map_mb",
    "hot_lookups",
    "max_names",
    "tombstone_s",
)


@dataclass(frozen=True)
class SettledConfig:
    """Has what a leader goes by: `config` to lead with, `keep` to be written for later leaders, and `notes` for the
    log, one line each."""

    config: StoreConfig
    keep: dict[bytes, bytes]
    notes: tuple[str, ...]


def settled(own: StoreConfig, kept: Mapping[bytes, bytes]) -> SettledConfig:
    """Returns what a leader goes by that was started with `own`, when earlier leaders have `kept` these values."""
    mine = {name: getattr(own, name) for name in SHARED}
    theirs: dict[str, Any] = {}
    notes: list[str] = []
    for name in SHARED:
        value = kept.get(name.encode())
        if value is None:
            continue
        if value.isdigit() and len(value) < 20:
            theirs[name] = int(value)
        else:
            notes.append(f"{name}: what an earlier leader kept cannot be read: {value[:40]!r}")
    if not own.reconfigure:
        try:
            config = replace(own, **theirs)
        except ConfigError as error:
            notes.append(f"what an earlier leader kept is refused, this master's own flags are used: {error.message}")
        else:
            notes += [
                f"{name}={mine[name]}: the mesh goes by {value}; to change that, start with --reconfigure"
                for name, value in theirs.items()
                if value != mine[name]
            ]
            return SettledConfig(config, _packed({**mine, **theirs}, theirs), tuple(notes))
    return SettledConfig(own, _packed(mine, theirs), tuple(notes))


def _packed(values: Mapping[str, int], known: Mapping[str, int]) -> dict[bytes, bytes]:
    return {name.encode(): str(value).encode() for name, value in values.items() if known.get(name) != value}
