"""Learns which of the blocks that would be evicted next have copies at other nodes: those are evicted before the
others."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

from kvmesh.blockservice.partitions import Partition, Partitions
from kvmesh.errors import KvmeshError
from kvmesh.kvcache.cache_groups import MAX_GROUPS
from kvmesh.rpc.leader_client import LeaderClient, LeaderTracker
from kvmesh.rpc.pb import store_pb2 as pb

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["StoreMaster"]
# ── which blocks are asked about: pure ──────────────────────────────────────────────────────────────

# The master is asked about the blocks that would be evicted next: a bounded number at once, each at most once in
# AGAIN_S, so in the long run as many a second as are evicted. The node store is told the answer (`replicated`), which
# may be out of date by the time it counts: it decides which block goes first, and promises nothing.

WINDOW = 1024  # how many of the coldest blocks are looked through, in less than a millisecond
MOST = 512  # keys in one request
AGAIN_S = 30.0
REMEMBERED = 65_536


class KnownCopies:
    """Which blocks the master was asked about. `own` is the name of this process's store in the master's map."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._asked: OrderedDict[bytes, float] = OrderedDict()  # the oldest first

    def choose(self, coldest: Iterable[bytes], now: float) -> list[bytes]:
        """Returns those of `coldest` to ask about now, at most MOST; they count as asked."""
        while self._asked and (len(self._asked) > REMEMBERED or next(iter(self._asked.values())) + AGAIN_S <= now):
            self._asked.popitem(last=False)
        chosen: list[bytes] = []
        for key in coldest:
            if len(chosen) == MOST:
                break
            if key not in self._asked:
                chosen.append(key)
                self._asked[key] = now
        return chosen

    def unanswered(self, keys: Iterable[bytes]) -> None:
        """Notes that the master has not answered: these may be asked about again."""
        for key in keys:
            self._asked.pop(key, None)

    def sort(self, keys: Sequence[bytes], holders: Sequence[Collection[str]]) -> tuple[list[bytes], list[bytes]]:
        """Returns the keys that other stores have, and those that nobody else has. `holders` are the stores that have
        each key, as the master says."""
        shared: list[bytes] = []
        sole: list[bytes] = []
        for key, names in zip(keys, holders, strict=True):
            (shared if any(name != self._own for name in names) else sole).append(key)
        return shared, sole


# ── asking ──────────────────────────────────────────────────────────────────────────────────────────


INTERVAL_S = 0.5
FAILED_S = 2.0
CALL_S = 2.0
FROM_PERCENT = 70  # with less of the memory in use nothing is about to be evicted


class ReplicaTracker:
    """Asks the master about one set of keys at a time. `below(layout, key)` says whether a lower tier of this node has
    the block."""

    def __init__(
        self,
        own: str,
        partitions: Partitions,
        below: Callable[[str, bytes], bool],
        masters: LeaderTracker,
        joined: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._partitions = partitions
        self._below = below
        self._known = KnownCopies(own)
        # It has a list of masters of its own: heartbeats decide which master this node belongs to, not these requests.
        self._caller = LeaderClient(SERVICE, LeaderTracker(str(masters), masters.terms))
        self._joined = joined
        self._clock = clock

    async def run(self) -> None:
        """Asks until cancelled."""
        try:
            while True:
                await asyncio.sleep(INTERVAL_S)
                if self._joined() and not await self.turn():
                    await asyncio.sleep(FAILED_S)
        finally:
            await self._caller.close()

    async def turn(self) -> bool:
        """Asks about the coldest blocks, and tells the stores. Returns False if no master answers."""
        partitions, used = self._partitions.all(), self._partitions.capacity_bytes - self._partitions.free_bytes
        if used * 100 < FROM_PERCENT * self._partitions.capacity_bytes or not partitions:
            return True
        each = max(WINDOW // len(partitions), 1)
        coldest = itertools.chain.from_iterable(partition.store.coldest(each) for partition in partitions)
        keys = self._known.choose(coldest, self._clock())
        if not keys:
            return True
        assert len(keys) <= MOST
        request = pb.LookupRequest(keys=b"".join(keys), uncounted=True)

        try:
            answer: pb.LookupResponse = await self._caller.call("Lookup", request, CALL_S)
            told = [_holders_by_group(one) for one in answer.holders]
            sorted_ = {group: self._known.sort(keys, [one[group] for one in told]) for group in range(MAX_GROUPS)}
        except (KvmeshError, ValueError) as error:
            self._known.unanswered(keys)
            log.info("who else has the coldest blocks: %s", error)
            return False
        for partition in self._partitions.all():
            self._tell(partition, *sorted_[partition.group])
        return True

    def _tell(self, partition: Partition, shared: list[bytes], sole: list[bytes]) -> None:
        """Tells a partition about all keys; it heeds those that it holds."""
        partition.store.replicated(shared)
        self._partitions.evict_first(partition, shared)
        layout = partition.layout if partition.family else partition.shown_layout
        alone = [key for key in sole if partition.store.holds(key) and not self._below(layout, key)]
        partition.store.replicated(alone, False)


def _holders_by_group(told: pb.Holders) -> list[list[str]]:
    """Returns the stores that have a block's object of each cache group; of a block that is one object, of group 0."""
    masks = told.groups or bytes([1]) * len(told.store_ids)
    rows = list(zip(told.store_ids, masks, strict=True))
    return [[store_id for store_id, mask in rows if mask >> group & 1] for group in range(MAX_GROUPS)]
