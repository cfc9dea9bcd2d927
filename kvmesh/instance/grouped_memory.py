"""The node stores of an instance whose model has several cache groups, over what its ranks keep of each (ADR 0037)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kvmesh.blockservice.object_family import ObjectFamily
from kvmesh.blockservice.partitions import GroupedPartitions, Partition
from kvmesh.blockservice.warm.memory import KeptStore
from kvmesh.engine.config import ModelConfig
from kvmesh.errors import CheckpointError, ConfigError
from kvmesh.instance.config import InstanceConfig
from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind
from kvmesh.kvcache.grouped_store import GroupedStore
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.quotas import NoTagQuotas
from kvmesh.ranks import protocol as m


def groups_of_model(folder: str) -> tuple[CacheGroup, ...]:
    """Returns the cache groups of a checkpoint's model. Raises CheckpointError."""
    path = Path(folder, "config.json")
    try:
        return ModelConfig.from_hf(json.loads(path.read_text())).cache_groups
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None


class GroupedMemory:
    """What the ranks keep of each group, `Ready.groups`; every rank has a cut of every group, each of one size at all
    ranks. Raises ConfigError when that is not so."""

    def __init__(self, groups: Sequence[CacheGroup], config: InstanceConfig, readies: Sequence[m.Ready]) -> None:
        numbers = list(range(len(groups)))
        for ready in readies:
            if [memory.shard.group for memory in ready.groups] != numbers:
                raise ConfigError(
                    f"model={config.model!r}: a rank keeps the cache groups {[g.shard.group for g in ready.groups]} of "
                    f"{len(groups)}",
                    field="model",
                )
        first = readies[0]
        # Of what the instance was started with: it names folders, which outlive updates. Keys name the epoch of now.
        epoch = f"+{config.weights_epoch}" if config.weights_epoch else ""
        self.groups = tuple(groups)
        self.family = ObjectFamily(
            f"{first.fingerprint[:16]}{epoch} {first.dtype}",
            config.block_tokens,
            self.groups,
            tuple(memory.shard.itemsize for memory in first.groups),
        )
        self._config = config
        self._memories = [[ready.groups[group] for ready in readies] for group in numbers]  # [group][rank]
        # Where each group's extents begin in the host region; the same at all ranks, as warm tables are of all ranks.
        self._starts = [
            {memory.extent_base_offset - ready.extent_base_offset for memory, ready in zip(mine, readies, strict=True)}
            for mine in self._memories
        ]
        for group, mine, starts in zip(groups, self._memories, self._starts, strict=True):
            if len({memory.shard.shard_bytes for memory in mine}) != 1 or len(starts) != 1:
                raise ConfigError(
                    f"mesh={str(config.axes)!r}: its ranks do not have equal parts of cache group {group.name}",
                    field="mesh",
                )

    @property
    def object_bytes(self) -> tuple[int, ...]:
        """The bytes of one whole object of each group."""
        return tuple(self.family.object(group).shard_bytes for group in range(len(self.groups)))

    @property
    def kv_bytes_per_token(self) -> int:
        """The bytes that a token takes in all groups of tokens together."""
        pairs = zip(self.groups, self.object_bytes, strict=True)
        return sum(size // self._config.block_tokens for group, size in pairs if group.kind is not CacheKind.STATE)

    @property
    def cuts(self) -> tuple[ShardLayout, ...]:
        """Every rank's cut of every group: rank by rank, within a rank by group number."""
        return tuple(memory.shard for of_rank in zip(*self._memories, strict=True) for memory in of_rank)

    def new_store(self, lease_seed: int) -> GroupedStore:
        """Returns empty stores over the host extents of all groups, as configured."""
        c = self._config
        stores = [
            NodeStore(
                min(memory.num_extents for memory in mine),
                high_percent=c.store_high_percent,
                low_percent=c.store_low_percent,
                eviction=c.store_eviction,
                block_tokens=c.block_tokens,
                block_bytes=mine[0].shard.shard_bytes,
                lease_seed=lease_seed + group,  # ids of two stores must not meet
                quotas=NoTagQuotas() if group else None,
            )
            for group, mine in enumerate(self._memories)
        ]
        return GroupedStore(self.groups, stores, c.block_tokens)

    def partitions(self, store: GroupedStore) -> GroupedPartitions:
        """Returns one partition for each group of `store`."""
        parts = []
        for group, mine in enumerate(self._memories):
            cuts = tuple(memory.shard for memory in mine)
            bases = tuple(memory.extent_base_offset for memory in mine)
            layout = self.family.part(group, cuts)
            parts.append(
                Partition(layout, cuts[0].shard_bytes, store.stores[group], bases, cuts, self.family.text, group, store)
            )
        return GroupedPartitions(store, parts)

    def kept(self, store: GroupedStore) -> list[KeptStore]:
        """Returns where warm memory finds the extents of each group's store."""
        return [
            KeptStore(part, mine[0].shard.shard_bytes, *starts)
            for part, mine, starts in zip(store.stores, self._memories, self._starts, strict=True)
        ]
