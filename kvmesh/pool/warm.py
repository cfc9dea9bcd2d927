"""A pool node's memory that outlives it: partitions come back with their runs of slabs, block by block.

    <warm_segment>/layouts.json    which layout a number in the table means (`Entry.kind`)

An extent's slot in the table is that of the page it begins in. Its entry also names its run, so the next life can
give the same slabs to the same layout before it looks at blocks. Of two runs that overlap the later one is true: the
other was taken away, and what was left behind of it were notes about readers of long ago.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from kvmesh.blockservice.warm.memory import Found, WarmMemory
from kvmesh.blockservice.warm.store import ExtentLayout, WarmStore
from kvmesh.errors import KvmeshError, Overloaded
from kvmesh.pool.partitions import PoolPartitions
from kvmesh.pool.slabs import SlabPartition
from kvmesh.ranks.warm_table import Entry
from kvmesh.ranks.worker.warm_segment import POOL_SLOT_BYTES

log = logging.getLogger(__name__)

_SLABS = 1 << 32  # a run's name: its first slab, and how many


class Layouts:
    """Numbers of layouts, in a file. They are those of the memory `segments`; another's mean nothing."""

    def __init__(self, path: Path, segments: bytes, slab_bytes: int) -> None:
        self._path = path
        self._head = {"segments": segments.hex(), "slab_bytes": slab_bytes}
        self.known: list[tuple[str, int]] = []
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            said = json.loads(path.read_text())
            if {key: said[key] for key in self._head} == self._head:
                self.known = [(str(layout), int(shard_bytes)) for layout, shard_bytes in said["layouts"]]

    def number(self, layout: str, shard_bytes: int) -> int:
        """Written down before anybody uses it. OSError."""
        if (layout, shard_bytes) not in self.known:
            self.known.append((layout, shard_bytes))
            fresh = self._path.with_suffix(".new")
            fresh.write_text(json.dumps({**self._head, "layouts": self.known}))
            os.replace(fresh, self._path)
        return self.known.index((layout, shard_bytes))


class WarmPool:
    """All partitions of a pool node, whose region begins at segment offset `base`. Made before any is."""

    def __init__(self, warm: WarmMemory, partitions: PoolPartitions, base: int) -> None:
        self._warm = warm
        self._partitions = partitions
        self._base = base
        self._layouts = Layouts(Path(warm.folder) / "layouts.json", warm.segments, partitions.slab_bytes)
        self._stores: dict[str, WarmStore] = {}
        partitions.on_partition.append(self._journal)
        self._restore()

    def _journal(self, partition: SlabPartition) -> None:
        base, size = self._base, partition.shard_bytes

        def slot(extent: int) -> int:
            return (partition.offset(0, extent) - base) // POOL_SLOT_BYTES

        def run(extent: int) -> int:
            found = partition.run_of(extent)
            return found.first * _SLABS + found.slabs

        try:
            kind = self._layouts.number(partition.layout, size)
        except OSError as error:
            raise Overloaded(f"warm_segment={self._warm.folder!r}: {error}", retry_after_ms=1000) from None
        place = ExtentLayout(size, slot, lambda e: partition.offset(0, e) - base, kind, run, size < POOL_SLOT_BYTES)
        self._stores[partition.layout] = self._warm.journal(partition.store, place)

    def _restore(self) -> None:
        runs: dict[tuple[int, int], list[Entry]] = defaultdict(list)
        torn: set[int] = set()
        for entry in self._warm.table.entries() if self._warm.table.kept else ():
            if isinstance(entry, Entry):
                runs[entry.kind, entry.place].append(entry)
            else:
                torn.add(entry)
        found: dict[str, Found] = {}
        for (kind, place), entries in sorted(runs.items(), key=_age, reverse=True):
            named = self._claim(kind, place, entries, torn)
            if named is not None:
                layout, held = named
                found[layout] = [*found.get(layout, ()), *held]
        let_go: Callable[[], None] | None = None
        if torn or self._warm.unknown:
            # Whose they were is not known: nobody writes into what is free, as long as it may be read.
            let_go = self._partitions.hold_free()

        def then() -> None:
            if let_go is not None:
                let_go()
            self._partitions.settle()

        self._warm.restore([(self._stores[layout], held) for layout, held in found.items()], then)

    def _claim(self, kind: int, place: int, entries: list[Entry], torn: set[int]) -> tuple[str, Found] | None:
        """The run is its layout's again; what its extents held, if they held anything."""
        try:
            layout, shard_bytes = self._layouts.known[kind]
            partition, extents = self._partitions.claim(layout, shard_bytes, *divmod(place, _SLABS))
        except (IndexError, ValueError, KvmeshError) as error:
            log.info("warm segment: %d notes of a run that is no more: %s", len(entries), error)
            return None
        by_slot = {entry.slot: entry for entry in entries}
        held: list[tuple[int, Entry | None]] = []
        for extent in extents:
            slot = (partition.offset(0, extent) - self._base) // POOL_SLOT_BYTES
            if slot in by_slot or slot in torn:
                entry = by_slot.get(slot) if shard_bytes >= POOL_SLOT_BYTES else None
                held.append((extent, entry))
        torn.difference_update([slot for slot in torn if self._inside(slot, place)])
        return layout, held

    def _inside(self, slot: int, place: int) -> bool:
        first, slabs = divmod(place, _SLABS)
        return first <= slot * POOL_SLOT_BYTES // self._partitions.slab_bytes < first + slabs


def _age(run: tuple[tuple[int, int], list[Entry]]) -> tuple[int, int]:
    return max((entry.life, entry.serial) for entry in run[1])
