"""Orders that are carried out to their end, though whoever gave them goes away: gRPC cancels a call with its caller."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class RunningOrders:
    """Owns the orders that are under way. Each has a deadline of its own; all belong to one event loop and end with
    it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def carry_out(self, order: Coroutine[Any, Any, Answer]) -> Answer:
        """Returns what `order` returns, and raises what it raises. It goes on when this call is cancelled."""
        task = asyncio.create_task(order)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                task.add_done_callback(_log_end)
            raise


def _log_end(task: asyncio.Task[Any]) -> None:
    """Tells how an order ended whose caller cannot hear it any more."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("an order whose caller has gone failed: %s", error)
