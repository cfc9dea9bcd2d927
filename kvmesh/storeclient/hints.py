"""Where blocks were lately: a bounded memory of the master's answers and of one's own puts. Pure.

Only a hint, as the master's answer is one: the holder is asked for a lease and knows the truth. What a hint saves is
the master's round trip; what it cannot know (a nearer replica since) ends with its time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from kvmesh.storeclient.choice import Replica

LIVE_S = 5.0


class Hints:
    """Key → replicas, each remembered for LIVE_S, at most `most` of them, the oldest forgotten first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[bytes, tuple[float, Sequence[Replica]]] = OrderedDict()

    def learn(self, key: bytes, replicas: Sequence[Replica], now: float) -> None:
        """In the place of what was known of it."""
        self._known.pop(key, None)
        if replicas and self._most:
            self._known[key] = (now + LIVE_S, replicas)
            if len(self._known) > self._most:
                self._known.popitem(last=False)

    def of(self, key: bytes, now: float) -> Sequence[Replica]:
        found = self._known.get(key)
        if found is None:
            return ()
        if found[0] < now:
            del self._known[key]
            return ()
        return found[1]

    def forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._known.pop(key, None)

    def forget_tag(self, tag: bytes) -> None:
        """All keys that begin so."""
        self.forget([key for key in self._known if key.startswith(tag)])

    def forget_holder(self, key: bytes, store_ids: Collection[str]) -> None:
        """These have it no more."""
        found = self._known.get(key)
        if found is not None:
            left = [r for r in found[1] if r.holder.store_id not in store_ids]
            if left:
                self._known[key] = (found[0], left)
            else:
                del self._known[key]

    def __len__(self) -> int:
        return len(self._known)
