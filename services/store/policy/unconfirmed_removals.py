"""Keys that the master took out of stores by itself, and of which these stores have yet to say what became of them.

A store says what has changed since it last said so. It had told of a key; the key is removed by a tombstone and sealed
anew before the store speaks again: then nothing has changed, and it says nothing, while the map lacks the key. So a
store that has applied the tombstone and does not mention such a key owes a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvmesh.kvcache.announce import Announcement

PATIENCE = 3  # announcements: the first may have been on its way, or be one of several that belong together
MAX_OPEN = 65_536  # keys of one store; with more it owes a snapshot at once


class UnconfirmedRemovals:
    """By store. Bounded by MAX_OPEN keys a store."""

    def __init__(self) -> None:
        self._open: dict[str, dict[bytes, None]] = {}
        self._heard: dict[str, int] = {}

    def dropped(self, store_id: str, keys: Iterable[bytes]) -> bool:
        """The map shows these no more. False: too many to wait for."""
        still = self._open.setdefault(store_id, {})
        still.update(dict.fromkeys(keys))
        if len(still) > MAX_OPEN:
            self.settled(store_id)
            return False
        self._heard[store_id] = 0
        return True

    def take_announcement(self, said: Announcement, behind: bool) -> None:
        """What a store says that is news, or that there is none; `behind`: it has yet to apply a tombstone."""
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
        """Whether it must have said something by now."""
        return self._heard.get(store_id, 0) >= PATIENCE

    def settled(self, store_id: str) -> None:
        """It has told everything, or is no store any more."""
        self._open.pop(store_id, None)
        self._heard.pop(store_id, None)
