"""Block maps and announcers that are wrong, each in one point: what the test of convergence must find."""

from __future__ import annotations

from collections.abc import Iterable

from kvmesh.kvcache.announce import Announcement, Announcer
from kvmesh.kvcache.block_map import BlockMap, StoreContent, Verdict


class SeesNoGap(BlockMap):
    """Any later batch is taken for the next one."""

    def _batch(self, store: StoreContent, batch: Announcement, first: bool) -> Verdict:
        store.seq = max(store.seq, batch.seq - 1)
        return super()._batch(store, batch, first)


class TakesEverySnapshot(BlockMap):
    """A snapshot is taken for the newest word whenever it comes."""

    def _snapshot(self, store: StoreContent, part: Announcement) -> Verdict:
        store.seq = min(store.seq, part.seq - 1)
        return super()._snapshot(store, part)


class ShowsParts(BlockMap):
    """A snapshot replaces what was known with its first part."""

    def _stage(self, store: StoreContent, keys: Iterable[bytes]) -> None:
        keys = tuple(keys)
        super()._stage(store, keys)
        self._replace(store, keys)


class MixesParts(BlockMap):
    """Parts are gathered whichever snapshot they are of."""

    def _snapshot(self, store: StoreContent, part: Announcement) -> Verdict:
        if store.staged_parts:
            store.staged_seq = max(part.seq, store.staged_seq)
        return super()._snapshot(store, part)


class KeepsOldLives(BlockMap):
    """A new incarnation's announcements go on where the old one's ended."""

    def apply(self, announcement: Announcement) -> Verdict:
        store = self._stores.get(announcement.store_id)
        if store is not None and announcement.incarnation > store.incarnation:
            store.incarnation = announcement.incarnation
        return super().apply(announcement)


class IgnoresTheEmptyBatch(BlockMap):
    """A lost tail is never noticed."""

    def _batch(self, store: StoreContent, batch: Announcement, first: bool) -> Verdict:
        verdict = super()._batch(store, batch, first)
        return verdict if batch.sealed or batch.removed or verdict is Verdict.APPLIED else Verdict.DUPLICATE


class KeepsBitsOfTheDead(BlockMap):
    """A slot goes to another store with the keys of the last one."""

    def drop(self, store_id: str, incarnation: int | None = None) -> int:
        store = self._stores.get(store_id)
        if store is not None:
            store.log.clear()
        return super().drop(store_id, incarnation)


class SameNumberForSnapshot(Announcer):
    """A snapshot has the number of the last batch, and two of them may differ."""

    def _snapshot(self) -> None:
        self._seq -= 1
        super()._snapshot()


class WantsNoSnapshot(Announcer):
    """The master's wish is not heard."""

    def acked(self, want_snapshot: bool = False) -> None:
        super().acked(False)


class ForgetsChangesOfParts(Announcer):
    """What changes while a snapshot is being told is not told."""

    def acked(self, want_snapshot: bool = False) -> None:
        if self._waiting and self._waiting[0].snapshot:
            self._store.take_changes()
        super().acked(want_snapshot)
