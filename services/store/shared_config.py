"""The settings that all masters of a mesh must decide by: kept in Redis, so that a new leader decides as the last one.

The first leader writes down its own; who leads later goes by what is written, whatever its own flags say, unless it was
started with `reconfigure`: then it writes its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvmesh.errors import ConfigError
from services.store.config import StoreConfig

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


@dataclasses.dataclass(frozen=True)
class SettledConfig:
    """`config`: to lead with; `keep`: what is to be written for later leaders; `notes`: for the log, one line each."""

    config: StoreConfig
    keep: dict[bytes, bytes]
    notes: tuple[str, ...]


def settled(own: StoreConfig, kept: Mapping[bytes, bytes]) -> SettledConfig:
    """What a leader started as `own` goes by when earlier ones have `kept` this."""
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
            config = dataclasses.replace(own, **theirs)
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
