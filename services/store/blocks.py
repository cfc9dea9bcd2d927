"""Who holds which block, as the master keeps it: one map, fed by announcements of members only. Pure.

A tier of a node is a store of its own in it (`tiers.store_name`): limits are each one's own, numbers and snapshots too;
they end together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.block_map import Verdict
from kvmesh.kvcache.keys import KEY_BYTES
from kvmesh.kvcache.tiers import MARK, Tier, split_name, store_names
from services.store.policy.master_map import MasterMap

READ_KEYS = 8192  # of a store that is told to a watcher, in one turn of the loop: some milliseconds


class BlockDirectory:
    """The map, and what of it goes on to watchers. No call costs more than the keys of one announcement; what a
    dropped store leaves behind is cleared by `sweep`."""

    def __init__(self, *, max_store_blocks: int) -> None:
        self.map = MasterMap()
        self._max = max_store_blocks
        self._tiered = False  # whether any store has ever told of a tier below DRAM
        # Parts of a snapshot go on only when all are here: a watcher that begins in between has missed none.
        self._parts: dict[str, list[Announcement]] = {}

    @property
    def stores(self) -> int:
        """How many announce, each tier for itself."""
        return self.map.store_count

    def bounded(self, said: Announcement) -> Announcement:
        """`said` without what is too much for one store. The rest is true, only not all that there is; a refusal would
        leave in the map for ever what the store has evicted."""
        if said.snapshot:
            parts = self._parts.get(said.store_id, []) if said.part else []
            room = max(0, self._max - sum(len(part.sealed) for part in parts))
            return said if len(said.sealed) <= room else replace(said, sealed=said.sealed[:room])
        count = self.map.count(said.store_id)
        if count + len(said.sealed) <= self._max:
            return said
        room = max(0, self._max - count + len(self.map.held(said.store_id, b"".join(set(said.removed)))))
        # As removed they keep the batch from being empty, which would say that something is missing.
        return replace(said, sealed=said.sealed[:room], removed=said.removed + said.sealed[room:])

    def apply(self, said: Announcement) -> tuple[Verdict, Sequence[Announcement]]:
        """What became of it, and what watchers are to be told."""
        verdict = self.map.apply(said)
        self._tiered = self._tiered or MARK in said.store_id
        gathered = self._parts.get(said.store_id)
        if verdict is Verdict.PARTIAL:
            if said.part == 0:
                gathered = self._parts[said.store_id] = []
            assert gathered is not None and len(gathered) == said.part, "parts are taken in order"
            gathered.append(said)
            return verdict, ()
        if verdict is not Verdict.APPLIED:
            return verdict, ()
        if said.snapshot:
            self._parts.pop(said.store_id, None)
            return verdict, (*gathered, said) if gathered and said.part else (said,)
        if gathered and gathered[0].seq <= said.seq:
            del self._parts[said.store_id]  # overtaken by batches
        return verdict, (said,) if said.seq else ()

    def holders(self, key: bytes) -> list[tuple[str, Tier]]:
        """The nodes that hold `key`, each tier for itself."""
        return [split_name(name) for name in self.map.holders(key)]

    def store_ids(self, key: bytes) -> list[str]:
        """The nodes that hold `key`, each once, in whichever tier."""
        names = self.map.holders(key)
        return list(dict.fromkeys(split_name(name)[0] for name in names)) if self._tiered else names

    def ends(self, store_id: str) -> dict[str, int]:
        """The number of the last announcement of each of its tiers that has said anything."""
        return {name: seq for name in store_names(store_id) if (seq := self.map.seq(name))}

    def drop(self, store_id: str) -> None:
        """A life has ended: its blocks are in no answer from now on, in whichever tier."""
        for name in store_names(store_id):
            self._parts.pop(name, None)
            self.map.drop(name)

    def sweep(self, max_keys: int) -> bool:
        """Clear away what dropped stores left behind, a slice of it; whether there is more."""
        return self.map.sweep(max_keys)

    def read(self, store_id: str, incarnation: int, lives: Callable[[], bool]) -> Iterator[Announcement]:
        """A snapshot of one living store in parts, to be taken while other events are applied between them.

        It may hold later changes too, and half of a later content: whoever applies every announcement relayed since
        the first part was taken is right in the end, as sealing and removing twice changes nothing. A store that no
        longer `lives` is told to its end in a hurry: its end is among the events that follow."""
        seq, log, step = self.map.seq(store_id), self.map.log_of(store_id), READ_KEYS * KEY_BYTES
        if seq == 0:
            return
        for part, start in enumerate(range(0, len(log) or 1, step)):
            living = lives()
            keys = self.map.held(store_id, log[start : start + step]) if living else []
            more = living and start + step < len(log)
            yield Announcement(store_id, incarnation, seq, tuple(keys), snapshot=True, part=part, more=more)
            if not more:
                return
