"""Which members have told all that they have since they joined: until then what they do not show is no proof.

A node is known when each of its tiers has announced without a gap. Which tiers it has it says in its heartbeats.
"""

from __future__ import annotations

from kvmesh.kvcache.tiers import Tier, split_name
from kvmesh.rpc.pb.store_pb2 import StoreUsage

DRAM = frozenset({Tier.DRAM})


class KnownHolders:
    """By instance id. Every step is O(tiers of one node)."""

    def __init__(self) -> None:
        self._told: dict[str, set[Tier]] = {}
        self._tiers: dict[str, frozenset[Tier]] = {}
        self._cut: set[str] = set()
        self._waiting: dict[str, None] = {}

    def __contains__(self, instance_id: object) -> bool:
        return instance_id in self._told and instance_id not in self._waiting

    @property
    def unheard(self) -> list[str]:
        """Members that have something yet to tell, the oldest first."""
        return list(self._waiting)

    def joined(self, instance_id: str) -> None:
        """A life begins, or enters again."""
        if instance_id not in self._told:
            self._told[instance_id], self._tiers[instance_id] = set(), DRAM
            self._waiting[instance_id] = None

    def beat(self, instance_id: str, usage: StoreUsage | None) -> None:
        """A member says which tiers it has."""
        if usage is not None and instance_id in self._told:
            self._tiers[instance_id] = DRAM | {Tier(use.tier) for use in usage.tiers}
            self._judge(instance_id)

    def said(self, store_id: str, *, in_full: bool) -> None:
        """A tier has announced: all that it has is in the map, or something is missing there."""
        instance_id, tier = split_name(store_id)
        if instance_id in self._told:
            (self._told[instance_id].add if in_full else self._told[instance_id].discard)(tier)
            self._judge(instance_id)

    def cut(self, store_id: str, some: bool) -> None:
        """`some`: not everything that it said has found room in the map. Until its next snapshot."""
        (self._cut.add if some else self._cut.discard)(store_id)

    def is_cut(self, store_id: str) -> bool:
        """Whether the map lacks something of it for good."""
        return store_id in self._cut

    def ended(self, instance_id: str) -> None:
        """A life is over."""
        self._told.pop(instance_id, None)
        self._tiers.pop(instance_id, None)
        self._waiting.pop(instance_id, None)
        self._cut = {name for name in self._cut if split_name(name)[0] != instance_id} if self._cut else self._cut

    def _judge(self, instance_id: str) -> None:
        if self._tiers[instance_id] <= self._told[instance_id]:
            self._waiting.pop(instance_id, None)
        else:
            self._waiting[instance_id] = None
