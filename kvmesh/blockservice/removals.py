"""What a node must not hold any more: removals that reach it directly, and tombstones of those that could not.

The master numbers removals over all terms. A node reports the last tombstone that it has applied, and is told those
that came after it before it announces anything. A removal that the node was asked directly is remembered by its number:
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
    """Blocks that nobody may find here any more: `keys`, and all that begin with `prefix` (None: no others)."""

    keys: frozenset[bytes]
    prefix: bytes | None = None

    def __contains__(self, key: bytes) -> bool:
        return key in self.keys or (self.prefix is not None and key.startswith(self.prefix))

    def first(self, chain: Sequence[bytes]) -> int:
        """Returns the position of the first key in `chain` that is removed; the chain's length when none is."""
        return next((at for at, key in enumerate(chain) if key in self), len(chain))


class Watch:
    """Collects what is removed while something that will be sealed later is under way. It is bounded: beyond
    MAX_WATCHED keys or MAX_PREFIXES everything counts as removed."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()
        self._prefixes: dict[bytes, None] = {}
        self._all = False

    def note_removal(self, keys: Sequence[bytes], prefix: bytes) -> None:
        """Notes keys that are being removed."""
        self._keys.update(keys)
        if prefix:
            self._prefixes[prefix] = None
        if self._all or len(self._keys) > MAX_WATCHED or len(self._prefixes) > MAX_PREFIXES:
            self.heard_all()

    def heard_all(self) -> None:
        """Notes that everything is being removed."""
        self._all = True
        self._keys.clear()
        self._prefixes.clear()

    def gone(self, key: bytes) -> bool:
        """Whether the key was removed since the watch began."""
        return self._all or key in self._keys or any(key.startswith(prefix) for prefix in self._prefixes)


class Remembered:
    """What the master removed here, by its numbers, so that no removed block comes back from a node that has yet to
    apply the removal. What was removed up to `floor` is forgotten: any block may have been."""

    def __init__(self, floor: int, most: int = MAX_REMEMBERED) -> None:
        self.floor = floor
        self.last = floor
        self._most = most
        self._size = 0
        self._kept: OrderedDict[int, tuple[Sequence[bytes], bytes]] = OrderedDict()
        self._keys: dict[bytes, int] = {}  # key → the last removal that names it
        self._prefixes: dict[bytes, int] = {}
        self._lengths: Counter[int] = Counter()  # of prefixes

    def note(self, seq: int, keys: Sequence[bytes], prefix: bytes) -> None:
        """Notes that the removal with this number begins here."""
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
        """Notes that the removal with this number is of all blocks."""
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
    """Which removals a node has carried out. Pure. `applied` is the last tombstone that earlier incarnations have
    applied to what outlives them; 0 means none."""

    def __init__(self, applied: int = 0) -> None:
        self._applied = applied
        self._reached = applied
        self._remembered = Remembered(applied)
        self._direct: OrderedDict[int, None] = OrderedDict()
        self._heard_ns = 0  # when the master was asked that last answered that no tombstone is left
        self._watches: set[Watch] = set()

    @property
    def applied(self) -> int:
        """The last tombstone up to which all have been applied."""
        return self._applied

    @property
    def reached(self) -> int:
        """The last removal up to which all have been carried out: the master asks directly in order, or not at all."""
        return self._reached

    def carried_out(self, seq: int) -> bool:
        """Whether this removal is over here: an order to do it that comes all the same is late, and the block may have
        been put again since."""
        return seq <= self._applied or seq in self._direct

    def heard_all(self, asked_ns: int) -> None:
        """Notes that the master, asked at this time, knew no tombstone that was still to be applied here."""
        self._heard_ns = max(self._heard_ns, asked_ns)

    def has_heard(self, seq: int, over_ns: int) -> bool:
        """Whether nothing is still to be applied here of what was removed up to `seq`, which was over at `over_ns` at
        the latest. A master that has lost its tombstones never tells of them again: so it is enough that it was asked
        since and knew of none."""
        return self._reached >= seq or self._heard_ns >= over_ns

    def direct(self, seq: int) -> None:
        """Notes that the removal with this number was carried out on the master's direct order; 0 means that it has no
        number."""
        self._reached = max(self._reached, seq)
        if seq > self._applied:
            self._direct[seq] = None
            if len(self._direct) > MAX_DIRECT:
                self._direct.popitem(last=False)

    def due(self, tombstones: Iterable[Tombstone]) -> list[Tombstone]:
        """Returns which of these tombstones are to be applied, in order. `done` is to be called for each, and for the
        last of `tombstones` in any case."""
        newer = sorted((t for t in tombstones if t.seq > self._applied), key=lambda t: t.seq)
        return [tombstone for tombstone in newer if tombstone.seq not in self._direct]

    def done(self, seq: int) -> None:
        """Notes that all tombstones up to this one have been applied."""
        self._applied = max(self._applied, seq)
        self._reached = max(self._reached, seq)
        for known in [known for known in self._direct if known <= self._applied]:
            del self._direct[known]

    def removing(self, keys: Sequence[bytes], prefix: bytes, seq: int = 0) -> None:
        """Notes that these keys are being removed now, so that those who watch do not seal them. `seq` is the number of
        the master's removal: nobody who has yet to apply that can bring the blocks back."""
        if seq:
            self._remembered.note(seq, keys, prefix)
        for watch in self._watches:
            watch.note_removal(keys, prefix)

    def everything(self, seq: int) -> None:
        """Notes that the removal with this number, of all blocks, begins. `removing` is to be called with all known
        keys, too."""
        self._remembered.everything(seq)
        for watch in self._watches:
            watch.heard_all()

    def refuses(self, key: bytes, source_seq: int) -> bool:
        """See `Remembered.refuses`; `source_seq` is what the source had `reached` when it held the key."""
        return self._remembered.refuses(key, source_seq)

    def watch(self) -> Watch:
        """Returns a new watch, which is kept informed until `unwatch`."""
        made = Watch()
        self._watches.add(made)
        return made

    def unwatch(self, watch: Watch) -> None:
        """Ends a watch."""
        self._watches.discard(watch)
