"""Moves away the blocks that only one node holds, before that node leaves.

The store of a draining node is read slice by slice, again and again; what no other node holds (in any tier) is pulled
by pool nodes. The node is drained when a whole reading has found nothing, and nothing is under way. Only readings count
that have begun after the node knew that it drains, wrote nothing any more, and had announced in every tier since. Two
nodes that drain at once do not count as holders for each other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from kvmesh.errors import Overloaded
from kvmesh.kvcache.keys import KEY_BYTES
from kvmesh.kvcache.tiers import Tier, split_name, store_name, store_names
from kvmesh.rpc.pb.store_pb2 import StoreUsage
from kvmesh.services.store.block_map import MasterMap
from kvmesh.services.store.policy.copies import MAX_KEYS, Copying, Nodes, Order, PullOrder
from kvmesh.services.store.policy.reconciliation import PendingChanges

MAX_DRAINS = 256
LOOK = 4096  # keys of one node that are read in one tick
MAX_FOUND = 4096  # keys that wait to be moved; with so many, reading waits too
MAX_ORDERS = 4  # orders under way for one draining node
RETRY_S = (1.0, 30.0)


@dataclass
class Drain:
    """Keeps the state of one drain.

    - `kept`: it is written down for the next leader.
    - `life`: the incarnation that asked for it, and with whose end it is forgotten; 0 where an operator asked.
    - `beats`: heartbeats of the node since it joined; each is answered with the word that it drains.
    - `awaited`: tiers that have yet to announce since the node wrote nothing any more; None while it may still write.
    - `counts`: whether the present reading may find that the node is drained.
    - `moved`: blocks that others have taken.
    - `unread`: keys that the present reading has yet to look at.
    """

    kept: bool = False
    life: int = 0
    beats: int = 0
    awaited: set[str] | None = None
    counts: bool = False
    moved: int = 0
    done: bool = False
    why_not: str = ""
    found: dict[bytes, None] = field(default_factory=dict)
    busy: set[bytes] = field(default_factory=set)
    clean: bool = True  # the present reading has found nothing
    slices: list[tuple[str, bytes]] = field(default_factory=list)
    reading: bool = False
    orders: int = 0
    failures: int = 0
    not_before: float = float("-inf")

    @property
    def unread(self) -> int:
        return sum(len(packed) for _, packed in self.slices) // KEY_BYTES


class Drains:
    """Keeps all drains by instance id, for any incarnation. `lacking(instance_id)` returns why the map does not show
    all that the node has, or ""."""

    def __init__(
        self,
        blocks: MasterMap,
        nodes: Nodes,
        copying: Copying,
        pending: PendingChanges,
        lacking: Callable[[str], str],
    ) -> None:
        self._map = blocks
        self._lacking = lacking
        self._nodes = nodes
        self._copying = copying
        self._pending = pending
        self._drains: dict[str, Drain] = {}

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._drains

    def load(self, instance_ids: Iterable[str]) -> None:
        """Takes the drains that an earlier leader left."""
        self._drains.update((name, Drain(kept=True)) for name in instance_ids)

    def begin(self, instance_id: str, life: int = 0) -> bool:
        """Begins a drain. Returns whether it has yet to be written down (see `kept`). Raises Overloaded when too many
        nodes drain."""
        if (asked := self._drains.get(instance_id)) is not None and asked.life and not life:
            asked.life, asked.kept = 0, False  # an operator's order outlives the node's own wish
        if (known := self._drains.get(instance_id)) is not None:
            return not known.kept
        if len(self._drains) >= MAX_DRAINS:
            raise Overloaded(f"{MAX_DRAINS} nodes drain already")
        self._drains[instance_id] = Drain(kept=bool(life), life=life)
        self._mark(instance_id, True)
        return not life

    def kept(self, instance_id: str) -> None:
        """Notes that the drain is written down, so that the next leader will know of it."""
        if (drain := self._drains.get(instance_id)) is not None:
            drain.kept = True

    def cancel(self, instance_id: str) -> None:
        """Cancels a drain: the node stays. Copies under way go on."""
        self._mark(instance_id, False)
        self._drains.pop(instance_id, None)

    # ── what the node says ───────────────────────────────────────────────────────────────────────────

    def joined(self, instance_id: str, incarnation: int) -> None:
        """Notes that a node joined, perhaps again: it is not known whether it has been told that it drains."""
        if (drain := self._drains.get(instance_id)) is not None:
            if drain.life not in (0, incarnation):
                self.cancel(instance_id)
                return
            drain.beats, drain.awaited = 0, None

    def beat(self, instance_id: str, usage: StoreUsage | None) -> None:
        """Notes a heartbeat, whose answer tells the node that it drains. The node's next heartbeat shows that it
        knows."""
        drain = self._drains.get(instance_id)
        if drain is None:
            return
        drain.beats += 1
        if drain.beats < 2 or usage is None or usage.writing:
            drain.awaited = None
        elif drain.awaited is None:
            drain.awaited = {instance_id, *(store_name(instance_id, Tier(use.tier)) for use in usage.tiers)}

    def said(self, store_id: str) -> None:
        """Notes that a tier has announced all that it has."""
        drain = self._drains.get(split_name(store_id)[0])
        if drain is not None and drain.awaited:
            drain.awaited.discard(store_id)

    def ended(self, instance_id: str) -> bool:
        """Notes that an incarnation has ended. Returns whether a drain that was written down is over: the node was
        drained, and its name is free for another."""
        drain = self._drains.get(instance_id)
        if drain is None or not (drain.done or drain.life):
            return False
        del self._drains[instance_id]
        return not drain.life

    def get(self, instance_id: str) -> Drain | None:
        """Returns the drain of a node; None if it does not drain."""
        return self._drains.get(instance_id)

    @property
    def drained(self) -> dict[str, bool]:
        """Says of each node that drains whether all that it has is elsewhere, too."""
        return {name: drain.done for name, drain in self._drains.items()}

    def sole_blocks(self, instance_id: str) -> int:
        """Returns an upper bound of the blocks that only this node has; 0 only when it is known that there are none."""
        drain = self._drains.get(instance_id)
        if drain is None or drain.done:
            return 0
        here = sum(self._map.count(name) for name in store_names(instance_id))
        unread = drain.unread if drain.reading else here
        known = len(drain.found) + len(drain.busy)
        return max(1, min(max(here, known), known + unread))

    def tick(self, now: float, after: int, rng: random.Random) -> list[Order]:
        """Returns what to order now. `after` is the last tombstone."""
        orders: list[Order] = []
        for instance_id, drain in self._drains.items():
            if instance_id in self._nodes:
                self._read(instance_id, drain, now)
                self._move(instance_id, drain, now, after, rng, orders)
        return orders

    def _read(self, instance_id: str, drain: Drain, now: float) -> None:
        if not drain.reading:
            logs = [(name, self._map.log_of(name)) for name in store_names(instance_id)]
            drain.slices, drain.reading, drain.clean = [each for each in logs if each[1]], True, True
            drain.counts = drain.awaited == set()
        left, staying = LOOK, self._staying()
        while drain.slices and left > 0 and len(drain.found) < MAX_FOUND:
            name, packed = drain.slices.pop()
            cut = min(len(packed), left * KEY_BYTES)
            left -= cut // KEY_BYTES
            if cut < len(packed):
                drain.slices.append((name, packed[cut:]))
            for key in self._map.held(name, packed[:cut]):
                if key not in drain.busy and self._is_sole(key, instance_id, staying, now):
                    drain.found[key] = None
                    drain.clean = False
        if not drain.slices and not drain.found and not drain.orders:
            lacking = self._lacking(instance_id) or ("" if drain.counts else "it has yet to say that it writes no more")
            drain.done = drain.clean and not lacking
            drain.why_not = lacking if drain.clean else drain.why_not
            drain.reading = False

    def _move(
        self, instance_id: str, drain: Drain, now: float, after: int, rng: random.Random, orders: list[Order]
    ) -> None:
        while drain.found and drain.orders < MAX_ORDERS and now >= drain.not_before:
            keys = self._still(instance_id, drain, now)
            if not keys:
                continue
            pull = self._copying.begin((instance_id,), keys, after, now, rng, pins=True)
            if pull is None:
                drain.why_not = "no other pool node has room or answers"
                return
            drain.orders += 1
            drain.busy.update(pull.keys)
            for key in pull.keys:
                del drain.found[key]
            orders.append(Order(pull, partial(self._pulled, drain, pull)))

    def _still(self, instance_id: str, drain: Drain, now: float) -> list[bytes]:
        """Returns up to MAX_KEYS of the keys that were found, without those that another node has got since, or that
        are gone."""
        staying, keys = self._staying(), []
        for key in list(drain.found)[:MAX_KEYS]:
            here = any(self._map.held(name, key) for name in store_names(instance_id))
            if here and self._is_sole(key, instance_id, staying, now):
                keys.append(key)
            else:
                del drain.found[key]
        return keys

    def _pulled(self, drain: Drain, work: PullOrder, done: frozenset[bytes], answered: bool, now: float) -> None:
        self._copying.ended(work, done, answered, now)
        drain.orders -= 1
        drain.busy.difference_update(work.keys)
        drain.moved += len(done)
        if done:
            drain.failures, drain.why_not = 0, ""
            return  # blocks that were not copied are found by the next reading, if they are still there
        drain.not_before = now + min(RETRY_S[1], RETRY_S[0] * 2 ** min(drain.failures, 16))
        drain.failures += 1
        what = "could not take" if answered else "did not answer for"
        drain.why_not = f"{work.receiver.instance_id} {what} {len(work.keys)} blocks"

    def _staying(self) -> int:
        """Returns the bitset of the slots of nodes that do not drain, in every tier."""
        return sum(bit for name, bit in self._map.shown() if name.partition("#")[0] not in self._drains)

    def _is_sole(self, key: bytes, instance_id: str, staying: int, now: float) -> bool:
        if self._map.mask(key) & staying:
            return False
        others = self._pending.seen(key, {instance_id}, now) - {instance_id}
        return all(name in self._drains or name not in self._nodes for name in others)

    def _mark(self, instance_id: str, draining: bool) -> None:
        node = self._nodes.get(instance_id)
        if node is not None:
            node.draining = draining
