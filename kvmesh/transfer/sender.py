"""From requests to frames on their way, and from answers to requests that are final: all under one lock.

    submit ─▶ groups ─▶ pump: the dealer says whose turn it is ─▶ PeerLink.cut: slices, and the rail ─▶ conclude: post
              (batch)        (send_queue)                         (peer_link, rails)                    (transport)
    frame_done, frame_lost ─▶ RequestGroup.landed, strayed, verified: final slots, parts to send again ─▶ pump

A flow that finds no room is parked where room will be made, and woken by the answer that makes it.

Rules that keep it simple: transports call `frame_done` and `frame_lost` with none of their locks held; the sender calls
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

import asyncio
import heapq
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice

from kvmesh.errors import TransferError
from kvmesh.transfer import checks
from kvmesh.transfer.api import BatchId, Opcode, TrafficClass, TransferRequest, TransferState
from kvmesh.transfer.batch import AfterUnlock, Batch, Part, RequestGroup, RetriedParts, local_sums
from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.epochs import Closed, EndMark
from kvmesh.transfer.peer_link import PeerLink
from kvmesh.transfer.rails import STALL_S, LruSieve, Nic, RailBoard, RailChoice, RailState, Topology
from kvmesh.transfer.segment import LocalRegion, LocalSegment
from kvmesh.transfer.send_queue import DeficitRoundRobin, SendFlow, rank_of
from kvmesh.transfer.stats import EngineStats, bytes_counter, nic_stats, rail_stats
from kvmesh.transfer.transports.base import Frame, FrameKind, Rail

log = logging.getLogger(__name__)

TICK_S = 0.001  # time-outs are looked after no more often
FAR_S = 60.0  # beyond it a flow does not wait for the clock, but for the rail that it is parked at
MAX_REFUSED = 1024  # segments of which it is known why they were not opened
HELP_S = 0.02  # a caller that waits longer sleeps: what took so long need not be sooner


class Sender:
    """The links to peers, the batches and their time-outs. `run` is the body of the engine's timer thread. Unless its
    docstring says otherwise, a method that takes `after` is called with the lock held, and `conclude(after)` must
    follow once it is released."""

    def __init__(
        self, config: EngineConfig, segment: LocalSegment, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.segment = segment
        self.clock = clock
        self.lock = threading.Lock()
        self.serials = count(1)
        self.links: dict[str, PeerLink] = {}
        self.refused: dict[str, str] = {}  # why no transport reaches a segment, by its name
        self.batches: dict[BatchId, Batch] = {}
        self.counters: dict[str, int] = {}
        self.finals: dict[tuple[int, TransferState], int] = {}
        self.topology: Topology = {}  # of this host; set before the first request
        self.board = RailBoard(config)
        self.dealer = DeficitRoundRobin((1.0, config.prefetch_share, config.background_share))
        self.inflight: OrderedDict[int, Frame] = OrderedDict()  # by the time since when each is silent
        self.endpoints: LruSieve[RailState] = LruSieve(config.max_endpoints)
        self._closed = Closed()
        self._next_batch = 1
        self._live: dict[int, RequestGroup] = {}
        self._deadlines: list[tuple[float, int]] = []  # heap of (deadline, group); of final groups, too
        self._comparing: dict[int, LocalRegion] = {}  # by frame: memory whose checksum is being taken
        self._alarm_serials = count()
        self._alarms: list[tuple[float, int, SendFlow, RailState]] = []  # heap: flows that may find a better rail then
        self._crowded: dict[Nic, None] = {}  # NICs with flows that wait for room
        self._timer_changed = threading.Condition(self.lock)
        self._wake_at = float("inf")
        self._stopped = False

    # ── links to peers ────────────────────────────────────────────────────────────────────────────

    def opened(self, segment: str) -> PeerLink:
        """Returns the link of an open segment. Raises TransferError when it is not open, with the reason where no
        transport reaches it. The caller holds the lock."""
        link = self.links.get(checks.name("segment", segment))
        if link is None:
            raise TransferError(self.refused.get(segment, f"segment={segment!r}: not open"), field="segment")
        return link

    def refuse_segment(self, segment: str, why: str) -> TransferError:
        """Returns the error of a segment that no transport reaches, and keeps the reason. The caller does not hold the
        lock."""
        with self.lock:
            self.refused[segment] = why
            if len(self.refused) > MAX_REFUSED:
                del self.refused[next(iter(self.refused))]
        return TransferError(why, field="segment")

    def open_link(self, link: PeerLink) -> None:
        """Adds a link unless one of its name is open. The caller holds the lock."""
        self.refused.pop(link.name, None)
        if self.links.setdefault(link.name, link) is link:
            link.epochs.spoiled = self._closed.take(link.descriptor.token)

    def close_link(self, link: PeerLink, cause: str, after: AfterUnlock) -> None:
        """Fails what is queued on a link; the caller then has the transports forget the segment. The caller holds the
        lock."""
        now = self.clock()
        link.closed = cause
        link.epochs.close(cause)
        self._closed.keep(link.descriptor.token, link.epochs.spoiled)
        self.links.pop(link.name, None)
        for way in link.ways.values():
            self.endpoints.remove(way)
        for flow in link.flows:
            groups = list(flow.queue.values()) + [again.group for again in flow.retry]
            flow.retry.clear()
            for group in groups:
                link.drop(group, cause, after)
                self._settle(group, after, now)
        self._pump(after, now)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────

    def new_batch(self, capacity: int) -> BatchId:
        with self.lock:
            batch = Batch(BatchId(self._next_batch), capacity)
            self._next_batch += 1
            self.batches[batch.id] = batch
            return batch.id

    def batch(self, batch_id: BatchId) -> Batch:
        """Returns the batch of this id. Raises TransferError when it is unknown or was freed. The caller holds the
        lock."""
        batch = self.batches.get(batch_id)
        if batch is None:
            raise TransferError(f"batch={batch_id}: unknown or freed", field="batch")
        return batch

    def submit(self, batch_id: BatchId, requests: Sequence[TransferRequest], deadline: float) -> None:
        """Queues requests, and posts what may be posted now. Raises TransferError, and queues nothing, when a request
        is malformed or the batch has no room for all. The caller must not hold the lock."""
        after = AfterUnlock()
        with self.lock:
            batch = self.batch(batch_id)
            if len(batch.states) + len(requests) > batch.capacity:
                raise TransferError(f"batch={batch_id}: over its {batch.capacity} requests", field="requests")
            groups = self._grouped(batch, requests, deadline)
            batch.add(requests)
            self._enqueue(batch, groups, after)
        self.conclude(after)

    def _grouped(self, batch: Batch, requests: Sequence[TransferRequest], deadline: float) -> list[RequestGroup]:
        """Checks the requests and groups those that differ in their addresses alone, in order. Raises TransferError for
        a malformed one."""
        groups: dict[tuple[object, ...], RequestGroup] = {}
        group: RequestGroup | None = None
        slot = len(batch.states)
        same: tuple[object, ...] = ()
        near = near_end = far = far_end = 0
        for request in requests:
            address, offset, length = request.local_address, request.remote_offset, request.length
            kin = (request.segment, request.opcode, request.handoff_epoch, request.traffic_class, request.verify)
            if not (
                group is not None
                and kin == same
                and length > 0
                and near <= address
                and address + length <= near_end
                and far <= offset
                and offset + length <= far_end
            ):
                group = self._new_group(batch, request, groups, deadline)
                same = kin
                near, near_end = group.local.address, group.local.address + group.local.length
                far, far_end = group.remote.base_offset, group.remote.base_offset + group.remote.length
            group.slots.append(slot)
            group.addresses.append(address)
            group.offsets.append(offset)
            group.todo += length
            slot += 1
        for group in groups.values():
            group.open = len(group.slots)
        return list(groups.values())

    def _new_group(
        self,
        batch: Batch,
        request: TransferRequest,
        groups: dict[tuple[object, ...], RequestGroup],
        deadline: float,
    ) -> RequestGroup:
        link = self.opened(request.segment)
        epoch = checks.epoch_of(request)
        if request.length <= 0:
            raise TransferError(f"length={request.length}: must be positive", field="length")
        local = self.segment.by_address(request.local_address, request.length)
        if local is None:
            raise TransferError(
                f"local_address={request.local_address:#x}: {request.length} bytes there are in no registered region",
                field="local_address",
            )
        remote = link.descriptor.region_at(request.remote_offset, request.length)
        if remote is None:
            raise TransferError(
                f"remote_offset={request.remote_offset}: {request.length} bytes there are not in one region of "
                f"{request.segment!r}",
                field="remote_offset",
            )
        host = local.on_host and checks.on_host(remote.location)
        if not (host or link.device_rails):
            field, value, where = (
                ("local_address", f"{request.local_address:#x}", local.public.location)
                if not local.on_host
                else ("remote_offset", str(request.remote_offset), f"{remote.location} of {request.segment!r}")
            )
            names = ", ".join(transport.name for transport in link.transports) or "none"
            why = f"memory of {where} is reached by rdma alone, and there is no rdma path between the two"
            raise TransferError(f"{field}={value}: {why} (paths: {names})", field=field)
        if request.verify and not host:
            raise TransferError("verify=True: only host memory can be verified", field="verify")
        rank = rank_of(request.traffic_class)
        key = (link.name, request.opcode, epoch, rank, request.verify, local.base, remote.base_offset)
        group = groups.get(key)
        if group is None:
            group = groups[key] = RequestGroup(
                next(self.serials),
                link,
                batch,
                request.opcode,
                epoch,
                local,
                remote,
                link.routes(
                    FrameKind.WRITE if request.opcode is Opcode.WRITE else FrameKind.READ, local, remote, self.topology
                ),
                deadline,
                [],
                [],
                [],
                rank,
                request.verify,
            )
        return group

    def _enqueue(self, batch: Batch, groups: Sequence[RequestGroup], after: AfterUnlock) -> None:
        now = self.clock()
        for group in groups:
            self._live[group.serial] = group
            batch.groups[group.serial] = group
            heapq.heappush(self._deadlines, (group.deadline, group.serial))
            group.link.enqueue(group)
        self._arm(self._deadlines[0][0])
        if len(self._deadlines) > 64 + 2 * len(self._live):
            self._deadlines = [(group.deadline, serial) for serial, group in self._live.items()]
            heapq.heapify(self._deadlines)
        self._pump(after, now)

    def notify(self, link: PeerLink, notice: EndMark, after: AfterUnlock) -> None:
        """Sends an end mark once the writes before it are final."""
        if not link.epochs.add(notice):
            self._send_notice(link, notice, after, self.clock())

    def cancel(self, batch: Batch, state: TransferState, cause: str, after: AfterUnlock) -> None:
        """Stops the requests of a batch that are not final."""
        now = self.clock()
        for group in list(batch.groups.values()):
            self._stop(group, state, cause, after, now)
            self._settle(group, after, now)
        self._pump(after, now)

    def in_use(self, region: LocalRegion) -> bool:
        """Says whether an unfinished request uses the region, or a frame that is still on its way for one that timed
        out. The caller holds the lock."""
        flying = (frame.group for frame in self.inflight.values() if frame.group is not None)
        return region in {group.local for group in (*self._live.values(), *flying)} | set(self._comparing.values())

    def count(self, what: str, n: int = 1) -> None:
        """Adds to a counter of the statistics. Updates that race may be lost, so no decision may rest on it."""
        self.counters[what] = self.counters.get(what, 0) + n

    def stats(self) -> EngineStats:
        with self.lock:
            return EngineStats(
                tuple(nic_stats(nic) for nic in self.board.nics.values()),
                rail_stats(self.links.values(), self.clock()),
                {(TrafficClass(rank), state): n for (rank, state), n in self.finals.items()},
                tuple(self.dealer.backlog),
                len(self._live),
                dict(self.counters),
            )

    # ── posting ──────────────────────────────────────────────────────────────────────────────────────

    def _pump(self, after: AfterUnlock, now: float) -> None:
        """Posts whatever may be posted now, the most urgent first."""
        dealer = self.dealer

        def dropped(group: RequestGroup, cause: str) -> None:
            self._dropped(group, cause, after, now)

        while (flow := dealer.take()) is not None:
            woken_by, flow.woken_by = flow.woken_by, None
            found = flow.link.cut(flow, now, dropped)
            if isinstance(found, Frame):
                way = self._launch(found, after, now)
                dealer.spent(flow, found.burden, way.parked if _must_wait(flow, way) else None)
                if way.nic.parked.count:
                    dealer.wake_one(way.nic)
                if woken_by is way.nic:
                    woken_by = None
            elif isinstance(found, RailChoice):
                dealer.park_at(flow, found.way.parked)
                if found.again_at - now < FAR_S:
                    when = max(found.again_at, now + TICK_S)
                    heapq.heappush(self._alarms, (when, next(self._alarm_serials), flow, found.way))
                    self._arm(when)
            elif found is not None:
                dealer.park_at(flow, found.parked)
                self._crowded[found] = None
                self._arm(now + STALL_S)
            if woken_by is not None and woken_by is not found:
                dealer.wake_one(woken_by)

    def _launch(self, frame: Frame, after: AfterUnlock, now: float) -> RailState:
        """Notes that a frame is on its way; its transport gets it once the lock is released."""
        frame.posted_at = now
        self.inflight[frame.serial] = frame
        way = frame.way
        if way is None:
            way = frame.way = frame.link.ways[frame.rail]
        self.board.posted(way, frame.burden, now)
        if frame.group is not None:
            frame.group.frames[frame.serial] = frame
        after.frames.append(frame)
        self._arm(now + self.config.ack_timeout_s)
        for other in self.endpoints.touch(way, _idle):
            other.rail.transport.forget(other.segment, "evicted to make room", other.rail)
            self.count("endpoints_evicted")
        return way

    def conclude(self, after: AfterUnlock) -> None:
        """Hands frames to their transports and calls callbacks. The lock must not be held."""
        while after.frames or after.callbacks:
            frames, after.frames = after.frames, []
            for frame in frames:
                try:
                    frame.transport.post(frame)
                except Exception as err:
                    log.exception("%s: a frame to %s could not be posted", frame.rail, frame.link.name)
                    frame.lost(f"{frame.rail}: {err}", settled=False, down=True)
            callbacks, after.callbacks = after.callbacks, []
            for callback in callbacks:
                try:
                    callback()
                except Exception:
                    log.exception("callback of a transfer raised")

    def _answered(self, frame: Frame, now: float) -> RailState | None:
        """Notes that a frame is not on its way any more, and wakes flows that waited for its room. Returns None when it
        was answered before."""
        if frame.answered:
            return None
        frame.answered = True
        del self.inflight[frame.serial]
        way = frame.way
        assert way is not None, "it was launched"
        self.board.answered(way, frame.burden, now)
        if frame.group is not None:
            del frame.group.frames[frame.serial]
        if way.parked:
            self.dealer.wake_all(way.parked)
        if way.nic.parked.count:
            self.dealer.wake_one(way.nic)
        return way

    # ── what transports report ────────────────────────────────────────────────────────────────────

    def frame_done(self, frame: Frame, refused: Sequence[int], cause: str) -> None:
        if frame.kind is FrameKind.CHECKSUM and frame.group is not None:
            self._compare(frame, frame.group, refused, cause)
            return
        after = AfterUnlock()
        with self.lock:
            now = self.clock()
            way = self._answered(frame, now)
            if way is None:
                return
            self._arrived(frame, way, now)
            if frame.notice is not None:
                frame.notice.end(TransferState.FAILED if cause else TransferState.COMPLETED, cause, after)
            elif frame.group is not None:
                self._landed(frame, frame.group, refused, cause, after)
                self._settle(frame.group, after, now)
            self._pump(after, now)
        self.conclude(after)

    def frame_lost(self, frame: Frame, cause: str, *, settled: bool, down: bool) -> None:
        after = AfterUnlock()
        with self.lock:
            now = self.clock()
            way = self._answered(frame, now)
            if way is None:
                return
            link = frame.link
            self.count(f"{frame.transport.name}.frames_lost")
            way.nic.meter.erred("down" if down else "lost" if settled else "unsettled")
            if not link.closed and self.board.lost(way, frame.posted_at, cause, now, down=down):
                self.count("rails_rested")
            if frame.notice is not None:
                if frame.sendings >= self.config.max_sendings and not down:
                    frame.notice.end(TransferState.FAILED, cause, after)
                else:
                    self._send_notice(link, frame.notice, after, now, frame.sendings + 1, frame.rail)
            elif frame.group is not None:
                self._strayed(frame, frame.group, cause, settled, after)
                self._settle(frame.group, after, now)
            self._pump(after, now)
        self.conclude(after)

    def _arrived(self, frame: Frame, way: RailState, now: float) -> None:
        rank = 0 if frame.group is None else frame.group.rank
        nbytes = frame.burden
        way.class_bytes[rank] += nbytes
        way.nic.meter.arrived(frame.kind, rank, nbytes, len(frame.parts), now - frame.posted_at)
        self.board.landed(way, nbytes, frame.posted_at, now)

    def _landed(
        self, frame: Frame, group: RequestGroup, refused: Sequence[int], cause: str, after: AfterUnlock
    ) -> None:
        carried, turned_away, to_verify = group.landed(frame, refused, cause, after)
        if turned_away:
            self.count("parts_refused", turned_away)
            frame.link.ways[frame.rail].nic.meter.erred(f"refused: {cause}", turned_away)
        if to_verify:
            frame.link.again(group, RetriedParts(group, FrameKind.CHECKSUM, to_verify, 1, frame.checks, frame.rail))
        self.count(bytes_counter(frame.rail.transport.name, frame.kind), carried)
        rails = group.batch.rails
        rails[frame.rail] = rails.get(frame.rail, 0) + carried

    def _strayed(self, frame: Frame, group: RequestGroup, cause: str, settled: bool, after: AfterUnlock) -> None:
        again = frame.sendings < self.config.max_sendings and not frame.link.closed
        if group.strayed(frame, cause, settled=settled, again=again, after=after):
            self.count("frames_resent")
            group.batch.resent += 1
            avoid = frame.avoid if frame.kind is FrameKind.CHECKSUM else frame.rail
            resend = RetriedParts(group, frame.kind, list(frame.parts), frame.sendings + 1, frame.checks, avoid)
            frame.link.again(group, resend)

    def _compare(self, frame: Frame, group: RequestGroup, refused: Sequence[int], cause: str) -> None:
        """Compares checksums after a CHECKSUM frame was answered. The local memory is read without the lock, and stays
        registered meanwhile."""
        with self.lock:
            if frame.answered:
                return
            self._comparing[frame.serial] = group.local
        sums: list[int] = []
        try:
            sums = local_sums(frame)
        finally:
            after = AfterUnlock()
            with self.lock:
                del self._comparing[frame.serial]
                now = self.clock()
                way = self._answered(frame, now)
                if way is not None:
                    self._arrived(frame, way, now)
                    self._compared(frame, group, group.verified(frame, refused, cause, sums, after), after, now)
                    self._settle(group, after, now)
                self._pump(after, now)
            self.conclude(after)

    def _compared(self, frame: Frame, group: RequestGroup, differ: list[Part], after: AfterUnlock, now: float) -> None:
        """Sends parts that differ again, at most `verify_attempts` times, and counts a loss of the rail that brought
        them."""
        if not differ:
            return
        self.count("checksums_differ", len(differ))
        if frame.avoid is not None and not frame.link.closed:
            brought = frame.link.ways[frame.avoid]
            brought.nic.meter.erred("checksum", len(differ))
            self.board.lost(brought, frame.posted_at, "checksum", now, down=False)
        checks = frame.checks + 1
        if checks >= self.config.verify_attempts or frame.link.closed:
            for part in differ:
                group.doom(part[0], TransferState.FAILED, "checksum", after)
            return
        kind = FrameKind.WRITE if group.opcode is Opcode.WRITE else FrameKind.READ
        frame.link.again(group, RetriedParts(group, kind, differ, 1, checks, frame.avoid))

    def _dropped(self, group: RequestGroup, cause: str, after: AfterUnlock, now: float) -> None:
        """Fails a group that no rail can carry any more."""
        group.link.drop(group, cause, after)
        self._settle(group, after, now)

    def _settle(self, group: RequestGroup, after: AfterUnlock, now: float) -> None:
        """Notes slots of a group that became final, and sends end marks that waited for it."""
        writes = group.opcode is Opcode.WRITE
        if writes and group.spoilt is not None:
            group.link.epochs.spoil(group.epoch, group.spoilt)
        if group.open == 0 and self._live.pop(group.serial, None) is not None:
            del group.batch.groups[group.serial]
            if writes:
                for notice in group.link.epochs.ended(group):
                    self._send_notice(group.link, notice, after, now)

    # ── end marks, and stopping ──────────────────────────────────────────────────────────────────────

    def _send_notice(
        self,
        link: PeerLink,
        notice: EndMark,
        after: AfterUnlock,
        now: float,
        sendings: int = 1,
        avoid: Rail | None = None,
    ) -> None:
        routes = link.notice_routes()
        choice = self.board.choose(routes, len(notice.payload), now, avoid)
        cause = link.closed or link.epochs.why_spoiled(notice.epoch)
        if choice is None:
            cause = cause or link.why_none(routes)
        if now >= notice.deadline:
            notice.end(TransferState.TIMEOUT, "timed out", after)
        elif cause or choice is None:
            notice.end(TransferState.FAILED, cause, after)
        else:  # small, and soon sent: it waits for no room
            frame = Frame(next(self.serials), self, link, choice.way.rail, FrameKind.NOTIFY, notice.epoch, [], 0)
            frame.notice, frame.sendings = notice, sendings
            self._launch(frame, after, now)

    def _stop(self, group: RequestGroup, state: TransferState, cause: str, after: AfterUnlock, now: float) -> None:
        """Stops posting a group, and recalls frames that have not left yet."""
        group.link.unqueue(group)
        for frame in list(group.frames.values()):
            if frame.transport.recall(frame) and self._answered(frame, now) is not None:
                for slot, _, _, _ in frame.parts:
                    group.batch.flight[slot] -= 1
        for slot in group.slots:
            group.doom(slot, state, cause, after)

    # ── waiting for a batch ──────────────────────────────────────────────────────────────────────────

    def on_final(self, batch_id: BatchId, callback: Callable[[], None]) -> None:
        """Calls `callback` once every request submitted so far is final, or now if they are."""
        with self.lock:
            batch = self.batch(batch_id)
            if batch.open:
                batch.callbacks.append(callback)
                return
        callback()

    async def wait(self, batch_id: BatchId) -> None:
        """Waits until every request submitted so far is final, which their time-outs bound."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def finished() -> None:
            if not done.done():
                done.set_result(None)

        def from_engine() -> None:
            try:
                loop.call_soon_threadsafe(finished)
            except RuntimeError:
                pass  # the loop is closed: nobody waits any more

        self.on_final(batch_id, from_engine)
        await done

    def wait_sync(self, batch_id: BatchId, timeout_s: float) -> bool:
        """Blocks until every request submitted so far is final; returns False when `timeout_s` passes first. While a
        frame of the batch is on its way the calling thread itself reads the answer, which is sooner than being woken by
        the thread that reads it."""
        deadline = time.monotonic() + timeout_s
        gate = threading.Lock()  # much cheaper than an Event
        gate.acquire()
        with self.lock:
            batch = self.batch(batch_id)
            if not batch.open:
                return True
            batch.callbacks.append(gate.release)
        until = time.monotonic() + min(timeout_s, HELP_S)
        while batch.open and (left := until - time.monotonic()) > 0:
            with self.lock:
                frame = batch.frame()
            if frame is None:
                break
            frame.transport.assist(frame, left)
            if not frame.answered:
                break
        if gate.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return True
        with self.lock:
            if gate.release in batch.callbacks:
                batch.callbacks.remove(gate.release)
                return False
        return True

    # ── time ──────────────────────────────────────────────────────────────────────────────────────

    def _arm(self, when: float) -> None:
        if when < self._wake_at:
            self._wake_at = when
            self._timer_changed.notify()

    def run(self) -> None:
        """Runs time-outs until `stop`. It sleeps until the earliest time-out that may be due, so an idle engine never
        wakes."""
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
        """Handles time-outs that are due."""
        after = AfterUnlock()
        overdue: list[tuple[Frame, float]] = []
        with self.lock:
            now = self.clock()
            self._wake_at = now + TICK_S
            self._time_out(now, after, overdue)
            self._reconsider(now)
            self._pump(after, now)
            self._wake_at = self._next_due(now)
        for frame, idle_s in overdue:
            frame.transport.expire(frame, idle_s)
        self.conclude(after)

    def stop(self) -> None:
        """Ends the timer, and every request that a transport has not answered. The transports are closed by then."""
        after = AfterUnlock()
        with self.lock:
            self._stopped = True
            self._timer_changed.notify_all()
            for group in list(self._live.values()):
                for slot in group.slots:
                    if not group.batch.states[slot].final:
                        group.finish(slot, TransferState.FAILED, "engine closed", after, drained=False)
                self._settle(group, after, self.clock())
            for notice in [frame.notice for frame in self.inflight.values() if frame.notice is not None]:
                notice.end(TransferState.FAILED, "engine closed", after)
        self.conclude(after)

    def _silent(self, now: float) -> Iterator[Frame]:
        """Yields the frames that have had no answer for `ack_timeout_s`; each comes up again after as long."""
        while self.inflight:
            frame = next(iter(self.inflight.values()))
            if frame.posted_at + self.config.ack_timeout_s > now:
                break
            frame.posted_at = now
            self.inflight.move_to_end(frame.serial)
            yield frame

    def _reconsider(self, now: float) -> None:
        """Lets flows that wait for a rail choose again, and takes stalled bytes out of NIC budgets. `_pump` must
        follow."""
        while self._alarms and self._alarms[0][0] <= now:
            _, _, flow, way = heapq.heappop(self._alarms)
            if flow in way.parked:
                way.parked.remove(flow)
                self.dealer.ready.put(flow)
        for nic in list(self._crowded):
            self.board.stalls(nic, now)
            self.dealer.wake_one(nic)
            if not nic.parked.count:
                del self._crowded[nic]

    def _next_due(self, now: float) -> float:
        due = [self._deadlines[0][0]] if self._deadlines else []
        due += [frame.posted_at + self.config.ack_timeout_s for frame in islice(self.inflight.values(), 1)]
        due += [alarm[0] for alarm in self._alarms[:1]]
        due += [now + STALL_S] if self._crowded else []
        return max(min(due, default=float("inf")), now + TICK_S)

    def _time_out(self, now: float, after: AfterUnlock, overdue: list[tuple[Frame, float]]) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            group = self._live.get(heapq.heappop(self._deadlines)[1])
            if group is not None and group.deadline <= now:
                group.deadline = float("inf")
                self._overdue(group, after, now, overdue)
        overdue += [(frame, self.config.ack_timeout_s) for frame in self._silent(now)]

    def _overdue(self, group: RequestGroup, after: AfterUnlock, now: float, overdue: list[tuple[Frame, float]]) -> None:
        self._stop(group, TransferState.TIMEOUT, "timed out", after, now)
        if group.opcode is Opcode.READ:  # its local memory must be left alone before it is final
            overdue += [(frame, 0.0) for frame in group.frames.values()]
        else:
            for slot in group.slots:
                if not group.batch.states[slot].final:
                    state, cause = group.batch.doom[slot]
                    if state is not TransferState.TIMEOUT:
                        cause += " and not drained in time"
                    group.finish(slot, TransferState.TIMEOUT, cause, after, drained=False)
        self._settle(group, after, now)


def _must_wait(flow: SendFlow, way: RailState) -> bool:
    """Says whether the flow's next frame could use only this rail, which has no room. `cut` would find out the same at
    a higher cost."""
    if way.frames < way.rail.transport.limits.inflight_frames or way.rest_until or flow.retry:
        return False
    group = next(iter(flow.queue.values()), None)
    first = group.routes[0] if group is not None and group.routes else ()
    return len(first) == 1 and first[0] is way


def _idle(rail: RailState) -> bool:
    return not rail.frames
