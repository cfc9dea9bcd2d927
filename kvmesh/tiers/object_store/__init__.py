"""Blocks in S3-compatible object storage. See `tier`; needs the extra `object` (obstore)."""

from kvmesh.tiers.object_store.config import ObjectConfig as ObjectConfig
from kvmesh.tiers.object_store.tier import Demotion as Demotion
from kvmesh.tiers.object_store.tier import ObjectStats as ObjectStats
from kvmesh.tiers.object_store.tier import ObjectTier as ObjectTier
