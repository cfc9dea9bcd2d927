"""The engine's bookkeeping: every state change of batches and lanes happens here, under one lock.

Rules that keep it simple: transports call `frame_done` and `frame_lost` with none of their locks held; the core calls
transports' `post` and `expire` and the user's callbacks with its lock released (`Aftermath`), their `recall` and
`forget`, which never call back from inside, also with it held.

Why COMPLETED is safe: a slot completes when each of its parts was acknowledged. A part is sent again only after the
transport reported the earlier frame lost *and settled*, which means that the target has confirmed (or its kernel has,
by closing the local socket of a dead process) that the earlier path can land nothing more. So when the last
acknowledgement arrives there is no second path left that could carry a copy. A lost frame that could not be settled
makes its slots FAILED with drained=False, never COMPLETED.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count

from kvmesh.rpc.errors import TransferError
from kvmesh.transfer.api import BatchId, Opcode, TransferState
from kvmesh.transfer.batch import Aftermath, Batch, Group, doom, finish
from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.lane import Lane, Notice
from kvmesh.transfer.pool import Sieve
from kvmesh.transfer.segment import LocalRegion
from kvmesh.transfer.topology import Topology
from kvmesh.transfer.transport import Frame, Kind, Rail

log = logging.getLogger(__name__)


class Core:
    """Lanes, batches, time-outs. `run` is the body of the engine's timer thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.lock = threading.Lock()
        self.serials = count(1)
        self.lanes: dict[str, Lane] = {}
        self.batches: dict[BatchId, Batch] = {}
        self.counters: dict[str, int] = {}
        self.topology: Topology = {}  # of this host; the engine fills it once its transports have started
        self._next_batch = 1
        self._live: dict[int, Group] = {}
        self._endpoints: Sieve[tuple[str, Rail]] = Sieve(config.max_endpoints)
        self._timer_changed = threading.Condition(self.lock)
        self._wake_at = float("inf")
        self._stopped = False

    # ── what the engine calls ─────────────────────────────────────────────────────────────────────

    def new_batch(self, capacity: int) -> BatchId:
        with self.lock:
            batch = Batch(BatchId(self._next_batch), capacity)
            self._next_batch += 1
            self.batches[batch.id] = batch
            return batch.id

    def batch(self, batch_id: BatchId) -> Batch:
        """TransferError when it is unknown or freed. Lock held."""
        batch = self.batches.get(batch_id)
        if batch is None:
            raise TransferError(f"batch={batch_id}: unknown or freed", field="batch")
        return batch

    def enqueue(self, batch: Batch, groups: Sequence[Group], after: Aftermath) -> None:
        """Lock held."""
        now = time.monotonic()
        lanes: dict[str, Lane] = {}
        for group in groups:
            self._live[group.serial] = group
            batch.groups.append(group)
            group.lane.enqueue(group)
            lanes[group.lane.name] = group.lane
        self._arm(min(now + self.config.ack_timeout_s, *(group.deadline for group in groups)))
        for lane in lanes.values():
            self._pump(lane, after, now)

    def notify(self, lane: Lane, notice: Notice, after: Aftermath) -> None:
        """Lock held."""
        now = time.monotonic()
        self._arm(now + min(self.config.request_timeout_s, self.config.ack_timeout_s))
        lane.add_notice(notice, after, now)

    def cancel(self, batch: Batch, state: TransferState, cause: str, after: Aftermath) -> None:
        """Lock held."""
        for group in list(batch.groups):
            self._stop(group, state, cause, after)
            self._settle(group, after)

    def close_lane(self, lane: Lane, cause: str, after: Aftermath) -> None:
        """Fails what is queued; the caller then has the transports forget the segment. Lock held."""
        lane.closed = cause
        self.lanes.pop(lane.name, None)
        for rail in lane.rails:
            self._endpoints.remove((lane.name, rail))
        self._pump(lane, after, time.monotonic())

    def conclude(self, after: Aftermath) -> None:
        """Does what had to wait for the lock's release."""
        while after.frames or after.callbacks:
            frames, after.frames = after.frames, []
            for frame in frames:
                frame.transport.post(frame)
            callbacks, after.callbacks = after.callbacks, []
            for callback in callbacks:
                try:
                    callback()
                except Exception:
                    log.exception("callback of a transfer raised")

    def in_use(self, region: LocalRegion) -> bool:
        """Whether an unfinished request uses it. Lock held."""
        return any(group.local is region for group in self._live.values())

    def count(self, what: str, n: int = 1) -> None:
        """Not exact under races: for people, not for decisions."""
        self.counters[what] = self.counters.get(what, 0) + n

    # ── what transports report ────────────────────────────────────────────────────────────────────

    def frame_done(self, frame: Frame, refused: Sequence[int], cause: str) -> None:
        after = Aftermath()
        with self.lock:
            if not self._answered(frame):
                return
            frame.lane.resting.pop(frame.rail, None)
            if frame.notice is not None:
                state = TransferState.FAILED if cause else TransferState.COMPLETED
                frame.lane.end_notice(frame.notice, state, cause, after)
            elif frame.group is not None:
                self._landed(frame, frame.group, refused, cause, after)
            self._pump(frame.lane, after, time.monotonic())
        self.conclude(after)

    def frame_lost(self, frame: Frame, cause: str, *, settled: bool, down: bool) -> None:
        after = Aftermath()
        with self.lock:
            if not self._answered(frame):
                return
            now = time.monotonic()
            lane = frame.lane
            self.count(f"{frame.transport.name}.frames_lost")
            if down:
                lane.went_down(frame.rail, cause, now)
            if frame.notice is not None:
                if frame.sendings >= self.config.max_sendings and not down:
                    lane.end_notice(frame.notice, TransferState.FAILED, cause, after)
                else:
                    lane.send_notice(frame.notice, after, now, frame.sendings + 1)
            elif frame.group is not None:
                self._strayed(frame, frame.group, cause, settled, after)
            self._pump(lane, after, now)
        self.conclude(after)

    def _answered(self, frame: Frame) -> bool:
        if frame.answered:
            return False
        frame.answered = True
        lane = frame.lane
        del lane.inflight[frame.serial]
        lane.load[frame.rail] -= 1
        return True

    def _landed(self, frame: Frame, group: Group, refused: Sequence[int], cause: str, after: Aftermath) -> None:
        batch = group.batch
        refusals = frozenset(refused)
        states, flight, left = batch.states, batch.flight, batch.left
        carried = 0
        for i, (slot, _, _, length) in enumerate(frame.parts):
            flight[slot] -= 1
            if states[slot] is not TransferState.PENDING:
                continue
            if i in refusals:
                self.count("parts_refused")
                doom(group, slot, TransferState.FAILED, cause, after)
                continue
            carried += length
            left[slot] -= length
            if left[slot] == 0:
                finish(group, slot, TransferState.COMPLETED, "", after)
            elif flight[slot] == 0 and slot in batch.doom:
                doom(group, slot, TransferState.FAILED, cause, after)
        self.count(f"{frame.transport.name}.{frame.kind.name.lower()}_bytes", carried)
        self._settle(group, after)

    def _strayed(self, frame: Frame, group: Group, cause: str, settled: bool, after: Aftermath) -> None:
        batch = group.batch
        again = frame.sendings < self.config.max_sendings and not frame.lane.closed
        alive = False
        for slot, _, _, _ in frame.parts:
            batch.flight[slot] -= 1
            if batch.states[slot].final:
                continue
            if not settled and frame.kind is Kind.WRITE:
                finish(group, slot, TransferState.FAILED, cause, after, drained=False)
            elif slot in batch.doom or not again:
                doom(group, slot, TransferState.FAILED, cause, after)
            else:
                alive = True
        if alive:
            self.count("frames_resent")
            frame.lane.retry.append(frame)
        self._settle(group, after)

    def _settle(self, group: Group, after: Aftermath) -> None:
        """After slots of a group may have become final."""
        if group.opcode is Opcode.WRITE:
            for slot in group.slots if group.batch.causes else ():
                if group.batch.states[slot] not in (
                    TransferState.COMPLETED,
                    TransferState.WAITING,
                    TransferState.PENDING,
                ):
                    group.lane.spoil(group.epoch, group.batch.causes.get(slot, ""))
                    break
        if group.open == 0 and self._live.pop(group.serial, None) is not None:
            group.batch.groups.remove(group)
            group.lane.group_final(group, after, time.monotonic())

    def _pump(self, lane: Lane, after: Aftermath, now: float) -> None:
        posted = len(after.frames)
        for group in lane.cut(after, now):
            self._settle(group, after)
        for frame in after.frames[posted:]:
            self._touch(lane, frame)
            self._arm(now + self.config.ack_timeout_s)

    def _touch(self, lane: Lane, frame: Frame) -> None:
        for segment, rail in self._endpoints.touch((lane.name, frame.rail), lambda k: self._idle(k, lane)):
            rail.transport.forget(segment, "evicted to make room", rail)
            self.count("endpoints_evicted")

    def _idle(self, key: tuple[str, Rail], busy: Lane) -> bool:
        lane = self.lanes.get(key[0])
        return lane is not None and lane is not busy and not lane.inflight

    def _stop(self, group: Group, state: TransferState, cause: str, after: Aftermath) -> None:
        """Nothing more of it is posted, and what has not left yet is taken back."""
        lane = group.lane
        lane.unqueue(group)
        for frame in [f for f in lane.inflight.values() if f.group is group]:
            if frame.transport.recall(frame) and self._answered(frame):
                for slot, _, _, _ in frame.parts:
                    group.batch.flight[slot] -= 1
        for slot in group.slots:
            doom(group, slot, state, cause, after)

    # ── time ──────────────────────────────────────────────────────────────────────────────────────

    def _arm(self, when: float) -> None:
        if when < self._wake_at:
            self._wake_at = when
            self._timer_changed.notify()

    def run(self) -> None:
        """Until `stop`. Sleeps until the earliest time-out that may be due, so an idle engine never wakes."""
        while True:
            after = Aftermath()
            overdue: list[tuple[Frame, float]] = []
            with self.lock:
                now = time.monotonic()
                while not self._stopped and now < self._wake_at:
                    idle = self._wake_at == float("inf")
                    self._timer_changed.wait(None if idle else self._wake_at - now)
                    now = time.monotonic()
                if self._stopped:
                    return
                self._time_out(now, after, overdue)
                self._wake_at = self._next_due(now)
            for frame, idle_s in overdue:
                frame.transport.expire(frame, idle_s)
            self.conclude(after)

    def stop(self) -> None:
        """After the transports are closed: ends the timer, and whatever a transport still owes an answer for."""
        after = Aftermath()
        with self.lock:
            self._stopped = True
            self._timer_changed.notify_all()
            for group in list(self._live.values()):
                for slot in group.slots:
                    if not group.batch.states[slot].final:
                        finish(group, slot, TransferState.FAILED, "engine closed", after, drained=False)
                self._settle(group, after)
        self.conclude(after)

    def _next_due(self, now: float) -> float:
        due = [group.deadline for group in self._live.values()]
        for lane in self.lanes.values():
            due += [frame.posted_at + self.config.ack_timeout_s for frame in lane.inflight.values()]
        return max(min(due, default=float("inf")), now + 0.001)

    def _time_out(self, now: float, after: Aftermath, overdue: list[tuple[Frame, float]]) -> None:
        ack_timeout_s = self.config.ack_timeout_s
        for group in [g for g in self._live.values() if g.deadline <= now]:
            group.deadline = float("inf")
            self._stop(group, TransferState.TIMEOUT, "timed out", after)
            if group.opcode is Opcode.READ:  # its local memory must be left alone before it is final
                overdue += [(f, 0.0) for f in group.lane.inflight.values() if f.group is group]
            else:
                for slot in group.slots:
                    if not group.batch.states[slot].final:
                        state, cause = group.batch.doom[slot]
                        if state is not TransferState.TIMEOUT:
                            cause += " and not drained in time"
                        finish(group, slot, TransferState.TIMEOUT, cause, after, drained=False)
            self._settle(group, after)
        for lane in self.lanes.values():
            for frame in lane.inflight.values():
                if frame.posted_at + ack_timeout_s <= now:
                    frame.posted_at = now
                    overdue.append((frame, ack_timeout_s))


def on_final(core: Core, batch_id: BatchId, callback: Callable[[], None]) -> None:
    """Calls back once every request submitted so far is final; now, when it is."""
    with core.lock:
        batch = core.batch(batch_id)
        if batch.open:
            batch.callbacks.append(callback)
            return
    callback()
