"""What a folder's buckets hold, found at start.

A closed bucket tells by its footer: three reads, whatever it holds. One that was being written (or whose footer is
damaged) is walked from header to header, its payloads are read and verified, what is torn at its end is cut off, and it
gets its footer now. Whatever is found is verified again whenever it is read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import xxhash

from kvmesh.tiers.ssd.brain import Brain
from kvmesh.tiers.ssd.disk import MEDIUM, Scratch
from kvmesh.tiers.ssd.files import BucketFile, BucketFiles
from kvmesh.tiers.ssd.folder import TierFolder
from kvmesh.tiers.ssd.format import (
    BLOCK,
    PAGE,
    FooterEntry,
    RecordHeader,
    checksum,
    footer_bytes,
    pack_footer,
    pages,
    parse_bucket,
    parse_footer,
    parse_record,
    parse_trailer,
    record_bytes,
    split_keys,
)

log = logging.getLogger(__name__)

READ_BYTES = 1 << 20
Verify = Literal["open", "all"]


@dataclass(slots=True)
class RecoveryReport:
    """What a start found and did. `blocks` can be found now; the other fields count what was met on the way."""

    blocks: int = 0
    buckets: int = 0
    footers: int = 0  # buckets that were read by their footer
    walked: int = 0  # buckets without a (valid) one, read from header to header
    records: int = 0  # entries of footers, headers walked over
    verified: int = 0  # payloads read and right
    corrupt: int = 0  # payloads read and wrong
    damaged_pages: int = 0  # pages walked over where a header should have been
    torn_bytes: int = 0  # cut off behind the last good record of walked buckets
    unusable: int = 0  # files that were no bucket, or could not be read: removed
    removed_keys: int = 0  # said by the records there are
    bytes_read: int = 0


@dataclass(slots=True)
class _Found:
    entries: list[FooterEntry]
    removed: list[bytes]
    seq: int
    size: int


class Recovery:
    """Reads a folder at the start: `run` fills the brain. `verify` "open" reads the payloads of buckets that were not
    closed, "all" those of all buckets. It blocks, and needs the folder for itself."""

    def __init__(self, folder: TierFolder, files: BucketFiles, brain: Brain, verify: Verify = "open") -> None:
        self.report = RecoveryReport()
        self.bad: list[bytes] = []  # keys of blocks in closed buckets that were read and are damaged: to be removed
        self._folder = folder
        self._files = files
        self._brain = brain
        self._verify_all = verify == "all"
        self._scratch = Scratch()

    def run(self) -> RecoveryReport:
        """Restores all buckets, oldest first. A bucket that the medium cannot read is removed and counted. Raises
        OSError for failures that are not the medium's (no descriptors left): nothing is lost then, another start may
        find it."""
        report = self.report
        for number in self._folder.buckets():
            try:
                found = self._bucket(number)
            except OSError as error:
                if error.errno not in MEDIUM:
                    raise
                log.warning("%s: %s", self._folder.bucket(number), error.strerror)
                found = None
            if found is None:
                report.unusable += 1
                self._files.drop(number)
            elif not found.entries and not found.removed:
                self._files.drop(number)
            else:
                report.buckets += 1
                report.removed_keys += len(found.removed)
                self._brain.restore(number, found.size, found.entries, found.removed, found.seq)
            self._brain.start_after(number, 0)
        report.blocks = len(self._brain)
        return report

    def _bucket(self, number: int) -> _Found | None:
        file = self._files.acquire(number)
        try:
            size = file.size() // PAGE * PAGE
            nonce = None if size < PAGE else parse_bucket(self._read(file, 0, PAGE), number, self._folder.identity)
            if nonce is None:
                return None
            found = self._by_footer(file, nonce, size)
            if found is None:
                self.report.walked += 1
                found = self._walk(file, nonce, size)
                self._close(file, nonce, found)
            return found
        finally:
            self._files.release(file)

    # ── a closed bucket ──────────────────────────────────────────────────────────────────────────────

    def _by_footer(self, file: BucketFile, nonce: bytes, size: int) -> _Found | None:
        trailer = parse_trailer(self._read(file, size - PAGE, PAGE), file.number, nonce, size)
        if trailer is None:
            return None
        body = self._read(file, trailer.body_offset, pages(trailer.body_bytes))[: trailer.body_bytes]
        parsed = parse_footer(body, trailer)
        if parsed is None:
            return None
        entries, removed = parsed
        self.report.footers += 1
        self.report.records += len(entries)
        if self._verify_all:
            right = [self._payload_right(file, entry) for entry in entries]
            self.bad += [entry.key for entry, good in zip(entries, right, strict=True) if not good]
            entries = [entry for entry, good in zip(entries, right, strict=True) if good]
        return _Found(entries, removed, trailer.seq, size)

    # ── one that was being written ───────────────────────────────────────────────────────────────────

    def _walk(self, file: BucketFile, nonce: bytes, size: int) -> _Found:
        """Reads a bucket record by record. Later records of a key replace earlier ones, and records of removed keys end
        those before."""
        alive: dict[bytes, FooterEntry] = {}
        removed: dict[bytes, None] = {}
        seq, end = 0, PAGE
        for offset, header in self._headers(file, nonce, size):
            entry = FooterEntry(header.key, offset, header.length, header.checksum)
            if not self._payload_right(file, entry):
                continue
            seq, end = max(seq, header.seq), offset + record_bytes(header.length)
            if header.kind == BLOCK:
                alive[header.key] = entry
                continue
            for key in split_keys(self._read(file, offset + PAGE, pages(header.length))[: header.length]):
                alive.pop(key, None)
                removed[key] = None
        return _Found(list(alive.values()), list(removed), seq, end)

    def _headers(self, file: BucketFile, nonce: bytes, size: int) -> Iterator[tuple[int, RecordHeader]]:
        """Yields every header, in order. Zeros in the place of a header end the bucket: records are acknowledged in
        order, so none behind counts. Anything else is damage, after which the next header is searched for."""
        offset, damaged = PAGE, False
        while offset < size:
            page = self._read(file, offset, PAGE)
            header = parse_record(page, file.number, nonce, offset)
            if header is None or offset + record_bytes(header.length) > size:
                written = any(page)
                if not written and not damaged:
                    return
                self.report.damaged_pages += written
                damaged = True
                offset += PAGE
                continue
            damaged = False
            self.report.records += 1
            yield offset, header
            offset += record_bytes(header.length)

    def _close(self, file: BucketFile, nonce: bytes, found: _Found) -> None:
        """Cuts off what is torn and writes the footer. When the disk is too full for it, the bucket is walked again
        next time."""
        end = found.size
        self.report.torn_bytes += file.size() - end
        file.truncate(end)
        footer = pack_footer(found.entries, found.removed, found.seq, file.number, nonce, end)
        page = self._scratch.take(len(footer))
        page[:] = footer
        try:
            file.sync()
            file.write([page], end)
            found.size = end + footer_bytes(len(found.entries), len(found.removed))
        except OSError as error:
            log.warning("%s: no footer: %s", self._folder.bucket(file.number), error.strerror)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────

    def _read(self, file: BucketFile, offset: int, size: int) -> memoryview:
        """Returns bytes of the file; the view is valid until the next read."""
        view = self._scratch.take(size)
        file.read([view], offset)
        self.report.bytes_read += size
        return view

    def _payload_right(self, file: BucketFile, entry: FooterEntry) -> bool:
        right = self._sum(file, entry.offset + PAGE, entry.length) == entry.checksum
        self.report.verified += right
        self.report.corrupt += not right
        return right

    def _sum(self, file: BucketFile, offset: int, length: int) -> int:
        if length <= READ_BYTES:
            return checksum(self._read(file, offset, pages(length))[:length])
        running = xxhash.xxh3_64()
        for at in range(0, length, READ_BYTES):
            part = min(READ_BYTES, length - at)
            running.update(self._read(file, offset + at, pages(part))[:part])
        return running.intdigest()
