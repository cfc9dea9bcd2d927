"""Where prefix blocks can be fetched from, and the pulls that brains order. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmesh.kvcache.cache_groups import GroupPages
from kvmesh.kvcache.tiers import Tier

# `kvmesh.transfer.TrafficClass.PREFETCH`. Brains need no engine: to import one takes longer than many of their steps.
PREFETCH = 1


@dataclass(frozen=True, slots=True)
class PullRange:
    """A pull range: prompt blocks [first_block, first_block + blocks) lie sealed in one tier of one incarnation of an
    instance. If that is the instance which gets the range, it reads the blocks from its own lower tier."""

    instance_id: str
    address: str  # host:port of its gRPC server
    incarnation: int
    first_block: int
    blocks: int
    tier: Tier = Tier.DRAM
    groups: int = 0  # mask of the cache groups that lie there of all these blocks; 0: all of the model's


@dataclass(frozen=True, slots=True)
class PullJob:
    """A pull into host extents that `NodeStore.begin` gave: the prompt's block `blocks[i]` with key `keys[i]` goes to
    `extents[i]`. `ranges` are tried in order for the blocks they cover. `traffic_class` ranks it against handoffs on
    the same network. `sizes` are bytes, for blocks that do not fill their extents.

    For a model of several cache groups `groups` has one mask a key, what is to be pulled of it, and `places` says where
    to: position `first + i` of the job goes to extent `ids[i]` of its group; `extents` is empty."""

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
    groups: bytes = b""
    places: tuple[GroupPages, ...] = ()


@dataclass(frozen=True, slots=True)
class Pulled:
    """How a pull ended; it is reported once, when no byte of it can land any more. `arrived` are positions in the job
    whose bytes were read under a lease that lasted to the end; the others must be abandoned. `lower` are those of them
    that came from a lower tier of this node itself; `bytes_done` does not count these. Of a job with `groups` there is
    one mask for each of `arrived`: which of its objects came."""

    ticket: int
    arrived: tuple[int, ...]
    bytes_done: int
    took_ns: int
    cause: str = ""
    lower: tuple[int, ...] = ()
    groups: bytes = b""


class LowerTiers(Protocol):
    """What a brain may ask about the tiers below its node store. Answers are hints, and cost O(1) a key."""

    def holds(self, key: bytes) -> bool:
        """Says whether a lower tier of this node has the block."""

    def ranges(self, keys: Sequence[bytes]) -> tuple[PullRange, ...]:
        """Returns where within this node a prompt with these blocks, from its first on, can be pulled from."""

    def note(self, keys: Sequence[bytes]) -> None:
        """Notes that a request uses these blocks, wherever they lie, because frequently used blocks deserve DRAM."""


def ranges_with(hints: tuple[PullRange, ...], lower: LowerTiers | None, keys: Sequence[bytes]) -> tuple[PullRange, ...]:
    """Returns the sources to try for a prompt with these blocks, in order: DRAM of others first, then by tier both this
    node's lower tiers and the other hints."""
    if lower is None:
        return hints
    return tuple(sorted((*lower.ranges(keys), *hints), key=lambda source: source.tier))
