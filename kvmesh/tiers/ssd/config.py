"""What the SSD tier may be told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from kvmesh.errors import ConfigError
from kvmesh.tiers.ssd.brain import SsdLimits
from kvmesh.tiers.ssd.folder import OnMismatch
from kvmesh.tiers.ssd.recovery import Verify


@dataclass(frozen=True, kw_only=True, slots=True)
class SsdConfig:
    """The settings of one SSD tier. Raises ConfigError, which names the field and its value.

    `identity` is what the blocks belong to beyond what their keys say (the layout of the shards). A folder of another
    identity is refused; with `on_mismatch="set_aside"` its files are moved into a folder inside; with "other_weights"
    that happens when nothing but the weights differs, and the files are then removed at `purge_bytes_s` at most.
    `direct` uses O_DIRECT where the file system has it ("auto"), always ("on"; ConfigError where it does not), or never
    ("off").
    """

    path: Path
    capacity_bytes: int
    identity: str
    bucket_bytes: int = 256 << 20
    high_percent: int = 98
    low_percent: int = 96
    reinsert_percent: int = 25
    reinsert_hits: int = 1
    admit_uses: int = 0  # a block is put only if its key was used so often lately (0..15); 0: always
    demote_uses: int = 1  # what is evicted goes to the tier below if it was used so often since; 0: all of it
    threads: int = 4  # that read
    queue_ops: int = 1024  # waiting gets, and as many puts
    queue_bytes: int = 256 << 20
    direct: Literal["auto", "on", "off"] = "auto"
    on_mismatch: OnMismatch = "refuse"
    purge_bytes_s: int = 256 << 20  # of files of other weights
    verify: Verify = "open"  # at start: payloads of the buckets that were not closed, or "all"
    max_open_files: int = 256
    sketch_keys: int = 1 << 18  # that the frequency sketch is made for

    def __post_init__(self) -> None:
        known: list[tuple[str, Callable[[Any], bool], str]] = [
            ("admit_uses", lambda n: 0 <= n <= 15, "must be 0..15"),
            ("demote_uses", lambda n: 0 <= n < 15, "must be 0..14"),
            ("threads", lambda n: 1 <= n <= 64, "must be 1..64"),
            ("queue_ops", lambda n: n >= 1, "must be at least 1"),
            ("queue_bytes", lambda n: n >= 1, "must be at least 1"),
            ("max_open_files", lambda n: n >= 1, "must be at least 1"),
            ("sketch_keys", lambda n: n >= 1, "must be at least 1"),
            ("direct", lambda word: word in ("auto", "on", "off"), "must be auto, on or off"),
            ("on_mismatch", lambda word: word in get_args(OnMismatch), "must be refuse, set_aside or other_weights"),
            ("purge_bytes_s", lambda n: n >= 1, "must be at least 1"),
            ("verify", lambda word: word in ("open", "all"), "must be open or all"),
        ]
        for name, good, why in known:
            if not good(getattr(self, name)):
                raise ConfigError(f"{name}={getattr(self, name)!r}: {why}", field=name)
        try:
            _ = self.limits
        except ValueError as error:
            raise ConfigError(str(error), field=str(error).partition("=")[0]) from error

    @property
    def limits(self) -> SsdLimits:
        return SsdLimits(
            capacity_bytes=self.capacity_bytes,
            bucket_bytes=self.bucket_bytes,
            high_percent=self.high_percent,
            low_percent=self.low_percent,
            reinsert_percent=self.reinsert_percent,
            reinsert_hits=self.reinsert_hits,
        )
