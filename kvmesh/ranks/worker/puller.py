"""A pull at a rank READs whole shards one-sided from a peer's segment into the rank's host region.

Pulls are opened and cancelled on the main thread and acknowledged on transfer engine threads; one lock guards the
table. PullEnded is sent once for each PullOpen, and only when every request of it is final: the transfer engine answers
for a READ only when nothing of it can land any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvmesh.errors import TransferError
from kvmesh.ranks import protocol as m
from kvmesh.transfer import BatchId, Carried, Region, TransferEngine, TransferRequest, TransferState, copy_mapped, peek
from kvmesh.transfer.api import Opcode

log = logging.getLogger("kvmesh.rank")

BATCH_BYTES = 32 << 20
COPY_BYTES = 1 << 20  # copied at most by the thread that takes commands, which wait meanwhile
GUARD = -1  # in place of the position of a batch: this batch reads a guard
GUARD_BYTES = 8
GUARDS = 512  # pulls with a guard at once


@dataclass(slots=True)
class _Pull:
    spec: m.PullOpen
    start_ns: int
    posting: bool = True
    cancelled: bool = False
    batches: dict[BatchId, tuple[int, int]] = field(default_factory=dict)  # in flight → (first position, count)
    arrived: list[int] = field(default_factory=list)
    cause: str = ""
    carried: Carried = field(default_factory=Carried)
    last_ns: int = 0  # when the last byte arrived
    guard: int = GUARD  # slot of its guard in the scratch memory, while the guard is read
    guarding: bool = False  # whether the guard is being read

    def size(self, at: int) -> int:
        return self.spec.sizes[at] if self.spec.sizes else self.spec.shard_bytes


class ShardPuller:
    """Carries out all pulls of this rank into `region`. Guards are read into scratch memory, which is allocated when
    the first is asked for. Up to `copy_bytes` of memory that is mapped here are copied by the main thread itself, at
    once."""

    def __init__(
        self,
        engine: TransferEngine,
        region: Region,
        send: Callable[[m.ToFront], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
        copy_bytes: int = COPY_BYTES,
    ) -> None:
        self._engine = engine
        self._region = region
        self._send = send
        self._clock_ns = clock_ns
        self._copy_bytes = copy_bytes
        self._lock = threading.RLock()
        self._pulls: dict[int, _Pull] = {}
        self._scratch: Region | None = None
        self._slots: list[int] = []

    @property
    def active(self) -> int:
        return len(self._pulls)

    def open(self, spec: m.PullOpen) -> None:
        """Copies everything at once where that can be done, or posts it batch by batch."""
        pull = _Pull(spec, self._clock_ns())
        with self._lock:
            self._pulls[spec.ticket] = pull
        try:
            self._check(spec)
            if self._copy(pull):
                return
            with self._lock:
                count = max(1, BATCH_BYTES // spec.shard_bytes)
                for first in range(0, len(spec.offsets), count):
                    if pull.cause:
                        break
                    self._read(pull, first, min(first + count, len(spec.offsets)))
        except TransferError as error:
            self._failed(pull, error.message)
        except Exception as error:  # whatever the front said, this rank goes on
            log.exception("pull %d", spec.ticket)
            self._failed(pull, f"{type(error).__name__}: {error}")
        self._posted(pull)

    def _posted(self, pull: _Pull) -> None:
        with self._lock:
            pull.posting = False
            self._settle(pull)

    def _copy(self, pull: _Pull) -> bool:
        """Copies out of memory that is mapped here, in this thread; returns whether that settles the pull. It does not
        hold the lock, as it takes milliseconds."""
        spec, shift = pull.spec, self._region.address - self._region.base_offset
        lengths = spec.sizes or (spec.shard_bytes,) * len(spec.offsets)
        if not lengths or sum(lengths) > self._copy_bytes or self._clock_ns() >= spec.deadline_ns:
            return False
        addresses = [offset + shift for offset in spec.landing]

        def done(cause: str, carried: Carried) -> None:
            now = self._clock_ns()
            with self._lock:
                if now > spec.deadline_ns:
                    pull.cause = pull.cause or "not within its time"
                elif cause:
                    pull.cause = pull.cause or cause
                else:
                    pull.arrived.extend(range(len(lengths)))
                    pull.last_ns = now
                pull.carried += carried
            self._posted(pull)

        return copy_mapped(
            self._engine, spec.segment, self._region, addresses, spec.offsets, lengths, spec.traffic_class, done
        )

    def cancel(self, ticket: int) -> None:
        with self._lock:
            pull = self._pulls.get(ticket)
            if pull is not None:
                self._failed(pull, "cancelled")

    def _check(self, spec: m.PullOpen) -> None:
        region, size = self._region, spec.shard_bytes
        end = region.base_offset + region.length
        if size < 1 or len(spec.offsets) != len(spec.landing):
            raise TransferError(f"pull of {len(spec.offsets)} shards of {size} bytes into {len(spec.landing)} places")
        if spec.sizes and (len(spec.sizes) != len(spec.offsets) or not 0 < min(spec.sizes) <= max(spec.sizes) <= size):
            raise TransferError(f"sizes={spec.sizes!r}: one for each shard, in 1..{size}", field="sizes")
        for at, offset in enumerate(spec.landing):
            if not region.base_offset <= offset <= end - (spec.sizes[at] if spec.sizes else size):
                raise TransferError(f"landing={offset}: not in the host region", field="landing")
        for offset in spec.offsets:
            if offset < 0:
                raise TransferError(f"offset={offset}: must not be negative", field="offsets")

    def _slot(self) -> int:
        if self._scratch is None:
            self._scratch = self._engine.allocate(GUARDS * GUARD_BYTES, self._region.location)
            self._slots = list(range(GUARDS))
        if not self._slots:
            raise TransferError(f"{GUARDS} guarded pulls are under way")
        return self._slots.pop()

    def _read(self, pull: _Pull, first: int, end: int) -> None:
        spec, shift = pull.spec, self._region.address - self._region.base_offset
        requests = [
            TransferRequest(
                Opcode.READ,
                spec.landing[i] + shift,
                spec.segment,
                spec.offsets[i],
                pull.size(i),
                traffic_class=spec.traffic_class,
            )
            for i in range(first, end)
        ]
        self._submit(pull, first, requests)

    def _read_guard(self, pull: _Pull) -> None:
        """Reads the guard, when everything else is here or will never be."""
        spec = pull.spec
        pull.guard = self._slot()
        scratch = self._scratch
        assert scratch is not None and scratch.memory is not None
        at = pull.guard * GUARD_BYTES
        scratch.memory[at : at + GUARD_BYTES] = bytes(GUARD_BYTES)
        address = scratch.address + at
        request = TransferRequest(Opcode.READ, address, spec.segment, spec.guard_offset, GUARD_BYTES)
        self._submit(pull, GUARD, [request])

    def _peeked(self, pull: _Pull) -> bool:
        """Whether the guard could be read at once, without a transfer. If the guard has changed, the pull loses
        everything."""
        found = peek(self._engine, pull.spec.segment, pull.spec.guard_offset, GUARD_BYTES)
        if found is None:
            return False
        if int.from_bytes(found, "little") != pull.spec.guard:
            self._given_up(pull)
        return True

    @staticmethod
    def _given_up(pull: _Pull, cause: str = "its owner has given up") -> None:
        pull.arrived.clear()
        pull.cause = pull.cause or cause

    def _guard_holds(self, pull: _Pull) -> bool:
        assert self._scratch is not None and self._scratch.memory is not None
        at = pull.guard * GUARD_BYTES
        return int.from_bytes(self._scratch.memory[at : at + GUARD_BYTES], "little") == pull.spec.guard

    def _submit(self, pull: _Pull, first: int, requests: list[TransferRequest]) -> None:
        left_s = (pull.spec.deadline_ns - self._clock_ns()) * 1e-9
        if left_s <= 0:
            raise TransferError("the pull's deadline has passed")
        batch = self._engine.allocate_batch(len(requests))
        pull.batches[batch] = (first, len(requests))
        try:
            self._engine.submit(batch, requests, left_s)
        except TransferError:
            del pull.batches[batch]
            self._engine.free_batch(batch)
            raise
        self._engine.on_done(batch, lambda: self._final(pull, batch))

    def _final(self, pull: _Pull, batch: BatchId) -> None:
        """Handles the end of a batch, of which nothing can land any more (transfer engine thread)."""
        now = self._clock_ns()
        with self._lock:
            first, _ = pull.batches.pop(batch)
            statuses = self._engine.statuses(batch)
            if first == GUARD:
                done = statuses[0].state is TransferState.COMPLETED
                if not done:
                    self._given_up(pull, statuses[0].cause or statuses[0].state.value)
                elif not self._guard_holds(pull):
                    self._given_up(pull)
                self._close_guard(pull)
            elif now > pull.spec.deadline_ns:
                pull.cause = pull.cause or "not within its time"
            else:
                for i, status in enumerate(statuses, first):
                    if status.state is TransferState.COMPLETED:
                        pull.arrived.append(i)
                        pull.last_ns = max(pull.last_ns, now)  # two batches may end on two threads
                    else:
                        pull.cause = pull.cause or status.cause or status.state.value
            pull.carried += self._engine.carried(batch)
            self._engine.free_batch(batch)
            self._settle(pull)

    def _close_guard(self, pull: _Pull) -> None:
        if pull.guard != GUARD:
            self._slots.append(pull.guard)
            pull.guard = GUARD

    def _failed(self, pull: _Pull, cause: str) -> None:
        with self._lock:
            pull.cause = pull.cause or cause
            for batch in list(pull.batches):
                # Cancelling one may end others, and their callbacks run right here: those are freed already.
                if batch in pull.batches:
                    self._engine.cancel(batch)

    def _settle(self, pull: _Pull) -> None:
        if pull.posting or pull.batches or self._pulls.get(pull.spec.ticket) is not pull:
            return
        spec = pull.spec
        if spec.guard and pull.arrived and not pull.guarding:
            pull.guarding = True
            try:
                if not self._peeked(pull):
                    self._read_guard(pull)
                    return  # the end of that READ settles this pull, or has done so
            except TransferError as error:
                self._given_up(pull, error.message)
        self._close_guard(pull)
        del self._pulls[spec.ticket]
        arrived = tuple(sorted(pull.arrived))
        cause = "" if len(arrived) == len(spec.offsets) else pull.cause or "not all arrived"
        nbytes = sum(pull.size(at) for at in arrived)
        end_ns = pull.last_ns or self._clock_ns()
        self._send(m.PullEnded(spec.ticket, arrived, cause, nbytes, pull.start_ns, end_ns, pull.carried))
