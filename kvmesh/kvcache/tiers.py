"""Where a block lies at its node. Below DRAM each tier of a node is a store of its own in every map: it announces for
itself, under the name that `store_name` gives, with its own seq and snapshots."""

from __future__ import annotations

import enum

MARK = "#"  # in no store id


class Tier(enum.IntEnum):
    """The fastest first; numbers as in `kvmesh.v1.Tier`."""

    DRAM = 1
    SSD = 2
    OBJECT = 3


def store_name(store_id: str, tier: Tier) -> str:
    """The name in block maps of one tier of a node: DRAM's is the node's own."""
    return store_id if tier is Tier.DRAM else f"{store_id}{MARK}{tier.name.lower()}"


def split_name(name: str) -> tuple[str, Tier]:
    """The inverse of `store_name`. ValueError: no such tier."""
    store_id, mark, tier = name.partition(MARK)
    if not mark:
        return store_id, Tier.DRAM
    try:
        return store_id, Tier[tier.upper()]
    except KeyError:
        raise ValueError(f"store name {name!r}: no tier {tier!r}") from None
