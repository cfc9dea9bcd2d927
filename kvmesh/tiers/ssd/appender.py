"""The log's end: records into the open bucket, the next bucket when it is full, and room for that.

One thread at a time. A bucket is synced when it is closed, before its footer is written.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvmesh.tiers.ssd.core import Core, Put
from kvmesh.tiers.ssd.disk import Scratch
from kvmesh.tiers.ssd.files import BucketFile
from kvmesh.tiers.ssd.format import BLOCK, REMOVED, RecordHeader, checksum, pack_footer, pack_record, pages
from kvmesh.tiers.ssd.plans import Closing, Demote, Place, Reinsert, Slot
from kvmesh.tiers.ssd.readers import read_run
from kvmesh.tiers.ssd.vectors import write_vector

log = logging.getLogger(__name__)

BATCH_BYTES, BATCH_RECORDS = 8 << 20, 256  # of one pwritev; three pieces a record stay below IOV_MAX
REST_NS = 5_000_000_000  # puts are refused so long after space or disk have failed
_FULL = (errno.ENOSPC, errno.EDQUOT)
Outcome = Literal["", "stored", "unwanted", "no_room", "failed"]


@dataclass(slots=True, eq=False)
class Record:
    """To be appended. `put`: for whom; `keys`: what it removes; `place`, `hits`: where from it is re-inserted."""

    key: bytes
    data: memoryview
    checksum: int
    put: Put | None = None
    keys: Sequence[bytes] = ()
    place: Place | None = None
    hits: int = 0
    outcome: Outcome = ""  # "unwanted": the block was removed, or its bucket lost, meanwhile


class Appender:
    """`on_end(records)`: their outcomes are known; called without the lock."""

    def __init__(self, core: Core, on_end: Callable[[Sequence[Record]], None]) -> None:
        self._core = core
        self._on_end = on_end
        self._resting_until = core.clock()
        self._file: BucketFile | None = None  # of the open bucket
        self._nonce = b""
        self._scratch, self._copies = Scratch(), Scratch()

    @property
    def resting(self) -> bool:
        """Whether puts should not be tried, after space or disk have failed."""
        return self._core.clock() < self._resting_until

    def append(self, records: Sequence[Record]) -> None:
        """All of them, in order, into as many buckets as it takes; at most BATCH_RECORDS."""
        while records:
            with self._core.lock:
                wanted = [record for record in records if self._wanted(record)]
                slots = self._slots(wanted)
            if len(wanted) < len(records):
                kept = set(wanted)
                self._end([record for record in records if record not in kept], "unwanted")
            if slots:
                self._write(wanted[: len(slots)], slots)
            elif wanted and not self._roll():
                self._end(wanted, "no_room")
                return
            records = wanted[len(slots) :]

    def sync(self) -> bool:
        """Whether all that was appended survives a power loss; closed buckets were synced."""
        if self._file is None:
            return True
        try:
            self._file.sync()
        except OSError as error:
            self._core.lose(self._file.number, error)
            return False
        return True

    def make_room(self) -> bool:
        """One step. Whether there may be more to do."""
        with self._core.lock:
            step = self._core.brain.next_step(BATCH_BYTES)
        if step is None:
            return False
        if isinstance(step, Reinsert):
            self._reinsert(step)
        elif isinstance(step, Demote):
            self._demote(step)
        else:
            self._core.drop(step)
        return True

    def close(self) -> None:
        """Sync, then the footer, then give back what is left of the reserved space."""
        file, self._file = self._file, None
        if file is None:
            return
        with self._core.lock:
            ours = self._core.brain.open_bucket == file.number
            closing = self._core.brain.close_open() if ours else None
        try:
            if closing is not None:
                self._write_footer(file, closing)
        finally:
            self._core.files.release(file)

    def _wanted(self, record: Record) -> bool:
        brain = self._core.brain
        if record.put is not None:
            return brain.claimed(record.key, record.put.ticket)
        return record.place is None or brain.is_at(record.key, record.place)

    def _slots(self, records: Sequence[Record]) -> list[Slot]:
        brain, slots = self._core.brain, []
        for record in records:
            if self._file is None or brain.open_bucket != self._file.number:
                break  # retired by a reader
            if not brain.fits(len(record.data), removed=len(record.keys)):
                break
            slots.append(brain.append(len(record.data), removed=len(record.keys)))
        return slots

    def _write(self, records: Sequence[Record], slots: Sequence[Slot]) -> None:
        file = self._file
        assert file is not None
        packed = [
            (pack_record(_header(record, slot), file.number, self._nonce, slot.offset), record.data)
            for record, slot in zip(records, slots, strict=True)
        ]
        try:
            file.write(write_vector(packed, self._scratch, direct=file.direct), slots[0].offset)
        except OSError as error:
            self._write_failed(records, error)
            return
        with self._core.lock:
            good = [self._commit(record, slot) for record, slot in zip(records, slots, strict=True)]
            self._core.counts.written_bytes += sum(slot.size for slot in slots)
        for record, stored in zip(records, good, strict=True):
            record.outcome = "stored" if stored else "unwanted"
        self._on_end(records)

    def _commit(self, record: Record, slot: Slot) -> bool:
        brain = self._core.brain
        if record.put is not None:
            return brain.commit(record.key, record.put.ticket, slot, len(record.data), record.checksum)
        if record.place is not None:
            return brain.move(record.key, record.place, slot, record.hits)
        return brain.bury(slot, record.keys)

    def _write_failed(self, records: Sequence[Record], error: OSError) -> None:
        """A full disk ends the bucket where it is good; anything else retires it."""
        assert self._file is not None
        log.warning("bucket %d: %s", self._file.number, error)
        self._rest()
        if error.errno not in _FULL:
            self._core.lose(self._file.number, error)
        self.close()
        self._end(records, "no_room" if error.errno in _FULL else "failed")

    def _end(self, records: Sequence[Record], outcome: Outcome) -> None:
        for record in records:
            record.outcome = outcome
        self._on_end(records)

    def _rest(self) -> None:
        self._resting_until = self._core.clock() + REST_NS

    def _roll(self) -> bool:
        """Close the open bucket, open the next. False: there is no room, or the disk fails."""
        self.close()
        for last in (False, True):
            while not self._may_open():
                if not self._force():
                    self._rest()
                    return False
            with self._core.lock:
                number, size = self._core.brain.reserve(), self._core.brain.limits.bucket_bytes
            try:
                self._file, self._nonce = self._core.files.create(number, size)
            except OSError as error:
                log.warning("bucket %d: %s", number, error)
                # Others fill this disk: our oldest blocks go, once; then puts rest.
                if last or error.errno not in _FULL or not self._force():
                    break
                continue
            with self._core.lock:
                self._core.brain.opened(number)
            return True
        with self._core.lock:
            self._core.counts.io_errors += 1
        self._rest()
        return False

    def _may_open(self) -> bool:
        with self._core.lock:
            return self._core.brain.may_open()

    def _force(self) -> bool:
        with self._core.lock:
            step = self._core.brain.force()
        if isinstance(step, Demote):
            self._demote(step)
            return True
        if step is not None:
            self._core.drop(step)
        return step is not None

    def _write_footer(self, file: BucketFile, closing: Closing) -> None:
        footer = pack_footer(closing.entries, closing.removed, closing.seq, file.number, self._nonce, closing.offset)
        page = self._scratch.take(len(footer))
        page[:] = footer
        size = self._core.brain.limits.bucket_bytes
        try:
            file.sync()
            file.write([page], closing.offset)
            file.truncate(closing.offset + len(footer))
            size = closing.offset + len(footer)
        except OSError as error:
            # On a full disk it stays, and without a footer it is walked at the next start.
            if error.errno not in _FULL:
                self._core.lose(file.number, error)
            size = self._cut(file, closing.offset)
        finally:
            with self._core.lock:
                self._core.brain.closed(file.number, size)
                self._core.counts.written_bytes += len(footer)

    def _cut(self, file: BucketFile, size: int) -> int:
        """Its size afterwards."""
        try:
            file.truncate(size)
        except OSError as error:
            log.warning("bucket %d: %s", file.number, error)
            return self._core.brain.limits.bucket_bytes
        return size

    def _reinsert(self, step: Reinsert) -> None:
        room, at = self._copies.take(sum(pages(place.length) for _, place, _ in step.blocks)), 0
        records: list[Record] = []
        for key, place, hits in step.blocks:
            view = room[at : at + place.length]
            at += pages(place.length)
            try:
                read_run(self._core.files, (place,), (view,), self._scratch)
            except OSError as error:
                self._core.lose(place.bucket, error)
                break
            if checksum(view) != place.checksum:
                self._core.corrupt(key, place)
                continue
            records.append(Record(key, view, place.checksum, place=place, hits=hits))
        with self._core.lock:
            self._core.counts.read_bytes += sum(len(record.data) for record in records)
        for first in range(0, len(records), BATCH_RECORDS):
            self.append(records[first : first + BATCH_RECORDS])

    def _demote(self, step: Demote) -> None:
        """Read what goes and offer it to the tier below, as long as that has room."""
        core, sink = self._core, self._core.below
        assert sink is not None
        for key, place in step.blocks:
            if not sink.admit(key, place.length):
                continue
            # Admitted first: who removes it after this look tells the sink too.
            with core.lock:
                here = core.brain.is_at(key, place)
            data = self._read_whole(key, place) if here else None
            if data is None:
                sink.withdraw(key)
            else:
                sink.offer(key, data)

    def _read_whole(self, key: bytes, place: Place) -> bytearray | None:
        """Its bytes, verified; None: the disk, or what is on it, has failed."""
        data = bytearray(place.length)
        view = memoryview(data)
        try:
            read_run(self._core.files, (place,), (view,), self._scratch)
        except OSError as error:
            self._core.lose(place.bucket, error)
            return None
        if checksum(view) != place.checksum:
            self._core.corrupt(key, place)
            return None
        with self._core.lock:
            self._core.counts.read_bytes += place.length
        return data


def _header(record: Record, slot: Slot) -> RecordHeader:
    kind = REMOVED if record.keys else BLOCK
    return RecordHeader(kind, record.key, slot.seq, len(record.data), record.checksum)
