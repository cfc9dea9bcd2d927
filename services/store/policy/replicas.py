"""This module decides how many nodes should hold a block: by targets that somebody has set, and one copy more of blocks
that are looked up much.

Every tick looks at some of the keys that have a target, the newest targets first, and orders what is missing (a pool
node pulls a copy) or too much (the least useful copy goes, once all others are confirmed). There is one order at a time
for a key; what failed is tried again after a time that doubles up to RETRY_S[1], at another node. What a node
acknowledged counts before the map shows it, and no longer than SETTLE_S.

A target ends with its block's removal. A removal by prefix ends all in one step, and `sweep` clears them away over
many.

Hard pins of the master that no target asks for any more are undone at each incarnation that has them, or may have. They
are written down for the next leader: a pin that nobody remembers would hold memory as long as that incarnation lives.
"""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from kvmesh.errors import Overloaded
from kvmesh.services.store.domain import NodeRole
from kvmesh.services.store.policy.copies import (
    AVOID_S,
    MAX_KEYS,
    Copying,
    Nodes,
    Order,
    PinOrder,
    PullOrder,
    Then,
    TrimOrder,
    Work,
)
from kvmesh.services.store.policy.reconciliation import PendingChanges

LOOK = 1024  # keys that are looked at in one tick
MAX_ORDERS = 32  # orders under way
RETRY_S = (0.5, 60.0)
PIN_AGAIN_S = 120.0  # pins are renewed: a block that was evicted and came again at a node has lost its pin there
MAX_HOT = 1024
HOT_REPLICAS = 4  # a hot block gets no more copies than make so many
HOT_S = 60.0
MAX_UNPINS = 1 << 16  # pins yet to be undone, also at nodes that are away; past it the oldest are forgotten

Life = tuple[str, int]  # instance id, incarnation
Pinned = tuple[Life, bytes]


class Unpins:
    """Keeps all pins that are to be undone, and which of them differ from what is written down."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._open: OrderedDict[Pinned, None] = OrderedDict()
        self._changed: dict[Pinned, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, pinned: Pinned) -> bool:
        return pinned in self._open

    def load(self, kept: Iterable[Pinned]) -> None:
        """Takes what an earlier leader left."""
        self._open.update(dict.fromkeys(kept))

    def add(self, lives: Iterable[Life], key: bytes) -> None:
        """Notes that a block is pinned at these incarnations, and should not be."""
        for life in lives:
            self._open[life, key] = None
            self._changed[life, key] = None
        while len(self._open) > MAX_UNPINS:
            self._changed[self._open.popitem(last=False)[0]] = None

    def done(self, life: Life, keys: Iterable[bytes]) -> None:
        """Notes that this incarnation has no pin of these keys any more, or that the pin is wanted again."""
        for key in keys:
            if (life, key) in self._open:
                del self._open[life, key]
                self._changed[life, key] = None

    def due(self, busy: Container[bytes], wished: Callable[[bytes], bool], now: float) -> dict[Life, list[bytes]]:
        """Returns which keys to unpin now, by incarnation. Where the node is no member now, its keys wait: the same
        incarnation may join again."""
        found: dict[Life, list[bytes]] = {}
        for _ in range(min(LOOK, len(self._open))):
            life, key = pinned = next(iter(self._open))
            node = self._nodes.get(life[0])
            if wished(key) or (node is not None and node.member.incarnation != life[1]):
                self.done(life, (key,))  # pins end with their incarnation
                continue
            self._open.move_to_end(pinned)
            keys = found.setdefault(life, [])
            if node is not None and key not in busy and now >= node.avoid_until and len(keys) < MAX_KEYS:
                keys.append(key)
        return {life: keys for life, keys in found.items() if keys}

    # ── what is kept ─────────────────────────────────────────────────────────────────────────────────

    @property
    def owes(self) -> bool:
        """Whether any pin was added or undone since the last `take_changed`."""
        return bool(self._changed)

    def take_changed(self) -> list[Pinned]:
        """Returns the pins that were added or undone since the last call; `in` tells which of the two."""
        changed, self._changed = self._changed, {}
        return list(changed)

    def not_kept(self, changed: Iterable[Pinned]) -> None:
        """Takes changes back that could not be written."""
        self._changed.update(dict.fromkeys(changed))


MAX_OPEN = 65_536  # with more, the table is gone through in one go

V = TypeVar("V")


class LazyDelete:
    """Keeps prefixes whose keys are void at once in a table that is gone through later, slice by slice. The `seq` of a
    prefix and the `after` of an entry are tombstone numbers: entries with an `after` of at least `seq` are newer and
    not void."""

    def __init__(self) -> None:
        self._open: dict[bytes, tuple[int, int]] = {}  # prefix → its seq, and the value of `_looks` at which it is done
        self._looks = 0

    def __len__(self) -> int:
        """Returns how many prefixes the table has not been gone through for."""
        return len(self._open)

    def begin(self, prefix: bytes, seq: int, size: int) -> None:
        """Makes the entries that begin with `prefix` void, in a table of `size` entries."""
        self._open[prefix] = (seq, self._looks + size)

    def covers(self, key: bytes, after: int) -> bool:
        """Whether an entry with this `after` is void. Its cost is O(length of the key)."""
        found = self._open
        return bool(found) and any(found.get(key[:n], (0, 0))[0] > after for n in range(1, len(key) + 1))

    def step(self, table: OrderedDict[bytes, V], after: Callable[[V], int], most: int) -> list[bytes]:
        """Looks at `most` entries, or at all if too many prefixes are open, and returns those that are void. New
        entries go to the end of the table, so the old ones have been looked at when as many looks have been made as
        there were entries."""
        void: list[bytes] = []
        left = len(table) if len(self._open) > MAX_OPEN else min(most, len(table))
        for _ in range(left if self._open else 0):
            key = next(iter(table))
            table.move_to_end(key)
            if self.covers(key, after(table[key])):
                void.append(key)
        self._looks += left
        if left == len(table):
            self._open.clear()
        self._open = {prefix: at for prefix, at in self._open.items() if at[1] > self._looks}
        return void


@dataclass(slots=True)
class ReplicaTarget:
    """Is a wish that a block have `replicas` nodes, 1 or more. `after` is the last tombstone then; a later one that
    covers the block ends the wish. `pinned` are the incarnations at which the block is pinned hard as far as is known,
    `ever` those at which this leader has ever pinned it; `inherited` says that earlier leaders may have pinned it
    elsewhere."""

    replicas: int
    hard: bool = False
    after: int = 0
    inherited: bool = False
    pinned: set[Life] = field(default_factory=set)
    ever: set[Life] = field(default_factory=set)
    pin_again_at: float = float("-inf")
    pin_failed: bool = False  # the last order was to pin, and failed: the next look is at copies
    failures: int = 0
    not_before: float = float("-inf")


@dataclass
class _Needs:
    """Gathers what one tick orders, for keys that need the same."""

    pulls: dict[tuple[str, ...], list[bytes]] = field(default_factory=dict)
    trims: dict[tuple[str, tuple[str, ...], bool], list[bytes]] = field(default_factory=dict)
    pins: dict[str, list[bytes]] = field(default_factory=dict)


class Replicas:
    """Keeps all targets, and makes the orders that fulfil them. `holders(key)` returns the instance ids that hold a key
    by the map, in any tier; `unheard()` those of members that have yet to announce all that they have."""

    def __init__(
        self,
        nodes: Nodes,
        holders: Callable[[bytes], Iterable[str]],
        copying: Copying,
        pending: PendingChanges,
        *,
        most: int = 1 << 20,
        unheard: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self._nodes = nodes
        self._holders = holders
        self._copying = copying
        self._pending = pending
        self._most = most
        self._unheard = unheard
        self._targets: OrderedDict[bytes, ReplicaTarget] = OrderedDict()
        self._swept = LazyDelete()
        self._ended: dict[bytes, None] = {}  # targets that are over and still written down
        self._hot: OrderedDict[bytes, tuple[ReplicaTarget, float]] = OrderedDict()  # with the time until which it holds
        self._queue: OrderedDict[bytes, None] = OrderedDict()  # every key of `_targets` and `_hot`
        self.unpins = Unpins(nodes)
        self._busy: set[bytes] = set()
        self._orders = 0

    def __len__(self) -> int:
        return len(self._targets)

    # ── wishes ───────────────────────────────────────────────────────────────────────────────────────

    def load(
        self, targets: Iterable[tuple[bytes, int, bool, int]], removed_since: Callable[[bytes, int], bool]
    ) -> None:
        """Takes the targets that an earlier leader left. Those of a block that was removed by prefix may still be among
        them."""
        for key, replicas, hard, after in targets:
            if removed_since(key, after):
                self._ended[key] = None
                continue
            self._targets[key] = ReplicaTarget(replicas, hard, after, inherited=hard)
            self._queue[key] = None

    def change(self, keys: Sequence[bytes], replicas: int, hard: bool, after: int = 0) -> None:
        """Sets the target of these keys; `replicas` 0 ends it. `after` is the last tombstone. Raises Overloaded, and
        changes nothing, when too many keys would have a target."""
        fresh = sum(key not in self._targets for key in keys) if replicas else 0
        if len(self._targets) + fresh > self._most:
            raise Overloaded(f"{len(self._targets)} blocks have a target of replicas, at most {self._most}")
        for key in keys:
            known = self._targets.pop(key, None)
            ever, inherited = (set(), False) if known is None else (known.ever, known.inherited)
            if not (replicas and hard):
                self.unpins.add(ever | (self._may_have(key) if inherited else set()), key)
                ever, inherited = set(), False
            if replicas:
                self._targets[key] = ReplicaTarget(replicas, hard, after, inherited, ever=ever)
                self._soon(key)

    def _may_have(self, key: bytes) -> set[Life]:
        """Returns the incarnations that have the block, or have yet to announce what they have: a block that is pinned
        hard is where it was pinned."""
        names = {*self._holders(key), *self._unheard()}
        return {(name, node.member.incarnation) for name in names if (node := self._nodes.get(name)) is not None}

    def hot(self, key: bytes, now: float) -> None:
        """Notes that a block is looked up much: for HOT_S it gets one copy more than there are now."""
        if key in self._hot or len(self._hot) >= MAX_HOT:
            return
        wanted = len(self.now(key, now)) + 1
        if 1 < wanted <= HOT_REPLICAS:
            self._hot[key] = (ReplicaTarget(wanted), now + HOT_S)
            self._soon(key)

    def removed(self, keys: Iterable[bytes]) -> list[bytes]:
        """Ends the targets of these blocks, which are removed everywhere. Returns the keys that had one."""
        gone = []
        for key in keys:
            self._hot.pop(key, None)
            if self._targets.pop(key, None) is not None:
                gone.append(key)
        return gone

    def removed_prefix(self, prefix: bytes, seq: int) -> None:
        """Ends the targets of all blocks that begin with `prefix` and were wished for before this tombstone. `sweep`
        clears them away."""
        for key in [key for key in self._hot if key.startswith(prefix)]:
            del self._hot[key]
        self._swept.begin(prefix, seq, len(self._targets))

    def sweep(self, most: int) -> bool:
        """Clears away up to `most` targets that are over. Returns whether there are more."""
        for key in self._swept.step(self._targets, lambda target: target.after, most):
            del self._targets[key]
            self._ended[key] = None
        return bool(self._swept)

    def target(self, key: bytes) -> ReplicaTarget | None:
        """Returns the target of a block; None if it has none."""
        found = self._targets.get(key)
        return None if found is None or self._swept.covers(key, found.after) else found

    @property
    def owes(self) -> bool:
        """Whether any target that is written down is over."""
        return bool(self._ended)

    def take_ended(self, most: int) -> list[bytes]:
        """Returns keys of targets that need not be written down any more, up to `most`."""
        some = list(itertools.islice(self._ended, most))
        for key in some:
            del self._ended[key]
        return [key for key in some if self.target(key) is None]

    def not_kept(self, ended: Iterable[bytes]) -> None:
        """Takes keys back whose targets could not be dropped from what is written down."""
        self._ended.update(dict.fromkeys(ended))

    def now(self, key: bytes, now: float) -> set[str]:
        """Returns the live nodes that have the block, or are about to."""
        seen = self._pending.seen(key, set(self._holders(key)), now)
        return {name for name in seen if name in self._nodes}

    # ── work ─────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float, after: int, rng: random.Random) -> list[Order]:
        """Returns what to order now. `after` is the last tombstone."""
        while self._hot and next(iter(self._hot.values()))[1] <= now:
            self._hot.popitem(last=False)
        needs = _Needs()
        for _ in range(min(LOOK, len(self._queue))):
            key, _ = self._queue.popitem(last=False)
            if self.target(key) is not None or key in self._hot:
                self._queue[key] = None
                if key not in self._busy:
                    self._look(key, now, needs)
        orders: list[Order] = []
        for holders, keys in needs.pulls.items():
            while keys and self._orders < MAX_ORDERS:
                pull = self._copying.begin(holders, keys, after, now, rng)
                if pull is None:
                    break
                orders.append(self._order(pull, partial(self._pulled, pull)))
                keys = keys[len(pull.keys) :]
        for (victim, keepers, spare), keys in needs.trims.items():
            if self._orders < MAX_ORDERS and (holder := self._copying.members((victim,))):
                trim = TrimOrder(holder[0], self._copying.members(keepers), tuple(keys[:MAX_KEYS]), spare)
                orders.append(self._order(trim, partial(self._trimmed, trim)))
        for name, keys in needs.pins.items():
            if self._orders < MAX_ORDERS and (holder := self._copying.members((name,))):
                pin = PinOrder(holder[0], tuple(keys[:MAX_KEYS]), hard=True)
                orders.append(self._order(pin, partial(self._pinned, pin)))
        return orders + self._unpins(now)

    def _look(self, key: bytes, now: float, needs: _Needs) -> None:
        """Adds what this key needs first to `needs`."""
        target, hot = self.target(key), self._hot.get(key)
        state = target or (hot[0] if hot else None)
        assert state is not None, "a key with a wish"
        holders = self.now(key, now)
        if now < state.not_before or not holders:
            return
        if target is not None and target.hard:
            lives = {(name, n.member.incarnation) for name in holders if (n := self._nodes.get(name)) is not None}
            if now >= target.pin_again_at:
                target.pinned, target.pin_again_at = set(), now + PIN_AGAIN_S
                target.ever = {life for life in target.ever if not self._is_over(life)}
            target.pinned &= lives
            unpinned = sorted(lives - target.pinned)
            pin_failed, target.pin_failed = target.pin_failed, False
            if unpinned and not pin_failed:  # a pin that always fails must not keep copies from being made
                needs.pins.setdefault(unpinned[0][0], []).append(key)
                return
        wanted = max(target.replicas if target else 0, hot[0].replicas if hot else 0)
        # A draining node's blocks leave with it: they do not count as copies, and can only be copied from.
        staying = {name for name in holders if (n := self._nodes.get(name)) is not None and not n.draining}
        if len(staying) < wanted:
            needs.pulls.setdefault(tuple(sorted(holders)), []).append(key)
        elif target is not None and len(staying) > wanted:
            # After a node that did not remove the block (somebody else has pinned it there) the next one is asked.
            # The pins of a hard target itself do not protect the block.
            victims = sorted(staying, key=self._uselessness, reverse=True)
            victim = victims[target.failures % len(victims)]
            trim = (victim, tuple(sorted(staying - {victim})), not target.hard)
            needs.trims.setdefault(trim, []).append(key)
        elif target is not None and target.failures:
            target.failures = 0

    def _is_over(self, life: Life) -> bool:
        """Whether another incarnation has taken the name. One whose node is no member now may join again."""
        node = self._nodes.get(life[0])
        return node is not None and node.member.incarnation != life[1]

    def _uselessness(self, name: str) -> tuple[bool, int, str]:
        """Returns the order in which copies go: first those at nodes that compute nothing, and there where room is
        scarcest."""
        node = self._nodes.get(name)
        assert node is not None, "only live nodes are asked"
        return (node.member.role is NodeRole.POOL, -node.free_bytes, name)

    def _unpins(self, now: float) -> list[Order]:
        orders = []
        for (name, _), keys in self.unpins.due(self._busy, self._is_pinned, now).items():
            if holder := self._copying.members((name,)):
                pin = PinOrder(holder[0], tuple(keys), hard=False)
                orders.append(self._order(pin, partial(self._unpinned, pin)))
        return orders

    def _is_pinned(self, key: bytes) -> bool:
        target = self.target(key)
        return target is not None and target.hard

    def _order(self, work: Work, then: Then) -> Order:
        self._orders += 1
        self._busy.update(work.keys)

        def ended(done: frozenset[bytes], answered: bool, now: float) -> None:
            self._orders -= 1
            self._busy.difference_update(work.keys)
            then(done, answered, now)

        return Order(work, ended)

    # ── outcomes ─────────────────────────────────────────────────────────────────────────────────────

    def _pulled(self, work: PullOrder, done: frozenset[bytes], answered: bool, now: float) -> None:
        self._copying.ended(work, done, answered, now)
        for key in done:
            if (target := self.target(key)) is not None:
                target.pinned.discard((work.receiver.instance_id, work.receiver.incarnation))
        self._judge(work.keys, done, now)

    def _trimmed(self, work: TrimOrder, done: frozenset[bytes], answered: bool, now: float) -> None:
        self._pending.expect(done, work.holder.instance_id, False, now)
        self._judge(work.keys, done, now)

    def _pinned(self, work: PinOrder, done: frozenset[bytes], answered: bool, now: float) -> None:
        life = (work.holder.instance_id, work.holder.incarnation)
        for key in done:
            target = self.target(key)
            if target is not None and target.hard:
                target.pinned.add(life)
                target.ever.add(life)
            else:
                self.unpins.add((life,), key)
        for key in work.keys:
            if key not in done and (target := self.target(key)) is not None:
                target.pin_failed = True
        self._judge(work.keys, done, now)

    def _unpinned(self, work: PinOrder, done: frozenset[bytes], answered: bool, now: float) -> None:
        """Handles the answer to an unpin order. A node that did not answer is asked again, as long as it lives."""
        node = self._nodes.get(work.holder.instance_id)
        if answered:
            self.unpins.done((work.holder.instance_id, work.holder.incarnation), work.keys)
        elif node is not None and node.member == work.holder:
            node.avoid_until = now + AVOID_S

    def _judge(self, asked: Iterable[bytes], done: frozenset[bytes], now: float) -> None:
        """Looks soon again at keys for which the order was done, as they may need more, and later at the others."""
        for key in asked:
            hot = self._hot.get(key)
            state = self.target(key) or (hot[0] if hot else None)
            if state is None:
                continue
            if key in done:
                state.not_before = now
                self._soon(key)
            else:
                state.not_before = now + min(RETRY_S[1], RETRY_S[0] * 2 ** min(state.failures, 16))
                state.failures += 1

    def _soon(self, key: bytes) -> None:
        self._queue[key] = None
        self._queue.move_to_end(key, last=False)
