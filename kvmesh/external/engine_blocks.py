"""Which blocks an engine holds, as conductors are told. Pure.

Where the engine reports them (`reported_blocks`), it is what it says, and exact (BLOCK_KNOWLEDGE_EXACT). Else it is an
LRU of what was placed there, as long as the engine's cache. An engine evicts by rules of its own, and others may use
it, too: that is a belief (BLOCK_KNOWLEDGE_FALLBACK), right as long as all its prompts pass here and its eviction is
about LRU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from kvmesh.kvcache.store_stats import Changes


class EngineBlocks:
    """The block keys that an engine of `capacity` blocks holds. Each `changes()` is a source for one conductor's
    announcer. `reported`: the engine says what it holds, and nothing is believed."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._changes: list[EngineBlockChanges] = []
        self.reported = False

    def __len__(self) -> int:
        return len(self._keys)

    def keys(self) -> list[bytes]:
        """Returns all keys, the longest unused first."""
        return list(self._keys)

    def cached(self, keys: Sequence[bytes]) -> int:
        """Returns how many of these leading blocks of a prompt are believed to be there."""
        for at, key in enumerate(keys):
            if key not in self._keys:
                return at
        return len(keys)

    def used(self, keys: Sequence[bytes]) -> None:
        """Notes that the engine has computed, or found, these blocks of a prompt. The last block of a prompt is the
        first of it to go, since others need all before it. Where the engine reports, that tells nothing new."""
        if self.reported:
            return
        for key in reversed(keys[: self._capacity]):
            if key in self._keys:
                self._keys.move_to_end(key)
            else:
                self._keys[key] = None
                self._note(key, held=True)
        while len(self._keys) > self._capacity:
            gone, _ = self._keys.popitem(last=False)
            self._note(gone, held=False)

    def report(self, keys: Collection[bytes]) -> None:
        """From now on the engine reports; now it holds exactly these."""
        self.reported = True
        wanted = set(keys)
        for key in [key for key in self._keys if key not in wanted]:
            self.drop(key)
        for key in wanted:
            self.hold(key)

    def hold(self, key: bytes) -> None:
        """Notes that the engine has reported a block."""
        if key not in self._keys:
            self._keys[key] = None
            self._note(key, held=True)

    def drop(self, key: bytes) -> None:
        """Notes that the engine has reported that a block is gone."""
        if key in self._keys:
            del self._keys[key]
            self._note(key, held=False)

    def believe(self) -> None:
        """From now on nobody reports. What was reported last is believed."""
        self.reported = False

    def clear(self) -> None:
        """Notes that the engine has lost everything."""
        for key in self._keys:
            self._note(key, held=False)
        self._keys.clear()

    def _note(self, key: bytes, *, held: bool) -> None:
        for changes in self._changes:
            changes.note(key, held=held)

    def changes(self) -> EngineBlockChanges:
        """Returns a new source of changes; it begins with no keys."""
        changes = EngineBlockChanges(self)
        self._changes.append(changes)
        return changes


class EngineBlockChanges:
    """An AnnouncedSource: what has changed since it was asked last. It remembers the last change of a key alone."""

    def __init__(self, blocks: EngineBlocks) -> None:
        self._blocks = blocks
        self._told: set[bytes] = set()
        self._changed: dict[bytes, bool] = dict.fromkeys(blocks.keys(), True)

    def note(self, key: bytes, *, held: bool) -> None:
        """Notes a change."""
        self._changed[key] = held

    def take_changes(self) -> Changes:
        """See AnnouncedSource."""
        changed, self._changed = self._changed, {}
        sealed = tuple(key for key, held in changed.items() if held and key not in self._told)
        removed = tuple(key for key, held in changed.items() if not held and key in self._told)
        self._told.difference_update(removed)
        self._told.update(sealed)
        return Changes(sealed, removed)

    def keys(self) -> Sequence[bytes]:
        """See AnnouncedSource."""
        return self._blocks.keys()
