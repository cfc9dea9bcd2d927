"""What a node must not hold any more: removals that reach it directly, and tombstones of those that could not.

The master numbers removals over all terms. A node reports the last tombstone that it has applied, and is told those
that came after it before it announces anything. A removal that was asked of it directly is remembered by its number:
its tombstone, if it comes all the same, is passed over, as the block may have been put again since.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvmesh.kvcache.tombstones import RECORD_KEYS, Tombstone

MAX_DIRECT = 65_536
MAX_WATCHED = 1 << 18
MAX_PREFIXES = 1024
MAX_REMEMBERED = 1 << 17  # keys and prefixes: about 20 MB


@dataclass(frozen=True, slots=True)
class NotHere:
    """Blocks that nobody may find here any more: these, and all that begin with `prefix` (None: no others)."""

    keys: frozenset[bytes]
    prefix: bytes | None = None

    def __contains__(self, key: bytes) -> bool:
        return key in self.keys or (self.prefix is not None and key.startswith(self.prefix))

    def first(self, chain: Sequence[bytes]) -> int:
        """Which of these is the first to go; their number when none does."""
        return next((at for at, key in enumerate(chain) if key in self), len(chain))


class Watch:
    """What is removed while something that will be sealed later is under way. Bounded: beyond MAX_WATCHED keys or
    MAX_PREFIXES everything counts as removed."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()
        self._prefixes: dict[bytes, None] = {}
        self._all = False

    def note_removal(self, keys: Sequence[bytes], prefix: bytes) -> None:
        """These are being removed."""
        self._keys.update(keys)
        if prefix:
            self._prefixes[prefix] = None
        if self._all or len(self._keys) > MAX_WATCHED or len(self._prefixes) > MAX_PREFIXES:
            self.heard_all()

    def heard_all(self) -> None:
        """Everything is."""
        self._all = True
        self._keys.clear()
        self._prefixes.clear()

    def gone(self, key: bytes) -> bool:
        """Whether it was removed since."""
        return self._all or key in self._keys or any(key.startswith(prefix) for prefix in self._prefixes)


class Remembered:
    """What the master removed here, by its numbers, so that nothing of it comes back from a node that has yet to hear
    of it. Up to `floor` it is forgotten what was removed: it may have been anything."""

    def __init__(self, floor: int, most: int = MAX_REMEMBERED) -> None:
        self.floor = floor
        self.last = floor
        self._most = most
        self._size = 0
        self._kept: OrderedDict[int, tuple[Sequence[bytes], bytes]] = OrderedDict()
        self._keys: dict[bytes, int] = {}  # → the last that names it
        self._prefixes: dict[bytes, int] = {}
        self._lengths: Counter[int] = Counter()  # of prefixes

    def note(self, seq: int, keys: Sequence[bytes], prefix: bytes) -> None:
        """The removal with this number begins here."""
        self.last = max(self.last, seq)
        if seq <= self.floor or seq in self._kept:
            return
        self._kept[seq] = (keys, prefix)
        self._size += RECORD_KEYS + len(keys)
        for key in keys:
            self._keys[key] = max(seq, self._keys.get(key, 0))
        if prefix:
            self._lengths[len(prefix)] += prefix not in self._prefixes
            self._prefixes[prefix] = max(seq, self._prefixes.get(prefix, 0))
        while self._size > self._most:
            self._forget_oldest()

    def everything(self, seq: int) -> None:
        """The removal with this number is of all that there is."""
        self.last, self.floor = max(self.last, seq), max(self.floor, seq)

    def refuses(self, key: bytes, source_seq: int) -> bool:
        """Whether `key`, from a node that had carried out removals up to `source_seq`, may have been removed."""
        if source_seq >= self.last:
            return False
        if source_seq < self.floor or self._keys.get(key, 0) > source_seq:
            return True
        return any(self._prefixes.get(key[:length], 0) > source_seq for length in self._lengths)

    def _forget_oldest(self) -> None:
        seq, (keys, prefix) = self._kept.popitem(last=False)
        self.floor = max(self.floor, seq)
        self._size -= RECORD_KEYS + len(keys)
        for key in keys:
            if self._keys.get(key) == seq:
                del self._keys[key]
        if prefix and self._prefixes.get(prefix) == seq:
            del self._prefixes[prefix]
            self._lengths -= Counter((len(prefix),))  # drops what is 0


class Removals:
    """Pure. `applied`: the last tombstone that earlier lives have applied to what outlives them, 0: none."""

    def __init__(self, applied: int = 0) -> None:
        self._applied = applied
        self._reached = applied
        self._remembered = Remembered(applied)
        self._direct: OrderedDict[int, None] = OrderedDict()
        self._watches: set[Watch] = set()

    @property
    def applied(self) -> int:
        """All tombstones up to this one have been."""
        return self._applied

    @property
    def reached(self) -> int:
        """All removals up to this one have been carried out: the master asks directly in order, or not at all."""
        return self._reached

    def direct(self, seq: int) -> None:
        """The removal with this number was carried out at the master's wish; 0: it has none."""
        self._reached = max(self._reached, seq)
        if seq > self._applied:
            self._direct[seq] = None
            if len(self._direct) > MAX_DIRECT:
                self._direct.popitem(last=False)

    def due(self, tombstones: Iterable[Tombstone]) -> list[Tombstone]:
        """What is to be applied of these, in order; say `done` of each, and of the last one in any case."""
        newer = sorted((t for t in tombstones if t.seq > self._applied), key=lambda t: t.seq)
        return [tombstone for tombstone in newer if tombstone.seq not in self._direct]

    def done(self, seq: int) -> None:
        """All tombstones up to this one have been applied."""
        self._applied = max(self._applied, seq)
        self._reached = max(self._reached, seq)
        for known in [known for known in self._direct if known <= self._applied]:
            del self._direct[known]

    def removing(self, keys: Sequence[bytes], prefix: bytes, seq: int = 0) -> None:
        """These are being removed now: whoever watches will not seal them. `seq`: by the master's removal with this
        number; nobody who has yet to hear of it can bring them back."""
        if seq:
            self._remembered.note(seq, keys, prefix)
        for watch in self._watches:
            watch.note_removal(keys, prefix)

    def everything(self, seq: int) -> None:
        """The removal with this number begins, of all that there is; say `removing` of all that is known, too."""
        self._remembered.everything(seq)
        for watch in self._watches:
            watch.heard_all()

    def refuses(self, key: bytes, source_seq: int) -> bool:
        """See `Remembered`; `source_seq` is what the source had `reached` when it held the key."""
        return self._remembered.refuses(key, source_seq)

    def watch(self) -> Watch:
        """Until `unwatch`."""
        made = Watch()
        self._watches.add(made)
        return made

    def unwatch(self, watch: Watch) -> None:
        """Nobody asks it any more."""
        self._watches.discard(watch)
