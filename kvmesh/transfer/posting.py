"""What is on its way, and what may be posted next. No lock, no clock: the core's lock is held around every call.

pump:  dealer.take ─▶ lane.cut ─▶ frame ─▶ launch       or the flow waits, parked where the room will be made
answered: the frame is off its way, and who waits for that room is woken
reconsider: flows that have waited long for one way may find another; rails that stand still hold no budget
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count, islice

from kvmesh.transfer.batch import AfterUnlock, Group
from kvmesh.transfer.config import EngineConfig
from kvmesh.transfer.rails import STALL_S, Nic, RailBoard, RailChoice, RailChoices
from kvmesh.transfer.send_queue import DeficitRoundRobin, SendFlow
from kvmesh.transfer.sieve import LruSieve
from kvmesh.transfer.transports.base import Frame

TICK_S = 0.001  # time-outs are looked after no more often
FAR_S = 60.0  # beyond it a flow does not wait for the clock, but for the way that it is parked at


class Posting:
    """`arm(when)`: `reconsider` or `silent` will have something to do then. `dropped(group, cause, after, now)`: no way
    is left for a group."""

    def __init__(
        self,
        config: EngineConfig,
        arm: Callable[[float], None],
        dropped: Callable[[Group, str, AfterUnlock, float], None],
        tally: Callable[[str], None],
    ) -> None:
        self.config = config
        self.board = RailBoard(config)
        self.dealer = DeficitRoundRobin((1.0, config.prefetch_share, config.background_share))
        self.inflight: OrderedDict[int, Frame] = OrderedDict()  # by the time since when each is silent
        self.endpoints: LruSieve[RailChoices] = LruSieve(config.max_endpoints)
        self._arm = arm
        self._dropped = dropped
        self._tally = tally
        self._serials = count()
        self._alarms: list[tuple[float, int, SendFlow, RailChoices]] = []  # heap: flows that may find a better way then
        self._crowded: dict[Nic, None] = {}  # NICs with flows that wait for room

    def pump(self, after: AfterUnlock, now: float) -> None:
        """Posts whatever may be posted now, the most urgent first."""
        dealer = self.dealer

        def dropped(group: Group, cause: str) -> None:
            self._dropped(group, cause, after, now)

        while (flow := dealer.take()) is not None:
            woken_by, flow.woken_by = flow.woken_by, None
            found = flow.lane.cut(flow, now, dropped)
            if isinstance(found, Frame):
                way = self.launch(found, after, now)
                dealer.spent(flow, found.burden, way.parked if self._must_wait(flow, way) else None)
                if way.nic.parked.count:
                    dealer.wake_one(way.nic)
                if woken_by is way.nic:
                    woken_by = None
            elif isinstance(found, RailChoice):
                dealer.park_at(flow, found.way.parked)
                if found.again_at - now < FAR_S:
                    when = max(found.again_at, now + TICK_S)
                    heapq.heappush(self._alarms, (when, next(self._serials), flow, found.way))
                    self._arm(when)
            elif found is not None:
                dealer.park_at(flow, found.parked)
                self._crowded[found] = None
                self._arm(now + STALL_S)
            if woken_by is not None and woken_by is not found:
                dealer.wake_one(woken_by)

    @staticmethod
    def _must_wait(flow: SendFlow, way: RailChoices) -> bool:
        """Whether its next frame could only find this way, without room: what `cut` would find out, for less."""
        if way.frames < way.rail.transport.limits.inflight_frames or way.rest_until or flow.retry:
            return False
        group = next(iter(flow.queue.values()), None)
        first = group.routes[0] if group is not None and group.routes else ()
        return len(first) == 1 and first[0] is way

    def launch(self, frame: Frame, after: AfterUnlock, now: float) -> RailChoices:
        """Puts it on its way; the transport gets it once the lock is released."""
        frame.posted_at = now
        self.inflight[frame.serial] = frame
        way = frame.way
        if way is None:
            way = frame.way = frame.lane.ways[frame.rail]
        self.board.posted(way, frame.burden, now)
        if frame.group is not None:
            frame.group.frames[frame.serial] = frame
        after.frames.append(frame)
        self._arm(now + self.config.ack_timeout_s)
        for other in self.endpoints.touch(way, self._idle):
            other.rail.transport.forget(other.segment, "evicted to make room", other.rail)
            self._tally("endpoints_evicted")
        return way

    @staticmethod
    def _idle(way: RailChoices) -> bool:
        return not way.frames

    def answered(self, frame: Frame, now: float) -> RailChoices | None:
        """Takes it off its way and wakes who waited for the room; None: it was answered for before."""
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

    def silent(self, now: float) -> Iterator[Frame]:
        """Frames without an answer for `ack_timeout_s`, each so often again."""
        while self.inflight:
            frame = next(iter(self.inflight.values()))
            if frame.posted_at + self.config.ack_timeout_s > now:
                break
            frame.posted_at = now
            self.inflight.move_to_end(frame.serial)
            yield frame

    def reconsider(self, now: float) -> None:
        """Before a `pump`: flows that wait for a way look for another; NICs no longer count bytes that do not move."""
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

    def next_due(self, now: float) -> float:
        """When `silent` or `reconsider` has something to do."""
        due = [frame.posted_at + self.config.ack_timeout_s for frame in islice(self.inflight.values(), 1)]
        due += [alarm[0] for alarm in self._alarms[:1]]
        due += [now + STALL_S] if self._crowded else []
        return min(due, default=float("inf"))
