"""The engine's bookkeeping: every state change of batches and lanes happens here, under one lock.

Rules that keep it simple: transports call `frame_done` and `frame_lost` with none of their locks held; the core calls
transports' `post` and `expire` and the user's callbacks with its lock released (`AfterUnlock`), their `recall` and
`forget`, which never call back from inside, also with it held.

Why COMPLETED is safe: a slot completes when each of its parts was acknowledged. A part is sent again only after the
transport reported the earlier frame lost *and settled*, which means that the target has confirmed (or its kernel has,
by closing the local socket of a dead process) that the earlier path can land nothing more. So when the last
acknowledgement arrives there is no second path left that could carry a copy. A lost frame that could not be settled
makes its slots FAILED with drained=False, never COMPLETED.

Cost: each frame costs the same, however many slices, groups, peers and frames there are.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count

from kvmesh.errors import TransferError
from kvmesh.transfer import outcomes
from kvmesh.transfer.api import BatchId, Opcode, TrafficClass, TransferState
from kvmesh.transfer.batch import AfterUnlock, Batch, Group, Part, RetriedParts, doom, finish
from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.epochs import Closed, EndMark
from kvmesh.transfer.peer_link import PeerLink
from kvmesh.transfer.posting import TICK_S, Posting
from kvmesh.transfer.rails import RailChoices, Topology
from kvmesh.transfer.segment import LocalRegion
from kvmesh.transfer.stats import EngineStats, bytes_counter, nic_stats, rail_stats
from kvmesh.transfer.transports.base import Frame, FrameKind, Rail

log = logging.getLogger(__name__)


class Core:
    """Lanes, batches, time-outs. `run` is the body of the engine's timer thread."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.clock = clock
        self.lock = threading.Lock()
        self.serials = count(1)
        self.lanes: dict[str, PeerLink] = {}
        self.batches: dict[BatchId, Batch] = {}
        self.counters: dict[str, int] = {}
        self.finals: dict[tuple[int, TransferState], int] = {}
        self.topology: Topology = {}  # of this host; set before the first request
        self.posting = Posting(config, self._arm, self._dropped, self.count)
        self.board = self.posting.board
        self._closed = Closed()
        self._next_batch = 1
        self._live: dict[int, Group] = {}
        self._deadlines: list[tuple[float, int]] = []  # heap of (deadline, group); of final groups, too
        self._comparing: dict[int, LocalRegion] = {}  # by frame: memory whose checksum is being taken
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

    def enqueue(self, batch: Batch, groups: Sequence[Group], after: AfterUnlock) -> None:
        """Lock held."""
        now = self.clock()
        for group in groups:
            self._live[group.serial] = group
            batch.groups[group.serial] = group
            heapq.heappush(self._deadlines, (group.deadline, group.serial))
            group.lane.enqueue(group)
        self._arm(self._deadlines[0][0])
        if len(self._deadlines) > 64 + 2 * len(self._live):
            self._deadlines = [(group.deadline, serial) for serial, group in self._live.items()]
            heapq.heapify(self._deadlines)
        self.posting.pump(after, now)

    def notify(self, lane: PeerLink, notice: EndMark, after: AfterUnlock) -> None:
        """Lock held."""
        if not lane.epochs.add(notice):
            self._send_notice(lane, notice, after, self.clock())

    def cancel(self, batch: Batch, state: TransferState, cause: str, after: AfterUnlock) -> None:
        """Lock held."""
        now = self.clock()
        for group in list(batch.groups.values()):
            self._stop(group, state, cause, after, now)
            self._settle(group, after, now)
        self.posting.pump(after, now)

    def open_lane(self, lane: PeerLink) -> None:
        """Unless it is open. Lock held."""
        if self.lanes.setdefault(lane.name, lane) is lane:
            lane.epochs.spoiled = self._closed.take(lane.descriptor.token)

    def close_lane(self, lane: PeerLink, cause: str, after: AfterUnlock) -> None:
        """Fails what is queued; the caller then has the transports forget the segment. Lock held."""
        now = self.clock()
        lane.closed = cause
        lane.epochs.close(cause)
        self._closed.keep(lane.descriptor.token, lane.epochs.spoiled)
        self.lanes.pop(lane.name, None)
        for way in lane.ways.values():
            self.posting.endpoints.remove(way)
        for flow in lane.flows:
            groups = list(flow.queue.values()) + [again.group for again in flow.retry]
            flow.retry.clear()
            for group in groups:
                lane.drop(group, cause, after)
                self._settle(group, after, now)
        self.posting.pump(after, now)

    def conclude(self, after: AfterUnlock) -> None:
        """Does what had to wait for the lock's release."""
        while after.frames or after.callbacks:
            frames, after.frames = after.frames, []
            for frame in frames:
                try:
                    frame.transport.post(frame)
                except Exception as err:
                    log.exception("%s: a frame to %s could not be posted", frame.rail, frame.lane.name)
                    frame.lost(f"{frame.rail}: {err}", settled=False, down=True)
            callbacks, after.callbacks = after.callbacks, []
            for callback in callbacks:
                try:
                    callback()
                except Exception:
                    log.exception("callback of a transfer raised")

    def in_use(self, region: LocalRegion) -> bool:
        """Whether an unfinished request uses it, or a frame of an overdue one that is still on its way. Lock held."""
        flying = (frame.group for frame in self.posting.inflight.values() if frame.group is not None)
        return region in {group.local for group in (*self._live.values(), *flying)} | set(self._comparing.values())

    def count(self, what: str, n: int = 1) -> None:
        """Not exact under races: for people, not for decisions."""
        self.counters[what] = self.counters.get(what, 0) + n

    def stats(self) -> EngineStats:
        with self.lock:
            return EngineStats(
                tuple(nic_stats(nic) for nic in self.board.nics.values()),
                rail_stats(self.lanes.values(), self.clock()),
                {(TrafficClass(rank), state): n for (rank, state), n in self.finals.items()},
                tuple(self.posting.dealer.backlog),
                len(self._live),
                dict(self.counters),
            )

    # ── what transports report ────────────────────────────────────────────────────────────────────

    def frame_done(self, frame: Frame, refused: Sequence[int], cause: str) -> None:
        if frame.kind is FrameKind.CHECKSUM and frame.group is not None:
            self._compare(frame, frame.group, refused, cause)
            return
        after = AfterUnlock()
        with self.lock:
            now = self.clock()
            way = self.posting.answered(frame, now)
            if way is None:
                return
            self._arrived(frame, way, now)
            if frame.notice is not None:
                frame.notice.end(TransferState.FAILED if cause else TransferState.COMPLETED, cause, after)
            elif frame.group is not None:
                self._landed(frame, frame.group, refused, cause, after)
                self._settle(frame.group, after, now)
            self.posting.pump(after, now)
        self.conclude(after)

    def frame_lost(self, frame: Frame, cause: str, *, settled: bool, down: bool) -> None:
        after = AfterUnlock()
        with self.lock:
            now = self.clock()
            way = self.posting.answered(frame, now)
            if way is None:
                return
            lane = frame.lane
            self.count(f"{frame.transport.name}.frames_lost")
            way.nic.meter.erred("down" if down else "lost" if settled else "unsettled")
            if not lane.closed and self.board.lost(way, frame.posted_at, cause, now, down=down):
                self.count("rails_rested")
            if frame.notice is not None:
                if frame.sendings >= self.config.max_sendings and not down:
                    frame.notice.end(TransferState.FAILED, cause, after)
                else:
                    self._send_notice(lane, frame.notice, after, now, frame.sendings + 1, frame.rail)
            elif frame.group is not None:
                self._strayed(frame, frame.group, cause, settled, after)
                self._settle(frame.group, after, now)
            self.posting.pump(after, now)
        self.conclude(after)

    def _arrived(self, frame: Frame, way: RailChoices, now: float) -> None:
        rank = 0 if frame.group is None else frame.group.rank
        nbytes = frame.burden
        way.class_bytes[rank] += nbytes
        way.nic.meter.arrived(frame.kind, rank, nbytes, len(frame.parts), now - frame.posted_at)
        self.board.landed(way, nbytes, frame.posted_at, now)

    def _landed(self, frame: Frame, group: Group, refused: Sequence[int], cause: str, after: AfterUnlock) -> None:
        carried, turned_away, to_verify = outcomes.landed(frame, group, refused, cause, after)
        if turned_away:
            self.count("parts_refused", turned_away)
            frame.lane.ways[frame.rail].nic.meter.erred(f"refused: {cause}", turned_away)
        if to_verify:
            frame.lane.again(group, RetriedParts(group, FrameKind.CHECKSUM, to_verify, 1, frame.checks, frame.rail))
        self.count(bytes_counter(frame.rail.transport.name, frame.kind), carried)
        rails = group.batch.rails
        rails[frame.rail] = rails.get(frame.rail, 0) + carried

    def _strayed(self, frame: Frame, group: Group, cause: str, settled: bool, after: AfterUnlock) -> None:
        again = frame.sendings < self.config.max_sendings and not frame.lane.closed
        if outcomes.strayed(frame, group, cause, settled=settled, again=again, after=after):
            self.count("frames_resent")
            group.batch.resent += 1
            avoid = frame.avoid if frame.kind is FrameKind.CHECKSUM else frame.rail
            resend = RetriedParts(group, frame.kind, list(frame.parts), frame.sendings + 1, frame.checks, avoid)
            frame.lane.again(group, resend)

    def _compare(self, frame: Frame, group: Group, refused: Sequence[int], cause: str) -> None:
        """A CHECKSUM was answered. The memory here is read without the lock, and kept registered meanwhile."""
        with self.lock:
            if frame.answered:
                return
            self._comparing[frame.serial] = group.local
        sums: list[int] = []
        try:
            sums = outcomes.local_sums(frame)
        finally:
            after = AfterUnlock()
            with self.lock:
                del self._comparing[frame.serial]
                now = self.clock()
                way = self.posting.answered(frame, now)
                if way is not None:
                    self._arrived(frame, way, now)
                    self._compared(
                        frame, group, outcomes.verified(frame, group, refused, cause, sums, after), after, now
                    )
                    self._settle(group, after, now)
                self.posting.pump(after, now)
            self.conclude(after)

    def _compared(self, frame: Frame, group: Group, differ: list[Part], after: AfterUnlock, now: float) -> None:
        """What differs is sent again, a few times; the rail that brought it has erred."""
        if not differ:
            return
        self.count("checksums_differ", len(differ))
        if frame.avoid is not None and not frame.lane.closed:
            brought = frame.lane.ways[frame.avoid]
            brought.nic.meter.erred("checksum", len(differ))
            self.board.lost(brought, frame.posted_at, "checksum", now, down=False)
        checks = frame.checks + 1
        if checks >= self.config.verify_attempts or frame.lane.closed:
            for part in differ:
                doom(group, part[0], TransferState.FAILED, "checksum", after)
            return
        kind = FrameKind.WRITE if group.opcode is Opcode.WRITE else FrameKind.READ
        frame.lane.again(group, RetriedParts(group, kind, differ, 1, checks, frame.avoid))

    def _dropped(self, group: Group, cause: str, after: AfterUnlock, now: float) -> None:
        """No way is left for it."""
        group.lane.drop(group, cause, after)
        self._settle(group, after, now)

    def _settle(self, group: Group, after: AfterUnlock, now: float) -> None:
        """After slots of a group may have become final."""
        writes = group.opcode is Opcode.WRITE
        if writes and group.spoilt is not None:
            group.lane.epochs.spoil(group.epoch, group.spoilt)
        if group.open == 0 and self._live.pop(group.serial, None) is not None:
            del group.batch.groups[group.serial]
            if writes:
                for notice in group.lane.epochs.ended(group):
                    self._send_notice(group.lane, notice, after, now)

    # ── stopping ──────────────────────────────────────────────────────────────────────────────────

    def _send_notice(
        self,
        lane: PeerLink,
        notice: EndMark,
        after: AfterUnlock,
        now: float,
        sendings: int = 1,
        avoid: Rail | None = None,
    ) -> None:
        routes = lane.notice_routes()
        choice = self.board.choose(routes, len(notice.payload), now, avoid)
        cause = lane.closed or lane.epochs.why_spoiled(notice.epoch)
        if choice is None:
            cause = cause or lane.why_none(routes)
        if now >= notice.deadline:
            notice.end(TransferState.TIMEOUT, "timed out", after)
        elif cause or choice is None:
            notice.end(TransferState.FAILED, cause, after)
        else:  # small, and soon sent: it waits for no room
            frame = Frame(next(self.serials), self, lane, choice.way.rail, FrameKind.NOTIFY, notice.epoch, [], 0)
            frame.notice, frame.sendings = notice, sendings
            self.posting.launch(frame, after, now)

    def _stop(self, group: Group, state: TransferState, cause: str, after: AfterUnlock, now: float) -> None:
        """Nothing more of it is posted, and what has not left yet is taken back."""
        group.lane.unqueue(group)
        for frame in list(group.frames.values()):
            if frame.transport.recall(frame) and self.posting.answered(frame, now) is not None:
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
            with self.lock:
                now = self.clock()
                while not self._stopped and now < self._wake_at:
                    self._timer_changed.wait(min(self._wake_at - now, threading.TIMEOUT_MAX))
                    now = self.clock()
                if self._stopped:
                    return
            try:
                self.tick()
            except Exception:
                log.exception("time-outs")  # and on: without a timer nothing would ever be overdue again

    def tick(self) -> None:
        """Does what is due."""
        after = AfterUnlock()
        overdue: list[tuple[Frame, float]] = []
        with self.lock:
            now = self.clock()
            self._wake_at = now + TICK_S
            self._time_out(now, after, overdue)
            self.posting.reconsider(now)
            self.posting.pump(after, now)
            self._wake_at = self._next_due(now)
        for frame, idle_s in overdue:
            frame.transport.expire(frame, idle_s)
        self.conclude(after)

    def stop(self) -> None:
        """After the transports are closed: ends the timer, and whatever a transport still owes an answer for."""
        after = AfterUnlock()
        with self.lock:
            self._stopped = True
            self._timer_changed.notify_all()
            for group in list(self._live.values()):
                for slot in group.slots:
                    if not group.batch.states[slot].final:
                        finish(group, slot, TransferState.FAILED, "engine closed", after, drained=False)
                self._settle(group, after, self.clock())
            for notice in [frame.notice for frame in self.posting.inflight.values() if frame.notice is not None]:
                notice.end(TransferState.FAILED, "engine closed", after)
        self.conclude(after)

    def _next_due(self, now: float) -> float:
        deadline = self._deadlines[0][0] if self._deadlines else float("inf")
        return max(min(deadline, self.posting.next_due(now)), now + TICK_S)

    def _time_out(self, now: float, after: AfterUnlock, overdue: list[tuple[Frame, float]]) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            group = self._live.get(heapq.heappop(self._deadlines)[1])
            if group is not None and group.deadline <= now:
                group.deadline = float("inf")
                self._overdue(group, after, now, overdue)
        overdue += [(frame, self.config.ack_timeout_s) for frame in self.posting.silent(now)]

    def _overdue(self, group: Group, after: AfterUnlock, now: float, overdue: list[tuple[Frame, float]]) -> None:
        self._stop(group, TransferState.TIMEOUT, "timed out", after, now)
        if group.opcode is Opcode.READ:  # its local memory must be left alone before it is final
            overdue += [(frame, 0.0) for frame in group.frames.values()]
        else:
            for slot in group.slots:
                if not group.batch.states[slot].final:
                    state, cause = group.batch.doom[slot]
                    if state is not TransferState.TIMEOUT:
                        cause += " and not drained in time"
                    finish(group, slot, TransferState.TIMEOUT, cause, after, drained=False)
        self._settle(group, after, now)
