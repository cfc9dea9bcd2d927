"""What a node must not hold any more: removals that reach it directly, and tombstones of those that could not.

The master numbers removals over all terms. A node reports the last tombstone that it has applied, and is told those
that came after it before it announces anything. A removal that was asked of it directly is remembered by its number:
its tombstone, if it comes all the same, is passed over, as the block may have been put again since.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_DIRECT = 65_536


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Keys, or all that begin with `prefix`, are to be removed; everything, when neither is named."""

    seq: int
    keys: tuple[bytes, ...] = ()
    prefix: bytes = b""


class Watch:
    """What is removed while something that will be sealed later is under way."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()
        self._prefixes: list[bytes] = []

    def heard(self, keys: Sequence[bytes], prefix: bytes) -> None:
        """These are being removed."""
        self._keys.update(keys)
        if prefix:
            self._prefixes.append(prefix)

    def gone(self, key: bytes) -> bool:
        """Whether it was removed since."""
        return key in self._keys or any(key.startswith(prefix) for prefix in self._prefixes)


class Removals:
    """Pure. `applied`: the last tombstone that earlier lives have applied to what outlives them, 0: none."""

    def __init__(self, applied: int = 0) -> None:
        self._applied = applied
        self._direct: OrderedDict[int, None] = OrderedDict()
        self._watches: set[Watch] = set()

    @property
    def applied(self) -> int:
        """All tombstones up to this one have been."""
        return self._applied

    def direct(self, seq: int) -> None:
        """The removal with this number was carried out at the master's wish; 0: it has none."""
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
        for known in [known for known in self._direct if known <= self._applied]:
            del self._direct[known]

    def removing(self, keys: Sequence[bytes], prefix: bytes) -> None:
        """These are being removed now: whoever watches will not seal them."""
        for watch in self._watches:
            watch.heard(keys, prefix)

    def watch(self) -> Watch:
        """Until `unwatch`."""
        made = Watch()
        self._watches.add(made)
        return made

    def unwatch(self, watch: Watch) -> None:
        """Nobody asks it any more."""
        self._watches.discard(watch)
