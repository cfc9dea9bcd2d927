"""All policies of one master together, as `MasterState` calls them. Pure."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.block_map import Verdict
from kvmesh.kvcache.tiers import split_name
from services.store import durable
from services.store.policy import records
from services.store.policy.grants import Grants
from services.store.policy.master_map import MasterMap
from services.store.policy.names import Names
from services.store.policy.records import Write
from services.store.policy.tombstones import Tombstone, Tombstones


@dataclass(frozen=True, kw_only=True)
class PolicyLimits:
    """Bounds and times of the policies; seconds."""

    names_grace_s: float = 30.0
    max_names: int = 1 << 20
    tombstone_retention_s: float = 3600.0
    max_tombstone_keys: int = 1 << 20


class Policy:
    """`blocks` is the master's map; `wall_ns`: of the wall clock, for numbers that no other life has given."""

    def __init__(self, blocks: MasterMap, limits: PolicyLimits | None = None, *, wall_ns: int = 0) -> None:
        limits = limits or PolicyLimits()
        self._map = blocks
        self.term = 1
        self.grants = Grants(wall_ns)
        self.tombstones = Tombstones(retention_s=limits.tombstone_retention_s, max_keys=limits.max_tombstone_keys)
        self.names = Names(
            lambda key: blocks.mask(key) != 0,
            self.tombstones.covered_since,
            grace_s=limits.names_grace_s,
            most=limits.max_names,
        )

    def lead(self, term: int, kept: Mapping[str, Mapping[bytes, bytes]], now: float) -> list[str]:
        """This master leads under `term`, with what earlier leaders kept; what of it cannot be read."""
        self.term = term
        bad: list[str] = []
        tombstones = []
        for key, value in kept.get(durable.TOMBSTONE, {}).items():
            try:
                tombstones.append(records.tombstone_in(key, value, now))
            except (ValueError, struct.error) as error:
                bad.append(f"tombstone {key!r}: {error}")
        floor = kept.get(durable.SETTING, {}).get(records.FLOOR)
        self.tombstones.load(tombstones, records.seq_in(floor) if floor and len(floor) == 8 else 0)
        bound = ((records.name_in(raw), key) for raw, key in kept.get(durable.NAME, {}).items())
        self.names.load(bound, self.tombstones.last, now)
        return bad

    # ── members ──────────────────────────────────────────────────────────────────────────────────────

    def joined(self, instance_id: str, removed_seq: int) -> None:
        """A life begins."""
        self.tombstones.joined(instance_id, removed_seq)

    def beat(self, instance_id: str, removed_seq: int) -> None:
        """It lives, and has applied tombstones up to `removed_seq`."""
        self.tombstones.applied(instance_id, removed_seq)

    def ended(self, instance_id: str) -> None:
        """A life has ended."""
        self.tombstones.ended(instance_id)

    # ── announcements ────────────────────────────────────────────────────────────────────────────────

    def heard(self, said: Announcement) -> Announcement:
        """`said` without what that member must not bring back. As removed the rest keeps a batch from being empty."""
        instance_id = split_name(said.store_id)[0]
        masked = self.tombstones.masked(instance_id, said.sealed)
        if not masked:
            return said
        self.tombstones.owes(said.store_id)
        sealed = tuple(key for key in said.sealed if key not in masked)
        removed = said.removed if said.snapshot else said.removed + tuple(masked)
        return replace(said, sealed=sealed, removed=removed)

    def took(self, said: Announcement, verdict: Verdict) -> None:
        """What became of it in the map."""
        if said.snapshot and said.part == 0 and verdict in (Verdict.APPLIED, Verdict.PARTIAL):
            self.tombstones.began_snapshot(said.store_id)

    def wants_snapshot(self, store_id: str) -> bool:
        """Whether that store should say all that it has, though nothing that it said is missing."""
        return self.tombstones.wants_snapshot(store_id)

    # ── removal ──────────────────────────────────────────────────────────────────────────────────────

    def remove(self, keys: Sequence[bytes], prefix: bytes, now: float) -> tuple[Tombstone, list[Write]]:
        """From now on these keys are in no answer, until a node that has applied the tombstone announces them. Either
        `keys` or a `prefix` of 1 to 16 bytes."""
        made = self.tombstones.add(self.term, keys, prefix, now)
        if prefix:
            self._map.forget_prefix(prefix)
        else:
            self._map.forget(keys)
        key, value = records.tombstone_out(made)
        return made, [Write(durable.TOMBSTONE, {key: value}), *self.retire(now)]

    def retire(self, now: float) -> list[Write]:
        """Tombstones that need not or cannot be kept any longer."""
        gone = self.tombstones.retire(now)
        if not gone:
            return []
        floor = Write(durable.SETTING, {records.FLOOR: records.seq_out(self.tombstones.floor)})
        return [floor, Write(durable.TOMBSTONE, drops=tuple(records.seq_out(each.seq) for each in gone))]

    # ── names ────────────────────────────────────────────────────────────────────────────────────────

    def bind(self, namespace: str, names: Sequence[tuple[str, bytes]], now: float) -> tuple[list[bytes], list[Write]]:
        """What each name stands for now. Raises Overloaded: no room for so many."""
        keys, new, dropped = self.names.bind(namespace, names, self.tombstones.last, now)
        puts = {records.name_out(name): key for name, key in new.items()}
        drops = tuple(raw for name in dropped if (raw := records.name_out(name)) not in puts)
        return keys, [Write(durable.NAME, puts, drops)] if puts or drops else []

    def unbind(self, namespace: str, names: Sequence[str]) -> list[Write]:
        """Forget these names."""
        gone = self.names.unbind(namespace, names)
        return [Write(durable.NAME, drops=tuple(map(records.name_out, gone)))] if gone else []
