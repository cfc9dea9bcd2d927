"""This module computes how large the buckets of an SSD tier are, and so the largest block that a tier takes. It is
pure; front and rank both use it."""

from __future__ import annotations

from pathlib import Path

from kvmesh.kvcache.tiers import Tier
from kvmesh.ranks import protocol as m
from kvmesh.tiers.ssd import SsdConfig
from kvmesh.tiers.ssd.format import PAGE, record_bytes

BUCKETS = 32  # a tier has about so many, unless they would be larger than MAX_BUCKET or too small for RECORDS
RECORDS = 8
MAX_BUCKET = 256 << 20
MAX_BUCKET_ABOVE = 64 << 20  # with a tier below: the content of a bucket is moved at once, and needs room meanwhile


def ssd_config(opening: m.TierOpen) -> SsdConfig:
    """Returns the configuration of an SSD tier. Buckets are as large as is good for the device, and so small that there
    are many. Raises ConfigError."""
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
    """Returns the bytes of the largest block that the tier can ever hold. Raises ConfigError."""
    return ssd_config(opening).limits.max_length if opening.tier == Tier.SSD else opening.room
