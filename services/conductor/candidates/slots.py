"""Whose stores the slots of the block map are, and of whom of them may be asked for blocks. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from kvmesh.kvcache.tiers import Tier, split_name
from services.conductor.candidates.fields import NO_ROW, Mask
from services.conductor.domain import Member
from services.conductor.fleet.instance import Instance
from services.conductor.prefixes.index import FEW_BITS, bits, bitset, places

_ASKED_NEVER, _ASKED, _ASKED_IF_ABLE = 0, 1, 2


class Slots:
    """Memory: 9 bytes a slot."""

    def __init__(self) -> None:
        self._row_of = np.full(64, NO_ROW, dtype=np.int64)
        self._asked = np.zeros(64, dtype=np.uint8)
        self._lower: dict[Tier, int] = {}  # slots that hold what is not in memory
        self._of: dict[str, dict[str, int]] = {}  # by instance or pool node: its stores' slots in those two
        self.holders: dict[int, Member] = {}  # whose store a slot is, where it is of the life that is a member
        self._askable: tuple[bytes, int] | None = None  # who was able, and what may be asked then; until slots change

    @property
    def names(self) -> Collection[str]:
        """Instances and pool nodes that have any."""
        return self._of.keys()

    @property
    def row_of(self) -> npt.NDArray[np.int64]:
        """The row of each slot, NO_ROW where there is none. Not to be written into."""
        return self._row_of

    @property
    def lower(self) -> int:
        """Those slots that stand for lower tiers."""
        found = 0
        for slots in self._lower.values():
            found |= slots
        return found

    def rows_of(self, mask: int) -> npt.NDArray[np.int64]:
        """Rows of the instances that the slots of a bitset stand for; NO_ROW for other slots."""
        return self._row_of[bits(mask)] if mask.bit_count() <= FEW_BITS else self._row_of[places(mask)]

    def rows_of_few(self, mask: int) -> list[int]:
        """As `rows_of`, of few slots."""
        item = self._row_of.item
        return [item(slot) for slot in bits(mask)]

    def in_memory(self, mask: int) -> int:
        """Those slots of a bitset that stand for memory, not for lower tiers."""
        for lower in self._lower.values():
            mask &= ~lower
        return mask

    def asked(self, mask: int, able: Mask, avoid: Collection[str]) -> dict[Tier, int]:
        """Those slots of a bitset whose stores may be asked for blocks, by what they hold: the life that announced them
        is a member and, if it is an instance, may get work."""
        found = mask & self._all_asked(able)
        for name in avoid:
            for slot in self._of.get(name, {}).values():
                found &= ~(1 << slot)
        parted = {tier: found & slots_there for tier, slots_there in sorted(self._lower.items())}
        for lower in parted.values():
            found ^= lower
        return {Tier.DRAM: found, **parted}

    def _all_asked(self, able: Mask) -> int:
        known = able.tobytes()
        if self._askable is None or self._askable[0] != known:
            padded = np.append(able, False)  # NO_ROW is the last one
            may = (self._asked == _ASKED) | ((self._asked == _ASKED_IF_ABLE) & padded[self._row_of])
            self._askable = known, bitset(may)
        return self._askable[1]

    def drop(self, name: str) -> None:
        """Its slots stand for nobody."""
        for store, slot in self._of.pop(name, {}).items():
            self._row_of[slot], self._asked[slot] = NO_ROW, _ASKED_NEVER
            self.holders.pop(slot, None)
            if (tier := split_name(store)[1]) is not Tier.DRAM:
                self._lower[tier] &= ~(1 << slot)
            self._askable = None

    def put(
        self,
        name: str,
        slots: Mapping[str, tuple[int, int]],
        instance: Instance | None,
        row: int,
        member: Member | None,
    ) -> int:
        """Where its stores show now, with the incarnation of each; `row`: the instance's. Returns the slot of its own
        memory, if that is of the instance's very life, else -1."""
        self.drop(name)
        sealed = -1
        for store, (slot, incarnation) in slots.items():
            self._grow(slot)
            own = instance is not None and instance.ref.incarnation == incarnation
            known = member is not None and member.ref.incarnation == incarnation
            self._row_of[slot] = row if own else NO_ROW
            if known:
                assert member is not None
                self.holders[slot] = member
                self._asked[slot] = _ASKED if instance is None else _ASKED_IF_ABLE if own else _ASKED_NEVER
            if (tier := split_name(store)[1]) is not Tier.DRAM:
                self._lower[tier] = self._lower.get(tier, 0) | 1 << slot
            if own and store == name:
                sealed = slot
        if slots:
            self._of[name] = {store: slot for store, (slot, _) in slots.items()}
            self._askable = None
        return sealed

    def _grow(self, slot: int) -> None:
        while slot >= len(self._asked):
            self._row_of = np.append(self._row_of, np.full_like(self._row_of, NO_ROW))
            self._asked = np.append(self._asked, np.zeros_like(self._asked))
