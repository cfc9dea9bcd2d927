"""What an instance makes of ranks that keep several cache groups: stores, partitions, warm places; and refuses."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from kvmesh.blockservice.group_wire import groups_from_wire, groups_to_wire
from kvmesh.errors import ConfigError
from kvmesh.instance.config import InstanceConfig
from kvmesh.instance.grouped_memory import GroupedMemory
from kvmesh.kvcache.quotas import NoTagQuotas
from kvmesh.ranks import protocol as m
from tests.support.group_nodes import BLOCK, FAMILY, GROUPS, cuts

BASE, EXTENTS = 4096, (12, 8, 6)


def ready(rank: int, ranks: int, **changes: Any) -> m.Ready:
    """As a rank says it: extents of each group one after the other from BASE on."""
    groups, at = [], BASE
    for group, extents in enumerate(EXTENTS):
        cut = cuts(ranks, group)[rank]
        groups.append(m.GroupMemory(cut, 4, extents + rank, 0, at))
        at += extents * cut.shard_bytes
    told = m.Ready("", b"", "model", "0123456789abcdef" * 2, 0, (), 0, 0, 4, 12, groups[0].shard.shard_bytes, 0, BASE,
                   False, 0, dtype="float32", groups=tuple(groups))  # fmt: skip
    return structs.replace(told, **changes)


def memory(ranks: int, **changes: Any) -> GroupedMemory:
    config = InstanceConfig(model="m", block_tokens=BLOCK, tensor_parallel=ranks, **changes)
    return GroupedMemory(GROUPS, config, [ready(rank, ranks) for rank in range(ranks)])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_stores_and_partitions_of_each_group(ranks: int) -> None:
    made = memory(ranks)
    assert made.family.text == FAMILY.text, "the same whatever the cut is"
    assert made.cuts == tuple(cuts(ranks, group)[rank] for rank in range(ranks) for group in range(3))
    store = made.new_store(7)
    assert [one.total for one in store.stores] == list(EXTENTS), "the least that a rank has"
    assert [isinstance(one.quotas, NoTagQuotas) for one in store.stores] == [False, True, True]
    parts = made.partitions(store)
    assert [part.layout for part in parts.all()] == [FAMILY.part(g, cuts(ranks, g)) for g in range(3)]
    assert len({part.layout for part in memory(3 - min(ranks, 2)).partitions(store).all()}) == 3
    assert parts.capacity_bytes == sum(n * cuts(ranks, g)[0].shard_bytes for g, n in enumerate(EXTENTS))
    start = 0
    for part, kept, extents in zip(parts.all(), made.kept(store), EXTENTS, strict=True):
        assert part.offset(0, 3) == BASE + start + 3 * part.shard_bytes
        assert (kept.store, kept.shard_bytes, kept.start) == (part.store, part.shard_bytes, start)
        start += extents * part.shard_bytes
    assert len(parts.family("")) == len(parts.family(FAMILY.text)) == 3 and not parts.family("another")
    assert parts.groups_of("another") == {} and parts.get(parts.all()[1].layout) is parts.all()[1]


def test_a_card_tells_whole_objects_and_tokens_without_states() -> None:
    for ranks in (1, 2):
        made = memory(ranks)
        wire = groups_to_wire(made.groups, made.object_bytes)
        assert groups_from_wire(wire, "cache_groups") == tuple(zip(GROUPS, made.object_bytes, strict=True))
        assert made.object_bytes == tuple(FAMILY.object(group).shard_bytes for group in range(3))
        assert made.kv_bytes_per_token == sum(made.object_bytes[:2]) // BLOCK


def test_other_weights_are_another_family() -> None:
    assert memory(1, weights_epoch=3).family.text.startswith("0123456789abcdef+3 float32 B16 G")


def test_ranks_that_do_not_fit_are_refused() -> None:
    config = InstanceConfig(model="m", block_tokens=BLOCK, tensor_parallel=2)
    first, second = ready(0, 2), ready(1, 2)
    lacks = structs.replace(second, groups=second.groups[:2])
    wider = structs.replace(second, groups=(ready(0, 1).groups[0], *second.groups[1:]))
    moved = structs.replace(second, extent_base_offset=BASE + 1)
    for bad, why in ((lacks, "keeps the cache groups"), (wider, "equal parts"), (moved, "equal parts")):
        with pytest.raises(ConfigError, match=why):
            GroupedMemory(GROUPS, config, [first, bad])
