"""The SSD tier of the store: crash-safe bucket files. See `tier`, and docs/internals/tiers.md."""

from kvmesh.tiers.ssd.config import SsdConfig
from kvmesh.tiers.ssd.recovery import RecoveryReport
from kvmesh.tiers.ssd.tier import SsdStats, SsdTier

__all__ = ["RecoveryReport", "SsdConfig", "SsdStats", "SsdTier"]
