"""Mailboxes of the member stream: bounded, so that a watcher that stands still costs no memory."""

from __future__ import annotations

from collections import deque

from services.store.state import Publish


class Mailbox:
    """What one watcher has not been sent yet."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[Publish] = deque()
        self.overrun = False

    def put(self, event: Publish) -> None:
        """Keep `event`, or, when the box is full, drop everything and mark it overrun: a gap is never sent."""
        if self.overrun:
            return
        if len(self._waiting) >= self._limit:
            self.overrun = True
            self._waiting.clear()
        else:
            self._waiting.append(event)

    def take(self) -> list[Publish]:
        """Everything waiting, in order."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken
