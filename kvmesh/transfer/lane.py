"""One opened segment as its writer and reader sees it: what waits, what is on its way, and the end marks.

    submit ─▶ queue (groups, by traffic class) ─┐
                                                ├─ cut ─▶ frames ─▶ transport ─▶ done ─▶ slots final
    lost and settled ─▶ retry (frames) ─────────┘                        └────▶ lost

Nothing here locks or does I/O: the engine's core lock is held around every call.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from kvmesh.transfer.api import Opcode, TransferState, TransferStatus
from kvmesh.transfer.batch import Aftermath, Group, Part, doom
from kvmesh.transfer.segment import SegmentDescriptor
from kvmesh.transfer.transport import Frame, FrameOwner, Kind, Rail, Transport

MAX_REST_S = 30.0
MAX_SPOILED_EPOCHS = 4096


@dataclass(eq=False, slots=True)
class Notice:
    """An end mark that waits for the groups in `waiting`, then travels as a frame."""

    serial: int
    epoch: int
    payload: bytes
    on_done: Callable[[TransferStatus], None] | None
    deadline: float
    waiting: set[int] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class _Epoch:
    groups: set[int] = field(default_factory=set)  # write groups that are not final
    notices: list[Notice] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Rest:
    until: float
    pause: float
    cause: str


@dataclass(eq=False, slots=True)
class Lane:
    """`rails` are the ways to the segment, in order of preference."""

    descriptor: SegmentDescriptor
    rails: tuple[Rail, ...]
    owner: FrameOwner
    serials: count[int]
    rest_s: float
    queue: list[tuple[int, int, Group]] = field(default_factory=list)
    retry: deque[Frame] = field(default_factory=deque)
    inflight: dict[int, Frame] = field(default_factory=dict)
    load: dict[Rail, int] = field(default_factory=dict)
    resting: dict[Rail, _Rest] = field(default_factory=dict)
    epochs: dict[int, _Epoch] = field(default_factory=dict)
    spoiled: dict[int, str] = field(default_factory=dict)  # epochs with a write that did not complete: no end mark
    closed: str = ""

    @property
    def name(self) -> str:
        return self.descriptor.name

    # ── groups and epochs ─────────────────────────────────────────────────────────────────────────

    def enqueue(self, group: Group) -> None:
        heapq.heappush(self.queue, (group.traffic_class, group.serial, group))
        if group.opcode is Opcode.WRITE:
            self.epochs.setdefault(group.epoch, _Epoch()).groups.add(group.serial)

    def spoil(self, epoch: int, cause: str) -> None:
        if len(self.spoiled) >= MAX_SPOILED_EPOCHS:
            self.spoiled.pop(next(iter(self.spoiled)))
        self.spoiled.setdefault(epoch, cause)

    def group_final(self, group: Group, after: Aftermath, now: float) -> None:
        """Lets go the end marks that waited for it."""
        if group.opcode is not Opcode.WRITE:
            return
        epoch = self.epochs[group.epoch]
        epoch.groups.discard(group.serial)
        for notice in epoch.notices:
            notice.waiting.discard(group.serial)
        ready = [n for n in epoch.notices if not n.waiting]
        epoch.notices = [n for n in epoch.notices if n.waiting]
        if not epoch.groups and not epoch.notices:
            del self.epochs[group.epoch]
        for notice in ready:
            self.send_notice(notice, after, now)

    def add_notice(self, notice: Notice, after: Aftermath, now: float) -> None:
        epoch = self.epochs.get(notice.epoch)
        if epoch is None or not epoch.groups:
            self.send_notice(notice, after, now)
        else:
            notice.waiting = set(epoch.groups)
            epoch.notices.append(notice)

    def send_notice(self, notice: Notice, after: Aftermath, now: float, sendings: int = 1) -> None:
        cause = self.spoiled.get(notice.epoch, "")
        if cause:
            cause = f"an earlier write of this epoch failed: {cause}"
        cause = self.closed or cause
        rail = self.pick(self.rails, now)
        if rail is None:
            cause = cause or self.why_none(self.rails)
        if now >= notice.deadline:
            self.end_notice(notice, TransferState.TIMEOUT, "timed out", after)
        elif cause or rail is None:
            self.end_notice(notice, TransferState.FAILED, cause, after)
        else:
            frame = Frame(next(self.serials), self.owner, self, rail, Kind.NOTIFY, notice.epoch, [], 0)
            frame.notice, frame.sendings = notice, sendings
            self._launch(frame, after, now)

    @staticmethod
    def end_notice(notice: Notice, state: TransferState, cause: str, after: Aftermath) -> None:
        on_done = notice.on_done
        if on_done is not None:
            status = TransferStatus(state, len(notice.payload) if state is TransferState.COMPLETED else 0, cause)
            after.callbacks.append(lambda: on_done(status))

    # ── rails ─────────────────────────────────────────────────────────────────────────────────────

    @property
    def transports(self) -> tuple[Transport, ...]:
        return tuple(dict.fromkeys(rail.transport for rail in self.rails))

    def pick(self, routes: tuple[Rail, ...], now: float) -> Rail | None:
        for rail in routes:
            rest = self.resting.get(rail)
            if rest is None or rest.until <= now:
                return rail
        return None

    def why_none(self, routes: tuple[Rail, ...]) -> str:
        causes = [f"{rail}: {self.resting[rail].cause}" for rail in routes if rail in self.resting]
        return "; ".join(causes) or f"no transport reaches {self.name}"

    def went_down(self, rail: Rail, cause: str, now: float) -> None:
        known = self.resting.get(rail)
        if known is not None and known.until > now:
            return
        pause = self.rest_s if known is None else min(known.pause * 2, MAX_REST_S)
        self.resting[rail] = _Rest(now + pause, pause, cause)

    # ── cutting ───────────────────────────────────────────────────────────────────────────────────

    def cut(self, after: Aftermath, now: float) -> list[Group]:
        """Cuts as many frames as the transports may carry now. Returns groups that became final meanwhile."""
        ended: list[Group] = []
        while self.retry or self.queue:
            group = self.retry[0].group if self.retry else self.queue[0][2]
            assert group is not None, "only frames of groups are retried here"
            rail = self.pick(group.routes, now)
            if rail is None or self.closed:
                self._drop(group, self.closed or self.why_none(group.routes), after)
                if group.open == 0:
                    ended.append(group)
                continue
            if self.load.get(rail, 0) >= rail.transport.limits.inflight_frames:
                break
            if self.retry:
                frame = self._again(self.retry.popleft(), group, rail)
            else:
                frame = self._next(group, rail)
                if group.at >= len(group.slots):
                    heapq.heappop(self.queue)
            if frame is not None:
                self._launch(frame, after, now)
        return ended

    def _launch(self, frame: Frame, after: Aftermath, now: float) -> None:
        frame.posted_at = now
        self.inflight[frame.serial] = frame
        self.load[frame.rail] = self.load.get(frame.rail, 0) + 1
        after.frames.append(frame)

    def _drop(self, group: Group, cause: str, after: Aftermath) -> None:
        """Nothing more of this group is posted; its unfinished slots fail."""
        self.unqueue(group)
        for slot in group.slots:
            doom(group, slot, TransferState.FAILED, cause, after)

    def unqueue(self, group: Group) -> None:
        """Stops cutting it."""
        group.at = len(group.slots)
        if any(entry[2] is group for entry in self.queue):
            self.queue = [entry for entry in self.queue if entry[2] is not group]
            heapq.heapify(self.queue)
        if any(frame.group is group for frame in self.retry):
            self.retry = deque(frame for frame in self.retry if frame.group is not group)

    def _again(self, old: Frame, group: Group, rail: Rail) -> Frame | None:
        batch = group.batch
        parts = [p for p in old.parts if not batch.states[p[0]].final and p[0] not in batch.doom]
        if not parts:
            return None
        frame = self._frame(group, rail, parts, sum(p[3] for p in parts))
        frame.sendings = old.sendings + 1
        return frame

    def _next(self, group: Group, rail: Rail) -> Frame | None:
        limits, batch = rail.transport.limits, group.batch
        parts: list[Part] = []
        room = limits.frame_bytes
        at, skip, total = group.at, group.skip, len(group.slots)
        slots, addresses, offsets = group.slots, group.addresses, group.offsets
        lengths, states, dooms = batch.lengths, batch.states, batch.doom
        slice_bytes = limits.slice_bytes
        waiting, pending = TransferState.WAITING, TransferState.PENDING
        tail = slice_bytes + slice_bytes // 4  # a short tail rides with the last slice
        while at < total and room > 0 and len(parts) < limits.frame_parts:
            slot = slots[at]
            state = states[slot]
            if (state is not waiting and state is not pending) or slot in dooms:
                at, skip = at + 1, 0
                continue
            left = lengths[slot] - skip
            take = left if left <= tail else slice_bytes
            if take > room and parts:
                break
            parts.append((slot, addresses[at] + skip, offsets[at] + skip, take))
            room -= take
            if take == left:
                at, skip = at + 1, 0
            else:
                skip += take
        group.at, group.skip = at, skip
        return self._frame(group, rail, parts, limits.frame_bytes - room) if parts else None

    def _frame(self, group: Group, rail: Rail, parts: list[Part], nbytes: int) -> Frame:
        batch = group.batch
        flight, states, pending = batch.flight, batch.states, TransferState.PENDING
        for slot, _, _, _ in parts:
            flight[slot] += 1
            states[slot] = pending
        kind = Kind.WRITE if group.opcode is Opcode.WRITE else Kind.READ
        frame = Frame(next(self.serials), self.owner, self, rail, kind, group.epoch, parts, nbytes)
        frame.group = group
        return frame
