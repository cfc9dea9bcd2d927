"""What a reader may be told to fetch from, ranked. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.kvcache.tiers import Tier


@dataclass(frozen=True, slots=True)
class FetchSources:
    """Stores of equal rank: of the same tier, and all of others or the reader's own."""

    slots: int
    tier: Tier
    own: bool
