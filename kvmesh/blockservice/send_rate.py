"""How fast this node's blocks are read by others: for whoever chooses among several holders."""

from __future__ import annotations

import time

from kvmesh.blockservice.partitions import Partitions

KEPT = 0.5  # of the mean before, at each count


class SendRate:
    """By what is leased: a block under lease is read as a rule, and the front does not see the bytes themselves."""

    def __init__(self) -> None:
        self.bytes_per_s = 0
        self._leased = 0
        self._at = time.monotonic()

    def count(self, partitions: Partitions) -> None:
        """Once a second or so."""
        now, before = time.monotonic(), self._leased
        self._leased = sum(p.store.stats.leased_blocks * p.shard_bytes for p in partitions.all())
        grown = max(self._leased - before, 0)  # a partition that is gone takes its count with it
        rate = grown / max(now - self._at, 1e-3)
        self.bytes_per_s = int(KEPT * self.bytes_per_s + (1 - KEPT) * rate)
        self._at = now
