"""The thread that writes: one log, one writer, so that records are acknowledged in the order in which they lie.

What waits is written in batches, one pwritev each, and between two batches one step of making room is done. A put is
acknowledged when the kernel has its bytes: it then survives the death of this process, and a power loss as far as the
kernel had come; a removal is acknowledged when it survives a power loss.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvmesh.tiers.calls import expired, resolve
from kvmesh.tiers.ssd.brain import Closing, Demote, RecordPlace, Reinsert, Slot
from kvmesh.tiers.ssd.core import FlushOp, PutOp, RemoveOp, SsdCore
from kvmesh.tiers.ssd.disk import FULL, Scratch, write_vector
from kvmesh.tiers.ssd.files import BucketFile
from kvmesh.tiers.ssd.format import BLOCK, KEY_BYTES, REMOVED, RecordHeader, checksum, pack_footer, pack_record, pages
from kvmesh.tiers.ssd.readers import read_run

log = logging.getLogger(__name__)

# ── the log's end ───────────────────────────────────────────────────────────────────────────────────

# Records into the open bucket, the next bucket when it is full, and room for that.
#
# One thread at a time. A bucket is synced when it is closed, before its footer is written.

BATCH_BYTES, BATCH_RECORDS = 8 << 20, 256  # of one pwritev; three pieces a record stay below IOV_MAX
REST_NS = 5_000_000_000  # puts are refused so long after space or disk have failed
Outcome = Literal["", "stored", "unwanted", "no_room", "failed"]


@dataclass(slots=True, eq=False)
class LogRecord:
    """A record to be appended. `put` is the operation it serves, `keys` are the keys that it removes; `place` and
    `hits` are set for a block that is appended anew."""

    key: bytes
    data: memoryview
    checksum: int
    put: PutOp | None = None
    keys: Sequence[bytes] = ()
    place: RecordPlace | None = None
    hits: int = 0
    outcome: Outcome = ""  # "unwanted": the block was removed, or its bucket lost, meanwhile


class Appender:
    """Writes records into buckets. `on_end(records)` is called without the lock when their outcomes are known."""

    def __init__(self, core: SsdCore, on_end: Callable[[Sequence[LogRecord]], None]) -> None:
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

    def append(self, records: Sequence[LogRecord]) -> None:
        """Appends all records (at most BATCH_RECORDS), in order, into as many buckets as they need."""
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
        """Returns whether all that was appended survives a power loss; closed buckets are synced already."""
        if self._file is None:
            return True
        try:
            self._file.sync()
        except OSError as error:
            self._core.lose(self._file.number, error)
            return False
        return True

    def make_room(self) -> bool:
        """Does one step of making room. Returns whether there may be more to do."""
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
        """Syncs the open bucket, writes its footer, and gives back what is left of its reserved space."""
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

    def _wanted(self, record: LogRecord) -> bool:
        brain = self._core.brain
        if record.put is not None:
            return brain.claimed(record.key, record.put.ticket)
        return record.place is None or brain.is_at(record.key, record.place)

    def _slots(self, records: Sequence[LogRecord]) -> list[Slot]:
        brain, slots = self._core.brain, []
        for record in records:
            if self._file is None or brain.open_bucket != self._file.number:
                break  # retired by a reader
            if not brain.fits(len(record.data), removed=len(record.keys)):
                break
            slots.append(brain.append(len(record.data), removed=len(record.keys)))
        return slots

    def _write(self, records: Sequence[LogRecord], slots: Sequence[Slot]) -> None:
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

    def _commit(self, record: LogRecord, slot: Slot) -> bool:
        brain = self._core.brain
        if record.put is not None:
            return brain.commit(record.key, record.put.ticket, slot, len(record.data), record.checksum)
        if record.place is not None:
            return brain.move(record.key, record.place, slot, record.hits)
        return brain.bury(slot, record.keys)

    def _write_failed(self, records: Sequence[LogRecord], error: OSError) -> None:
        """Handles a failed write: a full disk ends the bucket at its last good record, anything else retires it."""
        assert self._file is not None
        log.warning("bucket %d: %s", self._file.number, error)
        self._rest()
        if error.errno in FULL:
            self._count("full")
        else:
            self._core.lose(self._file.number, error)
        self.close()
        self._end(records, "no_room" if error.errno in FULL else "failed")

    def _end(self, records: Sequence[LogRecord], outcome: Outcome) -> None:
        for record in records:
            record.outcome = outcome
        self._on_end(records)

    def _rest(self) -> None:
        self._resting_until = self._core.clock() + REST_NS

    def _roll(self) -> bool:
        """Closes the open bucket and opens the next. Returns False when there is no room, or the disk fails."""
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
                self._count("full" if error.errno in FULL else "io_errors")
                # Others fill this disk: our oldest blocks go, once; then puts rest.
                if last or error.errno not in FULL or not self._force():
                    break
                continue
            with self._core.lock:
                self._core.brain.opened(number)
            return True
        self._rest()
        return False

    def _count(self, name: str) -> None:
        with self._core.lock:
            self._core.counts.add(name)

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
            if error.errno not in FULL:
                self._core.lose(file.number, error)
            size = self._cut(file, closing.offset)
        finally:
            with self._core.lock:
                self._core.brain.closed(file.number, size)
                self._core.counts.written_bytes += len(footer)

    def _cut(self, file: BucketFile, size: int) -> int:
        """Truncates a file; returns the size that it has then."""
        try:
            file.truncate(size)
        except OSError as error:
            log.warning("bucket %d: %s", file.number, error)
            return self._core.brain.limits.bucket_bytes
        return size

    def _reinsert(self, step: Reinsert) -> None:
        room, at = self._copies.take(sum(pages(place.length) for _, place, _ in step.blocks)), 0
        records: list[LogRecord] = []
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
            records.append(LogRecord(key, view, place.checksum, place=place, hits=hits))
        with self._core.lock:
            self._core.counts.read_bytes += sum(len(record.data) for record in records)
        for first in range(0, len(records), BATCH_RECORDS):
            self.append(records[first : first + BATCH_RECORDS])

    def _demote(self, step: Demote) -> None:
        """Reads evicted blocks and offers them to the tier below, as long as that has room."""
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

    def _read_whole(self, key: bytes, place: RecordPlace) -> bytearray | None:
        """Returns a block's verified bytes, or None when the disk failed or the bytes are damaged."""
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


def _header(record: LogRecord, slot: Slot) -> RecordHeader:
    kind = REMOVED if record.keys else BLOCK
    return RecordHeader(kind, record.key, slot.seq, len(record.data), record.checksum)


# ── the thread ──────────────────────────────────────────────────────────────────────────────────────


Op = PutOp | RemoveOp | FlushOp


class LogWriter:
    """The writing thread and its queue. `stop` ends it: waiting puts are answered with False, what is being written
    ends, the bucket is closed."""

    def __init__(self, core: SsdCore, max_ops: int, max_bytes: int) -> None:
        self._core = core
        self._max_ops, self._max_bytes = max_ops, max_bytes
        self._bytes = 0  # waiting
        self._queue: deque[Op] = deque()
        self._cond = threading.Condition()
        self._stopping = False
        self._unsaid: list[bytes] = []  # removed by the tier itself; the record that says so could not be written
        self._log = Appender(core, self._ended)
        core.bury = self.enqueue
        self._thread = threading.Thread(target=self._run, name="ssd-write", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """The number of operations that have not begun."""
        return len(self._queue)

    @property
    def resting(self) -> bool:
        """Whether puts are refused for a while, after space or disk have failed."""
        return self._log.resting

    def submit(self, puts: Sequence[PutOp]) -> int:
        """Queues puts and returns how many, from the first on, were taken; the queue is full, or stopped, for the
        others."""
        with self._cond:
            taken = 0
            for put in puts:
                full = len(self._queue) >= self._max_ops or self._bytes + len(put.data) > self._max_bytes
                if self._stopping or (full and self._queue):
                    break
                self._queue.append(put)
                self._bytes += len(put.data)
                taken += 1
            self._cond.notify()
        return taken

    def enqueue(self, op: RemoveOp | FlushOp) -> None:
        """Queues an operation however full the queue is; its result is False at once when the queue is stopped."""
        with self._cond:
            if not self._stopping:
                self._queue.append(op)
                self._cond.notify()
                return
        if op.future is not None:
            resolve(op.future, False)

    def stop(self) -> None:
        """Begins no more puts; waiting removals are still written."""
        with self._cond:
            self._stopping = True
            left = [op for op in self._queue if isinstance(op, PutOp)]
            self._queue = deque(op for op in self._queue if not isinstance(op, PutOp))
            self._bytes = 0
            self._cond.notify()
        for put in left:
            self.refuse(put)

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread; returns whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def refuse(self, put: PutOp, count: str = "") -> None:
        """Answers a put with False and counts the reason."""
        with self._core.lock:
            self._core.brain.unclaim(put.key, put.ticket)
            if count:
                self._core.counts.add(count)
        resolve(put.future, False)

    # ── the thread ───────────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        more = True  # a restart may have found more than there may be
        while (ops := self._take(wait=not more)) is not None:
            try:
                self._write(ops)
                more = self._log.make_room()
                if ops and isinstance(flush := ops[-1], FlushOp):
                    while self._log.make_room():
                        pass
                    resolve(flush.future, self._log.sync() if flush.sync else True)
            except Exception:
                log.exception("a write failed")
                more = False
                self._give_up(ops)
                self._end_bucket()  # a hole may be left in it: nothing may be acknowledged behind that
        self._end_bucket()

    def _end_bucket(self) -> None:
        try:
            self._log.close()
        except Exception:
            log.exception("a bucket could not be closed")

    def _take(self, *, wait: bool) -> list[Op] | None:
        """Returns the next batch, which a FlushOp ends; [] when nothing waits and `wait` is not set; None when
        stopped."""
        with self._cond:
            while wait and not self._queue and not self._stopping:
                self._cond.wait()
            if not self._queue and self._stopping:
                return None
            ops: list[Op] = []
            size = 0
            while self._queue and len(ops) < BATCH_RECORDS and size < BATCH_BYTES:
                ops.append(op := self._queue.popleft())
                if isinstance(op, FlushOp):
                    break
                if isinstance(op, PutOp):
                    size += len(op.data)
                    self._bytes -= len(op.data)
            return ops

    def _write(self, ops: Sequence[Op]) -> None:
        now = self._core.clock()
        own = [key for op in ops if isinstance(op, RemoveOp) and op.future is None for key in op.keys]
        if ops:
            with self._core.lock:  # what was put again since stands for itself
                own = [key for key in self._unsaid + own if key not in self._core.brain]
            self._unsaid = []
        records = self._removing(own)
        for op in ops:
            if isinstance(op, PutOp):
                if not op.future.set_running_or_notify_cancel() or expired(op.deadline_ns, now):
                    self.refuse(op, "expired")
                else:
                    records.append(LogRecord(op.key, op.data, checksum(op.data), put=op))
            elif isinstance(op, RemoveOp) and op.future is not None:
                records += self._removing(op.keys)
        for first in range(0, len(records), BATCH_RECORDS):
            self._log.append(records[first : first + BATCH_RECORDS])
        said = {key for record in records if record.outcome == "stored" for key in record.keys}
        self._unsaid += [key for key in own if key not in said]
        self._answer([op for op in ops if isinstance(op, RemoveOp)], said)
        self._core.tell()

    def _answer(self, removals: Sequence[RemoveOp], said: set[bytes]) -> None:
        asked = [(op.future, op.keys) for op in removals if op.future is not None]
        synced = bool(asked) and self._log.sync()
        for future, keys in asked:
            resolve(future, synced and said.issuperset(keys))

    def _ended(self, records: Sequence[LogRecord]) -> None:
        stored = [record.put for record in records if record.put is not None and record.outcome == "stored"]
        with self._core.lock:
            self._core.counts.stored += len(stored)
        for put in stored:
            resolve(put.future, True)
        for record in records:
            if record.put is not None and record.outcome != "stored":
                self.refuse(record.put, record.outcome if record.outcome in ("no_room", "failed") else "")

    def _removing(self, keys: Sequence[bytes]) -> list[LogRecord]:
        most = self._core.brain.limits.max_removed
        parts = [keys[at : at + most] for at in range(0, len(keys), most)]
        packed = [memoryview(b"".join(part)) for part in parts]
        return [
            LogRecord(bytes(KEY_BYTES), view, checksum(view), keys=part)
            for part, view in zip(parts, packed, strict=True)
        ]

    def _give_up(self, ops: Sequence[Op]) -> None:
        for op in ops:
            if isinstance(op, PutOp):
                self.refuse(op, "failed")
            elif op.future is not None:
                resolve(op.future, False)
