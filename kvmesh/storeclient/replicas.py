"""Who has a block, as far as this client knows, and which holder a get reads from. Pure.

The nearest holder goes first (this machine, then this host's address, then others), then the fastest tier, then the
holder that sends least, then the one with fewest leases. What is still equal is drawn at random once a call, so that
the keys of one call stay together (many blocks become few leases and few transfers) while many readers spread out.

`Hints` is a bounded memory of where blocks were lately: of the master's answers and of this client's own puts. It is
only a hint, as the master's answer is one: the holder is asked for a lease and knows the truth. A hint saves the round
trip to the master; what it cannot know (a nearer replica since) ends with its time.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvmesh.kvcache.tiers import Tier

LIVE_S = 5.0
SENDING_STEP = 64 << 20  # bytes/s; figures that differ by less count as equal, as they are seconds old


@dataclass(frozen=True, slots=True)
class Holder:
    """Is an incarnation of a node that has blocks, and what it last reported of its load."""

    store_id: str
    address: str
    incarnation: int
    node_id: str = ""
    sending_bytes_per_s: int = 0
    leases: int = 0

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0]


@dataclass(frozen=True, slots=True)
class Replica:
    holder: Holder
    tier: Tier = Tier.DRAM


@dataclass(frozen=True, slots=True)
class ReaderLocation:
    """Says where the reader is."""

    node_id: str
    hosts: frozenset[str] = frozenset()

    def distance(self, holder: Holder) -> int:
        """Returns 0 for this machine by its name, 1 for an address of this host, 2 for any other."""
        if self.node_id and holder.node_id == self.node_id:
            return 0
        return 1 if holder.host in self.hosts else 2


def order(replicas: Collection[Replica], here: ReaderLocation, rng: random.Random) -> list[Replica]:
    """Returns the replicas, the best first."""
    lots = {replica.holder: rng.random() for replica in replicas}

    def price(replica: Replica) -> tuple[float, ...]:
        holder = replica.holder
        sending = holder.sending_bytes_per_s // SENDING_STEP
        return (here.distance(holder), replica.tier, sending, holder.leases, lots[holder])

    return sorted(replicas, key=price)


def share_out(
    known: Mapping[int, Sequence[Replica]],
    failed: Mapping[Holder, Collection[int]],
    here: ReaderLocation,
    rng: random.Random,
) -> dict[Holder, list[int]]:
    """Returns holder → positions that it is to be asked for: each position with its best holder that has not `failed`
    for it. Positions for which no holder is left are in no list."""
    ranks = {r: i for i, r in enumerate(order({r for replicas in known.values() for r in replicas}, here, rng))}
    asked: dict[Holder, list[int]] = {}
    for position, replicas in known.items():
        left = [r for r in replicas if position not in failed.get(r.holder, ())]
        if left:
            asked.setdefault(min(left, key=ranks.__getitem__).holder, []).append(position)
    return asked


class Hints:
    """Maps a key to its replicas. Each is remembered for LIVE_S, at most `most` of them; the oldest is forgotten
    first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[bytes, tuple[float, Sequence[Replica]]] = OrderedDict()

    def learn(self, key: bytes, replicas: Sequence[Replica], now: float) -> None:
        """Replaces what was known of the key."""
        self._known.pop(key, None)
        if replicas and self._most:
            self._known[key] = (now + LIVE_S, replicas)
            if len(self._known) > self._most:
                self._known.popitem(last=False)

    def of(self, key: bytes, now: float) -> Sequence[Replica]:
        found = self._known.get(key)
        if found is None:
            return ()
        if found[0] < now:
            del self._known[key]
            return ()
        return found[1]

    def forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._known.pop(key, None)

    def forget_tag(self, tag: bytes) -> None:
        """Forgets all keys that begin with `tag`."""
        self.forget([key for key in self._known if key.startswith(tag)])

    def forget_holder(self, key: bytes, store_ids: Collection[str]) -> None:
        """Notes that these stores do not have the block any more."""
        found = self._known.get(key)
        if found is not None:
            left = [r for r in found[1] if r.holder.store_id not in store_ids]
            if left:
                self._known[key] = (found[0], left)
            else:
                del self._known[key]

    def __len__(self) -> int:
        return len(self._known)
