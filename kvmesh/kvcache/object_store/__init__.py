"""Blocks in S3-compatible object storage. See `tier`; needs the extra `object` (obstore)."""

from kvmesh.kvcache.object_store.config import ObjectConfig as ObjectConfig
from kvmesh.kvcache.object_store.demotion import Demotion as Demotion
from kvmesh.kvcache.object_store.line import ObjectStats as ObjectStats
from kvmesh.kvcache.object_store.tier import ObjectTier as ObjectTier
