"""The members as policies see them, and who is to take a copy."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from kvmesh.rpc.pb.store_pb2 import StoreUsage
from services.store.domain import Member, Role

AVOID_S = 10.0  # a node that failed a call gets no copies for so long
MAX_PULLS = 4  # under way at one receiver


@dataclass(slots=True)
class Node:
    """One life. `pledged`: bytes of pulls under way, `pulls`: how many; `avoid_until`: it failed lately."""

    member: Member
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
        """Of what it holds; 0: nobody knows."""
        if self.usage is None or not self.usage.blocks:
            return 0
        return (self.usage.capacity_bytes - self.usage.free_bytes) // self.usage.blocks


class Nodes:
    """All live members by instance id."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._nodes

    def get(self, instance_id: str) -> Node | None:
        """None: it is no member."""
        return self._nodes.get(instance_id)

    def joined(self, member: Member, draining: bool) -> None:
        """A life begins; the same life may join again."""
        known = self._nodes.get(member.instance_id)
        if known is None or known.member != member:
            self._nodes[member.instance_id] = Node(member, draining=draining)

    def ended(self, instance_id: str) -> None:
        """A life has ended."""
        self._nodes.pop(instance_id, None)

    def receiver(self, without: Collection[str], now: float, rng: random.Random) -> Node | None:
        """A pool node to take a copy: the one with more room of two, so that an empty one does not draw everything.
        Another machine than those in `without` (instance ids) are on, when there is one; never one of them."""
        able = [
            node
            for node in self._nodes.values()
            if node.member.role is Role.POOL
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
