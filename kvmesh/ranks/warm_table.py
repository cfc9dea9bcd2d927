"""Tables beside a warm segment: fixed slots in a locked file, written in place, read by the next life.

    table       the front's:   slot of each extent → which block was sealed there, and which sealing it was
    rank-N.sums each rank's:   slot of each extent → the sum of its bytes, and which sealing it was taken of

The front writes its slot in the turn in which it seals a block or lets it go: before it can tell anybody to write into
the extent. A sum is taken later. It counts only while the front's slot names the same sealing, so it does not matter
when it was taken, nor who overtook whom. A kill leaves at worst one slot half written, which its check tells.
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
    """`slots` slots of `body` bytes, and a check each, in a file of a tmpfs that this process has locked. `kept`: an
    earlier life left it, of this very identity (32 bytes); else all slots are empty, and `note` (32 bytes) is ours.
    ConfigError, see `segment_file.lock`."""

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
        """Its note; none: it is not ours."""
        *head, note, check = _HEADER.unpack_from(self._map)
        body = self._map[: _HEADER.size - _CHECK.size]
        return bytes(note) if tuple(head) == self._head and xxhash.xxh3_64_intdigest(body) == check else None

    def reset(self, note: bytes) -> None:
        """Every slot is empty."""
        self.kept = False
        self._map[: _HEADER.size] = bytes(_HEADER.size)
        step = 1 << 20
        for at in range(_HEADER_BYTES, len(self._map), step):
            end = min(at + step, len(self._map))
            self._map[at:end] = bytes(end - at)
        self.mark(note)

    def mark(self, note: bytes) -> None:
        """Write the header."""
        self.note = note
        head = _HEADER.pack(*self._head, note, 0)[: -_CHECK.size]
        self._map[: _HEADER.size] = head + _CHECK.pack(xxhash.xxh3_64_intdigest(head))

    def write(self, slot: int, body: bytes) -> None:
        """`body` of the agreed length; b"": the slot is empty."""
        at = _HEADER_BYTES + slot * self._size
        if body:
            body += _CHECK.pack(xxhash.xxh3_64_intdigest(body, seed=slot))
        self._map[at : at + self._size] = body or self._blank

    def read(self, slot: int) -> bytes | None:
        """Its body; b"": it is empty; none: torn."""
        at = _HEADER_BYTES + slot * self._size
        whole = self._map[at : at + self._size]
        if whole == self._blank:
            return b""
        body = whole[: self._body]
        return body if _CHECK.unpack_from(whole, self._body)[0] == xxhash.xxh3_64_intdigest(body, seed=slot) else None

    def used(self) -> list[int]:
        """Slots that are not empty. O(bytes), fast."""
        step = max(1, (8 << 20) // self._size)
        found: list[int] = []
        for first in range(0, self._slots, step):
            count = min(step, self._slots - first)
            at = _HEADER_BYTES + first * self._size
            rows = np.frombuffer(self._map[at : at + count * self._size], np.uint8).reshape(count, self._size)
            found += (np.flatnonzero(rows.any(axis=1)) + first).tolist()
        return found

    def close(self) -> None:
        """Leaves it to the next life."""
        self._map.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class Held(IntEnum):
    """What an extent held when its life ended."""

    BLOCK = 1  # a sealed block
    SOMETHING = 2  # one that is found no more, but that readers may still have had


@dataclass(frozen=True, slots=True)
class Entry:
    """Of the front's table. `kind` and `place`: of a node that keeps several layouts, which, and what names the run of
    extents that this one is of."""

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
    """The front's. `segments`: what names the memory of all ranks (32 bytes); `life`: no other life's, and greater
    than those before, as far as clocks allow."""

    def __init__(self, path: str, segments: bytes, slots: int, life: int) -> None:
        self._file = SlotFile(path, b"kvm-warm", segments, slots, _ENTRY.size, bytes(32))
        self.kept = self._file.kept
        self._life = life
        self._serial = 0

    def entries(self) -> Iterator[Entry | int]:
        """What the last life left in each slot that is not empty; a number: that slot is torn."""
        for slot in self._file.used():
            body = self._file.read(slot)
            if body is None:
                yield slot
            elif body:
                key, nbytes, life, place, serial, kind, held = _ENTRY.unpack(body)
                yield Entry(slot, Held(held), key, nbytes, life, serial, kind, place)

    def sealed(self, slot: int, key: bytes, nbytes: int, kind: int = 0, place: int = 0) -> Entry:
        """This block is complete there, from now on."""
        return self._put(slot, Held.BLOCK, key, nbytes, kind, place)

    def gone(self, slot: int, held: bool, kind: int = 0, place: int = 0) -> None:
        """No block is there any more that can be found; `held`: readers may have one yet."""
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
    """A rank's. `segment` names its memory (16 bytes): new memory has a new name. `lease_ms`: the longest lease that
    any life of it gave, this one included; `old_lease_ms`: any before."""

    def __init__(self, path: str, identity: bytes, slots: int, lease_ms: int) -> None:
        fresh = os.urandom(16)
        self._file = SlotFile(path, b"kvm-sums", identity, slots, _SUM.size, _NOTE.pack(fresh, lease_ms))
        self.kept = self._file.kept
        assert self._file.note is not None
        self.segment, self.old_lease_ms = _NOTE.unpack(self._file.note)
        if lease_ms > self.old_lease_ms:
            self._file.mark(_NOTE.pack(self.segment, lease_ms))

    def start_anew(self, lease_ms: int) -> None:
        """The memory is another's than it was written for."""
        self.kept, self.segment, self.old_lease_ms = False, os.urandom(16), 0
        self._file.reset(_NOTE.pack(self.segment, lease_ms))

    def put(self, slot: int, life: int, serial: int, checksum: int) -> None:
        self._file.write(slot, _SUM.pack(life, checksum, serial))

    def get(self, slot: int, life: int, serial: int) -> int | None:
        """The sum taken of that sealing; none: there is none."""
        body = self._file.read(slot)
        if not body:
            return None
        found_life, checksum, found_serial = _SUM.unpack(body)
        return checksum if (found_life, found_serial) == (life, serial) else None

    def close(self) -> None:
        self._file.close()
