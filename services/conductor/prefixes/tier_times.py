"""How long lower tiers take to read, by node: by the node's own report, or by the pulls that waited for it where there
is no report (pool nodes do not report to conductors). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvmesh.kvcache.tiers import Tier, TierUse
from kvmesh.services.conductor.costs.models import TierModel
from kvmesh.services.conductor.domain import Life

MAX_KNOWN = 16_384
JUDGED_BYTES = 1 << 20


class TierLoads:
    """The tier models by incarnation and tier; call `drop` when an incarnation is over."""

    def __init__(self) -> None:
        self._models: dict[tuple[Life, Tier], TierModel] = {}

    def __len__(self) -> int:
        return len(self._models)

    def hear(self, life: Life, uses: Iterable[TierUse], now: float) -> Sequence[tuple[float, float]]:
        """Takes a node's report on its tiers. Returns, for each that is news, the seconds for JUDGED_BYTES that were
        expected, and those measured."""
        news = []
        for use in uses:
            model = self._of(life, use.tier)
            before_s = model.predict(JUDGED_BYTES)
            if model.hear(use.read_ns / 1e9, use.bytes_per_s, now):
                news.append((before_s, model.predict(JUDGED_BYTES)))
        return news

    def saw(self, life: Life, tier: Tier, nbytes: int, seconds: float, now: float) -> None:
        """Notes that a pull of `nbytes` from this tier took so many seconds longer than one from memory."""
        self._of(life, tier).saw(nbytes, seconds, now)

    def seconds(self, life: Life, tier: Tier, nbytes: int, now: float) -> float:
        """Returns the seconds expected for `nbytes` in one go."""
        known = self._models.get((life, tier)) or TierModel(tier)
        return known.seconds(nbytes, now)

    def drop(self, life: Life) -> None:
        """Forgets an incarnation that is over."""
        for tier in Tier:
            self._models.pop((life, tier), None)

    def _of(self, life: Life, tier: Tier) -> TierModel:
        if (life, tier) not in self._models and len(self._models) >= MAX_KNOWN:
            del self._models[next(iter(self._models))]  # a late word of the dead, for one
        return self._models.setdefault((life, tier), TierModel(tier))
