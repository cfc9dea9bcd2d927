"""Copies under way, whoever wishes for them: room that is pledged, and what comes of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from services.store.domain import Member
from services.store.policy.nodes import AVOID_S, Nodes
from services.store.policy.pending_changes import PendingChanges
from services.store.policy.work import MAX_KEYS, Discard, Pull


class Copying:
    """`removed_since(key, seq)`: see Tombstones."""

    def __init__(self, nodes: Nodes, settling: PendingChanges, removed_since: Callable[[bytes, int], bool]) -> None:
        self._nodes = nodes
        self._settling = settling
        self._removed_since = removed_since
        self._discards: list[Discard] = []

    def begin(
        self,
        sources: Sequence[str],
        keys: Sequence[bytes],
        after: int,
        now: float,
        rng: random.Random,
        *,
        pins: bool = False,
    ) -> Pull | None:
        """A pool node that is none of `sources` pulls the first MAX_KEYS of `keys` from them. None: nobody has room.
        `after`: the last tombstone. `pins`: see Pull."""
        receiver = self._nodes.receiver(sources, now, rng)
        holders = [node for name in sources if (node := self._nodes.get(name)) is not None]
        if receiver is None or not holders:
            return None
        some = tuple(keys[:MAX_KEYS])
        rng.shuffle(holders)
        nbytes = len(some) * max(node.mean_block_bytes for node in holders)
        receiver.pledged += nbytes
        receiver.pulls += 1
        return Pull(receiver.member, tuple(node.member for node in holders), some, nbytes, after, pins)

    def ended(self, work: Pull, done: frozenset[bytes], answered: bool, now: float) -> None:
        """`done`: those that are there now. A receiver that did not answer gets nothing for a while."""
        node = self._nodes.get(work.receiver.instance_id)
        if node is None or node.member != work.receiver:
            return
        node.pledged -= work.nbytes
        node.pulls -= 1
        if not answered:
            node.avoid_until = now + AVOID_S
        self._settling.expect(done, work.receiver.instance_id, True, now)
        if gone := tuple(key for key in work.keys if self._removed_since(key, work.after)):
            self._discards.append(Discard(work.receiver, gone))

    def discards(self) -> list[Discard]:
        """Copies of what was removed while they were made: to be removed too."""
        found, self._discards = self._discards, []
        return found

    def members(self, names: Sequence[str]) -> tuple[Member, ...]:
        """Those of them that live."""
        return tuple(node.member for name in names if (node := self._nodes.get(name)) is not None)
