"""The bounds of the store of responses (see config.py for what each is for)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResponseBounds:
    """What a store may hold: so many responses, of so many bytes together, each for so long after its last use."""

    count: int
    size: int
    ttl_s: float
