"""How large the buckets of an SSD tier are, and so the largest block that a tier takes. Pure: front and rank agree."""

from __future__ import annotations

from pathlib import Path

from kvmesh.kvcache.tiers import Tier
from kvmesh.ranks import protocol as m
from kvmesh.tiers.ssd import SsdConfig
from kvmesh.tiers.ssd.format import PAGE, record_bytes

BUCKETS = 32  # a tier has about so many, where they need not be larger than MAX_BUCKET or too small for RECORDS
RECORDS = 8
MAX_BUCKET = 256 << 20
MAX_BUCKET_ABOVE = 64 << 20  # with a tier below: what a bucket holds leaves in one go, and has to find room on the way


def ssd_config(opening: m.TierOpen) -> SsdConfig:
    """Buckets as large as they are good for the device, and small enough that there are many. ConfigError."""
    largest = MAX_BUCKET_ABOVE if opening.below else MAX_BUCKET
    bucket = min(largest, opening.capacity_bytes // BUCKETS) // PAGE * PAGE
    least = RECORDS * (record_bytes(opening.room) + PAGE)
    return SsdConfig(
        path=Path(opening.path),
        capacity_bytes=opening.capacity_bytes,
        identity=opening.identity,
        bucket_bytes=max(bucket, least, 16 * PAGE),
        demote_uses=opening.demote_uses,
        on_mismatch="other_weights",
    )


def largest_block(opening: m.TierOpen) -> int:
    """Bytes of the largest block that the tier can ever hold. ConfigError."""
    return ssd_config(opening).limits.max_length if opening.tier == Tier.SSD else opening.room
