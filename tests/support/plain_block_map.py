"""What a block map says, from a set of keys a store: the reference that `BlockMap` is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.block_map import Verdict


@dataclass
class _Store:
    incarnation: int
    seq: int = 0
    keys: set[bytes] = field(default_factory=set)
    staged: set[bytes] = field(default_factory=set)
    staged_seq: int = -1
    staged_parts: int = 0

    def unstage(self) -> None:
        self.staged, self.staged_seq, self.staged_parts = set(), -1, 0


class PlainBlockMap:
    """`apply` and `drop` as of `BlockMap`, and the answers that need no slot."""

    def __init__(self) -> None:
        self.shown: dict[str, _Store] = {}
        self._gone: dict[str, int] = {}

    def apply(self, said: Announcement) -> Verdict:
        store = self.shown.get(said.store_id)
        last = self._gone.get(said.store_id, 0) if store is None else store.incarnation
        if said.incarnation < last:
            return Verdict.STALE
        new = store is None or said.incarnation > last
        if store is None or new:
            store = self.shown[said.store_id] = _Store(said.incarnation)
            self._gone.pop(said.store_id, None)
        return self._snapshot(store, said) if said.snapshot else self._batch(store, said, new)

    def drop(self, store_id: str, incarnation: int | None = None) -> int:
        store = self.shown.get(store_id)
        if incarnation is None:
            self._gone.pop(store_id, None)
        elif store is not None and store.incarnation > incarnation:
            return 0
        else:
            self._gone[store_id] = max(incarnation, self._gone.get(store_id, 0))
        self.shown.pop(store_id, None)
        return 0 if store is None else len(store.keys)

    def holders(self, key: bytes) -> list[str]:
        return [name for name, store in self.shown.items() if key in store.keys]

    def keys(self) -> set[bytes]:
        return set().union(*(store.keys for store in self.shown.values()))

    def _batch(self, store: _Store, batch: Announcement, new: bool) -> Verdict:
        if batch.seq <= store.seq:
            return Verdict.APPLIED if new and batch.seq == 0 else Verdict.DUPLICATE
        if batch.seq > store.seq + 1 or not (batch.sealed or batch.removed):
            return Verdict.GAP
        store.keys = (store.keys - {*batch.removed}) | {*batch.sealed}
        store.seq = batch.seq
        if store.staged_seq <= store.seq:
            store.unstage()
        return Verdict.APPLIED

    def _snapshot(self, store: _Store, part: Announcement) -> Verdict:
        if part.seq <= store.seq or part.seq < store.staged_seq:
            return Verdict.DUPLICATE
        if part.seq > store.staged_seq:
            if part.part != 0:
                return Verdict.GAP
            store.unstage()
            store.staged_seq = part.seq
        if part.part != store.staged_parts:
            return Verdict.DUPLICATE if part.part < store.staged_parts else Verdict.GAP
        store.staged_parts += 1
        store.staged |= {*part.sealed}
        if part.more:
            return Verdict.PARTIAL
        store.keys, store.seq = store.staged, part.seq
        store.unstage()
        return Verdict.APPLIED
