"""Mailboxes of the watch stream: bounded, so that a watcher that stands still costs no memory."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """What one watcher has not been sent yet: at most `max_events` that make at most `max_bytes`."""

    def __init__(self, max_events: int, max_bytes: int) -> None:
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[T, int]] = deque()
        self._bytes = 0
        self.overrun = False

    def put(self, event: T, size: int) -> None:
        """Keep `event`, or, when the box is full, drop everything and mark it overrun: a gap is never sent."""
        if self.overrun:
            return
        self._waiting.append((event, size))
        self._bytes += size
        if len(self._waiting) > self._max_events or self._bytes > self._max_bytes:
            self.overrun = True
            self._waiting.clear()
            self._bytes = 0

    def take(self, max_bytes: int) -> list[T]:
        """What waits, in order, at least one event if there is any, and no more once they make `max_bytes`."""
        taken: list[T] = []
        size = 0
        while self._waiting and (not taken or size + self._waiting[0][1] <= max_bytes):
            event, each = self._waiting.popleft()
            taken.append(event)
            size += each
        self._bytes -= size
        return taken

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)
