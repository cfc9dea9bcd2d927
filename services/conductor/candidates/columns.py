"""What decisions read of every instance, column by column: one numpy row each, so that a thousand are weighed in some
microseconds. Kept true by `touch`: whoever changes an instance, or what is known of it, says its name; rows are filled
again before the next decision, once however often it was said. Pure.

Memory: 8 bytes a field and instance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvmesh.kvcache.tiers import Tier, split_name
from kvmesh.services.conductor.candidates import instance_row
from kvmesh.services.conductor.candidates.fields import (
    FEW,
    FIELDS,
    LOADS,
    MODELS,
    NO_GROUP,
    NO_ROW,
    ColumnField,
    Floats,
    Mask,
    RareField,
)
from kvmesh.services.conductor.candidates.selection import Selection as Selection
from kvmesh.services.conductor.domain import Life, Member, Role
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.fleet.members import Members
from kvmesh.services.conductor.fleet.roster import Fleet
from kvmesh.services.conductor.loads.outgoing import Wires
from kvmesh.services.conductor.loads.shortest_first import marks
from kvmesh.services.conductor.prefixes.index import FEW_BITS, Index, bits, bitset, places

_ASKED_NEVER, _ASKED, _ASKED_IF_ABLE = 0, 1, 2


class Slots:
    """Which instance and tier each slot of the block map belongs to, and which stores may be asked for blocks. It takes
    9 bytes a slot."""

    def __init__(self) -> None:
        self._row_of = np.full(64, NO_ROW, dtype=np.int64)
        self._asked = np.zeros(64, dtype=np.uint8)
        self._lower: dict[Tier, int] = {}  # slots that hold what is not in memory
        self._of: dict[str, dict[str, int]] = {}  # by instance or pool node: its stores' slots in those two
        self.holders: dict[int, Member] = {}  # whose store a slot is, where it is of the life that is a member
        self._askable: tuple[bytes, int] | None = None  # who was able, and what may be asked then; until slots change

    @property
    def names(self) -> Collection[str]:
        """The instances and pool nodes that have slots."""
        return self._of.keys()

    @property
    def row_of(self) -> npt.NDArray[np.int64]:
        """The row of each slot, NO_ROW where there is none. It must not be written to."""
        return self._row_of

    @property
    def lower(self) -> int:
        """The bitset of slots that stand for lower tiers."""
        found = 0
        for slots in self._lower.values():
            found |= slots
        return found

    def rows_of(self, mask: int) -> npt.NDArray[np.int64]:
        """Returns the rows of the instances in a bitset of slots; NO_ROW for other slots."""
        return self._row_of[bits(mask)] if mask.bit_count() <= FEW_BITS else self._row_of[places(mask)]

    def rows_of_few(self, mask: int) -> list[int]:
        """Returns what `rows_of` does; it is faster for few slots."""
        item = self._row_of.item
        return [item(slot) for slot in bits(mask)]

    def in_memory(self, mask: int) -> int:
        """Returns those slots of a bitset that stand for memory, not for lower tiers."""
        for lower in self._lower.values():
            mask &= ~lower
        return mask

    def asked(self, mask: int, able: Mask, avoid: Collection[str]) -> dict[Tier, int]:
        """Returns, by tier, those slots of a bitset whose stores may be asked for blocks: the incarnation that
        announced them is a member and, if it is an instance, may get work."""
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
        """Removes the slots of that name."""
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
        """Sets the slots of a name's stores, each with its incarnation. `row` is the instance's. Returns the slot of
        its own memory if that belongs to the instance's present incarnation, else -1."""
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


class Columns:
    """The table. `is_open` says whether an instance may get work, apart from its silence and its breaker."""

    def __init__(self, fleet: Fleet, index: Index, members: Members, is_open: Callable[[Instance], bool]) -> None:
        self._fleet, self._index, self._members, self._is_open = fleet, index, members, is_open
        self._data = np.zeros((FIELDS, 16))
        self._known: list[tuple[object, ...]] = []  # the models that are in the row
        self._registered: list[tuple[object, ...]] = []  # and what its registration says
        self._has_rare: list[dict[int, tuple[bool, ...]]] = []  # what it has of them, by the first of those told of
        self._rare: tuple[set[int], ...] = tuple(set() for _ in range(RareField.COUNT))
        self.instances: list[Instance] = []
        self._rows: dict[str, int] = {}
        self._dirty: dict[str, None] = {}
        self._reload: dict[str, bool] = {}
        self._stirred: dict[str, None] = {}  # of those: whose `OPEN` and `SEEN` may be old
        self.wires = Wires()
        self.heard_until = math.inf  # all that arrived by then has been heard; inf: it is heard as it arrives
        self._columns: list[Floats] = []
        self.address = 0  # in memory, of the table; until the next `settle`, as its columns
        self._row_of_pending = np.full(64, NO_ROW, dtype=np.int64)
        self._groups: dict[tuple[str, tuple[object, ...]], int] = {}
        self._numbers = 0  # of groups
        self.slots = Slots()
        # Of columns that come with registrations, by column and value (None: any above 0); until one changes.
        self._masks: dict[tuple[int, int | None], Mask] = {}

    def __len__(self) -> int:
        return len(self.instances)

    def __getitem__(self, field: int) -> Floats:
        """Returns a column, with one value an instance."""
        return self._columns[field]

    def several(self, first: int, count: int) -> Floats:
        """Returns `count` columns from `first` on, as rows of one array."""
        return self._data[first : first + count, : len(self.instances)]

    def touch(self, instance_id: str) -> None:
        """Notes that something about the instance has changed: it came or left, or its load, role or membership
        changed."""
        self._dirty[instance_id] = None

    def reload(self, instance_id: str, *, learnt: bool = False) -> None:
        """Notes that only the instance's load or last sign of life has changed, and with `learnt` its models."""
        self._reload[instance_id] = learnt or self._reload.get(instance_id, False)
        self._stirred[instance_id] = None

    def touch_all(self) -> None:
        """Notes that every instance has changed."""
        self._dirty |= dict.fromkeys((*self._rows, *self.slots.names))

    def row(self, instance_id: str) -> int:
        """Returns the instance's row, or NO_ROW."""
        return self._rows.get(instance_id, NO_ROW)

    def settle(self) -> None:
        """Fills all touched rows again."""
        self._settle(loads=True)

    def keep_up(self) -> None:
        """Does what `settle` does, but leaves loads and models out where instances are so few that all are weighed,
        since nobody reads these columns then."""
        self._settle(loads=len(self.instances) > FEW)

    def _settle(self, *, loads: bool) -> None:
        for name in self._index.moved():
            self._dirty[split_name(name)[0]] = None
        for life in self.wires.changed():
            at = self.row(life[0])
            if at >= 0 and self.instances[at].ref.incarnation == life[1]:
                self._send(at, life)
        if self._reload and loads:
            self._load_again()
        elif self._stirred:
            self._look_again()
        if self._dirty:
            names = list(self._dirty)
            for name in names:
                self.slots.drop(name)
            while self._dirty:  # a row that goes moves another one
                names, self._dirty = list(self._dirty), {}
                for name in names:
                    self._refresh(name)
        if not self._columns or len(self._columns[0]) != len(self.instances):
            self._columns = list(self._data[:, : len(self.instances)])
            self.address = self._data.ctypes.data

    @property
    def stride(self) -> int:
        """The number of rows that there is room for, which is the distance between columns in memory."""
        return self._data.shape[1]

    def _load_again(self) -> None:
        rows, loads = [], []
        for name, learnt in self._reload.items():
            row, instance = self._rows.get(name), self._fleet.named(name)
            if row is None or instance is None or instance is not self.instances[row]:
                self._dirty[name] = None
            elif name not in self._dirty:
                rows.append(row)
                loads.append(self._load(row, instance))
                if learnt:
                    self._learn(row, instance)
        self._reload.clear()
        self._stirred.clear()
        if rows:
            instance_row.write(self._data, self.address if self._columns else 0, rows, loads)

    def _look_again(self) -> None:
        """Updates which instances are open and when each was last heard; `view` reads nothing else of their loads."""
        for name in self._stirred:
            row, instance = self._rows.get(name), self._fleet.named(name)
            if row is None or instance is None or instance is not self.instances[row]:
                self._dirty[name] = None
            else:
                self._data[ColumnField.OPEN, row], self._data[ColumnField.SEEN, row] = (
                    self._is_open(instance),
                    instance.last_seen,
                )
                self._data[ColumnField.LEASE, row] = instance.lease.seconds
        self._stirred.clear()

    def rare(self, which: int) -> set[int]:
        """Returns the rows of the instances that have this rare property (see `RareField`)."""
        return self._rare[which]

    def mask(self, field: int, value: int | None = None) -> Mask:
        """Returns which instances have this value (None: any above 0) in a column that is set at registration. It must
        not be written to."""
        found = self._masks.get((field, value))
        if found is None:
            found = self._masks[field, value] = self[field] > 0 if value is None else self[field] == value
            found.setflags(write=False)
        return found

    def beating(self, now: float) -> int:
        """Returns how many instances were heard within their leases."""
        self.keep_up()
        return int(np.count_nonzero(min(now, self.heard_until) - self[ColumnField.SEEN] <= self[ColumnField.LEASE]))

    def view(self, now: float, rests: Callable[[Instance, float], str], tripped: Collection[Life]) -> View:
        """Returns the table at this moment, as `keep_up` leaves it. `tripped` are the incarnations that their breaker
        may keep from work, for which `rests` says why."""
        self.keep_up()
        able = (self[ColumnField.OPEN] > 0) & (
            min(now, self.heard_until) - self[ColumnField.SEEN] <= self[ColumnField.LEASE]
        )
        for life in tripped:
            row = self.row(life[0])
            if row >= 0 and able[row] and rests(self.instances[row], now):
                able[row] = False
        return View(self, able, now)

    @property
    def models(self) -> Iterable[tuple[str, tuple[object, ...]]]:
        """Returns the names and KV identities that exist, and perhaps some that did."""
        return self._groups.keys()

    def groups(self, model: str) -> list[int]:
        """Returns the groups of that model's name: sets of instances whose KV fits together."""
        return [group for (name, _), group in self._groups.items() if name == model]

    # ── who holds what ────────────────────────────────────────────────────────────────────────────

    @property
    def row_of_pending(self) -> npt.NDArray[np.int64]:
        """The row of each slot of `Pending`, NO_ROW where there is none. It must not be written to."""
        return self._row_of_pending

    def rows_pending(self, mask: int) -> list[int]:
        """Returns the rows of the instances in a bitset of slots of `Pending`."""
        found: list[int] = self._row_of_pending[bits(mask)].tolist()
        return found

    def asked(self, mask: int, able: Mask, avoid: Collection[str]) -> dict[Tier, int]:
        """Returns what `Slots.asked` does."""
        return self.slots.asked(mask, able, avoid)

    # ── filling ───────────────────────────────────────────────────────────────────────────────────

    def _refresh(self, name: str) -> None:
        instance, row = self._fleet.named(name), self._rows.get(name)
        if instance is None and row is not None:
            self._remove(name, row)
        elif instance is not None:
            if row is None:
                row = self._add(name, instance)
            self._fill(row, instance)
        member, row = self._members.member(name), self._rows.get(name, NO_ROW)
        sealed = self.slots.put(name, self._index.slots(name), instance, row, member)
        if row != NO_ROW:
            self._data[ColumnField.SEALED, row] = sealed

    def _add(self, name: str, instance: Instance) -> int:
        row = self._rows[name] = len(self.instances)
        self.instances.append(instance)
        self._known.append(())
        self._registered.append(())
        self._has_rare.append({})
        if row == self._data.shape[1]:
            self._data = np.concatenate([self._data, np.zeros_like(self._data)], axis=1)
            self._columns = []
        return row

    def _remove(self, name: str, row: int) -> None:
        del self._rows[name]
        last = self.instances.pop()
        self._known.pop()
        self._registered.pop()
        for rows in self._rare:
            rows.discard(len(self.instances))
        self._has_rare.pop()
        self._masks.clear()
        if row < len(self.instances):
            moved = last.ref.instance_id
            self._data[:, row] = self._data[:, len(self.instances)]
            self.instances[row], self._rows[moved] = last, row
            self._known[row] = self._registered[row] = ()
            self.slots.drop(moved)
            self._dirty[moved] = None

    def _fill(self, row: int, instance: Instance) -> None:
        if self.instances[row] is not instance:
            self.instances[row], self._known[row], self._registered[row] = instance, (), ()
        self._data[:LOADS, row] = self._load(row, instance)
        self._learn(row, instance)
        self._register(row, instance)
        self._send(row, instance.ref.life)

    def _send(self, row: int, life: Life) -> None:
        self._data[ColumnField.SENDING, row] = self.wires.outgoing.ahead(life)
        self._data[ColumnField.ARRIVING, row] = self.wires.arriving(life)

    def _load(self, row: int, instance: Instance) -> tuple[float, ...]:
        """Returns the first LOADS values of a row, and fills in those beside them."""
        if instance.queue.size_weight:
            self._data[ColumnField.LISTED, row], self._data[ColumnField.MARK :, row] = marks(instance.queue)
        while instance.slot >= len(self._row_of_pending):
            self._row_of_pending = np.append(self._row_of_pending, np.full_like(self._row_of_pending, NO_ROW))
        self._row_of_pending[instance.slot] = row
        values, having = instance_row.load(instance, is_open=self._is_open(instance))
        self._note(row, RareField.RANKED, having)
        return values

    def _note(self, row: int, first: int, having: tuple[bool, ...]) -> None:
        """Notes which rare properties, from `first` on, the row has."""
        if self._has_rare[row].get(first) != having:
            self._has_rare[row][first] = having
            for rows, has in zip(self._rare[first : first + len(having)], having, strict=True):
                rows.add(row) if has else rows.discard(row)

    def _learn(self, row: int, instance: Instance) -> None:
        if (known := instance_row.models(instance)) != self._known[row]:
            self._known[row] = known
            self._data[LOADS:MODELS, row], having = instance_row.learnt(instance)
            self._note(row, RareField.CHUNKED, having)

    def _register(self, row: int, instance: Instance) -> None:
        if (known := instance_row.registration(instance)) != self._registered[row]:
            self._registered[row] = known
            self._data[MODELS : ColumnField.SEALED, row], having = instance_row.registered(
                instance, self._group(instance)
            )
            self._note(row, RareField.LIMITED, having)
            self._masks.clear()

    def _group(self, instance: Instance) -> int:
        if (name := (instance.model.name, instance.model.kv_identity)) not in self._groups:
            there = set(self._data[ColumnField.GROUP, : len(self.instances)].tolist())
            self._groups = {known: number for known, number in self._groups.items() if number in there}
            self._groups[name] = self._numbers = self._numbers + 1
        return self._groups[name]


@dataclass(slots=True)
class View:
    """The table at one moment. `able` marks the instances that may get work."""

    columns: Columns
    able: Mask
    now: float

    def group(self, model: str) -> int:
        """Returns the group that serves this model, or -1. Of several (during a rolling update) one that can serve now
        is preferred, then the more numerous."""
        columns = self.columns
        groups = [group for group in columns.groups(model) if np.count_nonzero(columns.mask(ColumnField.GROUP, group))]
        if len(groups) <= 1:
            return groups[0] if groups else NO_GROUP

        def worth(group: int) -> tuple[bool, int, str]:
            of = columns.mask(ColumnField.GROUP, group)
            live = of & self.able
            prompts = columns.mask(ColumnField.PREFILLS) | columns.mask(ColumnField.ALONE)
            complete = bool((live & columns.mask(ColumnField.DECODES)).any() and (live & prompts).any())
            first = columns.instances[int(np.argmax(of))]
            return complete, int(np.count_nonzero(live)), first.model.fingerprint

        return max(groups, key=worth)

    def ready(self) -> Mask:
        """Returns which instances may get work and are not stranded (see `Fleet.stranded`)."""
        columns, stranded = self.columns, np.zeros_like(self.able)
        prefills, decodes = columns.mask(ColumnField.PREFILLS), columns.mask(ColumnField.DECODES)
        for model in {name for name, _ in columns.models}:
            groups = [columns.mask(ColumnField.GROUP, group) for group in columns.groups(model)]
            for own in groups if len(groups) > 1 else ():
                for mine, others in ((prefills, decodes), (decodes & ~prefills, prefills)):
                    if not (own & others).any() and any((group & others).any() for group in groups):
                        stranded |= own & mine & ~columns.mask(ColumnField.ALONE)
        return self.able & ~stranded

    def readiness(self) -> tuple[dict[tuple[Role, bool], int], float]:
        """Returns how many instances of each role are ready and not ready, and the longest silence, in seconds, of one
        that is."""
        prefills, decodes = self.columns.mask(ColumnField.PREFILLS), self.columns.mask(ColumnField.DECODES)
        of = {Role.PREFILL: prefills & ~decodes, Role.DECODE: decodes & ~prefills, Role.BOTH: prefills & decodes}
        ready = self.ready()
        count = {(role, True): int(np.count_nonzero(mask & ready)) for role, mask in of.items()}
        count |= {(role, False): int(np.count_nonzero(mask & ~ready)) for role, mask in of.items()}
        seen = self.columns[ColumnField.SEEN][ready]
        return count, max(0.0, self.now - float(seen.min())) if seen.size else 0.0

    def queues_s(self) -> list[float]:
        """Returns the seconds of queued work at each instance that computes prompts and may get work."""
        self.columns.settle()
        backlog, as_of = self.columns[ColumnField.BACKLOG], self.columns[ColumnField.AS_OF]
        waits = np.maximum(0.0, backlog - np.maximum(0.0, self.now - as_of))
        found: list[float] = waits[self.able & self.columns.mask(ColumnField.PREFILLS)].tolist()
        return found

    def serving(self, group: int) -> Selection:
        """Returns all instances of that group, able or not."""
        return Selection(self, self.columns.mask(ColumnField.GROUP, group))

    def able_of(self, among: Selection) -> Selection:
        """Returns those of them that may get work."""
        return Selection(self, among.mask & self.able)

    def prefills(self, usable: Selection, prompt_tokens: int) -> Selection:
        """Returns those of them that can compute such a prompt."""
        fits = self.columns[ColumnField.LONGEST_PREFILL] >= prompt_tokens
        return Selection(self, usable.mask & self.columns.mask(ColumnField.PREFILLS) & fits)

    def decodes(self, usable: Selection, prompt_tokens: int) -> Selection:
        """Returns those of them that can decode its answer."""
        fits = self.columns[ColumnField.LONGEST_DECODE] >= prompt_tokens
        return Selection(self, usable.mask & self.columns.mask(ColumnField.DECODES) & fits)
