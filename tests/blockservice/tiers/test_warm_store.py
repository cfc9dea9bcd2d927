"""Blocks that outlive a store, over a memory of a few bytes an extent: ended at any moment, sums taken at any other."""

from __future__ import annotations

import random
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import xxhash

from kvmesh.blockservice.warm.store import ExtentLayout, WarmStore
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.store_stats import StoreExhausted
from kvmesh.ranks.protocol import WarmRow
from kvmesh.ranks.warm_table import BlockTable, Entry, SlotFile, SumTable

EXTENTS = 12
SHARD = 8
SEEDS = range(60)
LEASE_NS = 1_000


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(f"/dev/shm/kvmesh-test-{uuid.uuid4().hex}")
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path)


@dataclass
class Memory:
    """What outlives lives: bytes, and what the world knows of the last life."""

    data: bytearray = field(default_factory=lambda: bytearray(EXTENTS * SHARD))
    removed: set[bytes] = field(default_factory=set)
    readable: dict[int, bytes] = field(default_factory=dict)  # extent → bytes that a reader's lease promises

    def at(self, extent: int) -> bytes:
        return bytes(self.data[extent * SHARD : (extent + 1) * SHARD])


class Life:
    """One process's, front and rank; `rng` decides when sums are taken."""

    def __init__(self, folder: Path, memory: Memory, rng: random.Random, number: int) -> None:
        self.memory, self.rng = memory, rng
        self.store = NodeStore(EXTENTS, high_percent=95, low_percent=80)
        self.table = BlockTable(f"{folder}/table", bytes(32), EXTENTS, number)
        self.sums = SumTable(f"{folder}/sums", bytes(32), EXTENTS, 1)
        self.unsummed: list[WarmRow] = []
        place = ExtentLayout(SHARD, lambda e: e, lambda e: e * SHARD)
        self.warm = WarmStore(self.store, place, self.table, 1, self.unsummed.append)
        found = [(e.slot, e) if isinstance(e, Entry) else (e, None) for e in self.table.entries()]
        self.rows = self.warm.restore(found) if self.table.kept else []
        self.sealed: dict[bytes, bytes] = {}
        self.now = 0

    def verify(self, most: int = EXTENTS) -> None:
        rows, self.rows = self.rows[:most], self.rows[most:]
        good = [row.slot for row in rows if self.sums.get(row.slot, row.life, row.serial) == self._sum(row)]
        self.warm.verified([row.slot for row in rows], good)

    def _sum(self, row: WarmRow) -> int:
        return xxhash.xxh3_64_intdigest(self.memory.data[row.offset : row.offset + row.nbytes])

    def step(self) -> None:
        rng, store = self.rng, self.store
        match rng.randrange(8):
            case 0 | 1 | 2:
                self.write(rng.randbytes(16))
            case 3:
                self.write(rng.choice(store.keys() or [rng.randbytes(16)]))
            case 4:
                for _ in range(rng.randrange(4)):
                    if self.unsummed:
                        row = self.unsummed.pop(rng.randrange(len(self.unsummed)))
                        self.sums.put(row.slot, row.life, row.serial, self._sum(row))
            case 5:
                keys = store.keys()
                if keys:
                    key = rng.choice(keys)
                    extent = store.lease((key,), LEASE_NS, self.now).extents[0]
                    assert extent is not None
                    self.memory.readable[extent] = self.memory.at(extent)
            case 6:
                gone = [rng.choice([*store.keys(), *self.warm.candidates(), rng.randbytes(16)])]
                store.remove(gone)
                self.memory.removed.update(gone)
            case 7:
                self.verify(rng.randrange(3))

    def write(self, key: bytes) -> None:
        (extent,) = self.store.begin([key])
        if extent is None:
            return
        assert extent not in self.memory.readable, "a reader's extent is written"
        half = self.rng.randbytes(SHARD // 2)
        self.memory.data[extent * SHARD : extent * SHARD + SHARD // 2] = half
        if self.rng.randrange(6) == 0:
            return  # dies in the middle of it, or is very slow
        content = (key * SHARD)[:SHARD]
        self.memory.data[extent * SHARD : (extent + 1) * SHARD] = content
        self.store.seal(key)
        self.memory.removed.discard(key)

    def kill(self) -> None:
        """Files are let go as the kernel does; nothing is written."""
        self.table._file.close()
        self.sums._file.close()


def check(life: Life) -> int:
    """All that is found has its bytes, and nobody removed it."""
    keys = life.store.keys()
    for key in keys:
        (extent,) = life.store.hold([key])
        assert life.memory.at(extent) == (key * SHARD)[:SHARD]
        life.store.release((extent,))
    assert not life.memory.removed.intersection(keys)
    life.store.check_integrity()
    return len(keys)


@pytest.mark.parametrize("seed", SEEDS)
def test_only_what_was_sealed_comes_back_whenever_a_life_ends(folder: Path, seed: int) -> None:
    rng, memory, back = random.Random(seed), Memory(), 0
    for number in range(1, 7):
        life = Life(folder, memory, rng, number)
        while life.rows and rng.randrange(3):
            life.step()
        life.verify()
        assert life.warm.looked_through
        back += check(life)
        for _ in range(rng.randrange(8)):
            life.step()
        memory.readable.clear()  # their leases are over
        life.warm.let_go()
        life.store.check_integrity()
        for _ in range(rng.randrange(40)):
            life.step()
            life.store.expire(life.now)
        check(life)
        life.kill()
    assert back or seed, "the first seed brings something back"


def test_readers_of_the_last_life_keep_what_they_read(folder: Path) -> None:
    memory, rng = Memory(), random.Random(1)
    first = Life(folder, memory, rng, 1)
    keys = [bytes([n]) * 16 for n in range(9)]
    for key in keys:
        first.store.adopt(key, first.store.allocate(1)[0])
    leased = first.store.lease(keys[:6], LEASE_NS, 0).extents
    first.store.remove(keys[:3])  # found no more, read yet
    first.kill()
    second = Life(folder, memory, rng, 2)
    second.verify()  # nothing was summed: nothing comes back
    assert not second.store.keys()
    free = second.store.allocate(second.store.free)
    assert not set(leased) & set(free)
    with pytest.raises(StoreExhausted):
        second.store.allocate(1)
    second.warm.let_go()
    assert set(second.store.allocate(second.store.free)) | set(free) == set(range(EXTENTS))
    second.kill()
    third = Life(folder, memory, rng, 3)
    assert third.store.free == EXTENTS, "what was let go is held back by no later life"
    third.kill()


def test_chains_keep_their_order_of_eviction(folder: Path) -> None:
    """A chain's head outlives its tail, in the next life too."""
    memory, rng = Memory(), random.Random(1)
    first = Life(folder, memory, rng, 1)
    keys = [bytes([n]) * 16 for n in range(6)]
    for key in keys:
        (extent,) = first.store.allocate(1)
        memory.data[extent * SHARD : (extent + 1) * SHARD] = (key * SHARD)[:SHARD]
        first.store.adopt(key, extent)
    for row in first.unsummed:
        first.sums.put(row.slot, row.life, row.serial, first._sum(row))
    first.kill()
    second = Life(folder, memory, rng, 2)
    second.verify()
    assert second.warm.back == len(keys)
    second.warm.let_go()
    assert second.store.coldest(6) == keys[::-1]
    second.kill()


def test_slots_tell_when_they_are_torn_or_anothers(folder: Path) -> None:
    rng = random.Random(5)
    bodies = [rng.randbytes(20) for _ in range(30)]
    slots = SlotFile(f"{folder}/slots", b"testtest", b"i" * 32, 40, 20, b"n" * 32)
    assert not slots.kept
    for slot, body in enumerate(bodies):
        slots.write(slot, body)
    slots.write(3, b"")
    slots.close()
    path = folder / "slots"
    path.chmod(0o600)
    whole = bytearray(path.read_bytes())
    for slot in (7, 11):
        whole[4096 + 28 * slot + rng.randrange(28)] ^= 1 << rng.randrange(8)
    whole[4096 + 28 * 12 : 4096 + 28 * 13], whole[4096 + 28 * 13 : 4096 + 28 * 14] = (
        whole[4096 + 28 * 13 : 4096 + 28 * 14],
        whole[4096 + 28 * 12 : 4096 + 28 * 13],
    )
    path.write_bytes(whole)
    again = SlotFile(f"{folder}/slots", b"testtest", b"i" * 32, 40, 20, b"o" * 32)
    assert again.kept and again.note == b"n" * 32
    expected: list[bytes | None] = [*bodies, *[b""] * 10]
    expected[3] = b""
    expected[7] = expected[11] = expected[12] = expected[13] = None
    assert [again.read(slot) for slot in range(40)] == expected
    again.close()
    for identity, count in ((b"j" * 32, 40), (b"j" * 32, 41), (b"j" * 32, 4000)):
        other = SlotFile(f"{folder}/slots", b"testtest", identity, count, 20, b"o" * 32)
        assert not other.kept and other.note == b"o" * 32
        assert all(other.read(slot) == b"" for slot in range(count))
        other.write(1, bodies[0])
        other.close()


def test_a_block_is_back_when_every_rank_has_its_shard(folder: Path) -> None:
    table = BlockTable(f"{folder}/table", bytes(32), EXTENTS, 1)
    place = ExtentLayout(SHARD, lambda e: e, lambda e: e * SHARD)
    entries = [table.sealed(slot, bytes([slot]) * 16, SHARD) for slot in range(4)]
    store = NodeStore(EXTENTS)
    warm = WarmStore(store, place, table, 2, lambda row: None)
    rows = warm.restore([(entry.slot, entry) for entry in entries])
    assert [(row.slot, row.life, row.serial) for row in rows] == [(e.slot, e.life, e.serial) for e in entries]
    warm.verified([0, 1, 2, 3], [0, 1, 2])
    assert (store.keys(), warm.looked_through) == ([], False)
    warm.verified([3, 1], [3, 1])
    assert store.keys() == [bytes([1]) * 16]
    warm.verified([0, 2], [2])
    assert (sorted(store.keys()), warm.looked_through) == ([bytes([1]) * 16, bytes([2]) * 16], True)
    warm.let_go()
    assert store.usage.idle == 2 and store.usage.unheld == EXTENTS - 2
    warm.close()
    table.close()


def test_a_sum_is_of_one_sealing(folder: Path) -> None:
    sums = SumTable(f"{folder}/sums", bytes(32), 4, 500)
    sums.put(2, 7, 9, 1234)
    assert sums.get(2, 7, 9) == 1234
    assert [sums.get(2, 7, 8), sums.get(2, 6, 9), sums.get(1, 7, 9)] == [None] * 3
    name = sums.segment
    sums.close()
    again = SumTable(f"{folder}/sums", bytes(32), 4, 900)
    assert (again.kept, again.segment, again.old_lease_ms, again.get(2, 7, 9)) == (True, name, 500, 1234)
    again.close()
    third = SumTable(f"{folder}/sums", bytes(32), 4, 100)
    assert third.old_lease_ms == 900, "the longest lease that any life gave"
    third.start_anew(100)
    assert third.segment != name and third.get(2, 7, 9) is None
    third.close()
