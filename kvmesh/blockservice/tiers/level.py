"""This module describes one tier of a node, at its front: its parts by layout, what is announced of it, and whether it
answers."""

from __future__ import annotations

import logging

from prometheus_client import Counter, Gauge

from kvmesh.blockservice.tiers.brain import TierSource
from kvmesh.blockservice.tiers.parts import Health, TierPart, TierSettings, counters_of, make_part, opening
from kvmesh.blockservice.tiers.ranks import TierRanks
from kvmesh.errors import ConfigError
from kvmesh.kvcache.keys import split
from kvmesh.ranks import protocol as m
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.telemetry import names

log = logging.getLogger(__name__)

# What a rank counts of its part: the name in TierStats, the metric, its labels beside the tier.
COUNTED: tuple[tuple[str, Counter, dict[str, str]], ...] = (
    ("demoted", names.NODE_TIER_DEMOTED, {"outcome": "arrived"}),
    ("dropped", names.NODE_TIER_DEMOTED, {"outcome": "dropped"}),
    ("io_errors", names.NODE_TIER_FAULTS, {"fault": "io"}),
    ("damaged", names.NODE_TIER_FAULTS, {"fault": "damaged"}),
    ("full", names.NODE_TIER_FAULTS, {"fault": "full"}),
)


class TierLevel:
    """Describes one tier of a node. `TierReads` sets and resets `health.failing`."""

    def __init__(self, settings: TierSettings, ranks: TierRanks) -> None:
        self.settings = settings
        self.tier = settings.tier
        self.source = TierSource()
        self.health = Health()
        self.missing = ""  # why this tier, or a part of it, is left out until the node starts again
        self.parts: dict[str, TierPart] = {}
        self._ranks = ranks

    @property
    def label(self) -> str:
        """The tier's name in metrics and messages."""
        return self.tier.name.lower()

    def add(self, number: int, layout: str, shard_bytes: int) -> TierPart:
        """Adds a part, which is not opened yet. `number` is the same for this layout in all tiers."""
        part = make_part(self.settings, self.health, number, layout, shard_bytes, len(self._ranks))
        self.parts[layout] = part
        return part

    def open(self, part: TierPart) -> None:
        """Orders the ranks to recover what the part holds."""
        for rank in range(len(self._ranks)):
            self._ranks.send(rank, opening(self.settings, part, rank, len(self._ranks)))

    def ready(self, layout: str) -> list[TierPart]:
        """Returns the parts of this layout ("": of any), or of all groups of this family, that take operations."""
        return [part for part in self.named(layout) if part.ready]

    def named(self, layout: str) -> list[TierPart]:
        """Returns the parts of this layout, as `ready` does, whether they take operations or not."""
        return [
            part
            for part in self.parts.values()
            if layout in ("", part.layout) or (part.kept is not None and part.kept.family.text == layout)
        ]

    def numbered(self, number: int) -> TierPart:
        """Returns the part with this number."""
        return next(part for part in self.parts.values() if part.number == number)

    def refused(self, why: str) -> ConfigError:
        """Returns the error to raise when the tier cannot be used as it is configured."""
        return ConfigError(f"{self.settings.said}: {why}", field="object_url" if self.settings.url else "ssd_path")

    def leave_out(self, why: str) -> None:
        """Notes that the tier, or a part of it, is left out until the node starts again: its disk fails."""
        if not self.missing:
            log.warning(
                "%s: %s; this node serves without it: mend the disk and start the node again", self.settings.said, why
            )
            names.NODE_TIER_FAULTS.labels(tier=self.label, fault="missing").inc()
        self.missing = self.missing or why

    def take_message(self, rank: int, message: m.TierStats | m.TierMoving) -> None:
        """Takes a rank's message that changes only counters and which keys are on their way."""
        part = self.numbered(message.part)
        if isinstance(message, m.TierMoving):
            part.contents.moving(rank, split(message.keys), message.over)
            return
        before, part.stats[rank] = part.stats.get(rank), message
        for counted, metric, labels in COUNTED:
            since = getattr(message, counted) - (getattr(before, counted) if before is not None else 0)
            metric.labels(tier=self.label, **labels).inc(since)

    def lost(self, cause: str) -> None:
        """Forgets the content of all parts because the ranks are gone and nobody can read it."""
        for part in self.parts.values():
            part.contents.clear()
            if not part.opened.done():
                part.opened.set_result(cause)

    @property
    def gauges(self) -> dict[Gauge, float]:
        """The tier's gauges."""
        return {
            names.NODE_TIER_BLOCKS.labels(tier=self.label): sum(len(part.contents) for part in self.parts.values()),
            names.NODE_TIER_USED.labels(tier=self.label): self.counters.used_bytes,
        }

    @property
    def counters(self) -> pb.TierCounters:
        """The tier's counters for GetStore."""
        told = counters_of(self.settings, list(self.parts.values()))
        if self.missing:
            told.why_not = f"left out until a restart: {self.missing}"
        return told
