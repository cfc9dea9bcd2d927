"""Where blocks lie: node stores of one layout each, and the segment offsets of their extents.

An instance has one partition, its ranks' extents. A pool node has one for each layout it was asked to keep, and one
for each size of extents of the layout "bytes": see `pool_partitions`.

All shards of a block (one a rank) are one extent number: they are begun, sealed, evicted and removed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.errors import InvalidRequest
from kvmesh.kvcache.announce import AnnouncedSource
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.quotas import TagQuotas
from kvmesh.kvcache.size_classes import BYTES
from kvmesh.ranks import protocol as m

CLASS_MARK = f"{BYTES}/"  # begins the names of partitions of that layout: one for each size of extents


def layout_tag(readies: Sequence[m.Ready]) -> str:
    """What two instances must share for their shards to be the same bytes: every rank's part, in order."""
    return " | ".join(ready.layout for ready in readies)


@dataclass(eq=False)
class Partition:
    """One node store and its memory: extent e of a rank is `shard_bytes` long."""

    layout: str
    shard_bytes: int
    store: NodeStore
    bases: tuple[int, ...] = ()  # of extent 0, for each rank
    shards: tuple[ShardLayout, ...] = ()  # what of each block lies at each rank; (): nobody knows

    @property
    def shown_layout(self) -> str:
        """As others know it: all sizes of "bytes" are one."""
        return BYTES if self.layout.startswith(CLASS_MARK) else self.layout

    def offset(self, rank: int, extent: int) -> int:
        """Of the extent's first byte in that rank's segment."""
        return self.bases[rank] + extent * self.shard_bytes


class Partitions(Protocol):
    """All partitions of one process."""

    @property
    def source(self) -> AnnouncedSource: ...

    def all(self) -> Sequence[Partition]: ...

    def get(self, layout: str) -> Partition | None:
        """The partition of this layout, if there is one."""

    def family(self, layout: str) -> Sequence[Partition]:
        """All that keep blocks of this layout: one, several of "bytes", none. "": all there are."""

    def room(self, layout: str, shard_bytes: int, blocks: int) -> Partition:
        """A partition that is to take so many more blocks of this layout and length. InvalidRequest: not here;
        Overloaded: no memory is left. What it still lacks, others may give at the next call."""

    def may_pin(self, blocks: int, nbytes: int) -> None:
        """Overloaded, which names figures, when so many more, with extents of so many bytes in all, must not be pinned
        hard."""

    @property
    def quotas(self) -> TagQuotas:
        """Of all of them."""

    @property
    def fragmentation(self) -> float:
        """1 - largest free run / all free memory; 0: none."""

    def settle(self) -> None:
        """Some partition may hold less than before."""

    def evict_first(self, partition: Partition, keys: Sequence[bytes]) -> None:
        """These of its coldest blocks have copies elsewhere (`NodeStore.replicated` has heard it): where memory goes in
        pieces of many blocks, theirs goes first."""

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def free_bytes(self) -> int:
        """Neither sealed nor being written."""


class OnePartition:
    """An instance's own."""

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
        pass  # blocks go one by one here, in the order of its store

    def family(self, layout: str) -> Sequence[Partition]:
        return (self._partition,) if layout in ("", self._partition.layout) else ()

    def may_pin(self, blocks: int, nbytes: int) -> None:
        pass  # its store has a limit of its own

    @property
    def quotas(self) -> TagQuotas:
        return self._partition.store.quotas

    @property
    def fragmentation(self) -> float:
        return 0.0  # extents are alike: any free one serves

    @property
    def capacity_bytes(self) -> int:
        return self._partition.store.total * self._partition.shard_bytes

    @property
    def free_bytes(self) -> int:
        return unused(self._partition) * self._partition.shard_bytes


def holder(partitions: Partitions, layout: str, key: bytes) -> Partition | None:
    """The partition of this layout ("": of any) in which `key` is sealed."""
    return next((found for found in partitions.family(layout) if found.store.holds(key)), None)


def size_of(partition: Partition, key: bytes) -> int:
    """Bytes of a sealed block's shard."""
    (size,) = partition.store.sizes([key])
    return size or partition.shard_bytes


def unused(partition: Partition) -> int:
    """Extents that hold no block and that nobody writes or reads."""
    return partition.store.unheld
