"""What lies in a bucket file, byte by byte. Pure: bytes in, bytes out.

    offset 0      bucket header                       one page
    4096          record: header page, payload, zeros to the next page
    ...           records, back to back, in the order in which they were written
    at the end    footer (closed buckets): entries, removed keys, zeros to the next page, trailer page

Everything starts on a page of 4 KiB, so that O_DIRECT can carry payloads from and to page-aligned memory. A header has
its bucket, the bucket's nonce (random, made with the file) and its own offset, under a checksum: pages of a payload are
never taken for a header, be they a copy of one, and a record is never taken for one of another file.
Numbers are little-endian; checksums are xxh3_64.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

PAGE = 4096
FORMAT = 1
KEY_BYTES = 16
NONCE_BYTES = 8
BLOCK, REMOVED = 1, 2  # kinds of record; a REMOVED one's payload is keys, back to back

_BUCKET = struct.Struct("<8sHHIQQ8s")
_RECORD = struct.Struct("<4sHH16sQQQQQ8s")
_TRAILER = struct.Struct("<8sHHIQ8sQQQQQ")
_ENTRY = struct.Struct("<16sQII")
_SUM = struct.Struct("<Q")
_BUCKET_MAGIC, _RECORD_MAGIC, _TRAILER_MAGIC = b"kvm-buck", b"kvmR", b"kvm-foot"

MAX_PAYLOAD = (1 << 32) - 1


class FooterEntry(NamedTuple):
    """A block in its bucket: `offset` of its header page and `length` of its payload, in bytes."""

    key: bytes
    offset: int
    length: int
    checksum: int


class RecordHeader(NamedTuple):
    """The header of a record; `seq` grows with every record of a folder."""

    kind: int
    key: bytes
    seq: int
    length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Trailer:
    """The end of a footer: where the footer's body lies and what it must hold. `seq` is the highest of the bucket's
    records."""

    body_offset: int
    entries: int
    removed: int
    seq: int
    checksum: int

    @property
    def body_bytes(self) -> int:
        """The bytes of the body, without the zeros behind it."""
        return _ENTRY.size * self.entries + KEY_BYTES * self.removed


def checksum(data: bytes | bytearray | memoryview) -> int:
    """Returns the xxh3_64 of a buffer."""
    return xxhash.xxh3_64_intdigest(data)


def pages(n: int) -> int:
    """Returns `n` bytes rounded up to whole pages."""
    return (n + PAGE - 1) // PAGE * PAGE


def record_bytes(length: int) -> int:
    """Returns the bytes that a record with a payload of `length` bytes takes in a bucket."""
    return PAGE + pages(length)


def footer_bytes(entries: int, removed: int) -> int:
    """Returns the bytes that a footer with so many entries and removed keys takes in a bucket."""
    return pages(_ENTRY.size * entries + KEY_BYTES * removed) + PAGE


def pack_bucket(number: int, identity: int, nonce: bytes) -> bytes:
    """Returns the header page of a new bucket. `identity` is the checksum of the folder's identity."""
    return _page(_BUCKET.pack(_BUCKET_MAGIC, FORMAT, 0, 0, number, identity, nonce))


def parse_bucket(page: bytes | memoryview, number: int, identity: int) -> bytes | None:
    """Returns the nonce of bucket `number`, or None when this page is not its header."""
    found = _checked(_BUCKET, page)
    if found is None:
        return None
    magic, version, _, _, its_number, its_identity, nonce = found
    return nonce if (magic, version, its_number, its_identity) == (_BUCKET_MAGIC, FORMAT, number, identity) else None


def pack_record(header: RecordHeader, bucket: int, nonce: bytes, offset: int) -> bytes:
    """Returns the first bytes of a record's header page; the rest of the page has no meaning."""
    kind, key, seq, length, payload_sum = header
    packed = _RECORD.pack(_RECORD_MAGIC, FORMAT, kind, key, seq, bucket, offset, length, payload_sum, nonce)
    return packed + _SUM.pack(checksum(packed))


def parse_record(page: bytes | memoryview, bucket: int, nonce: bytes, offset: int) -> RecordHeader | None:
    """Returns the record header at `offset` of that bucket, or None when there is none."""
    found = _checked(_RECORD, page)
    if found is None:
        return None
    magic, version, kind, key, seq, its_bucket, its_offset, length, payload_sum, its_nonce = found
    if (magic, version, its_bucket, its_offset, its_nonce) != (_RECORD_MAGIC, FORMAT, bucket, offset, nonce):
        return None
    if kind not in (BLOCK, REMOVED) or not 0 < length <= MAX_PAYLOAD:
        return None
    return RecordHeader(kind, key, seq, length, payload_sum)


def pack_footer(
    entries: Sequence[FooterEntry], removed: Sequence[bytes], seq: int, bucket: int, nonce: bytes, offset: int
) -> bytes:
    """Returns a footer that starts at `offset`: whole pages, the last of which is the trailer."""
    pack = _ENTRY.pack
    body = b"".join([pack(e.key, e.checksum, e.offset // PAGE, e.length) for e in entries]) + b"".join(removed)
    trailer = _TRAILER.pack(
        _TRAILER_MAGIC, FORMAT, 0, 0, bucket, nonce, offset, len(entries), len(removed), seq, checksum(body)
    )
    return body.ljust(pages(len(body)), b"\0") + _page(trailer)


def parse_trailer(page: bytes | memoryview, bucket: int, nonce: bytes, size: int) -> Trailer | None:
    """Returns the trailer that ends a file of `size` bytes, or None when this page is none: the bucket was not
    closed."""
    found = _checked(_TRAILER, page)
    if found is None:
        return None
    magic, version, _, _, its_bucket, its_nonce, offset, entries, removed, seq, body_sum = found
    if (magic, version, its_bucket, its_nonce) != (_TRAILER_MAGIC, FORMAT, bucket, nonce):
        return None
    if offset % PAGE or offset + footer_bytes(entries, removed) != size:
        return None
    return Trailer(offset, entries, removed, seq, body_sum)


def parse_footer(body: bytes | memoryview, trailer: Trailer) -> tuple[list[FooterEntry], list[bytes]] | None:
    """Returns entries and removed keys from a footer's body (`trailer.body_bytes` bytes), or None when it is
    damaged."""
    if len(body) != trailer.body_bytes or checksum(body) != trailer.checksum:
        return None
    split = _ENTRY.size * trailer.entries
    entries = [
        FooterEntry(key, page * PAGE, length, payload_sum)
        for key, payload_sum, page, length in _ENTRY.iter_unpack(bytes(body[:split]))
    ]
    return entries, split_keys(body[split:])


def split_keys(packed: bytes | memoryview) -> list[bytes]:
    """Returns the keys that lie back to back."""
    packed = bytes(packed)
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]


def _page(packed: bytes) -> bytes:
    return (packed + _SUM.pack(checksum(packed))).ljust(PAGE, b"\0")


def _checked(layout: struct.Struct, page: bytes | memoryview) -> tuple[Any, ...] | None:
    if len(page) < layout.size + _SUM.size or _SUM.unpack_from(page, layout.size)[0] != checksum(page[: layout.size]):
        return None
    return layout.unpack_from(page)
