"""This module knows what the map does not show yet, or no longer.

It knows which members have announced all that they have, what nodes have acknowledged and not announced, what a client
has put and its node not announced, and what the master took out of stores by itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.tiers import Tier, split_name
from kvmesh.rpc.pb.store_pb2 import StoreUsage

# A node is known when each of its tiers has announced without a gap. Its heartbeats name its tiers.

DRAM = frozenset({Tier.DRAM})


class KnownHolders:
    """Keeps the members, by instance id, that have announced all that they have since they joined. Of any other member,
    what the map does not show is no proof. Every step is O(tiers of one node)."""

    def __init__(self) -> None:
        self._told: dict[str, set[Tier]] = {}
        self._tiers: dict[str, frozenset[Tier]] = {}
        self._cut: set[str] = set()
        self._waiting: dict[str, None] = {}

    def __contains__(self, instance_id: object) -> bool:
        return instance_id in self._told and instance_id not in self._waiting

    @property
    def unheard(self) -> list[str]:
        """The members that have yet to announce all that they have, the oldest first."""
        return list(self._waiting)

    def joined(self, instance_id: str) -> None:
        """Adds a member. The same incarnation may join again."""
        if instance_id not in self._told:
            self._told[instance_id], self._tiers[instance_id] = set(), DRAM
            self._waiting[instance_id] = None

    def beat(self, instance_id: str, usage: StoreUsage | None) -> None:
        """Takes a heartbeat, which names the member's tiers."""
        if usage is not None and instance_id in self._told:
            self._tiers[instance_id] = DRAM | {Tier(use.tier) for use in usage.tiers}
            self._judge(instance_id)

    def said(self, store_id: str, *, in_full: bool) -> None:
        """Notes that a tier has announced. `in_full` says that all that it has is in the map now."""
        instance_id, tier = split_name(store_id)
        if instance_id in self._told:
            (self._told[instance_id].add if in_full else self._told[instance_id].discard)(tier)
            self._judge(instance_id)

    def cut(self, store_id: str, some: bool) -> None:
        """Notes whether `some` of what a store announced has found no room in the map; that lasts until its next
        snapshot."""
        (self._cut.add if some else self._cut.discard)(store_id)

    def is_cut(self, store_id: str) -> bool:
        """Whether the map lacks blocks of the store until its next snapshot."""
        return store_id in self._cut

    def ended(self, instance_id: str) -> None:
        """Forgets a member that has ended."""
        self._told.pop(instance_id, None)
        self._tiers.pop(instance_id, None)
        self._waiting.pop(instance_id, None)
        self._cut = {name for name in self._cut if split_name(name)[0] != instance_id} if self._cut else self._cut

    def _judge(self, instance_id: str) -> None:
        if self._tiers[instance_id] <= self._told[instance_id]:
            self._waiting.pop(instance_id, None)
        else:
            self._waiting[instance_id] = None


SETTLE_S = 5.0


class PendingChanges:
    """Maps (key, instance) to whether the key will be there: what nodes have acknowledged and not announced yet, until
    it shows in the map, or SETTLE_S are over."""

    def __init__(self) -> None:
        self._until: OrderedDict[tuple[bytes, str], float] = OrderedDict()
        self._by_key: dict[bytes, dict[str, bool]] = {}

    def __len__(self) -> int:
        return len(self._until)

    def expect(self, keys: Iterable[bytes], instance_id: str, present: bool, now: float) -> None:
        """Notes that `instance_id` has just answered that it has, or no longer has, these keys."""
        for key in keys:
            self._until[key, instance_id] = now + SETTLE_S
            self._until.move_to_end((key, instance_id))
            self._by_key.setdefault(key, {})[instance_id] = present

    def seen(self, key: bytes, holders: set[str], now: float) -> set[str]:
        """Returns the holders of `key` as they will be: `holders`, which the map shows, with what is pending."""
        while self._until:
            (old, instance_id), until = next(iter(self._until.items()))
            if until > now:
                break
            self._drop(old, instance_id)
        expected = self._by_key.get(key)
        if expected is None:
            return holders
        for instance_id, present in list(expected.items()):
            if present == (instance_id in holders):
                self._drop(key, instance_id)
            elif present:
                holders = holders | {instance_id}
            else:
                holders = holders - {instance_id}
        return holders

    def ended(self, instance_id: str) -> None:
        """Forgets what a member has acknowledged that has ended."""
        for key, name in [pair for pair in self._until if pair[1] == instance_id]:
            self._drop(key, name)

    def _drop(self, key: bytes, instance_id: str) -> None:
        del self._until[key, instance_id]
        left = self._by_key[key]
        del left[instance_id]
        if not left:
            del self._by_key[key]


# A node announces a block some milliseconds after it has sealed it, and a client binds its name at once. Whoever
# resolves the name in between is told of the node that the client has put the block at. Like all that the master says
# of blocks, that is only a hint: the node itself knows whether it has the block.

NODE_S = 30.0  # a node has announced a sealed block by then
MOST = 65_536


class Unannounced:
    """Maps a key to the node that has sealed it, as a client says, for NODE_S. It has at most `most` keys; the oldest
    is forgotten first."""

    def __init__(self, removed_since: Callable[[bytes, int], bool], most: int = MOST) -> None:
        self._removed_since = removed_since
        self._most = most
        self._known: OrderedDict[bytes, tuple[str, int, int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def sealed(self, keys: Iterable[bytes], instance_id: str, incarnation: int, after: int, now: float) -> None:
        """Notes that, as a client says, this incarnation has sealed the keys. `after` is the last tombstone now. Its
        amortised cost is O(1) for each key."""
        known = self._known
        for key in keys:
            known[key] = (instance_id, incarnation, after, now + NODE_S)
            known.move_to_end(key)
        while known and (len(known) > self._most or next(iter(known.values()))[3] <= now):
            known.popitem(last=False)

    def holder(self, key: bytes, now: float) -> tuple[str, int] | None:
        """Returns the instance and incarnation that sealed this key last, as a client said; None if none did lately, or
        the block has been removed since."""
        found = self._known.get(key)
        if found is None:
            return None
        instance_id, incarnation, after, until = found
        if until <= now or self._removed_since(key, after):
            del self._known[key]
            return None
        return instance_id, incarnation


# A store announces what has changed since its last announcement. Where a key that it had announced is removed by a
# tombstone and sealed anew before its next announcement, nothing has changed for the store, and it does not name the
# key, while the map lacks it. So a store that has applied the tombstone and does not name such a key owes a snapshot.

PATIENCE = 3  # announcements; the first may have been on its way, or be one of several that belong together
MAX_OPEN = 65_536  # keys of one store; with more it owes a snapshot at once


class UnconfirmedRemovals:
    """Keeps the keys that the master took out of stores by itself, and of which these stores have yet to announce what
    became of them. It has at most MAX_OPEN keys of a store."""

    def __init__(self) -> None:
        self._open: dict[str, dict[bytes, None]] = {}
        self._heard: dict[str, int] = {}

    def dropped(self, store_id: str, keys: Iterable[bytes]) -> bool:
        """Notes that the map does not show these keys of the store any more. Returns False when there are too many to
        wait for."""
        still = self._open.setdefault(store_id, {})
        still.update(dict.fromkeys(keys))
        if len(still) > MAX_OPEN:
            self.settled(store_id)
            return False
        self._heard[store_id] = 0
        return True

    def take_announcement(self, said: Announcement, behind: bool) -> None:
        """Takes an announcement that is new, or that has no news. `behind` says that the store has yet to apply a
        tombstone."""
        still = self._open.get(said.store_id)
        if still is None:
            return
        for keys in (said.removed, said.sealed):
            for key in keys:
                still.pop(key, None)
        if not still:
            self.settled(said.store_id)
        elif not behind:
            complete = not (said.sealed or said.removed)
            self._heard[said.store_id] += PATIENCE if complete else 1

    def wants_snapshot(self, store_id: str) -> bool:
        """Whether the store should have announced what became of the keys by now, and has not."""
        return self._heard.get(store_id, 0) >= PATIENCE

    def settled(self, store_id: str) -> None:
        """Ends waiting for a store, because it has announced everything or its member has ended."""
        self._open.pop(store_id, None)
        self._heard.pop(store_id, None)
