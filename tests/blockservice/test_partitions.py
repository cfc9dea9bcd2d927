"""A pool's memory: layouts side by side, slabs taken and given back, one announced truth."""

from __future__ import annotations

import itertools
import random

import pytest

from kvmesh.blockservice.partitions import OnePartition, Partition, unused
from kvmesh.errors import InvalidRequest, Overloaded
from kvmesh.kvcache.store_stats import Changes
from kvmesh.pool.partitions import MAX_LAYOUTS, PoolPartitions
from kvmesh.pool.slabs import SlabPartition
from tests.support.nodes import keys_of

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
    assert 0 < made.free_bytes < 64 * MIB - 7 * (5 << 20)


def test_it_grows_before_it_evicts_and_evicts_when_all_is_used() -> None:
    made = pool(8 * MIB)
    for i in range(200):
        partition = made.room("a", 65_536, 1)
        fill(partition, keys_of(i))
    assert partition.store.total == 128, "all of the memory"
    assert partition.store.stats.evicted > 0
    assert partition.store.holds(keys_of(199)[0]) and not partition.store.holds(keys_of(0)[0])
    assert partition.store.stats.sealed > 100
    lease = partition.store.lease(partition.store.keys(), 1000, now=5)
    held = partition.store.hold(partition.store.keys())
    with pytest.raises(Overloaded, match=r"1 blocks of 65536 bytes: .* \d+ of 8388608 bytes are free"):
        made.room("b", 65_536, 1)
    assert made.get("b") is None
    partition.store.release(held)
    partition.store.unlease(lease.lease_id)
    assert made.room("b", 65_536, 1).store.free, "the coldest have gone"


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


def test_many_blocks_at_once_get_as_many_runs_as_one_by_one() -> None:
    """Some slabs in the middle are somebody else's: the memory for the others is no one stretch."""
    made = pool(8 * MIB)
    slab = made.slab_bytes
    other, _ = made.claim("other", 65_536, 3 * MIB // slab, 1)
    fill(other, keys_of("other"))
    partition = made.room("a", 1 << 20, 6)
    assert isinstance(partition, SlabPartition)
    assert partition.store.free == 6, "each of them has its place, on both sides"
    assert len(partition.runs) == 6 and {run.slabs for run in partition.runs} == {MIB // slab}
    keys = keys_of(*range(6))
    fill(partition, keys)
    assert {partition.store.withdrawable(run.numbers) for run in partition.runs} == {True}, "they go one by one"
    free = made.free_bytes
    partition.store.remove(keys)
    made.settle()
    assert made.free_bytes == free + 6 * MIB


def fill_with(made: PoolPartitions, nbytes: int, names: range) -> list[bytes]:
    """One put after the other; those that found room."""
    keys = []
    for name in names:
        (key,) = keys_of((nbytes, name))
        partition = made.room("bytes", nbytes, 1)
        if partition.store.begin([key])[0] is not None:
            partition.store.seal(key, nbytes)
            keys.append(key)
    return keys


def held(made: PoolPartitions) -> set[bytes]:
    return set(made.keys())


def test_small_values_make_room_for_great_ones_and_back() -> None:
    made = pool()
    small = fill_with(made, 60_000, range(1200))
    assert len(small) == 1200 and 900 < len(held(made)) <= 1024, "64 KiB each"
    great = fill_with(made, 15 << 20, range(3))
    assert len(great) == 3 and held(made) >= set(great), "all three are here"
    assert small[-1] in held(made) and len(held(made)) < 400
    partition = made.get(f"bytes/{16 << 20}")
    assert partition is not None and partition.store.total >= 3
    back = fill_with(made, 60_000, range(2000, 3200))
    assert len(back) == 1200 and len(held(made)) > 900, "and back"
    for one in made.all():
        one.store.check_integrity()
    made.quotas.check_integrity([one.store for one in made.all()])


def test_the_coldest_go_whoever_has_them() -> None:
    made = pool(8 * MIB)
    old = fill_with(made, 4096, range(500))
    hot = fill_with(made, 60_000, range(50))
    while made.free_bytes > MIB:
        hot += fill_with(made, 60_000, range(len(hot), len(hot) + 10))
    for partition in made.family("bytes"):
        lease = partition.store.lease([key for key in old[:50] if partition.store.holds(key)], 10, now=1)
        partition.store.unlease(lease.lease_id)
    fill_with(made, 250_000, range(6))
    assert held(made) >= set(hot), "the oldest were the small ones"
    assert set(old[:50]) <= held(made), "and of those the ones that were read lately stay"
    assert not set(old) <= held(made)


def test_nobody_loses_what_is_read_written_or_pinned() -> None:
    made = pool(8 * MIB)
    first = fill_with(made, 60_000, range(200))
    partition = made.get("bytes/65536")
    assert partition is not None
    store = partition.store
    kept = [key for key in first if store.holds(key)]
    read, hard, soft = kept[3], kept[30], kept[60]
    lease = store.lease([read], 100, now=0)
    store.pin_hard([hard])
    store.pin([soft], 100, now=0)
    new = fill_with(made, 1 << 20, range(4))
    assert len(new) == 4 and {read, hard, soft} <= held(made)
    more = fill_with(made, 1 << 20, range(10, 40))
    assert {read, hard} <= held(made) and len(more) == 30
    store.unlease(lease.lease_id)
    with pytest.raises(Overloaded, match="hard_pins=9"):
        made.may_pin(9, 9 * 512 << 10)


def test_above_the_watermark_the_coldest_runs_go() -> None:
    made = PoolPartitions(BASE, 8 * MIB, high_percent=80, low_percent=50, lease_seed=3)
    keys = fill_with(made, 60_000, range(100))
    made.settle()
    assert len(held(made)) == 100, "not above it"
    keys += fill_with(made, 60_000, range(100, 110))
    made.settle()
    assert held(made) == set(keys[-62:]), "runs of four blocks; the last one is half full"
    made.settle()
    assert len(held(made)) == 62


def test_a_layout_among_busy_sizes_does_not_starve() -> None:
    made = pool(8 * MIB)
    for turn in range(30):
        fill_with(made, 60_000, range(turn * 100, turn * 100 + 100))
        layout = made.room("a model", 300_000, 4)
        fill(layout, keys_of(*((turn, i) for i in range(4))))
        assert layout.store.total >= 4
    assert any(made.get("a model").store.holds(key) for key in keys_of(*((29, i) for i in range(4))))  # type: ignore[union-attr]


def test_runs_of_all_sizes_lie_apart_after_many_moves() -> None:
    made, rng = pool(8 * MIB), random.Random(5)
    for step in range(400):
        nbytes = rng.choice([1, 5000, 60_000, 300_000, 1 << 20, 3 << 20, 8 << 20])
        fill_with(made, nbytes, range(step, step + 1))
        if step % 7 == 0:
            for partition in made.family("bytes"):
                partition.store.remove(partition.store.keys()[::3])
        if step % 11 == 0:
            made.settle()
        spans = []
        for partition in made.all():
            partition.store.check_integrity()
            assert isinstance(partition, SlabPartition)
            for run in partition.runs:
                ends = [partition.offset(0, extent) for extent in (run.start, run.start + run.extents - 1)]
                spans.append((ends[0], ends[1] + partition.shard_bytes))
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert not spans or (spans[0][0] >= BASE and spans[-1][1] <= BASE + 8 * MIB)
        assert 0 <= made.fragmentation < 1
    made.quotas.check_integrity([partition.store for partition in made.all()])
    for partition in made.all():
        partition.store.drop_all()
    made.settle()
    assert (made.free_bytes, made.fragmentation) == (8 * MIB, 0), "the pool is whole again"


def test_what_a_partition_without_memory_has_lost_is_announced() -> None:
    made = pool(4 * MIB)
    (key,) = fill_with(made, 250_000, range(1))
    assert made.take_changes().sealed == (key,)
    (whole,) = fill_with(made, 4 * MIB, range(1))
    partition = made.get(f"bytes/{4 * MIB}")
    assert partition is not None and not made.get("bytes/262144").store.total  # type: ignore[union-attr]
    partition.store.hold([whole])
    with pytest.raises(Overloaded):
        made.room("bytes", 250_000, 1)
    assert made.take_changes() == Changes((whole,), (key,))


def test_a_length_that_no_pool_holds_is_refused() -> None:
    made = pool(4 * MIB)
    assert fill_with(made, 4 * MIB - 5, range(1)), "all of the memory"
    for nbytes in (0, 4 * MIB + 1):
        with pytest.raises(InvalidRequest, match=f"shard_bytes={nbytes}"):
            made.room("bytes", nbytes, 1)


def test_a_refused_layout_takes_nothing() -> None:
    made = pool(4 * MIB)
    for shard in (0, 1, 1023, 4 * MIB + 1, -5):
        with pytest.raises(InvalidRequest, match="shard_bytes"):
            made.room("a", shard, 1)
    fill(made.room("a", 4096, 1), keys_of("k"))
    held = made.room("a", 4096, 1).store.hold(keys_of("k"))
    assert held
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
