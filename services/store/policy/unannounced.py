"""Where blocks are that a client has put and given a name to, and that their node has not announced yet. Pure.

A node announces some milliseconds after it has sealed, and a name is bound at once: whoever resolves it in between is
told of this holder, and would find nobody else. Only a hint, as all that the master says of blocks: the node itself
knows whether it has the block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

NODE_S = 30.0  # a node has announced by then
MOST = 65_536


class Unannounced:
    """Key → the node that has sealed it, for NODE_S, at most `most` of them, the oldest forgotten first."""

    def __init__(self, removed_since: Callable[[bytes, int], bool], most: int = MOST) -> None:
        self._removed_since = removed_since
        self._most = most
        self._known: OrderedDict[bytes, tuple[str, int, int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def sealed(self, keys: Iterable[bytes], instance_id: str, incarnation: int, after: int, now: float) -> None:
        """A client says that this life has them. `after`: the last tombstone now. O(1) for each, amortised."""
        known = self._known
        for key in keys:
            known[key] = (instance_id, incarnation, after, now + NODE_S)
            known.move_to_end(key)
        while known and (len(known) > self._most or next(iter(known.values()))[3] <= now):
            known.popitem(last=False)

    def holder(self, key: bytes, now: float) -> tuple[str, int] | None:
        """(instance, incarnation) of whom a client has heard last that it has sealed this; None: nobody lately, or the
        block has been removed since."""
        found = self._known.get(key)
        if found is None:
            return None
        instance_id, incarnation, after, until = found
        if until <= now or self._removed_since(key, after):
            del self._known[key]
            return None
        return instance_id, incarnation
