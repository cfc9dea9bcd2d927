"""Objects of several cache groups that outlive their stores, in one table, over memory that a test's ranks verify."""

from __future__ import annotations

import asyncio
import random
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import xxhash
from msgspec import structs

from kvmesh.blockservice.warm.memory import KeptStore, WarmMemory
from kvmesh.kvcache.grouped_store import GroupedStore
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.quotas import NoTagQuotas
from kvmesh.ranks import protocol as m
from tests.support.group_nodes import BLOCK, GROUPS
from tests.support.nodes import keys_of

SIZES = (32, 48, 16)  # bytes of an extent of each group, at every rank
READY = m.Ready("", b"", "", "", 0, (), 0, 0, 0, 0, 0, 0, 0, False, 0, warm_segment=b"here", warm_until_ns=1)


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(f"/dev/shm/kvmesh-test-{uuid.uuid4().hex}")
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path)


@dataclass
class Rank:
    """Its memory and its sums outlive lives."""

    data: bytearray
    ready: m.Ready = READY
    sums: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    asked: list[m.WarmRow] = field(default_factory=list)

    def sum_of(self, row: m.WarmRow) -> tuple[int, int, int]:
        return row.life, row.serial, xxhash.xxh3_64_intdigest(self.data[row.offset : row.offset + row.nbytes])

    def send(self, message: m.ToRank) -> None:
        if isinstance(message, m.WarmSum):
            self.sums |= {row.slot: self.sum_of(row) for row in message.rows}
        elif isinstance(message, m.WarmVerify):
            self.asked += message.rows

    def verified(self) -> m.WarmVerified:
        rows, self.asked = self.asked, []
        good = tuple(row.slot for row in rows if self.sums.get(row.slot) == self.sum_of(row))
        return m.WarmVerified(tuple(row.slot for row in rows), good)


class Life:
    """One process's stores, over memory in which the extents of one group follow those of another."""

    def __init__(self, folder: Path, ranks: Sequence[Rank], number: int, totals: Sequence[int]) -> None:
        stores = [
            NodeStore(total, high_percent=100, low_percent=100, block_bytes=size, quotas=NoTagQuotas() if g else None)
            for g, (total, size) in enumerate(zip(totals, SIZES, strict=True))
        ]
        self.store, self.ranks = GroupedStore(GROUPS, stores, BLOCK), ranks
        self.starts = [sum(a * b for a, b in zip(totals[:g], SIZES, strict=False)) for g in range(len(SIZES))]
        self.warm = WarmMemory(str(folder), ranks, sum(totals), number)
        kept = [KeptStore(*one) for one in zip(stores, SIZES, self.starts, strict=True)]
        self.warm.keep_groups(kept)

    def place(self, group: int, extent: int) -> slice:
        start = self.starts[group] + extent * SIZES[group]
        return slice(start, start + SIZES[group])

    def fill(self, keys: Sequence[bytes], masks: Sequence[int]) -> None:
        for key, mask, extents in zip(keys, masks, self.store.begin(keys, masks), strict=True):
            for group, extent in enumerate(extents):
                for rank in self.ranks if extent is not None else ():
                    rank.data[self.place(group, extent or 0)] = random.Random(f"{key!r}{group}").randbytes(SIZES[group])
            self.store.seal(key, mask)

    def check(self, key: bytes, mask: int) -> None:
        for group in (g for g in range(len(GROUPS)) if mask >> g & 1):
            (extent,) = self.store.stores[group].hold([key])
            wanted = random.Random(f"{key!r}{group}").randbytes(SIZES[group])
            assert all(rank.data[self.place(group, extent)] == wanted for rank in self.ranks)
            self.store.stores[group].release([extent])

    async def settled(self) -> None:
        for rank in self.ranks:
            self.warm.rank_said(rank.verified())
        await asyncio.wait_for(self.warm.settled.wait(), 20)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_each_object_comes_back_to_its_group(folder: Path, ranks: int) -> None:
    totals, keys = (8, 6, 4), keys_of(*range(6))
    masks = [0b001, 0b011, 0b111, 0b011, 0b111, 0b010]
    memory = sum(total * size for total, size in zip(totals, SIZES, strict=True))
    shards = [Rank(bytearray(memory)) for _ in range(ranks)]
    shards[0].ready = structs.replace(READY, warm_until_ns=0)
    first = Life(folder, shards, 1, totals)
    await first.settled()
    first.fill(keys, masks)
    first.store.remove(keys[3:4])
    await asyncio.sleep(0)  # the ranks have their sums
    (torn,) = first.store.stores[1].hold(keys[2:3])
    shards[-1].data[first.place(1, torn)] = bytes(SIZES[1])
    first.warm.close()

    second = Life(folder, shards, 2, totals)
    second.store.remove(keys[4:5])  # before it is back
    await second.settled()
    left = [0b001, 0b011, 0b101, 0, 0, 0b010]
    assert list(second.store.masks(keys)) == left
    for key, mask in zip(keys, left, strict=True):
        second.check(key, mask)
    second.store.check_integrity()
    assert all(store.free == store.total for store in second.store.stores), "nobody holds anything back"
    second.fill(keys[3:5], [0b011, 0b111])
    assert list(second.store.masks(keys)) == [0b001, 0b011, 0b101, 0b011, 0b111, 0b010]
    more = keys_of(*range(10, 10 + second.store.stores[0].unheld))
    second.fill(more, [0b001] * len(more))
    await asyncio.sleep(0)
    second.warm.close()

    # Other numbers of extents: what a slot was of is now another group's, and does not come back as that.
    third = Life(folder, shards, 3, (4, 10, 4))
    await third.settled()
    assert any(third.store.masks(keys))
    for key, mask in zip([*keys, *more], third.store.masks([*keys, *more]), strict=True):
        third.check(key, mask)
    third.store.check_integrity()
    third.warm.close()
