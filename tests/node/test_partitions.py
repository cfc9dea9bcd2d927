"""A pool's memory: layouts side by side, slabs taken and given back, one announced truth."""

from __future__ import annotations

import itertools

import pytest

from kvmesh.kvcache.node_store import Changes
from kvmesh.node.partitions import MAX_LAYOUTS, OnePartition, Partition, PoolPartitions, unused
from kvmesh.rpc.errors import InvalidRequest, Overloaded
from tests.node.stores import keys_of

MIB = 1 << 20
BASE = 0x10000


def pool(nbytes: int = 64 * MIB) -> PoolPartitions:
    return PoolPartitions(BASE, nbytes, high_percent=95, low_percent=90, lease_seed=3)


def fill(partition: Partition, keys: list[bytes]) -> None:
    assert None not in partition.store.begin(keys)
    for key in keys:
        partition.store.seal(key)


def test_extents_of_all_layouts_lie_apart_and_inside() -> None:
    made = pool()
    spans = []
    for n, shard in enumerate((1 << 20, 300_000, 4096, 5 << 20)):
        partition = made.room(f"layout {n}", shard, 3)
        partition = made.room(f"layout {n}", shard, 7)
        fill(partition, keys_of(*((n, i) for i in range(7))))
        for extent in range(partition.store.total):
            start = partition.offset(0, extent)
            spans.append((start, start + shard))
    spans.sort()
    assert spans[0][0] >= BASE and spans[-1][1] <= BASE + 64 * MIB
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert made.capacity_bytes == 64 * MIB
    assert 0 < made.free_bytes < 64 * MIB - 7 * (6 << 20)


def test_it_grows_before_it_evicts_and_evicts_when_all_is_used() -> None:
    made = pool(8 * MIB)
    for i in range(200):
        partition = made.room("a", 65_536, 1)
        fill(partition, keys_of(i))
    assert partition.store.total == 128, "all of the memory"
    assert partition.store.stats.evicted > 0
    assert partition.store.holds(keys_of(199)[0]) and not partition.store.holds(keys_of(0)[0])
    assert partition.store.stats.sealed > 100
    with pytest.raises(Overloaded):
        made.room("b", 65_536, 1)
    assert made.get("b") is None


def test_a_layout_that_holds_nothing_gives_its_memory_to_another() -> None:
    made = pool(4 * MIB)
    first = made.room("a", 65_536, 60)
    fill(first, keys_of(*range(50)))
    lease = first.store.lease(keys_of(1), 1000, now=5)
    made.settle()
    assert made.get("a") is first
    first.store.drop_all()
    made.settle()
    assert made.get("a") is first, "a reader still reads"
    first.store.unlease(lease.lease_id)
    made.settle()
    assert made.get("a") is None and made.free_bytes == 4 * MIB
    second = made.room("b", 1 << 20, 4)
    fill(second, keys_of(*range(3)))
    assert second.store.total == 4


def test_a_refused_layout_takes_nothing() -> None:
    made = pool(4 * MIB)
    for shard in (0, 1, 1023, 4 * MIB + 1, -5):
        with pytest.raises(InvalidRequest, match="shard_bytes"):
            made.room("a", shard, 1)
    fill(made.room("a", 4096, 1), keys_of("k"))
    with pytest.raises(InvalidRequest, match="shard_bytes=8192"):
        made.room("a", 8192, 1)
    for n in range(MAX_LAYOUTS + 3):
        try:
            made.room(f"n{n}", 1 << 16, 1)
        except Overloaded:
            break
    else:
        pytest.fail("no bound on layouts")
    made.settle()
    assert [p.layout for p in made.all()] == ["a"]


def test_what_is_announced_is_the_union_of_all_layouts() -> None:
    made = pool()
    both, only = keys_of("both", "only")
    fill(made.room("a", 4096, 1), [both, only])
    fill(made.room("b", 65_536, 1), [both])
    changes = made.take_changes()
    assert (set(changes.sealed), changes.removed) == ({both, only}, ())
    assert sorted(made.keys()) == sorted([both, only])
    first = made.get("a")
    assert first is not None
    first.store.drop_all()
    made.settle()
    assert made.get("a") is None
    assert made.take_changes() == Changes((both,), (only,)), "the other layout still holds it"
    assert made.take_changes() == Changes()
    assert made.keys() == [both]


def test_lease_ids_of_two_layouts_do_not_meet() -> None:
    made = pool()
    ids = set()
    for name in ("a", "b", "c"):
        partition = made.room(name, 4096, 1)
        fill(partition, keys_of("k"))
        ids |= {partition.store.lease(keys_of("k"), 10, now=1).lease_id for _ in range(5)}
    assert len(ids) == 15


def test_an_instance_takes_only_its_own_layout() -> None:
    partition = Partition("mine", 4096, pool().room("mine", 4096, 1).store, (100,))
    one = OnePartition(partition)
    assert one.get("mine") is partition and one.get("other") is None
    assert one.room("mine", 4096, 99) is partition
    assert partition.offset(0, 3) == 100 + 3 * 4096
    assert one.capacity_bytes == partition.store.total * 4096 and one.free_bytes == unused(partition) * 4096
    with pytest.raises(InvalidRequest, match="layout='other'"):
        one.room("other", 4096, 1)
    with pytest.raises(InvalidRequest, match="shard_bytes=5"):
        one.room("mine", 5, 1)
