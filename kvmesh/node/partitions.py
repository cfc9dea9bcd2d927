"""Where blocks lie: node stores of one layout each, and the segment offsets of their extents.

An instance has one partition, its ranks' extents. A pool node has one for each layout it was asked to keep; they grow
slab by slab out of one region. A partition that holds nothing any more gives its slabs back; one that holds a single
block keeps them all (slabs are not moved between layouts in use).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvmesh.kvcache.node_store import Changes, NodeStore
from kvmesh.node import messages as m
from kvmesh.rpc.errors import InvalidRequest, Overloaded

MAX_LAYOUTS = 64
SLABS = 64  # a pool's region is cut into about so many
MIN_SLAB_BYTES = 256 << 10
MIN_SHARD_BYTES = 1024  # a number of somebody's mind must not become a table of millions of extents
PAGE = 4096


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

    def offset(self, rank: int, extent: int) -> int:
        """Of the extent's first byte in that rank's segment."""
        return self.bases[rank] + extent * self.shard_bytes


class Source(Protocol):
    """What is announced: one store, or several as one."""

    def take_changes(self) -> Changes: ...

    def keys(self) -> list[bytes]: ...


class Partitions(Protocol):
    """All partitions of one process."""

    @property
    def source(self) -> Source: ...

    def all(self) -> Sequence[Partition]: ...

    def get(self, layout: str) -> Partition | None:
        """The partition of this layout, if there is one."""

    def room(self, layout: str, shard_bytes: int, blocks: int) -> Partition:
        """A partition that is to take so many more blocks. InvalidRequest: not here; Overloaded: no memory is left."""

    def settle(self) -> None:
        """Some partition may hold less than before."""

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
    def source(self) -> Source:
        return self._partition.store

    def all(self) -> Sequence[Partition]:
        return (self._partition,)

    def get(self, layout: str) -> Partition | None:
        return self._partition if layout == self._partition.layout else None

    def room(self, layout: str, shard_bytes: int, blocks: int) -> Partition:
        mine = self._partition
        if layout != mine.layout:
            raise InvalidRequest.of("layout", layout, f"this instance keeps blocks of {mine.layout!r}")
        if shard_bytes != mine.shard_bytes:
            raise InvalidRequest.of("shard_bytes", shard_bytes, f"blocks of this layout have {mine.shard_bytes}")
        return mine

    def settle(self) -> None:
        pass

    @property
    def capacity_bytes(self) -> int:
        return self._partition.store.total * self._partition.shard_bytes

    @property
    def free_bytes(self) -> int:
        return unused(self._partition) * self._partition.shard_bytes


@dataclass(eq=False)
class SlabPartition(Partition):
    """A pool's: runs of slabs, each (first extent, segment offset)."""

    starts: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)  # (first slab, slabs)

    def offset(self, rank: int, extent: int) -> int:
        assert rank == 0, "a pool node has one rank"
        at = bisect_right(self.starts, extent) - 1
        return self.offsets[at] + (extent - self.starts[at]) * self.shard_bytes


class PoolPartitions:
    """A pool node's memory: `nbytes` from segment offset `base` on. It is its own source of announcements: a key counts
    as sealed while any partition holds it (one model under two parallel layouts has the same keys in both)."""

    def __init__(self, base: int, nbytes: int, *, high_percent: int, low_percent: int, lease_seed: int) -> None:
        self._base = base
        self._percent = (high_percent, low_percent)
        self._slab_bytes = max(nbytes // SLABS // PAGE * PAGE, min(MIN_SLAB_BYTES, nbytes))
        self._used = bytearray(nbytes // self._slab_bytes)
        self._partitions: dict[str, SlabPartition] = {}
        self._seed = lease_seed
        self._changed: dict[bytes, None] = {}  # of partitions that are gone

    @property
    def source(self) -> Source:
        return self

    def take_changes(self) -> Changes:
        changed, self._changed = self._changed, {}
        for partition in self._partitions.values():
            changed.update(_touched(partition.store))
        sealed = tuple(key for key in changed if self._holds(key))
        return Changes(sealed, tuple(changed.keys() - set(sealed)))

    def keys(self) -> list[bytes]:
        stores = [partition.store for partition in self._partitions.values()]
        return list(dict.fromkeys(itertools.chain.from_iterable(store.keys() for store in stores)))

    def _holds(self, key: bytes) -> bool:
        return any(partition.store.holds(key) for partition in self._partitions.values())

    def all(self) -> Sequence[Partition]:
        return tuple(self._partitions.values())

    def get(self, layout: str) -> Partition | None:
        return self._partitions.get(layout)

    def room(self, layout: str, shard_bytes: int, blocks: int) -> Partition:
        partition = self._partitions.get(layout) or self._add(layout, shard_bytes)
        if shard_bytes != partition.shard_bytes:
            raise InvalidRequest.of(
                "shard_bytes", shard_bytes, f"blocks of this layout have {partition.shard_bytes} bytes here"
            )
        while crowded(partition, blocks, self._percent[0]) and self._grow(partition):
            pass
        if not partition.store.total:
            del self._partitions[layout]
            raise Overloaded("no memory of this pool node is left for another layout", retry_after_ms=1000)
        return partition

    def settle(self) -> None:
        for layout, partition in list(self._partitions.items()):
            if unused(partition) == partition.store.total:
                del self._partitions[layout]
                self._changed.update(_touched(partition.store))
                for first, count in partition.runs:
                    self._used[first : first + count] = bytes(count)

    @property
    def capacity_bytes(self) -> int:
        return len(self._used) * self._slab_bytes

    @property
    def free_bytes(self) -> int:
        inside = sum(unused(p) * p.shard_bytes for p in self._partitions.values())
        return self._used.count(0) * self._slab_bytes + inside

    def _add(self, layout: str, shard_bytes: int) -> SlabPartition:
        if not MIN_SHARD_BYTES <= shard_bytes <= self.capacity_bytes:
            raise InvalidRequest.of("shard_bytes", shard_bytes, f"must be in {MIN_SHARD_BYTES}..{self.capacity_bytes}")
        if len(self._partitions) >= MAX_LAYOUTS:
            raise Overloaded(f"this pool node keeps {MAX_LAYOUTS} layouts already", retry_after_ms=1000)
        high, low = self._percent
        self._seed += 1  # lease ids of two partitions must not meet
        store = NodeStore(0, high_percent=high, low_percent=low, lease_seed=self._seed)
        partition = self._partitions[layout] = SlabPartition(layout, shard_bytes, store)
        return partition

    def _grow(self, partition: SlabPartition) -> bool:
        """One more run of slabs; false: there is none."""
        count = -(-partition.shard_bytes // self._slab_bytes)
        first = self._used.find(bytes(count))
        if first < 0:
            return False
        self._used[first : first + count] = b"\1" * count
        partition.runs.append((first, count))
        partition.starts.append(partition.store.total)
        partition.offsets.append(self._base + first * self._slab_bytes)
        partition.store.grow(count * self._slab_bytes // partition.shard_bytes)
        return True


def unused(partition: Partition) -> int:
    """Extents that hold no block and that nobody writes or reads."""
    return partition.store.free - partition.store.stats.idle


def crowded(partition: Partition, blocks: int, high_percent: int) -> bool:
    """Whether so many more blocks would make the store evict others."""
    total = partition.store.total
    return total * high_percent < (total - unused(partition) + blocks) * 100


def _touched(store: NodeStore) -> dict[bytes, None]:
    changes = store.take_changes()
    return dict.fromkeys((*changes.sealed, *changes.removed))
