"""How a node store's contents become known: numbered batches of changes, and snapshots.

Let state(n) of one incarnation be the sealed keys after batch n; state(0) is empty. A batch n leads from state(n-1) to
state(n); a snapshot n *is* state(n), and takes a number of its own, so that no two states ever share one. Whoever
applies batches in order and takes a snapshot only when it is newer is therefore right at every moment, as of its `seq`
(`block_map`). An empty batch that repeats the current number says how far the others should be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvmesh.kvcache.store_stats import Changes

MAX_KEYS = 65_536  # in one announcement, whoever makes it: 1 MiB
BATCH_KEYS = 8_192  # what we put into one: some milliseconds of everybody's event loop


class AnnouncedSource(Protocol):
    """What is announced: a node store, one of its lower tiers, or several stores as one."""

    def take_changes(self) -> Changes:
        """How `keys` differs from what it was at the last call; the first call: from none."""

    def keys(self) -> Sequence[bytes]:
        """All that is held now, each once."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """One message about one node store or one lower tier of it, by `tiers.store_name`; keys have 16 bytes. A batch:
    remove `removed`, then add `sealed`. A part of a snapshot: `sealed` is some of what there is, `more` says whether
    parts follow."""

    store_id: str
    incarnation: int
    seq: int
    sealed: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    snapshot: bool = False
    part: int = 0
    more: bool = False


def snapshot_parts(
    store_id: str, incarnation: int, seq: int, keys: Sequence[bytes], max_keys: int = BATCH_KEYS
) -> Iterator[Announcement]:
    """The announcements that say: at `seq`, exactly `keys` are sealed. At least one."""
    for start in range(0, len(keys) or 1, max_keys):
        yield Announcement(
            store_id,
            incarnation,
            seq,
            tuple(keys[start : start + max_keys]),
            snapshot=True,
            part=start // max_keys,
            more=start + max_keys < len(keys),
        )


class Announcer:
    """What one life of one node store, or of one tier of it, says to the master, one announcement on its way at a time.

    `next` → send → `acked` or `failed`, again and again. It alone calls the store's `take_changes`."""

    def __init__(self, store_id: str, incarnation: int, store: AnnouncedSource, *, max_keys: int = BATCH_KEYS) -> None:
        self._blank = Announcement(store_id, incarnation, 0)
        self._store = store
        self._max_keys = max_keys
        self._seq = 0
        self._waiting: deque[Announcement] = deque()  # numbered, in order; the first one may be on its way
        self._on_its_way = False
        self._want_snapshot = False

    @property
    def seq(self) -> int:
        """The last number given: `next` has taken every change up to it from the store."""
        return self._seq

    def next(self, force: bool = False) -> Announcement | None:
        """What to send now; None: one is on its way, or nothing has changed. `force`: then an empty batch with the
        current number, so that whoever missed the last one notices."""
        if self._on_its_way:
            return None
        if self._want_snapshot:
            self._snapshot()
        elif not self._waiting:
            self._batches()
        if not self._waiting and force:
            self._waiting.append(replace(self._blank, seq=self._seq))
        self._on_its_way = bool(self._waiting)
        return self._waiting[0] if self._waiting else None

    def acked(self, want_snapshot: bool = False) -> None:
        """It was heard. `want_snapshot`: but could not be used; a snapshot is next, whatever was to follow."""
        if self._on_its_way:  # else `restart` came in between: that answer is about something forgotten
            self._on_its_way = False
            self._waiting.popleft()
            self._want_snapshot = self._want_snapshot or want_snapshot

    def failed(self) -> None:
        """Nobody knows whether it was heard: `next` says the same again."""
        self._on_its_way = False

    def restart(self) -> None:
        """The master has forgotten us: a snapshot is next. An answer still to come is to be ignored by the caller."""
        self._on_its_way = False
        self._want_snapshot = True

    def _snapshot(self) -> None:
        self._want_snapshot = False
        self._store.take_changes()
        self._seq += 1
        blank = self._blank
        parts = snapshot_parts(blank.store_id, blank.incarnation, self._seq, self._store.keys(), self._max_keys)
        self._waiting = deque(parts)

    def _batches(self) -> None:
        changes = self._store.take_changes()
        # Removals first: cut in any number of batches, the last of them leads to the truth.
        before, blank = len(changes.removed), self._blank
        for start in range(0, before + len(changes.sealed), self._max_keys):
            removed = changes.removed[start : start + self._max_keys]
            sealed = changes.sealed[max(0, start - before) : max(0, start + self._max_keys - before)]
            self._seq += 1
            self._waiting.append(Announcement(blank.store_id, blank.incarnation, self._seq, sealed, removed))
