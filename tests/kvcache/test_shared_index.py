"""The shared index against a dict, against adversarial interleavings, and between two processes."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import struct
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmesh.kvcache import shared_index
from kvmesh.kvcache.shared_index import STALE_NS, IndexReader, IndexWriter, index_bytes
from kvmesh.transfer.memory import allocate, map_peer
from tests.support.index_writer import KEYS, ROW, SLOT, SLOTS, filled, key_of

pytestmark = pytest.mark.skipif(not shared_index.SUPPORTED, reason="rests on x86-64's order of loads and stores")

HEAD, ENTRY = 64, 40
EXTENTS, EXTENT = 6, 48


class Table(RuleBasedStateMachine):
    """Three buckets and up to forty keys: often there is no room. Some keys are made so that they stand across the
    fields of others, or are nothing but zeros."""

    def __init__(self) -> None:
        super().__init__()
        memory = memoryview(bytearray(HEAD + 3 * 8 * ENTRY))
        self.writer, self.reader = IndexWriter(memory), IndexReader(memory)
        self.known: dict[bytes, tuple[int, int]] = {}
        self.refused = 0

    odd = st.sampled_from(
        [bytes(16), bytes(15) + b"\1", b"\1" + bytes(15), struct.pack("<QQ", 4096, 7), key_of(1)[8:] + bytes(8)]
    )
    keys = st.one_of(st.integers(0, 39).map(key_of), odd)
    offsets = st.sampled_from([0, 4096, 1 << 20, int.from_bytes(key_of(1)[8:], "little")])

    @rule(key=keys, offset=offsets, nbytes=st.sampled_from([1, 7, 4096]))
    def put(self, key: bytes, offset: int, nbytes: int) -> None:
        if self.writer.put(key, offset, nbytes):
            self.known[key] = offset, nbytes
        else:
            assert key not in self.known and (len(self.known) >= 8 or key == bytes(16))
            self.refused += 1

    @rule(key=keys, offset=offsets)
    def drop(self, key: bytes, offset: int) -> None:
        right = key in self.known and self.known[key][0] == offset
        assert self.writer.drop(key, offset) is right
        if right:
            del self.known[key]

    @rule(key=keys)
    def forget(self, key: bytes) -> None:
        if key in self.known:
            assert self.writer.drop(key, self.known.pop(key)[0])

    @rule(key=keys)
    def look(self, key: bytes) -> None:
        found = self.reader.look(key)
        assert (None if found is None else found[2:]) == self.known.get(key)
        assert found is None or self.reader.still(*found[:2])

    @invariant()
    def counted(self) -> None:
        assert self.writer.blocks == len(self.known) <= 24 and self.writer.refused == self.refused


@dataclass
class Read:
    """A reader somewhere on its way."""

    key: bytes
    found: tuple[int, int, int, int]
    bytes_: bytearray
    at: int = 0


class Protocol(RuleBasedStateMachine):
    """Extents that are sealed, evicted and written anew, byte by byte, while readers stand still anywhere between
    look-up, the halves of their copies, and the second look: what they take for the block is the block."""

    def __init__(self) -> None:
        super().__init__()
        memory = memoryview(bytearray(HEAD + 2 * 8 * ENTRY))
        self.writer, self.reader = IndexWriter(memory), IndexReader(memory)
        self.extents = [bytearray(EXTENT) for _ in range(EXTENTS)]
        self.sealed: dict[bytes, tuple[int, bytes]] = {}
        self.writing: dict[int, tuple[bytes, bytes, int]] = {}
        self.reads: list[Read] = []
        self.serial = 0

    extent = st.integers(0, EXTENTS - 1)

    @rule(extent=extent, which=st.integers(0, 7), evict=st.booleans())
    def begin(self, extent: int, which: int, evict: bool) -> None:
        """An idle block goes for it; whoever reads it is not asked."""
        key = key_of(which)
        if extent in self.writing or key in self.sealed or any(key == one[0] for one in self.writing.values()):
            return
        holder = next((one for one, (at, _) in self.sealed.items() if at == extent), None)
        if holder is not None:
            if not evict:
                return
            assert self.writer.drop(holder, extent * EXTENT)
            del self.sealed[holder]
        self.serial += 1
        self.writing[extent] = key, hashlib.sha512(key + b"%d" % self.serial).digest()[:EXTENT], 0

    @precondition(lambda self: self.writing)
    @rule(pick=st.integers(0, 99), n=st.integers(1, EXTENT))
    def write(self, pick: int, n: int) -> None:
        extent = sorted(self.writing)[pick % len(self.writing)]
        key, content, at = self.writing[extent]
        self.extents[extent][at : at + n] = content[at : at + n]
        self.writing[extent] = key, content, min(at + n, EXTENT)
        if at + n >= EXTENT:
            del self.writing[extent]
            self.sealed[key] = extent, content
            assert self.writer.put(key, extent * EXTENT, EXTENT)

    @rule(which=st.integers(0, 7))
    def remove(self, which: int) -> None:
        gone = self.sealed.pop(key_of(which), None)
        if gone is not None:
            assert self.writer.drop(key_of(which), gone[0] * EXTENT)

    @rule(which=st.integers(0, 7))
    def look(self, which: int) -> None:
        found = self.reader.look(key_of(which))
        assert (found is not None) is (key_of(which) in self.sealed)
        if found is not None and len(self.reads) < 4:
            self.reads.append(Read(key_of(which), found, bytearray(EXTENT)))

    @precondition(lambda self: self.reads)
    @rule(pick=st.integers(0, 99), n=st.integers(1, EXTENT))
    def copy(self, pick: int, n: int) -> None:
        read = self.reads[pick % len(self.reads)]
        extent = self.extents[read.found[2] // EXTENT]
        read.bytes_[read.at : read.at + n] = extent[read.at : read.at + n]
        read.at = min(read.at + n, EXTENT)

    @precondition(lambda self: any(read.at == EXTENT for read in self.reads))
    @rule(pick=st.integers(0, 99))
    def finish(self, pick: int) -> None:
        done = [read for read in self.reads if read.at == EXTENT]
        read = done[pick % len(done)]
        self.reads.remove(read)
        if self.reader.still(*read.found[:2]):
            assert self.sealed[read.key][1] == read.bytes_, "bytes of another block, taken for this one"


TestTable = Table.TestCase
TestTable.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=50, stateful_step_count=80, deadline=None)


def test_as_many_as_promised_find_room() -> None:
    rng = random.Random(0)
    for blocks in (100, 5_000):
        writer = IndexWriter(memoryview(bytearray(index_bytes(blocks))))
        assert sum(writer.put(rng.randbytes(16), 0, 1) for _ in range(blocks)) >= blocks * 0.98
        granted = IndexWriter(memoryview(bytearray(index_bytes(blocks))))
        assert all(granted.put(b"tag4" + struct.pack(">IQ", 3, i), 0, 1) for i in range(1000, 1000 + blocks))


def test_whose_writer_is_silent_or_has_ended_it_is_not_believed() -> None:
    memory = memoryview(bytearray(index_bytes(8)))
    writer, reader = IndexWriter(memory), IndexReader(memory)
    now = 10 * STALE_NS
    assert not reader.current(now), "it has never beaten"
    writer.beat(now)
    assert reader.current(now + STALE_NS - 1) and reader.current(now - 1000)
    assert not reader.current(now + STALE_NS) and not reader.current(now - STALE_NS)
    writer.end()
    assert not reader.current(now)


def test_an_entry_that_is_being_changed_is_none() -> None:
    memory = memoryview(bytearray(index_bytes(8)))
    writer, reader = IndexWriter(memory), IndexReader(memory)
    writer.put(key_of(1), 4096, 10)
    found = reader.look(key_of(1))
    assert found is not None
    at, version = found[:2]
    memory[at : at + 8] = struct.pack("@Q", version + 1)
    assert reader.look(key_of(1)) is None and not reader.still(at, version)


@pytest.mark.parametrize("bad", [b"", bytes(4096), b"kvindex1" + struct.pack("@Q", 1 << 40) + bytes(400)])
def test_other_memory_is_no_index(bad: bytes) -> None:
    with pytest.raises(ValueError, match="no index"):
        IndexReader(memoryview(bad))
    with pytest.raises(ValueError, match="no room"):
        IndexWriter(memoryview(bytearray(100)))


# ── two processes ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_process_that_reads_while_another_one_writes() -> None:
    index_fd, data_fd = os.memfd_create("index"), os.memfd_create("data")
    os.ftruncate(index_fd, index_bytes(SLOTS))
    os.ftruncate(data_fd, SLOTS * SLOT)
    argv = [sys.executable, "-m", "tests.support.index_writer", str(index_fd), str(data_fd), "2.0"]
    with subprocess.Popen(argv, pass_fds=(index_fd, data_fd), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        table, data = (mmap.mmap(fd, 0, prot=mmap.PROT_READ) for fd in (index_fd, data_fd))
        reader, memory = IndexReader(memoryview(table)), memoryview(data)
        hits = torn = 0
        latest: dict[int, int] = {}
        while process.poll() is None:
            for key in range(KEYS):
                found = reader.look(key_of(key))
                if found is None:
                    continue
                at, version, offset, nbytes = found
                copied = bytes(memory[offset : offset + nbytes])
                if not reader.still(at, version):
                    torn += 1
                    continue
                whose, serial = ROW.unpack_from(copied)
                assert whose == key and copied == filled(key, serial), "bytes that were never sealed under this key"
                assert serial >= latest.get(key, 0), "an older block after a newer one"
                latest[key] = serial
                hits += 1
        sealed = int(process.stdout.readline())
    os.close(index_fd)
    os.close(data_fd)
    assert sealed > 500 and hits > 100 and torn > 0, (sealed, hits, torn)


def test_readers_can_map_it_and_not_write_it() -> None:
    mapping, fd = allocate(index_bytes(100), "index", shared=True, huge_pages="never")
    try:
        writer = IndexWriter(mapping.view)
        writer.put(key_of(1), 4096, 5)
        seen = map_peer(fd, mapping.length)
        assert (IndexReader(seen.view).look(key_of(1)) or ())[2:] == (4096, 5)
        with pytest.raises(PermissionError), open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:
            file.write(b"x")
    finally:
        os.close(fd)
