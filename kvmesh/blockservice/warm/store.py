"""A node store whose blocks outlive it: writes down what it seals and drops, and takes back what the last incarnation
left.

    start:  every extent that held something is taken ─▶ verified by all ranks ─▶ adopted, found, announced
            ─ all looked at, no reader of the last life left ─▶ let go: idle blocks like any others, the rest is free

Pure: messages for ranks go to `tell`, their answers into `verified`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvmesh.kvcache.node_store import NodeStore
from kvmesh.ranks.protocol import WarmRow
from kvmesh.ranks.warm_table import BlockTable, Entry, Held

AGE = 256  # so many sealings count as one time, within which a chain's tail is evicted before its head


@dataclass(frozen=True, slots=True)
class ExtentLayout:
    """Where a store's extents lie. `slot` gives the slot of the table of an extent, `offset` its offset in the ranks'
    host regions (the same at all), and `run` is as in `Entry.place`. With `shared` several extents have one slot; they
    do not come back, and what was there is held."""

    shard_bytes: int
    slot: Callable[[int], int]
    offset: Callable[[int], int]
    kind: int = 0
    run: Callable[[int], int] = lambda extent: 0
    shared: bool = False


class WarmStore:
    """The journal of `store`, which is empty at first; it belongs to the store's thread. `tell` gets rows of which all
    `ranks` ranks are to make checksums."""

    def __init__(
        self, store: NodeStore, place: ExtentLayout, table: BlockTable, ranks: int, tell: Callable[[WarmRow], None]
    ) -> None:
        self._store = store
        self._place = place
        self._table = table
        self._ranks = ranks
        self._tell = tell
        self._taken: set[int] = set()  # extents of the last incarnation that are not released yet
        self._wanted: dict[int, tuple[int, Entry]] = {}  # slot → extent and entry of a block not decided upon
        self._slots: dict[bytes, int] = {}  # key → slot of the blocks in `_wanted`
        self._good: dict[int, int] = {}  # slot → ranks that have verified it
        self._asked: set[int] = set()  # slots of this store that ranks were asked to verify
        self._answers = 0  # answers for them that are still to come, from all ranks
        self._back: list[tuple[Entry, int]] = []  # blocks that were adopted, and are held until `let_go`
        self._adopting = False
        store.journals.append(self)

    # ── Journal ───────────────────────────────────────────────────────────────────────────────────

    def sealed(self, key: bytes, extent: int, nbytes: int | None) -> None:
        """Writes a sealed block down at once; its checksum follows."""
        if self._adopting:  # the table has it already
            return
        place = self._place
        if place.shared:
            self._table.gone(place.slot(extent), True, place.kind, place.run(extent))
            return
        size = place.shard_bytes if nbytes is None else nbytes
        entry = self._table.sealed(place.slot(extent), key, size, place.kind, place.run(extent))
        self._tell(self._row(entry, extent))

    def gone(self, key: bytes, extent: int, held: bool) -> None:
        """Clears the entry of a block that was dropped: no later incarnation finds it."""
        self._clear(extent, held or extent in self._taken)

    def removed(self, keys: Sequence[bytes]) -> None:
        """Drops removed blocks that have not been verified yet."""
        for key in keys:
            slot = self._slots.get(key)
            if slot is not None:
                self._drop(slot)

    def candidates(self) -> list[bytes]:
        """Returns the keys that may still come back."""
        return list(self._slots)

    # ── the last life's blocks ────────────────────────────────────────────────────────────────────

    def restore(self, found: Iterable[tuple[int, Entry | None]]) -> list[WarmRow]:
        """Takes the extents of `found`, which held something (with the entry where it is known); all others stay free.
        Returns what all ranks are to verify, in the order in which that should be done."""
        store, held = self._store, dict(found)
        if not held:
            return []
        assert store.free == store.total, "somebody has extents that hold blocks of the last life"
        store.release([extent for extent in store.allocate(store.total) if extent not in held])
        self._taken = set(held)
        newest: dict[bytes, tuple[int, Entry]] = {}
        for extent, entry in held.items():
            if entry is None or entry.held is not Held.BLOCK or entry.nbytes > self._place.shard_bytes:
                continue
            other = newest.get(entry.key)
            if other is None or (other[1].life, other[1].serial) < (entry.life, entry.serial):
                newest[entry.key] = (extent, entry)
        self._wanted = {entry.slot: (extent, entry) for extent, entry in newest.values()}
        self._slots = {key: entry.slot for key, (_, entry) in newest.items()}
        self._asked = set(self._wanted)
        self._answers = len(newest) * self._ranks
        order = sorted(newest.values(), key=lambda one: _age(one[1]), reverse=True)
        return [self._row(entry, extent) for extent, entry in order]

    def verified(self, slots: Sequence[int], good: Sequence[int]) -> None:
        """Takes one rank's answer about some rows; rows of other stores are passed over."""
        slots = [slot for slot in slots if slot in self._asked]
        self._answers -= len(slots)
        for slot in self._asked.intersection(good):
            self._good[slot] = self._good.get(slot, 0) + 1
            if self._good[slot] == self._ranks and slot in self._wanted:
                self._adopt(*self._wanted.pop(slot))
        for slot in set(slots).difference(good):
            if slot in self._wanted:
                self._drop(slot)

    @property
    def looked_through(self) -> bool:
        """Whether all rows are decided upon."""
        return not self._answers

    @property
    def back(self) -> int:
        """How many blocks were adopted."""
        return len(self._back)

    def let_go(self) -> None:
        """Releases all extents, when no reader of the last incarnation is left: they are like any others then."""
        for slot in list(self._wanted):
            self._drop(slot)
        # They are released from the last to the first, which makes the first one the most recently used.
        back = sorted(self._back, key=lambda one: _age(one[0]), reverse=True)
        adopted = [extent for _, extent in back]
        rest = sorted(self._taken.difference(adopted))
        self._taken.clear()
        self._back.clear()
        self._store.release(adopted)
        for extent in rest:
            self._clear(extent, held=False)
        self._store.release(rest)

    def close(self) -> None:
        """Stops writing down what the store does."""
        if self in self._store.journals:
            self._store.journals.remove(self)

    # ── inner ─────────────────────────────────────────────────────────────────────────────────────

    def _row(self, entry: Entry, extent: int) -> WarmRow:
        return WarmRow(entry.slot, self._place.offset(extent), entry.nbytes, entry.life, entry.serial)

    def _adopt(self, extent: int, entry: Entry) -> None:
        del self._slots[entry.key]
        nbytes = None if entry.nbytes == self._place.shard_bytes else entry.nbytes
        self._store.share((extent,))  # a reference of the journal's own, until `let_go`
        self._adopting = True
        try:
            adopted = self._store.adopt(entry.key, extent, nbytes)
        finally:
            self._adopting = False
        if adopted:
            self._back.append((entry, extent))
        else:  # sealed anew meanwhile
            self._clear(extent, held=True)

    def _drop(self, slot: int) -> None:
        extent, entry = self._wanted.pop(slot)
        del self._slots[entry.key]
        self._clear(extent, held=True)

    def _clear(self, extent: int, held: bool) -> None:
        place = self._place
        if not place.shared:
            self._table.gone(place.slot(extent), held, place.kind, place.run(extent))


def _age(entry: Entry) -> tuple[int, int, int]:
    """Returns a sort key that is greater for a more recent block."""
    return entry.life, entry.serial // AGE, -entry.serial
