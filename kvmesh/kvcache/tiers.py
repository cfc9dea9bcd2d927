"""Where a block lies at its node. Below DRAM each tier of a node is a store of its own in every map: it announces for
itself, under the name that `store_name` gives, with its own seq and snapshots."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

MARK = "#"  # in no store id


class Tier(enum.IntEnum):
    """A kind of memory, fastest first. The numbers are those of `kvmesh.v1.Tier`."""

    DRAM = 1
    SSD = 2
    OBJECT = 3


@dataclass(frozen=True)
class TierUse:
    """What a node reports of one lower tier; see `TierUsage` in store.proto. `read_ns` is the time to the first byte
    and `bytes_per_s` the rate after it; 0 means not measured."""

    tier: Tier
    capacity_bytes: int
    used_bytes: int
    blocks: int
    read_ns: int = 0
    bytes_per_s: int = 0


def store_name(store_id: str, tier: Tier) -> str:
    """Returns the name in block maps of one tier of a node; DRAM has the node's own name."""
    return store_id if tier is Tier.DRAM else f"{store_id}{MARK}{tier.name.lower()}"


def store_names(store_id: str) -> tuple[str, ...]:
    """Returns the names of all tiers of a node, fastest first."""
    return tuple(store_name(store_id, tier) for tier in Tier)


@functools.lru_cache(maxsize=16_384)
def split_name(name: str) -> tuple[str, Tier]:
    """Reverses `store_name`. Raises ValueError when there is no such tier."""
    store_id, mark, tier = name.partition(MARK)
    if not mark:
        return store_id, Tier.DRAM
    try:
        return store_id, Tier[tier.upper()]
    except KeyError:
        raise ValueError(f"store name {name!r}: no tier {tier!r}") from None


_BY_NUMBER = {0: Tier.DRAM, **{tier.value: tier for tier in Tier}}


def tier_of(number: int) -> Tier | None:
    """Returns the tier of a number of `kvmesh.v1.Tier` (0 is DRAM), or None when it names none."""
    return _BY_NUMBER.get(number)
