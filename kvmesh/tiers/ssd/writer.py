"""The thread that writes: one log, one writer, so that records are acknowledged in the order in which they lie.

What waits is written in batches, one pwritev each, and between two batches one step of making room is done. A put is
acknowledged when the kernel has its bytes: it then survives the death of this process, and a power loss as far as the
kernel had come; a removal is acknowledged when it survives a power loss.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

from kvmesh.tiers.calls import expired, resolve
from kvmesh.tiers.ssd.appender import BATCH_BYTES, BATCH_RECORDS, Appender, Record
from kvmesh.tiers.ssd.core import Core, Flush, Put, Remove
from kvmesh.tiers.ssd.format import KEY_BYTES, checksum

log = logging.getLogger(__name__)

Op = Put | Remove | Flush


class Writer:
    """See above. `stop` ends it: what waits is answered False, what is being written ends, the bucket is closed."""

    def __init__(self, core: Core, max_ops: int, max_bytes: int) -> None:
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
        """Operations that have not begun."""
        return len(self._queue)

    @property
    def resting(self) -> bool:
        """Whether puts are refused for a while, after space or disk have failed."""
        return self._log.resting

    def submit(self, puts: Sequence[Put]) -> int:
        """How many, from the first on, were taken; the queue is full for the others, or over."""
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

    def enqueue(self, op: Remove | Flush) -> None:
        """Taken however full the queue is; False at once when it is over."""
        with self._cond:
            if not self._stopping:
                self._queue.append(op)
                self._cond.notify()
                return
        if op.future is not None:
            resolve(op.future, False)

    def stop(self) -> None:
        """Begin no more puts; removals that wait are still written."""
        with self._cond:
            self._stopping = True
            left = [op for op in self._queue if isinstance(op, Put)]
            self._queue = deque(op for op in self._queue if not isinstance(op, Put))
            self._bytes = 0
            self._cond.notify()
        for put in left:
            self.refuse(put)

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def refuse(self, put: Put, count: str = "") -> None:
        """It is not stored, for the reason that is counted."""
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
                if ops and isinstance(flush := ops[-1], Flush):
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
        """The next batch, [] when there is none and `wait` is not set; a Flush ends one. None: it is over."""
        with self._cond:
            while wait and not self._queue and not self._stopping:
                self._cond.wait()
            if not self._queue and self._stopping:
                return None
            ops: list[Op] = []
            size = 0
            while self._queue and len(ops) < BATCH_RECORDS and size < BATCH_BYTES:
                ops.append(op := self._queue.popleft())
                if isinstance(op, Flush):
                    break
                if isinstance(op, Put):
                    size += len(op.data)
                    self._bytes -= len(op.data)
            return ops

    def _write(self, ops: Sequence[Op]) -> None:
        now = self._core.clock()
        own = [key for op in ops if isinstance(op, Remove) and op.future is None for key in op.keys]
        if ops:
            with self._core.lock:  # what was put again since stands for itself
                own = [key for key in self._unsaid + own if key not in self._core.brain]
            self._unsaid = []
        records = self._removing(own)
        for op in ops:
            if isinstance(op, Put):
                if not op.future.set_running_or_notify_cancel() or expired(op.deadline_ns, now):
                    self.refuse(op, "expired")
                else:
                    records.append(Record(op.key, op.data, checksum(op.data), put=op))
            elif isinstance(op, Remove) and op.future is not None:
                records += self._removing(op.keys)
        for first in range(0, len(records), BATCH_RECORDS):
            self._log.append(records[first : first + BATCH_RECORDS])
        said = {key for record in records if record.outcome == "stored" for key in record.keys}
        self._unsaid += [key for key in own if key not in said]
        self._answer([op for op in ops if isinstance(op, Remove)], said)
        self._core.tell()

    def _answer(self, removals: Sequence[Remove], said: set[bytes]) -> None:
        asked = [(op.future, op.keys) for op in removals if op.future is not None]
        synced = bool(asked) and self._log.sync()
        for future, keys in asked:
            resolve(future, synced and said.issuperset(keys))

    def _ended(self, records: Sequence[Record]) -> None:
        stored = [record.put for record in records if record.put is not None and record.outcome == "stored"]
        with self._core.lock:
            self._core.counts.stored += len(stored)
        for put in stored:
            resolve(put.future, True)
        for record in records:
            if record.put is not None and record.outcome != "stored":
                self.refuse(record.put, record.outcome if record.outcome in ("no_room", "failed") else "")

    def _removing(self, keys: Sequence[bytes]) -> list[Record]:
        most = self._core.brain.limits.max_removed
        parts = [keys[at : at + most] for at in range(0, len(keys), most)]
        packed = [memoryview(b"".join(part)) for part in parts]
        return [
            Record(bytes(KEY_BYTES), view, checksum(view), keys=part) for part, view in zip(parts, packed, strict=True)
        ]

    def _give_up(self, ops: Sequence[Op]) -> None:
        for op in ops:
            if isinstance(op, Put):
                self.refuse(op, "failed")
            elif op.future is not None:
                resolve(op.future, False)
