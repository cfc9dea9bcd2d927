"""Divides how many blocks a tenant's tag may have in memory over all nodes into an allowance for each node.

A node may keep what it has and an equal share of what is left; when more is there than the quota, every node must give
up the same part. So the allowances never add up to more than the quota (but for one block at each node at least, as 0
means no quota), and a node that fills up gets more with every heartbeat while there is any.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from kvmesh.errors import Overloaded
from kvmesh.kvcache.keys import TAG_BYTES
from kvmesh.services.store.block_map import MasterMap

MAX_QUOTAS = 256
AGAIN_S = 10.0
NO_QUOTAS = {bytes(TAG_BYTES): 0}  # an empty list would change nothing, and leave what an earlier leader set


@dataclass(frozen=True, slots=True)
class TagQuota:
    """Says how many `blocks` a tag may have in DRAM, all replicas counted; `name` is for people."""

    tag: bytes
    blocks: int
    name: str = ""


class Quotas:
    """Keeps all quotas that are set. The map counts what is used, at O(1) for each change."""

    def __init__(self, blocks: MasterMap, known: Container[str]) -> None:
        """`known` holds the instance ids of the nodes all of whose blocks are known."""
        self._map = blocks
        self._known = known
        self._set: dict[bytes, TagQuota] = {}
        self._told: dict[str, tuple[dict[bytes, int], float]] = {}  # instance → the allowances sent last, and when
        self._lifted: dict[bytes, int] = {}  # tag → 0, for tags that have no quota any more

    def load(self, quotas: Iterable[TagQuota]) -> None:
        """Takes the quotas that an earlier leader left."""
        for quota in quotas:
            self.set(quota)

    def set(self, quota: TagQuota) -> None:
        """Sets a quota; `blocks` 0 ends it. Raises Overloaded when there are too many."""
        if not quota.blocks:
            if self._set.pop(quota.tag, None) is not None:
                self._map.unwatch(quota.tag)
                self._lifted[quota.tag] = 0
                if len(self._lifted) > MAX_QUOTAS:
                    del self._lifted[next(iter(self._lifted))]
            return
        if quota.tag not in self._set and len(self._set) >= MAX_QUOTAS:
            raise Overloaded(f"{MAX_QUOTAS} quotas are set, no more can be")
        self._set[quota.tag] = quota
        self._lifted.pop(quota.tag, None)
        self._map.watch(quota.tag)

    def all(self) -> list[tuple[TagQuota, int]]:
        """Returns each quota with the blocks used now."""
        return [(quota, self._map.tagged(tag)) for tag, quota in self._set.items()]

    def news(self, instance_id: str, members: int, now: float) -> Mapping[bytes, int]:
        """Returns the allowance of this node by tag (0: no quota any more), or {} if there is nothing to send. It
        returns all of them when any has changed since they were sent, and again every AGAIN_S, as answers may be lost.
        Nothing is sent before all blocks of the node are known: a new leader would take the node for empty and have it
        evict what is there."""
        if instance_id not in self._known:
            return {}
        new = {tag: self._allowance(instance_id, quota, members) for tag, quota in self._set.items()} | self._lifted
        new = new or NO_QUOTAS
        told, at = self._told.get(instance_id, ({}, now))
        if new == told and now - at < AGAIN_S:
            return {}
        self._told[instance_id] = (new, now)
        return new

    def ended(self, instance_id: str) -> None:
        """Forgets what was sent to a member that has ended: its next incarnation has been told nothing."""
        self._told.pop(instance_id, None)

    def _allowance(self, instance_id: str, quota: TagQuota, members: int) -> int:
        used, here = self._map.tagged(quota.tag), self._map.tagged_at(instance_id, quota.tag)
        if used > quota.blocks:
            return max(1, here * quota.blocks // used)
        return max(1, here + (quota.blocks - used) // max(1, members))
