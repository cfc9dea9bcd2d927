"""One bucket's records, as the brain keeps them: columns, about 40 bytes a record beside its key."""

from __future__ import annotations

from array import array

from kvmesh.tiers.ssd.format import PAGE, Entry, record_bytes


class Bucket:
    """`ordinal`: a record's number in the order of writing. Whether it is alive only the index knows."""

    __slots__ = (
        "checksums",
        "closed",
        "end",
        "hits",
        "keys",
        "lengths",
        "live",
        "live_bytes",
        "number",
        "pages",
        "removed",
        "reserved",
        "reserved_removed",
        "seq",
        "size",
        "tail",
    )

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size  # bytes that its file takes
        self.tail = self.end = PAGE  # where the next record goes; where the last written one ends
        self.closed = False
        self.live = self.live_bytes = 0
        self.seq = 0  # highest written
        self.reserved = self.reserved_removed = 0  # records being written, removed keys in them
        self.removed: list[bytes] = []
        self.keys: list[bytes] = []
        self.pages = array("I")
        self.lengths = array("I")
        self.checksums = array("Q")
        self.hits = bytearray()

    def add(self, entry: Entry, hits: int) -> int:
        """A live record; its ordinal."""
        self.keys.append(entry.key)
        self.pages.append(entry.offset // PAGE)
        self.lengths.append(entry.length)
        self.checksums.append(entry.checksum)
        self.hits.append(hits)
        self.live += 1
        self.live_bytes += entry.length
        self.end = max(self.end, entry.offset + record_bytes(entry.length))
        return len(self.keys) - 1

    def entry(self, ordinal: int) -> Entry:
        """What a footer says of it."""
        return Entry(self.keys[ordinal], self.pages[ordinal] * PAGE, self.lengths[ordinal], self.checksums[ordinal])
