"""The SSD tier of the store: crash-safe bucket files. See `tier`, and docs/ssd-tier.md."""

from kvmesh.kvcache.ssd.config import SsdConfig
from kvmesh.kvcache.ssd.recovery import RecoveryReport
from kvmesh.kvcache.ssd.tier import SsdStats, SsdTier

__all__ = ["RecoveryReport", "SsdConfig", "SsdStats", "SsdTier"]
