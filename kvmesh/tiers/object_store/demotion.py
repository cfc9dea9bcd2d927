"""What a tier above evicts, on its way into an object tier: bounded, never waited for, and found by removals.

    admit ─▶ (the tier above reads and verifies) ─▶ offer ─▶ ObjectTier.put
                       └───────── withdraw

A crash in between loses the block, which was about to be lost anyway; an object is there as a whole or not at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from kvmesh.tiers.object_store.tier import ObjectTier

QUEUE_BYTES = 128 << 20  # copies in memory


class Demotion:
    """A `tier_calls.Sink`. `tier()`: where it goes; None: not in use now. `moving(key, over)`: said when a block is
    admitted, before the tier above lets go of it, and, `over`, when it lies here or never will: whoever keeps books of
    keys that may have to be removed misses none. Called from any thread, without a lock."""

    def __init__(
        self,
        tier: Callable[[], ObjectTier | None],
        moving: Callable[[bytes, bool], None] = lambda key, over: None,
        max_bytes: int = QUEUE_BYTES,
    ) -> None:
        self.demoted = 0  # blocks that arrived
        self.dropped = 0  # blocks worth it that did not: no room, the store failed or was not there, damaged
        self._tier = tier
        self._moving = moving
        self._max_bytes = max_bytes
        self._lock = threading.RLock()  # taken before the tier's
        self._held: dict[bytes, int] = {}  # admitted → bytes, until its put has ended
        self._bytes = 0
        self._removed: set[bytes] = set()  # of those

    @property
    def waiting_bytes(self) -> int:
        """Of blocks on their way."""
        return self._bytes

    def admit(self, key: bytes, nbytes: int) -> bool:
        """See `Sink`. What lies below already is not wanted."""
        tier = self._tier()
        with self._lock:
            if tier is not None and tier.contains(key):
                return False
            full = self._bytes + nbytes > self._max_bytes and bool(self._held)
            if tier is None or tier.resting or full or key in self._held:
                self.dropped += 1
                return False
            self._held[key] = nbytes
            self._bytes += nbytes
        self._moving(key, False)
        return True

    def offer(self, key: bytes, data: bytearray) -> None:
        """See `Sink`."""
        tier = self._tier()
        put: Future[bool] | None = None
        with self._lock:
            # Under the lock: a removal comes before, and is seen here, or after, and the tier has heard of the put.
            if tier is not None and key not in self._removed:
                put = tier.put(key, data)
        if put is None:
            self._end(key, False)
        else:
            put.add_done_callback(partial(self._put_ended, key))

    def withdraw(self, key: bytes) -> None:
        """See `Sink`."""
        self._end(key, False)

    def remove(self, keys: Iterable[bytes]) -> None:
        """They are not put any more: to be said after the tier above has let go of them, before the tier's `remove`."""
        with self._lock:
            self._removed.update(key for key in keys if key in self._held)

    def _put_ended(self, key: bytes, put: Future[bool]) -> None:
        self._end(key, not put.cancelled() and put.result())

    def _end(self, key: bytes, stored: bool) -> None:
        with self._lock:
            self._bytes -= self._held.pop(key)
            if stored:
                self.demoted += 1
            elif key not in self._removed:
                self.dropped += 1
            self._removed.discard(key)
        tier = self._tier()
        if stored or tier is None or not tier.doubtful(key):  # of a doubtful one nobody may forget that it may be there
            self._moving(key, True)
