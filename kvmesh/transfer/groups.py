"""A transfer between rank groups, seen from one rank: `GroupWrite` at a writer, `GroupLanding` at a reader.

    writer rank                                             reader rank
    GroupWrite.write(segment, copies) ═══ bytes, any rail ═▶ window of that writer
    GroupWrite.mark() ── once all of it is acknowledged ───▶ GroupLanding.heard: one mark of every writer
                                                             GroupLanding.fence: every writer's window, always

What goes where is somebody else's plan (kvmesh.kvcache.groups). One end mark from each writer says that all of its
bytes for this reader are here, whatever rails and however many attempts they took: the engine sends it behind the last
acknowledgement. When one of a writer's transfers fails, the others are stopped, and marks not sent yet never are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvmesh.errors import TransferError
from kvmesh.transfer.api import (
    BatchId,
    Carried,
    Notification,
    Opcode,
    Range,
    TrafficClass,
    TransferRequest,
    TransferState,
    TransferStatus,
)
from kvmesh.transfer.engine import TransferEngine

Copy = tuple[int, int, int]  # (address here, offset in the reader's segment, length)

# Progress is told batch by batch: what is posted at once must not be silent until its last byte has arrived.
BATCH_BYTES = 32 << 20
END_MARK = b"end"
POLL_S = 0.05


class _Tally:
    """Counts the batches of one call of `write` that are not final, and one more for the call itself."""

    __slots__ = ("_on_final", "left")

    def __init__(self, on_final: Callable[[], None]) -> None:
        self.left = 1
        self._on_final = on_final

    def less(self) -> None:
        self.left -= 1
        if not self.left:
            self._on_final()


class GroupWrite:
    """The writes of one rank to the readers `segments` in one epoch, ended by an end mark to each reader.

    `on_acked(nbytes)` reports progress. `on_ended()` is called once, after `mark`, `fail` or `cancel`, when as far as
    the engine knows none of the writes is on its way any more; `certain` is false where the engine does not know. Both
    run with `lock` held, on the caller's thread or an engine's. An owner that passes its own lock must hold it around
    its calls. Times are monotonic nanoseconds; 0 means never.
    """

    def __init__(
        self,
        engine: TransferEngine,
        epoch: int,
        segments: Sequence[str],
        on_ended: Callable[[], None],
        on_acked: Callable[[int], None] = lambda nbytes: None,
        *,
        traffic_class: int = TrafficClass.HANDOFF,
        batch_bytes: int = BATCH_BYTES,
        lock: threading.RLock | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.bytes_done = 0
        self.first_post_ns = 0
        self.last_ack_ns = 0
        self.busy_ns = (
            0  # with bytes on their way: first post to last ack, without the gaps in which nothing was posted
        )
        self.cause = ""  # failed: nothing more is posted
        self.cancelled = False
        self.carried = Carried()
        self.certain = True  # every failed batch is known to be off the wire
        self.marked = False
        self.ended = False
        self._engine = engine
        self._epoch = epoch
        self._segments = tuple(segments)
        self._on_ended = on_ended
        self._on_acked = on_acked
        self._class = traffic_class
        self._batch_bytes = batch_bytes
        self._lock = lock or threading.RLock()
        self._clock_ns = clock_ns
        self._batches: dict[BatchId, tuple[int, _Tally]] = {}  # in flight → bytes
        self._busy_from_ns = 0  # since when there are some
        self._marking = 0  # end marks on their way
        self._held = 0

    @property
    def over(self) -> bool:
        """Whether nothing more will be posted."""
        return bool(self.cause) or self.cancelled or self.marked

    def hold(self) -> None:
        """Delays `on_ended` until `release`, for work of the owner that belongs to this write."""
        with self._lock:
            self._held += 1

    def release(self) -> None:
        with self._lock:
            self._held -= 1
            self._settle()

    def write(self, segment: str, copies: Iterable[Copy], on_final: Callable[[], None] = lambda: None) -> None:
        """Posts the copies in batches; it must not follow `mark`, and posts nothing after a failure or `cancel`.
        `on_final()` is called once no transfer will read these addresses any more, as far as the engine knows."""
        with self._lock:
            assert not self.marked, "the end mark has the last word"
            tally = _Tally(on_final)
            for requests in self._cut(segment, copies):
                if self.cause or self.cancelled:
                    break
                self.first_post_ns = self.first_post_ns or self._clock_ns()
                self._submit(requests, tally)
            tally.less()

    def mark(self, payload: bytes = END_MARK) -> None:
        """Ends the writes: each reader gets `payload` as an end mark once everything for it has landed."""
        with self._lock:
            if self.cause or self.cancelled or self.marked:
                return
            # Both at once, and not before: a fast target answers inside `notify`, which must not end it for the others.
            self.marked, self._marking = True, len(self._segments)
            for segment in self._segments:
                if self.cause:  # one answered already, and badly
                    self._marking -= 1
                    continue
                try:
                    self._engine.notify(segment, self._epoch, payload, self._mark_answered)
                except TransferError as error:
                    self._marking -= 1
                    self.cause = self.cause or f"end mark: {error}"
            self._settle()

    def fail(self, cause: str) -> None:
        """Stops posting and keeps the first cause; `on_ended` follows once nothing is in flight."""
        with self._lock:
            self.cause = self.cause or cause
            self._stop()
            self._settle()

    def cancel(self) -> None:
        """Stops posting because the owner wishes so; `on_ended` follows once nothing is in flight."""
        with self._lock:
            self.cancelled = True
            self._stop()
            self._settle()

    def _cut(self, segment: str, copies: Iterable[Copy]) -> Iterator[list[TransferRequest]]:
        """Yields batches of about `batch_bytes` bytes. A longer copy is cut, because progress is reported
        by the batch."""
        requests: list[TransferRequest] = []
        room = self._batch_bytes
        for address, offset, length in copies:
            while length:
                now = min(length, room)
                requests.append(TransferRequest(Opcode.WRITE, address, segment, offset, now, self._epoch, self._class))
                address, offset, length, room = address + now, offset + now, length - now, room - now
                if not room:
                    yield requests
                    requests, room = [], self._batch_bytes
        if requests:
            yield requests

    def _submit(self, requests: list[TransferRequest], tally: _Tally) -> None:
        try:
            batch = self._engine.allocate_batch(len(requests))
        except TransferError as error:
            self.fail(f"submit: {error}")
            return
        if not self._batches:
            self._busy_from_ns = self._clock_ns()
        self._batches[batch] = sum(r.length for r in requests), tally
        tally.left += 1
        try:
            self._engine.submit(batch, requests)
        except TransferError as error:
            del self._batches[batch]
            tally.less()
            self._engine.free_batch(batch)
            self.fail(f"submit: {error}")
            return
        self._engine.on_done(batch, lambda: self._acknowledged(batch))

    def _acknowledged(self, batch: BatchId) -> None:
        """Handles a batch that became final. It runs on any thread."""
        with self._lock:
            nbytes, tally = self._batches.pop(batch)
            if not self._batches:
                self.busy_ns += self._clock_ns() - self._busy_from_ns
            tally.less()
            cause = ""
            for status in self._engine.statuses(batch):
                if status.state is not TransferState.COMPLETED:
                    cause = cause or status.cause or status.state.value
                    self.certain = self.certain and status.drained
            self.carried += self._engine.carried(batch)
            self._engine.free_batch(batch)
            if not cause:
                self.bytes_done += nbytes
                self.last_ack_ns = self._clock_ns()
                self._on_acked(nbytes)
            elif not self.cause:
                self.cause = cause
                self._stop()
            self._settle()

    def _mark_answered(self, status: TransferStatus) -> None:
        """Handles the outcome of one end mark. It runs on any thread."""
        with self._lock:
            self._marking -= 1
            if status.state is not TransferState.COMPLETED:
                self.cause = self.cause or f"end mark: {status.cause or status.state.value}"
            self._settle()

    def _stop(self) -> None:
        for batch in list(self._batches):
            # Cancelling one may end others, and their callbacks run right here: those are freed already.
            if batch in self._batches:
                self._engine.cancel(batch)

    def _settle(self) -> None:
        over = self.cancelled or self.cause or self.marked
        if self.ended or not over or self._batches or self._marking or self._held:
            return
        self.ended = True
        self._on_ended()


class GroupLanding:
    """One reader rank's side of one epoch. `writers` are the engine names of those that write and send end marks,
    `ranges` is where each of them may write. It is thread-safe."""

    def __init__(self, engine: TransferEngine, epoch: int, writers: Iterable[str], ranges: Sequence[Range]) -> None:
        self.epoch = epoch
        self.writers = frozenset(writers)
        self._engine = engine
        self._ranges = tuple(ranges)
        self._missing = set(self.writers)
        self._changed = threading.Condition()

    def open(self) -> None:
        """Opens a window for every writer. `fence` must follow, whatever happens between. Raises TransferError as
        `open_window` does."""
        for writer in sorted(self.writers):
            self._engine.open_window(writer, self.epoch, self._ranges)

    def heard(self, note: Notification) -> bool:
        """Takes a notification from `on_notify`, and returns whether it was an end mark of this landing."""
        if note.handoff_epoch != self.epoch or note.peer not in self.writers:
            return False
        with self._changed:
            self._missing.discard(note.peer)
            self._changed.notify_all()
        return True

    @property
    def missing(self) -> frozenset[str]:
        """The writers whose end marks have not come. When it is empty, every byte has landed."""
        with self._changed:
            return frozenset(self._missing)

    def landed_bytes(self) -> int:
        """Returns the bytes landed from all writers that the target sees; rdma writes are seen only with
        the end mark."""
        return sum(self._engine.landed_bytes(writer, self.epoch) for writer in self.writers)

    def wait(self, idle_s: float, timeout_s: float) -> None:
        """Waits for every writer's end mark. Raises TransferError, which names the missing writers, when neither a mark
        nor a byte came for `idle_s`, or after `timeout_s` altogether."""
        begun = progress_at = time.monotonic()
        seen: tuple[int, int] = (-1, -1)
        with self._changed:
            while self._missing:
                now = time.monotonic()
                current = (len(self._missing), self.landed_bytes())
                if current != seen:
                    seen, progress_at = current, now
                left_s = min(progress_at + idle_s, begun + timeout_s) - now
                if left_s <= 0:
                    names, silent_s = ", ".join(sorted(self._missing)), now - progress_at
                    raise TransferError(
                        f"epoch {self.epoch}: no end mark of {names}, {silent_s:.1f} s after the last byte or mark",
                        field="writers",
                    )
                self._changed.wait(min(left_s, POLL_S))

    def fence(self, timeout_s: float = 5.0) -> None:
        """Closes every writer's window, and returns when no byte of the epoch can land any more. It tries all writers
        before it raises a TransferError that names those whose fence failed; then it must be called again."""
        deadline = time.monotonic() + timeout_s
        failed: list[str] = []
        for writer in sorted(self.writers):
            try:
                self._engine.fence(writer, self.epoch, max(0.0, deadline - time.monotonic()))
            except TransferError as error:
                failed.append(f"{writer}: {error}")
        if failed:
            raise TransferError(f"epoch {self.epoch} is not fenced: {'; '.join(failed)}", field="writers")
