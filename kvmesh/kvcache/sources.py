"""Where prefix blocks lie that somebody wants to fetch: the brains' words for pulls. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.kvcache.tiers import Tier

# `kvmesh.transfer.TrafficClass.PREFETCH`. Brains need no engine: to import one takes longer than many of their steps.
PREFETCH = 1


@dataclass(frozen=True, slots=True)
class PullRange:
    """Prompt blocks [first_block, first_block + blocks) lie sealed in the node store of this life of this instance, in
    this tier of it. Where that is the very instance that is told, they are to be read from its own lower tier."""

    instance_id: str
    address: str  # host:port of its gRPC server
    incarnation: int
    first_block: int
    blocks: int
    tier: Tier = Tier.DRAM


@dataclass(frozen=True, slots=True)
class PullJob:
    """Fetch blocks into host extents that the node store has begun (`NodeStore.begin`) for them. `blocks[i]` is the
    prompt's block of `keys[i]`, which goes to `extents[i]`. `ranges` are tried in order for what they cover.
    `traffic_class`: how it stands beside the handoffs that use the same wires. `sizes`: bytes of each, where they do
    not fill their extents."""

    ticket: int
    blocks: tuple[int, ...]
    keys: tuple[bytes, ...]
    extents: tuple[int, ...]
    ranges: tuple[PullRange, ...]
    timeout_ms: int
    request_id: str = ""
    traceparent: str = ""
    traffic_class: int = PREFETCH
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Pulled:
    """How a job ended: said once for each, when no byte of it can land any more. `arrived`: positions in the job whose
    bytes were read under a lease that held to the end; the others are to be abandoned. `lower`: those of them that came
    from a tier below DRAM of this node itself; `bytes_done` does not count them."""

    ticket: int
    arrived: tuple[int, ...]
    bytes_done: int
    took_ns: int
    cause: str = ""
    lower: tuple[int, ...] = ()


class LowerTiers(Protocol):
    """What a brain may ask of the tiers below its node store. Answers are hints, and cost O(1) a key."""

    def holds(self, key: bytes) -> bool:
        """Whether a lower tier of this node has it."""

    def ranges(self, keys: Sequence[bytes]) -> tuple[PullRange, ...]:
        """Where a prompt with these blocks, from its first on, can be pulled from within this node."""

    def note(self, keys: Sequence[bytes]) -> None:
        """A request uses these, wherever they lie: what is used often deserves DRAM."""


def ranges_with(hints: tuple[PullRange, ...], lower: LowerTiers | None, keys: Sequence[bytes]) -> tuple[PullRange, ...]:
    """Who is asked, in order, for a prompt with these blocks: others' DRAM, then tier by tier what lies here below and
    the other hints."""
    if lower is None:
        return hints
    return tuple(sorted((*lower.ranges(keys), *hints), key=lambda source: source.tier))
