"""This module has what replicas and drains share: the members as policies see them, the orders that the master gives to
nodes, and the copies under way with the room that is pledged for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from kvmesh.rpc.pb.store_pb2 import StoreUsage
from kvmesh.services.store.domain import NodeRole, RegisteredNode
from kvmesh.services.store.policy.reconciliation import PendingChanges

AVOID_S = 10.0  # a node that failed a call gets no copies for so long
MAX_PULLS = 4  # pulls under way at one receiver


@dataclass(slots=True)
class MemberNode:
    """Is one member as policies see it. `pulls` counts the pulls under way to it and `pledged` their bytes. Until
    `avoid_until` it gets no copies, as a call to it has failed."""

    member: RegisteredNode
    usage: StoreUsage | None = None
    draining: bool = False
    pledged: int = 0
    pulls: int = 0
    avoid_until: float = float("-inf")

    @property
    def free_bytes(self) -> int:
        return 0 if self.usage is None else self.usage.free_bytes - self.pledged

    @property
    def mean_block_bytes(self) -> int:
        """The mean size of the blocks that the node holds; 0 when it is not known."""
        if self.usage is None or not self.usage.blocks:
            return 0
        return (self.usage.capacity_bytes - self.usage.free_bytes) // self.usage.blocks


class Nodes:
    """Keeps all live members by instance id."""

    def __init__(self) -> None:
        self._nodes: dict[str, MemberNode] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[MemberNode]:
        return iter(self._nodes.values())

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._nodes

    def get(self, instance_id: str) -> MemberNode | None:
        """Returns the node of that name; None when it is no member."""
        return self._nodes.get(instance_id)

    def joined(self, member: RegisteredNode, draining: bool) -> None:
        """Adds a member. The same incarnation may join again."""
        known = self._nodes.get(member.instance_id)
        if known is None or known.member != member:
            self._nodes[member.instance_id] = MemberNode(member, draining=draining)

    def ended(self, instance_id: str) -> None:
        """Forgets a member that has ended."""
        self._nodes.pop(instance_id, None)

    def receiver(self, without: Collection[str], now: float, rng: random.Random) -> MemberNode | None:
        """Returns a pool node to take a copy, or None: of two drawn at random the one with more free bytes, so that an
        empty node does not get all copies. The nodes in `without` (instance ids) are never chosen, and a node on
        another machine than theirs is preferred."""
        able = [
            node
            for node in self._nodes.values()
            if node.member.role is NodeRole.POOL
            and not node.draining
            and node.member.instance_id not in without
            and node.pulls < MAX_PULLS
            and node.free_bytes > 0
            and now >= node.avoid_until
        ]
        machines = {known.member.node_id for name in without if (known := self._nodes.get(name)) is not None}
        able = [node for node in able if node.member.node_id not in machines] or able
        two = rng.sample(able, min(2, len(able)))
        return max(two, key=lambda node: node.free_bytes, default=None)


# ── orders ──────────────────────────────────────────────────────────────────────────────────────

MAX_KEYS = 64  # keys in one order


@dataclass(frozen=True)
class PullOrder:
    """Orders `receiver` to copy `keys`, about `nbytes`, from `holders`, tried in this order. `after` is the last
    tombstone at the time of the order. With `pins` a block that is pinned hard at its holder is pinned hard at the
    receiver too, or not copied."""

    receiver: RegisteredNode
    holders: tuple[RegisteredNode, ...]
    keys: tuple[bytes, ...]
    nbytes: int
    after: int
    pins: bool = False


@dataclass(frozen=True)
class TrimOrder:
    """Orders to remove, at `holder`, those of `keys` that each of `keepers` has. With `spare`, blocks that somebody has
    pinned hard at the holder stay, and do not count as done."""

    holder: RegisteredNode
    keepers: tuple[RegisteredNode, ...]
    keys: tuple[bytes, ...]
    spare: bool = True


@dataclass(frozen=True)
class PinOrder:
    """Orders to pin `keys` hard at `holder`, or to unpin them."""

    holder: RegisteredNode
    keys: tuple[bytes, ...]
    hard: bool


@dataclass(frozen=True)
class DiscardOrder:
    """Orders to remove `keys` at `holder`, which was copying them while they were removed everywhere."""

    holder: RegisteredNode
    keys: tuple[bytes, ...]


Work = PullOrder | TrimOrder | PinOrder | DiscardOrder
Then = Callable[[frozenset[bytes], bool, float], None]


@dataclass(frozen=True)
class Order:
    """Is work for a node. `then(done, answered, now)` is to be called with the keys for which the work was done, and
    whether the node answered at all."""

    work: Work
    then: Then


# ── copies under way ────────────────────────────────────────────────────────────────────────────


class Copying:
    """Begins and ends copies, and keeps account of the room that is pledged for them. `removed_since(key, seq)` is as
    in Tombstones."""

    def __init__(self, nodes: Nodes, settling: PendingChanges, removed_since: Callable[[bytes, int], bool]) -> None:
        self._nodes = nodes
        self._settling = settling
        self._removed_since = removed_since
        self._discards: list[DiscardOrder] = []

    def begin(
        self,
        sources: Sequence[str],
        keys: Sequence[bytes],
        after: int,
        now: float,
        rng: random.Random,
        *,
        pins: bool = False,
    ) -> PullOrder | None:
        """Orders a pool node that is none of `sources` to pull the first MAX_KEYS of `keys` from them. Returns None
        when no node has room. `after` is the last tombstone; `pins` is as in PullOrder."""
        receiver = self._nodes.receiver(sources, now, rng)
        holders = [node for name in sources if (node := self._nodes.get(name)) is not None]
        if receiver is None or not holders:
            return None
        some = tuple(keys[:MAX_KEYS])
        rng.shuffle(holders)
        nbytes = len(some) * max(node.mean_block_bytes for node in holders)
        receiver.pledged += nbytes
        receiver.pulls += 1
        return PullOrder(receiver.member, tuple(node.member for node in holders), some, nbytes, after, pins)

    def ended(self, work: PullOrder, done: frozenset[bytes], answered: bool, now: float) -> None:
        """Notes that a copy has ended. `done` are the keys that the receiver has now. A receiver that did not answer
        gets no copies for AVOID_S."""
        node = self._nodes.get(work.receiver.instance_id)
        if node is None or node.member != work.receiver:
            return
        node.pledged -= work.nbytes
        node.pulls -= 1
        if not answered:
            node.avoid_until = now + AVOID_S
        self._settling.expect(done, work.receiver.instance_id, True, now)
        if gone := tuple(key for key in work.keys if self._removed_since(key, work.after)):
            self._discards.append(DiscardOrder(work.receiver, gone))

    def discards(self) -> list[DiscardOrder]:
        """Returns orders to remove copies of blocks that were removed while they were copied. Each is returned once."""
        found, self._discards = self._discards, []
        return found

    def members(self, names: Sequence[str]) -> tuple[RegisteredNode, ...]:
        """Returns those of these nodes that live."""
        return tuple(node.member for name in names if (node := self._nodes.get(name)) is not None)
