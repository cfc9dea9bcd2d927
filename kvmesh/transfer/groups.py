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
    """Batches of one call of `write` that are not final, and one for the call itself."""

    __slots__ = ("_on_final", "left")

    def __init__(self, on_final: Callable[[], None]) -> None:
        self.left = 1
        self._on_final = on_final

    def less(self) -> None:
        self.left -= 1
        if not self.left:
            self._on_final()


class GroupWrite:
    """One writer rank's bytes for the readers `segments` in one epoch, ended by a mark to each of them.

    `on_acked(nbytes)` hears of progress; `on_ended()` is called once, when it was marked, failed or cancelled and
    nothing of it is on its way as far as the engine knows (`certain` tells whether it knows). Both run with `lock`
    held, on the caller's thread or an engine's; the owner may pass a lock of its own and then holds it around its
    calls. Times are monotonic nanoseconds, 0: never."""

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
        """Nothing more will be posted."""
        return bool(self.cause) or self.cancelled or self.marked

    def hold(self) -> None:
        """It does not end before `release`: something beside it is still under way for it."""
        with self._lock:
            self._held += 1

    def release(self) -> None:
        with self._lock:
            self._held -= 1
            self._settle()

    def write(self, segment: str, copies: Iterable[Copy], on_final: Callable[[], None] = lambda: None) -> None:
        """Posts all of them, in batches. Not after `mark`; nothing is posted after a failure or a cancel. `on_final()`
        is called once no transfer will read these addresses any more, as far as the engine knows."""
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
        """All is posted: each reader hears `payload` once all of it is there."""
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
        """Stops posting; `on_ended` follows once nothing is in flight."""
        with self._lock:
            self.cause = self.cause or cause
            self._stop()
            self._settle()

    def cancel(self) -> None:
        """As `fail`, at the owner's own wish."""
        with self._lock:
            self.cancelled = True
            self._stop()
            self._settle()

    def _cut(self, segment: str, copies: Iterable[Copy]) -> Iterator[list[TransferRequest]]:
        """Batches of about `batch_bytes`; a longer copy is cut, as each batch tells of progress."""
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
        """A batch is final (any thread)."""
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
        """An end mark was delivered, or could not be (any thread)."""
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
    """One reader rank's side of one epoch. `writers` are the engine names of those whose marks are to come, `ranges`
    where each of them may write. Thread-safe."""

    def __init__(self, engine: TransferEngine, epoch: int, writers: Iterable[str], ranges: Sequence[Range]) -> None:
        self.epoch = epoch
        self.writers = frozenset(writers)
        self._engine = engine
        self._ranges = tuple(ranges)
        self._missing = set(self.writers)
        self._changed = threading.Condition()

    def open(self) -> None:
        """Invites every writer. To be followed by `fence`, whatever comes between. TransferError: see `open_window`."""
        for writer in sorted(self.writers):
            self._engine.open_window(writer, self.epoch, self._ranges)

    def heard(self, note: Notification) -> bool:
        """What `on_notify` brings; whether it was a mark of this landing."""
        if note.handoff_epoch != self.epoch or note.peer not in self.writers:
            return False
        with self._changed:
            self._missing.discard(note.peer)
            self._changed.notify_all()
        return True

    @property
    def missing(self) -> frozenset[str]:
        """Writers whose marks are not here; none: every byte is."""
        with self._changed:
            return frozenset(self._missing)

    def landed_bytes(self) -> int:
        """Of all writers, as far as the target sees it: one-sided writes (rdma) are not seen before the mark."""
        return sum(self._engine.landed_bytes(writer, self.epoch) for writer in self.writers)

    def wait(self, idle_s: float, timeout_s: float) -> None:
        """Until every mark is here. TransferError naming the writers that are missing when `idle_s` passed without a
        mark or a byte, or `timeout_s` altogether."""
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
        """Closes every writer's window; when it returns no byte of the epoch can land any more, from nobody. Tries all
        of them before it raises the TransferError that names those that did not let go; call it again then."""
        deadline = time.monotonic() + timeout_s
        failed: list[str] = []
        for writer in sorted(self.writers):
            try:
                self._engine.fence(writer, self.epoch, max(0.0, deadline - time.monotonic()))
            except TransferError as error:
                failed.append(f"{writer}: {error}")
        if failed:
            raise TransferError(f"epoch {self.epoch} is not fenced: {'; '.join(failed)}", field="writers")
