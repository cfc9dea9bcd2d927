"""Headers and footers: what was packed is parsed, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.tiers.ssd.format import (
    BLOCK,
    PAGE,
    REMOVED,
    FooterEntry,
    RecordHeader,
    checksum,
    footer_bytes,
    pack_bucket,
    pack_footer,
    pack_record,
    pages,
    parse_bucket,
    parse_footer,
    parse_record,
    parse_trailer,
    record_bytes,
    split_keys,
)
from tests.support.ssd_blocks import key

NONCE = b"12345678"
HEADERS = st.builds(
    RecordHeader,
    st.sampled_from([BLOCK, REMOVED]),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**64 - 1),
    st.integers(1, 2**32 - 1),
    st.integers(0, 2**64 - 1),
)


@given(HEADERS, st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_a_record_header_is_what_was_packed(header: RecordHeader, bucket: int, page: int) -> None:
    packed = pack_record(header, bucket, NONCE, page * PAGE)
    assert parse_record(packed.ljust(PAGE, b"\0"), bucket, NONCE, page * PAGE) == header


@given(HEADERS, st.data())
def test_any_flipped_bit_of_a_record_header_is_seen(header: RecordHeader, data: st.DataObject) -> None:
    packed = bytearray(pack_record(header, 7, NONCE, PAGE))
    bit = data.draw(st.integers(0, 8 * len(packed) - 1))
    packed[bit // 8] ^= 1 << bit % 8
    assert parse_record(bytes(packed), 7, NONCE, PAGE) is None


def test_a_record_belongs_to_its_bucket_and_its_place() -> None:
    packed = pack_record(RecordHeader(BLOCK, key(1), 1, 10, 99), 7, NONCE, PAGE)
    assert parse_record(packed, 7, NONCE, PAGE)
    assert parse_record(packed, 8, NONCE, PAGE) is None
    assert parse_record(packed, 7, b"87654321", PAGE) is None
    assert parse_record(packed, 7, NONCE, 2 * PAGE) is None
    assert parse_record(b"\0" * PAGE, 7, NONCE, PAGE) is None
    assert parse_record(packed[:20], 7, NONCE, PAGE) is None


@pytest.mark.parametrize("header", [RecordHeader(3, key(1), 1, 10, 99), RecordHeader(BLOCK, key(1), 1, 0, 99)])
def test_an_unknown_kind_and_an_empty_payload_are_no_record(header: RecordHeader) -> None:
    assert parse_record(pack_record(header, 7, NONCE, PAGE), 7, NONCE, PAGE) is None


def test_a_bucket_header_names_its_bucket_and_its_identity() -> None:
    page = pack_bucket(7, 42, NONCE)
    assert len(page) == PAGE
    assert parse_bucket(page, 7, 42) == NONCE
    assert parse_bucket(page, 8, 42) is None
    assert parse_bucket(page, 7, 43) is None
    assert parse_bucket(page[:30], 7, 42) is None
    for at in range(48):
        assert parse_bucket(page[:at] + bytes([page[at] ^ 1]) + page[at + 1 :], 7, 42) is None


@pytest.mark.parametrize(("blocks", "removed"), [(0, 0), (1, 0), (0, 1), (127, 3), (128, 0), (129, 300)])
def test_a_footer_is_what_was_packed_and_ends_the_file(blocks: int, removed: int) -> None:
    entries = [FooterEntry(key(n), (n + 1) * PAGE, n + 1, n * 77) for n in range(blocks)]
    gone = [key(-n & 0xFFFF) for n in range(removed)]
    offset = 10 * PAGE
    footer = pack_footer(entries, gone, 9, 7, NONCE, offset)
    size = offset + len(footer)
    assert len(footer) == footer_bytes(blocks, removed) and len(footer) % PAGE == 0
    trailer = parse_trailer(footer[-PAGE:], 7, NONCE, size)
    assert trailer is not None and (trailer.body_offset, trailer.seq) == (offset, 9)
    body = footer[: trailer.body_bytes]
    assert parse_footer(body, trailer) == (entries, gone)
    # One page more or less behind it: it does not end the file, so it is not this file's footer.
    assert parse_trailer(footer[-PAGE:], 7, NONCE, size + PAGE) is None
    assert parse_trailer(footer[-PAGE:], 8, NONCE, size) is None
    assert parse_trailer(footer[-PAGE:], 7, b"87654321", size) is None
    for at in range(0, len(body), 5):
        assert parse_footer(body[:at] + bytes([body[at] ^ 4]) + body[at + 1 :], trailer) is None
    assert not body or parse_footer(body[:-1], trailer) is None


def test_sizes() -> None:
    assert [pages(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, PAGE, PAGE, 2 * PAGE]
    assert record_bytes(1) == 2 * PAGE
    assert record_bytes(PAGE) == 2 * PAGE
    assert split_keys(key(1) + key(2)) == [key(1), key(2)]
    assert checksum(b"") == 0x2D06800538D394C2  # XXH3-64 of nothing, seed 0: as its specification has it
