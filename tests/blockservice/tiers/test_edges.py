"""What a tier can never hold, removals that could not be written down, and blocks between two tiers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvmesh.blockservice.tiers import reads as tier_reads
from kvmesh.blockservice.tiers import tiering
from kvmesh.blockservice.tiers.brain import Contents, TierSource
from kvmesh.blockservice.tiers.parts import TierSettings
from kvmesh.errors import Unavailable
from kvmesh.kvcache.size_classes import BYTES
from kvmesh.kvcache.store_stats import Changes
from kvmesh.kvcache.tiers import Tier
from kvmesh.ranks import protocol as m
from kvmesh.ranks.tier_sizes import largest_block, ssd_config
from tests.blockservice.test_interleavings import SHARD, Below, Disk, seal, turns
from tests.support.nodes import keys_of, until


class Refusing(Disk):
    """Cannot write removals down for a while."""

    refuse = False

    def work(self) -> None:
        if self.refuse:
            told, self.told = self.told, []
            for message in told:
                assert isinstance(message, m.TierRemove)
                gone = [k for k in _split(message.keys) if self.blocks[message.part].pop(k, None)]
                self.say(m.TierChanged(message.tier, message.part, b"", b"".join(gone)))
                self.say(m.TierDone(message.ticket, (), (), 0, 1))
        super().work()


def _split(packed: bytes) -> list[bytes]:
    return [packed[at : at + 16] for at in range(0, len(packed), 16)]


def opening(capacity: int, **changes: int) -> m.TierOpen:
    return m.TierOpen(Tier.SSD, 0, "/x", "i", capacity, min(16 << 20, capacity // 64), True, **changes)


def test_the_largest_block_is_what_fills_a_bucket() -> None:
    assert ssd_config(opening(1 << 40)).bucket_bytes == 256 << 20
    assert ssd_config(opening(1 << 40, below=Tier.OBJECT)).bucket_bytes < ssd_config(opening(1 << 40)).bucket_bytes
    for capacity in (16 << 20, 1 << 30, 1 << 40):
        told = opening(capacity)
        assert largest_block(told) == ssd_config(told).limits.max_length > told.room
    assert largest_block(m.TierOpen(Tier.OBJECT, 0, "s3://b", "i", 0, 1 << 20, True)) == 1 << 20


async def test_what_is_larger_than_a_bucket_is_neither_tried_nor_waited_for(tmp_path: Path) -> None:
    below = Below(TierSettings(tmp_path, 12 << 20, 0, 50, layouts=1))
    small, large = keys_of("small", "large")
    partition = below.partitions.room(BYTES, 2 << 20, 1)
    below.tiering.follow(partition)
    await turns()
    assert below.tiering.takes(BYTES, 1 << 20) and not below.tiering.takes(BYTES, 2 << 20)
    for key, nbytes in ((large, 2 << 20), (small, 1 << 20)):
        below.partitions.room(BYTES, 2 << 20, 1)
        assert None not in partition.store.begin([key])
        partition.store.seal(key, nbytes)
    await turns()
    assert below.disk.blocks[0] == {small: 1 << 20}
    partition.store.evict_one(small, spared=True)
    async with asyncio.timeout(10):
        await below.tiering.room(partition, 2, 60.0)
    await below.tiering.close()


async def test_a_removal_that_could_not_be_written_is_told_again(tmp_path: Path) -> None:
    below = Below(TierSettings(tmp_path, 1 << 30, 0, 50, layouts=1))
    disk = below.disk = Refusing()
    below.tiering._ranks._ranks = [disk]
    disk.say = below._said
    (key,) = keys_of("stubborn")
    seal(below.partition("one").store, key)
    await turns()
    assert key in disk.blocks[0]
    disk.refuse = True
    with pytest.raises(Unavailable, match="removals of 1 blocks could not all be written to ssd_path="):
        await below.forget([key])
    assert below.tiering.below("", key) is None, "found no more, but still on the disk"
    with pytest.raises(Unavailable):
        await below.forget([key])
    disk.refuse = False
    disk.told.clear()
    disk.late = True
    again = asyncio.ensure_future(below.forget([key]))
    await turns()
    assert [_split(message.keys) for message in disk.told if isinstance(message, m.TierRemove)] == [[key]]
    disk.work()
    await again
    disk.told.clear()
    assert await below.tiering.forget([key]) == set() and not disk.told, "done: there is nothing left to tell"
    await below.tiering.close()


def test_what_moves_between_tiers_can_be_named_and_is_not_there_yet() -> None:
    there, (one, two) = Contents(2), keys_of(1, 2)
    source = TierSource()
    source.parts.append(there)
    there.moving(0, [one, two], False)
    there.moving(1, [one], False)
    assert sorted(source.named()) == sorted([one, two]) and there.known(two)
    assert one not in there and source.keys() == [] and source.take_changes() == Changes((), ())
    there.changed(0, [one], [])
    there.moving(0, [one, two], True)
    assert there.known(one) and not there.known(two)
    there.changed(1, [one], [])
    there.moving(1, [one], True)
    assert source.named() == source.keys() == [one] and there.any_key() == one
    there.moving(0, [two], False)
    there.clear()
    assert source.named() == [] and there.any_key() is None


async def test_removals_reach_what_the_ssd_has_just_let_go_of(tmp_path: Path) -> None:
    objects = TierSettings(Path(), 0, 0, 50, layouts=1, url="memory://x")
    below = Below(TierSettings(tmp_path, 1 << 30, 0, 50, layouts=1, below=objects))
    key, other = keys_of("moving", "other")
    seal(below.partition("one").store, key, other)
    await turns()
    below.partition("one").store.evict_one(key, spared=True)
    below._said(m.TierMoving(Tier.OBJECT, 0, key))
    below._said(m.TierChanged(Tier.SSD, 0, b"", key))
    assert key in below.tiering.named() and key not in below.tiering.keys()  # noqa: SIM118
    below.disk.late = True
    asked = asyncio.ensure_future(below.forget([key, other]))
    await turns()
    told = [(message.tier, message.keys) for message in below.disk.told if isinstance(message, m.TierRemove)]
    # The faster tier first; of what it has, the slower one is told too: it may just be handed on.
    assert told == [(Tier.SSD, other), (Tier.OBJECT, key + other)]
    below.disk.work()
    await asked
    assert below.tiering.below("", other) is None
    await below.tiering.close()


async def test_a_write_that_hangs_stops_writes_until_the_tier_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiering, "WRITE_S", 0.01)
    monkeypatch.setattr(tier_reads, "PROBE_S", 0.01)
    below = Below(TierSettings(tmp_path, 1 << 30, 0, 50, layouts=1))
    first, second, third = keys_of(*range(3))
    store = below.partition("one").store
    seal(store, first)
    await turns()
    assert below.disk.blocks[0] == {first: SHARD}
    below.disk.late = True
    seal(store, second)
    await until(lambda: below.tiering.levels[0].health.failing)
    assert below.tiering.below("", first) is None and store.usage.held == 1, "its memory is the disk's until it answers"
    seal(store, third)
    await turns()
    assert sum(isinstance(message, m.TierPut) for message in below.disk.told) == 1
    await until(lambda: any(isinstance(message, m.TierProbe) for message in below.disk.told))
    below.disk.late = False
    below.disk.work()
    await until(lambda: not below.tiering.levels[0].health.failing)
    await until(lambda: set(below.disk.blocks[0]) == {first, second, third})
    await turns()
    assert store.usage.held == 0
    await below.tiering.close()


async def test_the_ssd_hears_how_often_what_it_holds_is_used_in_memory(tmp_path: Path) -> None:
    objects = TierSettings(Path(), 0, 0, 50, layouts=1, url="memory://x")
    below = Below(TierSettings(tmp_path, 1 << 30, 0, 50, layouts=1, below=objects))
    hot, cold = keys_of("hot", "cold")
    seal(below.partition("one").store, hot, cold)
    below.disk.late = True
    await turns()
    (put,) = [message for message in below.disk.told if isinstance(message, m.TierPut)]
    assert (put.keys, put.uses) == (hot + cold, bytes([1, 1])), "to be put is a use"
    below.disk.work()
    for _ in range(3):
        await below.tiering.stage("one", [hot], 0.01)  # a lease of what is in memory
    below.tiering.used("", [hot, *keys_of("strange")])  # a read without one
    below.tiering.tidy()
    used = [message for message in below.disk.told if isinstance(message, m.TierUsed)]
    assert [(message.tier, message.keys, list(message.uses)) for message in used] == [(Tier.SSD, hot + cold, [5, 1])]
    below.disk.told.clear()
    below.tiering.tidy()
    assert not below.disk.told, "said once"
    await below.tiering.close()
