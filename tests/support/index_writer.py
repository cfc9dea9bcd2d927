"""`python -m tests.support.index_writer INDEX_FD DATA_FD SECONDS`: seals, evicts and seals anew in the same extents, as
fast as it can; says "go" when it begins and how many it sealed at the end."""

from __future__ import annotations

import hashlib
import mmap
import random
import struct
import sys
import time

from kvmesh.kvcache.shared_index import IndexWriter

SLOTS, SLOT = 24, 32 << 10
KEYS = 16
ROW = struct.Struct("@QQ")


def key_of(i: int) -> bytes:
    return hashlib.sha256(str(i).encode()).digest()[:16]


def filled(key: int, serial: int) -> bytes:
    """A block whose every 16 bytes say whose they are."""
    return ROW.pack(key, serial) * (SLOT // ROW.size)


def main(index_fd: int, data_fd: int, seconds: float) -> None:
    table, data = mmap.mmap(index_fd, 0), mmap.mmap(data_fd, 0)
    writer, rng = IndexWriter(memoryview(table)), random.Random(5)
    where: dict[int, int] = {}
    free, serial = list(range(SLOTS)), 0
    print("go", flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        key = rng.randrange(KEYS)
        if key in where:
            slot = where.pop(key)
            writer.drop(key_of(key), slot * SLOT)
            free.append(slot)
        # Most often the extent that became free last: a reader may be in the middle of it.
        slot = free.pop() if rng.random() < 0.8 else free.pop(0)
        serial += 1
        at = slice(slot * SLOT, (slot + 1) * SLOT)
        data[at] = filled(rng.randrange(KEYS), 0)  # what was begun there before, and given up
        data[at] = filled(key, serial)
        writer.put(key_of(key), slot * SLOT, SLOT)
        where[key] = slot
    print(serial, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
