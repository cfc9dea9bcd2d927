"""A table in shared memory that says where sealed blocks lie: one process writes it, others read it without locks.

    header   magic, buckets, ended, beat
    bucket   │ entry │ entry │ ... 8 of them        entry: version, key, offset, nbytes (0: empty)

A key stands in one of two buckets, which follow from the key; where both are full it does not stand there at all. So
a look-up costs at most two buckets, and so does every change.

Each entry is a seqlock. Its version is odd while it is being changed, and never has the same value twice:

    reader: version, key, offset, nbytes ─▶ copy the block ─▶ version again: the same, and the bytes are the block's
    writer: void the entry ─▶ (only now) give the block's memory to anybody else

This rests on loads and stores that others see in program order (x86-64 promises it) and on 8 aligned bytes being one
load or store, which `struct` makes of a native "Q". Elsewhere (`SUPPORTED`) there is no such table.
"""

from __future__ import annotations

import os
import platform
import socket
import struct

import msgspec

from kvmesh.kvcache.keys import KEY_BYTES
from kvmesh.transfer.transports.wire import UNREADABLE

SUPPORTED = platform.machine() in ("x86_64", "AMD64")
STALE_NS = 2_000_000_000  # an index whose writer has not beaten for so long is not believed: it hears of no removal
MAX_HELLO_BYTES = 64 << 10

_MAGIC = b"kvindex1"
_HEAD = struct.Struct("@8sQQQ")
_HEAD_BYTES = 64
_ENDED, _BEAT = 16, 24  # in the header
_ENTRY = struct.Struct(f"@Q{KEY_BYTES}sQQ")
_WIDTH = 8
_BUCKET_BYTES = _WIDTH * _ENTRY.size
_WORD = struct.Struct("@Q")
_WORDS = struct.Struct("@QQ")
_BODY = struct.Struct(f"@{KEY_BYTES}sQQ")
_SIZES = struct.Struct("@" + f"{_ENTRY.size - 8}xQ" * _WIDTH)
_NOTHING = bytes(KEY_BYTES)
_MIX = 0x9E3779B97F4A7C15
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid

Found = tuple[int, int, int, int]  # where the entry stands, its version, offset, bytes


def index_bytes(blocks: int) -> int:
    """Returns the size of a table for this many blocks. With so many in it, a few in a thousand usually find no
    place."""
    return _HEAD_BYTES + -(-blocks * 5 // (4 * _WIDTH)) * _BUCKET_BYTES


class _Table:
    def __init__(self, memory: memoryview, buckets: int) -> None:
        self._memory = memory
        self._buckets = buckets

    def _place(self, key: bytes) -> tuple[int, int]:
        """Returns (offset of the key's entry, 0), or (0, the key's number) when it has none."""
        number = int.from_bytes(key[8:], "big")
        at = _HEAD_BYTES + number % self._buckets * _BUCKET_BYTES
        bucket = self._memory[at : at + _BUCKET_BYTES].tobytes()
        found = bucket.find(key)
        if found >= 0:
            if found % _ENTRY.size == 8:
                return at + found - 8, 0
            if (entry := _aligned(bucket, key, found)) >= 0:
                return at + entry, 0
        at = _second(number, self._buckets)
        bucket = self._memory[at : at + _BUCKET_BYTES].tobytes()
        entry = _aligned(bucket, key, 0)
        return (0, number) if entry < 0 else (at + entry, 0)


def _second(number: int, buckets: int) -> int:
    return _HEAD_BYTES + ((number * _MIX & (1 << 64) - 1) >> 20) % buckets * _BUCKET_BYTES


def _aligned(bucket: bytes, key: bytes, start: int) -> int:
    """Returns the offset of this key's entry in the bucket, or -1. The key's bytes may also occur across other
    fields."""
    found = bucket.find(key, start)
    while found >= 0 and found % _ENTRY.size != 8:
        found = bucket.find(key, found + 1)
    return found - 8 if found >= 0 else -1


class IndexWriter(_Table):
    """The one writer of a table in `memory` (zeroed, writable, aligned to 8 bytes), on one thread. `blocks` counts the
    blocks in it, `refused` those that found no room since the start."""

    def __init__(self, memory: memoryview) -> None:
        buckets = (len(memory) - _HEAD_BYTES) // _BUCKET_BYTES
        if buckets < 1:
            raise ValueError(f"{len(memory)} bytes: no room for a bucket")
        super().__init__(memory, buckets)
        self.blocks = 0
        self.refused = 0
        _HEAD.pack_into(memory, 0, _MAGIC, buckets, 0, 0)

    def put(self, key: bytes, offset: int, nbytes: int) -> bool:
        """Enters where a sealed block lies, in the place of an older entry. Returns False when there is no room
        for it."""
        at, number = self._place(key) if key != _NOTHING else (0, -1)
        if not at:
            at = self._free(number) if number >= 0 else 0
            if not at:
                self.refused += 1
                return False
            self.blocks += 1
        self._write(at, key, offset, nbytes)
        return True

    def drop(self, key: bytes, offset: int) -> bool:
        """Removes the entry of a block that no longer lies at `offset`, so that readers of it find out. Returns False
        when the block is not in the table or lies elsewhere."""
        at = self._place(key)[0] if key != _NOTHING else 0
        if not at or _WORD.unpack_from(self._memory, at + 24)[0] != offset:
            return False
        self._write(at, _NOTHING, 0, 0)
        self.blocks -= 1
        return True

    def beat(self, now_ns: int) -> None:
        """Notes that the writer is alive at this time (ns of the lease clock)."""
        _WORD.pack_into(self._memory, _BEAT, now_ns)

    def end(self) -> None:
        """Ends the table: readers must not believe it any more."""
        _WORD.pack_into(self._memory, _ENDED, 1)

    def _free(self, number: int) -> int:
        """Returns the offset of an empty entry in the first bucket, else in the second; 0 when there is none."""
        for at in (_HEAD_BYTES + number % self._buckets * _BUCKET_BYTES, _second(number, self._buckets)):
            sizes = _SIZES.unpack_from(self._memory, at)
            if 0 in sizes:
                return at + sizes.index(0) * _ENTRY.size
        return 0

    def _write(self, at: int, key: bytes, offset: int, nbytes: int) -> None:
        memory = self._memory
        version = _WORD.unpack_from(memory, at)[0]
        _WORD.pack_into(memory, at, version + 1)
        _BODY.pack_into(memory, at + 8, key, offset, nbytes)
        _WORD.pack_into(memory, at, version + 2)


class IndexReader(_Table):
    """Reads another process's table, on any thread. Raises ValueError when the memory is no table."""

    def __init__(self, memory: memoryview) -> None:
        magic, buckets = _HEAD.unpack_from(memory, 0)[:2] if len(memory) >= _HEAD_BYTES else (b"", 0)
        if magic != _MAGIC or not 0 < buckets <= (len(memory) - _HEAD_BYTES) // _BUCKET_BYTES:
            raise ValueError(f"{len(memory)} bytes that are no index")
        super().__init__(memory, buckets)

    def current(self, now_ns: int) -> bool:
        """Says whether the writer was alive just now (ns of the lease clock) and has not ended the table."""
        ended, beat = _WORDS.unpack_from(self._memory, _ENDED)
        return not ended and -STALE_NS < now_ns - beat < STALE_NS

    def look(self, key: bytes) -> Found | None:
        """Returns where this block lies, or None when it is not in the table. Offset and size may be wrong until
        `still` has confirmed them."""
        at = self._place(key)[0]
        if not at:
            return None
        version, found, offset, nbytes = _ENTRY.unpack_from(self._memory, at)
        if version & 1 or not nbytes or found != key:
            return None
        return at, version, offset, nbytes

    def still(self, at: int, version: int) -> bool:
        """Says whether this entry is unchanged since it was looked up, so that what was read meanwhile is the block."""
        return bool(_WORD.unpack_from(self._memory, at)[0] == version)


# ── how a reader gets it ─────────────────────────────────────────────────────────────────────────────


class IndexHello(msgspec.Struct, frozen=True):
    """What a node sends to a reader of its index with the index itself. All blocks of this incarnation lie in `nbytes`
    bytes from `base` on in the segment of `descriptor`; `index_bytes` is the size of the index."""

    store_id: str
    incarnation: int
    base: int
    nbytes: int
    index_bytes: int
    descriptor: bytes

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, packet: bytes) -> IndexHello:
        """Decodes a hello. Raises ValueError when it is malformed."""
        try:
            found = msgspec.msgpack.decode(packet, type=cls)
        except UNREADABLE as error:
            raise ValueError(f"{len(packet)} bytes that are no hello of an index: {error}") from None
        if min(found.base, found.nbytes, found.index_bytes) < 0:
            raise ValueError("a hello of an index with negative sizes")
        return found


def same_user(sock: socket.socket) -> bool:
    """Says whether the process at the other end of this unix-domain socket runs as our user."""
    told = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(told)[1] == os.geteuid())
