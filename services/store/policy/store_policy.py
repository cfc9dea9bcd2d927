"""This module joins all policies of one master, as `MasterState` calls them. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.block_map import Verdict
from kvmesh.kvcache.tiers import split_name, store_names
from kvmesh.kvcache.tombstones import Tombstone
from kvmesh.rpc.pb.store_pb2 import StoreUsage
from kvmesh.services.store import durable
from kvmesh.services.store.block_map import MasterMap
from kvmesh.services.store.domain import RegisteredNode
from kvmesh.services.store.policy import heat, records
from kvmesh.services.store.policy.copies import Copying, Nodes, Order
from kvmesh.services.store.policy.drains import Drains
from kvmesh.services.store.policy.heat import KeyHeat
from kvmesh.services.store.policy.memory import MapMemory
from kvmesh.services.store.policy.names import Names
from kvmesh.services.store.policy.quotas import Quotas, TagQuota
from kvmesh.services.store.policy.reconciliation import KnownHolders, PendingChanges, Unannounced, UnconfirmedRemovals
from kvmesh.services.store.policy.records import Write
from kvmesh.services.store.policy.replicas import Replicas
from kvmesh.services.store.policy.tombstones import Tombstones

MAX_GRANT = 65_536  # numbers in one range


class GrantNumbers:
    """Gives each number once in one leader's term. Redis gives a term to one leader only. Where terms may come again
    (no Redis, and no node that remembers), numbers begin at the wall clock's nanoseconds, which keeps two lives of a
    master apart, as nobody asks for 10⁹ numbers in a second."""

    def __init__(self, wall_ns: int) -> None:
        self._next = wall_ns

    def take(self, count: int) -> int:
        """Returns the first of `count` new numbers (1..MAX_GRANT)."""
        first = self._next
        self._next += count
        return first


EPOCH_NS = 1_577_836_800 * 10**9  # terms that come from the wall clock count from here: see kvmesh/leader
MAX_OWED = 4096  # records in one write


@dataclass(frozen=True, kw_only=True)
class PolicyLimits:
    """Has the bounds and times of the policies. A block is hot after `hot_lookups` look-ups in a window; 0: no block
    ever is."""

    names_grace_s: float = 30.0
    max_names: int = 1 << 20
    max_targets: int = 1 << 20
    tombstone_retention_s: float = 3600.0
    max_tombstone_keys: int = 1 << 20
    max_map_bytes: int = 0
    hot_lookups: int = 256
    hot_window_s: float = 10.0
    heat_stride: int = heat.STRIDE


class StorePolicy:
    """Joins all policies of one master. `blocks` is the master's map; `wall_ns` is the wall clock's time, for numbers
    that no other life of a master has given."""

    def __init__(
        self, blocks: MasterMap, limits: PolicyLimits | None = None, *, wall_ns: int = 0, seed: int = 0
    ) -> None:
        limits = limits or PolicyLimits()
        self._map = blocks
        self._rng = random.Random(seed)
        self._hot_lookups = limits.hot_lookups
        self._left: set[str] = set()  # drained nodes that have gone, and whose drains are still written down
        self.term = 1
        self.nodes = Nodes()
        self.known = KnownHolders()
        self.grants = GrantNumbers(wall_ns)
        self.tombstones = Tombstones(
            retention_s=limits.tombstone_retention_s,
            max_keys=limits.max_tombstone_keys,
            wall_ns=max(0, wall_ns - EPOCH_NS),
        )
        self.unconfirmed_removals = UnconfirmedRemovals()
        blocks.forgotten = self._dropped
        self.names = Names(
            self._somewhere,
            self.tombstones.covered_since,
            grace_s=limits.names_grace_s,
            most=limits.max_names,
        )
        self.unannounced = Unannounced(self.tombstones.covered_since)
        self.heat = KeyHeat(window_s=limits.hot_window_s, stride=limits.heat_stride)
        self.memory = MapMemory(blocks, self.heat, limits.max_map_bytes)
        self.quotas = Quotas(blocks, self.known)
        pending = self._pending = PendingChanges()
        copying = self._copying = Copying(self.nodes, pending, self.tombstones.covered_since)
        self.replicas = Replicas(
            self.nodes,
            self._holders,
            copying,
            pending,
            most=limits.max_targets,
            unheard=lambda: self.known.unheard,
        )
        self.drains = Drains(blocks, self.nodes, copying, pending, self._lacking)

    def _holders(self, key: bytes) -> set[str]:
        return {split_name(name)[0] for name in self._map.holders(key)}

    def _somewhere(self, key: bytes) -> bool:
        """Whether any node may hold the block: a block that was left out of the map for want of memory may be any."""
        return self._map.mask(key) != 0 or self.memory.missing > 0

    def _lacking(self, instance_id: str) -> str:
        """Returns why the map does not show all that this node has; "" if it does."""
        if instance_id not in self.known:
            return "it has yet to announce all that it has"
        for name in store_names(instance_id):
            if self.memory.lacks(name):
                return "the master's map leaves out some of its blocks: max_map_mb"
            if self.known.is_cut(name):
                return "it has more blocks than the master's map takes: max_store_blocks"
        return ""

    def lead(self, term: int, kept: Mapping[str, Mapping[bytes, bytes]], now: float) -> list[str]:
        """Begins to lead under `term`, with what earlier leaders kept. Returns what of that cannot be read."""
        self.term = term
        bad: list[str] = []
        tombstones = records.readable(kept, durable.TOMBSTONE, partial(records.tombstone_in, now=now), bad)
        floors = records.readable(kept, durable.SETTING, records.floor_in, bad)
        self.tombstones.load(tombstones, max(floors, default=0))
        self.names.load(records.readable(kept, durable.NAME, records.binding_in, bad), now)
        targets = records.readable(kept, durable.TARGET, records.target_in, bad)
        self.replicas.load(targets, self.tombstones.covered_since)
        self.replicas.unpins.load(records.readable(kept, durable.UNPIN, records.unpin_in, bad))
        self.quotas.load(records.readable(kept, durable.QUOTA, records.quota_in, bad))
        self.drains.load(raw.decode(errors="replace") for raw in kept.get(durable.DRAIN, {}))
        return bad

    # ── members ──────────────────────────────────────────────────────────────────────────────────────

    def joined(self, member: RegisteredNode, removed_seq: int, lasting_seq: int | None = None) -> None:
        """Adds a member. The same incarnation may join again."""
        self.tombstones.joined(member.instance_id, removed_seq, lasting_seq)
        self.drains.joined(member.instance_id, member.incarnation)
        self.nodes.joined(member, member.instance_id in self.drains)
        self.known.joined(member.instance_id)

    def beat(self, instance_id: str, usage: StoreUsage | None, removed_seq: int) -> None:
        """Takes a member's heartbeat; it has applied tombstones up to `removed_seq`."""
        self.tombstones.reported(instance_id, removed_seq)
        node = self.nodes.get(instance_id)
        if node is not None:
            node.usage = usage or node.usage
            self.known.beat(instance_id, usage)
            self.drains.beat(instance_id, usage)

    def ended(self, instance_id: str, now: float) -> None:
        """Forgets a member that has ended."""
        self.tombstones.ended(instance_id, now)
        self.nodes.ended(instance_id)
        self.known.ended(instance_id)
        self.quotas.ended(instance_id)
        self._pending.ended(instance_id)
        for name in store_names(instance_id):
            self.memory.ended(name)
            self.unconfirmed_removals.settled(name)
        if self.drains.ended(instance_id):
            self._left.add(instance_id)

    def allowances(self, instance_id: str, now: float) -> Mapping[bytes, int]:
        """Returns the allowances to send to this node now: see Quotas.news."""
        return self.quotas.news(instance_id, len(self.nodes), now)

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float) -> tuple[list[Order], list[Write]]:
        """Returns what to order at nodes now, and the records to write."""
        self.heat.decay(now)
        after = self.tombstones.last
        orders = [*self.replicas.tick(now, after, self._rng), *self.drains.tick(now, after, self._rng)]
        orders += [Order(discard, lambda done, answered, now: None) for discard in self._copying.discards()]
        left, self._left = {name for name in self._left if name not in self.drains}, set()
        writes = [Write(durable.DRAIN, drops=tuple(name.encode() for name in left))] if left else []
        return orders, writes + self.retire(now)

    @property
    def owes(self) -> bool:
        """Whether `owed` would return anything."""
        return self.replicas.owes or self.replicas.unpins.owes

    def owed(self) -> list[Write]:
        """Returns further records to write, as of now. It must be called in the turn of the loop in which they are
        written, as somebody may set a target again meanwhile."""
        found = []
        if ended := self.replicas.take_ended(MAX_OWED):
            found.append(Write(durable.TARGET, drops=tuple(ended)))
        if unpins := self._unpins():
            found.append(unpins)
        return found

    def _unpins(self) -> Write | None:
        changed = self.replicas.unpins.take_changed()
        puts = {records.unpin_out(each): b"" for each in changed if each in self.replicas.unpins}
        drops = tuple(records.unpin_out(each) for each in changed if each not in self.replicas.unpins)
        return Write(durable.UNPIN, puts, drops) if changed else None

    def not_kept(self, writes: Sequence[Write]) -> None:
        """Takes records of `tick`, `owed` and `change_replicas` back that could not be written. Otherwise a drain that
        is over and still written down would begin again under the next leader, and a pin that is to be undone would
        stay."""
        for write in writes:
            if write.kind == durable.DRAIN:
                self._left.update(name.decode() for name in write.drops)
            elif write.kind == durable.TARGET:
                self.replicas.not_kept(write.drops)
            elif write.kind == durable.UNPIN:
                self.replicas.unpins.not_kept(records.unpin_in(raw, b"") for raw in (*write.puts, *write.drops))

    def asked(self, keys: Sequence[bytes], now: float) -> None:
        """Counts a look-up of these keys."""
        for key in self.heat.note(keys):
            if self._hot_lookups and self.heat.of(key) >= self._hot_lookups:
                self.replicas.hot(key, now)

    # ── announcements ────────────────────────────────────────────────────────────────────────────────

    def take_announcement(self, said: Announcement) -> Announcement:
        """Returns `said` without the keys that the member must not bring back. A batch has them as removed instead, so
        that it is not empty."""
        instance_id = split_name(said.store_id)[0]
        self.memory.said(said)
        masked = self.tombstones.masked(instance_id, said.sealed)
        if not masked:
            return said
        self.tombstones.owes(said.store_id)
        kept = [at for at, key in enumerate(said.sealed) if key not in masked]
        groups = bytes(said.groups[at] for at in kept) if said.groups else b""
        removed = said.removed if said.snapshot else said.removed + tuple(masked)
        return replace(said, sealed=tuple(said.sealed[at] for at in kept), removed=removed, groups=groups)

    def took(self, said: Announcement, verdict: Verdict, cut: int = 0) -> int:
        """Notes what became of an announcement in the map; `cut` of its keys were not taken. Returns how many replicas
        had to be left out for want of memory."""
        if said.snapshot and said.part == 0 and verdict in (Verdict.APPLIED, Verdict.PARTIAL):
            self.tombstones.began_snapshot(said.store_id)
            self.unconfirmed_removals.settled(said.store_id)
            self.memory.began_snapshot(said.store_id)
            self.known.cut(said.store_id, False)
        if cut:
            self.known.cut(said.store_id, True)
        # An old announcement that comes again does not tell what became of a key since.
        news = verdict is Verdict.APPLIED or (verdict is Verdict.DUPLICATE and not (said.sealed or said.removed))
        if news and not said.snapshot:
            self.unconfirmed_removals.take_announcement(said, self.tombstones.is_behind(split_name(said.store_id)[0]))
        shed = self.memory.keep(self._rng)
        in_step = verdict is Verdict.APPLIED or (
            verdict is Verdict.DUPLICATE and not said.snapshot and said.seq == self._map.seq(said.store_id)
        )
        if verdict is Verdict.GAP or self.wants_snapshot(said.store_id):
            self.known.said(said.store_id, in_full=False)
        elif in_step:
            self.known.said(said.store_id, in_full=True)
            self.drains.said(said.store_id)
        return shed

    def wants_snapshot(self, store_id: str) -> bool:
        """Whether that store should announce all that it has, although no announcement of it is missing."""
        return (
            self.tombstones.wants_snapshot(store_id)
            or self.unconfirmed_removals.wants_snapshot(store_id)
            or self.memory.wants_snapshot(store_id)
        )

    # ── removal ──────────────────────────────────────────────────────────────────────────────────────

    def remove(self, keys: Sequence[bytes], prefix: bytes, now: float) -> tuple[Tombstone, list[Write]]:
        """Removes `keys`, or all keys with a `prefix` of 1 to 16 bytes: from now on they are in no answer, until a node
        that has applied the tombstone announces them. Returns the tombstone and the records to write."""
        made = self.tombstones.add(self.term, keys, prefix, now)
        if prefix:
            targets: list[bytes] = []
            self._map.forget_prefix(prefix)
            self.replicas.removed_prefix(prefix, made.seq)
        else:
            for store_id, some in self._map.forget(keys).items():
                self._dropped(store_id, some)
            targets = self.replicas.removed(keys)
        key, value = records.tombstone_out(made)
        writes = [Write(durable.TOMBSTONE, {key: value}), *self.retire(now)]
        return made, [*writes, Write(durable.TARGET, drops=tuple(targets))] if targets else writes

    def _dropped(self, store_id: str, keys: Sequence[bytes]) -> None:
        if not self.unconfirmed_removals.dropped(store_id, keys):
            self.tombstones.owes(store_id)

    def retire(self, now: float) -> list[Write]:
        """Drops tombstones that need not or cannot be kept any longer, and returns the records to write."""
        gone = self.tombstones.retire(now)
        if not gone:
            return []
        floor = Write(durable.SETTING, {records.FLOOR: records.seq_out(self.tombstones.floor)})
        return [floor, Write(durable.TOMBSTONE, drops=tuple(records.seq_out(each.seq) for each in gone))]

    # ── names ────────────────────────────────────────────────────────────────────────────────────────

    def bind(
        self, namespace: str, names: Sequence[tuple[str, bytes]], now: float, *, replace: bool = False
    ) -> tuple[list[bytes], list[Write], Callable[[], None]]:
        """Returns what each name will stand for, the records to write, and a function to be called once they are
        written: only then are the names bound. `replace` is as in `Names.bind`. Raises Overloaded when there is no room
        for so many."""
        after = self.tombstones.last
        keys, new, dropped = self.names.bind(namespace, names, after, now, replace=replace)
        puts = {records.name_out(name): records.binding_out(key, after) for name, key in new.items()}
        drops = tuple(raw for name in dropped if (raw := records.name_out(name)) not in puts)
        return (
            keys,
            [Write(durable.NAME, puts, drops)] if puts or drops else [],
            partial(self.names.bound, new, after, now),
        )

    def sealed(self, keys: Sequence[bytes], instance_id: str, incarnation: int, now: float) -> None:
        """Notes that, as a client says, this member has sealed these keys, which it has yet to announce."""
        masked = self.tombstones.masked(instance_id, keys)
        fresh = (key for key in keys if key not in masked)
        self.unannounced.sealed(fresh, instance_id, incarnation, self.tombstones.last, now)

    def unbind(
        self, namespace: str, names: Sequence[str], keys: Sequence[bytes | None] | None = None
    ) -> tuple[list[Write], Callable[[], None]]:
        """Forgets these names, or only those that stand for the given key (None: for nothing). Returns the records to
        write and a function to be called once they are written. Unknown names are dropped from the records, too: an
        earlier try may have failed halfway."""
        gone = [(namespace, name) for name in names] if keys is None else self.names.ends(namespace, names, keys)
        gone = list(dict.fromkeys(gone))
        writes = [Write(durable.NAME, drops=tuple(map(records.name_out, gone)))] if gone else []
        return writes, partial(self.names.unbound, gone)

    # ── replicas, drains, quotas ─────────────────────────────────────────────────────────────────────

    def change_replicas(
        self, keys: Sequence[bytes], replicas: int, hard: bool, now: float
    ) -> tuple[list[int], list[Write]]:
        """Sets the target of these keys. Returns how many live nodes have each now, and the records to write. Raises
        Overloaded when too many keys have a target."""
        after = self.tombstones.last
        self.replicas.change(keys, replicas, hard, after)
        counts = [len(self.replicas.now(key, now)) for key in keys]
        unpins = self._unpins()
        writes = [unpins] if unpins is not None else []  # written before the target goes: no pin may be lost in between
        if not replicas:
            return counts, [*writes, Write(durable.TARGET, drops=tuple(dict.fromkeys(keys)))]
        return counts, [*writes, Write(durable.TARGET, dict.fromkeys(keys, records.target_out(replicas, hard, after)))]

    def drain(self, instance_id: str, cancel: bool, life: int = 0) -> list[Write]:
        """Begins or cancels a drain. Returns the records to write: again as long as `drains.kept` has not been
        called, and none for a drain that an incarnation (`life`) asks for itself. Raises Overloaded when too many
        nodes drain."""
        if cancel:
            self.drains.cancel(instance_id)
            return [Write(durable.DRAIN, drops=(instance_id.encode(),))]
        if self.drains.begin(instance_id, life):
            return [Write(durable.DRAIN, {instance_id.encode(): b""})]
        return []

    def set_quota(self, quota: TagQuota) -> list[Write]:
        """Sets a quota; 0 blocks end it. Returns the records to write. Raises Overloaded when there are too many."""
        self.quotas.set(quota)
        if not quota.blocks:
            return [Write(durable.QUOTA, drops=(quota.tag,))]
        return [Write(durable.QUOTA, dict([records.quota_out(quota)]))]
