"""The prefix index: what node stores have announced, and what placements will bring, both by an instance's
incarnation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.block_map import Verdict
from kvmesh.kvcache.tiers import Tier, split_name
from kvmesh.services.conductor.costs.cache_cost import CacheCost
from kvmesh.services.conductor.domain import Life
from kvmesh.services.conductor.prefixes.grouped_survey import GroupedSurvey
from kvmesh.services.conductor.prefixes.pending import Marks, Pending
from kvmesh.services.conductor.prefixes.survey import HeldRun as HeldRun
from kvmesh.services.conductor.prefixes.survey import PrefixPlace as PrefixPlace
from kvmesh.services.conductor.prefixes.survey import PrefixSurvey as PrefixSurvey
from kvmesh.services.conductor.prefixes.walks import Runs, WalkedMap

SWEEP_KEYS = 16_384  # in one tick: some milliseconds
FEW_BITS = 24  # of a bitset, that are found faster one by one


class Index:
    """A `BlockMap` with `Pending` blocks over it. The bits of an incarnation may change with every `hear`; ask again.

    In the map each tier of an instance is a store of its own (`tiers.store_name`); all tiers of an instance belong to
    one incarnation. Pending blocks will be in memory.
    """

    def __init__(self) -> None:
        self.truth = WalkedMap()
        self.truth.moved = {}
        self.pending = Pending()
        self._lower: dict[str, dict[Tier, str]] = {}  # by instance: its tiers below DRAM that have said anything

    def survey(self, keys: Sequence[bytes], cost: CacheCost | None = None, tokens: int = 0) -> PrefixSurvey:
        """Returns where the blocks of one prompt lie. O(keys). `cost` is that of the prompt's model, and `tokens` the
        prompt's, of which the last is always computed (0: these blocks, and at least a token after them)."""
        coming = self.pending.prefix(keys)
        if cost is not None and cost.groups:
            return self._survey_groups(keys, cost, tokens, coming)
        sealed = self.truth.prefix(keys, coming[-1][0] if coming else 0)
        runs: list[HeldRun] = []
        for first, end, here, soon in _joined(sealed, coming):
            if not (here or soon):
                break
            if runs and runs[-1].sealed == here and runs[-1].coming == soon:
                runs[-1] = HeldRun(runs[-1].first, end, here, soon)
            else:
                runs.append(HeldRun(first, end, here, soon))
        return PrefixSurvey(tuple(runs))

    def _survey_groups(self, keys: Sequence[bytes], cost: CacheCost, tokens: int, coming: Runs) -> PrefixSurvey:
        groups, anchored = [group for group, _ in cost.groups], cost.anchored
        # Where a group needs every block, none behind a gap is of use; else a window behind it may be.
        least = (coming[-1][0] if coming else 0) if anchored else len(keys)
        runs: list[HeldRun] = []
        known: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        for first, end, here, soon in _joined(self.truth.prefix(keys, least), coming):
            if anchored and not (here or soon):
                break
            told = known.get((here, soon))
            if told is None:
                told = self.truth.by_group(here, len(groups)), self.pending.by_group(soon, len(groups))
                known[here, soon] = told
            held, due = (_union(of_groups) for of_groups in told)
            if runs and runs[-1][2:] == (held, due, *told):
                first = runs.pop().first
            runs.append(HeldRun(first, end, held, due, *told))
        while runs and not (runs[-1].sealed or runs[-1].coming):
            runs.pop()
        most = len(keys) if not tokens else min(len(keys), (tokens - 1) // cost.block_tokens)
        return GroupedSurvey(tuple(runs), tuple(groups), cost.block_tokens, most, tokens or most * cost.block_tokens)

    def place_of(self, life: Life, slot: int | None = None) -> PrefixPlace:
        """Returns where that incarnation's blocks show. `slot` is its slot among the pending ones."""
        (name, incarnation), bit_of = life, self.truth.bit
        lower = self._lower.get(name)
        below = tuple((t, bit) for t, store in lower.items() if (bit := bit_of(store, incarnation))) if lower else ()
        return PrefixPlace(bit_of(name, incarnation), 0 if slot is None else 1 << slot, below)

    def moved(self) -> Iterable[str]:
        """Returns the stores and tiers whose slots in the map have changed since the last call."""
        found, self.truth.moved = self.truth.moved or {}, {}
        return found

    def slots(self, instance_id: str) -> dict[str, tuple[int, int]]:
        """Returns where each tier of an instance shows in the map and of which incarnation, by the store's name."""
        found = {}
        for name in self._names(instance_id):
            if (slot := self.truth.slot(name)) is not None:
                found[name] = slot, self.truth.incarnation(name)
        return found

    def count(self, life: Life) -> int:
        """Returns how many blocks in memory that incarnation has announced."""
        return self.truth.count(life[0]) if self.truth.incarnation(life[0]) == life[1] else 0

    def counts(self, life: Life) -> dict[Tier, int]:
        """Returns how many blocks that incarnation has announced in each lower tier."""
        return {tier: self.count((name, life[1])) for tier, name in self._lower.get(life[0], {}).items()}

    def hear(
        self,
        announcement: Announcement,
        life: Life | None,
        slot: int | None,
        *,
        ended: Callable[[Life], bool] = lambda life: True,
    ) -> bool:
        """Applies an announcement of a store or one of its tiers. `life` and `slot` are those of the instance of that
        name, if there is one; `ended` says whether the master reported the end of an incarnation. Returns False when
        the announcement does not follow what is known. Raises ValueError when a key does not have 16 bytes."""
        owner, tier = split_name(announcement.store_id)
        speaks = owner, announcement.incarnation
        if not self._only(speaks, ended):
            return True  # a late word of an earlier life
        if tier is not Tier.DRAM:
            self._lower.setdefault(owner, {})[tier] = announcement.store_id
        verdict = self.truth.apply(announcement)
        if tier is Tier.DRAM and verdict is Verdict.APPLIED and slot is not None and life == speaks:
            if announcement.snapshot:
                bits_of = self.truth.slots(life[0])
                self.pending.settle(slot, lambda key, group: bool(self.truth.mask(key) >> bits_of[group] & 1), bits_of)
            else:
                self.pending.arrived(slot, announcement.sealed, announcement.groups)
        return verdict is not Verdict.GAP

    def expire(self, now: float, *, promises: bool) -> None:
        """Frees a part of what was dropped; with `promises`, confirmed blocks whose time is over are dropped, too."""
        self.truth.sweep(SWEEP_KEYS)
        if promises:
            self.pending.expire(now)

    def drop(self, life: Life) -> None:
        """Drops all blocks of that incarnation. Blocks of another incarnation stay, whichever number is greater."""
        for name in self._names(life[0]):
            if self.truth.incarnation(name) == life[1]:
                self.truth.drop(name)
        lower = self._lower.get(life[0])
        if lower and not any(self.truth.incarnation(name) for name in lower.values()):
            del self._lower[life[0]]

    def place(self, life: Life, slot: int, marked: Marks, request_id: str, masks: bytes = b"") -> None:
        """Notes that the request was placed there: blocks that are not sealed there count as coming. `marked` are its
        prompt's marks, `masks` which cache groups of each will be there (b"": the model has one)."""
        for of_group, lacks in self._unsealed(life, slot, marked, masks):
            self.pending.put(of_group, marked, request_id, 0.0, lacks)

    def confirm(self, life: Life, slot: int, marked: Marks, until: float, masks: bytes = b"") -> None:
        """Notes that these blocks are there now; those not announced count until `until`."""
        for of_group, lacks in self._unsealed(life, slot, marked, masks):
            self.pending.put(of_group, marked, None, until, lacks)

    def _unsealed(self, life: Life, slot: int, marked: Marks, masks: bytes) -> Iterator[tuple[int, bytes | None]]:
        """Yields each slot of `Pending` that is meant, and for each mark 1 if it is to be there and not sealed, else 0;
        None when all are."""
        if not masks:
            bit = self.truth.bit(*life)
            yield slot, self.truth.lacking(marked, bit.bit_length() - 1) if bit else None
            return
        sealed = self.truth.slots(life[0]) if self.truth.bit(*life) else {}
        for group in range(max(masks).bit_length()):
            lacks = bytes(mask >> group & 1 for mask in masks)
            if group in sealed:
                lacking = self.truth.lacking(marked, sealed[group])
                lacks = bytes(one & other for one, other in zip(lacks, lacking, strict=True))
            if any(lacks):
                yield self.pending.of_group(slot, group), lacks

    def _only(self, life: Life, ended: Callable[[Life], bool]) -> bool:
        """Drops what other incarnations of that name hold, in any tier. Returns False when this incarnation is the
        earlier one. The master relays only living stores, so an incarnation that has not ended is the present one even
        if its clock is behind."""
        known = {name: self.truth.incarnation(name) for name in self._names(life[0])}
        if any(other > life[1] for other in known.values()) and ended(life):
            return False
        for name, other in known.items():
            if other not in (0, life[1]):
                self.truth.drop(name)
        return True

    def _names(self, instance_id: str) -> tuple[str, ...]:
        lower = self._lower.get(instance_id)
        return (instance_id, *lower.values()) if lower else (instance_id,)


def _joined(sealed: Runs, coming: Runs) -> Iterator[tuple[int, int, int, int]]:
    """Yields (first, end, sealed, coming) of blocks that have the same in both; `sealed` reaches as far as
    `coming`."""
    first = at_coming = 0
    for end, here in sealed:
        while first < end:
            while at_coming < len(coming) and coming[at_coming][0] <= first:
                at_coming += 1
            until, soon = coming[at_coming] if at_coming < len(coming) else (end, 0)
            last, first = first, min(end, until)
            yield last, first, here, soon


def _union(bitsets: Iterable[int]) -> int:
    found = 0
    for one in bitsets:
        found |= one
    return found


def bits(mask: int) -> list[int]:
    """Returns the slots of a bitset, lowest first."""
    if mask.bit_count() > FEW_BITS:
        found: list[int] = places(mask).tolist()
        return found
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


@lru_cache(maxsize=64)
def places(mask: int) -> npt.NDArray[np.intp]:
    """Returns what `bits` does, for many slots: 10,000 in about 20 microseconds. Recent results are cached (common
    prefixes have the same holders), so they must not be written to."""
    raw = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), dtype=np.uint8)
    found = np.flatnonzero(np.unpackbits(raw, bitorder="little"))
    found.setflags(write=False)
    return found


def bitset(found: npt.NDArray[np.bool_]) -> int:
    """Returns the bitset of an array of booleans, one a slot."""
    return int.from_bytes(np.packbits(found, bitorder="little").tobytes(), "little")
