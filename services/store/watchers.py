"""The watch stream sends a snapshot, then every change, to each watcher at its own pace. It decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from kvmesh.errors import NotLeader, Overloaded, Unavailable
from kvmesh.rpc.pb import store_pb2 as pb
from kvmesh.services.store import mapping
from kvmesh.services.store.domain import Change, Publish, Relay
from kvmesh.services.store.state import WatcherCatchUp
from kvmesh.telemetry import names

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Keeps the events that one watcher has not been sent yet: at most `max_events` of at most `max_bytes` together, so
    that a watcher that stands still costs no more memory."""

    def __init__(self, max_events: int, max_bytes: int) -> None:
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self.overrun = False

    def put(self, event: T, size: int) -> None:
        """Keeps `event`; when the box is full, drops everything and marks the box as overrun, so that a gap is never
        sent."""
        if self.overrun:
            return
        self._waiting.append((event, size))
        self._bytes += size
        if len(self._waiting) > self._max_events or self._bytes > self._max_bytes:
            self.overrun = True
            self._waiting.clear()
            self._bytes = 0

    def take(self, max_bytes: int) -> list[T]:
        """Returns waiting events in order: at least one if there is any, and no more than make `max_bytes`."""
        taken: list[T] = []
        size = 0
        while self._waiting and (not taken or size + self._waiting[0][1] <= max_bytes):
            event, each = self._waiting.popleft()
            taken.append(event)
            size += each
        self._bytes -= size
        return taken

    def __bool__(self) -> bool:
        return bool(self._waiting)


# A watcher that takes nothing for this long is ended, whatever its mailbox holds.
WRITE_TIMEOUT_S = 10.0
# Small events share a message up to this size; one alone may be a little larger (65,536 keys and their header).
MESSAGE_BYTES = 1 << 18
SNAPSHOT_BYTES = 1 << 18  # of one message of a snapshot
EVENT_OVERHEAD_BYTES = 128  # an event in memory beside its message, so that empty ones count too


class Watchers:
    """Serves all open watch streams. `max_events` and `max_bytes` bound what is kept for each. `leads` is asked before
    each message; `term` returns the leader's term, which each message carries."""

    def __init__(
        self,
        *,
        incarnation: int,
        interval_s: float,
        max_events: int,
        max_bytes: int,
        max_watchers: int,
        leads: Callable[[], bool],
        term: Callable[[], int],
    ) -> None:
        self._incarnation = incarnation
        self._interval_s = interval_s
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._max_watchers = max_watchers
        self._leads = leads
        self._term = term
        self._open: dict[Mailbox[pb.StoreEvent], asyncio.Event] = {}
        self._closing = False

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """Ends every stream: the server is about to stop, or does not lead any more."""
        self._closing = True
        for arrived in self._open.values():
            arrived.set()

    def publish(self, change: Publish | Relay) -> None:
        """Queues a change for every watcher."""
        if not self._open:
            return
        event = mapping.event_out(change)
        size = event.ByteSize() + EVENT_OVERHEAD_BYTES
        for mailbox, arrived in self._open.items():
            mailbox.put(event, size)
            arrived.set()

    async def follow(self, reading: WatcherCatchUp, context: Any) -> None:
        """Serves one watcher's whole stream. It must be called in the same turn of the loop in which `reading` was
        made.

        Raises Unavailable once the watcher has fallen behind or the master stops, and Overloaded when there are too
        many watchers.
        """
        if len(self._open) >= self._max_watchers:
            text = f"the store master has {self._max_watchers} watchers: max_watchers"
            raise Overloaded(text, retry_after_ms=1000)
        mailbox: Mailbox[pb.StoreEvent] = Mailbox(self._max_events, self._max_bytes)
        arrived = self._open[mailbox] = asyncio.Event()
        try:
            await self._snapshot(reading, mailbox, context)
            await self._changes(reading.seq, mailbox, arrived, context)
        finally:
            del self._open[mailbox]

    async def _snapshot(self, reading: WatcherCatchUp, mailbox: Mailbox[pb.StoreEvent], context: Any) -> None:
        message = self._message(reading.seq, snapshot=True)
        size = 0
        for event in _snapshot_events(reading):
            each = event.ByteSize()
            if size and size + each > SNAPSHOT_BYTES:
                message.more = True
                await self._send(context, message, mailbox)
                message, size = self._message(reading.seq, snapshot=True), 0
            message.events.append(event)
            size += each
            await asyncio.sleep(0)  # the next one takes a while to make
        await self._send(context, message, mailbox)

    async def _changes(self, seq: int, mailbox: Mailbox[pb.StoreEvent], arrived: asyncio.Event, context: Any) -> None:
        while True:
            if not mailbox:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await arrived.wait()
            arrived.clear()
            events = mailbox.take(MESSAGE_BYTES)
            seq = events[-1].seq if events else seq
            message = self._message(seq)
            message.events.extend(events)
            await self._send(context, message, mailbox)

    def _message(self, seq: int, *, snapshot: bool = False) -> pb.StoreEvents:
        return pb.StoreEvents(master_incarnation=self._incarnation, seq=seq, snapshot=snapshot, term=self._term())

    async def _send(self, context: Any, message: pb.StoreEvents, mailbox: Mailbox[pb.StoreEvent]) -> None:
        if self._closing:
            raise Unavailable("the store master is stopping, or leads no more")
        if not self._leads():
            raise NotLeader("this store master leads no more")
        if mailbox.overrun:
            names.STORE_OVERRUNS.inc()
            raise Unavailable(
                f"this watcher is over {self._max_events} events or {self._max_bytes} bytes behind: start over"
            )
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await context.write(message)
        except TimeoutError:
            raise Unavailable(f"this watcher took nothing for {WRITE_TIMEOUT_S:.0f} s: start over") from None
        await asyncio.sleep(0)  # a write that finds room does not wait


def _snapshot_events(reading: WatcherCatchUp) -> Iterator[pb.StoreEvent]:
    members: Iterable[Publish] = (Publish(reading.seq, Change.JOINED, member) for member in reading.members)
    yield from map(mapping.event_out, members)
    for announcement in reading.announcements():
        yield mapping.event_out(Relay(reading.seq, announcement))
