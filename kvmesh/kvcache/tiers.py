"""Where a block lies at its node. Below DRAM each tier of a node is a store of its own in every map: it announces for
itself, under the name that `store_name` gives, with its own seq and snapshots."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

MARK = "#"  # in no store id


class Tier(enum.IntEnum):
    """The fastest first; numbers as in `kvmesh.v1.Tier`."""

    DRAM = 1
    SSD = 2
    OBJECT = 3


@dataclass(frozen=True)
class TierUse:
    """A lower tier of a node, by its own word; see `TierUsage` in store.proto. `read_ns` until the first byte and
    `bytes_per_s` from then on; 0: not measured."""

    tier: Tier
    capacity_bytes: int
    used_bytes: int
    blocks: int
    read_ns: int = 0
    bytes_per_s: int = 0


def store_name(store_id: str, tier: Tier) -> str:
    """The name in block maps of one tier of a node: DRAM's is the node's own."""
    return store_id if tier is Tier.DRAM else f"{store_id}{MARK}{tier.name.lower()}"


def store_names(store_id: str) -> tuple[str, ...]:
    """Of all tiers of a node, the fastest first."""
    return tuple(store_name(store_id, tier) for tier in Tier)


@functools.lru_cache(maxsize=16_384)
def split_name(name: str) -> tuple[str, Tier]:
    """The inverse of `store_name`. ValueError: no such tier."""
    store_id, mark, tier = name.partition(MARK)
    if not mark:
        return store_id, Tier.DRAM
    try:
        return store_id, Tier[tier.upper()]
    except KeyError:
        raise ValueError(f"store name {name!r}: no tier {tier!r}") from None


_BY_NUMBER = {0: Tier.DRAM, **{tier.value: tier for tier in Tier}}


def tier_of(number: int) -> Tier | None:
    """What a number of `kvmesh.v1.Tier` says; 0 is DRAM. None: it names no tier."""
    return _BY_NUMBER.get(number)
