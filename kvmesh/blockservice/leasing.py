"""Leases over blocks that lie in several partitions, under one number: layout "bytes" has one for each size of extents,
a model of several cache groups one for each group.

Each store gives its part a lease of its own; the first part's number stands for all of them. A lease of which any part
is over is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmesh.blockservice.partitions import Partition, Partitions
from kvmesh.kvcache.leases import Deadlines
from kvmesh.kvcache.node_store import NodeStore

SWEEP = 64  # groups whose time is over that are ended with each new one


@dataclass(frozen=True)
class Leased:
    """The result of a lease: `places[i]` is the partition and extent of the i-th key, None if it is not here.
    `lease_id` 0 means that nothing is leased."""

    lease_id: int
    places: tuple[tuple[Partition, int] | None, ...]


@dataclass(frozen=True)
class LeasedObjects:
    """The result of a lease of objects: `extents[g][i]` is the extent of the i-th key's object in group g; those that
    are not here, or were not asked for, are left out."""

    lease_id: int
    extents: dict[int, dict[int, int]]

    def masks(self, keys: int) -> bytes:
        """Returns what is leased of each of so many keys, as one mask a key."""
        return bytes(sum(1 << g for g, mine in self.extents.items() if at in mine) for at in range(keys))


class Leasing:
    """Gives, renews and ends all leases of one process. Times are ns of the lease clock."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions
        self._groups: dict[int, tuple[tuple[NodeStore, int], ...]] = {}
        self._ends: Deadlines[int] = Deadlines()

    @property
    def open(self) -> int:
        """How many leases are not over, in all stores."""
        return sum(partition.store.stats.leases for partition in self._partitions.all())

    def lease(self, layout: str, keys: Sequence[bytes], duration_ns: int, now: int) -> Leased:
        """Leases those of `keys` that are here as whole blocks: see `NodeStore.lease`."""
        family = [partition for partition in self._partitions.family(layout) if not partition.family]
        places: list[tuple[Partition, int] | None] = [None] * len(keys)
        parts: list[tuple[NodeStore, int]] = []
        open_ = list(range(len(keys)))
        for partition in family:
            mine = open_ if partition is family[-1] else [at for at in open_ if partition.store.holds(keys[at])]
            if not mine:
                continue
            lease = partition.store.lease([keys[at] for at in mine], duration_ns, now)
            if lease.lease_id:
                parts.append((partition.store, lease.lease_id))
            for at, extent in zip(mine, lease.extents, strict=True):
                if extent is not None:
                    places[at] = (partition, extent)
            open_ = [at for at in open_ if places[at] is None]
        return Leased(self._join(parts, duration_ns, now), tuple(places))

    def lease_objects(
        self, parts: Mapping[int, Partition], keys: Sequence[bytes], masks: Sequence[int], duration_ns: int, now: int
    ) -> LeasedObjects:
        """Leases what is here of the objects `masks[i]` of each key; `parts` has the partition of each group."""
        extents: dict[int, dict[int, int]] = {}
        given: list[tuple[NodeStore, int]] = []
        for group, partition in parts.items():
            asked = [at for at, mask in enumerate(masks) if mask >> group & 1]
            if not asked:
                continue
            lease = partition.store.lease([keys[at] for at in asked], duration_ns, now)
            if lease.lease_id:
                given.append((partition.store, lease.lease_id))
            found = zip(asked, lease.extents, strict=True)
            extents[group] = {at: extent for at, extent in found if extent is not None}
        return LeasedObjects(self._join(given, duration_ns, now), extents)

    def _join(self, parts: Sequence[tuple[NodeStore, int]], duration_ns: int, now: int) -> int:
        """Returns the number that stands for all these parts; 0 when there are none."""
        lease_id = parts[0][1] if parts else 0
        if len(parts) > 1:
            for over in self._ends.due(now, SWEEP):
                for store, part in self._groups.pop(over, ()):
                    store.unlease(part)  # a part that outlived the others would confirm all of them
            self._groups[lease_id] = tuple(parts)
            self._ends.extend(lease_id, now + duration_ns)
        return lease_id

    def renew(self, lease_id: int, duration_ns: int, now: int) -> int | None:
        """Returns the lease's new end; None if the lease is over."""
        group = self._groups.get(lease_id)
        if group is None:
            ends = (partition.store.renew(lease_id, duration_ns, now) for partition in self._partitions.all())
            return next((end for end in ends if end is not None), None)
        ends_ = [store.renew(part, duration_ns, now) for store, part in group]
        known = [end for end in ends_ if end is not None]
        if len(known) < len(ends_):
            return None
        self._ends.extend(lease_id, max(known))
        return min(known)

    def release(self, lease_id: int) -> bool:
        """Ends a lease that its reader no longer needs. Returns whether every part was open until now, so that what was
        read is right; see `NodeStore.unlease`."""
        self._ends.drop(lease_id)
        group = self._groups.pop(lease_id, None)
        if group is None:
            return any(partition.store.unlease(lease_id) for partition in self._partitions.all())
        done = [store.unlease(part) for store, part in group]
        return all(done)
