"""Where blocks lie: node stores of one layout each, and the segment offsets of their extents.

An instance has one partition, its ranks' extents. A pool node has one for each layout it was asked to keep, and one for
each size of extents of the layout "bytes": see `pool_partitions`.

All shards of a block (one at each rank) have one extent number: they are begun, sealed, evicted and removed together.

Of a model with several cache groups each group is a partition. They are found by the text of their family
(`object_family`), and a request without masks of groups never gets at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.blockservice.object_family import GroupPlace
from kvmesh.errors import InvalidRequest
from kvmesh.kvcache.announce import AnnouncedSource
from kvmesh.kvcache.grouped_store import GroupedStore
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.quotas import TagQuotas
from kvmesh.kvcache.size_classes import BYTES
from kvmesh.kvcache.whole_blocks import WholeBlocks
from kvmesh.ranks import protocol as m

CLASS_MARK = f"{BYTES}/"  # the names of partitions of layout "bytes" begin so: one for each size of extents


def layout_tag(readies: Sequence[m.Ready]) -> str:
    """Returns what two instances must share for their shards to be the same bytes: every rank's layout, in order."""
    return " | ".join(ready.layout for ready in readies)


@dataclass(eq=False)
class Partition:
    """Describes one node store and its memory: each extent of a rank is `shard_bytes` long."""

    layout: str
    shard_bytes: int
    store: NodeStore
    bases: tuple[int, ...] = ()  # for each rank, the offset of extent 0 in its segment
    shards: tuple[ShardLayout, ...] = ()  # for each rank, which part of each block it has; (): unknown
    family: str = ""  # the text of the ObjectFamily of whose group `group` it keeps the objects; "": whole blocks
    group: int = 0
    owner: GroupedStore | None = None  # of `store`, where an instance's model has several groups
    whole: WholeBlocks | None = None  # what a pool node keeps of these blocks; None: the same, or objects of a family

    @property
    def shown_layout(self) -> str:
        """The layout as others know it: all sizes of "bytes" are one, and so are all groups of a model."""
        return BYTES if self.layout.startswith(CLASS_MARK) else self.family or self.layout

    def begin(self, keys: Sequence[bytes]) -> list[int | None]:
        """Returns an extent for each block or object to be written, or None: see `NodeStore.begin`."""
        if self.owner is None:
            return self.store.begin(keys)
        return [begun[self.group] for begun in self.owner.begin(keys, [1 << self.group] * len(keys))]

    def seal(self, key: bytes, nbytes: int | None = None) -> bool:
        """Makes what was begun findable: see `NodeStore.seal`."""
        return bool(self.owner.seal(key, 1 << self.group)) if self.owner is not None else self.store.seal(key, nbytes)

    def abandon(self, key: bytes) -> None:
        """Frees the extent of what was begun and will not be written."""
        if self.owner is not None:
            self.owner.abandon(key, 1 << self.group)
        else:
            self.store.abandon(key)

    def offset(self, rank: int, extent: int) -> int:
        """Returns the offset of the extent's first byte in that rank's segment."""
        return self.bases[rank] + extent * self.shard_bytes


class Partitions(Protocol):
    """Gives access to all partitions of one process."""

    @property
    def source(self) -> AnnouncedSource: ...

    def all(self) -> Sequence[Partition]: ...

    def get(self, layout: str) -> Partition | None:
        """Returns the partition of this layout, if there is one."""

    def family(self, layout: str) -> Sequence[Partition]:
        """Returns all partitions that keep blocks of this layout: one, several for "bytes" and for a model of several
        cache groups, or none. "" means all there are."""

    def groups_of(self, family: str) -> dict[int, GroupPlace]:
        """Returns where objects of each group of a family lie, or would lie; {} for another layout."""

    def room(self, layout: str, shard_bytes: int, blocks: int) -> Partition:
        """Returns the partition that is to take `blocks` more blocks of this layout and length. Memory that it still
        lacks, others may give up by the next call. Raises InvalidRequest when such blocks are not kept here, Overloaded
        when no memory is left."""

    def may_pin(self, blocks: int, nbytes: int) -> None:
        """Raises Overloaded, with figures, when `blocks` more, in extents of `nbytes` in all, must not be pinned
        hard."""

    @property
    def quotas(self) -> TagQuotas:
        """The quotas over all partitions."""

    @property
    def fragmentation(self) -> float:
        """1 - largest free run / all free memory; 0 means that there is none."""

    def settle(self) -> None:
        """Takes note that some partition may hold less than before."""

    def evict_first(self, partition: Partition, keys: Sequence[bytes]) -> None:
        """Takes note that these of the partition's coldest blocks have copies elsewhere (`NodeStore.replicated` has
        been told). Where memory is freed in pieces of many blocks, pieces with such blocks go first."""

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def free_bytes(self) -> int:
        """Bytes that are neither sealed nor being written."""


class OnePartition:
    """Has the partitions of an instance: only one."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition

    @property
    def source(self) -> AnnouncedSource:
        return self._partition.store

    def all(self) -> Sequence[Partition]:
        return (self._partition,)

    def get(self, layout: str) -> Partition | None:
        return self._partition if layout == self._partition.layout else None

    def room(self, layout: str, shard_bytes: int, blocks: int) -> Partition:
        mine = self._partition
        if layout != mine.layout:
            raise InvalidRequest.of("layout", layout, f"this instance keeps blocks of {mine.layout!r} alone")
        if shard_bytes != mine.shard_bytes:
            raise InvalidRequest.of("shard_bytes", shard_bytes, f"blocks of this layout have {mine.shard_bytes}")
        return mine

    def settle(self) -> None:
        pass

    def evict_first(self, partition: Partition, keys: Sequence[bytes]) -> None:
        pass  # blocks are evicted one by one here, in the order of the store

    def family(self, layout: str) -> Sequence[Partition]:
        return (self._partition,) if layout in ("", self._partition.layout) else ()

    def groups_of(self, family: str) -> dict[int, GroupPlace]:
        return {}

    def may_pin(self, blocks: int, nbytes: int) -> None:
        pass  # its store has a limit of its own

    @property
    def quotas(self) -> TagQuotas:
        return self._partition.store.quotas

    @property
    def fragmentation(self) -> float:
        return 0.0  # all extents have one size: any free one serves

    @property
    def capacity_bytes(self) -> int:
        return self._partition.store.total * self._partition.shard_bytes

    @property
    def free_bytes(self) -> int:
        return unused(self._partition) * self._partition.shard_bytes


class GroupedPartitions:
    """Has the partitions of an instance whose model has several cache groups: `parts[g]` of group g, all of one
    family, whose stores are those of `store`."""

    def __init__(self, store: GroupedStore, parts: Sequence[Partition]) -> None:
        if len({part.family for part in parts}) != 1 or [part.group for part in parts] != list(range(len(parts))):
            raise ValueError("the partitions of an instance are one for each group of one family")
        if any(part.owner is not store or part.store is not store.stores[part.group] for part in parts):
            raise ValueError("a partition of another store")
        self._store = store
        self._parts = tuple(parts)

    @property
    def source(self) -> AnnouncedSource:
        return self._store

    def all(self) -> Sequence[Partition]:
        return self._parts

    def get(self, layout: str) -> Partition | None:
        return next((part for part in self._parts if part.layout == layout), None)

    def family(self, layout: str) -> Sequence[Partition]:
        if layout in ("", self._parts[0].family):
            return self._parts
        return tuple(part for part in self._parts if part.layout == layout)

    def groups_of(self, family: str) -> dict[int, GroupPlace]:
        mine = self._parts if family == self._parts[0].family else ()
        return {part.group: GroupPlace(part.layout, part.shard_bytes) for part in mine}

    def room(self, layout: str, shard_bytes: int, blocks: int) -> Partition:
        mine = self.get(layout)
        if mine is None:
            raise InvalidRequest.of("layout", layout, f"this instance keeps objects of {self._parts[0].family!r} alone")
        if shard_bytes != mine.shard_bytes:
            raise InvalidRequest.of("shard_bytes", shard_bytes, f"objects of this group have {mine.shard_bytes}")
        return mine

    def may_pin(self, blocks: int, nbytes: int) -> None:
        pass  # each store has a limit of its own

    @property
    def quotas(self) -> TagQuotas:
        return self._parts[0].store.quotas

    @property
    def fragmentation(self) -> float:
        return 0.0

    def settle(self) -> None:
        pass

    def evict_first(self, partition: Partition, keys: Sequence[bytes]) -> None:
        pass  # as in OnePartition

    @property
    def capacity_bytes(self) -> int:
        return sum(part.store.total * part.shard_bytes for part in self._parts)

    @property
    def free_bytes(self) -> int:
        return sum(unused(part) * part.shard_bytes for part in self._parts)


def holder(partitions: Partitions, layout: str, key: bytes) -> Partition | None:
    """Returns the partition of this layout ("": of any) in which `key` is sealed."""
    return next((found for found in partitions.family(layout) if found.store.holds(key)), None)


def size_of(partition: Partition, key: bytes) -> int:
    """Returns the bytes of a sealed block's shard."""
    (size,) = partition.store.sizes([key])
    return size or partition.shard_bytes


def unused(partition: Partition) -> int:
    """Returns how many extents hold no block and are neither written nor read."""
    return partition.store.unheld
