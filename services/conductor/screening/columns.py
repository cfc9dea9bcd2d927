"""What decisions read of every instance, column by column: one numpy row each, so that a thousand are weighed in some
microseconds. Kept true by `touch`: whoever changes an instance, or what is known of it, says its name; rows are filled
again before the next decision, once however often it was said. Pure.

Memory: 8 bytes a field and instance, 9 a slot of the block map.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kvmesh.kvcache.tiers import Tier, split_name
from services.conductor.costs.fit import FittedModel
from services.conductor.domain import Life
from services.conductor.fleet.instance import Instance
from services.conductor.fleet.members import Members
from services.conductor.fleet.roster import Fleet
from services.conductor.loads.outgoing import Wires
from services.conductor.loads.sizes import marks
from services.conductor.prefixes.index import FEW_BITS, Index, bits, bitset, places
from services.conductor.screening.fields import FEW, FIELDS, LOADS, MODELS, NO_ROW, Field, Floats, Mask

_ASKED_NEVER, _ASKED, _ASKED_IF_ABLE = 0, 1, 2


class Columns:
    """The table. `is_open`: whether an instance may get work, apart from silence and from its breaker."""

    def __init__(self, fleet: Fleet, index: Index, members: Members, is_open: Callable[[Instance], bool]) -> None:
        self._fleet, self._index, self._members, self._is_open = fleet, index, members, is_open
        self._data = np.zeros((FIELDS, 16))
        self._known: list[tuple[object, ...]] = []  # the models that are in the row
        self.instances: list[Instance] = []
        self._rows: dict[str, int] = {}
        self._dirty: dict[str, None] = {}
        self._reload: dict[str, None] = {}
        self.wires = Wires()
        self._columns: list[Floats] = []
        self._row_of_pending: dict[int, int] = {}
        self._groups: dict[tuple[str, tuple[object, ...]], int] = {}
        self._numbers = 0  # of groups
        self._row_of_slot = np.full(64, NO_ROW, dtype=np.int64)
        self._asked = np.zeros(64, dtype=np.uint8)
        self._lower: dict[Tier, int] = {}  # slots that hold what is not in memory
        self._slots: dict[str, dict[str, int]] = {}  # by instance or pool node: its stores' slots in those two

    def __len__(self) -> int:
        return len(self.instances)

    def __getitem__(self, field: int) -> Floats:
        """A column, one value an instance."""
        return self._columns[field]

    def node(self, node_id: str) -> float:
        """What `Field.NODE` holds for that node."""
        return float(crc32(node_id.encode()))

    def touch(self, instance_id: str) -> None:
        """Something of it has changed: it came, left, has another load, another role, is a member now."""
        self._dirty[instance_id] = None

    def reload(self, instance_id: str) -> None:
        """Only its load has changed, or when it was heard."""
        self._reload[instance_id] = None

    def touch_all(self) -> None:
        """Something of everybody has changed."""
        self._dirty |= dict.fromkeys((*self._rows, *self._slots))

    def row(self, instance_id: str) -> int:
        """Its row; NO_ROW: it has none."""
        return self._rows.get(instance_id, NO_ROW)

    def settle(self) -> None:
        """Fill again what has been touched."""
        for name in self._index.moved():
            self._dirty[split_name(name)[0]] = None
        for life in self.wires.changed():
            at = self.row(life[0])
            if at >= 0 and self.instances[at].ref.incarnation == life[1]:
                self._send(at, life)
        for name in self._reload:
            row, instance = self._rows.get(name), self._fleet.named(name)
            if row is not None and instance is not None and instance is self.instances[row]:
                self._load(row, instance)
            else:
                self._dirty[name] = None
        self._reload.clear()
        if self._dirty:
            names = list(self._dirty)
            for name in names:
                self._unslot(name)
            while self._dirty:  # a row that goes moves another one
                names, self._dirty = list(self._dirty), {}
                for name in names:
                    self._refresh(name)
        if not self._columns or len(self._columns[0]) != len(self.instances):
            self._columns = list(self._data[:, : len(self.instances)])

    def view(
        self, now: float, lease_s: float, rests: Callable[[Instance, float], str], tripped: Collection[Life]
    ) -> View:
        """The table at this moment. `tripped`: lives whose breaker may say that they rest; `rests` tells."""
        self.settle()
        able = (self[Field.OPEN] > 0) & (now - self[Field.SEEN] <= lease_s)
        for life in tripped:
            row = self.row(life[0])
            if row >= 0 and able[row] and rests(self.instances[row], now):
                able[row] = False
        return View(self, able, now)

    def groups(self, model: str) -> list[int]:
        """Of that model's name: sets of instances whose KV fits together."""
        return [group for (name, _), group in self._groups.items() if name == model]

    # ── who holds what ────────────────────────────────────────────────────────────────────────────

    def rows_of(self, mask: int) -> npt.NDArray[np.int64]:
        """Rows of the instances that slots of the block map, as a bitset, stand for; NO_ROW for other slots."""
        return self._row_of_slot[bits(mask)] if mask.bit_count() <= FEW_BITS else self._row_of_slot[places(mask)]

    def rows_pending(self, mask: int) -> list[int]:
        """Rows of the instances that slots of `Pending`, as a bitset, stand for."""
        return [self._row_of_pending[slot] for slot in bits(mask)]

    def asked(self, mask: int, able: Mask, avoid: Collection[str]) -> dict[Tier, int]:
        """Those slots of a bitset whose stores may be asked for blocks, by what they hold: the life that announced them
        is a member and, if it is an instance, may get work."""
        found = self._asked_of_few(mask, able) if mask.bit_count() <= FEW_BITS else self._asked_of_many(mask, able)
        for name in avoid:
            for slot in self._slots.get(name, {}).values():
                found &= ~(1 << slot)
        parted = {tier: found & slots_there for tier, slots_there in sorted(self._lower.items())}
        for lower in parted.values():
            found ^= lower
        return {Tier.DRAM: found, **parted}

    def _asked_of_few(self, mask: int, able: Mask) -> int:
        found = 0
        for slot in bits(mask):
            kind = self._asked.item(slot)
            if kind == _ASKED or (kind == _ASKED_IF_ABLE and able[self._row_of_slot.item(slot)]):
                found |= 1 << slot
        return found

    def _asked_of_many(self, mask: int, able: Mask) -> int:
        slots = places(mask)
        kinds, rows = self._asked[slots], self._row_of_slot[slots]
        padded = np.append(able, False)  # NO_ROW is the last one
        return bitset(slots[(kinds == _ASKED) | ((kinds == _ASKED_IF_ABLE) & padded[rows])])

    # ── filling ───────────────────────────────────────────────────────────────────────────────────

    def _refresh(self, name: str) -> None:
        instance, row = self._fleet.named(name), self._rows.get(name)
        if instance is None and row is not None:
            self._remove(name, row)
        elif instance is not None:
            if row is None:
                row = self._add(name, instance)
            self._fill(row, instance)
        self._enslot(name, instance)

    def _add(self, name: str, instance: Instance) -> int:
        row = self._rows[name] = len(self.instances)
        self.instances.append(instance)
        self._known.append(())
        if row == self._data.shape[1]:
            self._data = np.concatenate([self._data, np.zeros_like(self._data)], axis=1)
            self._columns = []
        return row

    def _remove(self, name: str, row: int) -> None:
        del self._rows[name]
        last, known = self.instances.pop(), self._known.pop()
        if row < len(self.instances):
            moved = last.ref.instance_id
            self._data[:, row] = self._data[:, len(self.instances)]
            self.instances[row], self._known[row], self._rows[moved] = last, known, row
            self._unslot(moved)
            self._dirty[moved] = None

    def _fill(self, row: int, instance: Instance) -> None:
        if self.instances[row] is not instance:
            self.instances[row], self._known[row] = instance, ()
        self._load(row, instance)
        self._learn(row, instance)
        self._send(row, instance.ref.life)

    def _send(self, row: int, life: Life) -> None:
        self._data[Field.SENDING, row] = self.wires.outgoing.ahead(life)
        self._data[Field.ARRIVING, row] = self.wires.arriving(life)

    def _load(self, row: int, instance: Instance) -> None:
        queue, batch = instance.queue, instance.batch
        self._data[Field.LONG_SHARE, row], self._data[Field.LONG_CHUNK, row] = queue.long_share, queue.chunk_s
        self._data[Field.SIZE_WEIGHT, row] = queue.size_weight
        if queue.size_weight:
            self._data[Field.LISTED, row], self._data[Field.MARK :, row] = marks(queue)
        self._row_of_pending[instance.slot] = row
        self._data[:LOADS, row] = (
            *queue.backlog,
            len(queue.works),
            queue.has_ranked and any(work.priority for work in queue.works.values()),
            queue.has_ranked and any(work.yields for work in queue.works.values()),
            batch.requests,
            batch.context_tokens,
            min(batch.requests, instance.max_running or batch.requests) if instance.mixes else 0,
            batch.free_blocks,
            batch.free_pages,
            batch.residence_s,
            batch.mean_blocks,
            instance.last_seen,
            batch.stays.tightest_slo_s,
            self._is_open(instance),
            instance.slot,
        )

    def _learn(self, row: int, instance: Instance) -> None:
        models = (instance.prefill.fit, instance.decode.fit, instance.pull.fit)
        rates = instance.transfer.bytes_per_s, instance.prefill.chunk_tokens
        known = (
            *((m.coefficients, m.prior, m.fading_from) for m in models),
            rates,
            instance.role,
            instance.local_prefill_tokens,
            instance.chunk_tokens,
            instance.mixes,
        )
        if known != self._known[row]:
            self._known[row] = known
            self._data[LOADS:MODELS, row] = (*(x for m in models for x in _model(m)), *rates)
            self._data[MODELS : Field.SEALED, row] = self._fixed(instance)

    def _fixed(self, instance: Instance) -> tuple[float, ...]:
        model, capacity = instance.model, instance.capacity_blocks * instance.model.block_tokens
        limit = model.max_context_tokens - 1 if model.max_context_tokens else float("inf")
        if (name := (model.name, model.kv_identity)) not in self._groups:
            there = set(self._data[Field.GROUP, : len(self.instances)].tolist())
            self._groups = {known: number for known, number in self._groups.items() if number in there}
            self._groups[name] = self._numbers = self._numbers + 1
        return (
            self._groups[name],
            instance.role.prefills,
            instance.role.decodes,
            instance.alone_tokens,
            instance.mixes,
            min(capacity, limit),
            min(capacity - 1, limit),
            instance.capacity_blocks,
            instance.max_running or float("inf"),
            instance.chunk_tokens,
            model.kv_bytes_per_token,
            self.node(instance.node_id),
        )

    def _unslot(self, name: str) -> None:
        for store, slot in self._slots.pop(name, {}).items():
            self._row_of_slot[slot], self._asked[slot] = NO_ROW, _ASKED_NEVER
            if (tier := split_name(store)[1]) is not Tier.DRAM:
                self._lower[tier] &= ~(1 << slot)

    def _enslot(self, name: str, instance: Instance | None) -> None:
        """Where its stores, if they are of its very life, show in the block map."""
        self._unslot(name)
        member, row = self._members.member(name), self._rows.get(name, NO_ROW)
        slots = self._index.slots(name)
        for store, (slot, incarnation) in slots.items():
            while slot >= len(self._asked):
                self._row_of_slot = np.append(self._row_of_slot, np.full_like(self._row_of_slot, NO_ROW))
                self._asked = np.append(self._asked, np.zeros_like(self._asked))
            own = instance is not None and instance.ref.incarnation == incarnation
            known = member is not None and member.ref.incarnation == incarnation
            self._row_of_slot[slot] = row if own else NO_ROW
            if known:
                self._asked[slot] = _ASKED if instance is None else _ASKED_IF_ABLE if own else _ASKED_NEVER
            if (tier := split_name(store)[1]) is not Tier.DRAM:
                self._lower[tier] = self._lower.get(tier, 0) | 1 << slot
            if own and store == name:
                self._data[Field.SEALED, row] = slot
        if row != NO_ROW and not (name in slots and self._row_of_slot[slots[name][0]] == row):
            self._data[Field.SEALED, row] = -1
        if slots:
            self._slots[name] = {store: slot for store, (slot, _) in slots.items()}


def _model(fit: FittedModel) -> tuple[float, ...]:
    now, prior = fit.coefficients, fit.prior
    return (
        *(now.a, now.b, now.c, now.d, now.knee),
        *(prior.a, prior.b, prior.c, prior.d, prior.knee),
        fit.fading_from,
    )


@dataclass(frozen=True)
class View:
    """The table at one moment. `able`: who may get work."""

    columns: Columns
    able: Mask
    now: float

    def group(self, model: str) -> int:
        """The set of instances that serves this model: of several (an update is rolling through) one that can serve
        now comes first, then the more numerous; -1: there is none."""
        columns, of = self.columns, self.columns[Field.GROUP]
        groups = [group for group in columns.groups(model) if (of == group).any()]
        if len(groups) <= 1:
            return groups[0] if groups else -1

        def worth(group: int) -> tuple[bool, int, str]:
            live = (of == group) & self.able
            prompts = (columns[Field.PREFILLS] > 0) | (columns[Field.ALONE] > 0)
            complete = bool((live & (columns[Field.DECODES] > 0)).any() and (live & prompts).any())
            first = columns.instances[int(np.argmax(of == group))]
            return complete, int(np.count_nonzero(live)), first.model.fingerprint

        return max(groups, key=worth)

    def longest_silence_s(self) -> float:
        """Of those who may get work."""
        seen = self.columns[Field.SEEN][self.able]
        return max(0.0, self.now - float(seen.min())) if seen.size else 0.0

    def serving(self, group: int) -> Chosen:
        """All of that set, able or not."""
        return Chosen(self, self.columns[Field.GROUP] == group)

    def able_of(self, among: Chosen) -> Chosen:
        """Those of them that may get work."""
        return Chosen(self, among.mask & self.able)

    def prefills(self, usable: Chosen, prompt_tokens: int) -> Chosen:
        """Who of them can compute such a prompt."""
        fits = self.columns[Field.LONGEST_PREFILL] >= prompt_tokens
        return Chosen(self, usable.mask & (self.columns[Field.PREFILLS] > 0) & fits)

    def decodes(self, usable: Chosen, prompt_tokens: int) -> Chosen:
        """Who of them can answer it."""
        fits = self.columns[Field.LONGEST_DECODE] >= prompt_tokens
        return Chosen(self, usable.mask & (self.columns[Field.DECODES] > 0) & fits)


class Chosen(Sequence[Instance]):
    """Some instances of a view, by row. They are looked up only when somebody asks for them one by one."""

    def __init__(self, view: View, mask: Mask) -> None:
        self.view, self.mask = view, mask

    @cached_property
    def _instances(self) -> list[Instance]:
        instances = self.view.columns.instances
        return [instances[row] for row in np.flatnonzero(self.mask).tolist()]

    @cached_property
    def _count(self) -> int:
        return int(np.count_nonzero(self.mask))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._instances[index]

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances)

    def some(self, unable: int) -> list[Instance]:
        """All of them if they are few; of many that may not get work no more than that."""
        if len(self.view.columns) <= FEW:
            return list(self)
        rows = np.flatnonzero(self.mask & ~self.view.able)[:unable]
        return [self.view.columns.instances[row] for row in rows.tolist()]

    @property
    def first(self) -> Instance:
        """Any of them; there is one."""
        return self.view.columns.instances[int(np.argmax(self.mask))]

    def only(self, names: Collection[str]) -> Chosen:
        """Those of them that bear one of these names."""
        mask = np.zeros_like(self.mask)
        mask[[row for name in names if (row := self.view.columns.row(name)) >= 0]] = True
        return Chosen(self.view, self.mask & mask)

    def without(self, names: Collection[str]) -> Chosen:
        """But for these instances."""
        rows = [row for name in names if (row := self.view.columns.row(name)) >= 0]
        if not rows:
            return self
        mask = self.mask.copy()
        mask[rows] = False
        return Chosen(self.view, mask)
