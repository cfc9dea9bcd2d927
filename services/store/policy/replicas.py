"""How many nodes should hold a block: targets that somebody has set, and one copy more of what is asked for much.

Every tick looks at some of the keys that have a target, the newest wishes first, and orders what is missing (a pool
node pulls a copy) or too much (the least useful copy goes, once all others are confirmed). One order at a time for a
key; what failed is tried again after a time that doubles up to RETRY_S[1], at another node. What was acknowledged
counts before the map shows it, and no longer than SETTLE_S.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvmesh.rpc.errors import Overloaded
from services.store.domain import Role
from services.store.policy.copying import Copying
from services.store.policy.nodes import AVOID_S, Nodes
from services.store.policy.settling import Settling
from services.store.policy.work import MAX_KEYS, Order, Pin, Pull, Then, Trim, Work

LOOK = 1024  # keys in one tick
MAX_ORDERS = 32  # under way
RETRY_S = (0.5, 60.0)
PIN_AGAIN_S = 120.0  # a block that went and came again at a node has lost its pin there
MAX_UNPINS = 1 << 16  # yet to be undone, at nodes that are away too
MAX_HOT = 1024
HOT_REPLICAS = 4  # a hot block gets no more copies than make so many
HOT_S = 60.0

Life = tuple[str, int]  # instance id, incarnation


@dataclass(slots=True)
class Target:
    """`replicas` nodes, 1 or more. `pinned`: the lives at which it is pinned hard for all we know; `ever`: at which it
    was pinned at any time."""

    replicas: int
    hard: bool = False
    pinned: set[Life] = field(default_factory=set)
    ever: set[Life] = field(default_factory=set)
    pin_again_at: float = float("-inf")
    failures: int = 0
    not_before: float = float("-inf")


@dataclass
class _Needs:
    """Of one tick, together for keys that need the same."""

    pulls: dict[tuple[str, ...], list[bytes]] = field(default_factory=dict)
    trims: dict[tuple[str, tuple[str, ...], bool], list[bytes]] = field(default_factory=dict)
    pins: dict[str, list[bytes]] = field(default_factory=dict)


class Replicas:
    """`holders(key)`: instance ids by the map, in whichever tier."""

    def __init__(
        self,
        nodes: Nodes,
        holders: Callable[[bytes], Iterable[str]],
        copying: Copying,
        settling: Settling,
        *,
        most: int = 1 << 20,
    ) -> None:
        self._nodes = nodes
        self._holders = holders
        self._copying = copying
        self._settling = settling
        self._most = most
        self._targets: dict[bytes, Target] = {}
        self._hot: OrderedDict[bytes, tuple[Target, float]] = OrderedDict()  # until when
        self._queue: OrderedDict[bytes, None] = OrderedDict()  # every key of both
        self._unpin: deque[tuple[Life, bytes]] = deque(maxlen=MAX_UNPINS)
        self._busy: set[bytes] = set()
        self._orders = 0

    def __len__(self) -> int:
        return len(self._targets)

    # ── wishes ───────────────────────────────────────────────────────────────────────────────────────

    def load(self, targets: Iterable[tuple[bytes, int, bool]]) -> None:
        """What an earlier leader left."""
        for key, replicas, hard in targets:
            self._targets[key] = Target(replicas, hard)
            self._queue[key] = None

    def change(self, keys: Sequence[bytes], replicas: int, hard: bool) -> None:
        """`replicas` 0: no target any more. Raises Overloaded: too many keys have one, nothing is changed."""
        fresh = sum(key not in self._targets for key in keys) if replicas else 0
        if len(self._targets) + fresh > self._most:
            raise Overloaded(f"{len(self._targets)} blocks have a target of replicas, at most {self._most}")
        for key in keys:
            known = self._targets.pop(key, None)
            ever = set() if known is None else known.ever
            if not (replicas and hard):
                self._unpin.extend((life, key) for life in ever)
                ever = set()
            if replicas:
                self._targets[key] = Target(replicas, hard, ever=ever)
                self._soon(key)

    def hot(self, key: bytes, now: float) -> None:
        """It is asked for much: one copy more than there are now, for HOT_S."""
        if key in self._hot or len(self._hot) >= MAX_HOT:
            return
        wanted = len(self.now(key, now)) + 1
        if 1 < wanted <= HOT_REPLICAS:
            self._hot[key] = (Target(wanted), now + HOT_S)
            self._soon(key)

    def removed(self, keys: Iterable[bytes]) -> list[bytes]:
        """These blocks are gone everywhere, and what was wished for them; those that had a target."""
        gone = []
        for key in keys:
            self._hot.pop(key, None)
            if self._targets.pop(key, None) is not None:
                gone.append(key)
        return gone

    def removed_prefix(self, prefix: bytes) -> list[bytes]:
        """As `removed`. O(targets)."""
        return self.removed([key for key in (*self._targets, *self._hot) if key.startswith(prefix)])

    def now(self, key: bytes, now: float) -> set[str]:
        """Live nodes that have it, or are about to."""
        seen = self._settling.seen(key, set(self._holders(key)), now)
        return {name for name in seen if name in self._nodes}

    # ── work ─────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float, after: int, rng: random.Random) -> list[Order]:
        """What to order now. `after`: the last tombstone."""
        while self._hot and next(iter(self._hot.values()))[1] <= now:
            self._hot.popitem(last=False)
        needs = _Needs()
        for _ in range(min(LOOK, len(self._queue))):
            key, _ = self._queue.popitem(last=False)
            if key in self._targets or key in self._hot:
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
                trim = Trim(holder[0], self._copying.members(keepers), tuple(keys[:MAX_KEYS]), spare)
                orders.append(self._order(trim, partial(self._trimmed, trim)))
        for name, keys in needs.pins.items():
            if self._orders < MAX_ORDERS and (holder := self._copying.members((name,))):
                pin = Pin(holder[0], tuple(keys[:MAX_KEYS]), hard=True)
                orders.append(self._order(pin, partial(self._pinned, pin)))
        return orders + self._unpins(now)

    def _look(self, key: bytes, now: float, needs: _Needs) -> None:
        """What this key needs first."""
        target, hot = self._targets.get(key), self._hot.get(key)
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
            if unpinned and target.failures % 2 == 0:  # a pin that cannot be must not keep copies from being made
                needs.pins.setdefault(unpinned[0][0], []).append(key)
                return
        wanted = max(target.replicas if target else 0, hot[0].replicas if hot else 0)
        # What a draining node has goes with it: that is no copy, only something to copy from.
        staying = {name for name in holders if (n := self._nodes.get(name)) is not None and not n.draining}
        if len(staying) < wanted:
            needs.pulls.setdefault(tuple(sorted(holders)), []).append(key)
        elif target is not None and len(staying) > wanted:
            # One that has not done it, as where somebody else has pinned the block, is followed by the next. A target
            # that pins has pinned it everywhere by itself.
            victims = sorted(staying, key=self._uselessness, reverse=True)
            victim = victims[target.failures % len(victims)]
            trim = (victim, tuple(sorted(staying - {victim})), not target.hard)
            needs.trims.setdefault(trim, []).append(key)
        elif target is not None and target.failures:
            target.failures = 0

    def _is_over(self, life: Life) -> bool:
        """Another has taken its name. One that is no member now may join again."""
        node = self._nodes.get(life[0])
        return node is not None and node.member.incarnation != life[1]

    def _uselessness(self, name: str) -> tuple[bool, int, str]:
        """A copy where nobody computes, and where room is scarcest, goes first."""
        node = self._nodes.get(name)
        assert node is not None, "only live nodes are asked"
        return (node.member.role is Role.POOL, -node.free_bytes, name)

    def _unpins(self, now: float) -> list[Order]:
        by_life: dict[Life, list[bytes]] = {}
        for _ in range(min(LOOK, len(self._unpin))):
            life, key = self._unpin.popleft()
            node, target = self._nodes.get(life[0]), self._targets.get(key)
            if (target is not None and target.hard) or (node is not None and node.member.incarnation != life[1]):
                continue  # it is wished for again, or its pins ended with that life
            if node is None:
                self._unpin.append((life, key))  # no member now: the same life may join again
                continue
            keys = by_life.setdefault(life, [])
            if key in self._busy or now < node.avoid_until or len(keys) >= MAX_KEYS:
                self._unpin.append((life, key))
            else:
                keys.append(key)
        orders = []
        for (name, _), keys in by_life.items():
            if keys and (holder := self._copying.members((name,))):
                pin = Pin(holder[0], tuple(keys), hard=False)
                orders.append(self._order(pin, partial(self._unpinned, pin)))
        return orders

    def _order(self, work: Work, then: Then) -> Order:
        self._orders += 1
        self._busy.update(work.keys)

        def ended(done: frozenset[bytes], answered: bool, now: float) -> None:
            self._orders -= 1
            self._busy.difference_update(work.keys)
            then(done, answered, now)

        return Order(work, ended)

    # ── outcomes ─────────────────────────────────────────────────────────────────────────────────────

    def _pulled(self, work: Pull, done: frozenset[bytes], answered: bool, now: float) -> None:
        self._copying.ended(work, done, answered, now)
        for key in done:
            if (target := self._targets.get(key)) is not None:
                target.pinned.discard((work.receiver.instance_id, work.receiver.incarnation))
        self._judge(work.keys, done, now)

    def _trimmed(self, work: Trim, done: frozenset[bytes], answered: bool, now: float) -> None:
        self._settling.expect(done, work.holder.instance_id, False, now)
        self._judge(work.keys, done, now)

    def _pinned(self, work: Pin, done: frozenset[bytes], answered: bool, now: float) -> None:
        life = (work.holder.instance_id, work.holder.incarnation)
        for key in done:
            target = self._targets.get(key)
            if target is not None and target.hard:
                target.pinned.add(life)
                target.ever.add(life)
            else:
                self._unpin.append((life, key))
        self._judge(work.keys, done, now)

    def _unpinned(self, work: Pin, done: frozenset[bytes], answered: bool, now: float) -> None:
        """A node that did not answer is asked again, as long as it lives."""
        node = self._nodes.get(work.holder.instance_id)
        if not answered and node is not None and node.member == work.holder:
            node.avoid_until = now + AVOID_S
            self._unpin.extend(((node.member.instance_id, node.member.incarnation), key) for key in work.keys)

    def _judge(self, asked: Iterable[bytes], done: frozenset[bytes], now: float) -> None:
        """Those that are done may need more at once, the others are tried again later."""
        for key in asked:
            hot = self._hot.get(key)
            state = self._targets.get(key) or (hot[0] if hot else None)
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
