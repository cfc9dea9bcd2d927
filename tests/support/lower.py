"""A tier below a node store, as a brain sees it: keys that a test puts there and takes away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvmesh.kvcache.sources import PullRange
from kvmesh.kvcache.tiers import Tier


class Below:
    """`kvmesh.kvcache.sources.LowerTiers`; one range a block, all of the instance "own"."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.used: Counter[bytes] = Counter()

    def holds(self, key: bytes) -> bool:
        return key in self.keys

    def ranges(self, keys: Sequence[bytes]) -> tuple[PullRange, ...]:
        return tuple(PullRange("own", "own:1", 1, n, 1, Tier.SSD) for n, key in enumerate(keys) if key in self.keys)

    def note(self, keys: Sequence[bytes]) -> None:
        self.used.update(keys)
