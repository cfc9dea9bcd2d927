"""What the SSD tier's brain is told and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvmesh.tiers.ssd.format import MAX_PAYLOAD, PAGE, Entry, footer_bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """`capacity_bytes`: of all files, never exceeded. Eviction begins when one more bucket would not fit into
    `high_percent` of it and goes on until it would fit into `low_percent`. A record goes into the next round when it
    was read `reinsert_hits` times, hottest first, up to `reinsert_percent` of a bucket's bytes."""

    capacity_bytes: int
    bucket_bytes: int
    high_percent: int = 98
    low_percent: int = 96
    reinsert_percent: int = 25
    reinsert_hits: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.low_percent <= self.high_percent <= 100:
            raise ValueError(
                f"low_percent={self.low_percent}, high_percent={self.high_percent}: 0 < low <= high <= 100"
            )
        if not 0 <= self.reinsert_percent <= 50 or self.reinsert_hits < 1:
            raise ValueError(
                f"reinsert_percent={self.reinsert_percent} (0..50), reinsert_hits={self.reinsert_hits} (>=1)"
            )
        if self.bucket_bytes % PAGE or self.bucket_bytes < 16 * PAGE:
            raise ValueError(f"bucket_bytes={self.bucket_bytes}: must be a multiple of {PAGE}, at least {16 * PAGE}")
        if self.capacity_bytes * self.low_percent < 300 * self.bucket_bytes:
            raise ValueError(
                f"capacity_bytes={self.capacity_bytes}: low_percent={self.low_percent} of it must hold three "
                f"buckets of bucket_bytes={self.bucket_bytes}"
            )

    @property
    def max_length(self) -> int:
        """Of a payload: one record, its bucket's header and footer fill a bucket."""
        return min(self.bucket_bytes - 2 * PAGE - footer_bytes(1, 0), MAX_PAYLOAD)

    @property
    def max_removed(self) -> int:
        """Keys that one record says are removed: with its footer it takes about half a bucket at most."""
        return min(4096, self.bucket_bytes // 64)


class Place(NamedTuple):
    """Where a block lies: the `ordinal`-th record of a bucket; `offset` of its header page, `length` of its payload."""

    bucket: int
    ordinal: int
    offset: int
    length: int
    checksum: int


class Slot(NamedTuple):
    """Room for one record in the open bucket, `size` bytes from `offset` on."""

    bucket: int
    offset: int
    size: int
    seq: int


@dataclass(frozen=True, slots=True)
class Closing:
    """What the footer of a bucket says; it goes to `offset`, its bucket's tail. `seq`: the highest written."""

    bucket: int
    offset: int
    entries: list[Entry]
    removed: list[bytes]
    seq: int


@dataclass(frozen=True, slots=True)
class Reinsert:
    """Append these again (in order of offset) and say `move`; those that are elsewhere by then are passed over."""

    blocks: tuple[tuple[bytes, Place, int], ...]  # with the hits to say to `move`


@dataclass(frozen=True, slots=True)
class Demote:
    """These go with their bucket: offer them to the tier below first, those that are still where it says."""

    blocks: tuple[tuple[bytes, Place], ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """The file of this bucket goes; say `gone` when its space is free."""

    bucket: int
