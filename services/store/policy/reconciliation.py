"""What the map does not show yet, or no longer.

Which members have told all that they have; what nodes have acknowledged and not announced; what a client has put and
its node not announced; what the master took out of stores by itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.tiers import Tier, split_name
from kvmesh.rpc.pb.store_pb2 import StoreUsage

# A node is known when each of its tiers has announced without a gap. Which tiers it has it says in its heartbeats.

DRAM = frozenset({Tier.DRAM})


class KnownHolders:
    """Which members have told all that they have since they joined, by instance id: until then what they do not show is
    no proof. Every step is O(tiers of one node)."""

    def __init__(self) -> None:
        self._told: dict[str, set[Tier]] = {}
        self._tiers: dict[str, frozenset[Tier]] = {}
        self._cut: set[str] = set()
        self._waiting: dict[str, None] = {}

    def __contains__(self, instance_id: object) -> bool:
        return instance_id in self._told and instance_id not in self._waiting

    @property
    def unheard(self) -> list[str]:
        """Members that have something yet to tell, the oldest first."""
        return list(self._waiting)

    def joined(self, instance_id: str) -> None:
        """A life begins, or enters again."""
        if instance_id not in self._told:
            self._told[instance_id], self._tiers[instance_id] = set(), DRAM
            self._waiting[instance_id] = None

    def beat(self, instance_id: str, usage: StoreUsage | None) -> None:
        """A member says which tiers it has."""
        if usage is not None and instance_id in self._told:
            self._tiers[instance_id] = DRAM | {Tier(use.tier) for use in usage.tiers}
            self._judge(instance_id)

    def said(self, store_id: str, *, in_full: bool) -> None:
        """A tier has announced: all that it has is in the map, or something is missing there."""
        instance_id, tier = split_name(store_id)
        if instance_id in self._told:
            (self._told[instance_id].add if in_full else self._told[instance_id].discard)(tier)
            self._judge(instance_id)

    def cut(self, store_id: str, some: bool) -> None:
        """Note whether `some` of what it said has found no room in the map, until its next snapshot."""
        (self._cut.add if some else self._cut.discard)(store_id)

    def is_cut(self, store_id: str) -> bool:
        """Whether the map lacks something of it for good."""
        return store_id in self._cut

    def ended(self, instance_id: str) -> None:
        """A life is over."""
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
    """(key, instance) → whether the key will be there: what nodes have acknowledged and not announced yet, until it
    shows in the map, or SETTLE_S are over."""

    def __init__(self) -> None:
        self._until: OrderedDict[tuple[bytes, str], float] = OrderedDict()
        self._by_key: dict[bytes, dict[str, bool]] = {}

    def __len__(self) -> int:
        return len(self._until)

    def expect(self, keys: Iterable[bytes], instance_id: str, present: bool, now: float) -> None:
        """`instance_id` has just said that it has, or no longer has, these keys."""
        for key in keys:
            self._until[key, instance_id] = now + SETTLE_S
            self._until.move_to_end((key, instance_id))
            self._by_key.setdefault(key, {})[instance_id] = present

    def seen(self, key: bytes, holders: set[str], now: float) -> set[str]:
        """The holders as they will be, of those that the map shows."""
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
        """Forget what a life has said that is over."""
        for key, name in [pair for pair in self._until if pair[1] == instance_id]:
            self._drop(key, name)

    def _drop(self, key: bytes, instance_id: str) -> None:
        del self._until[key, instance_id]
        left = self._by_key[key]
        del left[instance_id]
        if not left:
            del self._by_key[key]


# A node announces some milliseconds after it has sealed, and a name is bound at once: whoever resolves it in between is
# told of the node that a client has put it at, and would find nobody else. Only a hint, as all that the master says of
# blocks: the node itself knows whether it has the block.

NODE_S = 30.0  # a node has announced by then
MOST = 65_536


class Unannounced:
    """Key → the node that has sealed it as a client says, for NODE_S; at most `most` of them, the oldest is forgotten
    first."""

    def __init__(self, removed_since: Callable[[bytes, int], bool], most: int = MOST) -> None:
        self._removed_since = removed_since
        self._most = most
        self._known: OrderedDict[bytes, tuple[str, int, int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def sealed(self, keys: Iterable[bytes], instance_id: str, incarnation: int, after: int, now: float) -> None:
        """A client says that this life has them. `after`: the last tombstone now. O(1) for each, amortised."""
        known = self._known
        for key in keys:
            known[key] = (instance_id, incarnation, after, now + NODE_S)
            known.move_to_end(key)
        while known and (len(known) > self._most or next(iter(known.values()))[3] <= now):
            known.popitem(last=False)

    def holder(self, key: bytes, now: float) -> tuple[str, int] | None:
        """(instance, incarnation) of whom a client has heard last that it has sealed this; None: nobody lately, or the
        block has been removed since."""
        found = self._known.get(key)
        if found is None:
            return None
        instance_id, incarnation, after, until = found
        if until <= now or self._removed_since(key, after):
            del self._known[key]
            return None
        return instance_id, incarnation


# A store says what has changed since it last said so. It had told of a key; the key is removed by a tombstone and
# sealed anew before the store speaks again: then nothing has changed, and it says nothing, while the map lacks the key.
# So a store that has applied the tombstone and does not mention such a key owes a snapshot.

PATIENCE = 3  # announcements: the first may have been on its way, or be one of several that belong together
MAX_OPEN = 65_536  # keys of one store; with more it owes a snapshot at once


class UnconfirmedRemovals:
    """Keys that the master took out of stores by itself, and of which these stores have yet to say what became of them.
    At most MAX_OPEN keys a store."""

    def __init__(self) -> None:
        self._open: dict[str, dict[bytes, None]] = {}
        self._heard: dict[str, int] = {}

    def dropped(self, store_id: str, keys: Iterable[bytes]) -> bool:
        """Note that the map shows these no more. False when there are too many to wait for."""
        still = self._open.setdefault(store_id, {})
        still.update(dict.fromkeys(keys))
        if len(still) > MAX_OPEN:
            self.settled(store_id)
            return False
        self._heard[store_id] = 0
        return True

    def take_announcement(self, said: Announcement, behind: bool) -> None:
        """Take what a store says that is news, or that there is none. `behind` says that it has yet to apply a
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
        """Whether the store must have said something by now, and has not."""
        return self._heard.get(store_id, 0) >= PATIENCE

    def settled(self, store_id: str) -> None:
        """Wait no more: the store has told everything, or is none any more."""
        self._open.pop(store_id, None)
        self._heard.pop(store_id, None)
