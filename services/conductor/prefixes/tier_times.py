"""How long lower tiers take to read, node by node: by their own word or, where a node has none (pool nodes do not
report to conductors), by the pulls that waited for it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvmesh.kvcache.tiers import Tier, TierUse
from kvmesh.services.conductor.costs.models import TierModel
from kvmesh.services.conductor.domain import Life

MAX_KNOWN = 16_384
JUDGED_BYTES = 1 << 20


class TierLoads:
    """Models by life and tier; `drop` a life when it is over."""

    def __init__(self) -> None:
        self._models: dict[tuple[Life, Tier], TierModel] = {}

    def __len__(self) -> int:
        return len(self._models)

    def hear(self, life: Life, uses: Iterable[TierUse], now: float) -> Sequence[tuple[float, float]]:
        """Its own word. Where that is news: seconds for JUDGED_BYTES as expected before, and as measured there."""
        news = []
        for use in uses:
            model = self._of(life, use.tier)
            before_s = model.predict(JUDGED_BYTES)
            if model.hear(use.read_ns / 1e9, use.bytes_per_s, now):
                news.append((before_s, model.predict(JUDGED_BYTES)))
        return news

    def saw(self, life: Life, tier: Tier, nbytes: int, seconds: float, now: float) -> None:
        """A pull of `nbytes` out of it took so much longer than out of memory."""
        self._of(life, tier).saw(nbytes, seconds, now)

    def seconds(self, life: Life, tier: Tier, nbytes: int, now: float) -> float:
        """Expected, for `nbytes` in one go."""
        known = self._models.get((life, tier)) or TierModel(tier)
        return known.seconds(nbytes, now)

    def drop(self, life: Life) -> None:
        """It is over."""
        for tier in Tier:
            self._models.pop((life, tier), None)

    def _of(self, life: Life, tier: Tier) -> TierModel:
        if (life, tier) not in self._models and len(self._models) >= MAX_KNOWN:
            del self._models[next(iter(self._models))]  # a late word of the dead, for one
        return self._models.setdefault((life, tier), TierModel(tier))
