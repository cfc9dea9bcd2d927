"""How other processes learn what a node store holds: numbered batches of changes, and snapshots.

Let state(n) of one incarnation be the sealed keys after batch n; state(0) is empty. A batch n leads from state(n-1) to
state(n); a snapshot n *is* state(n), and takes a number of its own, so that no two states ever share one. Whoever
applies batches in order and takes a snapshot only when it is newer is therefore right at every moment, as of its `seq`
(`block_map`). An empty batch that repeats the current number says how far the others should be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from kvmesh.kvcache.store_stats import Changes

MAX_KEYS = 65_536  # in one announcement: 1 MiB
BATCH_KEYS = 8_192  # what we put into one: some milliseconds of everybody's event loop


class AnnouncedSource(Protocol):
    """What announces blocks: a node store, one of its lower tiers, or several stores taken as one."""

    def take_changes(self) -> Changes:
        """Returns how `keys` differs from what it was at the last call; at the first call, from no keys."""

    def keys(self) -> Sequence[bytes]:
        """Returns all keys held now, each once."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """One message about one node store, or one lower tier of it (named by `tiers.store_name`). Keys have 16 bytes. A
    batch means: remove `removed`, then add `sealed`. In a part of a snapshot `sealed` lists some of the keys held, and
    `more` says whether parts follow. `groups` has one mask of cache groups for each of `sealed`: what is held of it
    from now on, never 0; empty: 1 each."""

    store_id: str
    incarnation: int
    seq: int
    sealed: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    snapshot: bool = False
    part: int = 0
    more: bool = False
    groups: bytes = b""


@runtime_checkable
class GroupedSource(Protocol):
    """A source of blocks of a model that has several cache groups."""

    def masks(self, keys: Sequence[bytes]) -> bytes:
        """Returns what is held of each key, one mask of cache groups a key."""


def snapshot_parts(
    store_id: str,
    incarnation: int,
    seq: int,
    keys: Sequence[bytes],
    max_keys: int = BATCH_KEYS,
    groups: bytes = b"",
) -> Iterator[Announcement]:
    """Yields the announcements, at least one, that say: at `seq`, exactly `keys` are sealed, each in the `groups` of
    its mask."""
    for start in range(0, len(keys) or 1, max_keys):
        yield Announcement(
            store_id,
            incarnation,
            seq,
            tuple(keys[start : start + max_keys]),
            snapshot=True,
            part=start // max_keys,
            more=start + max_keys < len(keys),
            groups=groups[start : start + max_keys],
        )


class Announcer:
    """What one incarnation of a node store, or of one tier, announces to the master, one announcement at a time.

    The owner calls `next`, sends the announcement, and calls `acked` or `failed`, again and again. Nothing else may
    call the store's `take_changes`.
    """

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
        """Returns the announcement to send now, or None when one is on its way or nothing has changed. With `force` the
        latter gives an empty batch with the current number, so that a receiver that missed a batch notices."""
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
        """Notes that the announcement was received. `want_snapshot` says that the receiver could not apply it; a
        snapshot is then next."""
        if self._on_its_way:  # else `restart` came in between: that answer is about something forgotten
            self._on_its_way = False
            self._waiting.popleft()
            self._want_snapshot = self._want_snapshot or want_snapshot

    def failed(self) -> None:
        """Notes that nobody knows whether the announcement was received: `next` returns the same one again."""
        self._on_its_way = False

    def restart(self) -> None:
        """Makes a snapshot the next announcement, because the master has forgotten this store. The caller must ignore
        an answer that is still to come."""
        self._on_its_way = False
        self._want_snapshot = True

    def _snapshot(self) -> None:
        self._want_snapshot = False
        self._store.take_changes()
        self._seq += 1
        blank = self._blank
        keys = self._store.keys()
        groups = self._store.masks(keys) if isinstance(self._store, GroupedSource) else b""
        parts = snapshot_parts(blank.store_id, blank.incarnation, self._seq, keys, self._max_keys, groups)
        self._waiting = deque(parts)

    def _batches(self) -> None:
        changes = self._store.take_changes()
        # Removals first: cut in any number of batches, the last of them leads to the truth.
        before, blank = len(changes.removed), self._blank
        for start in range(0, before + len(changes.sealed), self._max_keys):
            removed = changes.removed[start : start + self._max_keys]
            some = slice(max(0, start - before), max(0, start + self._max_keys - before))
            sealed, groups = changes.sealed[some], changes.groups[some]
            self._seq += 1
            self._waiting.append(
                Announcement(blank.store_id, blank.incarnation, self._seq, sealed, removed, groups=groups)
            )
