"""About which blocks a node asks the master who else has them, so that those with copies elsewhere go first. Pure.

Asked about are the blocks that would be evicted next, a bounded number at once, each at most once in AGAIN_S: as many
a second as are evicted, in the long run. What comes back is told to the node store (`replicated`) and may be old by the
time it counts: it decides which block goes first, and promises nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

WINDOW = 1024  # blocks that would go next: looked through in less than a millisecond
MOST = 512  # keys of one question
AGAIN_S = 30.0
REMEMBERED = 65_536


class KnownCopies:
    """Of one process, whose store is called `own` in the master's map."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._asked: OrderedDict[bytes, float] = OrderedDict()  # the oldest first

    def choose(self, coldest: Iterable[bytes], now: float) -> list[bytes]:
        """Those of `coldest` to ask about now, at most MOST; they count as asked."""
        while self._asked and (len(self._asked) > REMEMBERED or next(iter(self._asked.values())) + AGAIN_S <= now):
            self._asked.popitem(last=False)
        chosen: list[bytes] = []
        for key in coldest:
            if len(chosen) == MOST:
                break
            if key not in self._asked:
                chosen.append(key)
                self._asked[key] = now
        return chosen

    def unanswered(self, keys: Iterable[bytes]) -> None:
        """Nobody has said anything about these: they may be asked about again."""
        for key in keys:
            self._asked.pop(key, None)

    def sort(self, keys: Sequence[bytes], holders: Sequence[Collection[str]]) -> tuple[list[bytes], list[bytes]]:
        """`holders`: the stores that have each, as the master says. (Those that others have, those nobody else has)."""
        shared: list[bytes] = []
        sole: list[bytes] = []
        for key, names in zip(keys, holders, strict=True):
            (shared if any(name != self._own for name in names) else sole).append(key)
        return shared, sole
