"""A pool node's partitions: one for each layout it was asked to keep, and one for each size of extents of "bytes".

They share one region (`slabs`): a partition takes free slabs first, and then what was used longest ago, whoever has
it. Its own blocks go before somebody else's when they are colder; with none of its own that may go, it takes others' in
any case, so nobody starves. A partition that holds nothing gives all its memory back. The watermarks are the whole
region's: above the high one the runs that were used longest ago go until the low one is reached.

Of a model with several cache groups each group's objects are a partition of their own, whole objects however their
writers cut them. They come and go by themselves: a mask says which objects of a block are here. Of a model with one
group there are whole blocks (`whole_blocks`), which ranks of any cut write and read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from kvmesh.blockservice.object_family import GroupPlace, PartLayout, family_of, part_of
from kvmesh.blockservice.partitions import CLASS_MARK, Partition, unused
from kvmesh.errors import InvalidRequest, Overloaded, PinLimit
from kvmesh.kvcache.announce import AnnouncedSource
from kvmesh.kvcache.leases import PINNED_PERCENT
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.quotas import NoTagQuotas, TagQuotas
from kvmesh.kvcache.size_classes import BYTES, PAGE, size_class
from kvmesh.kvcache.store_stats import Changes
from kvmesh.kvcache.whole_blocks import shard_in
from kvmesh.pool.slabs import SlabPartition, Slabs, SlabStore

MAX_LAYOUTS = 64  # beside the size classes
MIN_SHARD_BYTES = 1024  # a number of somebody's mind must not become a table of millions of extents
MOVES = 16  # runs that change hands in one call


class PoolPartitions:
    """`nbytes` of memory from segment offset `base` on. It is its own source of announcements: a key counts as sealed
    while any partition holds it (one model under two parallel layouts has the same keys in both)."""

    def __init__(
        self,
        base: int,
        nbytes: int,
        *,
        high_percent: int,
        low_percent: int,
        lease_seed: int,
        eviction: str = "lru",
    ) -> None:
        self._slabs = Slabs(base, nbytes)
        self._marks = (high_percent, low_percent)
        self._trimming = False
        self._settings = {"high_percent": 100, "low_percent": 100, "eviction": eviction}
        self._partitions: dict[str, SlabPartition] = {}
        self._seed = lease_seed
        self._changed: dict[bytes, None] = {}  # of partitions that are gone
        self._quotas = TagQuotas()
        self.on_partition: list[Callable[[SlabPartition], None]] = []  # each hears of each that comes up, empty

    @property
    def source(self) -> AnnouncedSource:
        return self

    def take_changes(self) -> Changes:
        changed, self._changed = self._changed, {}
        for partition in self._partitions.values():
            changed.update(_touched(partition.store))
        sealed = tuple(key for key in changed if self._holds(key))
        return Changes(sealed, tuple(changed.keys() - set(sealed)), self.masks(sealed))

    def masks(self, keys: Sequence[bytes]) -> bytes:
        """Returns which objects of each block are here, as one mask a key; b"" where every block is one object."""
        if not any(partition.family for partition in self._partitions.values()):
            return b""
        masks = bytearray(len(keys))
        for partition in self._partitions.values():
            for at, key in enumerate(keys):
                masks[at] |= partition.store.holds(key) << partition.group
        return bytes(masks)

    def keys(self) -> list[bytes]:
        stores = [partition.store for partition in self._partitions.values()]
        return list(dict.fromkeys(itertools.chain.from_iterable(store.keys() for store in stores)))

    def _holds(self, key: bytes) -> bool:
        return any(partition.store.holds(key) for partition in self._partitions.values())

    def all(self) -> Sequence[Partition]:
        return tuple(self._partitions.values())

    def get(self, layout: str) -> Partition | None:
        return self._partitions.get(layout)

    def family(self, layout: str) -> Sequence[Partition]:
        if layout == BYTES:
            return [found for name, found in self._partitions.items() if name.startswith(CLASS_MARK)]
        if not layout:
            return self.all()
        found = self._partitions.get(layout)
        if found is None and family_of(layout) is not None:
            places = self.groups_of(layout).values()
            return [kept for place in places if (kept := self._partitions.get(place.layout)) is not None]
        return () if found is None else (found,)

    def groups_of(self, family: str) -> dict[int, GroupPlace]:
        found = family_of(family)
        return found.wholes() if found is not None else {}

    def room(self, layout: str, shard_bytes: int, blocks: int) -> Partition:
        if layout == BYTES:
            self._check(shard_bytes, 1)
            shard_bytes = min(size_class(shard_bytes), self.capacity_bytes // PAGE * PAGE)
            layout = f"{CLASS_MARK}{shard_bytes}"
        partition = self._partitions.get(layout) or self._add(layout, shard_bytes)
        if shard_bytes != partition.shard_bytes:
            raise InvalidRequest.of(
                "shard_bytes", shard_bytes, f"blocks of this layout have {partition.shard_bytes} bytes here"
            )
        while (lacking := blocks - unused(partition)) > 0 and self._slabs.grow(partition, lacking):
            pass
        for _ in range(MOVES):
            if unused(partition) >= blocks or not self._slabs.move(partition, partition.store.free < blocks):
                break
        if not partition.store.total:
            del self._partitions[layout]
            self._changed.update(_touched(partition.store))  # it may have held blocks before its runs went
            raise Overloaded(f"{blocks} blocks of {shard_bytes} bytes: {self._figures()}", retry_after_ms=1000)
        return partition

    def settle(self) -> None:
        for layout, partition in list(self._partitions.items()):
            if unused(partition) == partition.store.total:
                del self._partitions[layout]
                self._changed.update(_touched(partition.store))
                self._slabs.give_back(partition)
        self._trim()

    def evict_first(self, partition: Partition, keys: Sequence[bytes]) -> None:
        own = self._partitions.get(partition.layout)
        if own is partition:
            self._slabs.evict_first(own, own.store.extents_of(keys))

    def may_pin(self, blocks: int, nbytes: int) -> None:
        pinned = sum(p.store.stats.hard_pinned * p.shard_bytes for p in self._partitions.values())
        limit = self.capacity_bytes * PINNED_PERCENT // 100
        if blocks and pinned + nbytes > limit:
            raise PinLimit(
                f"hard_pins={blocks}: {pinned} of {self.capacity_bytes} bytes are pinned, at most {limit} may be",
                field="hard_pins",
            )

    def claim(self, layout: str, shard_bytes: int, first: int, slabs: int) -> tuple[SlabPartition, range]:
        """These very slabs are the layout's from now on; returns its partition, and the extents there. ValueError,
        InvalidRequest, Overloaded: that cannot be."""
        partition = self._partitions.get(layout)
        if partition is not None and partition.shard_bytes != shard_bytes:
            raise ValueError(f"blocks of {layout!r} have {partition.shard_bytes} bytes here, not {shard_bytes}")
        made = partition or self._add(layout, shard_bytes)
        try:
            return made, self._slabs.claim(made, first, slabs).numbers
        except ValueError:
            if partition is None:
                del self._partitions[layout]
            raise

    def hold_free(self) -> Callable[[], None]:
        """See Slabs."""
        return self._slabs.hold_free()

    @property
    def slab_bytes(self) -> int:
        """Memory comes in runs of so many bytes."""
        return self._slabs.slab_bytes

    @property
    def quotas(self) -> TagQuotas:
        return self._quotas

    @property
    def capacity_bytes(self) -> int:
        return self._slabs.capacity_bytes

    @property
    def free_bytes(self) -> int:
        inside = sum(unused(p) * p.shard_bytes for p in self._partitions.values())
        return self._slabs.free_bytes + inside

    @property
    def fragmentation(self) -> float:
        return self._slabs.fragmentation

    def _trim(self) -> None:
        """A bounded step; the next call goes on."""
        high, low = self._marks
        used, total = self.capacity_bytes - self.free_bytes, self.capacity_bytes
        if not self._trimming and used * 100 <= high * total:
            return
        for _ in range(MOVES):
            self._trimming = used * 100 > low * total and self._slabs.drop()
            if not self._trimming:
                return
            used = self.capacity_bytes - self.free_bytes

    def _figures(self) -> str:
        shares = sum(1 for p in self._partitions.values() if p.store.total)
        return (
            f"no memory of this pool node is left for them: {self.free_bytes} of {self.capacity_bytes} bytes are free, "
            f"the rest is in use by {shares} layouts and sizes"
        )

    def _check(self, shard_bytes: int, least: int) -> None:
        if not least <= shard_bytes <= self.capacity_bytes:
            raise InvalidRequest.of("shard_bytes", shard_bytes, f"must be in {least}..{self.capacity_bytes}")

    def _add(self, layout: str, shard_bytes: int) -> SlabPartition:
        self._check(shard_bytes, MIN_SHARD_BYTES)
        if sum(not name.startswith(CLASS_MARK) for name in self._partitions) >= MAX_LAYOUTS:
            raise Overloaded(f"this pool node keeps {MAX_LAYOUTS} layouts already", retry_after_ms=1000)
        self._seed += 1  # lease ids of two partitions must not meet

        def used(extents: Sequence[int]) -> None:
            self._slabs.used(partition, extents)

        kept = part_of(layout)
        # Hard pins are limited by bytes of the whole pool, see `may_pin`.
        store = SlabStore(
            used,
            block_bytes=shard_bytes,
            lease_seed=self._seed,
            pinned_percent=100,
            quotas=NoTagQuotas() if kept is not None and kept.group else self._quotas,
            **self._settings,
        )
        partition = SlabPartition(layout, shard_bytes, store)
        if kept is not None:
            self._keeps_objects(partition, kept)
        elif (whole := shard_in(layout)) is not None and whole.shard_bytes == shard_bytes:
            partition.shards = (whole,)
        for heard in self.on_partition:
            heard(partition)
        self._partitions[layout] = partition
        return partition

    def _keeps_objects(self, partition: SlabPartition, kept: PartLayout) -> None:
        """Makes the partition that of whole objects of one group. Raises InvalidRequest when they are of another
        size."""
        whole, places = kept.family.object(kept.group), kept.family.wholes()
        if kept.cuts != (whole,) or whole.shard_bytes != partition.shard_bytes:
            raise InvalidRequest.of("layout", partition.layout, f"whole objects of {whole.shard_bytes} bytes are kept")
        partition.family, partition.group, partition.shards = kept.family.text, kept.group, (whole,)
        if kept.group:
            return

        def evicted(key: bytes) -> None:
            """A quota has evicted an anchor: the rest of the block goes, but for what is pinned hard."""
            for place in list(places.values())[1:]:
                other = self._partitions.get(place.layout)
                busy = other is not None and other.store.evict_one(key, spared=True) is None and other.store.holds(key)
                if other is not None and busy and not any(other.store.pinned_hard((key,))):
                    other.store.remove((key,))

        partition.store.on_evicted_one = evicted


def _touched(store: NodeStore) -> dict[bytes, None]:
    changes = store.take_changes()
    return dict.fromkeys((*changes.sealed, *changes.removed))
