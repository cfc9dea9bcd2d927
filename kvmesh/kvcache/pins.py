"""Which blocks are to stay: soft pins, for a time and while there is anything else to evict, and hard pins, until
somebody ends them. Bookkeeping; `NodeStore` holds the references of hard pins and spares what is pinned softly."""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.errors import PinLimit
from kvmesh.kvcache.leases import Deadlines

PINNED_PERCENT = 50


class PinBook:
    """Pins by key. Every operation O(log pins) a key, amortised. `percent`: of all extents may be pinned hard."""

    def __init__(self, percent: int = PINNED_PERCENT) -> None:
        if not 0 <= percent <= 100:
            raise ValueError(f"pinned_percent={percent}: must be in 0..100")
        self._percent = percent
        self.soft: Deadlines[bytes] = Deadlines()
        self.hard: dict[bytes, int] = {}  # key → its extent

    def limit(self, total: int) -> int:
        """Blocks that may be pinned hard, of so many extents."""
        return total * self._percent // 100

    def check(self, new: Sequence[bytes], total: int) -> None:
        """PinLimit, which names figures, unless so many more may be pinned hard."""
        limit = self.limit(total)
        if len(self.hard) + len(new) > limit:
            raise PinLimit(
                f"hard_pins={len(new)}: {len(self.hard)} of {total} blocks are pinned, at most {limit} may be",
                field="hard_pins",
            )
