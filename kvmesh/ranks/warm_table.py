"""The tables beside a warm segment have fixed slots in a locked file, which are written in place and read by the next
incarnation.

    table       the front's:   slot of each extent → which block was sealed there, and which sealing it was
    rank-N.sums each rank's:   slot of each extent → the checksum of its bytes, and which sealing it was taken of

The front writes its slot in the turn of the loop in which it seals or drops a block: before it can order anybody to
write into the extent. A checksum is taken later. It counts only while the front's slot names the same sealing, so the
order of the two writes does not matter. A kill leaves at worst one slot half written, which the slot's check shows.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import xxhash

from kvmesh.transfer import segment_file

VERSION = 1
_HEADER_BYTES = 4096
_HEADER = struct.Struct("<8sIIQ32s32sQ")  # magic, version, bytes a slot, slots, identity, note, check
_CHECK = struct.Struct("<Q")


class SlotFile:
    """Is a file of a tmpfs that this process has locked, with `slots` slots of `body` bytes, and a check each. `kept`
    says that an earlier incarnation left it, with this very identity (32 bytes); otherwise all slots are empty, and
    `note` (32 bytes) is written. Raises ConfigError, see `segment_file.lock`."""

    def __init__(self, path: str, magic: bytes, identity: bytes, slots: int, body: int, note: bytes) -> None:
        self._slots, self._body, self._size = slots, body, body + _CHECK.size
        self._blank = bytes(self._size)
        self._head = (magic, VERSION, self._size, slots, identity)
        length = -(-(_HEADER_BYTES + slots * self._size) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, mmap.PAGESIZE)
        self._lock = segment_file.lock(path)
        try:
            self.kept = os.fstat(self._lock).st_size == length
            self._map = self._open(path, length)
            self.note = self._read_head() if self.kept else None
            self.kept = self.note is not None
            if self.note is None:
                self.reset(note)
        except BaseException:
            self.close()
            raise

    def _open(self, path: str, length: int) -> mmap.mmap:
        if not self.kept and os.fstat(self._lock).st_size:
            old, self._lock = self._lock, -1
            self._lock = segment_file.replace(path, old)
        fd = segment_file.open_writable(path, self._lock, length)
        try:
            return mmap.mmap(fd, length)
        finally:
            os.close(fd)

    def _read_head(self) -> bytes | None:
        """Returns the note of the header; None if the file has another identity."""
        *head, note, check = _HEADER.unpack_from(self._map)
        body = self._map[: _HEADER.size - _CHECK.size]
        return bytes(note) if tuple(head) == self._head and xxhash.xxh3_64_intdigest(body) == check else None

    def reset(self, note: bytes) -> None:
        """Empties every slot."""
        self.kept = False
        self._map[: _HEADER.size] = bytes(_HEADER.size)
        step = 1 << 20
        for at in range(_HEADER_BYTES, len(self._map), step):
            end = min(at + step, len(self._map))
            self._map[at:end] = bytes(end - at)
        self.mark(note)

    def mark(self, note: bytes) -> None:
        """Writes the header, with this note."""
        self.note = note
        head = _HEADER.pack(*self._head, note, 0)[: -_CHECK.size]
        self._map[: _HEADER.size] = head + _CHECK.pack(xxhash.xxh3_64_intdigest(head))

    def write(self, slot: int, body: bytes) -> None:
        """Writes `body`, of the agreed length; b"" empties the slot."""
        at = _HEADER_BYTES + slot * self._size
        if body:
            body += _CHECK.pack(xxhash.xxh3_64_intdigest(body, seed=slot))
        self._map[at : at + self._size] = body or self._blank

    def read(self, slot: int) -> bytes | None:
        """Returns the slot's body; b"" if it is empty, None if it was written halfway."""
        at = _HEADER_BYTES + slot * self._size
        whole = self._map[at : at + self._size]
        if whole == self._blank:
            return b""
        body = whole[: self._body]
        return body if _CHECK.unpack_from(whole, self._body)[0] == xxhash.xxh3_64_intdigest(body, seed=slot) else None

    def used(self) -> list[int]:
        """Returns the slots that are not empty. Its cost is O(bytes), and small."""
        step = max(1, (8 << 20) // self._size)
        found: list[int] = []
        for first in range(0, self._slots, step):
            count = min(step, self._slots - first)
            at = _HEADER_BYTES + first * self._size
            rows = np.frombuffer(self._map[at : at + count * self._size], np.uint8).reshape(count, self._size)
            found += (np.flatnonzero(rows.any(axis=1)) + first).tolist()
        return found

    def close(self) -> None:
        """Leaves the file to the next incarnation."""
        self._map.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class Held(IntEnum):
    """Says what an extent held when its incarnation ended."""

    BLOCK = 1  # a sealed block
    SOMETHING = 2  # a dropped block, which readers may still have been reading


@dataclass(frozen=True, slots=True)
class Entry:
    """Is one entry of the front's table. At a node that keeps several layouts, `kind` names the layout and `place` the
    run of extents that this one belongs to."""

    slot: int
    held: Held
    key: bytes
    nbytes: int
    life: int
    serial: int
    kind: int = 0
    place: int = 0


_ENTRY = struct.Struct("<16sQQQIHH")  # key, bytes, life, place, serial, kind, held


class BlockTable:
    """Reads and writes the front's table. `segments` names the memory of all ranks (32 bytes); `life` is the
    incarnation's number, which no other has, and greater than those before as far as clocks allow."""

    def __init__(self, path: str, segments: bytes, slots: int, life: int) -> None:
        self._file = SlotFile(path, b"kvm-warm", segments, slots, _ENTRY.size, bytes(32))
        self.kept = self._file.kept
        self._life = life
        self._serial = 0

    def entries(self) -> Iterator[Entry | int]:
        """Yields what the last incarnation left in each slot that is not empty; the bare slot number if it was written
        halfway."""
        for slot in self._file.used():
            body = self._file.read(slot)
            if body is None:
                yield slot
            elif body:
                key, nbytes, life, place, serial, kind, held = _ENTRY.unpack(body)
                yield Entry(slot, Held(held), key, nbytes, life, serial, kind, place)

    def sealed(self, slot: int, key: bytes, nbytes: int, kind: int = 0, place: int = 0) -> Entry:
        """Writes that this block is complete in the slot, from now on."""
        return self._put(slot, Held.BLOCK, key, nbytes, kind, place)

    def gone(self, slot: int, held: bool, kind: int = 0, place: int = 0) -> None:
        """Writes that the slot has no block any more that can be found; `held` says that readers may still read one."""
        if held:
            self._put(slot, Held.SOMETHING, bytes(16), 0, kind, place)
        else:
            self._file.write(slot, b"")

    def _put(self, slot: int, held: Held, key: bytes, nbytes: int, kind: int, place: int) -> Entry:
        self._serial += 1
        entry = Entry(slot, held, key, nbytes, self._life, self._serial, kind, place)
        self._file.write(slot, _ENTRY.pack(key, nbytes, self._life, place, self._serial, kind, held))
        return entry

    def close(self) -> None:
        self._file.close()


_SUM = struct.Struct("<QQI")  # life, sum, serial
_NOTE = struct.Struct("<16sQ8x")  # segment, longest lease (ms)


class SumTable:
    """Reads and writes a rank's table. `segment` names its memory (16 bytes): new memory has a new name. `lease_ms` is
    the longest lease that any incarnation of it gave, this one included; `old_lease_ms` that of any before."""

    def __init__(self, path: str, identity: bytes, slots: int, lease_ms: int) -> None:
        fresh = os.urandom(16)
        self._file = SlotFile(path, b"kvm-sums", identity, slots, _SUM.size, _NOTE.pack(fresh, lease_ms))
        self.kept = self._file.kept
        assert self._file.note is not None
        self.segment, self.old_lease_ms = _NOTE.unpack(self._file.note)
        if lease_ms > self.old_lease_ms:
            self._file.mark(_NOTE.pack(self.segment, lease_ms))

    def start_anew(self, lease_ms: int) -> None:
        """Empties the table, because the memory is not the one that it was written for."""
        self.kept, self.segment, self.old_lease_ms = False, os.urandom(16), 0
        self._file.reset(_NOTE.pack(self.segment, lease_ms))

    def put(self, slot: int, life: int, serial: int, checksum: int) -> None:
        self._file.write(slot, _SUM.pack(life, checksum, serial))

    def get(self, slot: int, life: int, serial: int) -> int | None:
        """Returns the checksum taken of that sealing; None if there is none."""
        body = self._file.read(slot)
        if not body:
            return None
        found_life, checksum, found_serial = _SUM.unpack(body)
        return checksum if (found_life, found_serial) == (life, serial) else None

    def close(self) -> None:
        self._file.close()
